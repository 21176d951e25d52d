"""A part that does not fit in memory: its first rows are mapped, and the others are read from the disk when needed.

The mapped rows stay in the page cache, which the processes of a host share; reads of other rows bypass it. To sample a
hop, only the picked edges are read. For weights, times, LABOR and fanout -1, whole edge lists are read.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hoploom import ops
from hoploom.config.values import as_bytes
from hoploom.errors import StoreError
from hoploom.ops import DiskFile, EdgeLists, FileRows, Frontier, Picks, Reads, RowRequest, Rule
from hoploom.ops.disk import ListColumn, SparseArray
from hoploom.schema import TypeKey
from hoploom.store.base import Draw, Part, RowLookup, Tier, Wanted
from hoploom.system import Closing


class DiskRows(NamedTuple):
    """A table whose first `num_in_memory` rows are in memory; the remaining rows are on disk."""

    rows: FileRows
    num_in_memory: int
    row_bytes: int

    @property
    def first_on_disk(self) -> int:
        return self.rows.first + self.num_in_memory


@dataclass(frozen=True)
class ListScratch:
    """Buffers with room for all edge lists of a relation. Only the lists that a hop reads into them take memory."""

    lists: EdgeLists
    arrays: Mapping[str, SparseArray]


@dataclass(frozen=True)
class DiskLists:
    """Edge lists of a relation that are on disk; their offsets (indptr) are in memory."""

    mapped: EdgeLists
    indices: DiskRows
    columns: Mapping[str, tuple[FileRows, torch.dtype]]  # of EdgeLists: indices, weight, edge_time
    idle: list[ListScratch] = field(default_factory=list, repr=False, compare=False)  # one per concurrent hop

    @contextmanager
    def scratch(self, names: Sequence[str]) -> Iterator[ListScratch]:
        """Lend a ListScratch to a `with` block; at the end, free the memory of the columns `names`."""
        try:
            lent = self.idle.pop()
        except IndexError:
            arrays = {name: SparseArray(rows.num_rows * dtype.itemsize) for name, (rows, dtype) in self.columns.items()}
            columns = {name: torch.frombuffer(array, dtype=self.columns[name][1]) for name, array in arrays.items()}
            mapped, indices = self.mapped, columns.pop("indices")
            lent = ListScratch(
                EdgeLists(mapped.indptr, indices, mapped.first_node, mapped.first_edge, **columns), arrays
            )
        try:
            yield lent
        finally:
            for name in names:
                lent.arrays[name].forget()
            self.idle.append(lent)


@dataclass(frozen=True)
class OnDisk:
    """A shard that reads some of its rows or edge lists from the disk; the others are in memory."""

    part: Part
    tables: Mapping[tuple[TypeKey, str], DiskRows]
    lists: Mapping[int, DiskLists]  # by relation
    reads: Reads
    tier: ClassVar[Tier] = Tier.DISK

    def in_memory(self, owner: TypeKey, name: str) -> bool:
        return (owner, name) not in self.tables

    def look_up(self, owner: TypeKey, ids: Tensor, positions: Tensor) -> RowLookup:
        bounds = [table.first_on_disk for (of, _), table in self.tables.items() if of == owner]
        near, missing = ops.route(ids, torch.tensor([min(bounds)]), positions) if bounds else (positions, positions[:0])
        return RowLookup(owner, ids, (near,), (), missing)

    def split(self, node_type: str, name: str) -> Tensor:
        return self.part.split(node_type, name)

    def mapped_tensors(self) -> Iterator[Tensor]:
        """Yield the mapped tensors that fit the budget, and the first rows of those that fit only in part."""
        for index, lists in enumerate(self.part.lists):
            on_disk = self.lists.get(index)
            yield from (
                lists.columns if on_disk is None else (lists.indptr, lists.indices[: on_disk.indices.num_in_memory])
            )
        for key, table in self.part.tables.items():
            rows = self.tables.get(key)
            yield table.rows if rows is None else table.rows[: rows.num_in_memory]

    # --- rows ---------------------------------------------------------------------------------

    def begin_gather(
        self, wanted: Sequence[Wanted], positions: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        return partial(self._gather, wanted, positions, outs)

    def _gather(self, wanted: Sequence[Wanted], positions: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        near, requests = list(positions), list[RowRequest]()
        routed: dict[tuple[int, int, int], list[Tensor]] = {}
        for index, ((owner, name, ids), own, out) in enumerate(zip(wanted, positions, outs, strict=True)):
            table = self.tables.get((owner, name))
            if table is None or own.numel() == 0:
                continue
            key = id(ids), id(own), table.first_on_disk
            if key not in routed:
                routed[key] = ops.route(ids, torch.tensor([table.first_on_disk]), own)
            near[index] = routed[key][0]
            self.reads.count_found(near[index].numel(), of=own.numel())
            if routed[key][1].numel():
                requests.append(RowRequest(table.rows, ids, routed[key][1], out))
        self.part.begin_gather(wanted, near, outs)()
        if requests:
            self.read_rows(requests)

    def read_rows(self, requests: Sequence[RowRequest]) -> None:
        """Read rows from the disk; raise StoreError if one cannot be read."""
        with self._naming():
            self.reads.rows(requests)

    # --- hops ---------------------------------------------------------------------------------

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        return partial(self._sample, frontiers, draw)

    def _sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        if draw.counts_only:
            return self.part.sample(frontiers, draw)
        out: list[Picks | None] = []
        for index in range(len(self.part.lists)):
            frontier, lists, rule = (
                frontiers[self.part.schema.destinations[index]],
                self.lists.get(index),
                draw.rule(index),
            )
            if frontier is None or draw.fanouts[index] == 0:
                out.append(None)
            elif lists is None:
                out.append(ops.sample(self.part.lists[index], frontier, rule))
            else:
                whole = rule.labor or rule.weighted or rule.fanout < 0 or frontier.times is not None
                with self._naming():
                    out.append((self._from_lists if whole else self._from_entries)(lists, frontier, rule))
        return out

    def _from_entries(self, lists: DiskLists, frontier: Frontier, rule: Rule) -> Picks:
        """Sample edge positions from the degrees alone, then read only the source ids at these positions."""
        picks = ops.sample(lists.mapped, frontier, rule, positions_only=True)
        entries = ops.empty((picks.edges.numel(),), lists.mapped.indices.dtype)
        near, rest = ops.route(picks.edges, torch.tensor([lists.indices.first_on_disk]))
        ops.gather(lists.mapped.indices, picks.edges, entries, lists.mapped.first_edge, near)
        self.reads.count_found(near.numel(), of=picks.edges.numel())
        if rest.numel():
            self.reads.rows([RowRequest(lists.indices.rows, picks.edges, rest, entries)])
        return picks._replace(sources=entries.to(torch.int64))

    def _from_lists(self, lists: DiskLists, frontier: Frontier, rule: Rule) -> Picks:
        """Read the whole edge lists of the frontier into scratch buffers, and sample from these."""
        names = ["indices"]
        names += ["weight"] if rule.weighted and "weight" in lists.columns else []
        names += ["edge_time"] if frontier.times is not None and "edge_time" in lists.columns else []
        with lists.scratch(names) as scratch:
            columns = [
                ListColumn(rows.file, rows.offset, dtype.itemsize, scratch.arrays[name])
                for name in names
                for rows, dtype in [lists.columns[name]]
            ]
            self.reads.lists(columns, lists.mapped, frontier.nodes)
            return ops.sample(scratch.lists, frontier, rule)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Turn a DiskError of this `with` block into a StoreError with the name of the file, the row and a hint."""
        try:
            yield
        except ops.DiskError as error:
            path, byte, reason = error.args
            raise StoreError(
                f"{self._row(path, byte)} cannot be read: {reason}; check the disk, or copy the store again"
            ) from error

    def _row(self, path: str, byte: int) -> str:
        """Return a text for error messages that names the row or edge at offset `byte` of the file `path`."""
        columns = [("row", of, name, table.rows, table.row_bytes) for (of, name), table in self.tables.items()]
        columns += [
            ("edge", self.part.schema.relations[index].key, name, rows, dtype.itemsize)
            for index, lists in self.lists.items()
            for name, (rows, dtype) in lists.columns.items()
        ]
        for what, owner, name, rows, row_bytes in columns:
            if rows.file.path == path:
                row = rows.first + max(0, byte - rows.offset) // row_bytes
                return f"{what} {row} of {name!r} of {owner!r} ({path})"
        return f"byte {byte} of {path}"


