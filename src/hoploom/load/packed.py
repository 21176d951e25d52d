"""Rows of many id lists, packed in scratch space: each list's rows together, so that they are read in a few long reads.

The rows of all lists are read once, in file order, and written list by list. Costs a write and a read of every row;
saves a sweep over the table, or a read per row, for every list. Loaders pack the rows of coming steps, inference those
of coming slices. Nothing is left behind, whatever ends the process: the files have no name.
"""

import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
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
from hoploom.store.on_disk import BLOCK, SHARE, DiskRows, Ids, OnDisk, ScratchFile, cut
from hoploom.store.sharded import Finish, ShardWrapper

OF_A_ROW = 48  # bytes that a row takes besides its own while it is read

# --- the packer -----------------------------------------------------------------------------


class PackedRows(NamedTuple):
    """The rows of one id list in a scratch file: in the order of the ids, cut into pieces."""

    rows: FileRows
    ids: Ids  # ascending
    cuts: Ids  # where in `ids` the second piece begins, the third and so on
    shifts: Ids  # by piece: index of a row in the file, less its index in `ids`

    def find(self, ids: Ids) -> Ids:
        """Return the rows of the file that hold these ids; -1 for those that it does not hold."""
        if not len(self.ids):
            return np.full(len(ids), -1)
        at = np.searchsorted(self.ids, ids.astype(self.ids.dtype, copy=False))
        at[at == len(self.ids)] = 0
        return np.where(self.ids[at] == ids, self._in_file(at), -1)

    def _in_file(self, at: Ids) -> Ids:
        return np.asarray(at + self.shifts[np.searchsorted(self.cuts, at, side="right")])

    def request_all(self, out: Tensor) -> RowRequest:
        """Return a request for all rows, in the order of their ids."""
        at = torch.from_numpy(self._in_file(np.arange(len(self.ids))))
        return RowRequest(self.rows, at, torch.arange(len(self.ids)), out)


def read_packed(reads: Reads, requests: Sequence[RowRequest]) -> None:
    """Read rows from scratch files; raise StoreError for a disk that fails."""
    try:
        reads.rows(requests)
    except DiskError as error:
        raise StoreError(f"rows in scratch space cannot be read: {error.args[2]}; check its disk") from error


@dataclass(frozen=True)
class RowLists:
    """Lists of ascending ids of one table, to be packed a piece of all lists at a time."""

    ids: Sequence[Ids]
    row_bytes: int
    piece_bytes: int  # memory that reading a piece may take

    @cached_property
    def begins(self) -> Ids:
        """Index at which each piece begins in each list: [pieces + 1, lists]."""
        return cut(self.ids, self.rows_at_once)

    @property
    def rows_at_once(self) -> int:
        return max(1, self.piece_bytes // (self.row_bytes + OF_A_ROW))

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.ids))

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, including the row and the block that every piece may lose."""
        num_pieces = len(self.begins) - 1
        return self.num_rows * self.row_bytes + num_pieces * (self.row_bytes + BLOCK) if self.num_rows else 0

    def copy(
        self,
        file: ScratchFile,
        reads: Reads,
        read: Callable[[list[Tensor], list[Tensor]], None],
        check: Callable[[], None],
    ) -> list[PackedRows]:
        """Copy the rows to a file and return where those of each list are.

        `read(ids, outs)` reads rows as bytes, [n, row_bytes] uint8; `check()` is called before each piece.
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


# --- steps of a loader ------------------------------------------------------------------------

MOST_STEPS = 1024  # in a group
GROUPS = 3  # that may be in scratch space at once: one ends, one is read, one is written
PIECE = 64 << 20  # bytes that are read and then written at once, or a quarter of the window
SECONDS, SWEEPS = 60.0, 3.0  # packing a group takes at most so long, or as long as so many passes over the store,
DEADLINE_SHARE = 0.25  # and never more than this share of the loader's deadline

Key = tuple[int, Owner, str]  # a table: the number of its shard, its node type or relation, and the field
Group = Mapping[int, Mapping[Key, PackedRows]]  # by step


class _LoopLeftError(Exception):
    """Ends packing for a loop that is not read any more."""


@dataclass(frozen=True)
class PackedShard(ShardWrapper):
    """A shard of which one step's rows beyond memory are in scratch space."""

    tables: Mapping[tuple[Owner, str], tuple[DiskRows, PackedRows]]
    reads: Reads

    def begin_gather(
        self, wanted: Sequence[Wanted], positions: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Finish[None]:
        rest, requests = list(positions), list[RowRequest]()
        found: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}
        for index, ((owner, name, ids), own, out) in enumerate(zip(wanted, positions, outs, strict=True)):
            if (owner, name) not in self.tables or own.numel() == 0:
                continue
            far, packed = self.tables[owner, name]
            key = id(ids), id(own), id(packed.rows)
            if key not in found:
                found[key] = _split(far, packed, ids, own)
            rest[index], in_file, rows = found[key]
            if in_file.numel():
                requests.append(RowRequest(packed.rows, rows, in_file, out))
                self.reads.count_found(0, of=in_file.numel())
        copies = [lambda: read_packed(self.reads, requests)] if requests else []
        return self._copy_and_gather(copies, wanted, rest, outs)


