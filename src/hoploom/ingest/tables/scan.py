"""Columns of a table in the order of its files: what an engine does not promise."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hoploom.errors import DataError
from hoploom.ingest.tables.places import Place
from hoploom.ingest.tables.sources import Source

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

BUFFER = 1 << 20  # bytes of a column that are read at once: a row group may be larger than memory


def scan(source: Source, column: str, batch_rows: int = 1 << 16) -> "Iterator[tuple[str, int, pa.Array]]":
    """The user's file, the rows before these in it, and values; DataError names a file that cannot be read."""
    from pyarrow import parquet

    for path, origin in zip(source.paths, source.origins, strict=True):
        place = Place(path, origin, "parquet")
        with (
            _readable(f"{origin}: column {column!r}"),
            place.open() as opened,
            parquet.ParquetFile(opened, buffer_size=BUFFER, pre_buffer=False) as file,
        ):
            row = 0
            for batch in file.iter_batches(fitting_rows(file, batch_rows), columns=[column]):
                yield origin, row, batch.column(0)
                row += batch.num_rows


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """What the library says of a damaged file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).split("\n", 1)[0]
        raise DataError(f"{what} cannot be read: {reason:.160}; write the file again") from error


def fitting_rows(file: "parquet.ParquetFile", most: int) -> int:
    """How many rows to read at once: those of about sixteen buffers."""
    found = file.metadata
    size = sum(found.row_group(index).total_byte_size for index in range(found.num_row_groups))
    return max(1, min(most, 16 * BUFFER * int(found.num_rows) // max(1, int(size))))


def group_bytes(place: Place, columns: Sequence[str]) -> int:
    """What an engine reads at once of a Parquet file: some columns of its largest row group."""
    from pyarrow import parquet

    begins = tuple(f"{column}." for column in columns)
    most = 0
    with place.open() as opened, parquet.ParquetFile(opened) as file:
        for index in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(index)
            chunks = (group.column(number) for number in range(group.num_columns))
            read = (chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(begins))
            most = max(most, sum(chunk.total_compressed_size for chunk in read))
    return most


def pieces(place: Place, columns: Sequence[str]) -> "Iterator[pa.RecordBatch]":
    """Some columns of a Parquet file, however large its row groups are."""
    from pyarrow import parquet

    with (
        _readable(place.shown),
        place.open() as opened,
        parquet.ParquetFile(opened, buffer_size=BUFFER, pre_buffer=False) as file,
    ):
        yield from file.iter_batches(fitting_rows(file, 1 << 16), columns=list(columns), use_threads=False)


def check_readable(source: Source) -> None:
    """Read all that the recipe uses, to see which file is damaged."""
    for column in source.schema.names:
        for _ in scan(source, column):
            pass
