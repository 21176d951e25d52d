"""What of a store goes where, worked out and checked before anything is copied.

What does not fit is refused with the numbers. "auto" leaves memory to training: a quarter of what the device has free,
and 2 GiB at least.
"""

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from hoploom.config.values import as_bytes
from hoploom.errors import ConfigError
from hoploom.gpu.place import host_memory as hostmemory
from hoploom.gpu.place.host_memory import name_of
from hoploom.gpu.place.packed_tensors import FieldColumn, PackedTensors, kept_dtype, pack_topology
from hoploom.gpu.place.peer_memory import Among, neighbours
from hoploom.gpu.place.request import AUTO, DEVICE, HOST, SPREAD, Features, PlaceRequest
from hoploom.ops import EdgeLists
from hoploom.ranks.collectives import gather_json
from hoploom.schema import Field, Owner, Schema
from hoploom.store.scan import covers
from hoploom.system import memory_limit

if TYPE_CHECKING:
    from hoploom.store.store import Store

LEAST_FREE = 2 << 30  # bytes of device memory that "auto" leaves to training,
FREE_SHARE = 4  # and a quarter of what is free
ROUNDING = 1e-6  # of a row: 0.29 * 100 are 29
Spans = list[tuple[int, int]]  # ranges of ids


@dataclass(frozen=True)
class PlacePlan:
    """What is copied to where."""

    device: torch.device
    identity: str  # of what is copied; in the names of the files that processes share
    topology: Literal["device", "host"] | None
    relations: tuple[PackedTensors, ...]  # empty: topology stays as it is
    share: float  # of the rows of every part: so many go to the device
    columns: tuple[FieldColumn, ...]  # empty: features stay as they are
    peers: tuple[int, ...] = ()  # the ranks over which features are spread
    rank: int = 0  # this one
    chosen: str = ""  # why so much goes to the device, where that was measured

    @property
    def device_bytes(self) -> int:
        """Of this rank's device."""
        topology = sum(block.num_bytes for block in self.relations) if self.topology == DEVICE else 0
        return topology + sum(column.block(self.hot(column)).num_bytes for column in self.columns)

    def hot(self, column: FieldColumn) -> Spans:
        """The ids whose rows go to this rank's device."""
        if self.peers:
            return [self.spread(column)[self.peers.index(self.rank)]]
        return joined([(begin, middle) for begin, middle, _ in self._shared(column)])

    def rest(self, column: FieldColumn) -> Spans:
        """The ids whose rows go to host memory."""
        return [] if self.peers else joined([(middle, end) for _, middle, end in self._shared(column)])

    def _shared(self, column: FieldColumn) -> list[tuple[int, int, int]]:
        """Where the ids of every part begin, where those that stay in host memory do, and where they end."""
        parts = zip(column.firsts, column.counts, strict=True)
        return [(first, first + int(self.share * count + ROUNDING), first + count) for first, count in parts]

    def spread(self, column: FieldColumn) -> Spans:
        """The ids whose rows go to the device of each peer."""
        count, total = len(self.peers), column.num_rows
        return [(total * place // count, total * (place + 1) // count) for place in range(count)]

    @cached_property
    def files(self) -> dict[str, PackedTensors]:
        """What goes to host memory, by the name of its file."""
        found = {}
        if self.topology == HOST:
            found = {self.relation_file(index): block for index, block in enumerate(self.relations)}
        for column in self.columns:
            block = column.block(self.rest(column))
            if block.num_bytes:
                found[self.column_file(column)] = block
        return found

    def relation_file(self, index: int) -> str:
        return name_of(self.identity, index, str(self.relations[index].columns))

    def column_file(self, column: FieldColumn) -> str:
        return name_of(self.identity, column.owner, column.name, str(column.kept), self.rest(column))


def joined(spans: Spans) -> Spans:
    """Without empty ranges, and with neighbours as one."""
    out: Spans = []
    for begin, end in spans:
        if out and out[-1][1] == begin:
            out[-1] = out[-1][0], end
        elif end > begin:
            out.append((begin, end))
    return out


def plan_placement(store: "Store", request: PlaceRequest, among: Among | None) -> PlacePlan:
    """What goes where; ConfigError where it cannot, or does not fit. All ranks call, where they are given."""
    _check_among(among)
    _check_reach(store, request)
    if request.features == SPREAD and among is None:
        raise ConfigError("features='spread' needs the ranks to spread over; give among=context, as hoploom.init made")
    peers = () if among is None else neighbours(among)
    relations = () if request.topology is None else tuple(_relations(store))
    columns = () if request.features is None else tuple(_columns(store, request.narrow))
    memory = _free_memory_of_ranks(request.device, among, peers)
    spread = peers if request.features == SPREAD else ()
    left = min(memory.free, max(LEAST_FREE, memory.free // FREE_SHARE))
    budget = memory.free - left
    topology = _where_topology(request, relations, budget)
    if topology == DEVICE:
        budget -= sum(block.num_bytes for block in relations)
    plan = PlacePlan(
        request.device,
        store.identity or secrets.token_hex(16),
        topology,
        relations,
        0.0 if request.features is None else _share(request.features, columns, budget),
        columns,
        spread,
        0 if among is None else among.rank,
        _chosen(request, memory, left),
    )
    _check_fits(plan, memory)
    return plan


def free_memory(device: torch.device) -> int:
    """Bytes that the device has free now; of the CPU what this process may use."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else memory_limit()


def name_of_device(device: torch.device) -> str:
    """What tells the devices of a host apart, whichever of them a process sees."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)


class FreeMemory(NamedTuple):
    """The memory of a device that a rank may use."""

    free: int  # bytes, of this rank
    num_ranks: int  # that have as much of the same device

    def __str__(self) -> str:
        of_ranks = f" for each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        return f"{as_bytes(self.free)} free{of_ranks}"


def _free_memory_of_ranks(device: torch.device, among: Among | None, peers: Sequence[int]) -> FreeMemory:
    """The least of all ranks of this host: they choose alike, so that they share what they keep in host memory."""
    if among is None:
        return FreeMemory(free_memory(device), 1)
    found = gather_json(among, [free_memory(device), name_of_device(device)])
    counts = Counter(found[rank][1] for rank in peers)
    return min(FreeMemory(found[rank][0] // counts[found[rank][1]], counts[found[rank][1]]) for rank in peers)


# --- what there is to place ----------------------------------------------------------------------


def _check_among(among: object) -> None:
    """Raise ConfigError unless these are ranks that talk, or none are given."""
    if among is not None and not all(hasattr(among, name) for name in ("rank", "world_size", "gather", "barrier")):
        raise ConfigError(f"among is {among!r:.80}; give the context that hoploom.init made, or leave it out")


def _check_reach(store: "Store", request: PlaceRequest) -> None:
    """Raise ConfigError unless all that is to be placed lies in this process."""
    if store.placed is not None:
        raise ConfigError(
            "the store is placed already, or was; give topology and features in one call, on the opened store again"
        )
    here = "open all parts of the store on this host, or leave it as it is: batches are copied to the device"
    if request.topology is not None and not covers(store.schema, store.topology):
        raise ConfigError(f"the topology cannot be placed: some of it is on another host; {here}")
    if request.features is None:
        return
    if not covers(store.schema, store.parts):
        raise ConfigError(f"the features cannot be placed: some of them are on another host; {here}")
    for owner, name in fields_of(store.schema):
        if not all((owner, name) in part.tables for part in store.parts):
            raise ConfigError(
                f"field {name!r} of {owner!r} cannot be placed: it lies in no table of this process; {here}"
            )


def fields_of(schema: Schema) -> dict[tuple[Owner, str], Field]:
    """Every field of node types and relations."""
    of_nodes: dict[tuple[Owner, str], Field] = {
        (t.name, n): field for t in schema.node_types for n, field in t.fields.items()
    }
    return of_nodes | {(r.key, name): field for r in schema.relations for name, field in r.fields.items()}


def _relations(store: "Store") -> list[PackedTensors]:
    schema = store.schema
    lists: list[list[EdgeLists]] = [[part.lists[i] for part in store.topology] for i in range(len(schema.relations))]
    return [
        pack_topology(of_parts, schema.node_types[source].num_nodes)
        for of_parts, source in zip(lists, schema.sources, strict=True)
    ]


def _columns(store: "Store", narrow: torch.dtype | None) -> list[FieldColumn]:
    schema, columns = store.schema, []
    for (owner, name), field in fields_of(schema).items():
        if isinstance(owner, str):
            counts = [part.num_nodes[schema.type_index[owner]] for part in store.parts]
        else:
            counts = [part.lists[schema.relation_index[owner]].num_edges for part in store.parts]
        columns.append(FieldColumn(owner, name, field, kept_dtype(field, narrow), store.parts, tuple(counts)))
    return columns


# --- what goes where -----------------------------------------------------------------------------


def _chosen(request: PlaceRequest, memory: FreeMemory, left: int) -> str:
    if AUTO not in (request.topology, request.features):
        return ""
    return f"auto: {request.device} had {memory}, of which {as_bytes(left)} are left to training"


def _where_topology(
    request: PlaceRequest, relations: tuple[PackedTensors, ...], budget: int
) -> Literal["device", "host"] | None:
    if request.topology == AUTO:
        return "device" if sum(block.num_bytes for block in relations) <= budget else "host"
    return request.topology  # type: ignore[return-value]  # "auto" is dealt with


def _share(wanted: Features, columns: tuple[FieldColumn, ...], budget: int) -> float:
    """The share of the rows that goes to the device; "auto" in whole percent, so that ranks agree."""
    total = sum(column.num_rows * column.row_bytes for column in columns)
    if isinstance(wanted, float):
        return wanted
    if isinstance(wanted, int):
        _check_holds_row(wanted, total, columns)
        return min(1.0, wanted / max(1, total))
    if wanted == AUTO:
        whole = sum(column.block([(0, column.num_rows)]).num_bytes for column in columns)
        return 1.0 if whole <= budget else max(0, 100 * budget // whole) / 100
    return 0.0 if wanted == HOST else 1.0


def _check_holds_row(wanted: int, total: int, columns: tuple[FieldColumn, ...]) -> None:
    """Raise ConfigError for bytes, other than none, whose share of every part's rows is less than one row."""
    most = max((count for column in columns for count in column.counts), default=0)
    least = -(-total // max(1, most))
    if 0 < wanted < least:
        raise ConfigError(
            f"features is {wanted} bytes, which hold no row of this store; give '{least}B' or more, a share such as "
            "'20%', or 'host'"
        )


def _check_fits(plan: PlacePlan, memory: FreeMemory) -> None:
    """Raise ConfigError unless it fits on the device and in host memory."""
    needed = plan.device_bytes
    if needed > memory.free:
        raise ConfigError(
            f"placing this takes {as_bytes(needed)} of {plan.device}, which has {memory}; "
            "give features='auto', a smaller share such as '20%' or 'host', or topology='host'"
        )
    sizes = {name: block.num_bytes for name, block in plan.files.items()}
    hostmemory.check_fits(hostmemory.missing(sizes))
