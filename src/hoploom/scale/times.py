"""Seconds of a step, by what takes them; and of building and partitioning, by stage.

Loader threads work ahead of the model, so a step takes as long as the slowest of loading, network and model.
"""

from dataclasses import dataclass

from hoploom.scale.batches import BatchSize, Traffic, crowd_of, widths
from hoploom.scale.constants import SHORT_ROW, Constants, default_constants, rate_at
from hoploom.scale.growth import hit_rate
from hoploom.scale.sizes import host_items, is_hashed, node_bytes, num_files, topology_bytes
from hoploom.scale.spec import Question

PAGE = 4096
ID_BYTES = 8
EDGE_BYTES = 16  # of an edge in a table or a spilled bucket


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
        thread = ("sampling", "gathering", "disk", "waiting")
        return {name: getattr(self, name) / self.workers for name in thread} | {
            "network": self.network,
            "model": self.model,
        }

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
        loader = {name: share for name, share in self.shares.items() if name not in ("network", "model")}
        return max(loader, key=lambda name: loader[name])


def step_times(question: Question, constants: Constants, size: BatchSize, moved: Traffic, resident: float) -> StepTimes:
    """`resident`: the share of what batches touch that memory holds."""
    at_home = topology_bytes(question, 1.0)  # of a hop, wherever it is answered, costs this
    picks = rate_at(constants.sample_picks, at_home / question.hosts if question.hosts > 1 else at_home)
    slower = constants.hashed_slowdown if is_hashed(question) else 1.0
    return StepTimes(
        sampling=size.picks / picks * slower + constants.batch_seconds,
        gathering=size.nodes * _gather_seconds(question, constants),
        disk=_disk_seconds(question, constants, size, resident),
        waiting=(len(question.fanouts) * (size.remote_frontier > 0) + (size.rows_fetched > 0))
        * constants.round_trip_seconds,
        network=_network_seconds(question, constants, moved),
        model=_model_seconds(question, constants, size),
        workers=question.workers,
    )


def _gather_seconds(question: Question, constants: Constants) -> float:
    """Of one node: each of its fields is a table of its own."""
    seconds = 0.0
    for row in (question.row_bytes, 8 * question.labels, question.original_id_bytes):
        if row > 8:
            rows = rate_at(constants.gather_rows, question.nodes / question.hosts * row)
            seconds += 1 / rows + max(0, row - SHORT_ROW) / constants.gather_bytes
        elif row:
            seconds += 1 / constants.random_reads
    return seconds


def _disk_seconds(question: Question, constants: Constants, size: BatchSize, resident: float) -> float:
    """Pages read because memory has no room for them; what it holds is the hottest, nodes being in that order."""
    if resident >= 1:
        return 0.0
    hits = hit_rate(crowd_of(question), size.hops[0].frontier, size.hops[-1].drawn, resident)
    pages_per_row = 1 + max(0, node_bytes(question) - 1) // PAGE
    return (size.nodes * pages_per_row + 2 * size.frontier) * (1 - hits) / constants.disk_reads


def _network_seconds(question: Question, constants: Constants, moved: Traffic) -> float:
    if question.hosts == 1:
        return 0.0
    link = question.network or constants.loopback_bytes
    return max(moved.total * question.ranks_per_host / link, moved.total / constants.loopback_bytes)


def _model_seconds(question: Question, constants: Constants, size: BatchSize) -> float:
    """Two linear layers and a mean per layer, forward and backward; layer one passes no gradient on."""
    if question.step_seconds is not None:
        return question.step_seconds
    values = flops = 0.0
    for layer, (into, out) in enumerate(widths(question)):
        hop = len(size.hops) - 1 - layer
        destinations = size.hops[hop - 1].nodes if hop else size.hops[0].frontier
        picks = size.hops[hop].picks
        if question.mode == "subgraph":  # the inner layers work on all edges of the hops before
            picks = sum(before.picks for before in size.hops[: hop + 1])
        values += picks * into * (1.0 if layer else 0.5)
        flops += 2 * destinations * 2 * into * out * (3 if layer else 2)
    return values / constants.aggregate_values + flops / constants.linear_flops


@dataclass(frozen=True)
class Stage:
    """A stage of building or partitioning."""

    name: str
    seconds: float


def opening_seconds(question: Question, constants: Constants) -> float:
    """Of the whole store; a part alone takes about as long as a store of one part."""
    further = num_files(question) * (1 - 1 / question.parts)
    return constants.open_seconds + further * constants.open_file_seconds


def sorting_seconds(question: Question, constants: Constants) -> float:
    """From edges in any order to lists, part by part."""
    return question.edges / rate_at(constants.csc_edges, topology_bytes(question, 1 / question.parts))


def build_stages(question: Question, constants: Constants) -> list[Stage]:
    """From tables to a store on one machine like the one measured."""
    read = question.nodes * (ID_BYTES + node_bytes(question)) + question.edges * EDGE_BYTES
    joins = constants.join_edges or default_constants().join_edges or 1.0
    return [
        Stage("read the tables", read / constants.disk_read),
        Stage("look up the ids", question.edges / joins),
        *_ordering(question, constants),
        Stage("write the store", _store_bytes(question) / constants.disk_write),
    ]


def partition_stages(question: Question, constants: Constants) -> list[Stage]:
    """From a store to its parts; assigning by hash reads no edge, and how long METIS takes is not known."""
    edges = question.edges if question.edge_cut == "stream" else 0
    return [
        Stage("assign the nodes", edges / (constants.partition_edges * constants.cores)),
        Stage("read the store", _store_bytes(question) / constants.disk_read),
        *_ordering(question, constants),
        Stage("write the parts", _store_bytes(question) / constants.disk_write),
    ]


def _ordering(question: Question, constants: Constants) -> list[Stage]:
    """Rows and edges that do not come in order wait on the disk, where they are more than a quarter of memory."""
    waiting = question.nodes * (ID_BYTES + node_bytes(question)) + question.edges * EDGE_BYTES
    spilled = waiting if waiting > question.memory_per_host / 4 else 0.0
    return [
        Stage("spill and read again", spilled / constants.disk_write + spilled / constants.disk_read),
        Stage("sort into lists", sorting_seconds(question, constants)),
    ]


def _store_bytes(question: Question) -> float:
    """Every file of the store once."""
    return sum(item.disk for item in host_items(question, everywhere=False)) * question.hosts
