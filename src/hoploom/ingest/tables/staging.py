"""Scratch Parquet that other formats are rewritten into, batch by batch. Trades disk for one reader in the engines."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROW_GROUP = 16 << 20  # bytes; engines read row groups at once and in parallel


def stage(batches: Iterable[Any], schema: Any, path: Path) -> int:
    """Write record batches as Parquet; the number of rows. Nothing is compressed: it is read once and dropped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    stored = pa.schema([(field.name, _stored(field.type)) for field in schema])
    num_rows = 0
    with pq.ParquetWriter(path, stored, compression="none", use_dictionary=False, write_statistics=False) as writer:
        for table in _grouped(batches, stored):
            writer.write_table(table, row_group_size=max(1, table.num_rows))
            num_rows += table.num_rows
    return num_rows


def _stored(kind: Any) -> Any:
    """Timestamps in microseconds and float16 as float32, which every engine reads."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_stored(kind.value_type), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(_stored(kind.value_type))
    return kind


def _has_nanoseconds(batch: Any) -> bool:
    """Whether times are cut to microseconds; nothing else changes its value."""
    return any("timestamp[ns" in str(field.type) for field in batch.schema)


def _grouped(batches: Iterable[Any], schema: Any) -> Iterator[Any]:
    """Tables of about ROW_GROUP bytes. A longer batch is cut, a file mapped into memory is read piece by piece."""
    import pyarrow as pa

    waiting: list[Any] = []
    size = 0
    for batch in batches:
        rows = max(1, batch.num_rows * ROW_GROUP // max(1, batch.nbytes))
        for begin in range(0, batch.num_rows, rows):
            piece = pa.Table.from_batches([batch.slice(begin, rows)]).cast(schema, safe=not _has_nanoseconds(batch))
            waiting.append(piece)
            size += piece.nbytes
            if size >= ROW_GROUP:
                yield pa.concat_tables(waiting).combine_chunks()
                waiting, size = [], 0
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()
