"""Look-ahead: the rows that coming batches need, and that are not in memory, are fetched together, each row once.

All batches of a group of steps are sampled first. Rows that neither a cache nor the previous group has are then fetched
by one request per peer, and the batches are made. This costs memory for the rows of two groups, and the first batch
waits for its group. With scratch space, a group has more steps than fit in memory: its rows are copied to a file, those
of each step together. Every step is then sampled twice, for its ids and for its batch. The files have no names, so they
disappear with the process.
"""

import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hoploom import ops
from hoploom.batch import Sampled
from hoploom.errors import StoreError
from hoploom.load.assemble import Batch
from hoploom.load.maker import LocalMaker, Maker
from hoploom.load.order import Order, StepShare
from hoploom.load.pipeline import LEAD, Pipeline, Stages
from hoploom.ops import DiskError, Empty, FileRows, IdMap, Reads, RowRequest, SlotMap
from hoploom.schema import DTYPES, Schema, TypeKey
from hoploom.store import Sharded, Wanted
from hoploom.store.base import CachedPositions, RowLookup, Triple, read_wanted
from hoploom.store.budget import little_idle
from hoploom.store.on_disk import BLOCK, SHARE, OnDisk, ScratchFile, cut
from hoploom.store.on_disk import Ids as SortedIds
from hoploom.store.row_cache import Cached
from hoploom.store.sharded import empty_rows

MOST_STEPS, MOST_PACKED = 128, 1024  # at most, in a group in memory, in scratch space
GROUPS = 3  # in scratch space at once: one is deleted, one read, one written
PIECE = 64 << 20  # bytes that are packed at a time, at most a quarter of the window
SECONDS, SWEEPS = 60.0, 3.0  # packing a group takes at most SECONDS, or SWEEPS times a pass over the store,
DEADLINE_SHARE = 0.25  # and never more than this share of the loader's deadline
SPARE = 16  # a table that grows gets 1/16 more rows than needed
OF_A_ROW = 48  # bytes of bookkeeping per row while it is read
Fields = Mapping[TypeKey, Sequence[str]]  # field names of which some rows are not in memory
Ids = tuple[TypeKey, int, int]  # identifies a tensor of ids: node type or relation, address, length
Request = tuple[Wanted, Tensor | None, Tensor]  # the rows at these positions of the ids, or all, and where they go
Found = tuple[Fields, Sequence[RowLookup]]  # of a batch: those fields, and one lookup for every tensor of ids


# --- the window of rows that are prefetched ---------------------------------------------------


def ids_key(owner: TypeKey, ids: Tensor) -> Ids:
    return owner, ids.data_ptr(), ids.numel()


