"""Plan where a store's tensors go and check that they fit; then copy them to device or host memory.

Tensors are copied from the mapped files piece by piece, so that this process never has a second copy of a whole tensor.
Sizes that do not fit raise ConfigError. "auto" leaves a quarter of the device's free memory, and 2 GiB at least, to
training. Kernels get the address of each range of rows, so one gather can read device memory and host memory.
"""

import itertools
import math
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

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
from hoploom.system import allow_open_files, boot_id

ROUNDING = 1e-6  # added to a number of rows, so that a share of 0.29 of 100 rows is 29
PIECE = 64 << 20  # bytes copied at once
INT32_IDS = 2**31
Spans = list[tuple[int, int]]  # ranges of ids
PlannedRows = Sequence[tuple[Spans, "PlannedTensor"]]  # the rows of a field, by ranges of ids


# --- tensors to copy -----------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to place: its shape and dtype, the function that writes it, and the memory that it goes to."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[Tensor], object]
    contents: tuple[Any, ...] = ()  # what names it within its store, if it may be in host memory
    file: str | None = None  # of host memory, which processes share by this name; None: in device memory

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def in_host(self, identity: str) -> "PlannedTensor":
        """Return the tensor for host memory, if it has any bytes. `identity` is that of the store."""
        name = shared_name(identity, self.contents, self.shape, str(self.dtype))
        return replace(self, file=name) if self.num_bytes else self

    def over(self, raw: Tensor) -> Tensor:
        """Return the tensor as a view of the bytes `raw`."""
        return raw.view(self.dtype).view(self.shape)


def plan_relations(parts: Sequence[Part], *, with_times: bool) -> list[dict[str, PlannedTensor]]:
    """Return the edge lists of each relation, merged over these parts, by the names that DeviceLists has for them."""
    schema, relations = parts[0].schema, []
    for index, source in enumerate(schema.sources):
        lists, num_sources = [part.lists[index] for part in parts], schema.node_types[source].num_nodes
        num_edges = sum(own.num_edges for own in lists)
        columns = {
            "indptr": (1 + sum(own.indptr.numel() - 1 for own in lists), torch.int64),
            "indices": (num_edges, torch.int32 if num_sources < INT32_IDS else torch.int64),
            "weight": (num_edges, torch.float32),
            "edge_time": (num_edges, torch.int64),
            "source_time": (num_sources, torch.int64),
        }
        planned = {}
        for name, (length, dtype) in columns.items():
            if getattr(lists[0], name) is not None and (with_times or not name.endswith("_time")):
                contents = index, parts[0].first_nodes, name
                planned[name] = PlannedTensor((length,), dtype, partial(_fill_column, lists, name), contents)
        relations.append(planned)
    return relations


def _fill_column(parts: Sequence[EdgeLists], name: str, out: Tensor) -> None:
    """Write the column `name` of a relation's edge lists to `out`. Nodes and edges count from the first part's."""
    at_once = PIECE // out.element_size()
    for lists in parts[:1] if name == "source_time" else parts:  # every part has the times of all sources
        column: Tensor = getattr(lists, name)
        added = lists.first_edge - parts[0].first_edge
        begin = lists.first_node - parts[0].first_node if name == "indptr" else added
        for first in range(0, column.numel(), at_once):
            some = column[first : first + at_once]
            if name == "indptr" and added:
                some = some + added
            out[begin + first : begin + first + some.numel()].copy_(some)
        ops.require_whole([column])


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

    def planned(self, share: float, identity: str) -> PlannedRows:
        """Return ranges of ids and their rows: first those for the device, then those for the host, if there are any.

        The first rows of every part go to the device, and so do cached rows, whose ids follow those of all nodes.
        """
        hot, rest = Spans(), Spans()
        for first, count in self.held:
            middle = first + int(share * count + ROUNDING)
            _add_range(hot, first, middle)
            _add_range(rest, middle, first + count)
        found = [(hot, self._rows(hot))]
        if rest:
            found.append((rest, self._rows(rest).in_host(identity)))
        if (cached := self.cached) is not None:
            rows = PlannedTensor(tuple(cached.shape), cached.dtype, lambda out: out.copy_(cached))
            found.append(([(self.num_all, self.num_all + len(cached))], rows))
        return found

    def _rows(self, spans: Spans) -> PlannedTensor:
        def fill(out: Tensor) -> None:
            begin = 0
            for some in self._pieces(spans):
                out[begin : begin + some.shape[0]].copy_(some)
                begin += some.shape[0]
            ops.require_whole(part.tables[self.owner, self.name].rows for part in self.parts)

        shape = sum(end - begin for begin, end in spans), *self.field.shape
        return PlannedTensor(shape, DTYPES[self.field.dtype], fill, (self.owner, self.name, spans))

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


