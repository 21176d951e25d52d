"""How fast does Spark build a store of parts, against Spark doing only the joins of the ids and one shuffle?

A standalone cluster on this machine: a master, two workers of one core, and a driver that shares these two cores with
them. Tables are Parquet with sparse integers as ids, ten edges a node, all ends random. Every process is a fresh one,
and its start counts where a row does not say something else. 200 M edges take up to 15 GB of the temporary folder. A
row is printed on stderr as soon as it is measured; what fails or takes too long is absent.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import report
import spark_cluster
from measure import Spread, spread_of
from report import Report, Row, Target
from spark_cluster import DriverError, Ended
from spark_tables import write_tables

SIZES = (200_000, 2_000_000, 20_000_000, 200_000_000)  # edges
TURNS = 3
SCRATCH_BYTES = 75  # of the temporary folder, for an edge: its table, shuffles, pieces and files
BEFORE = "caf8db2"  # the last commit whose builds on Spark passed all rows through the driver
JOINS = "joins and shuffle"
EDGES = "node to node"  # the stage of a build that joins, moves and writes the edges
SIDES = ("build", "joins")
ROLES = ("driver", "driver's JVM", "executor", "task")


def measure(tiny: bool) -> Report:
    """The largest graph takes as long as all before it."""
    sizes = Sizes(*(size // (100 if tiny else 1) for size in SIZES))
    with tempfile.TemporaryDirectory(prefix="hoploom-spark-") as name, spark_cluster.started(Path(name)) as cluster:
        bench = _Bench(Path(name), cluster, sizes, turns=1 if tiny else TURNS)
        for what, step in STEPS.items():
            with bench.or_absent(what):
                step(bench)
    return Report(bench.rows, bench.notes, bench.absent)


class Sizes(NamedTuple):
    """Graphs by their edges."""

    least: int  # its build is nothing but the start of processes and jobs
    small: int
    middle: int
    large: int


@dataclass(kw_only=True)
class Findings:
    """What drivers have shown so far."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    @contextmanager
    def or_absent(self, what: str) -> Iterator[None]:
        """A driver that fails is named in the report; what comes after it goes on."""
        try:
            yield
        except DriverError as error:
            print(f"{what} is absent: {error}", file=sys.stderr)
            self.absent.append(f"{what}: {error}")

    def say(self, *rows: Row, note: str = "") -> None:
        self.rows += rows
        self.notes += [note] if note else []
        print(report.table(rows), note, sep="\n", file=sys.stderr, flush=True)


