"""Sparse matrices in an .npz, row by row: an adjacency as edges, features as dense rows. Memory: an offset per row."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hoploom.errors import DataError
from hoploom.ingest.formats.npz import Array, npz_table, npz_text, npz_whole
from hoploom.ingest.formats.pieces import CHUNK_BYTES, Count, Ends, Table, in_step, integers
from hoploom.schema import Field

VALUES = ("data", "values")
CHUNK_ENTRIES = CHUNK_BYTES // 8


@dataclass(frozen=True)
class Matrix:
    """A matrix in compressed or coordinate form."""

    label: str
    shape: tuple[int, int]
    values: Array
    indices: tuple[Array, ...]  # the columns of a csr, the rows of a csc, both of a coo
    indptr: Array | None
    by_column: bool = False  # csc


def take_adjacency(left: dict[str, Array]) -> Matrix | None:
    """The matrix that `scipy.sparse.save_npz` wrote, or one under the names adj_data, adj_indices, ..."""
    if "format" not in left:
        return take_matrix(left, "adj")
    kind = npz_text(left.pop("format"))
    left.pop("_is_array", None)
    if kind not in ("csr", "csc", "coo"):
        raise DataError(f"{left['data'].path} holds a matrix of format {kind!r}; save matrix.tocsr() instead")
    names = ("row", "col") if kind == "coo" else ("indices", "indptr")
    missing = [name for name in ("data", "shape", *names) if name not in left]
    if missing:
        raise DataError(f"a {kind} matrix lacks {missing}; save it with scipy.sparse.save_npz")
    values, shape, first, second = (left.pop(name) for name in ("data", "shape", *names))
    if kind == "coo":
        return Matrix(values.label, _shape(shape), values, (first, second), None)
    return Matrix(values.label, _shape(shape), values, (first,), second, by_column=kind == "csc")


def take_matrix(left: dict[str, Array], prefix: str) -> Matrix | None:
    """A csr matrix whose arrays share the beginning of their names."""
    value = next((f"{prefix}_{name}" for name in VALUES if f"{prefix}_{name}" in left), None)
    names = [f"{prefix}_{name}" for name in ("shape", "indices", "indptr")]
    if value is None or any(name not in left for name in names):
        return None
    values, shape, indices, indptr = (left.pop(name) for name in (value, *names))
    return Matrix(values.label, _shape(shape), values, (indices,), indptr)


def _shape(array: Array) -> tuple[int, int]:
    if array.shape != (2,) or array.dtype.kind not in "iu":
        raise DataError(f"{array.label} has shape {array.shape}; two integers were expected")
    rows, columns = (int(extent) for extent in npz_whole(array))
    return rows, columns


# --- edges ----------------------------------------------------------------------------------


def matrix_ends(matrix: Matrix, nodes: Count) -> Ends:
    """Entry [i, j] is an edge from i to j. Its value is the field weight, unless all are 1."""
    if matrix.shape != (nodes.rows, nodes.rows):
        raise DataError(f"the matrix of {matrix.label} is {matrix.shape} for {nodes.rows} nodes; give a square one")
    count = Count("edges", matrix.values.shape[0] if matrix.values.shape else 0, matrix.values.name)
    if matrix.indptr is None:
        tables = [npz_table(index) for index in matrix.indices]
    else:
        stored = npz_table(matrix.indices[0])
        major = _major(matrix)
        tables = [stored, major] if matrix.by_column else [major, stored]
    values = npz_table(matrix.values)
    plain = all(bool((rows == 1).all()) for rows in values.chunks())
    return Ends(tables, count, {} if plain else {"weight": _as_float(values)})


def _major(matrix: Matrix) -> Table:
    """The row of every entry of a csr (the column of a csc)."""
    assert matrix.indptr is not None
    indptr = _indptr(matrix)

    def chunks() -> Iterator[Tensor]:
        for begin in range(0, int(indptr[-1]), CHUNK_ENTRIES):
            entries = np.arange(begin, min(begin + CHUNK_ENTRIES, int(indptr[-1])))
            yield torch.from_numpy(np.searchsorted(indptr, entries, side="right") - 1)

    return Table(matrix.indptr.label, Field("int64"), chunks, int(indptr[-1]))


def _indptr(matrix: Matrix) -> NDArray[np.int64]:
    """[rows + 1], checked."""
    assert matrix.indptr is not None
    integers(npz_table(matrix.indptr), "offsets")
    indptr = npz_whole(matrix.indptr).astype(np.int64)
    rows, entries = matrix.shape[1 if matrix.by_column else 0], matrix.values.shape
    if indptr.shape != (rows + 1,):
        raise DataError(f"{matrix.indptr.label} has shape {indptr.shape} for {rows} rows; {rows + 1} were expected")
    falls = np.flatnonzero(np.diff(indptr) < 0)
    if len(falls):
        raise DataError(f"{matrix.indptr.label} falls after entry {falls[0]}: {indptr[falls[0]]}; it must not")
    if indptr[0] != 0 or (int(indptr[-1]),) != entries:
        raise DataError(f"{matrix.indptr.label} runs from {indptr[0]} to {indptr[-1]} for values of shape {entries}")
    return indptr


def _as_float(table: Table) -> Table:
    return Table(
        table.name, Field("float32"), lambda: (rows.to(torch.float32) for rows in table.chunks()), table.num_rows
    )


# --- features -------------------------------------------------------------------------------


def dense_rows(matrix: Matrix) -> Table:
    """The rows of a csr matrix as float32, zeros and all; entries of the same place add up."""
    rows, columns = matrix.shape
    step = max(1, CHUNK_BYTES // max(1, 4 * columns))
    indices = integers(npz_table(matrix.indices[0]), "columns")
    values = _as_float(npz_table(matrix.values))

    def chunks() -> Iterator[Tensor]:
        indptr = torch.from_numpy(_indptr(matrix))
        entries = _Entries(in_step([indices, values]))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            dense = torch.zeros(end - begin, columns)
            for number, (places, found) in entries.until(int(indptr[end])):
                bad = (places < 0) | (places >= columns)
                if bad.any():
                    at = int(torch.nonzero(bad)[0])
                    raise DataError(
                        f"{indices.name}, entry {number + at + 1}: column {int(places[at])} is not in [0, {columns})"
                    )
                entry = torch.arange(number, number + len(places))
                row = torch.searchsorted(indptr, entry, right=True) - 1 - begin
                dense.index_put_((row, places.to(torch.int64)), found, accumulate=True)
            yield dense

    return Table(matrix.label, Field("float32", (columns,)), chunks, rows)


class _Entries:
    """Entries in order, handed out up to a bound at a time."""

    def __init__(self, pieces: Iterator[list[Tensor]]) -> None:
        self._pieces, self._held, self._first = pieces, [torch.empty(0), torch.empty(0)], 0

    def until(self, end: int) -> Iterator[tuple[int, list[Tensor]]]:
        """The entries that were not yet handed out, up to `end`, with the number of the first of each piece."""
        while self._first < end:
            if not len(self._held[0]):
                self._held = next(self._pieces)
            step = min(len(self._held[0]), end - self._first)
            yield self._first, [rows[:step] for rows in self._held]
            self._held = [rows[step:] for rows in self._held]
            self._first += step
