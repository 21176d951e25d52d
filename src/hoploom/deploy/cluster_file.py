"""A cluster: its hosts, what runs on each, and who starts it. What cluster.toml or cluster.yaml says, checked.

A field made by `key` is a key of the file: the reader and the documentation take it, its rule and its help from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hoploom.config import rules
from hoploom.config.keys import key
from hoploom.deploy import rules as own_rules
from hoploom.serve.address import join_address

Executor = Literal["local", "ssh", "slurm", "kubernetes"]
Mode = Literal["worker", "server-client", "none"]

EXECUTORS = ("local", "ssh", "slurm", "kubernetes")
MODES = ("worker", "server-client", "none")


@dataclass(frozen=True)
class Security:
    """How servers and trainers know each other: paths of files as each host has them, never what is in them."""

    token_file: str | None = key(None, "the file with the token", own_rules.place(), example="/etc/hoploom/token")
    ca: str | None = key(None, "the CA's certificate, to check servers by", own_rules.place(), example="certs/ca.pem")
    cert: str | None = key(None, "the hosts' certificate", own_rules.place(), example="certs/host.pem")
    private_key: str | None = key(None, "the certificate's private key", own_rules.place(), example="certs/host.key")
    mutual: bool = key(False, "servers ask trainers for a certificate of the same CA, too", rules.flag())
    insecure: bool = key(False, "serve beyond loopback with neither; it warns", rules.flag())


@dataclass(frozen=True)
class ServerOptions:
    """What every graph server is told."""

    port: int = key(7700, "where servers listen; a host may have its own", own_rules.port())
    threads: int | None = key(None, "batches made at once", rules.whole(1, 4096), example=8)
    memory: str | None = key(None, "what batches made and not yet sent may take", own_rules.amount(), example="4GB")
    cache: str | None = key(None, "rows of other parts that are kept", own_rules.share_or_amount(), example="20%")
    fanouts: tuple[int, ...] | None = key(
        None, "of batches that the cache is for", own_rules.fanouts(), example=[15, 10]
    )
    seeds: str | None = key(
        None, "what such batches start from; left out: the split train", rules.text(), example="train"
    )
    metrics_port: int | None = key(
        None, "where metrics are read, on the server's address", own_rules.port(), example=7701
    )


@dataclass(frozen=True)
class SshOptions:
    """How the system's ssh is called; users, keys and host keys are as your own configuration of ssh has them."""

    config: str | None = key(None, "another file than ~/.ssh/config", own_rules.place(), example="ssh_config")
    connect_timeout: int = key(20, "seconds to reach a host", rules.whole(1, 3600))


@dataclass(frozen=True)
class SlurmOptions:
    """What sbatch is told. Slurm picks the hosts."""

    name: str = key("hoploom", "the job's name", own_rules.label())
    partition: str | None = key(None, "the partition", rules.text(), example="gpu")
    account: str | None = key(None, "whom it is charged to", rules.text(), example="research")
    qos: str | None = key(None, "the quality of service", rules.text(), example="normal")
    time: str | None = key(None, "the longest it may run", rules.text(), example="12:00:00")
    constraint: str | None = key(None, "features that nodes must have", rules.text(), example="a100")
    reservation: str | None = key(None, "a reservation", rules.text(), example="workshop")
    gpus: int | None = key(None, "GPUs per host; left out: none are asked for", rules.whole(0, 1024), example=4)
    cpus: int | None = key(None, "cores per host; left out: as Slurm is set up", rules.whole(1, 65536), example=32)
    memory: str | None = key(None, "memory per host", rules.text(), example="200G")
    exclusive: bool = key(False, "hosts are shared with no other job", rules.flag())
    output: str = key("%x-%j.out", "the file with what the job prints", rules.text())
    setup: tuple[str, ...] = key((), "shell lines before all else", own_rules.texts('["module load cuda"]'))
    options: tuple[str, ...] = key((), "more for #SBATCH, one per line", own_rules.texts('["--mail-type=END"]'))
    container_image: str | None = key(
        None, "pyxis: the image", rules.text(), example="nvcr.io#nvidia/pytorch:25.01-py3"
    )
    container_mounts: tuple[str, ...] = key((), "pyxis: what it sees of the host", own_rules.texts('["/data:/data"]'))
    container_workdir: str | None = key(None, "pyxis: its working directory", own_rules.place(), example="/workspace")