@dataclass
class _Bench(Findings):
    folder: Path
    cluster: spark_cluster.SparkCluster
    sizes: Sizes
    turns: int
    ended: dict[tuple[int, str], list[Ended]] = field(default_factory=dict)  # by edges and side

    def tables(self, num_edges: int) -> Path:
        """Made when they are asked for."""
        path = self.folder / f"tables-{num_edges}"
        if not path.exists():
            if shutil.disk_usage(self.folder).free < num_edges * SCRATCH_BYTES:
                raise DriverError(f"there are less than {num_edges * SCRATCH_BYTES / 1e9:.0f} GB in {self.folder}")
            write_tables(path, num_edges)
        return path

    def spark(self, num_edges: int, side: str, cores: int = 2) -> Ended:
        """A driver; the store is removed, but for its manifest."""
        folder = self.tables(num_edges)
        ended = spark_cluster.on_spark(self.cluster, side, folder, cores)
        keep_manifest(folder / "out.store", folder / "spark.json")
        if cores == 2:
            self.ended.setdefault((num_edges, side), []).append(ended)
        return ended

    def median(self, num_edges: int, side: str) -> Ended:
        """The driver that took the median time of those so far; DriverError if there was none."""
        ended = sorted(self.ended.get((num_edges, side), []), key=lambda one: one.seconds)
        if not ended:
            raise DriverError(f"needs a driver that has ended: {side} of {named(num_edges)}")
        return ended[len(ended) // 2]


def _against_joins(bench: _Bench) -> None:
    """The two take turns."""
    builds, joins = list[Ended](), list[Ended]()
    for _ in range(bench.turns):
        builds.append(bench.spark(bench.sizes.middle, "build"))
        joins.append(bench.spark(bench.sizes.middle, "joins"))
    question, ours = f"{named(bench.sizes.middle)}: build", seconds_of(builds)
    edges = spread_of(one.stages[EDGES] for one in builds)
    shuffle = spread_of(one.stages[JOINS] for one in joins)
    bench.say(
        seconds_row(question, ours, "Spark, joins and one shuffle", shuffle, Target("ratio", "<", 1.6)),
        seconds_row(question, ours, "Spark, joins and one shuffle, with its start and numbering", seconds_of(joins)),
        seconds_row(f"{named(bench.sizes.middle)}: edges of the build", edges, "Spark, joins and one shuffle", shuffle),
        note=f"stages of a build, s: {stages_of(bench.median(bench.sizes.middle, 'build'))}",
    )
    bench.notes.append(f"stages of Spark alone, s: {stages_of(bench.median(bench.sizes.middle, 'joins'))}")


def _duckdb(bench: _Bench) -> None:
    """This commit and an earlier one take turns; Spark's store is the same."""
    folder, earlier = bench.tables(bench.sizes.middle), spark_cluster.sources_of(BEFORE, bench.folder / "before")
    now, before = list[Ended](), list[Ended]()
    for number in range(1 + bench.turns):
        for found, environment in ((now, {}), (before, {"PYTHONPATH": str(earlier)})):
            ended = spark_cluster.in_process(folder, {**os.environ, **environment})
            found += [ended] * (number > 0)
            keep_manifest(folder / "out.store", folder / "duckdb.json")
    ours, theirs = (spread_of(sum(one.stages.values()) for one in found) for found in (now, before))
    bench.say(
        seconds_row(
            f"{named(bench.sizes.middle)}: build by DuckDB",
            ours,
            f"DuckDB, {BEFORE}",
            theirs,
            Target("ratio", "<", 1.1),
        )
    )
    same = (folder / "spark.json").read_text() == (folder / "duckdb.json").read_text()
    assert same, "DuckDB's store of the same tables is another one"


def _growth(bench: _Bench) -> None:
    """Ten times the edges, once."""
    large, middle = bench.spark(bench.sizes.large, "build"), bench.median(bench.sizes.middle, "build")
    question, seconds = f"{named(bench.sizes.large)}: build", seconds_of([large])
    joins = bench.spark(bench.sizes.large, "joins")
    shuffle = spread_of([joins.stages[JOINS]])
    bench.say(
        seconds_row(question, seconds, "Spark, joins and one shuffle", shuffle, Target("ratio", "<", 1.6)),
        seconds_row(
            question, seconds, "Spark, joins and one shuffle, with its start and numbering", seconds_of([joins])
        ),
        seconds_row(
            question, seconds, f"{named(bench.sizes.middle)}: build", seconds_of([middle]), Target("ratio", "<", 11)
        ),
        *(_peak(bench, role, large, middle) for role in ROLES),
        note=f"stages of the build of {named(bench.sizes.large)}, s: {stages_of(large)}",
    )
    bench.notes.append(f"stages of Spark alone, {named(bench.sizes.large)}, s: {stages_of(joins)}")
    folder = bench.tables(bench.sizes.large)
    here = spark_cluster.in_process(folder, os.environ)
    bench.say(seconds_row(question, seconds, "DuckDB, one process", seconds_of([here])))


def _peak(bench: _Bench, role: str, large: Ended, middle: Ended) -> Row:
    ours, theirs = (spread_of([one.peaks.get(role, 0) / 1e6]) for one in (large, middle))
    target = Target("ratio", "<", 1.25) if role == "driver" else None
    question = f"{named(bench.sizes.large)}: most memory of a process, {role}"
    return Row(
        question, "MB", ours, f"{named(bench.sizes.middle)}", theirs, ours.median / max(1e-9, theirs.median), target
    )


def _scaling(bench: _Bench) -> None:
    """One worker's executor; the two were measured before."""
    two = bench.median(bench.sizes.middle, "build")
    one = seconds_of([bench.spark(bench.sizes.middle, "build", cores=1)])
    ratio = one.median / two.seconds
    took = ", ".join(f"{role} {two.cores.get(role, 0.0):.1f}" for role in ROLES)
    bench.say(
        Row(
            f"{named(bench.sizes.middle)}: build by two workers",
            "s",
            seconds_of([two]),
            "one worker",
            one,
            ratio,
            FASTER,
        ),
        note=f"seconds of a core that processes took of this build by two workers: {took}; the machine has two cores",
    )


def _smaller(bench: _Bench) -> None:
    for num_edges, side in ((bench.sizes.least, "joins"), (bench.sizes.least, "build"), (bench.sizes.small, "build")):
        bench.spark(num_edges, side)


FASTER = Target("ratio", ">=", 1.6)
STEPS = {
    "build against the joins": _against_joins,
    "build by DuckDB": _duckdb,
    "one worker": _scaling,
    "smaller graphs": _smaller,
    "growth": _growth,
}


def named(num_edges: int) -> str:
    return f"{num_edges / 1e6:,.3g} M edges"


def seconds_of(ended: Sequence[Ended]) -> Spread:
    return spread_of(one.seconds for one in ended)


def seconds_row(question: str, ours: Spread, baseline: str, theirs: Spread, target: Target | None = None) -> Row:
    return Row(question, "s", ours, baseline, theirs, ours.median / theirs.median, target)


def stages_of(ended: Ended) -> str:
    return ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in ended.stages.items())


def keep_manifest(store: Path, path: Path) -> None:
    if store.exists():
        (store / "store.json").replace(path)
        shutil.rmtree(store)


if __name__ == "__main__":
    report.main(measure)
