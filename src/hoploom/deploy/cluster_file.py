"""The keys of a cluster file, cluster.toml or cluster.yaml, and the cluster that it describes.

Dataclass fields made by `key` declare the keys. Their names, rules and help texts serve to check and document files.
The file of GraphLearn-for-PyTorch's run_dist_train_sage_sup.py is read, too: it names no store, so trainers start
without servers and open the store that their command names.
"""

# ruff: noqa: RUF009  (key() is dataclasses.field)

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from hoploom.config import rules
from hoploom.config.rules import REQUIRED, Document, Headings, KeyRule, full_name, key, keys_in
from hoploom.config.values import as_key, join_address, nearest, quoted

Executor = Literal["local", "ssh", "slurm", "kubernetes"]
Mode = Literal["worker", "server-client", "none"]

EXECUTORS = ("local", "ssh", "slurm", "kubernetes")
MODES = ("worker", "server-client", "none")


# --- the keys: resolve.py fills in those that are left out ---------------------------------------


@dataclass(frozen=True)
class TopKeys:
    """The keys at the top of the file, above its sections."""

    store: str | None = key(None, "the store's path on every host", rules.HOST_PATH, example="graph.store")
    mode: str | None = key(
        None, "worker: servers beside trainers; server-client: on other hosts", rules.choice(*MODES), example="worker"
    )
    executor: str | None = key(
        None,
        "what starts the processes; default: local on this host, ssh by names, else slurm",
        rules.choice(*EXECUTORS),
        example="ssh",
    )
    servers: int | None = key(None, "hosts with a server, if `hosts` is a number", rules.whole(1, 100_000), example=2)
    processes: int | None = key(
        None, "trainers per host; default: one per GPU in `devices`, else 1", rules.whole(1, 4096), example=4
    )
    python: str | None = key(
        None, "the Python on every host; default: the current one", rules.HOST_PATH, example="/opt/venv/bin/python"
    )
    folder: str | None = key(
        None, "the working directory on every host; default: the current one", rules.HOST_PATH, example="/srv/papers"
    )
    rendezvous: str | None = key(
        None, "where ranks meet; default: port 29500 of the first that trains", rules.ADDRESS, example="10.0.0.1:29500"
    )
    max_restarts: int = key(0, "how often torchrun restarts failed trainers of one host", rules.whole(0, 1000))
    environment: dict[str, str] = key({}, "variables of every process", rules.VARIABLES, example={"NCCL_DEBUG": "INFO"})


@dataclass(frozen=True)
class Host:
    """The keys of section [hosts.NAME]; resolve.py sets those left out. Two hosts may have the same address."""

    name: str  # unique; shown in messages and labels
    address: str = key(None, "the address that other hosts use; default: its name", rules.HOST, example="10.0.0.1")
    ssh: str = key(None, "what ssh connects to; default: the address", rules.LOGIN, example="root@10.0.0.1")
    ssh_port: int | None = key(None, "its ssh port; default: the one in your ssh configuration", rules.PORT, example=22)
    processes: int = key(None, "trainers on this host", rules.whole(0, 4096), example=4)
    devices: tuple[int, ...] | None = key(None, "the GPUs for its trainers", rules.ids("GPUs"), example=[0, 1])
    serves: bool = key(None, "whether a graph server runs on this host", rules.FLAG, example=True)
    port: int = key(None, "the port of that server", rules.PORT, example=7700)  # 0: a free port, or Slurm's
    parts: tuple[int, ...] = key(None, "the parts of the store on this host", rules.ids("parts"), example=[0])
    python: str = key(None, "the Python on this host", rules.HOST_PATH, example="/opt/venv/bin/python")
    folder: str = key(None, "the working directory on this host", rules.HOST_PATH, example="/srv/papers")
    environment: dict[str, str] = key(
        {}, "more environment variables on this host", rules.VARIABLES, example={"NCCL_DEBUG": "INFO"}
    )
    store: str | None = key(
        None, "the path of the store on this host; default: `store` at the top", rules.HOST_PATH, example="/nvme/graph"
    )

    @property
    def endpoint(self) -> str:
        """The address of the host's graph server, HOST:PORT."""
        return join_address(self.address, self.port)


