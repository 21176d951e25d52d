"""Plan where a store's tensors go and check that they fit; then copy them to device or host memory.

The tensors of a relation or a field are packed into one block of bytes, copied from the mapped files piece by piece, so
that this process never has a second copy of a whole tensor. Sizes that do not fit raise ConfigError. "auto" leaves a
quarter of the device's free memory, and 2 GiB at least, to training. Kernels get the address of each range of rows, so
one gather can read device memory and host memory.
"""

import math
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from hoploom import ops
from hoploom.config.values import as_bytes
from hoploom.errors import ConfigError, StoreError
from hoploom.gpu import host_memory as hostmemory
from hoploom.gpu.host_memory import HostMemory, shared_name
from hoploom.gpu.placed_store import Lease, PlacedStore, Placement, free_memory, left_to_training
from hoploom.ops import EdgeLists
from hoploom.ops.deadline import BUSY, DEADLINE, idle
from hoploom.ops.kernels.gather import Segments
from hoploom.ops.kernels.launch import DeviceLists
from hoploom.ranks.context import Ranks, gather_json
from hoploom.schema import DTYPE_NAMES, DTYPES, EDGE_ID, Field, Schema, TypeKey
from hoploom.store import Store
from hoploom.store.base import Absent, Part, Wanted, covers
from hoploom.store.row_cache import cache_of
from hoploom.system import boot_id

ROUNDING = 1e-6  # added to a number of rows, so that a share of 0.29 of 100 rows is 29
PIECE = 64 << 20  # bytes copied at once
ALIGNED = 256  # offsets of tensors in a block are multiples of 256 bytes
INT32_IDS = 2**31
WEIGHT, EDGE_TIME, SOURCE_TIME = "weight", "edge_time", "source_time"
Shape = tuple[int, ...]
Spans = list[tuple[int, int]]  # ranges of ids


# --- blocks of bytes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedTensors:
    """The shapes and dtypes of tensors that share one block of bytes, and the function that fills them."""

    columns: tuple[tuple[Shape, torch.dtype], ...]
    fill: Callable[[Sequence[Tensor]], object]

    @property
    def num_bytes(self) -> int:
        return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in self.columns)

    def views(self, raw: Tensor) -> list[Tensor]:
        """Return the tensors as views of the block `raw`, [num_bytes] uint8."""
        begin, out = 0, []
        for shape, dtype in self.columns:
            size = math.prod(shape) * dtype.itemsize
            out.append(raw[begin : begin + size].view(dtype).view(shape))
            begin += _aligned(size)
        return out

    def fill_bytes(self, raw: Tensor) -> None:
        """Write the tensors to the block `raw`, [num_bytes] uint8."""
        self.fill(self.views(raw))


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def columns_of(parts: Sequence[EdgeLists]) -> tuple[str, ...]:
    """Return the names of the columns that a relation has in addition to indptr and indices."""
    return tuple(name for name in (WEIGHT, EDGE_TIME, SOURCE_TIME) if getattr(parts[0], name) is not None)


def pack_topology(parts: Sequence[EdgeLists], num_sources: int) -> PackedTensors:
    """Return a relation's edge lists, all parts merged, as packed tensors: indptr, indices and optional columns."""
    num_nodes = sum(lists.indptr.numel() - 1 for lists in parts)
    num_edges = sum(lists.num_edges for lists in parts)
    ids = torch.int32 if num_sources < INT32_IDS else torch.int64
    kinds = {WEIGHT: (num_edges, torch.float32), EDGE_TIME: (num_edges, torch.int64)}
    kinds[SOURCE_TIME] = (num_sources, torch.int64)
    others = columns_of(parts)
    columns = [(num_nodes + 1, torch.int64), (num_edges, ids), *(kinds[name] for name in others)]

    def fill(tensors: Sequence[Tensor]) -> None:
        indptr, indices, *rest = tensors
        indptr[:1].zero_()
        _fill_edges(indptr, [lists.indptr[1:] for lists in parts], 1, [lists.first_edge for lists in parts])
        _fill_edges(indices, [lists.indices for lists in parts])
        for name, tensor in zip(others, rest, strict=True):
            owners = parts[:1] if name == SOURCE_TIME else parts  # every part has the times of all sources
            _fill_edges(tensor, [getattr(lists, name) for lists in owners])
        ops.require_whole(column for lists in parts for column in lists.columns)

    return PackedTensors(tuple(((length,), dtype) for length, dtype in columns), fill)