@dataclass(frozen=True)
class KubernetesOptions:
    """What the manifests say: a Kubeflow TrainJob for trainers, a StatefulSet for servers."""

    name: str = key("hoploom", "what all objects are called", own_rules.label())
    namespace: str = key("default", "where they live", own_rules.label())
    image: str | None = key(None, "the image with Python and hoploom", rules.text(), example="registry/hoploom:1")
    gpus: int | None = key(
        None,
        "GPUs per pod of trainers; left out: one per process if there are devices",
        rules.whole(0, 1024),
        example=4,
    )
    cpu: str | None = key(None, "cores per pod", rules.text(), example="16")
    memory: str | None = key(None, "memory per pod", rules.text(), example="64Gi")
    claim: str | None = key(None, "the PersistentVolumeClaim with the store", own_rules.label(), example="graph")
    mount: str = key("/stores", "where pods see that claim", own_rules.place())
    secret: str | None = key(
        None, "the Secret with the files of [security]", own_rules.label(), example="hoploom-certs"
    )
    secret_mount: str = key("/etc/hoploom", "where pods see that Secret", own_rules.place())
    user: int | None = key(
        None,
        "the user that runs pods; left out: as the image says, and only root reads the Secret",
        rules.whole(1),
        example=1000,
    )
    service_account: str | None = key(None, "the pods' service account", own_rules.label(), example="trainer")
    pull_secrets: tuple[str, ...] = key((), "Secrets to pull the image with", own_rules.texts('["registry"]'))


@dataclass(frozen=True)
class Host:
    """One host, or one of several places on the same one."""

    name: str  # what messages and labels call it; each once
    address: str  # what other hosts reach it by; "": only known once it runs (Slurm, Kubernetes)
    ssh: str  # as ssh takes it: "host" or "user@host"
    ssh_port: int | None = None  # None: as the user's own ssh configuration has it
    processes: int = 1  # trainers
    serves: bool = False  # whether a graph server runs here
    port: int = 0  # of that server; 0: a free one of this host, or the Slurm job's
    parts: tuple[int, ...] = ()  # of the store, for that server and in worker mode for the trainers beside it
    devices: tuple[int, ...] | None = None  # CUDA_VISIBLE_DEVICES of the trainers; None: all
    python: str = "python3"
    folder: str = "."  # working directory, absolute
    environment: Mapping[str, str] = field(default_factory=dict)  # the cluster's and its own

    @property
    def endpoint(self) -> str:
        """Where its server is reached, host:port."""
        return join_address(self.address, self.port)


@dataclass(frozen=True)
class Cluster:
    """Everything that a launch follows from."""

    hosts: tuple[Host, ...]
    store: str | None  # absolute, the same on all hosts; None: the command knows it
    executor: Executor
    mode: Mode
    rendezvous: str  # where torchrun's processes meet, host:port; port 0: a free one of this host, or the Slurm job's
    max_restarts: int = 0
    security: Security = field(default_factory=Security)
    server: ServerOptions = field(default_factory=ServerOptions)
    ssh: SshOptions = field(default_factory=SshOptions)
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    kubernetes: KubernetesOptions = field(default_factory=KubernetesOptions)
    file: str = "cluster.toml"  # what messages call it

    @property
    def servers(self) -> tuple[Host, ...]:
        """The hosts with a graph server."""
        return tuple(host for host in self.hosts if host.serves)

    @property
    def trainers(self) -> tuple[Host, ...]:
        """The hosts with trainers, in the order of their ranks."""
        return tuple(host for host in self.hosts if host.processes)


@dataclass(frozen=True)
class Process:
    """One program on one host: a graph server, or the torchrun of its trainers."""

    label: str  # "gpu1/server", "gpu1/trainers"
    host: Host
    words: tuple[str, ...]  # the program and its arguments
    environment: Mapping[str, str]  # besides what the host has
    folder: str

    @property
    def is_server(self) -> bool:
        return self.label.endswith("/server")
