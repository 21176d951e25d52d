"""Arrays of an .npz, streamed from the zip without unpacking it. Reading a later row means reading all before it.

Headers are parsed by NumPy; an array that would have to be unpickled is refused.
"""

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from hoploom.errors import DataError
from hoploom.ingest.formats.pieces import CHUNK_BYTES, Table
from hoploom.schema import DTYPES, Field

WHOLE_BYTES = 256 << 20  # what may be read at once
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError)
WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}  # what tensors lack


@dataclass(frozen=True)
class Array:
    """An array in an archive, by its header."""

    path: Path
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    by_column: bool  # stored in Fortran's order

    @property
    def label(self) -> str:
        return f"{self.path}:{self.name}"

    @property
    def is_numeric(self) -> bool:
        return self.dtype.kind in "biuf" and _plain_dtype(self.dtype) in DTYPES


def read_arrays(path: Path) -> Mapping[str, Array]:
    """Every array of an archive, by name."""
    found = {}
    with _opened(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if member.flag_bits & 1:
                raise DataError(f"{path}:{name} is encrypted; unpack it first")
            with archive.open(member) as file:
                found[name] = Array(path, name, *_header(file, f"{path}:{name}"))
    return found


def npz_table(array: Array) -> Table:
    """The rows of an array."""
    _check_numeric(array)
    if not array.shape:
        raise DataError(f"{array.label} is a single value; rows were expected")
    dtype = _plain_dtype(array.dtype)
    return Table(array.label, Field(dtype, array.shape[1:]), lambda: _chunks(array, dtype), array.shape[0])


def npz_pairs(array: Array) -> tuple[Table, ...]:
    """The two rows of an array [2, n], as a table each, or both in one [n, 2], as they are stored."""
    _check_numeric(array)
    if len(array.shape) != 2 or array.shape[0] != 2:
        raise DataError(f"{array.label} has shape {array.shape}; give [2, number of edges]")
    dtype, count = _plain_dtype(array.dtype), array.shape[1]
    if array.by_column:
        turned = Array(array.path, array.name, array.dtype, (count, 2), by_column=False)
        return (Table(array.label, Field(dtype, (2,)), lambda: _chunks(turned, dtype), count),)

    def row(number: int) -> Table:
        line = Array(array.path, array.name, array.dtype, (count,), by_column=False)
        return Table(array.label, Field(dtype), lambda: _chunks(line, dtype, skip=number * count), count)

    return row(0), row(1)


def npz_whole(array: Array) -> NDArray[Any]:
    """All values of an array that is small, or that has an entry per node."""
    _check_numeric(array)
    rows = [chunk.numpy() for chunk in _chunks(_as_rows(array), _plain_dtype(array.dtype))]
    values = np.concatenate(rows) if rows else np.empty(0, _plain_dtype(array.dtype))
    return values.reshape(array.shape, order="F" if array.by_column else "C")


def npz_text(array: Array) -> str:
    """A short text, such as the name of a sparse format."""
    size = array.dtype.itemsize
    if array.dtype.kind not in "SU" or array.shape not in ((), (1,)) or size > 1 << 10:
        raise DataError(f"{array.label} holds {array.dtype} {array.shape}; a short text was expected")
    with _opened(array.path) as archive, archive.open(_member(archive, array)) as file:
        _header(file, array.label)
        raw = np.frombuffer(_exactly(file, size, array), array.dtype)[0]
    return raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)


# --- reading --------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; give the path of an .npz") from error
    except DAMAGE as error:
        if not _begins_as_zip(path):
            raise DataError(
                f"{path} is no .npz; give a file that numpy.savez or scipy.sparse.save_npz wrote"
            ) from error
        raise DataError(f"{path} is cut short or damaged ({error or type(error).__name__}); get it again") from error


def _begins_as_zip(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _member(archive: zipfile.ZipFile, array: Array) -> str:
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


def _check_numeric(array: Array) -> None:
    if array.dtype.hasobject:
        raise DataError(f"{array.label} holds pickled objects, which are never loaded; save it as plain numbers")
    if not array.is_numeric:
        raise DataError(f"{array.label} has dtype {array.dtype}; save it as one of {sorted(DTYPES)}")


def _as_rows(array: Array) -> Array:
    return Array(array.path, array.name, array.dtype, (math.prod(array.shape),), by_column=False)


def _chunks(array: Array, dtype: str, skip: int = 0) -> Iterator[Tensor]:
    """The rows in pieces, from the value `skip` on."""
    if array.by_column:
        yield _turned(array)
        return
    row_bytes = math.prod(array.shape[1:]) * array.dtype.itemsize
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    with _opened(array.path) as archive, archive.open(_member(archive, array)) as file:
        _header(file, array.label)
        _pass_over(file, skip * array.dtype.itemsize, array)
        for begin in range(0, array.shape[0], step):
            rows = min(step, array.shape[0] - begin)
            raw = _exactly(file, rows * row_bytes, array)
            values = np.frombuffer(raw, array.dtype).reshape(rows, *array.shape[1:])
            yield torch.from_numpy(values.astype(dtype))  # a copy: writable, in the machine's byte order


def _turned(array: Array) -> Tensor:
    size = math.prod(array.shape) * array.dtype.itemsize
    if size > WHOLE_BYTES:
        raise DataError(f"{array.label} is stored column by column; save it with numpy.ascontiguousarray(...)")
    return torch.from_numpy(np.ascontiguousarray(npz_whole(array)))


def _pass_over(file: IO[bytes], size: int, array: Array) -> None:
    while size:
        size -= len(_exactly(file, min(size, CHUNK_BYTES), array))


def _exactly(file: IO[bytes], size: int, array: Array) -> bytes:
    raw = file.read(size)
    if len(raw) != size:
        raise DataError(f"{array.label} is cut short: its header promises {array.shape} of {array.dtype}; get it again")
    return raw