@dataclass(frozen=True)
class Security:
    """The paths of the token and certificate files on each host. A cluster file never holds their contents."""

    token_file: str | None = key(None, "the file with the token", rules.HOST_PATH, example="/etc/hoploom/token")
    ca: str | None = key(None, "the CA certificate, to check the servers", rules.HOST_PATH, example="certs/ca.pem")
    cert: str | None = key(None, "the certificate of the hosts", rules.HOST_PATH, example="certs/host.pem")
    private_key: str | None = key(None, "the private key of the certificate", rules.HOST_PATH, example="certs/host.key")
    mutual: bool = key(False, "servers also ask trainers for a certificate of the same CA", rules.FLAG)
    insecure: bool = key(False, "allow servers on the network without token and TLS; they warn", rules.FLAG)


@dataclass(frozen=True)
class ServerOptions:
    """The options of every graph server."""

    port: int = key(7700, "the port of the servers; a host may have its own", rules.PORT)
    threads: int | None = key(None, "batches built at the same time", rules.whole(1, 4096), example=8)
    memory: str | None = key(None, "limit for batches that are built and not yet sent", rules.SIZE, example="4GB")
    store_memory: str | None = key(
        None, "how much of the store to hold; the rest is read from disk", rules.SIZE, example="64GB"
    )
    cache: str | None = key(None, "cache for feature rows of other parts", rules.SHARE_OR_SIZE, example="20%")
    fanouts: tuple[int, ...] | None = key(
        None, "fanouts of the batches that the cache is filled for", rules.FANOUTS, example=[15, 10]
    )
    seeds: str | None = key(None, "seeds of these batches; default: the split train", rules.TEXT, example="train")
    device: str | None = key(
        None, "the GPU of the servers; those of one address take cuda:0, cuda:1 and so on", rules.GPU, example="cuda"
    )
    metrics_port: int | None = key(None, "the port for metrics, at the server's address", rules.PORT, example=7701)


@dataclass(frozen=True)
class SshOptions:
    """The options of the system's ssh; users, keys and host keys come from your own configuration of ssh."""

    config: str | None = key(
        None, "an ssh configuration file; default: ~/.ssh/config", rules.HOST_PATH, example="ssh_config"
    )
    identity: str | None = key(
        None, "a private key file; default: those of your ssh configuration", rules.HOST_PATH, example="/keys/gpu"
    )
    connect_timeout: int = key(20, "seconds to wait for a connection", rules.whole(1, 3600))


@dataclass(frozen=True)
class SlurmOptions:
    """The options of sbatch and srun. Slurm picks the hosts."""

    name: str = key("hoploom", "the name of the job", rules.LABEL)
    partition: str | None = key(None, "the partition", rules.TEXT, example="gpu")
    account: str | None = key(None, "the account to charge", rules.TEXT, example="research")
    time: str | None = key(None, "the time limit of the job", rules.TEXT, example="12:00:00")
    gpus: int | None = key(None, "GPUs per host; default: no GPUs are requested", rules.whole(0, 1024), example=4)
    cpus: int | None = key(None, "cores per host; default: that of Slurm", rules.whole(1, 65536), example=32)
    memory: str | None = key(None, "memory per host", rules.TEXT, example="200G")
    output: str = key("%x-%j.out", "the file for the job's output", rules.TEXT)
    setup: tuple[str, ...] = key(
        (), "shell lines to run first", rules.texts('a list of texts, e.g. ["module load cuda"]')
    )
    options: tuple[str, ...] = key((), "more #SBATCH options", rules.texts('a list of texts, e.g. ["--qos=normal"]'))
    srun: tuple[str, ...] = key(
        (), "more options of every srun", rules.texts('a list of texts, e.g. ["--container-image=registry/gnn:1"]')
    )

    @property
    def in_container(self) -> bool:
        """Whether srun starts the programs in a container, which has its own folders."""
        return any(option.startswith(("--container-image", "--container-name")) for option in self.srun)


