"""Plan where a store's tensors go and check that they fit; then copy them to device, host or peer memory.

Sizes that do not fit raise ConfigError with the numbers. "auto" leaves a quarter of the device's free memory, and 2 GiB
at least, to training. Kernels find rows by the addresses of runs of rows, so one gather reads all kinds of memory.
"""

import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from hoploom.config.values import as_bytes
from hoploom.errors import ConfigError, PeerError, StoreError
from hoploom.gpu.place import host_memory as hostmemory
from hoploom.gpu.place.host_memory import HostMemory, shared_name
from hoploom.gpu.place.packed_tensors import FieldColumn, PackedTensors, columns_of, kept_dtype, pack_topology
from hoploom.gpu.place.peer_memory import PeerMemory, PlacingRanks, ranks_of_host
from hoploom.gpu.place.placed_store import Lease, PlacedStore, Placement
from hoploom.gpu.place.request import AUTO, DEVICE, HOST, SPREAD, Features, PlaceRequest
from hoploom.ops.deadline import BUSY, DEADLINE, idle
from hoploom.ops.kernels.forms import DeviceLists
from hoploom.ops.kernels.gather import Segments
from hoploom.ranks.context import gather_json
from hoploom.schema import DTYPE_NAMES, DTYPES, Field, Owner, Schema
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
    """A placement: what is copied, and to which memory."""

    device: torch.device
    identity: str  # of the store; in the names of the files that processes share
    topology: Literal["device", "host"] | None
    relations: tuple[PackedTensors, ...]  # empty: topology stays as it is
    share: float  # of every part's rows that goes to the device
    columns: tuple[FieldColumn, ...]  # empty: features stay as they are
    peers: tuple[int, ...] = ()  # the ranks over which features are spread, if they are
    rank: int = 0  # of this process
    chosen: str = ""  # for "auto": the free memory that it was chosen by

    @property
    def device_bytes(self) -> int:
        """Bytes on this rank's device."""
        topology = sum(block.num_bytes for block in self.relations) if self.topology == DEVICE else 0
        return topology + sum(column.block(self.device_ids(column)).num_bytes for column in self.columns)

    def device_ids(self, column: FieldColumn) -> Spans:
        """Return the ids whose rows go to this rank's device."""
        if self.peers:
            return [self.spread(column)[self.peers.index(self.rank)]]
        return merge_ranges([(begin, middle) for begin, middle, _ in self._shared(column)])

    def host_ids(self, column: FieldColumn) -> Spans:
        """Return the ids whose rows go to host memory."""
        return [] if self.peers else merge_ranges([(middle, end) for _, middle, end in self._shared(column)])

    def _shared(self, column: FieldColumn) -> list[tuple[int, int, int]]:
        """Return, for every part, its first id, its first id in host memory, and the end of its ids."""
        parts = zip(column.firsts, column.counts, strict=True)
        return [(first, first + int(self.share * count + ROUNDING), first + count) for first, count in parts]

    def spread(self, column: FieldColumn) -> Spans:
        """Return the ids whose rows go to each peer's device."""
        count, total = len(self.peers), column.num_rows
        return [(total * peer // count, total * (peer + 1) // count) for peer in range(count)]

    @cached_property
    def files(self) -> dict[str, PackedTensors]:
        """The tensors that go to host memory, by file name."""
        found = {}
        if self.topology == HOST:
            found = {self.relation_file(index): block for index, block in enumerate(self.relations)}
        for column in self.columns:
            block = column.block(self.host_ids(column))
            if block.num_bytes:
                found[self.column_file(column)] = block
        return found

    def relation_file(self, index: int) -> str:
        return shared_name(self.identity, index, str(self.relations[index].columns))

    def column_file(self, column: FieldColumn) -> str:
        return shared_name(self.identity, column.owner, column.name, str(column.kept), self.host_ids(column))


def merge_ranges(spans: Spans) -> Spans:
    """Return the ranges without empty ones, adjacent ones merged."""
    out: Spans = []
    for begin, end in spans:
        if out and out[-1][1] == begin:
            out[-1] = out[-1][0], end
        elif end > begin:
            out.append((begin, end))
    return out


def plan_placement(store: "Store", request: PlaceRequest, among: PlacingRanks | None) -> PlacePlan:
    """Plan the placement; raise ConfigError if it is impossible or does not fit. Collective over `among`, if given."""
    if among is not None and not all(hasattr(among, name) for name in ("rank", "world_size", "gather", "barrier")):
        raise ConfigError(f"among is {among!r:.80}; give the context that hoploom.init made, or leave it out")
    _check_reach(store, request)
    if request.features == SPREAD and among is None:
        raise ConfigError("features='spread' needs the ranks to spread over; give among=context, as hoploom.init made")
    peers = () if among is None else ranks_of_host(among)
    relations = () if request.topology is None else _relations(store)
    columns = () if request.features is None else tuple(_columns(store, request.narrow))
    memory = _free_memory_of_ranks(request.device, among, peers)
    spread = peers if request.features == SPREAD else ()
    left = min(memory.free, max(LEAST_FREE, memory.free // FREE_SHARE))
    budget, topology_bytes = memory.free - left, sum(block.num_bytes for block in relations)
    topology = request.topology
    if topology == "auto":
        topology = "device" if topology_bytes <= budget else "host"
    if topology == DEVICE:
        budget -= topology_bytes
    chosen = ""
    if AUTO in (request.topology, request.features):
        chosen = f"auto: {request.device} had {memory}, of which {as_bytes(left)} are left to training"
    plan = PlacePlan(
        request.device,
        store.identity or secrets.token_hex(16),
        topology,
        relations,
        0.0 if request.features is None else _share(request.features, columns, budget),
        columns,
        spread,
        0 if among is None else among.rank,
        chosen,
    )
    needed = plan.device_bytes
    if needed > memory.free:
        raise ConfigError(
            f"placing this takes {as_bytes(needed)} of {plan.device}, which has {memory}; "
            "give features='auto', a smaller share such as '20%' or 'host', or topology='host'"
        )
    sizes = {name: block.num_bytes for name, block in plan.files.items()}
    hostmemory.check_fits(hostmemory.unwritten_bytes(sizes))
    return plan


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on the device; on the CPU, those that this process may use."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else memory_limit()


def device_key(device: torch.device) -> str:
    """Return a key that identifies the device among all of the host, whichever of them a process sees."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)


class FreeMemory(NamedTuple):
    """The memory of a device that each of its ranks may use."""

    free: int  # bytes, for each rank
    num_ranks: int  # that share the device

    def __str__(self) -> str:
        of_ranks = f" for each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        return f"{as_bytes(self.free)} free{of_ranks}"


def _free_memory_of_ranks(device: torch.device, among: PlacingRanks | None, peers: Sequence[int]) -> FreeMemory:
    """Return the least of all ranks of this host: ranks must choose alike to share files in host memory."""
    if among is None:
        return FreeMemory(free_memory(device), 1)
    found = gather_json(among, [free_memory(device), device_key(device)])
    counts = Counter(found[rank][1] for rank in peers)
    return min(FreeMemory(found[rank][0] // counts[found[rank][1]], counts[found[rank][1]]) for rank in peers)


# --- what there is to place ----------------------------------------------------------------------


def _check_reach(store: "Store", request: PlaceRequest) -> None:
    """Raise ConfigError unless this process has all that is to be placed."""
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
    """Return the fields of all node types and relations."""
    of_nodes: dict[tuple[Owner, str], Field] = {
        (t.name, n): field for t in schema.node_types for n, field in t.fields.items()
    }
    return of_nodes | {(r.key, name): field for r in schema.relations for name, field in r.fields.items()}


def _relations(store: "Store") -> tuple[PackedTensors, ...]:
    return tuple(
        pack_topology([part.lists[index] for part in store.topology], store.schema.node_types[source].num_nodes)
        for index, source in enumerate(store.schema.sources)
    )


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


def _share(wanted: Features, columns: tuple[FieldColumn, ...], budget: int) -> float:
    """Return the share of the rows that goes to the device; for "auto" in whole percent, so that ranks agree."""
    total = sum(column.num_rows * column.row_bytes for column in columns)
    if isinstance(wanted, float):
        return wanted
    if isinstance(wanted, int):
        most = max((count for column in columns for count in column.counts), default=0)
        least = -(-total // max(1, most))
        if 0 < wanted < least:
            raise ConfigError(
                f"features is {wanted} bytes, which hold no row of this store; give '{least}B' or more, a share such "
                "as '20%', or 'host'"
            )
        return min(1.0, wanted / max(1, total))
    if wanted == AUTO:
        whole = sum(column.block([(0, column.num_rows)]).num_bytes for column in columns)
        return 1.0 if whole <= budget else max(0, 100 * budget // whole) / 100
    return 0.0 if wanted == HOST else 1.0


Run = tuple[int, list[Tensor]]  # the first id of consecutive rows; the rows, and scales if any


def copy_store(store: "Store", request: PlaceRequest, among: PlacingRanks | None) -> PlacedStore:
    """Copy the requested topology and features. Collective over `among`, if given."""
    plan = plan_placement(store, request, among)
    hostmemory.sweep(keep=plan.files)
    lease = Lease(plan.device)
    try:
        lists = _place_topology(store, plan, lease)
        fields = _place_features(plan, among, lease)
        if not idle(plan.device, DEADLINE):  # readers are on streams of their own
            raise StoreError(f"{plan.device} has not taken in the store within {DEADLINE:g} s; {BUSY}, then try again")
    except BaseException:
        with suppress(StoreError, PeerError):
            lease.close(wait=False)
        raise
    report = []
    for relation, block in zip(store.schema.relations, plan.relations, strict=False):
        what, kept = f"topology of {' '.join(relation.key)}", DTYPE_NAMES[block.columns[1][1]]
        if plan.topology == DEVICE:
            report.append(Placement(what, kept, str(plan.device), 1.0, block.num_bytes, 0))
        else:
            report.append(Placement(what, kept, "host", 0.0, 0, block.num_bytes))
    report += [_of_column(column, plan) for column in plan.columns]
    return PlacedStore(store.schema, plan.device, lists, fields, store.features, tuple(report), lease, plan.chosen)


def _on_device(block: PackedTensors, device: torch.device) -> list[Tensor]:
    """Return tensors in device memory, filled."""
    try:
        raw = torch.empty(block.num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{device} has no {as_bytes(block.num_bytes)} in one piece: {error}"[:400]
            + "; give features='auto' or a smaller share, or topology='host'"
        ) from error
    block.fill_bytes(raw)
    return block.views(raw)


def _in_host_memory(block: PackedTensors, name: str, device: torch.device, lease: Lease) -> list[Tensor]:
    """Return tensors in memory that the processes of this host share and kernels read."""
    memory = HostMemory(name, block.num_bytes, block.fill_bytes)
    lease.closes.append(lambda wait, is_idle: memory.close(is_idle=is_idle))
    memory.register(device)
    return block.views(memory.bytes)


# --- topology ------------------------------------------------------------------------------------


def _place_topology(store: "Store", plan: PlacePlan, lease: Lease) -> tuple[DeviceLists, ...] | None:
    if plan.topology is None:
        return None
    lists = []
    for index, block in enumerate(plan.relations):
        if plan.topology == "device":
            tensors = _on_device(block, plan.device)
        else:
            tensors = _in_host_memory(block, plan.relation_file(index), plan.device, lease)
        others = columns_of([part.lists[index] for part in store.topology])
        lists.append(DeviceLists(tensors[0], tensors[1], plan.device, **dict(zip(others, tensors[2:], strict=True))))
    return tuple(lists)


# --- features ------------------------------------------------------------------------------------


def _place_features(plan: PlacePlan, among: PlacingRanks | None, lease: Lease) -> dict[tuple[Owner, str], Segments]:
    if plan.peers and among is not None:
        runs = _spread_runs(plan, among, lease)
    else:
        runs = [_runs(column, plan, lease) for column in plan.columns]
    fields = {}
    for column, found in zip(plan.columns, runs, strict=True):
        own = found or [(0, _on_device(column.block([]), plan.device))]
        scales = [tensors[1] for _, tensors in own] if column.is_scaled else None
        rows = [(first, tensors[0]) for first, tensors in own]
        segments = Segments.of(rows, plan.device, DTYPES[column.field.dtype], scales)
        # Peers free their shares when all ranks have closed them, so nothing but the lease may keep a reference.
        fields[column.owner, column.name] = replace(segments, keep=()) if plan.peers else segments
    return fields


def _runs(column: FieldColumn, plan: PlacePlan, lease: Lease) -> list[Run]:
    """Place the first rows of every part in device memory, the others in host memory."""
    hot, rest = plan.device_ids(column), plan.host_ids(column)
    runs = _runs_of(hot, _on_device(column.block(hot), plan.device))
    if rest:
        runs += _runs_of(rest, _in_host_memory(column.block(rest), plan.column_file(column), plan.device, lease))
    return sorted(runs, key=lambda run: run[0])


def _spread_runs(plan: PlacePlan, among: PlacingRanks, lease: Lease) -> list[list[Run]]:
    """Spread the rows of every field over the ranks; each rank's share of all fields is one block of bytes."""
    by_rank = list(zip(*(plan.spread(column) for column in plan.columns), strict=True))  # [rank][column]: a range
    blocks = [[c.block([span]) for c, span in zip(plan.columns, spans, strict=True)] for spans in by_rank]
    own = blocks[plan.peers.index(plan.rank)]
    sizes = [sum(block.num_bytes for block in of_rank) for of_rank in blocks]

    def fill(raw: Tensor) -> None:
        for block, piece in zip(own, _pieces(own, raw), strict=True):
            block.fill_bytes(piece)

    memory = PeerMemory(among, plan.peers, sizes, fill, plan.device)
    lease.closes.append(lambda wait, is_idle: memory.close(wait=wait, is_idle=is_idle))
    runs: list[list[Run]] = [[] for _ in plan.columns]
    for spans, of_rank, raw in zip(by_rank, blocks, memory.bytes, strict=True):
        for index, (span, block, piece) in enumerate(zip(spans, of_rank, _pieces(of_rank, raw), strict=True)):
            runs[index] += _runs_of([span], block.views(piece))
    return runs


def _pieces(blocks: Sequence[PackedTensors], raw: Tensor) -> tuple[Tensor, ...]:
    """Split bytes into the pieces of consecutive blocks."""
    return torch.split(raw, [block.num_bytes for block in blocks])


def _runs_of(spans: Spans, tensors: Sequence[Tensor]) -> list[Run]:
    """Split the rows of consecutive ranges into one run per range."""
    sizes = [end - begin for begin, end in spans]
    pieces = zip(*(torch.split(tensor, sizes) for tensor in tensors), strict=True)
    return [(begin, list(own)) for (begin, end), own in zip(spans, pieces, strict=True) if end > begin]


def _of_column(column: FieldColumn, plan: PlacePlan) -> Placement:
    own, kept = column.field.dtype, DTYPE_NAMES[column.kept]
    owner = column.owner if isinstance(column.owner, str) else " ".join(column.owner)
    hot, rest = plan.device_ids(column), plan.host_ids(column)
    on_device, in_host = (sum(end - begin for begin, end in spans) for spans in (hot, rest))
    if plan.peers:
        where, share = f"{plan.device.type} of {len(plan.peers)} ranks", 1.0
    else:
        where = " and ".join(name for name, count in ((str(plan.device), on_device), ("host", in_host)) if count) or "-"
        share = on_device / max(1, column.num_rows)
    return Placement(
        f"{column.name} of {owner}",
        own if own == kept else f"{own} as {kept}",
        where,
        share,
        column.block(hot).num_bytes,
        column.block(rest).num_bytes,
    )
