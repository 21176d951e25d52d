"""How long does a batch take where the store is four times the memory, next to what other libraries do?

Every contender has a limit of 1.5 GB for its process and the page cache, starts with nothing of the store cached, and
is stopped after a while; what counts is the time of its batches until then. The kernel bounds what all of them may ask
of the disk, reads and writes each: a virtual disk's host has a cache of its own, which would decide who is fast.

The graph is that of graph.WIDE; root is needed, for the limit and to drop the page cache.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import graph
import memory_group
import numpy as np
import peer
import report
from measure import Side, take_turns
from report import Report, Row, Target

import hoploom
from hoploom.store import Store

SIDE = Path(__file__).with_name("disk_side.py")
LIMIT = 1_500_000_000  # bytes: process and page cache
REQUESTS, BYTES = 17_600, 530_000_000  # of the disk in a second: what such a machine's disk does without that cache
ROUNDS = 1  # a pass of all takes 20 minutes, and the bound on the disk leaves little to chance
WORKERS = 2
DROP = Path("/proc/sys/vm/drop_caches")
ENDINGS = {0: "", -9: " until it was killed for more memory than the limit"}  # by exit status


@dataclass(frozen=True)
class Case:
    """What a batch is, and how many there are."""

    batch_size: int
    fanouts: list[int]
    num_batches: int
    most: float  # seconds that ours may take for a batch
    bound: float  # seconds for one contender in one turn, its start included
    packed: int  # bytes of the store that ours may hold with scratch space,
    window: int  # and without

    def __str__(self) -> str:
        return f"a batch from disk, {self.batch_size} seeds, {'-'.join(map(str, self.fanouts))}"


@dataclass(frozen=True)
class Contender:
    """Who is compared with ours, as disk_side.py and as a row name it."""

    name: str
    title: str
    least: float | None = None  # times slower than ours
    turns: int = 1  # the time of so many it may take: one that records before it is measured

    @property
    def is_here(self) -> bool:
        return self.name in ("packed", "window", "mapped", "reads alone")

    @property
    def target(self) -> Target | None:
        return None if self.least is None else Target("ratio", ">=", self.least)


CASES = (
    Case(1024, [15, 10, 5], 12, 12.0, 110.0, 300_000_000, 600_000_000),
    Case(64, [10, 5], 1024, 0.8, 60.0, 1_000_000_000, 1_000_000_000),
)
TINY: dict[str, Any] = {"packed": 400_000, "window": 400_000}
OURS = Contender("packed", "")
OTHERS = (
    Contender("window", "Hoploom, no scratch space"),
    Contender("reads alone", "Hoploom's disk reads alone", turns=3),
    Contender("mapped", "Hoploom, mapped"),
    Contender("PyG", "PyG, mapped", 8.0),
    Contender("PyG, advised", "PyG, mapped, MADV_RANDOM", 8.0),
    Contender("GraphBolt", "GraphBolt, DiskBasedFeature", 3.0),
)


@dataclass
class Run:
    """What one contender did in one turn, from the lines that it said."""

    opened: float
    batches: list[dict[str, float]]
    bound: float
    ending: str  # "", or how it came to an early end

    @property
    def seconds(self) -> float:
        """For a batch; at least, where it made none."""
        return self.batches[-1]["seconds"] / len(self.batches) if self.batches else self.bound - self.opened

    def __str__(self) -> str:
        if not self.batches:
            return f"no batch{self.ending}; counted as {self.seconds:.0f} s"
        last, count = self.batches[-1], len(self.batches)
        wanted = statistics.mean(batch["rows"] for batch in self.batches)
        each = f"{wanted:.0f} rows and {last['read'] / count / 1e6:.0f} MB read for each"
        opened = f"opened in {self.opened:.1f} s, process at most {last['peak'] / 1e6:.0f} MB"
        return f"{count} batches{self.ending}, {each}; {opened}"


@dataclass
class Arena:
    """One case over one store, with a limit or, to try the script out, without."""

    store: Store
    folder: Path
    case: Case
    seeds: Path
    limit: int | None
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def side(self, contender: Contender, python: str) -> Side:
        """One turn of a contender."""
        files = peer.files_of(self.folder, self.store)
        request = {
            "store": str(self.folder),
            "files": {"indptr": files["indptr"], "indices": files["indices"], "x": files["fields"]["x"]},
            "seeds": str(self.seeds),
            "fanouts": self.case.fanouts,
            "batch_size": self.case.batch_size,
            "num_workers": WORKERS,
            "limit": self.limit,
            "memory": self.case.packed if contender.name == "packed" else self.case.window,
            "scratch": str(self.folder.parent),
        }
        command = [python, str(SIDE), contender.name, json.dumps(request)]

        def run(_: int) -> float:
            done = self._run(command, self.case.bound * contender.turns, contender.name == "reads alone")
            self.runs.setdefault(contender.name, []).append(done)
            return done.seconds

        return run

    def _run(self, command: Sequence[str], bound: float, remembers: bool) -> Run:
        """Run a contender; what it `remembers` for a replay needs memory."""
        drop_cache(self.folder)
        if self.limit is None:
            return said_by(command, bound)
        disk = memory_group.Disk(self.folder, REQUESTS, BYTES)
        with memory_group.limited(None if remembers else self.limit, disk) as group:
            return said_by(group.command(command), bound)


def said_by(command: Sequence[str], bound: float) -> Run:
    """Run it until it ends or its time is up."""
    with tempfile.TemporaryFile("w+") as lines, tempfile.TemporaryDirectory() as home:
        # The figures of the disk that Hoploom keeps at home are those without the bound.
        mine = {"HOME": home, "DGLBACKEND": "pytorch"}  # DGL speaks where it finds no file of its own
        process = subprocess.Popen(command, stdout=lines, env=os.environ | mine)
        try:
            ending = ENDINGS[process.wait(timeout=bound)]
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ending = " until it was stopped"
        except KeyError as error:
            raise SystemExit(f"{command[-2]} failed with status {error}; its own message stands above") from error
        lines.seek(0)
        said = [json.loads(line) for line in lines if line.endswith("\n")]
    opened = said[0]["opened"] if said else bound
    return Run(opened, said[1:], bound, ending)


def drop_cache(folder: Path) -> None:
    """Nothing of the store is cached, as after a reboot."""
    graph.forget(folder)
    try:
        DROP.write_text("1")
    except OSError:  # not root: the store's own files were dropped
        return


def measure(tiny: bool) -> Report:
    """Every case, all contenders in turns."""
    folder = graph.path_of(graph.WIDE, tiny)
    store = hoploom.open(folder)
    rows, notes = [], []
    found = {other: python for other in OTHERS if (python := python_of(other)) is not None}
    for case in CASES:
        if tiny:
            case = replace(case, batch_size=case.batch_size // 16, num_batches=case.num_batches // 8, **TINY)
        with arena(store, folder, case, None if tiny else LIMIT) as one:
            sides = {contender.name: one.side(contender, python) for contender, python in found.items()}
            sides = {OURS.name: one.side(OURS, sys.executable), **sides}
            spreads = take_turns(sides, repetitions=ROUNDS, warmups=0)
        ours = spreads.pop(OURS.name)
        rows.append(Row(str(case), "s", ours, "-", target=Target("ours", "<", case.most)))
        for other in found:
            theirs = spreads[other.name]
            rows.append(Row(str(case), "s", ours, other.title, theirs, theirs.median / ours.median, other.target))
        notes += [f"{case}: {name}: {runs[-1]}" for name, runs in one.runs.items()]
    notes += dict.fromkeys(filter(None, (versions_of(other.name, python) for other, python in found.items())))
    absent = [other.title for other in OTHERS if other not in found]
    return Report(rows, notes, absent)


@contextmanager
def arena(store: Store, folder: Path, case: Case, limit: int | None) -> Iterator[Arena]:
    """The seeds of a case, in a file that all contenders read."""
    with tempfile.TemporaryDirectory() as scratch:
        seeds = Path(scratch) / "seeds.npy"
        np.save(seeds, graph.seeds_at(store, 0, case.num_batches * case.batch_size).numpy())
        yield Arena(store, folder, case, seeds, limit)


def python_of(contender: Contender) -> str | None:
    """The interpreter of the first venv that has what it needs."""
    pythons = [sys.executable] if contender.is_here else [str(path) for path in peer.pythons()]
    return next((python for python in pythons if versions_of(contender.name, python)), None)


def versions_of(name: str, python: str) -> str | None:
    """What it says of itself; None where it cannot be imported."""
    done = subprocess.run([python, str(SIDE), name], stdout=subprocess.PIPE, text=True, timeout=120)
    return json.loads(done.stdout)["versions"] if done.returncode == 0 else None


if __name__ == "__main__":
    report.main(measure)
