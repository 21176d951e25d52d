"""Find the files that a key such as `files = "papers/*.parquet"` names, and read and write their rows in batches.

Files are in the order of the list. A glob or a folder gives files sorted by name, without names that begin with . or _.
"""

import fnmatch
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs, ipc

from hoploom.config.values import nearest, quoted
from hoploom.errors import DataError
from hoploom.ingest.tables.graph_file import GraphFile

KINDS = {".parquet": "parquet", ".pq": "parquet"} | dict.fromkeys((".arrow", ".arrows", ".feather", ".ipc"), "arrow")
KINDS |= {f".{kind}{packed}": kind for kind in ("csv", "tsv") for packed in ("", ".gz", ".bz2", ".zst")}
MAGIC = "*?["
BUFFER = 1 << 20  # bytes of a column that are read at once: a row group may be larger than memory
BATCH = 1 << 16  # rows
GROUP = 16 << 20  # bytes of a row group in scratch files: engines read row groups at once and in parallel


@dataclass(frozen=True)
class TableFile:
    """A file of a table."""

    path: str  # absolute, or a URL
    shown: str  # as messages call it
    kind: str  # "parquet", "csv", "tsv" or "arrow"

    def open(self) -> Any:
        """Open the file for pyarrow; compressed CSV is unpacked."""
        filesystem, path = fs.FileSystem.from_uri(self.path) if is_url(self.path) else (fs.LocalFileSystem(), self.path)
        if self.kind in ("csv", "tsv"):
            return filesystem.open_input_stream(path, compression="detect")
        return filesystem.open_input_file(path)


def is_url(path: str) -> bool:
    return "://" in path


def kind_of(name: str) -> str | None:
    """Return the format by the suffix of the name; None if it is unknown."""
    return next((kind for ending, kind in KINDS.items() if name.lower().endswith(ending)), None)


# --- finding files -------------------------------------------------------------------------------


def find_files(graph: GraphFile, key: str, patterns: tuple[str, ...]) -> tuple[TableFile, ...]:
    """Return the files that `patterns` name; `patterns` is the value of `key`, such as nodes.paper.files."""
    found: dict[str, TableFile] = {}
    for pattern in patterns:
        matching = _remote if is_url(pattern) else _local
        for shown in matching(graph, key, pattern):
            path, kind = shown if is_url(shown) else os.path.abspath(shown), kind_of(shown)
            if path in found:
                raise graph.problem(key, f"{shown} is named twice; list every file once")
            if kind is None:
                raise graph.problem(key, f"{shown} has no known format; give one of {', '.join(sorted(KINDS))}")
            found[path] = TableFile(path, shown, kind)
    return tuple(found.values())


def _local(graph: GraphFile, key: str, pattern: str) -> list[str]:
    """Return the files that a path or a glob names, or that are in a folder."""
    exact = graph.folder / pattern
    if exact.is_file():
        return [str(exact)]
    entries = [pattern] if exact.is_dir() else sorted(glob.glob(pattern, root_dir=graph.folder, recursive=True))
    files = [str(file) for entry in entries for file in _files_in(graph.folder / entry)]
    if not files:
        beside = sorted(os.listdir(exact.parent)) if not entries and exact.parent.is_dir() else []
        alike = nearest(exact.name, beside)
        hint = "paths are relative to the folder of graph.toml" if alike is None else f"did you mean {quoted(alike)}?"
        what = (
            f"{exact} holds nothing that ends in {', '.join(sorted(KINDS))}" if entries else f"{exact} does not exist"
        )
        if not entries and any(sign in pattern for sign in MAGIC):
            what = f"nothing matches {exact}"
        raise graph.problem(key, f"{what}; {hint}")
    return files


def _files_in(entry: Path) -> Iterator[Path]:
    """Yield the entry itself if it is a table, or all tables below it if it is a folder."""
    if entry.is_dir():
        for child in sorted(entry.iterdir()):
            if child.name[0] not in "._":
                yield from _files_in(child)
    elif entry.name[0] not in "._" and kind_of(entry.name):
        yield entry


def _remote(graph: GraphFile, key: str, url: str) -> list[str]:
    """Return [url] if `url` is an object; if it is a folder or a glob, return the URLs of all tables that match it."""
    scheme, _, path = url.partition("://")
    begin = path
    for sign in MAGIC:
        begin = begin.partition(sign)[0]
    base = path if begin == path else begin.rpartition("/")[0]
    try:
        filesystem, root = fs.FileSystem.from_uri(f"{scheme}://{base}")
        if filesystem.get_file_info(root).is_file:
            return [url]
        listed = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise graph.problem(key, f"{url} cannot be listed ({reason}); give a URL such as s3://…") from error
    wanted = root + path.removeprefix(base)
    tables = [one for one in listed if one.is_file and one.base_name[0] not in "._" and kind_of(one.base_name)]
    matching = sorted(one.path for one in tables if begin == path or fnmatch.fnmatchcase(one.path, wanted))
    if not matching:
        raise graph.problem(key, f"nothing matches {url}; name objects that are there")
    prefix = f"{scheme}://{base}".removesuffix(root)
    return [prefix + name for name in matching]


