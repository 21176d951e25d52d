"""How long a build or a cut on Spark takes, and from how many edges on a build is faster than one machine.

A stage takes what its slowest resource takes: cores, the disks of the executors, or their network. Rates are those of
one core, and the same for any number of executors: rows are spread evenly. Executors stand on hosts of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hoploom.scale.constants import Constants
from hoploom.scale.sizes import host_items, node_bytes
from hoploom.scale.spec import Question

# Compressed bytes, by Spark's event log of a million edges with random integers as ids.
SHUFFLED_EDGE = 32  # of an edge: 13 to the first join, 11 to the second, 8 to its range
SHUFFLED_ROW = 48  # of a node: 9 to be numbered, 14 to each join, 11 to its range
EDGE_ROW = 16  # bytes of an edge, and
NODE_ROW = 16  # of a node without its fields, as they become the store's files
TIMES_WRITTEN = 2  # a store's bytes: as pieces, and as whole files, for which the pieces are read again
MOST_EDGES = 10**15
STEPS_PER_TENFOLD = 20


@dataclass(frozen=True)
class SparkStage:
    """What each would take of a stage if it were alone, in seconds."""

    name: str
    cores: float
    disk: float = 0.0
    network: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.cores, self.disk, self.network)

    @property
    def bottleneck(self) -> str:
        return max(("cores", "disk", "network"), key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class SparkRun:
    """A build or a cut on the executors of a question."""

    question: Question
    stages: list[SparkStage]
    shuffled: float  # bytes that all executors write for each other

    @property
    def executors(self) -> int:
        return executors_of(self.question)

    @property
    def cores(self) -> int:
        return self.executors * self.question.executor_cores

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def core_seconds(self) -> float:
        return self.seconds * self.cores

    def as_dict(self) -> dict[str, object]:
        """For programs: seconds and bytes."""
        return {
            "stages": {stage.name: stage.seconds for stage in self.stages},
            "seconds": self.seconds,
            "core_seconds": self.core_seconds,
            "shuffled": self.shuffled,
        }


def executors_of(question: Question) -> int:
    assert question.executors is not None
    return question.executors


def stored_bytes(question: Question) -> float:
    """Of all parts of a store."""
    return sum(item.disk for item in host_items(question, everywhere=False)) * question.hosts


def row_bytes(question: Question) -> float:
    """Of a node, as it becomes the store's files."""
    return NODE_ROW + node_bytes(question)


def spark_build(question: Question, constants: Constants) -> SparkRun:
    """Of tables like those of a build on one machine."""
    executors = executors_of(question)
    cores, stored = executors * question.executor_cores, stored_bytes(question)
    shuffled = question.nodes * (SHUFFLED_ROW + node_bytes(question)) + question.edges * float(SHUFFLED_EDGE)
    rows = question.nodes * row_bytes(question) + question.edges * float(EDGE_ROW)
    written = stored * TIMES_WRITTEN
    stages = [
        SparkStage("start", constants.spark_start),
        SparkStage("number the nodes", question.nodes / (constants.spark_nodes * cores)),
        SparkStage(
            "join and shuffle",
            question.edges / (constants.spark_joins * cores),
            shuffled * (1 / constants.disk_write + 1 / constants.disk_read) / executors,
            shuffled * (1 - 1 / executors) / question.network / executors,
        ),
        SparkStage(
            "write the parts",
            rows / (constants.spark_writes * cores),
            (written / constants.disk_write + stored / constants.disk_read) / executors,
            (written + stored) / question.network / executors,  # files that all executors reach
        ),
    ]
    return SparkRun(question, stages, shuffled)


def sizes_like(question: Question) -> Iterator[Question]:
    """Graphs of the same mean degree, from small ones on."""
    for step in range(STEPS_PER_TENFOLD * 3, STEPS_PER_TENFOLD * 15 + 1):
        edges = round(10 ** (step / STEPS_PER_TENFOLD))
        nodes = max(1, edges * question.nodes // question.edges)
        yield replace(question, edges=edges, nodes=nodes, hosts=1)
