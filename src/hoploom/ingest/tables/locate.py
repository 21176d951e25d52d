"""Where values stand in the user's own files. Reads tables again from the start: only for the text of an error."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hoploom.ingest.tables.sources import Source, Spot

BATCH = 1 << 16  # rows


def locate(source: Source, column: str, values: Sequence[Any], *, skip: int = 0) -> list[Spot]:
    """Where each of a few values first stands (None: null), in the order of the values; skip=1: its second place.

    Text is found among integers too. A value that is not there is left out.
    """
    wanted = list(dict.fromkeys(values))
    left = dict.fromkeys(wanted, skip)
    found: dict[Any, Spot] = {}
    for file, row, value in _equal(source, column, wanted):
        if value in found:
            continue
        if left[value] == 0:
            found[value] = Spot(value, file, row)
        left[value] -= 1
        if len(found) == len(wanted):
            break
    return [found[value] for value in wanted if value in found]


def find_rows(source: Source, columns: Sequence[str], test: Callable[[Any], Any], most: int = 5) -> list[Spot]:
    """The first rows for which test(record batch), a boolean array, holds; their value is that of the first column."""
    found: list[Spot] = []
    for file, first, batch in _batches(source, columns):
        for index in _true(test(batch)):
            found.append(Spot(batch.column(columns[0])[index].as_py(), file, first + index))
            if len(found) == most:
                return found
    return found


def _equal(source: Source, column: str, values: Sequence[Any]) -> Iterator[tuple[str, int, Any]]:
    """File, row and value wherever one of these stands."""
    import pyarrow as pa
    import pyarrow.compute as pc

    has_text = any(isinstance(value, str) for value in values)
    kind = pa.string() if has_text else source.schema.field(column).type
    among = pa.array(values, kind)
    for file, first, batch in _batches(source, [column]):
        rows = pc.cast(batch.column(0), kind)
        for index in _true(pc.is_in(rows, among)):
            yield file, first + index, rows[index].as_py()


def _true(mask: Any) -> list[int]:
    import pyarrow.compute as pc

    indices: list[int] = pc.indices_nonzero(mask).to_pylist()
    return indices


def _batches(source: Source, columns: Sequence[str]) -> Iterator[tuple[str, int, Any]]:
    """Batches of some columns, each with its file and its first row."""
    import pyarrow.parquet as pq

    from hoploom.ingest.tables.places import Place

    for path, origin in zip(source.paths, source.origins, strict=True):
        first = 1
        with Place(path, origin, "parquet").open() as handle, pq.ParquetFile(handle) as file:
            for batch in file.iter_batches(BATCH, columns=list(columns)):
                yield origin, first, batch
                first += batch.num_rows
