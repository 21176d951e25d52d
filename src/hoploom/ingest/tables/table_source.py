"""A table as the engines read it: Parquet files, whoever wrote them; their rows in order, and where a value stands.

What is no Parquet is rewritten into scratch files, batch by batch. Trades disk for one reader in the engines.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hoploom.errors import DataError
from hoploom.ingest.tables.files import TableFile

BUFFER = 1 << 20  # bytes of a column that are read at once: a row group may be larger than memory
BATCH = 1 << 16  # rows


@dataclass(frozen=True)
class ReadLimits:
    """How much is read or written at once; none of it changes what is read."""

    csv_block: int = 4 << 20  # bytes of text
    row_group: int = 16 << 20  # bytes of scratch files: engines read row groups at once and in parallel
    largest_group: int | None = None  # Parquet in larger row groups is rewritten; None: stays as it is


@dataclass(frozen=True)
class ArrayFile:
    """A .npy file: rows of numbers, to be memory-mapped."""

    path: str
    dtype: str  # as NumPy calls it: "<f4"
    shape: tuple[int, int]


@dataclass(frozen=True)
class TableSource:
    """A table as the engine reads it."""

    owner: str  # nodes.paper, edges."author writes paper"
    paths: tuple[str, ...]  # Parquet files; in the order listed, those of a glob or folder by name
    origins: tuple[str, ...]  # the user's own file of each, as messages call it
    schema: pa.Schema  # of the columns that the recipe uses
    num_rows: int
    row_counts: tuple[int, ...] = ()  # of each path
    features: tuple[str, ...] = ()  # the columns of x or edge_attr, in order: globs are resolved
    arrays: tuple[ArrayFile, ...] = ()  # features_npy: their rows, one after another, go with those of `paths`


@dataclass(frozen=True)
class Spot:
    """Where a value stands."""

    value: Any
    file: str  # the user's own
    row: int  # of its data, from 1

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}"


# --- reading -------------------------------------------------------------------------------------


@contextmanager
def readable(refusal: str) -> Iterator[None]:
    """What a library says of a damaged file, behind our own words."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).split("\n", 1)[0] or type(error).__name__
        raise DataError(f"{refusal}: {reason:.160}; write it again") from error


@contextmanager
def opened(file: TableFile, refusal: str = " is no Parquet file, or cut short") -> Iterator[pq.ParquetFile]:
    """A Parquet file; DataError where it cannot be read."""
    with (
        readable(f"{file.shown}{refusal}"),
        file.open() as handle,
        pq.ParquetFile(handle, buffer_size=BUFFER, pre_buffer=False) as parquet,
    ):
        yield parquet


def parquet_footer(file: TableFile) -> tuple[pa.Schema, int]:
    """A Parquet file's schema and number of rows."""
    with opened(file) as parquet:
        return parquet.schema_arrow, parquet.metadata.num_rows


def group_bytes(file: TableFile, columns: Sequence[str]) -> int:
    """What an engine reads at once of a Parquet file: some columns of its largest row group."""
    begins = tuple(f"{column}." for column in columns)
    most = 0
    with opened(file) as parquet:
        for index in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(index)
            chunks = (group.column(number) for number in range(group.num_columns))
            read = (chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(begins))
            most = max(most, sum(chunk.total_compressed_size for chunk in read))
    return most


def parquet_batches(file: TableFile, columns: Sequence[str], most_rows: int = BATCH) -> Iterator[pa.RecordBatch]:
    """Some columns of a Parquet file in its order, about sixteen buffers at a time however large its row groups are."""
    what = f": column {columns[0]!r} cannot be read" if len(columns) == 1 else " cannot be read"
    with opened(file, what) as parquet:
        found = parquet.metadata
        size = sum(found.row_group(index).total_byte_size for index in range(found.num_row_groups))
        rows = max(1, min(most_rows, 16 * BUFFER * int(found.num_rows) // max(1, int(size))))
        yield from parquet.iter_batches(rows, columns=list(columns), use_threads=False)


def scan(source: TableSource, column: str, most_rows: int = BATCH) -> Iterator[tuple[str, int, pa.Array]]:
    """A column in the order of the files, which no engine promises: the user's file, the rows before, values."""
    for path, origin in zip(source.paths, source.origins, strict=True):
        row = 0
        for batch in parquet_batches(TableFile(path, origin, "parquet"), [column], most_rows):
            yield origin, row, batch.column(0)
            row += batch.num_rows


def check_readable(source: TableSource) -> None:
    """Read all that the recipe uses, to see which file is damaged."""
    for column in source.schema.names:
        for _ in scan(source, column):
            pass


def locate(
    source: TableSource, column: str, values: Sequence[Any], *, skip: int = 0, most_rows: int = BATCH
) -> list[Spot]:
    """Where each of a few values first stands (None: null), in the order of the values; skip=1: its second place.

    Text is found among integers too. A value that is not there is left out. Only for the text of an error: it reads
    the table from its start.
    """
    left = dict.fromkeys(values, skip)
    found: dict[Any, Spot] = {}
    kind = pa.string() if any(isinstance(value, str) for value in left) else source.schema.field(column).type
    among = pa.array(left, kind)
    for file, before, given in scan(source, column, most_rows):
        rows = pc.cast(given, kind)
        for index in pc.indices_nonzero(pc.is_in(rows, among)).to_pylist():
            value = rows[index].as_py()
            if left[value] == 0:
                found[value] = Spot(value, file, before + index + 1)
            left[value] -= 1
        if len(found) == len(left):
            break
    return [found[value] for value in left if value in found]


# --- scratch files -------------------------------------------------------------------------------


def stage(batches: Iterable[Any], schema: Any, path: Path, group: int = ReadLimits.row_group) -> int:
    """Write record batches as Parquet; the number of rows. Nothing is compressed: it is read once and dropped."""
    stored = pa.schema([(field.name, _stored(field.type)) for field in schema])
    num_rows = 0
    with pq.ParquetWriter(path, stored, compression="none", use_dictionary=False, write_statistics=False) as writer:
        for table in _grouped(batches, stored, group):
            writer.write_table(table, row_group_size=max(1, table.num_rows))
            num_rows += table.num_rows
    return num_rows


def _stored(kind: Any) -> Any:
    """Timestamps in microseconds and float16 as float32, which every engine reads."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_stored(kind.value_type), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(_stored(kind.value_type))
    return kind


def _grouped(batches: Iterable[Any], schema: Any, group: int) -> Iterator[Any]:
    """Tables of about so many bytes. A longer batch is cut, a file mapped into memory is read piece by piece."""
    waiting: list[Any] = []
    size = 0
    for batch in batches:
        is_cut = any("timestamp[ns" in str(field.type) for field in batch.schema)  # nothing else changes its value
        rows = max(1, batch.num_rows * group // max(1, batch.nbytes))
        for begin in range(0, batch.num_rows, rows):
            piece = pa.Table.from_batches([batch.slice(begin, rows)]).cast(schema, safe=not is_cut)
            waiting.append(piece)
            size += piece.nbytes
            if size >= group:
                yield pa.concat_tables(waiting).combine_chunks()
                waiting, size = [], 0
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()
