"""Environment variables, which only this module reads and sets.

The rank is read from torchrun's variables, else from a Slurm step's; without either, this is the only process. If only
some variables are set, this is an error: otherwise, eight processes might each train alone.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from hoploom.errors import ConfigError
from hoploom.system import num_cores

Variables = Mapping[str, str]

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SERVERS, STORE, PARTS = "HOPLOOM_SERVERS", "HOPLOOM_STORE", "HOPLOOM_PARTS"
SECURITY = {"token_file": "HOPLOOM_TOKEN_FILE", "ca": "HOPLOOM_CA", "cert": "HOPLOOM_CERT", "key": "HOPLOOM_KEY"}
LOCALS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
NODE = ("GROUP_RANK", "SLURM_NODEID")  # torchrun's and Slurm's number of the host
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK_INTERFACES = ("lo", "lo0")
QUIET, RUN_TOKEN = "HOPLOOM_QUIET", "HOPLOOM_RUN_TOKEN"
LOOPBACK = "127.0.0.1"
FIRST_PORT, NUM_PORTS = 15000, 15000  # for Slurm's jobs and steps: below the ports that systems assign


@dataclass(frozen=True)
class RankInfo:
    """The rank of a process, and the address of the rendezvous."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    source: Literal["torchrun", "slurm", "single", "group"] = "single"
    restarts: int = 0
    address: str = LOOPBACK
    port: int = 0
    hosted: bool = False  # whether the launcher holds the rendezvous store; else rank 0 does
    node: int | None = None  # the number of its host among the hosts, if known
    is_task: bool = False  # whether Slurm started this rank itself
    uncounted: tuple[str, ...] = ()  # variables of LOCALS that are not set: the rendezvous finds the values

    @property
    def on_one_host(self) -> bool:
        return self.local_world_size == self.world_size

    @property
    def host(self) -> int:
        """A number that the ranks of one host share, and no others."""
        return self.rank - self.local_rank if self.node is None else self.node


def read_rank(variables: Variables = os.environ) -> RankInfo:
    """Return the rank that torchrun, or else Slurm, gave this process; rank 0 of 1 if neither did."""
    if "RANK" not in variables and _in_slurm_step(variables):
        return _from_slurm(variables)
    present = [name for name in (*REQUIRED, *LOCALS) if name in variables]
    if "RANK" not in variables and "SLURM_JOB_ID" in variables:
        present = []  # batch scripts export the other variables for srun
    return _from_torchrun(variables, present[0]) if present else RankInfo()


def read_started() -> RankInfo:
    """Return the rank as `read_rank` does, but rank 0 of 1 instead of an error if only MASTER_ variables are set."""
    is_started = any(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")) or _in_slurm_step(os.environ)
    return read_rank(os.environ) if is_started else RankInfo()


def in_group(rank: int, world_size: int) -> RankInfo:
    """Return a rank of the user's process group, with all that the environment says if it names the same rank."""
    with suppress(ConfigError):  # a script that makes the group itself may set MASTER_ADDR alone
        info = read_started()
        if (info.rank, info.world_size) == (rank, world_size):
            return replace(info, source="group", hosted=False)
    return RankInfo(rank, 0, world_size, 1, "group", uncounted=LOCALS)


def with_local_rank(info: RankInfo, hosts: Sequence[str]) -> RankInfo:
    """Return `info` with local rank, local world size and node filled in. `hosts` has the host of each rank."""
    neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[info.rank]]
    node = list(dict.fromkeys(hosts)).index(hosts[info.rank])
    local_rank = neighbours.index(info.rank) if "LOCAL_RANK" in info.uncounted else info.local_rank
    local_world_size = max(local_rank + 1, len(neighbours))
    return replace(info, local_rank=local_rank, local_world_size=local_world_size, node=node, uncounted=())


@dataclass(frozen=True)
class LaunchSettings:
    """The servers and files of the graph, as set by `hoploom launch`. Without servers, the script names the store."""

    servers: tuple[str, ...] = ()
    store: str | None = None  # the store's folder on this host; None if servers make the batches
    parts: tuple[int, ...] | None = None  # the parts on this host
    security: Mapping[str, str] = field(default_factory=dict)  # paths of token_file, ca, cert, key, if set
    node: int | None = None  # this host's number among the hosts, if a launcher sets it