@dataclass(frozen=True)
class KubernetesOptions:
    """The options of the manifests: a Kubeflow TrainJob for trainers, a StatefulSet for servers."""

    name: str = key("hoploom", "the name of all objects", rules.LABEL)
    namespace: str = key("default", "the namespace of all objects", rules.LABEL)
    image: str | None = key(None, "the image with Python and Hoploom", rules.TEXT, example="registry/hoploom:1")
    gpus: int | None = key(None, "GPUs per trainer pod; default: as many as `devices`", rules.whole(0, 1024), example=4)
    cpu: str | None = key(None, "cores per pod", rules.TEXT, example="16")
    memory: str | None = key(None, "memory per pod", rules.TEXT, example="64Gi")
    claim: str | None = key(None, "the PersistentVolumeClaim with the store", rules.LABEL, example="graph")
    mount: str = key("/stores", "the path of that volume in the pods", rules.HOST_PATH)
    secret: str | None = key(None, "the Secret with the files of [security]", rules.LABEL, example="hoploom-certs")
    secret_mount: str = key("/etc/hoploom", "the path of that Secret in the pods", rules.HOST_PATH)
    user: int | None = key(None, "the numeric user of the pods; default: the image's", rules.whole(1), example=1000)
    service_account: str | None = key(
        None, "the service account of the pods; it may name imagePullSecrets", rules.LABEL, example="trainer"
    )


HOSTS = "hosts"
SECTIONS: Headings = {
    "server": ServerOptions,
    "security": Security,
    "ssh": SshOptions,
    "slurm": SlurmOptions,
    "kubernetes": KubernetesOptions,
}
HEADINGS: Headings = {"": TopKeys, **SECTIONS, f"{HOSTS}.NAME": Host}


@dataclass(frozen=True)
class ParsedClusterFile:
    """The keys of a cluster file. Each value was checked alone; resolve.py checks whether they fit together."""

    document: Document
    top: TopKeys
    hosts: tuple[Host, ...]  # if the file has only their number, each address is ""
    sections: Mapping[str, Any]


def keys_of(document: Document) -> ParsedClusterFile:
    """Return the settings of a cluster file, or of GLT's; raise ConfigError for an unknown setting or a wrong value."""
    if isinstance(document.parsed.get("nodes"), list) and HOSTS not in document.parsed:
        return _keys_of_glt(document)
    top = TopKeys(**document.top())
    sections = {name: owner(**document.section((name,), owner=owner)) for name, owner in SECTIONS.items()}
    return ParsedClusterFile(document, top, _hosts(document), sections)


def _hosts(document: Document) -> tuple[Host, ...]:
    """Return the hosts from the key `hosts`: a number of hosts, a list of names, or a section for each host."""
    given = document.parsed.get(HOSTS)
    way_out = 'give their names, e.g. hosts = ["gpu1", "gpu2"], or a section [hosts.NAME] for each'
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return tuple(Host(f"host{i}", address="") for i in range(given))
    if given is None:
        raise document.problem(HOSTS, f"there are no hosts; {way_out}")
    if not isinstance(given, list | dict) or not given:
        raise document.problem(HOSTS, f"hosts is {given!r:.80}; {way_out}")
    for name in given:
        if not isinstance(name, str) or not rules.HOST.read(name):
            raise document.problem(HOSTS, f"hosts has {name!r:.80}, which is no name of a host; {way_out}")
    if isinstance(given, dict):
        return tuple(_host(document, name) for name in given)
    for name in given:
        if given.count(name) > 1:
            raise document.problem(HOSTS, f"hosts has {quoted(name)} {given.count(name)} times; name each once")
    return tuple(map(Host, given))


def _host(document: Document, name: str) -> Host:
    """Return the host of section [hosts.NAME]; raise ConfigError if TOML split a name at dots into nested tables."""
    path = (HOSTS, name)
    for inside, value in document.table(path).items():
        if inside not in keys_in(Host) and isinstance(value, dict):
            at, in_quotes = full_name((*path, inside)), quoted(f"{name}.{inside}")
            message = f"[{at}] is a table in a table; put a name with dots in quotes: [hosts.{in_quotes}]"
            raise document.problem(at, message)
    return Host(name, **document.section(path, owner=Host))


# --- GraphLearn-for-PyTorch's file -----------------------------------------------------------------


def _each(entry: KeyRule) -> KeyRule:
    def read(value: Any) -> list[Any] | None:
        entries = [entry.read(one) for one in value] if isinstance(value, list) else [None]
        return None if None in entries or not entries else entries

    return KeyRule("a list with one entry per node", read, entry=entry)


