"""From the files that graph.toml names to Parquet that every engine reads alike, checked.

Parquet stays where it is: only its footer is read here. Everything else is rewritten once.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from hoploom.errors import DataError
from hoploom.ingest.tables.columns import Table, check_columns, check_ids, features_of, plain_schema, used_columns
from hoploom.ingest.tables.csv import CsvFile, stage_csv
from hoploom.ingest.tables.files import TableFile, find_files, is_url
from hoploom.ingest.tables.graph_file import GraphFile, NodeTable
from hoploom.ingest.tables.table_source import (
    ArrayFile,
    ReadLimits,
    TableSource,
    group_bytes,
    parquet_batches,
    parquet_footer,
    readable,
    stage,
)

PLAIN_PATH = re.compile(r"[\w./ +@,~-]+")  # what no engine takes for a pattern or a partition


def read_sources(recipe: GraphFile, scratch: Path, limits: ReadLimits | None = None) -> Mapping[str, TableSource]:
    """Every table with files by its owner; what is not Parquet is rewritten into the scratch folder, which exists."""
    tables: list[Table] = [*recipe.nodes.values(), *recipe.edges.values()]
    sources = {}
    for index, table in enumerate(tables):
        if table.files:
            folder = scratch / f"{index:03d}"
            folder.mkdir()
            sources[table.owner] = _source(recipe, table, folder, limits or ReadLimits())
    check_ids(recipe, sources)
    return sources


def _source(recipe: GraphFile, table: Table, folder: Path, limits: ReadLimits) -> TableSource:
    found = find_files(recipe, f"{table.owner}.files", table.files)
    if len({file.kind for file in found}) > 1:
        one, other = next((a, b) for a, b in pairwise(found) if a.kind != b.kind)
        message = f"{table.owner}.files: {one.shown} is {one.kind}, {other.shown} is {other.kind}"
        raise recipe.problem(f"{table.owner}.files", f"{message}; give a table in one format")
    names = [_names(file, limits) for file in found]
    features = features_of(recipe, table, names[0], found[0].shown)
    for file, there in zip(found, names, strict=True):
        check_columns(recipe, table, features, there, file.shown)
    paths: Sequence[str | Path] = [_linked(file, folder / f"{index:05d}.parquet") for index, file in enumerate(found)]
    schema, counts = _staged(table, found, used_columns(table, features), paths, limits)
    if sum(counts) == 0:
        raise DataError(f"{table.owner}: there are no rows in {_some(found)}; give files with rows")
    if found[0].kind == "parquet" and limits.largest_group is not None:
        paths = _regrouped(found, schema.names, paths, folder, limits.largest_group)
    return TableSource(
        table.owner,
        tuple(map(str, paths)),
        tuple(file.shown for file in found),
        schema,
        sum(counts),
        tuple(counts),
        features,
        _arrays(recipe, table, sum(counts), _some(found)),
    )


def _names(file: TableFile, limits: ReadLimits) -> list[str]:
    """The names of a file's columns."""
    if file.kind in ("csv", "tsv"):
        return CsvFile(file, block=limits.csv_block).names()
    schema = parquet_footer(file)[0] if file.kind == "parquet" else _arrow_schema(file)
    return list(schema.names)


def _linked(file: TableFile, scratch: Path) -> str | Path:
    """What the engine is given: a file in scratch, or Parquet itself, by a link if its name looks like a pattern."""
    if file.kind != "parquet":
        return scratch
    if is_url(file.path) or PLAIN_PATH.fullmatch(file.path):
        return file.path
    os.symlink(file.path, scratch)
    return scratch


def _staged(
    table: Table, found: Sequence[TableFile], used: Sequence[str], paths: Sequence[str | Path], limits: ReadLimits
) -> tuple[pa.Schema, list[int]]:
    """The schema that all files have, and their rows."""
    if found[0].kind in ("csv", "tsv"):
        stage_csv(table, found, used, [Path(path) for path in paths], limits)
    elif found[0].kind == "arrow":
        _check_alike([(file, plain_schema(_arrow_schema(file), used)) for file in found])
        for file, path in zip(found, paths, strict=True):
            with arrow_batches(file) as (schema, batches):
                stage(_guarded(file, batches, used), plain_schema(schema, used), Path(path), limits.row_group)
    read = [TableFile(str(path), file.shown, "parquet") for file, path in zip(found, paths, strict=True)]
    footers = [parquet_footer(file) for file in read]
    schemas = [plain_schema(schema, used) for schema, _ in footers]
    _check_alike(list(zip(read, schemas, strict=True)))
    return schemas[0], [rows for _, rows in footers]


