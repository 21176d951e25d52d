"""Import NumPy archives (.npz) in the layouts in which graphs are commonly shared, streamed from the zip file.

Arrays are recognized by their names. Headers are parsed by NumPy, and nothing is unpickled. A numeric array of unknown
name that has no row per node or per edge is an error, so that nothing is left out silently.
"""

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from hoploom.errors import DataError
from hoploom.ingest.formats.row_source import (
    CHUNK_BYTES,
    Count,
    EdgeSource,
    Members,
    RowSource,
    edge_stream,
    flat,
    labels,
    members,
    node_stream,
    write_graph,
)
from hoploom.ingest.stream import EdgeRule, Progress, StoreOptions
from hoploom.schema import DTYPES, HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, Field
from hoploom.store import Store

FEATURES = ("x", "features", "node_features", "feat", "attr_matrix")
LABELS = ("y", "labels", "node_labels", "label")
ENDS = (("row", "col"), ("src", "dst"), ("edge_src", "edge_dst"))
EDGE_FIELDS = {"edge_attr": "edge_attr", "edge_weight": "weight", "weight": "weight"}
SPLITS = {"train": "train", "val": "val", "valid": "val", "test": "test"}
SIZES = ("num_nodes", "num_edges", "num_classes")  # optional arrays of a single number
MOST_AT_ONCE = 256 << 20  # most bytes of an array in Fortran order, which is read whole
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, OSError, ValueError, RuntimeError)  # the last: encrypted
WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}  # dtypes that a store lacks -> wider ones


@dataclass(frozen=True)
class NpzArray:
    """The header of an array in an .npz archive. Functions such as `npz_table` read the array's values later."""

    path: Path
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    by_column: bool  # stored in Fortran order
    chunk_bytes: int = CHUNK_BYTES  # bytes that are read at once

    @property
    def label(self) -> str:
        return f"{self.path}:{self.name}"

    @property
    def is_numeric(self) -> bool:
        return self.dtype.kind in "biuf" and _plain_dtype(self.dtype) in DTYPES


