"""Plan the programs of each host: a graph server, and one torchrun for its trainers.

This module starts nothing. It makes every command line of `hoploom serve`. torchrun uses its static rendezvous: ranks
are in the order of the hosts in the file, and one known port is open. So a cluster cannot grow while it runs.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hoploom.config.values import is_loopback, join_address, split_address
from hoploom.deploy.cluster_file import Cluster, Host, Process, Security, ServerOptions
from hoploom.deploy.guard import LOGS
from hoploom.errors import ConfigError

FORMS = (
    "give what comes behind `hoploom`, such as train run.toml, or your own script.py and its arguments; options of "
    "python and torchrun are in the cluster file"
)
STARTER = re.compile(r"torchrun|python(\d+(\.\d+)*)?")
LOOPBACK = "lo"
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # lines are shown when they are printed


def processes(cluster: Cluster, command: Sequence[str]) -> list[Process]:
    """Return the processes to start: the servers, then the trainers in the order of their ranks."""
    script, planned = script_words(command), []
    for host in cluster.servers:
        words, environment = server_command(cluster, host).words(host.python), {**UNBUFFERED, **host.environment}
        planned.append(Process(f"{host.name}/server", host, words, environment, host.folder))
    for rank, host in enumerate(cluster.trainers):
        words, environment = trainer_words(cluster, rank, script), trainer_environment(cluster, host)
        planned.append(Process(f"{host.name}/trainers", host, words, environment, host.folder))
    return planned


def script_words(command: Sequence[str]) -> tuple[str, ...]:
    """Return the user's command as torchrun expects it: SCRIPT ARGUMENTS ... or -m MODULE ARGUMENTS ..."""
    words = tuple(command)
    if words and STARTER.fullmatch(words[0].rpartition("/")[2]):
        words = words[2:] if words[1:2] == ("-u",) else words[1:]  # lines are shown at once in any case
    if words[:2] == ("-m", "hoploom"):
        words = words[1:]
    if words and words[0].rpartition("/")[2] == "hoploom":
        words = words[1:]
    if not words:
        raise ConfigError(f"there is no command behind --; {FORMS}")
    if words[0] == "train":
        return ("-m", "hoploom", *words)
    is_option = words[0].startswith("-")
    if (words[0].endswith(".py") and not is_option) or (words[0] == "-m" and len(words) > 1):
        return words
    raise ConfigError(f"the command begins with {words[0]!r:.80}, which is nothing that trains; {FORMS}")


@dataclass(frozen=True)
class ServerCommand:
    """The store, parts, addresses and options of one graph server. `words` makes a command line from them."""

    store: str
    parts: Sequence[int]  # (): all parts in the folder
    listen: str  # HOST:PORT
    peers: Sequence[str] = ()  # servers of the other parts
    security: Security = field(default_factory=Security)
    options: ServerOptions = field(default_factory=ServerOptions)
    metrics: str | None = None  # HOST:PORT
    grace: int | None = None  # seconds for requests in flight at a stop

    def words(self, python: str) -> tuple[str, ...]:
        """Return the command line as words: `python`, the path of the interpreter, then the arguments."""
        security, options = self.security, self.options
        given = {
            "--peers": ",".join(self.peers) or None,
            "--token-file": security.token_file,
            "--cert": security.cert,
            "--key": security.private_key,
            "--ca": security.ca,
            "--client-ca": security.ca if security.mutual else None,
            "--threads": options.threads,
            "--memory": options.memory,
            "--store-memory": options.store_memory,
            "--cache": options.cache,
            "--fanouts": None if options.fanouts is None else ",".join(map(str, options.fanouts)),
            "--seeds": options.seeds,
            "--device": options.device,
            "--metrics": self.metrics,
        }
        parts = [word for part in self.parts for word in ("--part", str(part))]
        flags = [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
        last = ["--insecure"] if security.insecure else []
        last += [] if self.grace is None else ["--grace", str(self.grace)]
        return (python, "-m", "hoploom", "serve", self.store, *parts, "--listen", self.listen, *flags, *last)


def server_command(cluster: Cluster, host: Host) -> ServerCommand:
    """Return the command of a host's server. Servers that share an address get consecutive metrics ports and GPUs."""
    peers = [other.endpoint for other in cluster.servers if other.name != host.name]
    sharing = [server.name for server in cluster.servers if server.address == host.address]
    number = sharing.index(host.name) if host.address else 0
    options, port = cluster.server, cluster.server.metrics_port
    if options.device == "cuda":
        options = replace(options, device=f"cuda:{number}")
    metrics = None if port is None else join_address(host.address, port + number)
    store = str(host.store or cluster.store)
    return ServerCommand(store, host.parts, host.endpoint, peers, cluster.security, options, metrics)


def trainer_words(cluster: Cluster, node_rank: int, script: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of torchrun on the host with this `node_rank`; `script` has torchrun's last arguments."""
    host = cluster.trainers[node_rank]
    address, port = split_address(cluster.rendezvous)
    options = {
        "--nnodes": len(cluster.trainers),
        "--node-rank": node_rank,
        "--nproc-per-node": host.processes,
        "--master-addr": address,
        "--master-port": port,
        "--max-restarts": cluster.max_restarts,
    }
    words = [word for flag, value in options.items() for word in (flag, str(value))]
    if host.processes > 1 and cluster.executor in ("local", "ssh"):  # each line then begins with its rank
        words += ["--log-dir", LOGS, "--tee", "3"]
    is_module = script[0] == "-m"
    words += ["-m"] if is_module else []
    program = script[is_module:]
    words += ["--"] if program[1:2] == ("--",) else []  # torchrun drops the first -- among its arguments
    return (host.python, "-m", "torch.distributed.run", *words, *program)


def trainer_environment(cluster: Cluster, host: Host) -> dict[str, str]:
    """Return the environment variables of a host's trainers. hoploom.ranks.environment reads those named HOPLOOM_*."""
    security = cluster.security
    devices = None if host.devices is None else ",".join(map(str, host.devices))
    shows_certificate = security.mutual or not cluster.servers  # trainers that start servers pass it to them
    variables = {
        "CUDA_VISIBLE_DEVICES": devices,
        "HOPLOOM_SERVERS": ",".join(server.endpoint for server in cluster.servers) or None,
        "HOPLOOM_TOKEN_FILE": security.token_file,
        "HOPLOOM_CA": security.ca,
        "HOPLOOM_CERT": security.cert if shows_certificate else None,
        "HOPLOOM_KEY": security.private_key if shows_certificate else None,
    }
    if cluster.mode == "worker":
        variables |= {"HOPLOOM_STORE": host.store or cluster.store, "HOPLOOM_PARTS": ",".join(map(str, host.parts))}
    given = {name: value for name, value in variables.items() if value is not None}
    usual = UNBUFFERED
    if sys.platform == "linux" and all(is_loopback(host.address) for host in cluster.hosts):
        usual = usual | {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    return usual | given | dict(host.environment)