def read_launch_settings(variables: Variables = os.environ) -> LaunchSettings:
    """Return the settings that `hoploom launch` gave this process; raise ConfigError if they are incomplete."""
    servers = tuple(one.strip() for one in variables.get(SERVERS, "").split(",") if one.strip())
    alone = [name for name in (STORE, PARTS) if name in variables and not servers]
    if alone:
        raise ConfigError(
            f"{alone[0]} is {variables[alone[0]]!r}, but {SERVERS} is not set; start with hoploom launch, which sets "
            f"both, or unset {alone[0]}"
        )
    node = next((name for name in NODE if name in variables), None)
    parts = [word.strip() for word in variables.get(PARTS, "").split(",")]
    if variables.get(PARTS) and not all(word.isdecimal() for word in parts):
        raise ConfigError(f"{PARTS} is {variables[PARTS]!r}; give the numbers of parts, e.g. 0 or 0,1")
    return LaunchSettings(
        servers,
        variables.get(STORE) or None,
        tuple(sorted({int(word) for word in parts})) if variables.get(PARTS) else None,
        {name: variables[variable] for name, variable in SECURITY.items() if variables.get(variable)},
        None if node is None else _number(variables, node, 0),
    )


def enter(info: RankInfo) -> None:
    """Set the environment variables of this process so that `read_rank` returns `info`."""
    os.environ.update(
        RANK=str(info.rank),
        WORLD_SIZE=str(info.world_size),
        LOCAL_RANK=str(info.local_rank),
        LOCAL_WORLD_SIZE=str(info.local_world_size),
        MASTER_ADDR=info.address,
        MASTER_PORT=str(info.port),
        TORCHELASTIC_USE_AGENT_STORE=str(info.hosted),
        TORCHELASTIC_RESTART_COUNT=str(info.restarts),
    )


def listening_on(interface: str | None) -> AbstractContextManager[None]:
    """Return a context manager in which Gloo listens on `interface`, unless the user chose one.

    By default it takes the address of the host's name, on Debian 127.0.1.1.
    """
    usual = () if interface is None else INTERFACES if interface in LOOPBACK_INTERFACES else INTERFACES[:1]
    return _set({variable: str(interface) for variable in usual if variable not in os.environ})


def quiet() -> AbstractContextManager[None]:
    """Return a context manager in which this process and its children print no messages about cores and threads."""
    return _set({QUIET: "1"})


def spark_driver_options(options: str) -> AbstractContextManager[None]:
    """Return a context manager in which Spark starts its JVM with `options`, followed by the user's own options."""
    return _set({"SPARK_SUBMIT_OPTS": f"{options} {os.environ.get('SPARK_SUBMIT_OPTS', '')}"})


@contextmanager
def _set(variables: Variables) -> Iterator[None]:
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def is_quiet() -> bool:
    """Return whether `quiet` is in effect."""
    return bool(os.environ.get(QUIET))


def own_server(token: str | None) -> dict[str, str]:
    """Return environment variables for a server that a rank starts: they silence warnings and pass on `token`."""
    return {QUIET: "1"} | ({} if token is None else {RUN_TOKEN: token})


def run_token() -> str | None:
    """Return the token that a rank passed to this server by `own_server`, or None."""
    return os.environ.get(RUN_TOKEN)


def _from_torchrun(variables: Variables, present: str) -> RankInfo:
    missing = [name for name in REQUIRED if name not in variables]
    if missing:
        raise ConfigError(
            f"{present} is {variables[present]!r}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            f"not set; start the script with torchrun, which sets them all, or unset {present}"
        )
    rank, world_size = _rank_of(variables, "RANK", "WORLD_SIZE")
    local_rank = _number(variables, "LOCAL_RANK", 0, default=0)
    local_world_size = local_rank + 1
    if "LOCAL_WORLD_SIZE" in variables:
        local_rank, local_world_size = _rank_of({"LOCAL_RANK": "0", **variables}, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if local_world_size > world_size:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE is {local_world_size}, but WORLD_SIZE is {world_size}; start the script with torchrun"
        )
    return RankInfo(
        rank,
        local_rank,
        world_size,
        local_world_size,
        "torchrun",
        restarts=_number(variables, "TORCHELASTIC_RESTART_COUNT", 0, default=0),
        address=variables["MASTER_ADDR"],
        port=_port(variables),
        hosted=variables.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true",
        uncounted=() if world_size == 1 else tuple(name for name in LOCALS if name not in variables),
    )


