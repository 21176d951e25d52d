"""Reading every byte of a store to say which file is wrong, and what is wrong with it."""

import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from hoploom import ops
from hoploom.closing import Closing
from hoploom.errors import HoploomError, StoreError
from hoploom.schema import EDGE_ID
from hoploom.store import format as layout
from hoploom.store.base import Part, Wanted
from hoploom.store.mapping import check_manifest, open_part
from hoploom.store.sharded import Sharded

CHUNK_BYTES = 4 << 20
CHUNK_EDGES = 1 << 20
SEEN_IDS = 1 << 28  # edge ids that are marked in one pass, a byte each


def problems(path: str | Path) -> Iterator[str]:
    """Yield one line for each problem of a store; nothing if it is sound.

    >>> list(hoploom.store.check.problems("papers.store"))
    []
    """
    folder = Path(path)
    try:
        manifest = layout.read_manifest(folder)
        check_manifest(folder, manifest)
    except HoploomError as error:
        yield str(error)
        return
    damaged = False
    for name, entry in manifest.files.items():
        for problem in file_problems(folder, name, entry):
            damaged = True
            yield problem
    if damaged:
        return
    parts = []
    for number in range(len(manifest.parts)):
        try:
            parts.append(open_part(folder, manifest, number))
        except HoploomError as error:
            damaged = True
            yield str(error)
    if damaged:
        return
    store = Sharded(manifest.schema, parts, manifest.parts)
    for number, part in enumerate(parts):
        for index in range(len(manifest.schema.relations)):
            yield from _list_problems(number, part, index, store)
        yield from _split_problems(number, part)
    for index in range(len(manifest.schema.relations)):
        yield from _edge_id_problems(parts, index)


