"""Learned rows as a Parquet file with two columns: `id`, your id of the node, and `row`, a list of numbers."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hoploom.errors import ConfigError, StoreError
from hoploom.store import Store
from hoploom.store.views import OriginalIds
from hoploom.system import needs

GROUP = 1 << 16  # rows of a row group


def write_rows(path: Path, ids: OriginalIds, dim: int, pieces: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write rows of `dim` numbers, which come in pieces: ids in the store, and rows as float32."""
    with needs("tables"):
        import pyarrow as arrow
        import pyarrow.parquet as parquet

    def table(some: Tensor, rows: Tensor) -> Any:
        values = arrow.array(rows.reshape(-1).numpy())
        columns = arrow.array(ids.original(some)), arrow.FixedSizeListArray.from_arrays(values, dim)
        return arrow.table(dict(zip(("id", "row"), columns, strict=True)))

    empty, partial = (
        table(torch.empty(0, dtype=torch.int64), torch.empty(0, dim)),
        path.with_name(f".{path.name}.partial"),
    )
    try:
        with parquet.ParquetWriter(partial, empty.schema, compression="none") as file:
            for piece in pieces:
                file.write_table(table(*piece))
        os.replace(partial, path)
    except OSError as error:
        raise StoreError(f"learned rows cannot be written to {path}: {error}; give another path") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def read_row_table(path: Path, store: Store, node_type: str, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids in the store and rows, [n] and [n, dim], of those nodes in a file that the store has, too."""
    with needs("tables"):
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    try:
        file = parquet.ParquetFile(path)
        missing = {"id", "row"} - set(file.schema_arrow.names)
        if missing:
            raise ConfigError(f"warm_start: {path} has no column {sorted(missing)}; give a file that export() wrote")
        originals = file.read(columns=["id"])["id"].to_numpy()
        stored, first = store.ids(node_type).find(originals, "warm_start"), 0  # together: each search reads all ids
        for batch in file.iter_batches(GROUP, columns=["row"]):
            rows = batch["row"].flatten().to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(batch), -1)
            if rows.shape[1] != dim:
                raise ConfigError(f"warm_start: the rows of {path} have {rows.shape[1]} numbers, and dim is {dim}")
            ids = stored[first : first + len(batch)]
            first += len(batch)
            yield ids[ids >= 0], torch.from_numpy(rows)[ids >= 0]
    except (OSError, arrow.ArrowException) as error:
        raise ConfigError(f"warm_start: {path} cannot be read: {error}; give a file that export() wrote") from error
