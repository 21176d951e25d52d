"""Copy what a plan says to device memory, host memory, or the memory of several GPUs.

Kernels find rows by the addresses of short runs of them, so one gather reads whatever is spread over those places.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hoploom.config.values import as_bytes
from hoploom.errors import ConfigError, PeerError, StoreError
from hoploom.gpu.place import host_memory as hostmemory
from hoploom.gpu.place.host_memory import HostMemory
from hoploom.gpu.place.packed_tensors import FieldColumn, PackedTensors, columns_of
from hoploom.gpu.place.peer_memory import Among, PeerMemory
from hoploom.gpu.place.place_plan import PlacePlan, Spans, plan_placement
from hoploom.gpu.place.placed_store import Lease, PlacedStore, Placement
from hoploom.gpu.place.request import PlaceRequest
from hoploom.ops.deadline import BUSY, DEADLINE, idle
from hoploom.ops.kernels.forms import DeviceLists
from hoploom.ops.kernels.gather import Segments
from hoploom.schema import DTYPE_NAMES, DTYPES, Owner, RelationName

if TYPE_CHECKING:
    from hoploom.store.store import Store


Run = tuple[int, list[Tensor]]  # the first id of rows that lie one after the other; the rows, and scales if any


def copy_store(store: "Store", request: PlaceRequest, among: Among | None) -> PlacedStore:
    """Copy the requested topology and features. All ranks call it if `among` is given."""
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
    of_lists = [
        _of_relation(one.key, plan, block) for one, block in zip(store.schema.relations, plan.relations, strict=False)
    ]
    report = (*of_lists, *(_of_column(column, plan) for column in plan.columns))
    return PlacedStore(store.schema, plan.device, lists, fields, store.features, report, lease, plan.chosen)


def _on_device(block: PackedTensors, device: torch.device) -> list[Tensor]:
    """A block's tensors in device memory."""
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
    """A block's tensors in memory that the processes of this host share and kernels read."""
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


def _of_relation(key: RelationName, plan: PlacePlan, block: PackedTensors) -> Placement:
    what, kept, size = f"topology of {' '.join(key)}", DTYPE_NAMES[block.columns[1][1]], block.num_bytes
    if plan.topology == "device":
        return Placement(what, kept, str(plan.device), 1.0, size, 0)
    return Placement(what, kept, "host", 0.0, 0, size)


# --- features ------------------------------------------------------------------------------------


def _place_features(plan: PlacePlan, among: Among | None, lease: Lease) -> dict[tuple[Owner, str], Segments]:
    if plan.peers and among is not None:
        runs = _spread_runs(plan, among, lease)
    else:
        runs = [_runs(column, plan, lease) for column in plan.columns]
    fields = {}
    for column, own in zip(plan.columns, runs, strict=True):
        segments = _segments(column, own, plan.device)
        # Peers free what they hold only when all have let go of it, so nothing but the lease may keep it.
        fields[column.owner, column.name] = replace(segments, keep=()) if plan.peers else segments
    return fields


def _runs(column: FieldColumn, plan: PlacePlan, lease: Lease) -> list[Run]:
    """The hot rows of every part in device memory, the others in host memory."""
    hot, rest = plan.hot(column), plan.rest(column)
    runs = _runs_of(hot, _on_device(column.block(hot), plan.device))
    if rest:
        runs += _runs_of(rest, _in_host_memory(column.block(rest), plan.column_file(column), plan.device, lease))
    return sorted(runs, key=lambda run: run[0])


def _spread_runs(plan: PlacePlan, among: Among, lease: Lease) -> list[list[Run]]:
    """The rows of every field, by rank: a rank's share of all fields is one run of bytes."""
    by_rank = list(zip(*(plan.spread(column) for column in plan.columns), strict=True))  # [rank][column]: a range
    blocks = [[c.block([span]) for c, span in zip(plan.columns, spans, strict=True)] for spans in by_rank]
    own = blocks[plan.peers.index(plan.rank)]
    sizes = [sum(block.num_bytes for block in of_rank) for of_rank in blocks]
    memory = PeerMemory(among, plan.peers, sizes, lambda raw: _fill_all(own, raw), plan.device)
    lease.closes.append(lambda wait, is_idle: memory.close(wait=wait, is_idle=is_idle))
    runs: list[list[Run]] = [[] for _ in plan.columns]
    for spans, of_rank, raw in zip(by_rank, blocks, memory.bytes, strict=True):
        for index, (span, block, piece) in enumerate(zip(spans, of_rank, _pieces(of_rank, raw), strict=True)):
            runs[index] += _runs_of([span], block.views(piece))
    return runs


def _fill_all(blocks: Sequence[PackedTensors], raw: Tensor) -> None:
    for block, piece in zip(blocks, _pieces(blocks, raw), strict=True):
        block.fill_bytes(piece)


def _pieces(blocks: Sequence[PackedTensors], raw: Tensor) -> tuple[Tensor, ...]:
    """Bytes cut up for blocks that lie one after the other."""
    return torch.split(raw, [block.num_bytes for block in blocks])


def _runs_of(spans: Spans, tensors: Sequence[Tensor]) -> list[Run]:
    """Rows of some ranges that lie one after the other, as a run per range."""
    sizes = [end - begin for begin, end in spans]
    pieces = zip(*(torch.split(tensor, sizes) for tensor in tensors), strict=True)
    return [(begin, list(own)) for (begin, end), own in zip(spans, pieces, strict=True) if end > begin]


def _segments(column: FieldColumn, runs: list[Run], device: torch.device) -> Segments:
    runs = runs or [(0, _on_device(column.block([]), device))]
    scales = [own[1] for _, own in runs] if column.is_scaled else None
    return Segments.of([(first, own[0]) for first, own in runs], device, DTYPES[column.field.dtype], scales)


def _of_column(column: FieldColumn, plan: PlacePlan) -> Placement:
    own, kept = column.field.dtype, DTYPE_NAMES[column.kept]
    owner = column.owner if isinstance(column.owner, str) else " ".join(column.owner)
    hot, rest = plan.hot(column), plan.rest(column)
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