def _add_range(spans: Spans, begin: int, end: int) -> None:
    """Append a range of ids, joined with the range before if that ends where this begins; leave empty ranges out."""
    if spans and spans[-1][1] == begin:
        spans[-1] = spans[-1][0], end
    elif end > begin:
        spans.append((begin, end))


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacePlan:
    """A planned placement: the tensors to copy."""

    device: torch.device
    # Edge lists by relation: of all parts merged, or of each part if others are elsewhere; none: they stay as they are.
    topology: Sequence[Sequence[Mapping[str, PlannedTensor]]]
    share: float  # of every part's feature rows that goes to the device
    columns: Sequence[tuple[FieldColumn, PlannedRows]]  # none: features stay as they are
    chosen: str = ""  # with "auto": a line for the report about the free memory that decided

    @property
    def _tensors(self) -> Iterator[PlannedTensor]:
        for relation in itertools.chain(*self.topology):
            yield from relation.values()
        for _, found in self.columns:
            yield from (rows for _, rows in found)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the placement takes."""
        return sum(tensor.num_bytes for tensor in self._tensors if tensor.file is None)

    @property
    def files(self) -> dict[str, int]:
        """The bytes of the tensors that go to host memory, by file name."""
        return {tensor.file: tensor.num_bytes for tensor in self._tensors if tensor.file is not None}


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
    chosen, identity = "", store.identity or secrets.token_hex(16)
    has_all = covers(store.schema, store.topology)
    if topology == "auto" and _asks_others(store):
        topology, chosen = None, "; the topology is not placed, because some of it is on another host"
    named = fields_of(store.schema).items() if features is not None else ()
    columns = [_column(store, owner, name, field) for (owner, name), field in named]
    free, num_ranks = free_memory_of_ranks(device, among)
    memory = f"{as_bytes(free)} free" + (f" for each of {num_ranks} ranks" if num_ranks > 1 else "")
    left = left_to_training(free)
    budget = free - left - sum(column.cached.nbytes for column in columns if column.cached is not None)
    if chosen or "auto" in (topology, features):
        chosen = f"auto: {device} had {memory}, of which {as_bytes(left)} are left to training{chosen}"
    merged: Sequence[Sequence[Part]] = [store.topology] if has_all else [[part] for part in store.topology]
    lists = [plan_relations(parts, with_times=has_all) for parts in (merged if topology is not None else ())]
    taken = sum(tensor.num_bytes for relation in itertools.chain(*lists) for tensor in relation.values())
    if topology == "host" or (topology == "auto" and taken > budget):
        lists = [[{name: own.in_host(identity) for name, own in of.items()} for of in planned] for planned in lists]
    else:
        budget -= taken
    share = 0.0 if features is None else _share(features, columns, budget)
    rows = [(column, column.planned(share, identity)) for column in columns]
    plan = PlacePlan(device, lists, share, rows, chosen)
    if plan.device_bytes > free:
        raise ConfigError(
            f"placing this takes {as_bytes(plan.device_bytes)} of {device}, which has {memory}; "
            "give features='auto', a smaller share such as '20%' or 'host', a smaller cache, or topology='host'"
        )
    in_host = sum(plan.files.values())
    if store.budget is not None and in_host > store.budget.num_bytes:
        raise ConfigError(
            f"placing this takes {as_bytes(in_host)} of host memory, and the store may have "
            f"{as_bytes(store.budget.num_bytes)}; raise that limit, or place more on the device"
        )
    hostmemory.check_fits(sum(size for file, size in plan.files.items() if not (hostmemory.FOLDER / file).exists()))
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


def _asks_others(store: Store) -> bool:
    """Return whether a hop needs edges that this process does not have, and other shards of the store do."""
    return len(store.parts) < len(store.shards) and not covers(store.schema, store.topology)


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
    if needs_all and _asks_others(store):
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
        return 1.0 if total <= budget else max(0, 100 * budget // max(1, total)) / 100
    return 0.0 if wanted == "host" else 1.0


# --- copies --------------------------------------------------------------------------------------


def copy_store(store: Store, plan: PlacePlan) -> PlacedStore:
    """Copy topology and features to the planned memory; return the placed store."""
    device, lists, runs = plan.device, list[tuple[DeviceLists, ...]](), {}
    has_all = covers(store.schema, store.topology)
    if plan.files:
        allow_open_files()  # two for each tensor in host memory
    hostmemory.sweep(keep=plan.files)
    lease = Lease(device)
    try:
        for first_part, relations in zip(store.topology, plan.topology, strict=False):
            placed = [{name: _placed(own, device, lease) for name, own in of.items()} for of in relations]
            each = zip(placed, (of.first_node for of in first_part.lists), strict=True)
            lists.append(tuple(DeviceLists(device=device, first_node=first, **tensors) for tensors, first in each))
        for column, rows in plan.columns:
            runs[column.owner, column.name] = _placed_rows(rows, device, lease)
        if not idle(device, DEADLINE):  # readers are on streams of their own
            raise StoreError(f"{device} has not taken in the store within {DEADLINE:g} s; {BUSY}, then try again")
    except BaseException:
        with suppress(StoreError):
            lease.close()
        raise
    whole = {(column.owner, column.name) for column, _ in plan.columns if column.num_rows == column.num_all}
    return PlacedStore(
        schema=store.schema,
        device=device,
        relations=lists[0] if lists and has_all else None,
        of_parts=() if has_all else lists,
        fields={key: Segments.of(rows, device) for key, rows in runs.items() if key in whole},
        partial={key: rows for key, rows in runs.items() if key not in whole},
        host=store.features,
        report=tuple(_report(store.schema, plan)),
        lease=lease,
        share=plan.share,
        chosen=plan.chosen,
    )


def _placed(planned: PlannedTensor, device: torch.device, lease: Lease) -> Tensor:
    """Copy a tensor to the planned memory, and return it there. `lease` closes host memory."""
    if planned.file is not None:
        memory = HostMemory(planned.file, planned.num_bytes, lambda raw: planned.fill(planned.over(raw)))
        lease.closes.append(memory.close)
        memory.register(device)
        return planned.over(memory.bytes)
    try:
        out = torch.empty(planned.shape, dtype=planned.dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{device} has no {as_bytes(planned.num_bytes)} in one piece: {error}"[:400]
            + "; give features='auto' or a smaller share, a smaller cache, or topology='host'"
        ) from error
    planned.fill(out)
    return out


def _placed_rows(rows: PlannedRows, device: torch.device, lease: Lease) -> list[tuple[int, Tensor]]:
    """Copy a field's rows; return (first id, rows) for each range of ids, ascending."""
    runs = []
    for spans, planned in rows:
        tensor = _placed(planned, device, lease)
        pieces = torch.split(tensor, [end - begin for begin, end in spans])
        runs += [(begin, own) for (begin, _), own in zip(spans, pieces, strict=True)]
    return sorted(runs, key=lambda run: run[0]) or [(0, tensor)]


