"""Read the arrays of NumPy archives (.npz) in chunks, streamed from the zip file; nothing is unpickled."""

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
from hoploom.ingest.formats.row_source import CHUNK_BYTES, RowSource
from hoploom.schema import DTYPES, Field

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
    if array.dtype.kind not in "biuf" or _plain_dtype(array.dtype) not in DTYPES:
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