class Window:
    """The rows of a node type or relation that the newest two groups of steps need, each at its slot of the tables."""

    def __init__(self, schema: Schema, owner: TypeKey, fields: Collection[str], *, little_memory: bool) -> None:
        self._schema, self._owner = schema, owner
        num_ids = schema.described(owner).count
        self.slots = SlotMap(num_ids, 0) if little_memory else SlotMap(num_ids)
        self.tables = {name: self.longer(name, 0, None) for name in fields}

    def longer(self, name: str, num_rows: int, table: Tensor | None) -> Tensor:
        """Return a table of `num_rows` for a field, which begins with a copy of `table`. Subclasses override this."""
        rows = empty_rows(self._schema, self._owner, name, num_rows)
        if table is not None:
            ops.byte_rows(rows)[: len(table)].numpy()[:] = ops.byte_rows(table).numpy()
        return rows

    def requests(self, fresh: Tensor) -> list[Request]:
        """Return the requests for the rows of the slots `fresh`."""
        ids = self.slots.ids
        return [(Wanted(self._owner, name, ids), fresh, table[: ids.numel()]) for name, table in self.tables.items()]

    def arrived(self, fresh: Tensor, rows: Sequence[Tensor]) -> None:
        """Put the requested `rows`, by field, in their slots. They are there already, except in subclasses."""

    def find(self, lookups: Sequence[RowLookup]) -> tuple[list[CachedPositions], Tensor]:
        """Begin the next group of steps. Return the slots of each lookup's missing ids, and the slots to fill."""
        self.slots.begin()  # rows that only the group before the last needed may be replaced
        found = [self.slots.find(one.ids, one.missing) for one in lookups]
        fresh = [self.slots.add(one.ids, new, slots) for one, (slots, new) in zip(lookups, found, strict=True)]
        num_rows, tables = len(self.slots), {}
        for name, table in self.tables.items():  # batches that are being made go on reading the old tables
            tables[name] = table
            if len(table) < num_rows:
                tables[name] = self.longer(name, num_rows + len(table) // SPARE, table)
        self.tables = tables
        held = [CachedPositions(tables, slots, one.missing) for one, (slots, _) in zip(lookups, found, strict=True)]
        return held, ops.joined(fresh)


class PrefetchedRows:
    """A FeatureStore that copies the rows found by `lookups`, and requests the rows of other ids from their shards."""

    def __init__(self, features: Sharded, fields: Fields, lookups: Sequence[RowLookup]) -> None:
        self._features, self._fields = features, fields
        self._lookups = {ids_key(one.owner, one.ids): one for one in lookups}

    @property
    def schema(self) -> Schema:
        return self._features.schema

    def gather(self, wanted: Sequence[Triple], *, empty: Empty = ops.empty) -> list[Tensor]:
        wanted = read_wanted(self.schema, wanted)
        outs = [empty_rows(self.schema, owner, name, ids.numel(), empty) for owner, name, ids in wanted]
        routed: dict[Ids, Sequence[Tensor]] = {}
        positions = []
        for (owner, name, ids), out in zip(wanted, outs, strict=True):
            key = ids_key(owner, ids)
            lookup = self._lookups.get(key) if name in self._fields.get(owner, ()) else None
            if lookup is not None:
                for rows in lookup.cached:
                    rows.copy(name, out)
            elif key not in routed:
                routed[key] = self._features.route(owner, ids)
            positions.append(routed[key] if lookup is None else lookup.in_memory)
        self._features.gather_routed(wanted, positions, outs)
        return outs


# --- rows in scratch space: those of each step together, so that they are read in a few long reads ---


class PackedRows(NamedTuple):
    """The rows of ascending `ids` in a scratch file. They have the order of `ids`; other rows may stand in between."""

    rows: FileRows
    ids: SortedIds  # ascending
    cuts: SortedIds  # indices in `ids` at which the second and later pieces begin
    shifts: SortedIds  # by piece: index of a row in the file, less its index in `ids`

    def read(self, reads: Reads, ids: Tensor, positions: Tensor, out: Tensor) -> None:
        """Read the rows of ids[positions], all of which are in the file, into out[positions]."""
        at = np.searchsorted(self.ids, ids[positions].numpy().astype(self.ids.dtype, copy=False))
        rows = torch.zeros_like(ids)
        rows[positions] = torch.from_numpy(at + self.shifts[np.searchsorted(self.cuts, at, side="right")])
        try:
            reads.rows([RowRequest(self.rows, rows, positions, out)])
        except DiskError as error:
            raise StoreError(f"rows in scratch space cannot be read: {error.args[2]}; check its disk") from error


class RowLists:
    """The ascending ids of the rows that each step of a group needs of one table; `copy` copies the rows to a file."""

    def __init__(self, ids: Sequence[SortedIds], row_bytes: int, piece_bytes: int) -> None:
        """Take the ids of each step, the bytes of a row, and the bytes of memory for rows that are copied at a time."""
        self.ids, self.row_bytes = ids, row_bytes
        self.rows_at_once = max(1, piece_bytes // (row_bytes + OF_A_ROW))
        self.begins = cut(ids, self.rows_at_once)  # index at which each piece begins in each list: [pieces + 1, lists]
        self.num_rows = sum(map(len, ids))
        # Alignment may cost every piece a row and a block of the file.
        of_pieces = (len(self.begins) - 1) * (row_bytes + BLOCK)
        self.num_bytes = self.num_rows * row_bytes + of_pieces if self.num_rows else 0

    def copy(
        self,
        file: ScratchFile,
        reads: Reads,
        read: Callable[[list[Tensor], list[Tensor]], None],
        check: Callable[[], None],
    ) -> list[PackedRows]:
        """Copy rows to a scratch file and return them by step.

        `read(ids, outs)` writes the rows of ids[i] to outs[i]; `check()` may raise to stop.
        """
        shifts = np.zeros((len(self.begins) - 1, len(self.ids)), dtype=np.int64)
        for piece, (begins, ends) in enumerate(pairwise(self.begins)):
            check()
            room = file.room_for(int((ends - begins).sum()), self.row_bytes)
            bounds = np.concatenate([[0], np.cumsum(ends - begins)])
            own = [
                torch.from_numpy(ids[b:e].astype(np.int64)) for ids, b, e in zip(self.ids, begins, ends, strict=True)
            ]
            if bounds[-1]:
                read(own, [room.rows[b:e] for b, e in pairwise(bounds)])
                with reads.writing():
                    file.append(room)
            shifts[piece] = room.first_row + bounds[:-1] - begins
        rows = FileRows(file.opened, 0, file.num_bytes // self.row_bytes)
        return [
            PackedRows(rows, ids, self.begins[1:-1, number], shifts[:, number]) for number, ids in enumerate(self.ids)
        ]


def scratch_bytes(folder: Path) -> int:
    """Return how many bytes of scratch space may be used; raise StoreError if the folder cannot be used."""
    try:
        return int(SHARE * shutil.disk_usage(folder).free)
    except OSError as error:
        raise StoreError(f"scratch space {folder} cannot be used: {error.strerror}") from error


Packed = Mapping[tuple[TypeKey, int], Mapping[str, PackedRows]]  # rows of a step: (type, shard number), field


class StepRows(NamedTuple):
    """The rows in scratch space that one lookup needs from one shard. Its `copy` is used as CachedPositions.copy is."""

    tables: Mapping[str, PackedRows]
    reads: Reads
    ids: Tensor
    positions: Tensor  # of the rows in `ids`: [n] int64

    def copy(self, name: str, out: Tensor) -> None:
        """Read the rows of the field `name` into out[positions]."""
        self.tables[name].read(self.reads, self.ids, self.positions, out)


# --- the maker ----------------------------------------------------------------------------------


def _id_dtype(schema: Schema, owner: TypeKey) -> np.dtype[Any]:
    """Return int32 if it fits all ids of a node type or relation, else int64."""
    return np.dtype(np.int32 if schema.described(owner).count < 1 << 31 else np.int64)


class LookAhead(Maker):
    """A maker that fetches rows for `num_steps` steps at a time; None: as many as fit in `window` or `scratch`.

    To make batches on a device, a subclass overrides `least_group` and the methods `make`, `sample`, `wanted`,
    `new_window`, `fetch`, `finish` and `stages`.
    """

    least_group = 2  # a smaller group has no `fetch`: the rows of a batch are requested when it is assembled

    def __init__(
        self,
        maker: LocalMaker,
        features: Sharded,
        num_steps: int | None,
        window: int = 0,
        scratch: Path | None = None,
    ) -> None:
        self.num_steps, self._window, self._scratch = num_steps, window, scratch
        self.num_packed: int | None = None  # steps of a group in scratch space, in the last loop
        # Bytes of the distinct rows that a step must fetch, and of their ids. Measured by the first loop.
        self._step_size: tuple[int, int] | None = None
        self.fetched, self.packed = list[int](), list[int]()  # rows of each group, of all loops: in memory, in scratch
        self._maker, self._features = maker, features
        self._uncached = features.over([one.shard if isinstance(one, Cached) else one for one in features.shards])

    def make(self, share: StepShare) -> Batch:
        return self._maker.make(share)

    def sample(self, share: StepShare) -> Any:
        """Return the sampled batch of these seeds."""
        return self._maker.sample(share)

    def wanted(self, sampled: Any) -> Sequence[Wanted]:
        """Return the requests for all rows of a batch that `sample` returned, with ids on the host."""
        return self._maker.assembler.wanted(sampled)

    def new_window(self, owner: TypeKey, fields: Collection[str]) -> Window:
        return Window(self._features.schema, owner, fields, little_memory=self._window > 0)

    def finish(self, sampled: Any, found: Found | None) -> Any:
        """Assemble a batch that `sample` returned, with the rows of the ids that `fetch` has looked up."""
        assembler = self._maker.assembler
        if found is not None:
            features = PrefetchedRows(self._features, *found)
            assembler = replace(assembler, store=replace(assembler.store, features=features))
        return self._maker.finish(sampled, assembler)

    @contextmanager
    def stages(self, order: Order, pipeline: Pipeline) -> Iterator[Stages[Any]]:
        """Yield the Stages of a loop over `order`: sample a group of steps, fetch its rows, and make its batches."""
        num_groups, num_ahead = (2 if pipeline.num_threads else 1), pipeline.num_ahead
        is_packed = False
        if self._window:
            num_bytes, id_bytes = self._measured(order)
            fitting = self._window // num_bytes
            num_ahead = max(1, min(num_ahead, fitting))
            if self._scratch is not None:
                self.num_packed = self._steps_that_fit(order, num_bytes, id_bytes, pipeline.deadline)
                is_packed = self.num_packed > 1 and self.num_packed * num_bytes * GROUPS > self._window
            if self.num_steps is None:
                self.num_steps = max(1, min(MOST_STEPS, fitting // (num_groups + 1)))
        group = (self.num_packed if is_packed else self.num_steps) or 1
        fetches = group >= self.least_group
        with little_idle(self._window):
            if is_packed:
                left = threading.Event()
                yield Stages(
                    lambda step, begun, packed: self._from_scratch(order.step(step), packed.get(step)),
                    window=num_groups * group,
                    num_finishing=num_ahead,
                    begin=lambda step: step,
                    fetch=lambda steps: self._pack(order, steps, left),
                    group=group,
                    leave=left.set,
                    hint="leave scratch out",
                )
                return
            windows: dict[TypeKey, Window] = {}

            def finish(step: int, sampled: Any, fetched: Mapping[int, Any] | None) -> Any:
                return self.finish(sampled, None if fetched is None else fetched[id(sampled)])

            yield Stages(
                finish,
                window=num_groups * group if fetches else num_ahead + LEAD,
                num_finishing=num_ahead,
                begin=lambda step: self.sample(order.step(step)),
                fetch=(lambda batches: self.fetch(batches, windows)) if fetches else None,
                group=group,
            )

    def _measured(self, order: Order) -> tuple[int, int]:
        """Sample three steps; return the most bytes of rows that one of them must fetch, and the most of their ids."""
        if self._step_size is None:
            sizes, left, schema = [(1, 0)], order.steps, self._features.schema
            for step in sorted({left[0], (left[0] + left[-1]) // 2, left[-1]}) if left else ():
                with order.naming(step):
                    missing = self.missing(self._maker.sample(order.step(step)))
                num_bytes = num_id_bytes = 0
                for owner, (ids, names) in missing.items():
                    fields = schema.described(owner).fields
                    num_bytes += len(ids) * sum(fields[name].row_bytes for name in names)
                    num_id_bytes += len(ids) * _id_dtype(schema, owner).itemsize
                sizes.append((num_bytes, num_id_bytes))
            rows, of_ids = zip(*sizes, strict=True)
            self._step_size = max(rows), max(of_ids)
        return self._step_size

    def fetch(self, batches: Sequence[Any], windows: dict[TypeKey, Window]) -> Mapping[int, Found]:
        """Fetch the rows that batches need and memory lacks, one request per peer.

        Return, by id() of what `sample` returned for each batch, where its rows are.
        """
        with self._maker.seconds("fetch"):
            fields, lookups = self._look_up([self.wanted(one) for one in batches])
            for owner, names in fields.items():
                if owner not in windows or not windows[owner].tables.keys() >= set(names):
                    windows[owner] = self.new_window(owner, names)
            requests = list[tuple[Window, Tensor, list[Request]]]()
            num_fetched = num_spared = 0
            for owner, window in windows.items():
                asked = [
                    (of_batch, at) for of_batch in lookups for at, one in enumerate(of_batch) if one.owner == owner
                ]
                held, fresh = window.find([of_batch[at] for of_batch, at in asked])
                for (of_batch, at), rows in zip(asked, held, strict=True):
                    of_batch[at] = of_batch[at]._replace(cached=(*of_batch[at].cached, rows))
                if fresh.numel():
                    requests.append((window, fresh, window.requests(fresh)))
                num_fetched += fresh.numel()
                num_spared += (sum(rows.positions.numel() for rows in held) - fresh.numel()) * len(window.tables)
            flat = [one for *_, own in requests for one in own]
            self._uncached.gather_at([one[0] for one in flat], [one[1] for one in flat], [one[2] for one in flat])
            for window, fresh, own in requests:
                window.arrived(fresh, [rows for *_, rows in own])
            if (reads := self._maker.assembler.store.reads) is not None:
                reads.count_found(num_spared, of=num_spared)
            self.fetched.append(num_fetched)
            return {id(one): (fields, of_batch) for one, of_batch in zip(batches, lookups, strict=True)}

    def missing(self, sampled: Sampled) -> dict[TypeKey, tuple[IdMap, Sequence[str]]]:
        """Return, by node type and relation, the distinct ids whose rows are not in memory, and the fields to read."""
        fields, (lookups,) = self._look_up([self._maker.assembler.wanted(sampled)])
        ids: dict[TypeKey, IdMap] = {}
        for one in lookups:
            ids.setdefault(one.owner, IdMap()).add(one.ids, one.missing)
        return {owner: (found, fields[owner]) for owner, found in ids.items() if len(found)}

    def _look_up(self, wanted: Sequence[Sequence[Wanted]]) -> tuple[Fields, list[list[RowLookup]]]:
        """Return the fields with rows outside of memory, and for each batch, one lookup for every tensor of ids."""
        fields: dict[TypeKey, list[str]] = {}
        for owner, name in dict.fromkeys((want.owner, want.field) for of_batch in wanted for want in of_batch):
            if not self._features.in_memory(owner, name):
                fields.setdefault(owner, []).append(name)
        lists = [
            {ids_key(want.owner, want.ids): want for want in of_batch if want.field in fields.get(want.owner, ())}
            for of_batch in wanted
        ]
        return fields, [[self._features.look_up(want.owner, want.ids) for want in one.values()] for one in lists]

    # --- scratch space ----------------------------------------------------------------------------

    def _steps_that_fit(self, order: Order, num_bytes: int, id_bytes: int, deadline: float) -> int:
        """Return how many steps a group in scratch space has, limited by space, memory, and the first batch's wait."""
        store = self._maker.assembler.store
        assert store.reads is not None
        assert store.budget is not None
        assert self._scratch is not None
        in_scratch = scratch_bytes(self._scratch) // order.world_size // (GROUPS * num_bytes)
        in_memory = self._window // 4 // max(1, id_bytes)
        bytes_per_second = store.reads.bytes_per_second
        sweep = store.budget.disk_bytes / bytes_per_second
        seconds = min(DEADLINE_SHARE * deadline, max(SECONDS, SWEEPS * sweep))
        in_time = int((seconds - sweep) * bytes_per_second / (2 * num_bytes))
        return max(0, min(MOST_PACKED, len(order.steps), in_scratch, in_memory, in_time))

    def _from_scratch(self, share: StepShare, packed: Packed | None) -> Batch:
        """Make the batch of a step, with rows that are not in memory read from scratch space."""
        sampled = self._maker.sample(share)
        if not packed:
            return self.finish(sampled, None)
        fields, (lookups,) = self._look_up([self._maker.assembler.wanted(sampled)])
        for at, (owner, ids, _, cached, missing) in enumerate(lookups):
            for number, own in enumerate(self._features.route(owner, ids, missing)):
                shard = self._features.shards[number]
                if own.numel() and isinstance(shard, OnDisk):
                    cached = (*cached, StepRows(packed[owner, number], shard.reads, ids, own))  # type: ignore[arg-type]
            lookups[at] = lookups[at]._replace(cached=cached)
        return self.finish(sampled, (fields, lookups))

    def _pack(self, order: Order, steps: Sequence[int], left: threading.Event) -> Mapping[int, Packed]:
        """Copy rows that `steps` need to scratch space; return them by step.

        Raise CancelledError if `left` is set: the loop has ended.
        """

        def check() -> None:
            if left.is_set():
                raise CancelledError

        ids: dict[TypeKey, dict[int, SortedIds]] = {}  # by step
        fields: dict[TypeKey, Sequence[str]] = {}
        for step in steps:
            check()
            try:
                missing = self.missing(self._maker.sample(order.step(step)))
            except Exception:  # raised again when the step is made; those after it are not delivered
                break
            for owner, (found, names) in missing.items():
                narrow = found.ids.numpy().astype(_id_dtype(self._features.schema, owner), copy=False)
                ids.setdefault(owner, {})[step] = np.sort(narrow)
                fields[owner] = names
        with self._maker.seconds("fetch"):
            plans = self._planned(ids, fields)
            packed: dict[int, dict[tuple[TypeKey, int], dict[str, PackedRows]]] = {step: {} for step in steps}
            num_bytes = sum(lists.num_bytes for *_, lists in plans)
            if not num_bytes or self._scratch is None:
                return packed
            self.packed.append(sum(lists.num_rows for *_, lists in plans))
            with ScratchFile(self._scratch, num_bytes) as file:
                for owner, number, name, lists in plans:
                    shard = self._features.shards[number]
                    assert isinstance(shard, OnDisk)
                    read = partial(self._read, shard, owner, name)
                    for step, rows in zip(ids[owner], lists.copy(file, shard.reads, read, check), strict=True):
                        packed[step].setdefault((owner, number), {})[name] = rows
            return packed

    def _planned(
        self, ids: Mapping[TypeKey, Mapping[int, SortedIds]], fields: Fields
    ) -> list[tuple[TypeKey, int, str, RowLists]]:
        """Return, for each table to copy from: node type or relation, shard number, field name, and the ids by step."""
        plans = []
        for number, shard in enumerate(self._features.shards):
            on_disk = {of: table.rows for (of, _), table in shard.tables.items()} if isinstance(shard, OnDisk) else {}
            for owner, rows in on_disk.items():
                bounds = rows.first, rows.first + rows.num_rows
                own = [one[slice(*np.searchsorted(one, bounds))] for one in ids.get(owner, {}).values()]
                for name in fields.get(owner, ()):
                    row_bytes = self._features.schema.described(owner).fields[name].row_bytes
                    plans.append((owner, number, name, RowLists(own, row_bytes, min(PIECE, self._window // 4))))
        return plans

    def _read(self, shard: OnDisk, owner: TypeKey, name: str, ids: list[Tensor], outs: list[Tensor]) -> None:
        field = self._features.schema.described(owner).fields[name]
        wanted = [Wanted(owner, name, one) for one in ids if len(one)]
        rows = [out.view(DTYPES[field.dtype]).view(len(out), *field.shape) for out in outs if len(out)]
        shard.begin_gather(wanted, [torch.arange(len(want.ids)) for want in wanted], rows)()
