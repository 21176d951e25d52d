"""A part that does not fit in memory: its first rows are mapped, and the others read from the disk when wanted.

The mapped ones stay in the page cache, once per host, because the reads go past it. Of a hop, only the picked entries
are read where their positions follow from the degrees; weighted, temporal, LABOR and full picks read whole lists.
"""

import errno
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
from hoploom.ops import DiskFile, EdgeLists, FileRows, Frontier, ListColumn, Picks, Reads, RowRequest, Rule, SparseArray
from hoploom.schema import Owner
from hoploom.store.base import Draw, Part, RowLookup, Tier, Wanted


class FarRows(NamedTuple):
    """A table of which the rows before `near` are mapped."""

    rows: FileRows
    near: int
    row_bytes: int

    @property
    def first_far(self) -> int:
        return self.rows.first + self.near


@dataclass(frozen=True)
class FarLists:
    """Edge lists of a relation that are on disk; the positions where they begin (indptr) are in memory."""

    mapped: EdgeLists
    indices: FarRows
    columns: Mapping[str, tuple[FileRows, torch.dtype]]  # of EdgeLists: indices, weight, edge_time
    idle: list["Desk"] = field(
        default_factory=list, repr=False, compare=False
    )  # as many come to be as are used at once


@dataclass(frozen=True)
class Desk:
    """Room for lists that one hop reads, at the places that they have in the whole."""

    lists: EdgeLists
    arrays: Mapping[str, SparseArray]

    @staticmethod
    def of(far: FarLists) -> "Desk":
        arrays = {name: SparseArray(rows.num_rows * dtype.itemsize) for name, (rows, dtype) in far.columns.items()}
        columns = {name: torch.frombuffer(array, dtype=far.columns[name][1]) for name, array in arrays.items()}
        return Desk(
            EdgeLists(
                far.mapped.indptr,
                columns.pop("indices"),
                far.mapped.first_node,
                far.mapped.first_edge,
                columns.get("weight"),
                columns.get("edge_time"),
            ),
            arrays,
        )