def _report(schema: Schema, plan: PlacePlan) -> Iterator[Placement]:
    """Yield the rows of the table of placed tensors."""
    for index, relation in enumerate(schema.relations if plan.topology else ()):
        lists = [(name, own) for relations in plan.topology for name, own in relations[index].items()]
        counted = [(own, own.shape[0] - 1 if name == "indptr" else 0) for name, own in lists]
        dtype, num_all = DTYPE_NAMES[dict(lists)["indices"].dtype], schema.node_type(relation.destination).num_nodes
        yield _placement(f"topology of {' '.join(relation.key)}", dtype, counted, num_all, plan.device)
    for column, rows in plan.columns:
        owner = column.owner if isinstance(column.owner, str) else " ".join(column.owner)
        counted = [(planned, planned.shape[0]) for _, planned in rows]
        yield _placement(f"{column.name} of {owner}", column.field.dtype, counted, column.num_all, plan.device)


def _placement(
    what: str, dtype: str, counted: Iterable[tuple[PlannedTensor, int]], num_all: int, device: torch.device
) -> Placement:
    """Return a row of the table: of tensors with their numbers of rows, of `num_all` on all hosts."""
    counts, sizes = [0, 0], [0, 0]  # on the device, in host memory
    for planned, count in counted:
        counts[planned.file is not None] += count
        sizes[planned.file is not None] += planned.num_bytes
    memories = zip((str(device), "host", "other hosts"), (*counts, num_all - sum(counts)), strict=True)
    where = " and ".join(name for name, count in memories if count) or "-"
    return Placement(what, dtype, where, counts[0] / max(1, num_all), *sizes)
