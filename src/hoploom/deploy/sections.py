"""The keys of a cluster file as they are written: above the sections, and of a host. The other sections: cluster.py.

What is left out here is worked out from the rest in resolve.py.
"""

# ruff: noqa: RUF009  (key() is dataclasses.field)

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hoploom.config import rules
from hoploom.config.keys import key
from hoploom.deploy import rules as own_rules
from hoploom.deploy.cluster_file import (
    EXECUTORS,
    MODES,
    KubernetesOptions,
    Security,
    ServerOptions,
    SlurmOptions,
    SshOptions,
)


@dataclass(frozen=True)
class TopKeys:
    """What stands above the sections."""

    store: str | None = key(
        None,
        "the graph, at the same path on every host; left out: the command knows it",
        own_rules.place(),
        example="graph.store",
    )
    mode: str | None = key(
        None,
        "worker: servers beside trainers; server-client: apart; none: trainers only. Left out: worker with a store",
        rules.choice(*MODES),
        example="worker",
    )
    executor: str | None = key(
        None,
        "who starts it; left out: local if all hosts are this one, ssh if they have names, else slurm",
        rules.choice(*EXECUTORS),
        example="ssh",
    )
    servers: int | None = key(
        None, "how many of `hosts = 4` serve, where they have no names yet", rules.whole(1, 100_000), example=2
    )
    processes: int | None = key(None, "trainers per host; left out: one per device", rules.whole(1, 4096), example=4)
    python: str | None = key(
        None,
        "the Python that runs them; left out: the path of this one",
        own_rules.place(),
        example="/opt/venv/bin/python",
    )
    folder: str | None = key(
        None,
        "the working directory on every host; left out: the current one",
        own_rules.place(),
        example="/srv/papers",
    )
    rendezvous: str | None = key(
        None,
        "where torchrun's processes meet; left out: port 29500 of the first trainers' host",
        own_rules.address(),
        example="10.0.0.1:29500",
    )
    max_restarts: int = key(
        0, "how often torchrun starts failed trainers again, where one host has them all", rules.whole(0, 1000)
    )
    environment: dict[str, str] = key(
        {}, "variables of every process", own_rules.variables(), example={"NCCL_DEBUG": "INFO"}
    )


@dataclass(frozen=True)
class HostKeys:
    """One host: [hosts.NAME]."""

    address: str | None = key(
        None, "what other hosts reach it by; left out: its name", own_rules.host(), example="10.0.0.1"
    )
    ssh: str | None = key(
        None, "what ssh connects to; left out: the address", own_rules.login(), example="root@10.0.0.1"
    )
    ssh_port: int | None = key(
        None, "the port of its ssh; left out: as ssh's configuration says", own_rules.port(), example=22
    )
    processes: int | None = key(None, "trainers on it", rules.whole(0, 4096), example=4)
    devices: tuple[int, ...] | None = key(None, "the GPUs that its trainers see", own_rules.ids("GPUs"), example=[0, 1])
    serves: bool | None = key(None, "whether a graph server runs on it", rules.flag(), example=True)
    port: int | None = key(None, "where that server listens", own_rules.port(), example=7700)
    parts: tuple[int, ...] | None = key(None, "the store's parts that it holds", own_rules.ids("parts"), example=[0])
    python: str | None = key(None, "another Python than the others'", own_rules.place(), example="/opt/venv/bin/python")
    folder: str | None = key(None, "another working directory", own_rules.place(), example="/srv/papers")
    environment: dict[str, str] = key(
        {}, "variables of its processes", own_rules.variables(), example={"NCCL_DEBUG": "INFO"}
    )


SECTIONS: Mapping[str, type[Any]] = {
    "server": ServerOptions,
    "security": Security,
    "ssh": SshOptions,
    "slurm": SlurmOptions,
    "kubernetes": KubernetesOptions,
}
HOSTS = "hosts"