def _in_slurm_step(variables: Variables) -> bool:
    """Return whether srun started this process. SLURM_PROCID is no proof, because batch scripts have it, too."""
    in_batch_script = variables.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in variables
    return "SLURM_PROCID" in variables and not in_batch_script


def _from_slurm(variables: Variables) -> RankInfo:
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    rank, world_size = _rank_of(variables, "SLURM_PROCID", size_name)
    restarts = _number(variables, "SLURM_RESTART_COUNT", 0, default=0)
    if world_size == 1:
        return RankInfo(source="slurm", restarts=restarts)
    node_list = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    local_rank = _number(variables, "SLURM_LOCALID", 0)
    job = _number(variables, "SLURM_JOB_ID", 0) if "MASTER_PORT" not in variables else 0
    step = int(step_id) if (step_id := variables.get("SLURM_STEP_ID", "")).isdecimal() else 0
    on_one_host = re.fullmatch(r"[^\[,]+", node_list) is not None
    return RankInfo(
        rank,
        local_rank,
        world_size,
        world_size if on_one_host else min(world_size, local_rank + 1),
        "slurm",
        restarts=restarts,
        address=variables.get("MASTER_ADDR") or first_host(node_list),
        port=_port(variables) if "MASTER_PORT" in variables else FIRST_PORT + (job + 101 * step) % NUM_PORTS,
        is_task=True,
        uncounted=() if on_one_host else LOCALS[1:],
    )


def first_host(node_list: str) -> str:
    """Return the first host of a list in Slurm's short form: gpu003 of gpu[003-005,9],login1."""
    first = re.match(r"(?:[^\[\],\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?=,|$)", node_list)
    if first is None:
        raise ConfigError(
            f"the list of Slurm's nodes (SLURM_JOB_NODELIST) is {node_list!r}, which names no first host; set "
            "MASTER_ADDR to rank 0's host"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def names_threads() -> bool:
    """Return whether OMP_NUM_THREADS is set, by the user or by torchrun."""
    return "OMP_NUM_THREADS" in os.environ


def share_of_cores(info: RankInfo, variables: Variables = os.environ) -> int:
    """Return how many cores this rank may use: those of its Slurm task, or an equal share of the host's cores."""
    of_task = variables.get("SLURM_CPUS_PER_TASK", "")
    cores = min(num_cores(), int(of_task)) if of_task.isdecimal() else num_cores()
    return max(1, cores if of_task.isdecimal() and info.is_task else cores // info.local_world_size)


def _rank_of(variables: Variables, rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _number(variables, rank_name, 0), _number(variables, size_name, 1)
    if rank >= size:
        raise ConfigError(
            f"{rank_name} is {rank}, but {size_name} is {size}, and ranks count from 0; give each process its own "
            f"{rank_name} below {size}, or let torchrun or srun set both"
        )
    return rank, size


def _port(variables: Variables) -> int:
    if (port := _number(variables, "MASTER_PORT", 1)) > 65535:
        raise ConfigError(f"MASTER_PORT is {port}; the largest port is 65535")
    return port


def _number(variables: Variables, name: str, least: int, *, default: int | None = None) -> int:
    text = variables.get(name, "" if default is None else str(default)).strip()
    if not text.isdecimal() or int(text) < least:
        said = repr(variables[name]) if name in variables else "not set"
        raise ConfigError(
            f"{name} is {said}, but must be a number from {least} on; start the script with torchrun or srun, or unset "
            "its variables"
        )
    return int(text)


def wants_colour(is_terminal: bool, variables: Variables = os.environ) -> bool:
    """Return whether to colour text. NO_COLOR and FORCE_COLOR decide; without them, only a terminal gets colour."""
    if variables.get("NO_COLOR"):
        return False
    return bool(variables.get("FORCE_COLOR")) or (is_terminal and variables.get("TERM") != "dumb")