# --- reading -------------------------------------------------------------------------------------


@contextmanager
def readable(refusal: str) -> Iterator[None]:
    """Raise DataError if a file cannot be read in this block. Its message is `refusal` and the library's reason."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).split("\n", 1)[0] or type(error).__name__
        raise DataError(f"{refusal}: {reason:.160}; write it again") from error


@contextmanager
def opened(file: TableFile, refusal: str = " is no Parquet file, or cut short") -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; raise DataError if it cannot be read."""
    with (
        readable(f"{file.shown}{refusal}"),
        file.open() as handle,
        pq.ParquetFile(handle, buffer_size=BUFFER, pre_buffer=False) as parquet,
    ):
        yield parquet


def parquet_footer(file: TableFile) -> tuple[pa.Schema, int]:
    """Return a Parquet file's schema and number of rows."""
    with opened(file) as parquet:
        return parquet.schema_arrow, parquet.metadata.num_rows


def group_bytes(file: TableFile, columns: Sequence[str]) -> int:
    """Return the bytes of `columns` in a Parquet file's largest row group. Engines read a row group at once."""
    begins = tuple(f"{column}." for column in columns)
    most = 0
    with opened(file) as parquet:
        for index in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(index)
            chunks = (group.column(number) for number in range(group.num_columns))
            read = (chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(begins))
            most = max(most, sum(chunk.total_compressed_size for chunk in read))
    return most


def largest_value(path: str, column: str) -> int:
    """Return the largest integer of a column according to the footer; 2**64 if it has no statistics."""
    largest = 0
    with opened(TableFile(path, path, "parquet")) as parquet:
        for index in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(index)
            chunks = (group.column(number) for number in range(group.num_columns))
            found = next(chunk.statistics for chunk in chunks if chunk.path_in_schema == column)
            is_known = found is not None and (found.has_min_max or found.null_count == group.num_rows)
            largest = max(largest, (found.max or 0) if is_known else 2**64)
    return largest


def parquet_batches(file: TableFile, columns: Sequence[str], most_rows: int = BATCH) -> Iterator[pa.RecordBatch]:
    """Yield batches of some columns of a Parquet file, in order, each of at most about 16 * BUFFER bytes."""
    what = f": column {columns[0]!r} cannot be read" if len(columns) == 1 else " cannot be read"
    with opened(file, what) as parquet:
        found = parquet.metadata
        size = sum(found.row_group(index).total_byte_size for index in range(found.num_row_groups))
        rows = max(1, min(most_rows, 16 * BUFFER * int(found.num_rows) // max(1, int(size))))
        yield from parquet.iter_batches(rows, columns=list(columns), use_threads=False)


def arrow_schema(file: TableFile) -> pa.Schema:
    with readable(f"{file.shown} is no Arrow file, or cut short"), arrow_batches(file) as (schema, _):
        return schema


@contextmanager
def arrow_batches(file: TableFile) -> Iterator[tuple[pa.Schema, Iterator[Any]]]:
    """Open an Arrow file, in file or stream format; yield its schema and batches. A local file is memory-mapped."""
    with file.open() if is_url(file.path) else pa.memory_map(file.path) as handle:
        try:
            reader = ipc.open_file(handle)
            batches: Iterator[Any] = (reader.get_batch(index) for index in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            handle.seek(0)
            reader = ipc.open_stream(handle)
            batches = iter(reader)
        yield reader.schema, batches


# --- scratch files -------------------------------------------------------------------------------


def stage(batches: Iterable[Any], schema: Any, path: Path, group: int = GROUP) -> None:
    """Write batches as a Parquet file with row groups of about `group` bytes, uncompressed because it is read once."""
    stored = pa.schema([(field.name, _stored(field.type)) for field in schema])
    with pq.ParquetWriter(path, stored, compression="none", use_dictionary=False, write_statistics=False) as writer:
        for table in _grouped(batches, stored, group):
            writer.write_table(table, row_group_size=max(1, table.num_rows))


def _stored(kind: Any) -> Any:
    """Return a type that every engine reads: timestamps become microseconds, float16 becomes float32."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_stored(kind.value_type), kind.list_size)
    return pa.list_(_stored(kind.value_type)) if pa.types.is_list(kind) else kind


def _grouped(batches: Iterable[Any], schema: Any, group: int) -> Iterator[Any]:
    """Yield tables of about `group` bytes. Longer batches are cut, so that memory-mapped files are read in pieces."""
    waiting: list[Any] = []
    size = 0
    for batch in batches:
        is_cut = any("timestamp[ns" in str(field.type) for field in batch.schema)  # only this cast may lose digits
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
