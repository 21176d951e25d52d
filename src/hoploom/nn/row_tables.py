"""Rows of nodes as Parquet files, whose column `id` has your ids of the nodes; learned rows are in the column `row`."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hoploom.errors import ConfigError, StoreError
from hoploom.schema import ORIGINAL_ID
from hoploom.store import Store, Wanted
from hoploom.system import needs

AT_ONCE = 1 << 16  # rows that are read, written or drawn together
Columns = Mapping[str, Tensor]  # [rows], [rows, width] for fixed-size lists, uint8 [rows, width] for text


@contextmanager
def parquet_file(path: Path, like: Columns) -> Iterator[Callable[[Columns], None]]:
    """Make a Parquet file with the columns of the table `like`; yield the function that writes a row group to it.

    The file is synced to the disk at the end of the block. It is not compressed: embeddings hardly shrink.
    """
    with needs("tables"):
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    path.parent.mkdir(parents=True, exist_ok=True)

    def array(values: Tensor) -> Any:
        if values.dim() == 2 and values.dtype == torch.uint8:  # ids that are text, padded with zero bytes
            padded = values.contiguous().numpy().view(f"S{values.shape[1]}").reshape(-1)
            return arrow.array(padded, type=arrow.binary()).cast(arrow.string())
        flat = arrow.array(values.contiguous().reshape(-1).numpy())
        return flat if values.dim() == 1 else arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])

    def table(columns: Columns) -> Any:
        return arrow.table({name: array(values) for name, values in columns.items()})

    schema = table({name: values[:0] for name, values in like.items()}).schema
    with path.open("wb") as file:
        writer = parquet.ParquetWriter(file, schema, compression="none", use_dictionary=False, write_statistics=["id"])
        try:
            yield lambda columns: writer.write_table(table(columns), row_group_size=max(1, columns["id"].shape[0]))
        except BaseException:
            with suppress(OSError, arrow.ArrowException):
                writer.close()  # a file that is not whole is of no use
            raise
        writer.close()
        file.flush()
        os.fsync(file.fileno())


def ids_of_user(store: Store, name: str, nodes: Tensor) -> Tensor:
    """Return the user's ids of nodes, as a column of a result; the store's ids if the store has no others."""
    if ORIGINAL_ID not in store.schema.node_type(name).fields:
        return nodes
    ids = store.features.gather([Wanted(name, ORIGINAL_ID, nodes)])[0]
    return ids if ids.dim() > 1 else ids.to(torch.int64)


def write_rows(path: Path, store: Store, node_type: str, dim: int, pieces: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write rows of `dim` numbers, which come in pieces: ids in the store, and rows as float32."""

    def columns(ids: Tensor, rows: Tensor) -> Columns:
        return {"id": ids_of_user(store, node_type, ids), "row": rows}

    empty, partial = torch.empty(0, dtype=torch.int64), path.with_name(f".{path.name}.partial")
    try:
        with parquet_file(partial, columns(empty, torch.empty(0, dim, dtype=torch.float32))) as write:
            for ids, rows in pieces:
                write(columns(ids, rows))
        os.replace(partial, path)
    except OSError as error:
        raise StoreError(f"learned rows cannot be written to {path}: {error}; give another path") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def read_row_table(path: Path, store: Store, node_type: str, like: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids in the store, and rows, of those nodes in a file that the store has, too.

    Rows have the width and the dtype of `like`.
    """
    with needs("tables"):
        import pyarrow as arrow
        import pyarrow.compute as compute
        import pyarrow.parquet as parquet

    def check(are_good: Any, what: str) -> None:
        if not are_good.all():
            named = f"the row of id {originals[first + are_good.argmin()]} in {path}"
            raise ConfigError(f"warm_start: {named} {what}; give a file that export() wrote")

    dim, dtype = like.shape[1], like.dtype
    try:
        file = parquet.ParquetFile(path)
        kinds = {field.name: field.type for field in file.schema_arrow}
        if missing := {"id", "row"} - kinds.keys():
            raise ConfigError(f"warm_start: {path} has no column {sorted(missing)}; give a file that export() wrote")
        if not arrow.types.is_floating(getattr(kinds["row"], "value_type", arrow.null())):
            raise ConfigError(f"warm_start: column 'row' of {path} has {kinds['row']}; give lists of floats")
        originals = file.read(columns=["id"])["id"].to_numpy()
        stored, first = store.ids(node_type).find(originals, "warm_start"), 0  # together: each search reads all ids
        if not (stored >= 0).any():
            found = f"none of the {len(originals)} ids in {path} is of a {node_type!r} of the store"
            raise ConfigError(f"warm_start: {found}; give a file that export() wrote")
        are_first = np.zeros(len(originals), bool)
        are_first[np.unique(originals, return_index=True)[1]] = True
        check(are_first, "is there twice")
        for batch in file.iter_batches(AT_ONCE, columns=["row"]):
            lengths = compute.list_value_length(batch["row"]).to_numpy(zero_copy_only=False)  # of a null: NaN
            check(lengths == dim, f"has not dim={dim} numbers")
            values = batch["row"].flatten().to_numpy(zero_copy_only=False).reshape(len(batch), dim)
            with np.errstate(over="ignore"):
                rows = torch.from_numpy(values.astype(np.float32)).to(dtype)
            check(rows.isfinite().all(dim=1).numpy(), f"has a number that is not finite as {str(dtype)[6:]}")
            ids = stored[first : first + len(batch)]
            first += len(batch)
            yield ids[ids >= 0], rows[ids >= 0]
    except (OSError, arrow.ArrowException) as error:
        raise ConfigError(f"warm_start: {path} cannot be read: {error}; give a file that export() wrote") from error