def _fill_edges(out: Tensor, pieces: Sequence[Tensor], begin: int = 0, added: Sequence[int] | None = None) -> None:
    """Write the tensors `pieces` one after the other to out[begin:]; add added[i] to the values of piece i."""
    at_once = PIECE // out.element_size()
    for number, source in enumerate(pieces):
        for first in range(0, source.numel(), at_once):
            some = source[first : first + at_once]
            out[begin : begin + some.numel()].copy_(some + added[number] if added and added[number] else some)
            begin += some.numel()


@dataclass(frozen=True)
class FieldColumn:
    """The rows of one field of a node type or relation, over all parts that are on this host."""

    owner: TypeKey
    name: str
    field: Field
    parts: tuple[Part, ...]
    held: Sequence[tuple[int, int]]  # of every part: its first id and number of rows
    num_all: int  # rows of all parts, here and on other hosts
    cached: Tensor | None = None  # rows of other hosts that a cache has

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.held)

    @property
    def num_cached(self) -> int:
        return 0 if self.cached is None else len(self.cached)

    @property
    def cached_bytes(self) -> int:
        return self.num_cached * self.field.row_bytes

    def block(self, spans: Sequence[tuple[int, int]]) -> PackedTensors:
        """Return the rows of the id ranges `spans` as one packed tensor."""
        count = sum(end - begin for begin, end in spans)
        rows = (count, *self.field.shape), DTYPES[self.field.dtype]

        def fill(tensors: Sequence[Tensor]) -> None:
            begin = 0
            for some in self._pieces(spans):
                tensors[0][begin : begin + some.shape[0]].copy_(some)
                begin += some.shape[0]
            ops.require_whole(part.tables[self.owner, self.name].rows for part in self.parts)

        return PackedTensors((rows,), fill)

    def _pieces(self, spans: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """Yield the rows of the id ranges `spans` in order, about PIECE bytes at a time."""
        at_once = max(1, PIECE // max(1, self.field.row_bytes))
        for begin, end in spans:
            for part, (first, count) in zip(self.parts, self.held, strict=True):
                start, high = max(begin, first), min(end, first + count)
                table = part.tables[self.owner, self.name]
                in_order = not table.by_edge_id or (self.owner, EDGE_ID) not in part.tables
                for low in range(start, high, at_once):
                    until = min(high, low + at_once)
                    if in_order:
                        yield table.rows[low - first : until - first]
                    else:
                        yield part.gather([Wanted(self.owner, self.name, torch.arange(low, until))])[0]


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacePlan:
    """A planned placement: the tensors to copy, and the memory that each goes to."""

    device: torch.device
    identity: str  # of the store; in the names of the files that processes share
    topology: Literal["device", "host"] | None
    relations: tuple[PackedTensors, ...]  # empty: topology stays as it is
    share: float  # of every part's feature rows that goes to the device
    columns: tuple[FieldColumn, ...]  # empty: features stay as they are
    chosen: str = ""  # with "auto": a line for the report about the free memory that decided

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the placement takes."""
        topology = sum(block.num_bytes for block in self.relations) if self.topology == "device" else 0
        rows = [column.block(self.spans(column)[0]).num_bytes + column.cached_bytes for column in self.columns]
        return topology + sum(rows)

    def spans(self, column: FieldColumn) -> tuple[Spans, Spans]:
        """Return the ranges of ids whose rows go to the device (the first rows of every part), and to the host."""
        hot, rest = [], []
        for first, count in column.held:
            middle = first + int(self.share * count + ROUNDING)
            hot.append((first, middle))
            rest.append((middle, first + count))
        return merge_ranges(hot), merge_ranges(rest)

    @cached_property
    def files(self) -> dict[str, PackedTensors]:
        """The tensors that go to host memory, by file name."""
        found = {}
        if self.topology == "host":
            found = {self.relation_file(index): block for index, block in enumerate(self.relations)}
        blocks = {self.column_file(column): column.block(self.spans(column)[1]) for column in self.columns}
        return found | {name: block for name, block in blocks.items() if block.num_bytes}

    def relation_file(self, index: int) -> str:
        return shared_name(self.identity, index, str(self.relations[index].columns))

    def column_file(self, column: FieldColumn) -> str:
        return shared_name(self.identity, column.owner, column.name, column.field.dtype, self.spans(column)[1])


def merge_ranges(spans: Spans) -> Spans:
    """Return ranges of ids with empty ranges left out and adjacent ranges merged."""
    out: Spans = []
    for begin, end in spans:
        if out and out[-1][1] == begin:
            out[-1] = out[-1][0], end
        elif end > begin:
            out.append((begin, end))
    return out


def plan_placement(
    store: Store,
    topology: Literal["device", "host", "auto"] | None,
    features: str | float | None,
    device: torch.device,
    among: Ranks | None,
) -> PlacePlan:
    """Plan the placement; raise ConfigError if it is impossible or does not fit. Collective over `among`, if given.

    `features` is "device", "host", "auto", a share of the rows (float) or bytes (int).
    """
    _check_reach(store, topology, features is not None)
    chosen = ""
    if topology == "auto" and not covers(store.schema, store.topology):
        topology, chosen = None, "; the topology is not placed, because some of it is on another host"
    relations: tuple[PackedTensors, ...] = ()
    if topology is not None:
        relations = tuple(
            pack_topology([part.lists[index] for part in store.topology], store.schema.node_types[source].num_nodes)
            for index, source in enumerate(store.schema.sources)
        )
    named = fields_of(store.schema).items() if features is not None else ()
    columns = [_column(store, owner, name, field) for (owner, name), field in named]
    free, num_ranks = free_memory_of_ranks(device, among)
    memory = f"{as_bytes(free)} free" + (f" for each of {num_ranks} ranks" if num_ranks > 1 else "")
    left = left_to_training(free)
    topology_bytes = sum(block.num_bytes for block in relations)
    budget = free - left - sum(column.cached_bytes for column in columns)
    if chosen or "auto" in (topology, features):
        chosen = f"auto: {device} had {memory}, of which {as_bytes(left)} are left to training{chosen}"
    if topology == "auto":
        topology = "device" if topology_bytes <= budget else "host"
    budget -= topology_bytes if topology == "device" else 0
    share = 0.0 if features is None else _share(features, columns, budget)
    identity = store.identity or secrets.token_hex(16)
    plan = PlacePlan(device, identity, topology, relations, share, tuple(columns), chosen)
    if plan.device_bytes > free:
        raise ConfigError(
            f"placing this takes {as_bytes(plan.device_bytes)} of {device}, which has {memory}; "
            "give features='auto', a smaller share such as '20%' or 'host', a smaller cache, or topology='host'"
        )
    in_host = sum(block.num_bytes for block in plan.files.values())
    if store.budget is not None and in_host > store.budget.num_bytes:
        raise ConfigError(
            f"placing this takes {as_bytes(in_host)} of host memory, and the store may have "
            f"{as_bytes(store.budget.num_bytes)}; raise that limit, or place more on the device"
        )
    unwritten = [block.num_bytes for name, block in plan.files.items() if not (hostmemory.FOLDER / name).exists()]
    hostmemory.check_fits(sum(unwritten))
    return plan


def device_key(device: torch.device) -> str:
    """Return a key that identifies the device on this host, even if processes see different GPUs as number 0."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)


def host_key() -> list[str | int]:
    """Return a key that is equal for all processes that share host memory."""
    try:
        return [boot_id() or secrets.token_hex(16), os.stat(hostmemory.FOLDER).st_dev]
    except OSError:  # no Linux, or no /dev/shm: this process alone
        return [secrets.token_hex(16)]


def free_memory_of_ranks(device: torch.device, among: Ranks | None) -> tuple[int, int]:
    """Return the bytes of device memory free for this rank, and how many ranks share the device.

    All ranks of a host get the smallest of their results, because they must choose alike. Collective.
    """
    if among is None:
        return free_memory(device), 1
    found = gather_json(among, [host_key(), free_memory(device), device_key(device)])
    own = [(free, key) for host, free, key in found if host == found[among.rank][0]]
    counts = Counter(key for _, key in own)
    return min((free // counts[key], counts[key]) for free, key in own)


def _column(store: Store, owner: TypeKey, name: str, field: Field) -> FieldColumn:
    """Return the rows of a field that are on this host: those of parts here, of edges also where the topology is."""
    schema, cache = store.schema, cache_of(store)
    if isinstance(owner, str):
        parts, index = store.parts, schema.type_index[owner]
        held = [(part.first_nodes[index], part.num_nodes[index]) for part in parts]
    else:
        parts = tuple(part for part in store.topology if (owner, name) in part.tables)
        lists = [part.lists[schema.relation_index[owner]] for part in parts]
        held = [(own.first_edge, own.num_edges) for own in lists]
    cached = None if cache is None else cache.tables.get(owner, {}).get(name)
    num_all = schema.described(owner).count
    return FieldColumn(owner, name, field, parts, held, num_all, cached)


def _check_reach(store: Store, topology: str | None, with_features: bool) -> None:
    """Raise ConfigError unless this process can place what is asked for, in a store that is not placed yet."""
    if store.placed is not None:
        raise ConfigError(
            "the store is placed already, or was; give topology and features in one call, on the opened store again"
        )
    if store.deployment.makes_batches:
        raise ConfigError(
            "servers make the batches of this store; give the loader device=, or connect with made='here'"
        )
    here = "open all parts of the store on this host, or leave it as it is: batches are copied to the device"
    needs_all = topology is not None and (topology != "auto" or not with_features)
    if needs_all and not covers(store.schema, store.topology):
        raise ConfigError(
            "the topology cannot be placed: some of it is on another host, and every hop would wait for that host; "
            f"place features alone, open the edges of all parts too (topology='local'), or {here}"
        )
    if with_features and any(isinstance(shard, Absent) for shard in store.shards):
        raise ConfigError(f"the features cannot be placed: some of them are in parts that are not open; {here}")


def fields_of(schema: Schema) -> dict[tuple[TypeKey, str], Field]:
    """Return the fields of all node types and relations, by (type or relation, field name)."""
    of_nodes: dict[tuple[TypeKey, str], Field] = {
        (t.name, n): field for t in schema.node_types for n, field in t.fields.items()
    }
    return of_nodes | {(r.key, name): field for r in schema.relations for name, field in r.fields.items()}


def _share(wanted: str | float, columns: Sequence[FieldColumn], budget: int) -> float:
    """Return the share of all rows that goes to the device; for "auto" in whole percent, so that ranks agree."""
    total = sum(column.num_rows * column.field.row_bytes for column in columns)
    if isinstance(wanted, float):
        return wanted
    if isinstance(wanted, int):
        most = max((count for column in columns for _, count in column.held), default=0)
        least = -(-total // max(1, most))
        if 0 < wanted < least:
            raise ConfigError(
                f"features is {wanted} bytes, which hold no row of this store; give '{least}B' or more, a share such "
                "as '20%', or 'host'"
            )
        return min(1.0, wanted / max(1, total))
    if wanted == "auto":
        whole = sum(column.block([(0, column.num_rows)]).num_bytes for column in columns)
        return 1.0 if whole <= budget else max(0, 100 * budget // max(1, whole)) / 100
    return 0.0 if wanted == "host" else 1.0


# --- copies --------------------------------------------------------------------------------------


def copy_store(store: Store, plan: PlacePlan) -> PlacedStore:
    """Copy topology and features to the planned memory; return the placed store."""
    device = plan.device
    hostmemory.sweep(keep=plan.files)
    lease = Lease(device)
    try:
        lists = None if plan.topology is None else tuple(_place_topology(store, plan, lease))
        runs = {(column.owner, column.name): _place_rows(column, plan, lease) for column in plan.columns}
        if not idle(device, DEADLINE):  # readers are on streams of their own
            raise StoreError(f"{device} has not taken in the store within {DEADLINE:g} s; {BUSY}, then try again")
    except BaseException:
        with suppress(StoreError):
            lease.close()
        raise
    report = []
    for relation, block in zip(store.schema.relations, plan.relations, strict=False):
        what, kept = f"topology of {' '.join(relation.key)}", DTYPE_NAMES[block.columns[1][1]]
        if plan.topology == "device":
            report.append(Placement(what, kept, str(device), 1.0, block.num_bytes, 0))
        else:
            report.append(Placement(what, kept, "host", 0.0, 0, block.num_bytes))
    for column in plan.columns:
        hot, rest = plan.spans(column)
        counts = [sum(end - begin for begin, end in ids) for ids in (hot, rest)]
        counts = [counts[0] + column.num_cached, counts[1], column.num_all - column.num_rows - column.num_cached]
        memories = zip((str(device), "host", "other hosts"), counts, strict=True)
        where = " and ".join(name for name, count in memories if count) or "-"
        owner = column.owner if isinstance(column.owner, str) else " ".join(column.owner)
        num_bytes = column.block(hot).num_bytes + column.cached_bytes, column.block(rest).num_bytes
        share = counts[0] / max(1, column.num_all)
        report.append(Placement(f"{column.name} of {owner}", column.field.dtype, where, share, *num_bytes))
    whole = {(column.owner, column.name) for column in plan.columns if column.num_rows == column.num_all}
    fields = {key: Segments.of(rows, device) for key, rows in runs.items() if key in whole}
    partial = {key: rows for key, rows in runs.items() if key not in whole}
    return PlacedStore(
        schema=store.schema,
        device=device,
        relations=lists,
        fields=fields,
        partial=partial,
        host=store.features,
        report=tuple(report),
        lease=lease,
        share=plan.share,
        chosen=plan.chosen,
    )


def _on_device(block: PackedTensors, device: torch.device) -> list[Tensor]:
    """Copy the block's tensors to device memory and return them; raise ConfigError if memory is short."""
    try:
        raw = torch.empty(block.num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{device} has no {as_bytes(block.num_bytes)} in one piece: {error}"[:400]
            + "; give features='auto' or a smaller share, a smaller cache, or topology='host'"
        ) from error
    block.fill_bytes(raw)
    return block.views(raw)


def _in_host_memory(block: PackedTensors, name: str, device: torch.device, lease: Lease) -> list[Tensor]:
    """Copy tensors to host memory, shared as `name`, that kernels can read; return them. `lease` closes the memory."""
    memory = HostMemory(name, block.num_bytes, block.fill_bytes)
    lease.closes.append(memory.close)
    memory.register(device)
    return block.views(memory.bytes)


def _place_topology(store: Store, plan: PlacePlan, lease: Lease) -> Iterator[DeviceLists]:
    """Yield each relation's edge lists, copied to the planned memory."""
    for index, block in enumerate(plan.relations):
        if plan.topology == "device":
            tensors = _on_device(block, plan.device)
        else:
            tensors = _in_host_memory(block, plan.relation_file(index), plan.device, lease)
        others = columns_of([part.lists[index] for part in store.topology])
        yield DeviceLists(tensors[0], tensors[1], plan.device, **dict(zip(others, tensors[2:], strict=True)))


def _place_rows(column: FieldColumn, plan: PlacePlan, lease: Lease) -> list[tuple[int, Tensor]]:
    """Copy a field's first rows of every part, and cached rows, to device memory, and the rest to host memory.

    Return pairs (first id, rows), ascending. The ids of cached rows follow those of all nodes.
    """
    hot, rest = plan.spans(column)
    (on_device,) = _on_device(column.block(hot), plan.device)
    runs = _runs_of(hot, on_device)
    if rest:
        block = column.block(rest)
        runs += _runs_of(rest, *_in_host_memory(block, plan.column_file(column), plan.device, lease))
    runs.sort(key=lambda run: run[0])
    if (cached := column.cached) is not None:
        block = PackedTensors(((tuple(cached.shape), cached.dtype),), lambda tensors: tensors[0].copy_(cached))
        runs += _runs_of([(column.num_all, column.num_all + len(cached))], *_on_device(block, plan.device))
    return runs or [(0, on_device)]


def _runs_of(spans: Spans, rows: Tensor) -> list[tuple[int, Tensor]]:
    """Split `rows` by range of ids; return (first id, rows of the range) for each range that is not empty."""
    pieces = torch.split(rows, [end - begin for begin, end in spans])
    return [(begin, own) for (begin, end), own in zip(spans, pieces, strict=True) if end > begin]
