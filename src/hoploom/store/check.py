"""Check a store on disk: read every byte, and report each damaged file with its problem."""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import HoploomError
from hoploom.schema import EDGE_ID
from hoploom.store import format as layout
from hoploom.store.base import Part, Wanted
from hoploom.store.sharded import Sharded
from hoploom.store.store import check_manifest, open_part

CHUNK_BYTES = 4 << 20
CHUNK_EDGES = 1 << 20
SEEN_IDS = 1 << 28  # edge ids per pass of the search for duplicates, a byte each


def problems(path: str | Path) -> Iterator[str]:
    """Yield one line of text for each problem of a store; nothing if the store is intact."""
    folder = Path(path)
    try:
        manifest = layout.read_manifest(folder)
        check_manifest(folder, manifest)
    except HoploomError as error:
        yield str(error)
        return
    found = [problem for name, entry in manifest.files.items() for problem in file_problems(folder, name, entry)]
    parts = []
    for number in range(len(manifest.parts)) if not found else ():
        try:
            parts.append(open_part(folder, manifest, number))
        except HoploomError as error:
            found.append(str(error))
    yield from found
    if found:
        return
    store = Sharded(manifest.schema, parts, manifest.parts)
    for number, part in enumerate(parts):
        for index in range(len(manifest.schema.relations)):
            yield from _list_problems(number, part, index, store)
        yield from _split_problems(number, part)
    for index in range(len(manifest.schema.relations)):
        yield from _edge_id_problems(parts, index)


def file_problems(folder: Path, name: str, entry: layout.FileEntry) -> Iterator[str]:
    """Yield a problem if the file is missing, unreadable, or has a wrong size or checksum."""
    try:
        size, crc = 0, 0
        with layout.regular(layout.inside(folder, name)).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                size += len(chunk)
                crc = zlib.crc32(chunk, crc)
    except FileNotFoundError:
        yield f"{name}: missing"
    except (OSError, HoploomError) as error:
        yield f"{name}: {error}"
    else:
        if size != entry.bytes:
            yield f"{name}: {size} bytes, {entry.bytes} expected (truncated or changed)"
        elif crc != entry.crc32:
            yield f"{name}: checksum {crc:08x}, {entry.crc32:08x} expected (a bit has flipped, or it was changed)"


def _list_problems(number: int, part: Part, index: int, store: Sharded) -> Iterator[str]:
    """Yield the problems of the edge lists of a relation in one part: at most the first problem of each file."""
    schema, lists = part.schema, part.lists[index]
    relation, source = schema.relations[index], schema.node_types[schema.sources[index]]
    files = {name: layout.topology_file(number, relation, name) for name in ("indptr", "indices", "weight", "time")}
    falls = lists.indptr[1:] < lists.indptr[:-1]
    if falls.any():
        yield f"{files['indptr']}: decreases at node {_first(falls) + lists.first_node}"
    out_of_range = next(_out_of_range(files["indices"], lists.indices, source.num_nodes), None)
    if out_of_range is not None:
        yield out_of_range
    for begin, some in () if lists.weight is None else _chunks(lists.weight):
        bad = ~(torch.isfinite(some) & (some >= 0))
        if bad.any():
            yield f"{files['weight']}: position {begin + _first(bad)}: a weight is negative or not finite"
            break
        rows = part.tables[relation.key, str(schema.weight)].rows[begin : begin + len(some)]
        if (difference := _difference(files["weight"], begin, some, rows, schema.weight)) is not None:
            yield difference
            break
    for begin, some in () if lists.edge_time is None else _chunks(lists.edge_time, overlap=1):
        rows = some
        if schema.time in relation.fields:
            rows = part.tables[relation.key, str(schema.time)].rows[begin : begin + len(some)]
        elif out_of_range is None:
            sources = lists.indices[begin : begin + len(some)].long()
            (rows,) = store.gather([Wanted(source.name, str(schema.time), sources)])
        if (difference := _difference(files["time"], begin, some, rows, schema.time)) is not None:
            yield difference
            break
        bad = some[1:] < some[:-1]
        low, high = (int(torch.searchsorted(lists.indptr, at)) for at in (begin + 1, begin + some.numel()))
        starts = lists.indptr[low:high]  # of lists; may be out of range in a damaged file
        bad[starts[(starts > begin) & (starts < begin + some.numel())] - begin - 1] = False
        if bad.any():
            yield f"{files['time']}: position {begin + _first(bad) + 1} is earlier than the one before it"
            break


def _difference(file: str, begin: int, values: Tensor, rows: Tensor, name: str | None) -> str | None:
    """Compare a column's `values` with `rows`, from which it was copied; describe the first difference, if any."""
    rows = rows.reshape(-1)
    bad = rows.to(values.dtype) != values
    if not bad.any():
        return None
    at = _first(bad)
    return f"{file}: position {begin + at} is {values[at].item()}, but field {name!r} says {rows[at].item()}"


def _out_of_range(file: str, column: Tensor, limit: int) -> Iterator[str]:
    """Yield, for each chunk of a column, a message about its first id outside [0, limit), if there is one."""
    for begin, ids in _chunks(column):
        bad = (ids < 0) | (ids >= limit)
        if bad.any():
            at = _first(bad)
            yield f"{file}: position {begin + at} is {int(ids[at])}, out of range [0, {limit})"


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
    """Yield a message about the first edge id that is out of range or a duplicate. Reads large relations repeatedly."""
    relation = parts[0].schema.relations[index]
    columns = [part.tables[relation.key, EDGE_ID].rows for part in parts if EDGE_ID in relation.fields]
    files = [layout.edge_file(number, relation, EDGE_ID) for number in range(len(columns))]
    for file, column in zip(files, columns, strict=True):
        for problem in _out_of_range(file, column, relation.num_edges):
            yield problem
            return
    for low in range(0, relation.num_edges if columns else 0, SEEN_IDS):
        seen = torch.zeros(min(SEEN_IDS, relation.num_edges - low), dtype=torch.bool)
        for file, column in zip(files, columns, strict=True):
            for begin, ids in _chunks(column):
                positions = torch.nonzero((ids >= low) & (ids < low + len(seen))).view(-1)
                own, order = (ids[positions] - low).long().sort()  # counting them in bytes would overflow
                twice = seen[own]
                twice[:-1] |= own[1:] == own[:-1]
                if twice.any():
                    at = int(positions[order[twice]].min())
                    yield f"{file}: position {begin + at} is {int(ids[at])}, which another edge has too"
                    return
                seen[own] = True


def _first(bad: Tensor) -> int:
    return int(torch.nonzero(bad)[0])


def _chunks(column: Tensor, overlap: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Yield the first position and the values of each chunk of a mapped column; chunks overlap by `overlap` values."""
    for begin in range(0, column.numel(), CHUNK_EDGES):
        some = column[begin : begin + CHUNK_EDGES + overlap]
        ops.read_soon(some)
        yield begin, some