# --- files in scratch space -----------------------------------------------------------------

BLOCK = 4096  # bytes: writes that bypass the page cache begin and end at multiples of this
SHARE = 0.5  # of the free scratch space, which may be used
EVERY = 64  # `cut` looks at one of this many ids to choose where to cut

Ids = NDArray[np.int64] | NDArray[np.int32]


class ScratchRows(NamedTuple):
    """A buffer for consecutive rows of a scratch file."""

    first_row: int  # index of the first row in the file
    rows: Tensor  # [num_rows, row_bytes] uint8
    blocks: mmap.mmap  # begins at a block, as writes past the page cache must


class ScratchFile(Closing):
    """An unnamed file in scratch space, which disappears with the process. Writes bypass the page cache if possible."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // BLOCK) * BLOCK
        self.end = 0  # number of bytes written
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, self.num_bytes)
                path = f"/proc/self/fd/{file.fileno()}"
                self.opened = DiskFile(path)
                self._descriptor = os.open(path, os.O_WRONLY | (os.O_DIRECT if self.opened.is_direct else 0))
        except OSError as error:
            way_out = f"it needs {as_bytes(self.num_bytes)} at a time; give scratch another folder, or leave it out"
            raise StoreError(f"scratch space {folder} cannot be used: {error.strerror}; {way_out}") from error

    def close(self) -> None:
        os.close(self._descriptor)

    def room_for(self, num_rows: int, row_bytes: int) -> ScratchRows:
        """Return a buffer for the next `num_rows` rows. Row i of the file will begin at byte i * row_bytes."""
        first_row = -(-self.end // row_bytes)
        lead = first_row * row_bytes - self.end
        blocks = mmap.mmap(-1, max(1, -(-(lead + num_rows * row_bytes) // BLOCK)) * BLOCK)
        flat = torch.frombuffer(blocks, dtype=torch.uint8)[lead : lead + num_rows * row_bytes]
        return ScratchRows(first_row, flat.view(num_rows, row_bytes), blocks)

    def append(self, room: ScratchRows) -> None:
        """Write `room`, a buffer from `room_for`, to the end of the file."""
        blocks = memoryview(room.blocks)
        try:
            while blocks:
                written = os.pwrite(self._descriptor, blocks, self.end)
                self.end += written
                blocks = blocks[written:]
        except OSError as error:
            raise StoreError(f"scratch space cannot be written: {error.strerror}; check its disk") from error


def cut(ids: Sequence[Ids], num_rows: int) -> NDArray[np.int64]:
    """Cut several arrays of ascending ids at the same ids, about `num_rows` ids a piece in all.

    Return where each piece begins, and where the last one ends: [pieces + 1, arrays] int64.
    """
    every = min(EVERY, max(1, num_rows // max(1, len(ids))))
    some = np.sort(np.concatenate([one[::every] for one in ids] or [np.empty(0, dtype=np.int64)]))
    cuts = np.unique(some[:: max(1, num_rows // every)][1:])
    offsets = np.zeros((len(cuts) + 2, len(ids)), dtype=np.int64)
    for index, one in enumerate(ids):
        offsets[1:-1, index] = np.searchsorted(one, cuts)
        offsets[-1, index] = len(one)
    return offsets
