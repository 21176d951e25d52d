"""Rows of a .csv.gz without a header, a block at a time. Bounded memory; a row is reached through all before it."""

import csv
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hoploom.config.extras import needs
from hoploom.errors import DataError
from hoploom.ingest.formats.pieces import Table
from hoploom.schema import Field

BLOCK_BYTES = 1 << 20  # of text; Arrow reads up to 32 blocks ahead
PARSED = {"float32": "float64", "float64": "float64", "int64": "int64"}  # OGB's readers round twice: so do we


def csv_table(path: Path, dtype: str, block: int = BLOCK_BYTES) -> Table:
    """The rows of a file, [n, columns] of this dtype. An empty field is NaN among floats, an error among integers."""
    return Table(str(path), Field(dtype, (_num_columns(path),)), lambda: _chunks(path, dtype, block))


def small_csv(path: Path) -> list[list[str]]:
    """All rows of a small file, header and all."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            return [row for row in csv.reader(file) if row]
    except (OSError, EOFError, zlib.error, UnicodeError, csv.Error) as error:
        raise _damaged(path, error) from error


def single_count(path: Path) -> int:
    """The number in a file that lists the size of every graph, where there is one graph."""
    rows = small_csv(path)
    if len(rows) != 1 or not rows[0][0].strip().isdigit():
        raise DataError(f"{path} holds {rows[:2]}; one number was expected, the size of the one graph")
    return int(rows[0][0])


def _num_columns(path: Path) -> int:
    try:
        with gzip.open(path, "rb") as file:
            line = file.readline()
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, error) from error
    return line.count(b",") + 1


def _chunks(path: Path, dtype: str, block: int) -> Iterator[Tensor]:
    with needs("tables"):
        import pyarrow as pa
        from pyarrow import csv as arrow_csv
    names = [str(column) for column in range(_num_columns(path))]
    first = 0
    try:
        with pa.input_stream(str(path), compression="gzip") as stream:
            reader = arrow_csv.open_csv(
                stream,
                arrow_csv.ReadOptions(use_threads=False, block_size=block, column_names=names),
                convert_options=arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, PARSED[dtype])),
            )
            for batch in reader:
                columns = [_values(path, column, dtype, first) for column in batch.columns]
                first += batch.num_rows
                yield torch.from_numpy(np.stack(columns, axis=1))
    except pa.ArrowInvalid as error:
        if _is_empty(path):
            return
        raise DataError(_bad_row(path, dtype, len(names), first) or f"{path}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, error) from error


def _values(path: Path, column: Any, dtype: str, first: int) -> NDArray[Any]:
    """The values of one column of a batch."""
    if column.null_count and dtype == "int64":
        row = first + column.is_null().to_pylist().index(True) + 1
        raise DataError(f"{path}, row {row}: a value is missing; fill it")
    values: NDArray[Any] = column.to_numpy(zero_copy_only=False).astype(dtype)
    return values


def _bad_row(path: Path, dtype: str, columns: int, first: int) -> str | None:
    """Which row Arrow stumbled over: it tells the value at most. Slow, and only on the way out."""
    parse = int if dtype == "int64" else float
    with gzip.open(path, "rt", encoding="utf-8", errors="replace", newline="") as file:
        for number, row in enumerate(filter(None, csv.reader(file)), 1):
            if number > first and len(row) != columns:
                return f"{path}, row {number}: {len(row)} values where row 1 has {columns}; give every row as many"
            for value in filter(None, row) if number > first else ():
                try:
                    parse(value)
                except ValueError:
                    return f"{path}, row {number}: {value!r} is no {'integer' if parse is int else 'number'}"
    return None


def _is_empty(path: Path) -> bool:
    with gzip.open(path, "rb") as file:
        return file.read(1) == b""


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is cut short or damaged ({error or type(error).__name__}); get it again")