def _split(far: DiskRows, packed: PackedRows, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positions whose rows the file does not hold, those whose rows it holds, and the row of each id."""
    near, beyond = ops.route(ids, torch.tensor([far.first_on_disk]), positions)
    found = packed.find(ids.numpy()[beyond.numpy()])
    rows = np.zeros(len(ids), dtype=np.int64)
    rows[beyond.numpy()] = found
    if (missing := torch.from_numpy(found < 0)).any():
        near, beyond = torch.cat([near, beyond[missing]]), beyond[~missing]
    return near, beyond, torch.from_numpy(rows)


class Packing(Maker):
    """Makes batches in groups of steps whose rows are packed first; by look-ahead if the window holds as many steps.

    Each step is sampled twice: for its ids when its group is packed, and again when its batch is made.
    """

    def __init__(self, maker: LocalMaker, features: Sharded, window: int, scratch: Path) -> None:
        self._maker, self._features, self._window, self._scratch = maker, features, window, scratch
        self.ahead = LookAhead(maker, features, None, window)
        self.num_steps: int | None = None  # of a group, in the last loop
        self.packed: deque[int] = deque()  # rows of each group, over all loops

    def make(self, indices: Tensor, first: int, key: int) -> Batch:
        return self._maker.make(indices, first, key)

    @contextmanager
    def stages(self, order: Order, pipeline: Pipeline) -> Iterator[Stages[Batch]]:
        size = self.ahead.measure(order)
        self.num_steps = num_steps = self._steps_that_fit(order, size, pipeline.deadline)
        if num_steps < 2 or num_steps * size.num_bytes * GROUPS <= self._window:
            with self.ahead.stages(order, pipeline) as stages:
                yield stages
            return
        left = threading.Event()

        def finish(step: int, begun: int, group: Group) -> Batch:
            sampled = self._maker.sample(*order.step(step))
            return self._maker.finish(sampled, self._assembler(group.get(step, {})))

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
        """Return how many steps make a group.

        Half of the free scratch space holds the rows of all ranks, half of the window the ids of two groups, and the
        first batch does not wait for long.
        """
        store = self._maker.assembler.store
        assert store.reads is not None
        assert store.budget is not None
        in_scratch = scratch_bytes(self._scratch) // order.world_size // (GROUPS * size.num_bytes)
        in_memory = self._window // 4 // max(1, size.id_bytes)
        bytes_per_second = store.reads.bytes_per_second
        sweep = store.budget.disk_bytes / bytes_per_second
        seconds = min(DEADLINE_SHARE * deadline, max(SECONDS, SWEEPS * sweep))
        in_time = int((seconds - sweep) * bytes_per_second / (2 * size.num_bytes))
        return max(0, min(MOST_STEPS, len(order.steps), in_scratch, in_memory, in_time))

    def _assembler(self, tables: Mapping[Key, PackedRows]) -> Assembler:
        features, assembler = self._features, self._maker.assembler
        shards = list(features.shards)
        for number, shard in enumerate(features.shards):
            if isinstance(shard, OnDisk):
                own = {key[1:]: (shard.tables[key[1:]], one) for key, one in tables.items() if key[0] == number}
                shards[number] = PackedShard(shard, own, shard.reads)
        return replace(assembler, store=replace(assembler.store, features=features.over(shards)))

    def _pack(self, order: Order, steps: Sequence[int], left: threading.Event) -> Group:
        """Copy the rows of these steps that are beyond memory to a file without a name."""

        def check() -> None:
            if left.is_set():
                raise _LoopLeftError

        ids: dict[int, dict[Owner, Ids]] = {}
        fields: set[tuple[Owner, str]] = set()
        try:
            for step in steps:
                check()
                try:
                    missing = self.ahead.missing(self._maker.sample(*order.step(step)))
                except Exception:  # raised again when the step is made; those after it are not delivered
                    break
                ids[step] = {owner: self._sorted(owner, needed) for owner, needed in missing.items()}
                fields |= {(owner, name) for owner, needed in missing.items() for name in needed.fields}
            with self._maker.seconds("fetch"):
                return self._copied(ids, fields, check)
        except _LoopLeftError:
            return {}

    def _copied(
        self, ids: Mapping[int, Mapping[Owner, Ids]], fields: set[tuple[Owner, str]], check: Callable[[], None]
    ) -> Group:
        plans: dict[Key, tuple[OnDisk, DiskRows, list[int], RowLists]] = {}
        for number, shard in enumerate(self._features.shards):
            for table in sorted(shard.tables.keys() & fields, key=str) if isinstance(shard, OnDisk) else ():
                assert isinstance(shard, OnDisk)
                far, steps = shard.tables[table], [step for step in ids if table[0] in ids[step]]
                bounds = far.first_on_disk, far.rows.first + far.rows.num_rows
                own = [one[slice(*np.searchsorted(one, bounds))] for one in (ids[step][table[0]] for step in steps)]
                plans[number, *table] = shard, far, steps, RowLists(own, far.row_bytes, min(PIECE, self._window // 4))
        packed: dict[int, dict[Key, PackedRows]] = {step: {} for step in ids}
        num_bytes = sum(lists.num_bytes for *_, lists in plans.values())
        if not num_bytes:
            return packed
        self.packed.append(sum(lists.num_rows for *_, lists in plans.values()))
        with ScratchFile(self._scratch, num_bytes) as file:
            for key, (shard, far, steps, lists) in plans.items():

                def read(ids: list[Tensor], outs: list[Tensor], shard: OnDisk = shard, far: DiskRows = far) -> None:
                    given = [(one, out) for one, out in zip(ids, outs, strict=True) if len(one)]
                    shard.read_rows([RowRequest(far.rows, one, torch.arange(len(one)), out) for one, out in given])

                for step, rows in zip(steps, lists.copy(file, shard.reads, read, check), strict=True):
                    packed[step][key] = rows
        return packed

    def _sorted(self, owner: Owner, needed: Needed) -> Ids:
        ids = needed.ids.ids.numpy()
        return np.sort(ids.astype(np.int32) if id_bytes(self._features.schema, owner) == 4 else ids)