def _regrouped(
    found: Sequence[TableFile], used: Sequence[str], paths: Sequence[str | Path], folder: Path, largest: int
) -> Sequence[str | Path]:
    """The files of a table, rewritten in small row groups if one has too large ones."""
    if max(group_bytes(file, used) for file in found) <= largest:
        return paths
    written = [folder / f"{index:05d}.cut.parquet" for index in range(len(found))]
    for file, path in zip(found, written, strict=True):
        stage(parquet_batches(file, used), plain_schema(parquet_footer(file)[0], used), path)
    return written


def _check_alike(files: Sequence[tuple[TableFile, pa.Schema]]) -> None:
    """Raise DataError unless a column has one type in all files of the table."""
    first, schema = files[0]
    for file, other in files[1:]:
        for name in schema.names:
            one, two = schema.field(name).type, other.field(name).type
            if one != two:
                message = f"{file.shown}: {name} is {two}, but {one} in {first.shown}"
                raise DataError(f"{message}; write all files of a table with the same types")


def _some(found: Sequence[TableFile]) -> str:
    return found[0].shown + (f" and {len(found) - 1} more" if len(found) > 1 else "")


# --- Arrow files ---------------------------------------------------------------------------------


def _refusal(file: TableFile, what: str) -> str:
    return f"{file.shown} is no {what} file, or cut short"


def _arrow_schema(file: TableFile) -> pa.Schema:
    with readable(_refusal(file, "Arrow")), arrow_batches(file) as (schema, _):
        return schema


def _guarded(file: TableFile, batches: Iterator[Any], used: Sequence[str]) -> Iterator[Any]:
    """What goes wrong while reading, told from what goes wrong while writing."""
    with readable(_refusal(file, "Arrow")):
        for batch in batches:
            yield batch.select(used)


@contextmanager
def arrow_batches(file: TableFile) -> Iterator[tuple[pa.Schema, Iterator[Any]]]:
    """Schema and batches, of the file format or of the stream format. A local file is mapped, not read."""
    with file.open() if is_url(file.path) else pa.memory_map(file.path) as handle:
        try:
            whole = ipc.open_file(handle)
        except pa.ArrowInvalid:
            handle.seek(0)
            whole = None
        if whole is not None:
            yield whole.schema, (whole.get_batch(index) for index in range(whole.num_record_batches))
        else:
            stream = ipc.open_stream(handle)
            yield stream.schema, iter(stream)


# --- .npy files ----------------------------------------------------------------------------------


def _arrays(recipe: GraphFile, table: Table, num_rows: int, tables: str) -> tuple[ArrayFile, ...]:
    """The .npy files with the features of the table's rows."""
    if not isinstance(table, NodeTable) or not table.features_npy:
        return ()
    at = f"{table.owner}.features_npy"
    found = find_files(recipe, at, table.features_npy, arrays=True)
    arrays = [array_file(file) for file in found]
    for file, array in zip(found, arrays, strict=True):
        if (array.dtype, array.shape[1]) != (arrays[0].dtype, arrays[0].shape[1]):
            first = f"{arrays[0].shape[1]} columns of {arrays[0].dtype} in {found[0].shown}"
            raise DataError(f"{file.shown} has {array.shape[1]} columns of {array.dtype}, but {first}; make them alike")
    rows = sum(array.shape[0] for array in arrays)
    if rows != num_rows:
        raise DataError(f"{at}: {_some(found)} has {rows} rows, {tables} {num_rows}; give a row of features per row")
    return tuple(arrays)


def array_file(file: TableFile) -> ArrayFile:
    """The header of a .npy file with a row of numbers per node."""
    with readable(_refusal(file, ".npy")):
        if is_url(file.path):
            raise ValueError("arrays are mapped into memory, so they must lie on this machine")
        array = np.load(file.path, mmap_mode="r", allow_pickle=False)
    is_plain = isinstance(array, np.ndarray) and array.dtype.kind in "biuf" and array.dtype.itemsize <= 8
    if not is_plain or array.ndim not in (1, 2):
        found = f"{getattr(array, 'dtype', 'no array')} of shape {getattr(array, 'shape', ())}"
        raise DataError(f"{file.shown} holds {found}; features are a row of numbers per node")
    if array.ndim == 2 and not array.flags.c_contiguous:
        raise DataError(f"{file.shown} is stored column by column; save it with numpy.ascontiguousarray(…)")
    width = array.shape[1] if array.ndim == 2 else 1
    return ArrayFile(file.path, array.dtype.str, (array.shape[0], width))
