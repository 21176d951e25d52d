"""The answer to a question: memory, a batch, its traffic, its time, the build, and where it breaks.

Everything is an expected value from a few constants; nothing is simulated. docs/scale.md explains the model and holds
it against measurements.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from hoploom.ops.relabel import MAP_BUDGET
from hoploom.scale import sizes
from hoploom.scale.constants import SHORT_ROW, Constants, default_constants, rate_at
from hoploom.scale.sizes import BatchSize, Crowd, Item, Traffic
from hoploom.scale.spec import Question

PAGE = 4096
ID_BYTES = 8
EDGE_BYTES = 16  # of an edge in a table or a spilled bucket


LIBRARIES = 250e6  # private bytes of a process that has imported torch and Hoploom (benchmarks/RESULTS.md)
HASH_ENTRY = 48  # bytes of a node of the batch in a hashed map, half of whose slots are free
PREFETCH = 2  # batches ahead per loader thread
STATES = 4  # weights, gradients and Adam's two
LOADING = ("sampling", "gathering", "disk", "waiting")  # what a loader thread does, one after the other


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step of one rank; those of a loader thread are for a whole batch."""

    sampling: float  # of a thread
    gathering: float
    disk: float
    waiting: float  # for answers of other hosts
    network: float  # of the host's link and the rank's connection
    model: float
    workers: int

    @property
    def shares(self) -> dict[str, float]:
        """What each would take of a step if it were alone."""
        loading = {name: getattr(self, name) / self.workers for name in LOADING}
        return loading | {"network": self.network, "model": self.model}

    @property
    def loading(self) -> float:
        """Seconds between two batches of all the loader's threads."""
        return (self.sampling + self.gathering + self.disk + self.waiting) / self.workers

    @property
    def total(self) -> float:
        return max(self.loading, self.network, self.model)

    @property
    def bottleneck(self) -> str:
        """What to make faster first."""
        if self.total > self.loading:
            return "network" if self.network >= self.model else "model"
        return max(LOADING, key=lambda name: float(getattr(self, name)))


def _gather_seconds(question: Question, constants: Constants) -> float:
    """Of one node: each of its fields is a table of its own."""
    seconds = 0.0
    for row in sizes.node_fields(question).values():
        if row > 8:
            rows = rate_at(constants.gather_rows, question.nodes / question.hosts * row)
            seconds += 1 / rows + max(0, row - SHORT_ROW) / constants.gather_bytes
        else:
            seconds += 1 / constants.random_reads
    return seconds


def _disk_seconds(question: Question, constants: Constants, size: BatchSize, resident: float) -> float:
    """Pages read because memory has no room for them; what it holds is the hottest, nodes being in that order."""
    if resident >= 1:
        return 0.0
    hits = sizes.hit_rate(Crowd(question.nodes, question.skew), size.hops[0].frontier, size.hops[-1].drawn, resident)
    pages_per_row = 1 + max(0, sizes.node_bytes(question) - 1) // PAGE
    return (size.nodes * pages_per_row + 2 * size.frontier) * (1 - hits) / constants.disk_reads


def _layers(question: Question, size: BatchSize) -> Iterator[tuple[int, int, float, float]]:
    """Of each layer, from the input on: channels in and out, destinations, edges."""
    destinations = [size.hops[0].frontier, *(hop.nodes for hop in size.hops)]
    picks = [hop.picks for hop in size.hops]
    if question.mode == "subgraph":  # the inner layers work on all edges of the hops before
        picks = list(accumulate(picks))
    for hop, (into, out) in zip(reversed(range(len(picks))), sizes.widths(question), strict=True):
        yield into, out, destinations[hop], picks[hop]


def _model_seconds(question: Question, constants: Constants, size: BatchSize) -> float:
    """Two linear layers and a mean per layer, forward and backward; layer one passes no gradient on."""
    if question.step_seconds is not None:
        return question.step_seconds
    values = flops = 0.0
    for layer, (into, out, destinations, picks) in enumerate(_layers(question, size)):
        values += picks * into * (1.0 if layer else 0.5)
        flops += 2 * destinations * 2 * into * out * (3 if layer else 2)
    return values / constants.aggregate_values + flops / constants.linear_flops


@dataclass(frozen=True)
class BuildStage:
    """A stage of building or partitioning."""

    name: str
    seconds: float


def total_seconds(stages: Iterable[BuildStage]) -> float:
    return sum(stage.seconds for stage in stages)


def sorting_seconds(question: Question, constants: Constants) -> float:
    """From edges in any order to lists, part by part."""
    return question.edges / rate_at(constants.csc_edges, sizes.topology_bytes(question, 1 / question.parts))


def _ordering(question: Question, constants: Constants) -> list[BuildStage]:
    """Rows and edges that do not come in order wait on the disk, where they are more than a quarter of memory."""
    waiting = _table_bytes(question)
    spilled = waiting if waiting > question.memory_per_host / 4 else 0.0
    return [
        BuildStage("spill and read again", spilled / constants.disk_write + spilled / constants.disk_read),
        BuildStage("sort into lists", sorting_seconds(question, constants)),
    ]


