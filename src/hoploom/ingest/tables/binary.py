"""Files that carry their own types: Parquet footers, Arrow files into scratch Parquet, headers of .npy files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoploom.errors import DataError
from hoploom.ingest.tables.columns import plain_schema
from hoploom.ingest.tables.places import Place, is_url
from hoploom.ingest.tables.sources import ArrayFile
from hoploom.ingest.tables.staging import stage

if TYPE_CHECKING:
    import pyarrow as pa


@contextmanager
def _readable(place: Place, what: str) -> Iterator[None]:
    """What a library says of a file that is none of its kind, or cut short."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{place.shown} is no {what} file, or cut short: {reason:.160}; write it again") from error


def parquet_footer(place: Place) -> tuple["pa.Schema", int]:
    """A Parquet file's schema and number of rows."""
    import pyarrow.parquet as pq

    with _readable(place, "Parquet"), place.open() as handle, pq.ParquetFile(handle) as file:
        return file.schema_arrow, file.metadata.num_rows


def parquet_sample(place: Place, rows: int) -> tuple["pa.Schema", Any]:
    """A Parquet file's schema and its first rows (None: it has none)."""
    import pyarrow.parquet as pq

    with _readable(place, "Parquet"), place.open() as handle, pq.ParquetFile(handle) as file:
        return file.schema_arrow, next(file.iter_batches(rows), None)


def arrow_schema(place: Place) -> "pa.Schema":
    """An Arrow file's schema."""
    with _readable(place, "Arrow"), arrow_batches(place) as (schema, _):
        return schema


def stage_arrow(place: Place, used: Sequence[str], path: Path) -> int:
    """Rewrite some columns of an Arrow file; its number of rows."""
    with arrow_batches(place) as (schema, batches):
        return stage(_guarded(place, batches, used), plain_schema(schema, used), path)


def _guarded(place: Place, batches: Iterator[Any], used: Sequence[str]) -> Iterator[Any]:
    """What goes wrong while reading, told from what goes wrong while writing."""
    with _readable(place, "Arrow"):
        for batch in batches:
            yield batch.select(used)


@contextmanager
def arrow_batches(place: Place) -> Iterator[tuple["pa.Schema", Iterator[Any]]]:
    """Schema and batches, of the file format or of the stream format. A local file is mapped, not read."""
    import pyarrow as pa
    from pyarrow import ipc

    with place.open() if is_url(place.path) else pa.memory_map(place.path) as handle:
        try:
            file = ipc.open_file(handle)
        except pa.ArrowInvalid:
            handle.seek(0)
            file = None
        if file is not None:
            yield file.schema, (file.get_batch(index) for index in range(file.num_record_batches))
        else:
            stream = ipc.open_stream(handle)
            yield stream.schema, iter(stream)


def array_file(place: Place) -> ArrayFile:
    """The header of a .npy file with a row of numbers per node."""
    import numpy as np

    with _readable(place, ".npy"):
        if is_url(place.path):
            raise ValueError("arrays are mapped into memory, so they must lie on this machine")
        array = np.load(place.path, mmap_mode="r", allow_pickle=False)
    is_plain = isinstance(array, np.ndarray) and array.dtype.kind in "biuf" and array.dtype.itemsize <= 8
    if not is_plain or array.ndim not in (1, 2):
        found = f"{getattr(array, 'dtype', 'no array')} of shape {getattr(array, 'shape', ())}"
        raise DataError(f"{place.shown} holds {found}; features are a row of numbers per node")
    if array.ndim == 2 and not array.flags.c_contiguous:
        raise DataError(f"{place.shown} is stored column by column; save it with numpy.ascontiguousarray(…)")
    width = array.shape[1] if array.ndim == 2 else 1
    return ArrayFile(place.path, array.dtype.str, (array.shape[0], width))
