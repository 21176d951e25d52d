"""Which tables a folder holds, and the first rows of each. Reads a block per table, and no more."""

import os
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hoploom.errors import ConfigError
from hoploom.ingest.tables.csv import CsvFile
from hoploom.ingest.tables.files import (
    ARRAYS,
    TableFile,
    arrow_batches,
    kind_of,
    opened,
    parquet_batches,
    parquet_footer,
)
from hoploom.ingest.tables.sources import plain_schema

SAMPLE = 10_000  # rows
WANTED = 200  # ids of edges that are looked up among nodes
NUMBER = re.compile(r"(?<![a-zA-Z])\d+|\d+$")  # of a shard: part-00001, edges_3, edges7


@dataclass(frozen=True)
class Surveyed:
    """A table that was found."""

    name: str
    files: str  # for the key of that name: a path, a glob or a folder
    places: tuple[TableFile, ...]
    sample: Any  # a pyarrow.Table
    num_rows: int | None  # None: not known without reading

    @property
    def types(self) -> dict[str, Any]:
        """The columns and their types."""
        return {field.name: field.type for field in self.sample.schema}

    def is_text(self, column: str) -> bool:
        return bool(pa.types.is_string(self.types[column]))


def survey(folder: Path) -> tuple[list[Surveyed], list[Path], list[Path]]:
    """The tables and the .npy files in a folder, by name, and the files without even a header, below it."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the folder with the tables")
    blank = {path for path in folder.rglob("*") if _is_table(path, folder) and _is_blank(_place(path))}
    tables = list(_tables(folder, folder, blank))
    if not tables:
        raise ConfigError(f"{folder} holds no table; give a folder with Parquet, CSV or Arrow files")
    arrays = sorted(path for path in folder.iterdir() if kind_of(path.name, ARRAYS))
    return tables, arrays, sorted(path.relative_to(folder) for path in blank)


def _is_blank(place: TableFile) -> bool:
    if place.kind not in ("csv", "tsv"):
        return False
    try:
        with place.open() as file:
            return not file.read(64).strip()
    except OSError:  # told where its columns are read
        return False


def _tables(folder: Path, root: Path, blank: Set[Path]) -> Iterator[Surveyed]:
    entries = [entry for entry in sorted(folder.iterdir()) if entry.name[0] not in "._" and entry not in blank]
    for files in _shards([entry for entry in entries if entry.is_file() and kind_of(entry.name)]):
        yield from _one_or_each(files, root)
    for child in entries:
        below = child.rglob("*") if child.is_dir() else ()
        inside = sorted(path for path in below if _is_table(path, child) and path not in blank)
        is_whole = not any(path.is_relative_to(child) for path in blank)
        if inside and is_whole and len({path.parent for path in inside}) == 1 and _alike(inside):
            yield _surveyed(child.name, inside, f"{child.relative_to(root)}/")
        elif inside:
            yield from _tables(child, root, blank)


def _is_table(path: Path, root: Path) -> bool:
    hidden = any(part[0] in "._" for part in path.relative_to(root).parts)
    return path.is_file() and not hidden and kind_of(path.name) is not None


def _shards(files: Sequence[Path]) -> list[list[Path]]:
    """Files whose names differ by numbers only, together."""
    groups: dict[str, list[Path]] = {}
    for file in files:
        stem, dot, ending = file.name.partition(".")
        groups.setdefault(NUMBER.sub("*", stem) + dot + ending, []).append(file)
    return list(groups.values())


def _one_or_each(files: Sequence[Path], root: Path) -> Iterator[Surveyed]:
    stem, dot, ending = files[0].name.partition(".")
    pattern = files[0].with_name(NUMBER.sub("*", stem) + dot + ending)
    if len(files) > 1 and sorted(pattern.parent.glob(pattern.name)) == list(files) and _alike(files):
        name = re.sub(r"[^A-Za-z0-9]*part$", "", NUMBER.sub("", stem).strip("-_. ")) or pattern.parent.name
        yield _surveyed(name, files, str(pattern.relative_to(root)))
        return
    for file in files:
        yield _surveyed(file.name.partition(".")[0], [file], str(file.relative_to(root)))


def _alike(files: Sequence[Path]) -> bool:
    """Whether files have the same columns."""
    return len({tuple(sorted(_sample(_place(file)).schema.names)) for file in files}) == 1


def _place(file: Path) -> TableFile:
    return TableFile(os.path.abspath(file), str(file), kind_of(file.name) or "")


def _surveyed(name: str, files: Sequence[Path], pattern: str) -> Surveyed:
    places = tuple(_place(file) for file in files)
    samples = (_sample(place) for place in places)
    sample = next((rows for rows in samples if rows.num_rows), _sample(places[0]))
    counts = [parquet_footer(place)[1] for place in places] if places[0].kind == "parquet" else None
    return Surveyed(name, pattern, places, sample, None if counts is None else sum(counts))


def _sample(place: TableFile) -> Any:
    """The first rows of a file, with plain types; a name that comes twice is taken once."""
    batch = _first_batch(place)
    names = list(batch.schema.names)
    once = pa.table({name: batch.column(names.index(name)) for name in names})
    return once.slice(0, SAMPLE).cast(plain_schema(once.schema, once.schema.names))


def _first_batch(file: TableFile) -> Any:
    if file.kind in ("csv", "tsv"):
        with CsvFile(file).opened() as reader:
            return next((batch for batch in reader if batch.num_rows), None) or reader.schema.empty_table()
    if file.kind == "parquet":
        with opened(file) as parquet:
            return next(parquet.iter_batches(SAMPLE), None) or parquet.schema_arrow.empty_table()
    with arrow_batches(file) as (schema, batches):
        return next(batches, None) or schema.empty_table()


# --- looking further -----------------------------------------------------------------------------


def share_found(values: Any, table: Surveyed, column: str) -> float:
    """The share of some values that stand in the column of another table."""
    wanted = pc.unique(values.combine_chunks().drop_null()).slice(0, WANTED)
    missing = pa.array(wanted)
    for batch in _column(table, column):
        missing = missing.filter(pc.invert(pc.is_in(missing, batch.cast(missing.type))))
        if len(missing) == 0:
            break
    return 1 - len(missing) / max(1, len(wanted))


def largest(table: Surveyed, column: str) -> int | None:
    """The largest of integer ids; None where they are none, or below 0."""
    if not pa.types.is_integer(table.types[column]):
        return None
    most = -1
    for batch in _column(table, column):
        ends = pc.min_max(batch).as_py()
        if ends["min"] is not None and ends["min"] < 0:
            return None
        most = max(most, -1 if ends["max"] is None else ends["max"])
    return most if most >= 0 else None


def count_rows(table: Surveyed, column: str) -> int:
    """How many rows a table has, by one of its columns."""
    return sum(len(batch) for batch in _column(table, column))


def _column(table: Surveyed, column: str) -> Iterator[Any]:
    """All values of a column, piece by piece."""
    kind = table.types[column]
    for file in table.places:
        if file.kind in ("csv", "tsv"):
            yield from (batch.column(0) for batch in CsvFile(file).batches({column: kind}))
        elif file.kind == "parquet":
            yield from (batch.column(0).cast(kind) for batch in parquet_batches(file, [column]))
        else:
            with arrow_batches(file) as (_, batches):
                yield from (batch.column(column).cast(kind) for batch in batches)
