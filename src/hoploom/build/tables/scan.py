"""Columns of a table in the order of its files: what an engine does not promise."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hoploom.build.tables.places import Place
from hoploom.build.tables.sources import Source
from hoploom.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


def scan(source: Source, column: str, batch_rows: int = 1 << 16) -> "Iterator[tuple[str, int, pa.Array]]":
    """The user's file, the rows before these in it, and values; DataError names a file that cannot be read."""
    import pyarrow as pa
    from pyarrow import parquet

    for path, origin in zip(source.paths, source.origins, strict=True):
        try:
            with Place(path, origin, "parquet").open() as opened, parquet.ParquetFile(opened) as file:
                row = 0
                for batch in file.iter_batches(batch_rows, columns=[column]):
                    yield origin, row, batch.column(0)
                    row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            reason = str(error).split("\n", 1)[0]
            raise DataError(
                f"{origin}: column {column!r} cannot be read: {reason:.160}; write the file again"
            ) from error


def check_readable(source: Source) -> None:
    """Read all that the recipe uses, to see which file is damaged."""
    for column in source.schema.names:
        for _ in scan(source, column):
            pass