@dataclass(frozen=True)
class OnDisk:
    """A shard over a part of which some tables or lists are far."""

    part: Part
    tables: Mapping[tuple[Owner, str], FarRows]
    lists: Mapping[int, FarLists]  # by relation
    reads: Reads
    tier: ClassVar[Tier] = Tier.DISK

    def in_memory(self, owner: Owner, name: str) -> bool:
        return (owner, name) not in self.tables

    def look_up(self, owner: Owner, ids: Tensor, positions: Tensor) -> RowLookup:
        bounds = [far.first_far for (far_owner, _), far in self.tables.items() if far_owner == owner]
        near, far = ops.route(ids, torch.tensor([min(bounds)]), positions) if bounds else (positions, positions[:0])
        return RowLookup(owner, ids, (near,), (), far)

    def split(self, node_type: str, name: str) -> Tensor:
        return self.part.split(node_type, name)

    def near(self) -> Iterator[Tensor]:
        """What is mapped and fits the budget."""
        for index, lists in enumerate(self.part.lists):
            far_lists = self.lists.get(index)
            yield from lists.columns if far_lists is None else (lists.indptr, lists.indices[: far_lists.indices.near])
        for key, table in self.part.tables.items():
            far_rows = self.tables.get(key)
            yield table.rows if far_rows is None else table.rows[: far_rows.near]

    # --- rows ---------------------------------------------------------------------------------

    def begin_gather(
        self, wanted: Sequence[Wanted], places: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        return partial(self._gather, wanted, places, outs)

    def _gather(self, wanted: Sequence[Wanted], places: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        near, far = list(places), list[RowRequest]()
        routed: dict[tuple[int, int, int], list[Tensor]] = {}
        for index, ((owner, name, ids), place, out) in enumerate(zip(wanted, places, outs, strict=True)):
            table = self.tables.get((owner, name))
            if table is None or place.numel() == 0:
                continue
            key = id(ids), id(place), table.first_far
            if key not in routed:
                routed[key] = ops.route(ids, torch.tensor([table.first_far]), place)
            near[index] = routed[key][0]
            self.reads.count_found(near[index].numel(), of=place.numel())
            if routed[key][1].numel():
                far.append(RowRequest(table.rows, ids, routed[key][1], out))
        self.part.begin_gather(wanted, near, outs)()
        if far:
            self.read_rows(far)

    def read_rows(self, wanted: Sequence[RowRequest]) -> None:
        """Read rows of far tables; StoreError for what cannot be read."""
        with self._naming():
            self.reads.rows(wanted)

    # --- hops ---------------------------------------------------------------------------------

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        return partial(self._sample, frontiers, draw)

    def _sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        if draw.counts_only:
            return self.part.sample(frontiers, draw)
        out: list[Picks | None] = []
        for index in range(len(self.part.lists)):
            frontier, far = frontiers[self.part.schema.destinations[index]], self.lists.get(index)
            if frontier is None or draw.fanouts[index] == 0:
                out.append(None)
            elif far is None:
                out.append(ops.sample(self.part.lists[index], frontier, draw.rule(index)))
            else:
                with self._naming():
                    out.append(self._sample_far(far, frontier, draw.rule(index)))
        return out

    def _sample_far(self, far: FarLists, frontier: Frontier, rule: Rule) -> Picks:
        whole = rule.labor or rule.weighted or rule.fanout < 0 or frontier.times is not None
        return self._from_lists(far, frontier, rule) if whole else self._from_entries(far, frontier, rule)

    def _from_entries(self, far: FarLists, frontier: Frontier, rule: Rule) -> Picks:
        """The positions of the picks follow from the degrees: only their entries are read."""
        picks = ops.sample(far.mapped, frontier, rule, positions_only=True)
        entries = ops.empty((picks.edges.numel(),), far.mapped.indices.dtype)
        near, rest = ops.route(picks.edges, torch.tensor([far.indices.first_far]))
        ops.gather(far.mapped.indices, picks.edges, entries, far.mapped.first_edge, near)
        self.reads.count_found(near.numel(), of=picks.edges.numel())
        if rest.numel():
            self.reads.rows([RowRequest(far.indices.rows, picks.edges, rest, entries)])
        return picks._replace(sources=entries.to(torch.int64))

    def _from_lists(self, far: FarLists, frontier: Frontier, rule: Rule) -> Picks:
        """The lists are read to where they would lie if all of them were in memory."""
        try:
            desk = far.idle.pop()
        except IndexError:
            desk = Desk.of(far)
        names = ["indices"]
        names += ["weight"] if rule.weighted and "weight" in far.columns else []
        names += ["edge_time"] if frontier.times is not None and "edge_time" in far.columns else []
        columns = [
            ListColumn(rows.file, rows.offset, dtype.itemsize, desk.arrays[name])
            for name in names
            for rows, dtype in [far.columns[name]]
        ]
        try:
            self.reads.lists(columns, far.mapped, frontier.nodes)
            return ops.sample(desk.lists, frontier, rule)
        finally:
            for name in names:
                desk.arrays[name].forget()
            far.idle.append(desk)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """What cannot be read is an error that names the file, the row and what to do."""
        try:
            yield
        except ops.DiskError as error:
            path, byte, reason = error.args
            raise StoreError(
                f"{self._row(path, byte)} cannot be read: {reason}; check the disk, or copy the store again"
            ) from error

    def _row(self, path: str, byte: int) -> str:
        for (owner, name), table in self.tables.items():
            if table.rows.file.path == path:
                row = table.rows.first + max(0, byte - table.rows.offset) // table.row_bytes
                return f"row {row} of {name!r} of {owner!r} ({path})"
        for index, lists in self.lists.items():
            for name, (rows, dtype) in lists.columns.items():
                if rows.file.path == path:
                    edge = rows.first + max(0, byte - rows.offset) // dtype.itemsize
                    return f"edge {edge} of {name!r} of {self.part.schema.relations[index].key} ({path})"
        return f"byte {byte} of {path}"


# --- files in scratch space --------------------------------------------------------------------

BLOCK = 4096  # writes past the page cache begin and end at multiples of it
SHARE = 0.5  # of what is free in scratch space
EVERY = 64  # of so many ids one tells where the pieces are cut, or of fewer where there are few

Ids = NDArray[np.int64] | NDArray[np.int32]


class RoomInFile(NamedTuple):
    """Memory for rows that will stand in a file one after the other."""

    first_row: int  # of the file
    rows: Tensor  # [num_rows, row_bytes] uint8
    blocks: mmap.mmap  # begins at a block, as writes past the page cache must


class ScratchFile:
    """A file without a name that is written past the page cache where its file system allows that."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // BLOCK) * BLOCK
        self.end = 0  # of what is written
        descriptor = -1
        try:
            descriptor = _open_without_name(folder)
            os.posix_fallocate(descriptor, 0, self.num_bytes)
            path = f"/proc/self/fd/{descriptor}"
            self.opened = DiskFile(path)
            self._descriptor = os.open(path, os.O_WRONLY | (os.O_DIRECT if self.opened.is_direct else 0))
        except OSError as error:
            way_out = f"it needs {as_bytes(self.num_bytes)} at a time; give scratch another folder, or leave it out"
            raise StoreError(f"scratch space {folder} cannot be used: {error.strerror}; {way_out}") from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def __enter__(self) -> "ScratchFile":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def room_for(self, num_rows: int, row_bytes: int) -> RoomInFile:
        """For the next rows, of a table that begins where the file does."""
        first_row = -(-self.end // row_bytes)
        lead = first_row * row_bytes - self.end
        blocks = mmap.mmap(-1, max(1, -(-(lead + num_rows * row_bytes) // BLOCK)) * BLOCK)
        flat = torch.frombuffer(blocks, dtype=torch.uint8)[lead : lead + num_rows * row_bytes]
        return RoomInFile(first_row, flat.view(num_rows, row_bytes), blocks)

    def append(self, room: RoomInFile) -> None:
        blocks = memoryview(room.blocks)
        try:
            while blocks:
                written = os.pwrite(self._descriptor, blocks, self.end)
                self.end += written
                blocks = blocks[written:]
        except OSError as error:
            raise StoreError(f"scratch space cannot be written: {error.strerror}; check its disk") from error


def cut(ids: Sequence[Ids], num_rows: int) -> NDArray[np.int64]:
    """Where lists of ascending ids are cut into pieces of about so many ids, all at the same ids: [pieces + 1, lists],
    places in each list."""
    every = min(EVERY, max(1, num_rows // max(1, len(ids))))
    some = np.sort(np.concatenate([one[::every] for one in ids] or [np.empty(0, dtype=np.int64)]))
    cuts = np.unique(some[:: max(1, num_rows // every)][1:])
    begins = np.zeros((len(cuts) + 2, len(ids)), dtype=np.int64)
    for place, one in enumerate(ids):
        begins[1:-1, place] = np.searchsorted(one, cuts)
        begins[-1, place] = len(one)
    return begins


def _open_without_name(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    descriptor, path = tempfile.mkstemp(prefix="hoploom-", dir=folder)  # a file system that knows only names
    os.unlink(path)
    return descriptor
