"""How long does a step take on hosts with a line of 1 or 10 Gb/s between them, next to what the line allows?

Three hosts on one machine: network namespaces on a switch, whose wires the kernel limits (tbf). The limit of a step is
the bytes that the busiest wire carried in one direction, by its rate; what was made ahead when the last batch came
counts too. Round trips of 1 ms come from a process beside each host's trainer that delays all bytes (delaying.py):
kernels without netem have nothing for it. The cores of all hosts are the same two, which bounds what is not bound by
the line; every rank has one thread. A batch has two thirds of all nodes, so that look-ahead sends a row once for many
batches: in a graph much larger than its batches, the bytes are those of look-ahead 1. Needs root.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cluster
import graph
import report
from measure import Side, Spread, spread_of, take_turns
from report import Report, Row

sys.path.append(str(report.ROOT / "tests"))
from support.networks import Host, HostsError, hosts_or_error

HERE = Path(__file__).parent
RATES = (1, 10)  # Gb/s
NEAR, FAR = "0.1 ms", "1 ms"  # round trips; the near one is what the wires themselves take, at most
ROUND_TRIP = {NEAR: 0.0, FAR: 1e-3}  # that is aimed at; 0: as it is
PARTS, WHOLE, ECHO = 7000, 7001, 7002  # ports
TOKEN = "a token for hosts that nobody else reaches"
REPETITIONS = 3
WORKER: dict[str, tuple[dict[str, Any], int]] = {  # what is asked -> (how the graph is opened, batches)
    "worker mode, topology here": ({"topology": "local"}, 12),
    "worker mode, topology here, look-ahead 1": ({"topology": "local", "look_ahead": 1}, 4),
    "worker mode, topology parted": ({"topology": "parted"}, 12),
}
SERVED: dict[str, tuple[dict[str, Any], int]] = {  # what is asked -> (what the loader is given, batches)
    "served batches for PyG's models": ({}, 4),
    "served batches for hoploom.nn's models": ({"aggregate": "mean"}, 4),
}
LOCAL, LOCAL_BATCHES = "local loaders", 12


class Delays:
    """The processes that make lines longer, one beside each host's trainer."""

    def __init__(self, stack: ExitStack, found: Sequence[Host]) -> None:
        commands = []
        for number, host in enumerate(found):
            host.add_address(_delayed(number, 0).rpartition(":")[0])
            ways = [
                f"{_delayed(number, port + 10 * other)}={peer.address}:{port}"
                for other, peer in enumerate(found)
                for port in (PARTS, WHOLE, ECHO)
            ]
            commands.append(host.command([sys.executable, str(HERE / "delaying.py"), *ways]))
        self._all = stack.enter_context(cluster.Trainers(commands))

    def set(self, seconds: float) -> None:
        """One way."""
        self._all.tell_all({"delay": seconds})

    def cores(self) -> list[float]:
        """Seconds of a core that each has had."""
        return [float(answer["cores"]) for answer in self._all.tell_all({})]


def _delayed(number: int, port: int) -> str:
    """Where a host finds others when the line is long."""
    return f"10.79.1.{number + 1}:{port}"


