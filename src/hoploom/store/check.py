"""Reading every byte of a store to say which file is wrong, and what is wrong with it."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import HoploomError
from hoploom.schema import EDGE_ID
from hoploom.store import format as layout
from hoploom.store.base import Part
from hoploom.store.disk import check_manifest, open_part

CHUNK_BYTES = 16 << 20
CHUNK_EDGES = 1 << 20


def problems(path: str | Path) -> Iterator[str]:
    """What is wrong with a store, one line each; nothing if it is sound.

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
        for problem in _file_problems(folder, name, entry):
            damaged = True
            yield problem
    if damaged:
        return
    for number in range(len(manifest.parts)):
        try:
            part = open_part(folder, manifest, number)
        except HoploomError as error:
            yield str(error)
            continue
        yield from _part_problems(number, part)


def _file_problems(folder: Path, name: str, entry: layout.FileEntry) -> Iterator[str]:
    try:
        path = layout.inside(folder, name)
        size, crc = 0, 0
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                size += len(chunk)
                crc = zlib.crc32(chunk, crc)
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


def _part_problems(number: int, part: Part) -> Iterator[str]:
    schema = part.schema
    for index, relation in enumerate(schema.relations):
        lists = part.lists[index]
        falls = lists.indptr[1:] < lists.indptr[:-1]
        if falls.any():
            node = int(torch.nonzero(falls)[0]) + lists.first_node
            yield f"{layout.topology_file(number, relation, 'indptr')}: decreases at node {node}"
        limit = schema.node_types[schema.sources[index]].num_nodes
        for begin, ids in _chunks(lists.indices):
            if int(ids.min()) < 0 or int(ids.max()) >= limit:
                bad = int(torch.nonzero((ids < 0) | (ids >= limit))[0])
                where = f"{layout.topology_file(number, relation, 'indices')}: position {begin + bad}"
                yield f"{where} is {int(ids[bad])}, out of range [0, {limit})"
                break
        yield from _column_problems(number, part, index)
    for (type_name, split), ids in part.splits.items():
        limit = schema.node_type(type_name).num_nodes
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= limit):
            yield f"{layout.split_file(number, type_name, split)}: an id is out of range [0, {limit})"


def _column_problems(number: int, part: Part, index: int) -> Iterator[str]:
    relation, lists = part.schema.relations[index], part.lists[index]
    if EDGE_ID in relation.fields and lists.num_edges:
        chunks = _chunks(part.tables[relation.key, EDGE_ID].rows)
        if any(int(ids.min()) < 0 or int(ids.max()) >= relation.num_edges for _, ids in chunks):
            yield f"{layout.edge_file(number, relation, EDGE_ID)}: an id is out of range [0, {relation.num_edges})"
    weights = () if lists.weight is None else _chunks(lists.weight)
    if any(not bool((torch.isfinite(some) & (some >= 0)).all()) for _, some in weights):
        yield f"{layout.topology_file(number, relation, 'weight')}: a weight is negative or not finite"
    if lists.edge_time is not None and lists.num_edges:
        for begin, times in _chunks(lists.edge_time, overlap=1):
            falls = times[1:] < times[:-1]
            low, high = (int(torch.searchsorted(lists.indptr, at)) for at in (begin + 1, begin + times.numel()))
            starts = lists.indptr[low:high]  # of lists; of damaged ones anything
            falls[starts[(starts > begin) & (starts < begin + times.numel())] - begin - 1] = False
            if falls.any():
                file = layout.topology_file(number, relation, "time")
                yield f"{file}: position {begin + int(torch.nonzero(falls)[0]) + 1} is earlier than the one before it"
                break


def _chunks(column: Tensor, overlap: int = 0) -> Iterator[tuple[int, Tensor]]:
    """A mapped column some entries at a time, and where they begin."""
    for begin in range(0, column.numel() - overlap, CHUNK_EDGES):
        some = column[begin : begin + CHUNK_EDGES + overlap]
        ops.read_soon(some)
        yield begin, some
