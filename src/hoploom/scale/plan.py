"""The plan of a graph on a cluster: memory, a batch, its traffic, its time, the build, and what does not fit.

Everything is an expected value from a few measured rates; nothing is simulated. docs/scale.md explains the formulas and
compares them with measurements.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Literal

from hoploom import html
from hoploom.config.values import as_bytes, as_count, as_seconds, as_share
from hoploom.scale import sizes
from hoploom.scale.constants import SHORT_ROW, Constants, default_constants
from hoploom.scale.sizes import BatchSize, Item
from hoploom.scale.spec import Question

ID_BYTES = 8
EDGE_BYTES = 16  # of an edge in a table, in a temporary file, and in what Spark writes
NODE_ROW = 16  # of a node without its fields, in what Spark writes
LIBRARIES = 250e6  # private bytes of a process that has imported torch and Hoploom (benchmarks/RESULTS.md)
HASH_ENTRY = 48  # bytes of a node of the batch in a hash table, half of whose slots are free
PREFETCH = 2  # batches ahead per loader thread
STATES = 4  # weights, gradients and Adam's two
PARTITION_BYTES = 20  # per node, any method: its part, how often it was sampled, its new id
STREAM_BYTES = 24  # per node, of the stream partitioner, before any of that
METIS_BYTES = 32  # per edge: both directions as 64-bit ids, and as much again to work in
MOST_HOSTS = 1 << 16


@dataclass(frozen=True)
class StepTimes:
    """Seconds that each activity of a rank's step takes; they run at the same time."""

    sampling: float
    gathering: float
    network: float  # of the host's link
    model: float  # 0 if it was not measured

    @property
    def loading(self) -> float:
        return self.sampling + self.gathering

    @property
    def total(self) -> float:
        return max(self.loading, self.network, self.model)

    @property
    def bottleneck(self) -> str:
        names = ("sampling", "gathering") if self.total == self.loading else ("network", "model")
        return max(names, key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class Finding:
    """A limit that a plan meets, and a hint."""

    level: Literal["breaks", "slow"]
    what: str
    way_out: str


@dataclass(frozen=True)
class ScalePlan:
    """A question and its answers, each calculated on first access."""

    question: Question
    constants: Constants
    everywhere: bool  # every host maps the whole topology

    @cached_property
    def store(self) -> list[Item]:
        """The files of one host."""
        return sizes.host_items(self.question, everywhere=self.everywhere)

    @cached_property
    def process(self) -> dict[str, float]:
        """Private bytes of one trainer process."""
        question, size = self.question, self.batch
        one_map = size.nodes * HASH_ENTRY if sizes.is_hashed(question) else question.nodes * sizes.SLOT
        batches = question.workers * PREFETCH + 1  # and the one in the model's hands
        kept = 0.0  # for the backward pass, as float32: input of both matrices, output, its gradient
        for hop, (into, out) in zip(reversed(size.hops), sizes.widths(question), strict=True):
            kept += hop.frontier * 4 * (2 * into + 2 * out)
        return {
            "libraries": LIBRARIES,
            "node maps": question.workers * one_map,
            f"{batches} batches": batches * size.bytes,
            "model and activations": kept + STATES * 4 * sizes.num_parameters(question),
        }

    @cached_property
    def batch(self) -> BatchSize:
        return sizes.batch_size(self.question, everywhere=self.everywhere)

    @cached_property
    def traffic(self) -> dict[str, float]:
        """Bytes that one rank's step receives over the network, by purpose."""
        return sizes.traffic(self.question, self.batch)

    @cached_property
    def times(self) -> StepTimes:
        question, constants, moved = self.question, self.constants, sum(self.traffic.values())
        slower = constants.hashed_slowdown if sizes.is_hashed(question) else 1.0
        return StepTimes(
            sampling=self.batch.picks / constants.sample_picks * slower / question.workers,
            gathering=self.batch.nodes * gather_seconds(question, constants) / question.workers,
            network=moved * question.ranks_per_host / question.network,
            model=question.step_seconds,
        )

    @property
    def build(self) -> dict[str, float]:
        """Seconds of each stage from tables to a store, on one machine like the one measured."""
        question, constants = self.question, self.constants
        return {
            "read the tables": _table_bytes(question) / constants.disk_read,
            "look up the ids": question.edges / constants.join_edges,
            **_ordering(question, constants),
            "write the store": _store_bytes(question) / constants.disk_write,
        }

    @property
    def spark(self) -> dict[str, float]:
        """Seconds of a build and of a cut on the question's executors; empty without executors."""
        question, constants = self.question, self.constants
        if question.executors is None:
            return {}
        cores = question.executors * question.executor_cores
        node_rows = question.nodes * (NODE_ROW + sizes.node_bytes(question))
        building = (
            question.nodes / constants.spark_nodes
            + question.edges / constants.spark_joins
            + (node_rows + question.edges * EDGE_BYTES) / constants.spark_writes
        )
        rewriting = question.edges / constants.spark_rewrites + node_rows / constants.spark_writes
        assigning = self.partition["assign the nodes"]  # by the driver
        return {
            "tables to parts": constants.spark_start + building / cores,
            "store to parts": constants.spark_start + assigning + rewriting / cores,
        }

    @property
    def partition(self) -> dict[str, float]:
        """Seconds of each stage from a store to its parts, without the time of METIS, which is not known."""
        question, constants = self.question, self.constants
        edges = question.edges if question.edge_cut == "stream" else 0
        return {
            "assign the nodes": edges / (constants.partition_edges * constants.cores),
            "read the store": _store_bytes(question) / constants.disk_read,
            **_ordering(question, constants),
            "write the parts": _store_bytes(question) / constants.disk_write,
        }

    @property
    def disk(self) -> float:
        """Bytes on a host's disk."""
        return sum(item.disk for item in self.store)

    @property
    def mapped(self) -> float:
        """Bytes of a host's files that batches touch."""
        return sum(item.memory for item in self.store) - self.cached

    @property
    def cached(self) -> float:
        return sizes.cache_bytes(self.question)

    @property
    def private(self) -> float:
        """Bytes of a host that no file backs: they must fit in its memory."""
        return self.cached + self.question.ranks_per_host * sum(self.process.values())

    @property
    def wanted(self) -> float:
        """Bytes of memory with which a host never waits for its disk."""
        return self.mapped + self.private

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.question.num_seeds // (self.question.batch_size * self.question.ranks))

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows: memory and disk of a host."""
        rows = [(item.name, as_bytes(item.disk), as_bytes(item.memory)) for item in self.store]
        rows += [
            ("trainers", "", as_bytes(self.private - self.cached)),
            ("together", as_bytes(self.disk), as_bytes(self.wanted)),
        ]
        return html.table(self._title(), ["a host", "disk", "memory"], rows)

    def __repr__(self) -> str:
        return f"<ScalePlan: {self._title()}>"

    def _title(self) -> str:
        asked, times = self.question, self.times
        graph = (
            f"{as_count(asked.nodes)} nodes, {as_count(asked.edges)} edges, hosts: {asked.hosts}, ranks: {asked.ranks}"
        )
        return f"{graph}; a step takes {as_seconds(times.total)}, bound by {times.bottleneck}"

    def as_dict(self) -> dict[str, object]:
        """Return the whole plan for programs: bytes, seconds and counts."""
        totals = {name: getattr(self, name) for name in ("disk", "mapped", "private", "wanted")}
        return {
            "question": asdict(self.question),
            "constants": asdict(self.constants),
            "topology_everywhere": self.everywhere,
            "host": {"store": [asdict(item) for item in self.store], **totals},
            "process": self.process,
            "batch": asdict(self.batch) | {"nodes": self.batch.nodes, "picks": self.batch.picks},
            "traffic": self.traffic,
            "times": asdict(self.times) | {"step": self.times.total, "bottleneck": self.times.bottleneck},
            "epoch": {"steps": self.steps_per_epoch, "seconds": self.steps_per_epoch * self.times.total},
            "build": self.build,
            "partition": self.partition,
            "spark": self.spark,
            "findings": [asdict(finding) for finding in findings(self)],
        }


def plan(question: Question, constants: Constants | None = None) -> ScalePlan:
    """Return the plan for a question.

    >>> print(as_text(plan(Question(nodes=10**10, edges=10**12, hosts=64))))
    """
    constants = constants or default_constants()
    choices = {"auto": (True, False), "everywhere": (True,), "parts": (False,)}[question.topology]
    drafts = [ScalePlan(question, constants, everywhere or question.hosts == 1) for everywhere in choices]
    return next((draft for draft in drafts if draft.wanted <= question.memory_per_host), drafts[-1])


# --- limits ---------------------------------------------------------------------------------------


def findings(answer: ScalePlan) -> list[Finding]:
    """Return all limits that a plan meets, worst first."""
    found = [*_memory(answer), *_partitioning(answer.question), *_speed(answer)]
    return sorted(found, key=lambda finding: finding.level)


def _memory(answer: ScalePlan) -> Iterator[Finding]:
    question, has = answer.question, as_bytes(answer.question.memory_per_host)
    enough = hosts_needed(question, answer.constants) if answer.wanted > question.memory_per_host else None
    ways = [f"{enough} hosts"] if enough else []
    if answer.cached:
        ways.append("a smaller cache")
    if answer.private > question.memory_per_host:
        what = f"trainers and cache take {as_bytes(answer.private)} of a host's {has}"
        ways += ["a smaller batch or fanouts", "fewer workers or ranks per host"]
        yield Finding("breaks", what, ", ".join(ways))
    elif answer.wanted > question.memory_per_host:
        missing = as_bytes(answer.wanted - question.memory_per_host)
        what = f"{missing} of what batches touch do not fit the {has} of a host and are read from its disk"
        ways += [f"{as_bytes(answer.wanted)} per host", "features of fewer bytes"]
        ways.append("a budget for the store (`memory` in run.toml): then rows are read ahead, many at once")
        yield Finding("slow", what, ", ".join(ways))


def hosts_needed(question: Question, constants: Constants) -> int | None:
    """Return the fewest hosts that hold everything in memory; None if no number does."""
    if question.topology == "auto":
        question = replace(question, topology="parts")

    def fits(hosts: int) -> bool:
        return plan(replace(question, hosts=hosts), constants).wanted <= question.memory_per_host

    most = min(question.nodes, MOST_HOSTS)
    enough = 1 + bisect_left(range(1, most + 1), True, key=fits)
    return enough if enough <= most else None


def _partitioning(question: Question) -> Iterator[Finding]:
    """Yield the limits of `hoploom partition` on one machine like the hosts."""
    from hoploom.ops.assign_parts import MOST_NODES  # brings torch, which the help of `plan` does without

    if question.hosts == 1:
        return
    method, memory = str(question.edge_cut), question.memory_per_host
    assigning = {"stream": question.nodes * STREAM_BYTES, "metis": question.edges * METIS_BYTES}.get(method, 0)
    needed = max(assigning, question.nodes * PARTITION_BYTES)
    way_out = "a larger machine for this step, or `hoploom build --parts`, which assigns by a hash and streams"
    if needed > memory:
        what = f"partitioning takes {as_bytes(needed)} of {as_bytes(memory)}"
        yield Finding("breaks", what, way_out)
    if assigning and question.nodes > MOST_NODES:
        what = f"the {method} partitioner counts nodes up to {MOST_NODES:,}, there are {question.nodes:,}"
        yield Finding("breaks", what, "hash or range, which look at ids alone")


def _speed(answer: ScalePlan) -> Iterator[Finding]:
    """Yield what makes the model wait; if its time is not known, only the network may."""
    times, question = answer.times, answer.question
    if times.bottleneck == "model" or not (times.model or times.bottleneck == "network"):
        return
    if times.bottleneck == "network":
        way_out = "a cache of remote rows, seeds of a rank's own host, features of fewer bytes, a faster network"
    else:
        workers = int(times.loading * question.workers / max(times.model, times.network)) + 1
        way_out = f"{min(workers, 1024)} workers per rank, if the host has cores for them"
    idle = f", the model waits {as_share(1 - times.model / times.total)} of the time" if times.model else ""
    yield Finding("slow", f"{times.bottleneck} bounds the step: {as_seconds(times.total)}{idle}", way_out)


# --- seconds -------------------------------------------------------------------------------------


def gather_seconds(question: Question, constants: Constants) -> float:
    """Return the seconds to gather one node's rows: each field is a separate table."""
    rows = sizes.node_fields(question).values()
    return sum(1 / constants.gather_rows + max(0, row - SHORT_ROW) / constants.gather_bytes for row in rows)


def _ordering(question: Question, constants: Constants) -> dict[str, float]:
    """Return the stages that sort rows and edges: in temporary files if they exceed a quarter of memory."""
    waiting = _table_bytes(question)
    spilled = waiting if waiting > question.memory_per_host / 4 else 0.0
    return {
        "spill and read again": spilled / constants.disk_write + spilled / constants.disk_read,
        "sort into lists": question.edges / constants.sort_edges,
    }


def _table_bytes(question: Question) -> int:
    return question.nodes * (ID_BYTES + sizes.node_bytes(question)) + question.edges * EDGE_BYTES


def _store_bytes(question: Question) -> float:
    """Return the size of the whole store."""
    return sum(item.disk for item in sizes.host_items(question, everywhere=False)) * question.hosts
