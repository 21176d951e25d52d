"""From the files that graph.toml names to Parquet that every engine reads alike, checked.

Parquet stays where it is: only its footer is read here. Everything else is rewritten once.
"""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hoploom.errors import DataError
from hoploom.ingest.tables.binary import array_file, arrow_schema, parquet_footer, stage_arrow
from hoploom.ingest.tables.columns import Table, check_columns, features_of, plain_schema, used_columns
from hoploom.ingest.tables.csv import csv_names, stage_csv
from hoploom.ingest.tables.graph_file import GraphFile, NodeTable
from hoploom.ingest.tables.idtypes import check_ids
from hoploom.ingest.tables.locate import find_rows, locate
from hoploom.ingest.tables.places import Place, is_url, places
from hoploom.ingest.tables.scan import group_bytes, pieces
from hoploom.ingest.tables.sources import ArrayFile, Source, Spot
from hoploom.ingest.tables.staging import stage

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ArrayFile", "Source", "Spot", "find_rows", "locate", "read_sources"]

PLAIN_PATH = re.compile(r"[\w./ +@,~-]+")  # what no engine takes for a pattern or a partition


def read_sources(recipe: GraphFile, scratch: Path, most_bytes: int | None = None) -> Mapping[str, Source]:
    """Every table with files by its owner; what is not Parquet is rewritten into the scratch folder, which exists.

    So is Parquet in row groups of more than `most_bytes` (None: as they are), which an engine would read at once.
    """
    tables: list[Table] = [*recipe.nodes.values(), *recipe.edges.values()]
    sources = {}
    for index, table in enumerate(tables):
        if table.files:
            folder = scratch / f"{index:03d}"
            folder.mkdir()
            sources[table.owner] = _source(recipe, table, folder, most_bytes)
    check_ids(recipe, sources)
    return sources


def _source(recipe: GraphFile, table: Table, folder: Path, most_bytes: int | None) -> Source:
    found = places(recipe, f"{table.owner}.files", table.files)
    if len({place.kind for place in found}) > 1:
        one, other = next((a, b) for a, b in pairwise(found) if a.kind != b.kind)
        message = f"{table.owner}.files: {one.shown} is {one.kind}, {other.shown} is {other.kind}"
        raise recipe.problem(f"{table.owner}.files", f"{message}; give a table in one format")
    names = [_names(place) for place in found]
    features = features_of(recipe, table, names[0], found[0].shown)
    for place, there in zip(found, names, strict=True):
        check_columns(recipe, table, features, there, place.shown)
    paths = [_linked(place, folder / f"{index:05d}.parquet") for index, place in enumerate(found)]
    schema, counts = _staged(table, found, used_columns(table, features), paths)
    if sum(counts) == 0:
        raise DataError(f"{table.owner}: there are no rows in {_some(found)}; give files with rows")
    if found[0].kind == "parquet" and most_bytes is not None:
        paths = [*_cut(found, schema.names, paths, folder, most_bytes)]
    return Source(
        table.owner,
        tuple(map(str, paths)),
        tuple(place.shown for place in found),
        schema,
        sum(counts),
        tuple(counts),
        features,
        _arrays(recipe, table, sum(counts), _some(found)),
    )


def _names(place: Place) -> list[str]:
    """The names of a file's columns."""
    if place.kind in ("csv", "tsv"):
        return csv_names(place)
    schema = parquet_footer(place)[0] if place.kind == "parquet" else arrow_schema(place)
    return list(schema.names)


def _linked(place: Place, scratch: Path) -> str | Path:
    """What the engine is given: a file in scratch, or Parquet itself, by a link if its name looks like a pattern."""
    if place.kind != "parquet":
        return scratch
    if is_url(place.path) or PLAIN_PATH.fullmatch(place.path):
        return place.path
    os.symlink(place.path, scratch)
    return scratch


def _staged(
    table: Table, found: Sequence[Place], used: Sequence[str], paths: Sequence[str | Path]
) -> tuple["pa.Schema", list[int]]:
    """The schema that all files have, and their rows."""
    kind = found[0].kind
    if kind in ("csv", "tsv"):
        counts = stage_csv(table, found, used, [Path(path) for path in paths])
    elif kind == "arrow":
        _check_alike([(place, plain_schema(arrow_schema(place), used)) for place in found])
        counts = [stage_arrow(place, used, Path(path)) for place, path in zip(found, paths, strict=True)]
    read = [Place(str(path), place.shown, "parquet") for place, path in zip(found, paths, strict=True)]
    footers = [parquet_footer(place) for place in read]
    schemas = [plain_schema(schema, used) for schema, _ in footers]
    _check_alike(list(zip(read, schemas, strict=True)))
    return schemas[0], [rows for _, rows in footers] if kind == "parquet" else counts


def _cut(
    found: Sequence[Place], used: Sequence[str], paths: Sequence[str | Path], folder: Path, most_bytes: int
) -> Sequence[str | Path]:
    """The files of a table, rewritten in small row groups if one has too large ones."""
    if max(group_bytes(place, used) for place in found) <= most_bytes:
        return paths
    written = [folder / f"{index:05d}.cut.parquet" for index in range(len(found))]
    for place, path in zip(found, written, strict=True):
        stage(pieces(place, used), plain_schema(parquet_footer(place)[0], used), path)
    return written


def _check_alike(files: Sequence[tuple[Place, "pa.Schema"]]) -> None:
    """Raise DataError unless a column has one type in all files of the table."""
    first, schema = files[0]
    for place, other in files[1:]:
        for name in schema.names:
            one, two = schema.field(name).type, other.field(name).type
            if one != two:
                message = f"{place.shown}: {name} is {two}, but {one} in {first.shown}"
                raise DataError(f"{message}; write all files of a table with the same types")


def _arrays(recipe: GraphFile, table: Table, num_rows: int, tables: str) -> tuple[ArrayFile, ...]:
    """The .npy files with the features of the table's rows."""
    if not isinstance(table, NodeTable) or not table.features_npy:
        return ()
    at = f"{table.owner}.features_npy"
    found = places(recipe, at, table.features_npy, arrays=True)
    arrays = [array_file(place) for place in found]
    for place, array in zip(found, arrays, strict=True):
        if (array.dtype, array.shape[1]) != (arrays[0].dtype, arrays[0].shape[1]):
            first = f"{arrays[0].shape[1]} columns of {arrays[0].dtype} in {found[0].shown}"
            raise DataError(
                f"{place.shown} has {array.shape[1]} columns of {array.dtype}, but {first}; make them alike"
            )
    rows = sum(array.shape[0] for array in arrays)
    if rows != num_rows:
        message = f"{at}: {_some(found)} has {rows} rows, {tables} {num_rows}; give a row of features per row"
        raise DataError(message)
    return tuple(arrays)


def _some(found: Sequence[Place]) -> str:
    return found[0].shown + (f" and {len(found) - 1} more" if len(found) > 1 else "")