def file_problems(
    folder: Path, name: str, entry: layout.FileEntry, pause: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[str]:
    """Yield the problem of a file, if it has one. `pause` is called after every read."""
    try:
        path = layout.inside(folder, name)
        size, crc = 0, 0
        with layout.regular(path).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                size += len(chunk)
                crc = zlib.crc32(chunk, crc)
                pause(len(chunk))
    except FileNotFoundError:
        yield f"{name}: missing"
        return
    except (OSError, HoploomError) as error:
        yield f"{name}: {error}"
        return
    if size != entry.bytes:
        yield f"{name}: {size} bytes, {entry.bytes} expected (truncated or changed)"
    elif crc != entry.crc32:
        yield f"{name}: checksum {crc:08x}, {entry.crc32:08x} expected (a bit has flipped, or it was changed)"


def _list_problems(number: int, part: Part, index: int, store: Sharded) -> Iterator[str]:
    """Yield the problems of a relation's lists: of each file at most the first."""
    schema, lists = part.schema, part.lists[index]
    relation, source = schema.relations[index], schema.node_types[schema.sources[index]]
    files = {name: layout.topology_file(number, relation, name) for name in ("indptr", "indices", "weight", "time")}
    falls = lists.indptr[1:] < lists.indptr[:-1]
    if falls.any():
        yield f"{files['indptr']}: decreases at node {_first(falls) + lists.first_node}"
    sound = True
    for begin, ids in _chunks(lists.indices):
        bad = (ids < 0) | (ids >= source.num_nodes)
        if sound := not bad.any():
            continue
        at = _first(bad)
        yield f"{files['indices']}: position {begin + at} is {int(ids[at])}, out of range [0, {source.num_nodes})"
        break
    for begin, some in () if lists.weight is None else _chunks(lists.weight):
        bad = ~(torch.isfinite(some) & (some >= 0))
        if bad.any():
            yield f"{files['weight']}: position {begin + _first(bad)}: a weight is negative or not finite"
            break
        fields = part.tables[relation.key, str(schema.weight)].rows[begin : begin + len(some)]
        bad = fields.reshape(-1).to(some.dtype) != some
        if bad.any():
            yield _differs(files["weight"], begin, bad, some, fields, schema.weight)
            break
    for begin, some in () if lists.edge_time is None else _chunks(lists.edge_time, overlap=1):
        if schema.time in relation.fields:
            fields = part.tables[relation.key, str(schema.time)].rows[begin : begin + len(some)]
        elif sound:
            sources = lists.indices[begin : begin + len(some)].long()
            (fields,) = store.gather([Wanted(source.name, str(schema.time), sources)])
        else:
            fields = some
        bad = fields.reshape(-1).to(some.dtype) != some
        if bad.any():
            yield _differs(files["time"], begin, bad, some, fields, schema.time)
            break
        bad = some[1:] < some[:-1]
        low, high = (int(torch.searchsorted(lists.indptr, at)) for at in (begin + 1, begin + some.numel()))
        starts = lists.indptr[low:high]  # of lists; of damaged ones anything
        bad[starts[(starts > begin) & (starts < begin + some.numel())] - begin - 1] = False
        if bad.any():
            yield f"{files['time']}: position {begin + _first(bad) + 1} is earlier than the one before it"
            break


def _differs(file: str, begin: int, bad: Tensor, values: Tensor, fields: Tensor, name: str | None) -> str:
    at = _first(bad)
    return (
        f"{file}: position {begin + at} is {values[at].item()}, but field {name!r} says {fields.reshape(-1)[at].item()}"
    )


def _split_problems(number: int, part: Part) -> Iterator[str]:
    schema = part.schema
    for (name, split), ids in part.splits.items():
        index = schema.type_index[name]
        first, limit = part.first_nodes[index], schema.node_types[index].num_nodes
        end = first + part.num_nodes[index]
        bad = (ids < first) | (ids >= end)
        bad[1:] |= ids[1:] <= ids[:-1]
        if bad.any():
            at = _first(bad)
            node, file = int(ids[at]), layout.split_file(number, name, split)
            if not 0 <= node < limit:
                why = f"out of range [0, {limit})"
            elif first <= node < end:
                why = "not above the one before it"
            else:
                why = f"of another part: this one holds nodes {first} to {end - 1}"
            yield f"{file}: position {at} is {node}, {why}"


def _edge_id_problems(parts: Sequence[Part], index: int) -> Iterator[str]:
    """Yield the first edge id that is out of range or that two edges have. Large relations are read several times."""
    relation = parts[0].schema.relations[index]
    columns = [part.tables[relation.key, EDGE_ID].rows for part in parts if EDGE_ID in relation.fields]
    for low in range(0, relation.num_edges, SEEN_IDS):
        seen = torch.zeros(min(SEEN_IDS, relation.num_edges - low), dtype=torch.bool)
        for number, column in enumerate(columns):
            file = layout.edge_file(number, relation, EDGE_ID)
            for begin, ids in _chunks(column):
                bad = (ids < 0) | (ids >= relation.num_edges)
                if bad.any():
                    at = _first(bad)
                    yield f"{file}: position {begin + at} is {int(ids[at])}, out of range [0, {relation.num_edges})"
                    return
                places = torch.nonzero((ids >= low) & (ids < low + len(seen))).view(-1)
                own, order = (ids[places] - low).long().sort()  # counting them in bytes would overflow
                twice = seen[own]
                twice[:-1] |= own[1:] == own[:-1]
                if twice.any():
                    at = int(places[order[twice]].min())
                    yield f"{file}: position {begin + at} is {int(ids[at])}, which another edge has too"
                    return
                seen[own] = True


def _first(bad: Tensor) -> int:
    return int(torch.nonzero(bad)[0])


def _chunks(column: Tensor, overlap: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Yield the first position and the values of each chunk of a mapped column; chunks share `overlap` values."""
    for begin in range(0, column.numel(), CHUNK_EDGES):
        some = column[begin : begin + CHUNK_EDGES + overlap]
        ops.read_soon(some)
        yield begin, some


# --- in the background -------------------------------------------------------------------------

RATE = 100 << 20  # bytes a second: about a tenth of a core, and of a disk
LOWEST = 19  # niceness


class _ClosedError(Exception):
    """The rest need not be checked."""


class Verification(Closing):
    """A thread that compares the files of some parts with their checksums, and keeps the first problem.

    >>> with Verification(Path("papers.store"), [0]) as verification:
    ...     verification.finish()
    """

    def __init__(self, folder: Path, parts: Sequence[int], rate: float = RATE) -> None:
        """The topology of other parts is compared, too, where it is on this host."""
        self._folder, self._rate, self._problem = folder, rate, ""
        own = {layout.part_folder(part) for part in parts}
        listed = layout.read_manifest(folder).files
        self._files = {
            name: entry
            for name, entry in listed.items()
            if name.partition("/")[0] in own or ("/csc." in name and layout.inside(folder, name).exists())
        }
        self._closed, self._hurry = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="hoploom-verify", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if sys.platform == "linux":  # where threads have a niceness, which the disk's scheduler heeds, too
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        with suppress(_ClosedError):
            for name, entry in self._files.items():
                for problem in file_problems(self._folder, name, entry, self._pause):
                    self._problem = problem
                    return

    def _pause(self, num_bytes: int) -> None:
        """Keep to the rate."""
        self._hurry.wait(num_bytes / self._rate)
        if self._closed.is_set():
            raise _ClosedError

    def check(self) -> None:
        """Raise StoreError if a damaged file has been found."""
        if self._problem:
            raise StoreError(
                f"{self._folder}: {self._problem}; restore the file, for example with `hoploom fetch`, and see "
                "`hoploom check`"
            )

    def finish(self, seconds: float | None = None) -> bool:
        """Wait for the end, at full speed from now on, but no longer than this; return whether all files are read.

        StoreError if a file is damaged.
        """
        self._hurry.set()
        self._thread.join(seconds)
        self.check()
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the thread, wherever it is."""
        self._closed.set()
        self._hurry.set()
        self._thread.join()
