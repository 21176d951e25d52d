"""How long does `hoploom partition --engine spark` take, next to what `hoploom plan` says, and what does it hold?

A standalone cluster on this machine: a master, two workers of one core, and a driver that shares these two cores with
them. Graphs have planted communities and ten edges a node; they are cut into four parts by `stream`. Every driver is a
fresh process, and its start counts. The rates of the plan come from the middle graph, beyond what the least one takes;
the others are checks. A row is printed on stderr as soon as it is measured; what fails or takes too long is absent.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import report
import spark_cluster
from measure import spread_of
from report import Report, Row, Target
from spark_building import ROLES, Findings, keep_manifest, named, seconds_of, seconds_row, stages_of
from spark_cluster import DriverError, Ended
from spark_plan import constants_of, cut_rates_of, planned_cut
from spark_tables import EDGES_PER_NODE

import hoploom

LEAST, SIZES = 40_000, (400_000, 4_000_000, 20_000_000)  # edges
MIDDLE, LARGE = SIZES[1:]
RATES = "rates of the plan for cuts, for src/hoploom/scale/defaults.json: "
FLAT = Target("ratio", "<", 1.25)


def measure(tiny: bool) -> Report:
    """Three sizes, and one so small that all is overhead."""
    with tempfile.TemporaryDirectory(prefix="hoploom-spark-") as name, spark_cluster.started(Path(name)) as cluster:
        bench = _Bench(Path(name), cluster, 100 if tiny else 1)
        for num_edges in (LEAST, *SIZES):
            with bench.or_absent(f"cut of {named(num_edges)}"):
                bench.cut(num_edges)
        for what, step in STEPS.items():
            with bench.or_absent(what):
                step(bench)
    return Report(bench.rows, bench.notes, bench.absent)


@dataclass
class _Bench(Findings):
    folder: Path
    cluster: spark_cluster.SparkCluster
    smaller: int  # than named
    cuts: dict[int, Ended] = field(default_factory=dict)  # by edges as they are named

    def graph(self, num_edges: int) -> Path:
        """The folder of graph.store, made when it is asked for."""
        folder = self.folder / f"graph-{num_edges}"
        if not folder.exists():
            folder.mkdir()
            num_nodes = num_edges // EDGES_PER_NODE // self.smaller
            store = folder / "graph.store"
            hoploom.generate(store, num_nodes=num_nodes, avg_degree=EDGES_PER_NODE, num_features=1)
        return folder

    def cut(self, num_edges: int) -> None:
        folder = self.graph(num_edges)
        self.cuts[num_edges] = ended = spark_cluster.on_spark(self.cluster, "cut", folder, 2)
        keep_manifest(folder / "out.store", folder / "two.json")
        self.notes.append(f"stages of the cut of {named(num_edges)}, s: {stages_of(ended)}")
        print(self.notes[-1], file=sys.stderr, flush=True)

    def done(self, num_edges: int) -> Ended:
        """DriverError if this cut is absent."""
        if num_edges not in self.cuts:
            raise DriverError(f"needs the cut of {named(num_edges)}")
        return self.cuts[num_edges]


def _planned(bench: _Bench) -> None:
    """Rates of the middle graph; a stage without work is measured."""
    bench.done(MIDDLE)
    stage = spark_cluster.on_spark(bench.cluster, "stages", bench.graph(LEAST), 2).stages["stage"]
    rates = cut_rates_of(bench.cuts, stage, bench.done(LEAST) and LEAST, MIDDLE)
    bench.notes.append(f"{RATES}{json.dumps(rates)}")
    for size in SIZES:
        forecast = spread_of([planned_cut(size, constants_of(rates))])
        bench.say(seconds_row(f"{named(size)}: cut", seconds_of([bench.done(size)]), "plan", forecast))


def _growth(bench: _Bench) -> None:
    large, middle = bench.done(LARGE), bench.done(MIDDLE)
    question = f"{named(LARGE)}: cut"
    bench.say(seconds_row(question, seconds_of([large]), f"{named(MIDDLE)}: cut", seconds_of([middle])))
    for role in ROLES:
        ours, theirs = (ended.peaks.get(role, 0) / 1e6 for ended in (large, middle))
        target = FLAT if role == "driver" else None
        question = f"{named(LARGE)}: most memory of a process that cuts, {role}"
        spreads = spread_of([ours]), spread_of([theirs])
        bench.say(Row(question, "MB", spreads[0], named(MIDDLE), spreads[1], ours / max(1e-9, theirs), target))
    took = ", ".join(f"{role} {large.cores.get(role, 0.0):.1f}" for role in ROLES)
    bench.notes.append(f"seconds of a core that the cut of {named(LARGE)} took: {took}; the machine has two cores")


def _one_worker(bench: _Bench) -> None:
    """The same parts, and how much longer."""
    two, folder = bench.done(MIDDLE), bench.graph(MIDDLE)
    one = spark_cluster.on_spark(bench.cluster, "cut", folder, 1)
    keep_manifest(folder / "out.store", folder / "one.json")
    question = f"{named(MIDDLE)}: cut by two workers"
    bench.say(seconds_row(question, seconds_of([two]), "one worker", seconds_of([one])))
    same = (folder / "one.json").read_text() == (folder / "two.json").read_text()
    assert same, "one worker makes other parts than two"
    bench.notes.append("one worker and two make the same bytes")


def _one_process(bench: _Bench) -> None:
    for size in (MIDDLE, LARGE):
        here = spark_cluster.in_process(bench.graph(size), os.environ, "cut")
        keep_manifest(bench.graph(size) / "out.store", bench.graph(size) / "process.json")
        bench.say(seconds_row(f"{named(size)}: cut", seconds_of([bench.done(size)]), "one process", seconds_of([here])))


STEPS = {"plan": _planned, "growth": _growth, "one worker": _one_worker, "one process": _one_process}


if __name__ == "__main__":
    report.main(measure)