@dataclass(frozen=True)
class GltKeys:
    """The keys of GLT's file. Lists have one entry per node; dataset, in_channel and out_channel have no effect."""

    nodes: list[str] = key(REQUIRED, "addresses", _each(rules.HOST), example=["10.0.0.1"])
    python_bins: list[str] = key(REQUIRED, "Pythons", _each(rules.HOST_PATH), example=["/usr/bin/python3"])
    usernames: list[str] = key(REQUIRED, "who logs in", _each(rules.LOGIN), example=["root"])
    dst_paths: list[str] = key(REQUIRED, "working directories", _each(rules.HOST_PATH), example=["/srv/papers"])
    visible_devices: list[tuple[int, ...]] = key(REQUIRED, "GPUs", _each(rules.ids("GPUs")), example=[[0, 1]])
    ports: list[int] | None = key(None, "ports of ssh", _each(rules.PORT))
    node_ranks: list[int] | None = key(None, "the order of the nodes", _each(rules.whole(0)))
    dataset: str | None = key(None, "the data set", rules.TEXT)
    in_channel: int | None = key(None, "features", rules.whole(1))
    out_channel: int | None = key(None, "classes", rules.whole(1))


def _keys_of_glt(document: Document) -> ParsedClusterFile:
    """Convert the keys of GLT's file to those of a cluster file; raise ConfigError if they do not fit together."""
    known = [*keys_in(GltKeys), "ssh"]
    unknown = next((name for name in document.parsed if name not in known), None)
    if unknown is not None:
        alike = nearest(unknown, known)
        hint = f"did you mean {alike}?" if alike else "leave it out, or give hosts instead of nodes"
        what = f"unknown key {as_key(unknown)} beside nodes, which GLT's files have"
        raise document.problem(as_key(unknown), f"{what}; {hint}")
    given = GltKeys(**document.section((), owner=GltKeys, tables=["ssh"]))
    count = len(given.nodes)
    for described in fields(given):
        column = getattr(given, described.name)
        if isinstance(column, list) and len(column) != count:
            message = f"{described.name} has {len(column)} entries for {count} nodes; give one per node"
            raise document.problem(described.name, message)
    ranks = given.node_ranks or list(range(count))
    if sorted(ranks) != list(range(count)):
        raise document.problem("node_ranks", f"node_ranks is {ranks}; give each of 0 to {count - 1} once")
    hosts = tuple(_glt_host(given, node) for node in sorted(range(count), key=ranks.__getitem__))
    sections = {name: make() for name, make in SECTIONS.items()}
    sections["ssh"] = SshOptions(**document.section(("ssh",), owner=SshOptions))
    return ParsedClusterFile(document, TopKeys(executor="ssh", mode="none"), hosts, sections)


def _glt_host(given: GltKeys, node: int) -> Host:
    """Return node number `node` as a host. The host is named ADDRESS, or ADDRESS-INDEX if nodes share the address."""
    address, devices = given.nodes[node], given.visible_devices[node]
    return Host(
        address if given.nodes.count(address) == 1 else f"{address}-{node}",
        address=address,
        ssh=f"{given.usernames[node]}@{address}",
        ssh_port=None if given.ports is None else given.ports[node],
        processes=max(1, len(devices)),
        devices=devices,
        python=given.python_bins[node],
        folder=given.dst_paths[node],
    )


# --- the cluster ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """The cluster that a cluster file describes, with values for all keys that the file leaves out."""

    hosts: tuple[Host, ...]
    store: str | None  # absolute path, for hosts without their own; None: the command names a store
    executor: Executor
    mode: Mode
    rendezvous: str  # of torchrun, HOST:PORT; port 0: a free port of this host, or the Slurm job's
    max_restarts: int = 0
    security: Security = field(default_factory=Security)
    server: ServerOptions = field(default_factory=ServerOptions)
    ssh: SshOptions = field(default_factory=SshOptions)
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    kubernetes: KubernetesOptions = field(default_factory=KubernetesOptions)
    file: str = "cluster.toml"  # its name in messages

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
    """One program on one host: a graph server, or the torchrun that starts the host's trainers."""

    label: str  # "gpu1/server", "gpu1/trainers"
    host: Host
    words: tuple[str, ...]  # the program and its arguments
    environment: Mapping[str, str]  # added to the host's own variables
    folder: str

    @property
    def is_server(self) -> bool:
        return self.label.endswith("/server")
