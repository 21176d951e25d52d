"""Packing: the far rows of coming steps are copied to scratch space, each step's together, before the steps need them.

The steps of a stretch are sampled for their ids alone, the store's rows are read once for all of them, in order, and
written step by step; then each step is sampled again and reads its rows in a few long reads. Costs a write and a read
of every row, a second sampling, and a first batch that waits for its stretch. Saves a sweep, or a read per row, for
every step. Nothing is left behind, whatever ends the process: the files have no name.
"""

import shutil
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hoploom import ops
from hoploom.errors import StoreError
from hoploom.load.assemble import Assembler, Batch
from hoploom.load.look_ahead import LookAhead, Needed, StepSize, id_bytes
from hoploom.load.maker import LocalMaker, Maker
from hoploom.load.order import Order
from hoploom.load.pipeline import Pipeline, Stages
from hoploom.ops import DiskError, FileRows, Reads, RowRequest
from hoploom.schema import Owner
from hoploom.store import Sharded, Wanted
from hoploom.store.budget import little_idle
from hoploom.store.on_disk import BLOCK, SHARE, DiskRows, OnDisk, ScratchFile, cut
from hoploom.store.sharded import Finish, ShardWrapper

Key = tuple[int, Owner, str]  # a table: the shard that has it, whose rows they are, and the field
Ids = NDArray[np.int64] | NDArray[np.int32]  # narrow where they fit: they are what limits a stretch

MOST_STEPS = 1024  # in a stretch
STRETCHES = 3  # that may lie in scratch space at once: one ends, one is read, one is written
PIECE = 64 << 20  # bytes that are read and then written at once, or a quarter of the window
OF_A_ROW = 48  # bytes that a row takes besides its own while it is read
SECONDS, SWEEPS = 60.0, 3.0  # a stretch takes at most so long, or as long as so many passes over the store,
PATIENCE = 0.25  # and never more than this share of the loader's deadline


class PackedRows(NamedTuple):
    """Where a step's rows of one table lie in scratch space: in the order of their ids, cut into pieces."""

    rows: FileRows
    ids: Ids  # ascending
    cuts: Ids  # where in `ids` the second piece begins, the third and so on
    shifts: Ids  # by piece: place in the file, in rows, less place in `ids`

    def places(self, ids: Ids) -> Ids:
        """Where these ids stand in the file; -1 for those that do not."""
        if not len(self.ids):
            return np.full(len(ids), -1)
        at = np.searchsorted(self.ids, ids.astype(self.ids.dtype, copy=False))
        at[at == len(self.ids)] = 0
        found = self.ids[at] == ids
        return np.where(found, at + self.shifts[np.searchsorted(self.cuts, at, side="right")], -1)


Stretch = Mapping[int, Mapping[Key, PackedRows]]  # by step


@dataclass(frozen=True)
class PackedShard(ShardWrapper):
    """A shard of which one step's far rows lie in scratch space."""

    tables: Mapping[tuple[Owner, str], tuple[DiskRows, PackedRows]]
    reads: Reads

    def begin_gather(self, wanted: Sequence[Wanted], places: Sequence[Tensor], outs: Sequence[Tensor]) -> Finish[None]:
        rest, requests = list(places), list[RowRequest]()
        found: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}
        for index, ((owner, name, ids), place, out) in enumerate(zip(wanted, places, outs, strict=True)):
            if (owner, name) not in self.tables or place.numel() == 0:
                continue
            far, packed = self.tables[owner, name]
            key = id(ids), id(place), id(packed.rows)
            if key not in found:
                found[key] = _located(far, packed, ids, place)
            rest[index], far_places, at = found[key]
            if far_places.numel():
                requests.append(RowRequest(packed.rows, at, far_places, out))
                self.reads.count_found(0, of=far_places.numel())

        def read() -> None:
            try:
                self.reads.rows(requests)
            except DiskError as error:
                raise StoreError(f"rows in scratch space cannot be read: {error.args[2]}; check its disk") from error

        return self._copy_and_gather([read] if requests else [], wanted, rest, outs)