@dataclass
class Cluster:
    """The hosts, with servers and trainers that have opened the graph over near lines and over far ones."""

    hosts: Sequence[Host]
    workers: cluster.Trainers
    client: cluster.Trainers
    delays: Delays
    echo: list[str]  # the command of a bare echo's client
    is_warm: bool = False
    limits: dict[str, list[float]] = field(default_factory=dict)  # ms of the busiest wire, by question
    sent: dict[str, list[float]] = field(default_factory=dict)  # MB of it for a batch
    delaying: dict[str, list[float]] = field(default_factory=dict)  # ms of a core for a batch, of the busiest host

    def walk(self, trainers: cluster.Trainers, name: str, batches: int, rate: float) -> float:
        """ms for a batch; what the wires carried meanwhile is kept."""
        before, cores = [host.carried() for host in self.hosts], self.delays.cores()
        answers = trainers.tell_all({"do": "walk", "name": name, "batches": batches})
        after = [host.carried() for host in self.hosts]
        had = [now - then for now, then in zip(self.delays.cores(), cores, strict=True)]
        trainers.tell_all({"do": "rest", "name": name})
        wires = zip((end for host in after for end in host), (end for host in before for end in host), strict=True)
        busiest = max(now - then for now, then in wires)
        self.sent.setdefault(name, []).append(busiest / batches / 1e6)
        self.limits.setdefault(name, []).append(busiest / batches * 8 / (rate * 1e6))
        self.delaying.setdefault(name, []).append(max(had) / batches * 1e3)
        return float(max(answer["seconds"] for answer in answers)) / batches * 1e3

    def round_trip(self, far: bool) -> float:
        """Of one byte, in seconds."""
        address = _delayed(0, ECHO + 10) if far else f"{self.hosts[1].address}:{ECHO}"
        done = subprocess.run([*self.echo, address], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
        return float(json.loads(done.stdout)["seconds"])


def measure(tiny: bool) -> Report:
    """Every line in turn; on each, every way takes turns with the others and with loaders that need no line."""
    try:
        with _running(tiny) as found:
            return _on_every_line(found)
    except HostsError as error:
        return Report([], absent=[f"hosts of their own: {error}"])


def _on_every_line(found: Cluster) -> Report:
    rows, notes = [], []
    for rate in RATES:
        for host in found.hosts:
            host.limit(rate)
        for length in ROUND_TRIP:
            of_line, told = _on_a_line(found, rate, length)
            rows += of_line
            notes.append(told)
            print(told, file=sys.stderr, flush=True)
    sent = [
        Row(f"carried by the busiest wire for a batch, {_question(name)}", "MB", _kept(sizes), "-")
        for name, sizes in found.sent.items()
    ]
    return Report([*sent, *rows], notes)


def _on_a_line(found: Cluster, rate: int, length: str) -> tuple[list[Row], str]:
    trip = _set_round_trip(found, ROUND_TRIP[length])
    sides: dict[str, Side] = {LOCAL: lambda _: found.walk(found.workers, LOCAL, LOCAL_BATCHES, rate)}
    for ways, trainers in ((WORKER, found.workers), (SERVED, found.client)):
        for question, (_, batches) in ways.items():
            name = f"{question}, {length}"
            sides[name] = partial(_walked, found, trainers, name, batches, rate)
    for kept in (found.limits, found.sent, found.delaying):
        kept.clear()
    measured = take_turns(sides, repetitions=REPETITIONS, warmups=0 if found.is_warm else 1)
    found.is_warm = True
    rows, local = [], measured.pop(LOCAL)
    for name, ours in measured.items():
        limit = _kept(found.limits[name])
        question = f"{rate} Gb/s, {length}, {_question(name)}"
        rows.append(Row(question, "ms/batch", ours, "what the line allows", limit, limit.median / ours.median))
    told = f"{rate} Gb/s, {length}: a bare byte there and back {trip * 1e3:.2f} ms; "
    told += f"three local loaders {local.median:.0f} ms/batch"
    if ROUND_TRIP[length]:
        cores = max(_kept(each).median for each in found.delaying.values())
        told += f"; at most {cores:.0f} ms of a core for a batch to delay its bytes"
    del found.sent[LOCAL]
    return rows, told


def _set_round_trip(found: Cluster, seconds: float) -> float:
    """Delay until a byte takes so long there and back, or not at all; how long it takes then."""
    delay = 0.0
    for _ in range(3 if seconds else 1):
        found.delays.set(delay)
        trip = found.round_trip(bool(seconds))
        delay = max(0.0, delay + (seconds - trip) / 2)
    return trip


def _walked(found: Cluster, trainers: cluster.Trainers, name: str, batches: int, rate: int, _: int) -> float:
    return found.walk(trainers, name, batches, rate)


def _question(name: str) -> str:
    """Without the length of the line."""
    return name.rpartition(", ")[0]


def _kept(values: Sequence[float]) -> Spread:
    """Of the repetitions that count."""
    return spread_of(values[-REPETITIONS:])


@contextmanager
def _running(tiny: bool) -> Iterator[Cluster]:
    """Hosts with servers, trainers and delays, all ended with the block."""
    parts, whole = cluster.parts_of(cluster.SHAPE, 3, tiny), graph.path_of(cluster.SHAPE, tiny)
    with ExitStack() as stack:
        token = Path(stack.enter_context(TemporaryDirectory())) / "token"
        token.write_text(TOKEN.replace(" ", "-"))
        token.chmod(0o600)
        found = stack.enter_context(hosts_or_error(3))
        options = ["--token-file", str(token), "--listen"]
        commands = [
            host.command(cluster.serve_command(parts, [number], *options, f"{host.address}:{PARTS}"))
            for number, host in enumerate(found)
        ]
        there = f"{found[1].address}:{WHOLE}"
        commands.append(found[1].command(cluster.serve_command(whole, [], "--threads", "2", *options, there)))
        stack.enter_context(cluster.serving(commands))
        echo = found[1].command([sys.executable, str(HERE / "echoing.py"), f"{found[1].address}:{ECHO}", "serve"])
        stack.enter_context(cluster.serving([echo]))
        trainers = [host.command(cluster.trainer_command()) for host in found]
        workers = stack.enter_context(cluster.Trainers(trainers))
        client = stack.enter_context(cluster.Trainers(trainers[:1]))
        delays = Delays(stack, found)
        for length, trip in ROUND_TRIP.items():
            _open(workers, client, found, str(parts), {"token_file": str(token)}, length, far=bool(trip))
        workers.tell_all({"do": "open", "name": LOCAL, "path": str(parts), "servers": []})
        workers.tell([_loader(LOCAL, rank, 3) for rank in range(3)])
        asking = found[0].command([sys.executable, str(HERE / "echoing.py")])
        yield Cluster(found, workers, client, delays, asking)


def _open(
    workers: cluster.Trainers,
    client: cluster.Trainers,
    found: Sequence[Host],
    path: str,
    opened: dict[str, Any],
    length: str,
    *,
    far: bool,
) -> None:
    """The graph, in every way, over lines of one length."""

    def reached(own: int, other: int, port: int) -> str:
        return _delayed(own, port + 10 * other) if far and own != other else f"{found[other].address}:{port}"

    for question, (options, _) in WORKER.items():
        told = {"do": "open", "name": f"{question}, {length}", "path": path, **options, **opened}
        servers = [[reached(rank, other, PARTS) for other in range(3)] for rank in range(3)]
        workers.tell([told | {"servers": of_rank, "parts": [rank]} for rank, of_rank in enumerate(servers)])
        workers.tell([_loader(told["name"], rank, 3) for rank in range(3)])
    for question, (options, _) in SERVED.items():
        name = f"{question}, {length}"
        client.tell_all({"do": "open", "name": name, "path": None, "servers": [reached(0, 1, WHOLE)], **opened})
        client.tell_all(_loader(name, 0, 1) | {"num_workers": 2} | options)


def _loader(name: str, rank: int, world_size: int) -> dict[str, Any]:
    return {"do": "load", "name": name, "rank": rank, "world_size": world_size, "num_workers": 1}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts are removed then too
    report.main(measure)
