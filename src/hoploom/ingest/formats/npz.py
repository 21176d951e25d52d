"""Stream the arrays of an .npz from the zip file, and its sparse matrices row by row.

Headers are parsed by NumPy; pickled arrays are refused. A matrix takes an offset per row in memory.
"""

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
    RowSource,
    check_values,
    in_step,
    integers,
)
from hoploom.schema import DTYPES, Field

MOST_AT_ONCE = 256 << 20  # bytes of an array in Fortran's order, which is read at once
MOST_TEXT = 1 << 10  # bytes of the name of a format
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError)
VALUES = ("data", "values")  # of a sparse matrix
WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}  # what tensors lack


@dataclass(frozen=True)
class NpzArray:
    """An array in an archive, by its header."""

    path: Path
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    by_column: bool  # stored in Fortran's order
    chunk_bytes: int = CHUNK_BYTES  # read at once

    @property
    def label(self) -> str:
        return f"{self.path}:{self.name}"

    @property
    def is_numeric(self) -> bool:
        return self.dtype.kind in "biuf" and _plain_dtype(self.dtype) in DTYPES


def read_arrays(path: Path, chunk_bytes: int = CHUNK_BYTES) -> Mapping[str, NpzArray]:
    """Return every array of an archive, by name."""
    found = {}
    with _opened(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if member.flag_bits & 1:
                raise DataError(f"{path}:{name} is encrypted; unpack it first")
            with archive.open(member) as file:
                found[name] = NpzArray(path, name, *_header(file, f"{path}:{name}"), chunk_bytes)
    return found


def npz_table(array: NpzArray) -> RowSource:
    """Return the rows of an array."""
    _check_numeric(array)
    if not array.shape:
        raise DataError(f"{array.label} is a single value; rows were expected")
    dtype = _plain_dtype(array.dtype)
    return RowSource(array.label, Field(dtype, array.shape[1:]), lambda: _chunks(array, dtype), array.shape[0])


def npz_pairs(array: NpzArray) -> tuple[RowSource, ...]:
    """Return an array [2, n] as two tables [n], or as one [n, 2], depending on how it is stored."""
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
    """Return all values of an array that is small, or that has an entry per node."""
    if array.dtype.hasobject:
        raise _pickled(array)
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
            hint = "give a file that numpy.savez or scipy.sparse.save_npz wrote"
            raise DataError(f"{path} is no .npz; {hint}") from error
        raise DataError(f"{path} is cut short or damaged ({error or type(error).__name__}); get it again") from error


def _member(archive: zipfile.ZipFile, array: NpzArray) -> str:
    return array.name if array.name in archive.namelist() else f"{array.name}.npy"


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
        raise _pickled(array)
    if not array.is_numeric:
        raise DataError(f"{array.label} has dtype {array.dtype}; save it as one of {sorted(DTYPES)}")


def _pickled(array: NpzArray) -> DataError:
    return DataError(f"{array.label} holds pickled objects, which are never loaded; save it as plain numbers")


def _chunks(array: NpzArray, dtype: str, skip: int = 0) -> Iterator[Tensor]:
    """Yield the rows in chunks, after `skip` values."""
    row_bytes = math.prod(array.shape[1:]) * array.dtype.itemsize
    if array.by_column:
        if row_bytes * array.shape[0] > MOST_AT_ONCE:
            raise DataError(f"{array.label} is stored column by column; save it with numpy.ascontiguousarray(...)")
        yield torch.from_numpy(np.ascontiguousarray(npz_values(array), dtype))
        return
    step = max(1, array.chunk_bytes // max(1, row_bytes))
    with _opened(array.path) as archive, archive.open(_member(archive, array)) as file:
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


# --- sparse matrices ------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A matrix in compressed or coordinate form."""

    label: str
    shape: tuple[int, int]
    values: NpzArray
    indices: tuple[NpzArray, ...]  # the columns of a csr, the rows of a csc, both of a coo
    indptr: NpzArray | None
    by_column: bool = False  # csc


def take_adjacency(left: dict[str, NpzArray]) -> Matrix | None:
    """Remove and return the matrix that `scipy.sparse.save_npz` wrote, or one named adj_data, adj_indices, ..."""
    if "format" not in left:
        return take_matrix(left, "adj")
    stated = left.pop("format")
    kind = _text(stated)
    left.pop("_is_array", None)
    if kind not in ("csr", "csc", "coo"):
        raise DataError(f"{stated.path} holds a matrix of format {kind!r}; save matrix.tocsr() instead")
    names = ("row", "col") if kind == "coo" else ("indices", "indptr")
    missing = [name for name in ("data", "shape", *names) if name not in left]
    if missing:
        raise DataError(f"a {kind} matrix lacks {missing}; save it with scipy.sparse.save_npz")
    values, shape, first, second = (left.pop(name) for name in ("data", "shape", *names))
    if kind == "coo":
        return Matrix(values.label, _shape(shape), values, (first, second), None)
    return Matrix(values.label, _shape(shape), values, (first,), second, by_column=kind == "csc")


def take_matrix(left: dict[str, NpzArray], prefix: str) -> Matrix | None:
    """Remove and return a csr matrix whose arrays have a common prefix; None if there is none."""
    value = next((f"{prefix}_{name}" for name in VALUES if f"{prefix}_{name}" in left), None)
    names = [f"{prefix}_{name}" for name in ("shape", "indices", "indptr")]
    if value is None or any(name not in left for name in names):
        return None
    values, shape, indices, indptr = (left.pop(name) for name in (value, *names))
    return Matrix(values.label, _shape(shape), values, (indices,), indptr)


def _text(array: NpzArray) -> str:
    """Return a short text."""
    if array.dtype.kind not in "SU" or array.shape not in ((), (1,)) or array.dtype.itemsize > MOST_TEXT:
        raise DataError(f"{array.label} holds {array.dtype} {array.shape}; a short text was expected")
    text = npz_values(array).item()
    return text.decode("ascii", "replace") if isinstance(text, bytes) else str(text)


def _shape(array: NpzArray) -> tuple[int, int]:
    if array.shape != (2,) or array.dtype.kind not in "iu":
        raise DataError(f"{array.label} has shape {array.shape}; two integers were expected")
    rows, columns = npz_values(array).tolist()
    return rows, columns


# --- edges ----------------------------------------------------------------------------------


def matrix_ends(matrix: Matrix, nodes: Count) -> EdgeSource:
    """Return the edges of a matrix: entry [i, j] is one from i to j. Values are weights, unless all are 1."""
    if matrix.shape != (nodes.rows, nodes.rows):
        raise DataError(f"the matrix of {matrix.label} is {matrix.shape} for {nodes.rows} nodes; give a square one")
    count = _count(matrix, "edges")
    if matrix.indptr is None:
        tables = [npz_table(index) for index in matrix.indices]
    else:
        stored = npz_table(matrix.indices[0])
        major = _major(matrix)
        tables = [stored, major] if matrix.by_column else [major, stored]
    values = npz_table(matrix.values)
    plain = all(bool((rows == 1).all()) for rows in values.chunks())
    return EdgeSource(tables, count, {} if plain else {"weight": _as_float(values)})


def _major(matrix: Matrix) -> RowSource:
    """Return the row of every entry of a csr (the column of a csc)."""
    assert matrix.indptr is not None
    indptr, step = _indptr(matrix), max(1, matrix.values.chunk_bytes // 8)

    def chunks() -> Iterator[Tensor]:
        for begin in range(0, int(indptr[-1]), step):
            entries = np.arange(begin, min(begin + step, int(indptr[-1])))
            yield torch.from_numpy(np.searchsorted(indptr, entries, side="right") - 1)

    return RowSource(matrix.indptr.label, Field("int64"), chunks, int(indptr[-1]))


def _indptr(matrix: Matrix) -> NDArray[np.int64]:
    """Return the checked offsets [rows + 1]."""
    assert matrix.indptr is not None
    integers(npz_table(matrix.indptr), "offsets")
    indptr = npz_values(matrix.indptr).astype(np.int64)
    rows, entries = matrix.shape[1 if matrix.by_column else 0], matrix.values.shape
    if indptr.shape != (rows + 1,):
        raise DataError(f"{matrix.indptr.label} has shape {indptr.shape} for {rows} rows; {rows + 1} were expected")
    falls = np.flatnonzero(np.diff(indptr) < 0)
    if len(falls):
        raise DataError(f"{matrix.indptr.label} falls after entry {falls[0]}: {indptr[falls[0]]}; it must not")
    if indptr[0] != 0 or (int(indptr[-1]),) != entries:
        raise DataError(f"{matrix.indptr.label} runs from {indptr[0]} to {indptr[-1]} for values of shape {entries}")
    return indptr


def _as_float(table: RowSource) -> RowSource:
    return table.mapped(Field("float32"), lambda rows: rows.to(torch.float32))


# --- features -------------------------------------------------------------------------------


def dense_rows(matrix: Matrix) -> RowSource:
    """Return the dense rows of a csr matrix as float32; repeated entries add up."""
    num_rows, columns = matrix.shape
    step = max(1, matrix.values.chunk_bytes // max(1, 4 * columns))
    indices = integers(npz_table(matrix.indices[0]), "columns")
    values = _as_float(npz_table(matrix.values))

    def chunks() -> Iterator[Tensor]:
        block, dense = 0, torch.zeros(min(step, num_rows), columns)
        entries = _major(matrix)
        for first, (rows, places, found) in in_step([entries, indices, values], _count(matrix, "entries")):
            check_values(places, columns, indices.name, first, "column")
            begin = 0
            while begin < len(rows):  # rows ascend, so those of a block are a slice
                while block < int(rows[begin]) // step:
                    yield dense
                    block += 1
                    dense = torch.zeros(min(step, num_rows - block * step), columns)
                end = int(torch.searchsorted(rows, (block + 1) * step))
                at = (rows[begin:end] - block * step, places[begin:end].to(torch.int64))
                dense.index_put_(at, found[begin:end], accumulate=True)
                begin = end
        yield dense
        for begin in range((block + 1) * step, num_rows, step):
            yield torch.zeros(min(step, num_rows - begin), columns)

    return RowSource(matrix.label, Field("float32", (columns,)), chunks, num_rows)


def _count(matrix: Matrix, of: str) -> Count:
    return Count(of, matrix.values.shape[0] if matrix.values.shape else 0, matrix.values.name)