def _located(far: DiskRows, packed: PackedRows, ids: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Places that scratch space has no rows for, those that it has, and where in its file, by place in `ids`."""
    near, rest = ops.route(ids, torch.tensor([far.first_on_disk]), place)
    found = packed.places(ids.numpy()[rest.numpy()])
    missing = found < 0
    at = np.zeros(len(ids), dtype=np.int64)
    at[rest.numpy()] = found
    if missing.any():
        near, rest = torch.cat([near, rest[torch.from_numpy(missing)]]), rest[torch.from_numpy(~missing)]
    return near, rest, torch.from_numpy(at)


class Packing(Maker):
    """Makes batches in stretches of steps; where a window in memory holds as many steps, by look-ahead."""

    def __init__(self, maker: LocalMaker, features: Sharded, window: int, scratch: Path) -> None:
        self._maker, self._features, self._window, self._scratch = maker, features, window, scratch
        self.ahead = LookAhead(maker, features, None, window)
        self.num_steps: int | None = None  # of a stretch, in the last loop
        self.packed: deque[int] = deque()  # rows of each stretch, over all loops

    def make(self, indices: Tensor, first: int, key: int) -> Batch:
        return self._maker.make(indices, first, key)

    @contextmanager
    def stages(self, order: Order, pipeline: Pipeline) -> Iterator[Stages[Batch]]:
        size = self.ahead.measure(order)
        self.num_steps = num_steps = self._steps_that_fit(order, size, pipeline.deadline)
        if num_steps < 2 or num_steps * size.num_bytes * STRETCHES <= self._window:
            with self.ahead.stages(order, pipeline) as stages:
                yield stages
            return
        left = threading.Event()

        def finish(step: int, begun: int, stretch: Stretch) -> Batch:
            sampled = self._maker.sample(*order.step(step))
            return self._maker.finish(sampled, self._assembler(stretch.get(step, {})))

        with little_idle(self._window):
            yield Stages(
                finish,
                window=(2 if pipeline.num_threads else 1) * num_steps,
                num_finishing=max(1, min(pipeline.num_ahead, self._window // size.num_bytes)),
                begin=lambda step: step,
                fetch=lambda steps, before: self._pack(order, steps, left),
                group=num_steps,
                leave=left.set,
                hint="leave scratch out",
            )

    def _steps_that_fit(self, order: Order, size: StepSize, deadline: float) -> int:
        """Half of the scratch space that is free holds their rows, of all ranks; half of the window holds the ids of
        two stretches; and nobody waits for long."""
        store = self._maker.assembler.store
        assert store.reads is not None
        assert store.budget is not None
        try:
            free = int(SHARE * shutil.disk_usage(self._scratch).free) // order.world_size
        except OSError as error:
            raise StoreError(f"scratch space {self._scratch} cannot be used: {error.strerror}") from error
        in_scratch = free // (STRETCHES * size.num_bytes)
        in_memory = self._window // 4 // max(1, size.id_bytes)
        at_once = store.reads.bytes_per_second
        sweep = store.budget.far_bytes / at_once
        seconds = min(PATIENCE * deadline, max(SECONDS, SWEEPS * sweep))
        in_time = int((seconds - sweep) * at_once / (2 * size.num_bytes))
        return max(0, min(MOST_STEPS, order.num_steps - order.first_step, in_scratch, in_memory, in_time))

    def _sorted(self, owner: Owner, needed: Needed) -> Ids:
        ids = needed.ids.ids.numpy()
        return np.sort(ids.astype(np.int32) if id_bytes(self._features.schema, owner) == 4 else ids)

    def _assembler(self, tables: Mapping[Key, PackedRows]) -> Assembler:
        features, assembler = self._features, self._maker.assembler
        shards = list(features.shards)
        for number, shard in enumerate(features.shards):
            if isinstance(shard, OnDisk):
                own = {key[1:]: (shard.tables[key[1:]], one) for key, one in tables.items() if key[0] == number}
                shards[number] = PackedShard(shard, own, shard.reads)
        return replace(assembler, store=replace(assembler.store, features=features.over(shards)))

    # --- packing ------------------------------------------------------------------------------

    def _pack(self, order: Order, steps: Sequence[int], left: threading.Event) -> Stretch:
        """Copy the far rows of these steps to a file without a name."""
        ids: dict[int, dict[Owner, Ids]] = {}
        fields: dict[Owner, set[str]] = {}
        for step in steps:
            if left.is_set():
                return {}
            try:
                needed = self.ahead.missing(self._maker.sample(*order.step(step)))
            except Exception:  # the step says so itself when it is made, and those after it are not delivered
                break
            ids[step] = {owner: self._sorted(owner, of_owner) for owner, of_owner in needed.items()}
            for owner, of_owner in needed.items():
                fields.setdefault(owner, set()).update(of_owner.fields)
        with self._maker.seconds("fetch"):
            return self._copy(ids, fields, left)

    def _copy(
        self, ids: Mapping[int, Mapping[Owner, Ids]], fields: Mapping[Owner, set[str]], left: threading.Event
    ) -> Stretch:
        plans = [
            TablePlan.of((number, owner, name), shard.tables[owner, name], ids, min(PIECE, self._window // 4))
            for number, shard in enumerate(self._features.shards)
            if isinstance(shard, OnDisk)
            for owner, name in sorted(shard.tables, key=str)
            if name in fields.get(owner, ())
        ]
        num_bytes = sum(plan.num_bytes for plan in plans)
        packed: dict[int, dict[Key, PackedRows]] = {step: {} for step in ids}
        if not num_bytes:
            return packed
        self.packed.append(sum(int(plan.begins[-1].sum()) for plan in plans))
        with ScratchFile(self._scratch, num_bytes) as file:
            for plan in plans:
                shard = self._features.shards[plan.key[0]]
                assert isinstance(shard, OnDisk)
                rows = FileRows(file.opened, 0, file.num_bytes // plan.far.row_bytes)
                shifts = np.zeros((plan.num_pieces, len(plan.steps)), dtype=np.int64)
                for piece in range(len(shifts)):
                    if left.is_set():
                        return {}
                    shifts[piece] = _copy_piece(plan, piece, shard, file)
                for place, step in enumerate(plan.steps):
                    own = plan.ids[place]
                    packed[step][plan.key] = PackedRows(rows, own, plan.begins[1:-1, place], shifts[:, place])
        return packed


class TablePlan(NamedTuple):
    """One table's rows of several steps, cut into pieces by id."""

    key: Key
    far: DiskRows
    steps: list[int]
    ids: list[Ids]  # by step, ascending
    begins: Ids  # [pieces + 1, steps]: where in a step's ids each piece begins

    @staticmethod
    def of(key: Key, far: DiskRows, ids: Mapping[int, Mapping[Owner, Ids]], piece: int) -> "TablePlan":
        bounds = [far.first_on_disk, far.rows.first + far.rows.num_rows]
        own = {}
        for step, by_owner in ids.items():
            if key[1] in by_owner:
                begin, end = np.searchsorted(by_owner[key[1]], bounds)
                own[step] = by_owner[key[1]][begin:end]
        begins = cut(list(own.values()), max(1, piece // (far.row_bytes + OF_A_ROW)))
        return TablePlan(key, far, list(own), list(own.values()), begins)

    @property
    def num_pieces(self) -> int:
        return len(self.begins) - 1

    @property
    def num_bytes(self) -> int:
        """In the file, where every piece may lose a row and a block."""
        num_rows = int(self.begins[-1].sum()) if self.steps else 0
        return num_rows * self.far.row_bytes + self.num_pieces * (self.far.row_bytes + BLOCK) if num_rows else 0


def _copy_piece(plan: TablePlan, piece: int, shard: OnDisk, file: ScratchFile) -> Ids:
    """Write the rows of one piece, step after step: by step, their place in the file less that in the step's ids."""
    begins, ends = plan.begins[piece], plan.begins[piece + 1]
    room = file.room_for(int((ends - begins).sum()), plan.far.row_bytes)
    places = np.concatenate([[0], np.cumsum(ends - begins)])
    requests = []
    for place, of_step in enumerate(plan.ids):
        own = of_step[begins[place] : ends[place]]
        if len(own):
            wide = torch.from_numpy(own.astype(np.int64, copy=False))
            out = room.rows[places[place] : places[place + 1]]
            requests.append(RowRequest(plan.far.rows, wide, torch.arange(len(own)), out))
    if requests:
        shard.read_rows(requests)
        with shard.reads.writing():
            file.append(room)
    return np.asarray(room.first_row + places[:-1] - begins)
