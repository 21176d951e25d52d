"""The answer to a question: memory, a batch, its traffic, its time, and the build.

Everything is an expected value from a few constants; nothing is simulated. docs/scale.md explains the model and holds
it against measurements.
"""

from dataclasses import asdict, dataclass, replace
from functools import cached_property

from hoploom import html
from hoploom.config.values import as_bytes, as_count, as_seconds
from hoploom.scale import sizes
from hoploom.scale.constants import SHORT_ROW, Constants, default_constants
from hoploom.scale.reads import DiskReads, disk_reads, within_budget
from hoploom.scale.sizes import BatchSize, Item
from hoploom.scale.spark import SparkRun, sizes_like, spark_build
from hoploom.scale.spark_cut import spark_cut
from hoploom.scale.spec import Question

ID_BYTES = 8
EDGE_BYTES = 16  # of an edge in a table or a spilled bucket
LIBRARIES = 250e6  # private bytes of a process that has imported torch and Hoploom (benchmarks/RESULTS.md)
HASH_ENTRY = 48  # bytes of a node of the batch in a hashed map, half of whose slots are free
PREFETCH = 2  # batches ahead per loader thread
STATES = 4  # weights, gradients and Adam's two


@dataclass(frozen=True)
class StepTimes:
    """What each would take of a step of one rank if it were alone, in seconds."""

    sampling: float
    gathering: float
    disk: float  # of the host, where the store is larger than its budget
    network: float  # of the host's link
    model: float  # 0 where it was not measured

    @property
    def loading(self) -> float:
        return self.sampling + self.gathering

    @property
    def total(self) -> float:
        return max(self.loading, self.disk, self.network, self.model)

    @property
    def bottleneck(self) -> str:
        """What to make faster first."""
        names = ("sampling", "gathering") if self.total == self.loading else ("disk", "network", "model")
        return max(names, key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class ScalePlan:
    """What was asked; all that follows from it is worked out when it is looked at."""

    question: Question
    constants: Constants
    everywhere: bool  # every host maps the whole topology

    @cached_property
    def store(self) -> list[Item]:
        """Of one host."""
        return within_budget(self.question, sizes.host_items(self.question, everywhere=self.everywhere))

    @cached_property
    def process(self) -> dict[str, float]:
        """Private bytes of one trainer process."""
        question, size = self.question, self.batch
        one_map = size.nodes * HASH_ENTRY if sizes.is_hashed(question) else question.nodes * sizes.SLOT
        batches = question.workers * PREFETCH + 1  # and the one in the model's hands
        kept = 0.0  # for the way back, as float32: input of both matrices, output, its gradient
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
        """Bytes that one rank's step brings over the network to its host, by what they are for."""
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
            disk=0.0 if self.reads is None else self.reads.seconds * question.ranks_per_host,
        )

    @cached_property
    def reads(self) -> DiskReads | None:
        """What one rank's step reads from its host's disk; None where all fits, or no budget is given."""
        return disk_reads(self.question, self.constants, self.batch)

    @property
    def build(self) -> dict[str, float]:
        """Seconds of each stage, from tables to a store on one machine like the one measured."""
        question, constants = self.question, self.constants
        return {
            "read the tables": _table_bytes(question) / constants.disk_read,
            "look up the ids": question.edges / constants.join_edges,
            **_ordering(question, constants),
            "write the store": _store_bytes(question) / constants.disk_write,
        }

    @cached_property
    def spark(self) -> SparkRun | None:
        """The same on Spark; None where the question names no executors."""
        return None if self.question.executors is None else spark_build(self.question, self.constants)

    @cached_property
    def spark_cut(self) -> SparkRun | None:
        """Likewise from a store to parts, by `stream`."""
        return None if self.question.executors is None else spark_cut(self.question, self.constants)

    @cached_property
    def spark_pays_from(self) -> int | None:
        """The least edges, of graphs of this degree, that these executors build faster than one machine."""
        for question in sizes_like(self.question):
            here = sum(replace(self, question=question).build.values())
            if spark_build(question, self.constants).seconds < here:
                return question.edges
        return None

    @property
    def partition(self) -> dict[str, float]:
        """Likewise from a store to its parts; only `stream` reads edges, and how long METIS takes is not known."""
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
        """Bytes of a host's files that batches touch, or of them what its budget for the store holds."""
        return sum(item.memory for item in self.store) - self.cached

    @property
    def cached(self) -> float:
        return sizes.cache_bytes(self.question)

    @property
    def private(self) -> float:
        """Bytes of a host that no file backs: they must fit."""
        return self.cached + self.question.ranks_per_host * sum(self.process.values())

    @property
    def wanted(self) -> float:
        """Bytes of memory with which a host never waits for its disk."""
        return self.mapped + self.private

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.question.num_seeds // (self.question.batch_size * self.question.ranks))

    def _repr_html_(self) -> str:
        """The table that a notebook shows: memory and disk of a host."""
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
        """All of it for programs: bytes, seconds and counts."""
        totals = {name: getattr(self, name) for name in ("disk", "mapped", "private", "wanted")}
        return {
            "question": asdict(self.question),
            "constants": asdict(self.constants),
            "topology_everywhere": self.everywhere,
            "host": {"store": [asdict(item) for item in self.store], **totals},
            "process": self.process,
            "batch": asdict(self.batch) | {"nodes": self.batch.nodes, "picks": self.batch.picks},
            "traffic": self.traffic,
            "reads": None if self.reads is None else asdict(self.reads),
            "times": asdict(self.times) | {"step": self.times.total, "bottleneck": self.times.bottleneck},
            "epoch": {"steps": self.steps_per_epoch, "seconds": self.steps_per_epoch * self.times.total},
            "build": self.build,
            "partition": self.partition,
            "spark": None
            if self.spark is None
            else self.spark.as_dict() | {"faster_than_one_machine_from_edges": self.spark_pays_from},
            "spark_cut": None if self.spark_cut is None else self.spark_cut.as_dict(),
        }


def plan(question: Question, constants: Constants | None = None) -> ScalePlan:
    """Work a question out.

    >>> print(as_text(plan(Question(nodes=10**10, edges=10**12, hosts=64))))
    """
    constants = constants or default_constants()
    choices = {"auto": (True, False), "everywhere": (True,), "parts": (False,)}[question.topology]
    drafts = [ScalePlan(question, constants, everywhere or question.hosts == 1) for everywhere in choices]
    return next((draft for draft in drafts if draft.wanted <= question.memory_per_host), drafts[-1])


# --- seconds -------------------------------------------------------------------------------------


def gather_seconds(question: Question, constants: Constants) -> float:
    """Of one node: each of its fields is a table of its own."""
    rows = sizes.node_fields(question).values()
    return sum(1 / constants.gather_rows + max(0, row - SHORT_ROW) / constants.gather_bytes for row in rows)


def _ordering(question: Question, constants: Constants) -> dict[str, float]:
    """Rows and edges that do not come in order wait on the disk, where they are more than a quarter of memory."""
    waiting = _table_bytes(question)
    spilled = waiting if waiting > question.memory_per_host / 4 else 0.0
    return {
        "spill and read again": spilled / constants.disk_write + spilled / constants.disk_read,
        "sort into lists": question.edges / constants.sort_edges,
    }


def _table_bytes(question: Question) -> int:
    return question.nodes * (ID_BYTES + sizes.node_bytes(question)) + question.edges * EDGE_BYTES


def _store_bytes(question: Question) -> float:
    """Every file of the store once."""
    return sum(item.disk for item in sizes.host_items(question, everywhere=False)) * question.hosts
