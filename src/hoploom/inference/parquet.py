"""Columns of nodes as a Parquet file, one row group per slice.

Values are stored as they are: embeddings hardly compress.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hoploom.config.extras import needs

Columns = Mapping[str, Tensor]  # [rows], [rows, width] for lists of one length, uint8 [rows, width] for text


class ParquetFile:
    """One file, appended to. Its columns are those of `like`, rows of which do not matter."""

    def __init__(self, path: Path, like: Columns) -> None:
        with needs("tables"):
            import pyarrow.parquet
        path.parent.mkdir(parents=True, exist_ok=True)
        self._arrow: Any = pyarrow
        self._schema = _table(self._arrow, like).schema
        self._file = path.open("wb")
        self._writer: Any = None
        try:
            self._writer = self._arrow.parquet.ParquetWriter(
                self._file, self._schema, compression="none", use_dictionary=False, write_statistics=["id"]
            )
        except BaseException:
            self.close()
            raise

    def append(self, columns: Columns) -> None:
        """A row group."""
        table = _table(self._arrow, columns)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))

    def finish(self) -> None:
        """Write the end, and all of it to the disk."""
        writer, self._writer = self._writer, None
        writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close without complaint: a file that is not finished is of no use anyway."""
        writer, self._writer = self._writer, None
        with suppress(OSError, self._arrow.ArrowException):
            if writer is not None:
                writer.close()
        with suppress(OSError):
            self._file.close()

    def __enter__(self) -> "ParquetFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _table(arrow: Any, columns: Columns) -> Any:
    return arrow.table({name: _array(arrow, values) for name, values in columns.items()})


def _array(arrow: Any, values: Tensor) -> Any:
    if values.dim() == 2 and values.dtype == torch.uint8:  # ids that are text, padded with zero bytes
        padded = values.contiguous().numpy().view(f"S{values.shape[1]}").reshape(-1)
        return arrow.array(padded, type=arrow.binary()).cast(arrow.string())
    flat = arrow.array(values.contiguous().reshape(-1).numpy())
    return flat if values.dim() == 1 else arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])