def _table_bytes(question: Question) -> int:
    return question.nodes * (ID_BYTES + sizes.node_bytes(question)) + question.edges * EDGE_BYTES


def _store_bytes(question: Question) -> float:
    """Every file of the store once."""
    return sum(item.disk for item in sizes.host_items(question, everywhere=False)) * question.hosts


@dataclass(frozen=True)
class ScalePlan:
    """What was asked; all that follows from it is worked out when it is looked at."""

    question: Question
    constants: Constants
    everywhere: bool  # every host maps the whole topology

    @cached_property
    def store(self) -> list[Item]:
        """Of one host."""
        return sizes.host_items(self.question, everywhere=self.everywhere)

    @cached_property
    def process(self) -> list[Item]:
        """Of one trainer process, private."""
        question, size = self.question, self.batch
        slots = (question.largest_type or question.nodes) * sizes.SLOT
        one_map = size.nodes * HASH_ENTRY if sizes.is_hashed(question) else min(slots, MAP_BUDGET)
        batches = question.workers * PREFETCH + 1  # and the one in the model's hands
        kept = 0.0  # for the way back, as float32: input of both matrices, output, its gradient
        for into, out, destinations, _ in _layers(question, size):
            kept += destinations * 4 * (2 * into + 2 * out)
        return [
            Item("libraries", 0.0, LIBRARIES),
            Item("node maps", 0.0, question.workers * one_map),
            Item(f"{batches} batches", 0.0, batches * size.bytes),
            Item("model and activations", 0.0, kept + STATES * 4 * sizes.num_parameters(question)),
        ]

    @cached_property
    def batch(self) -> BatchSize:
        return sizes.batch_size(self.question, everywhere=self.everywhere)

    @cached_property
    def traffic(self) -> Traffic:
        return sizes.traffic(self.question, self.batch)

    @cached_property
    def times(self) -> StepTimes:
        question, constants, size = self.question, self.constants, self.batch
        picks = rate_at(constants.sample_picks, sizes.topology_bytes(question, 1.0) / question.hosts)
        slower = constants.hashed_slowdown if sizes.is_hashed(question) else 1.0
        num_waits = len(question.fanouts) * (size.remote_frontier > 0) + (size.rows_fetched > 0)
        link = question.network or constants.loopback_bytes
        moved = self.traffic.total
        return StepTimes(
            sampling=size.picks / picks * slower + constants.batch_seconds,
            gathering=size.nodes * _gather_seconds(question, constants),
            disk=_disk_seconds(question, constants, size, self.resident),
            waiting=num_waits * constants.round_trip_seconds,
            network=max(moved * question.ranks_per_host / link, moved / constants.loopback_bytes),
            model=_model_seconds(question, constants, size),
            workers=question.workers,
        )

    @property
    def opening(self) -> float:
        """Seconds, of the whole store; a part alone takes about as long as a store of one part."""
        further = sizes.num_files(self.question) * (1 - 1 / self.question.parts)
        return self.constants.open_seconds + further * self.constants.open_file_seconds

    @property
    def build(self) -> list[BuildStage]:
        """From tables to a store on one machine like the one measured."""
        question, constants = self.question, self.constants
        joins = constants.join_edges or default_constants().join_edges or 1.0
        return [
            BuildStage("read the tables", _table_bytes(question) / constants.disk_read),
            BuildStage("look up the ids", question.edges / joins),
            *_ordering(question, constants),
            BuildStage("write the store", _store_bytes(question) / constants.disk_write),
        ]

    @property
    def partition(self) -> list[BuildStage]:
        """From a store to its parts; assigning by hash reads no edge, and how long METIS takes is not known."""
        question, constants = self.question, self.constants
        edges = question.edges if question.edge_cut == "stream" else 0
        return [
            BuildStage("assign the nodes", edges / (constants.partition_edges * constants.cores)),
            BuildStage("read the store", _store_bytes(question) / constants.disk_read),
            *_ordering(question, constants),
            BuildStage("write the parts", _store_bytes(question) / constants.disk_write),
        ]

    @property
    def uses_defaults(self) -> bool:
        return self.constants == default_constants()

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
        """Bytes of a host that no file backs: they must fit."""
        return self.cached + self.question.ranks_per_host * sum(item.memory for item in self.process)

    @property
    def wanted(self) -> float:
        """Bytes of memory with which a host never waits for its disk."""
        return self.mapped + self.private

    @property
    def resident(self) -> float:
        """The share of the mapped files that fits into memory."""
        return max(0.0, min(1.0, (self.question.memory_per_host - self.private) / self.mapped))

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.question.num_seeds // (self.question.batch_size * self.question.ranks))


def plan(question: Question, constants: Constants | None = None) -> ScalePlan:
    """Work a question out.

    >>> print(as_text(plan(Question(nodes=10**10, edges=10**12, hosts=64))))
    """
    constants = constants or default_constants()
    choices = {"auto": (True, False), "everywhere": (True,), "parts": (False,)}[question.topology]
    drafts = [ScalePlan(question, constants, everywhere or question.hosts == 1) for everywhere in choices]
    return next((draft for draft in drafts if draft.wanted <= question.memory_per_host), drafts[-1])