def import_archive(
    path: str | Path,
    out: str | Path,
    *,
    rule: EdgeRule | None = None,
    ignore: Sequence[str] = (),
    memory: int = StoreOptions.memory,
    progress: Progress | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Store:
    """Write a store from an .npz that `numpy.savez` wrote, and open it.

    `rule` changes the edges, e.g. makes them undirected or drops loops; `ignore` names arrays to leave out.

    >>> import_archive("graph.npz", "graph.store", rule=EdgeRule(undirected=True, deduplicate=True))
    """
    left = dict(read_arrays(Path(path), chunk_bytes))
    for name in ignore:
        if left.pop(name, None) is None:
            raise DataError(f"{path} has no array {name!r} to ignore; it has {sorted(left)}")
    if "format" in left or "adj_indptr" in left:
        hint = "load it with SciPy and save row and col of matrix.tocoo() (docs/importing.md shows how)"
        raise DataError(f"{path} holds a sparse matrix; {hint}")
    sizes: dict[str, int] = {}
    for name in (name for name in SIZES if name in left and left[name].shape in ((), (1,))):
        array = left.pop(name)
        if array.dtype.kind not in "iu":
            hint = "save it as an integer, or leave it out with ignore"
            raise DataError(f"{array.label} has dtype {array.dtype}; {hint}")
        sizes[name] = int(npz_values(array).item())
    fields: dict[str, RowSource] = {}
    for ours, known in (("x", FEATURES), ("y", LABELS)):
        if found := [name for name in known if name in left]:
            array = left.pop(found[0])
            is_class = ours == "y" and array.dtype.kind in "iu" and array.shape[1:] in ((), (1,))
            fields[ours] = labels(npz_table(array), None) if is_class else npz_table(array)
    counts = {"num_nodes": sizes["num_nodes"]} if "num_nodes" in sizes else {}
    counts |= {name: table.num_rows or 0 for name, table in fields.items()}
    counts |= {name: array.shape[0] for name, array in left.items() if name.endswith("_mask") and array.shape}
    if not counts:
        raise DataError(f"{path} does not say how many nodes there are; save an array num_nodes with it")
    given_by, rows = next(iter(counts.items()))
    nodes = Count("nodes", rows, given_by if given_by == "num_nodes" else f"as many as {given_by} has")
    splits = _take_splits(left, nodes)
    ends = _take_ends(path, left)
    edges = Count("edges", sizes["num_edges"], "num_edges") if "num_edges" in sizes else ends.count
    edge_fields: dict[str, RowSource] = {}
    for name, ours in EDGE_FIELDS.items():
        if name in left:
            table = npz_table(left.pop(name))
            edge_fields[ours] = flat(table) if ours == "weight" else table
    fields |= _take_rest(left, nodes, edges, edge_fields)
    rule = EdgeRule(in_order=True) if rule is None else rule
    edge_source = EdgeSource(ends.tables, edges, edge_fields)
    streams = edge_stream(HOMOGENEOUS_RELATION, edge_source, (nodes.rows, nodes.rows), rule)
    options = StoreOptions(weight="weight" if "weight" in edge_fields else None, homogeneous=True, memory=memory)
    return write_graph(out, [node_stream(HOMOGENEOUS_TYPE, fields, nodes, splits)], [streams], options, progress)


def _take_splits(left: dict[str, NpzArray], nodes: Count) -> dict[str, Members]:
    """Remove the arrays of splits (masks or ids) from `left`; return functions that yield each split's node ids."""
    found: dict[str, Members] = {}
    for theirs, ours in SPLITS.items():
        if (mask := left.pop(f"{theirs}_mask", None)) is not None:
            if mask.shape not in ((nodes.rows,), (nodes.rows, 1)) or not mask.is_numeric:
                hint = f"give masks of one entry per node ({nodes.rows})"
                raise DataError(f"{mask.label} has shape {mask.shape} and dtype {mask.dtype}; {hint}")
            found[ours] = partial(_marked, mask)
        if f"{theirs}_idx" in left:
            found[ours] = members(npz_table(left.pop(f"{theirs}_idx")), nodes.rows)
    return found


def _marked(mask: NpzArray) -> Iterator[Tensor]:
    """Yield the ids of the nodes for which the mask is true, chunk by chunk."""
    first = 0
    for rows in npz_table(mask).chunks():
        yield torch.nonzero(rows.view(-1)).view(-1) + first
        first += len(rows)


def _take_ends(path: str | Path, left: dict[str, NpzArray]) -> EdgeSource:
    """Take the arrays of edges out of `left` and return them: edge_index [2, e], edges [e, 2], or two arrays [e]."""
    if "edge_index" in left:
        array = left.pop("edge_index")
        return EdgeSource(npz_pairs(array), Count("edges", array.shape[1], array.name))
    if "edges" in left:
        array = left.pop("edges")
        return EdgeSource([npz_table(array)], Count("edges", array.shape[0], array.name))
    for pair in ENDS:
        if all(name in left for name in pair):
            tables = [flat(npz_table(left.pop(name))) for name in pair]
            return EdgeSource(tables, Count("edges", tables[0].num_rows or 0, pair[0]))
    raise DataError(f"{path} has no edges; save them as edge_index [2, e], or as row and col; it has {sorted(left)}")


def _take_rest(
    left: dict[str, NpzArray], nodes: Count, edges: Count, edge_fields: dict[str, RowSource]
) -> dict[str, RowSource]:
    """Return the arrays in `left` that have a row per node; add those with a row per edge to `edge_fields`.

    Arrays of text are ignored. If there are as many nodes as edges, an array's name must begin with node_ or edge_.
    """
    fields: dict[str, RowSource] = {}
    owners = {"node": (nodes, fields), "edge": (edges, edge_fields)}
    for name, array in left.items():
        if not array.is_numeric:
            continue
        fitting = [owner for owner, (count, _) in owners.items() if array.shape[:1] == (count.rows,)]
        if len(fitting) > 1:
            fitting = [owner for owner in fitting if name.startswith(f"{owner}_")]
        if not fitting:
            counts = f"{nodes.rows} nodes and {edges.rows} edges"
            hint = f"leave it out with ignore, or call it node_{name} or edge_{name} where both numbers are the same"
            raise DataError(f"{array.label} has shape {array.shape} for {counts}; give a row for each of one; {hint}")
        owners[fitting[0]][1][name] = npz_table(array)
    return fields


# --- arrays ---------------------------------------------------------------------------------


def read_arrays(path: Path, chunk_bytes: int = CHUNK_BYTES) -> Mapping[str, NpzArray]:
    """Return the headers of all arrays in an archive, by name."""
    found = {}
    with _opened(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            with archive.open(member) as file:
                found[name] = NpzArray(path, name, *_header(file, f"{path}:{name}"), chunk_bytes)
    return found


def npz_table(array: NpzArray) -> RowSource:
    """Return a RowSource that reads the rows of an array in chunks."""
    _check_numeric(array)
    if not array.shape:
        raise DataError(f"{array.label} is a single value; rows were expected")
    dtype = _plain_dtype(array.dtype)
    return RowSource(array.label, Field(dtype, array.shape[1:]), lambda: _chunks(array, dtype), array.shape[0])


def npz_pairs(array: NpzArray) -> tuple[RowSource, ...]:
    """Return the two rows of an array [2, n] as RowSources. An array in Fortran order gives one RowSource of [n, 2]."""
    _check_numeric(array)
    if len(array.shape) != 2 or array.shape[0] != 2:
        raise DataError(f"{array.label} has shape {array.shape}; give [2, number of edges]")
    dtype, count = _plain_dtype(array.dtype), array.shape[1]
    if array.by_column:
        return (npz_table(replace(array, shape=(count, 2), by_column=False)),)

    def row(number: int) -> RowSource:
        line = replace(array, shape=(count,))
        return RowSource(array.label, Field(dtype), lambda: _chunks(line, dtype, skip=number * count), count)

    return row(0), row(1)


def npz_values(array: NpzArray) -> NDArray[Any]:
    """Return all values of an array. They are read at once, so use this only for arrays that fit in memory."""
    with _opened(array.path), np.load(array.path, allow_pickle=False) as archive:
        values: NDArray[Any] = archive[array.name]
    return values


# --- reading --------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; give the path of an .npz") from error
    except DAMAGE as error:
        begin = b""
        if path.is_file():
            with path.open("rb") as file:
                begin = file.read(2)
        if begin != b"PK":
            raise DataError(f"{path} is no .npz; give a file that numpy.savez wrote") from error
        raise DataError(f"{path} is cut short or damaged ({error or type(error).__name__}); get it again") from error


def _header(file: IO[bytes], label: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    try:
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, by_column, dtype = read(file)
    except (ValueError, KeyError) as error:
        raise DataError(f"{label} has no .npy header that can be read ({error}); save it with numpy.savez") from error
    if min(shape, default=0) < 0:
        raise DataError(f"{label} has a header with shape {shape}; save it with numpy.savez")
    return dtype, shape, by_column and len(shape) > 1


def _plain_dtype(dtype: np.dtype[Any]) -> str:
    name = dtype.newbyteorder("=").name
    return WIDER.get(name, name)


def _check_numeric(array: NpzArray) -> None:
    if array.dtype.hasobject:
        raise DataError(f"{array.label} holds pickled objects, which are never loaded; save it as plain numbers")
    if not array.is_numeric:
        raise DataError(f"{array.label} has dtype {array.dtype}; save it as one of {sorted(DTYPES)}")


def _chunks(array: NpzArray, dtype: str, skip: int = 0) -> Iterator[Tensor]:
    """Yield the rows of an array in chunks, without the first `skip` values of the file."""
    row_bytes = math.prod(array.shape[1:]) * array.dtype.itemsize
    if array.by_column:
        if row_bytes * array.shape[0] > MOST_AT_ONCE:
            raise DataError(f"{array.label} is stored column by column; save it with numpy.ascontiguousarray(...)")
        yield torch.from_numpy(np.ascontiguousarray(npz_values(array), dtype))
        return
    step = max(1, array.chunk_bytes // max(1, row_bytes))
    with _opened(array.path) as archive, archive.open(f"{array.name}.npy") as file:
        _header(file, array.label)
        for begin in range(0, skip * array.dtype.itemsize, array.chunk_bytes):  # seek would read more at once
            file.read(min(array.chunk_bytes, skip * array.dtype.itemsize - begin))
        for begin in range(0, array.shape[0], step):
            rows = min(step, array.shape[0] - begin)
            raw = file.read(rows * row_bytes)
            if len(raw) != rows * row_bytes:
                raise DataError(f"{array.label} is cut short: its header promises {array.shape}; get it again")
            values = np.frombuffer(raw, array.dtype).reshape(rows, *array.shape[1:])
            yield torch.from_numpy(values.astype(dtype))  # a copy: writable, in the machine's byte order
