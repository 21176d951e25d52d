"""Which tables a folder holds, and the first rows of each. Reads a block per table, and no more."""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hoploom.errors import ConfigError
from hoploom.ingest.tables.csv import CsvFile
from hoploom.ingest.tables.sources import plain_schema
from hoploom.ingest.tables.table_files import BATCH, TableFile, arrow_batches, kind_of, opened

SAMPLE = 10_000  # rows
WANTED = 200  # values of a column that are looked up among the ids of nodes
NUMBER = re.compile(r"(?<![a-zA-Z])\d+|\d+$")  # of a shard: part-00001, edges_3, edges7


@dataclass(frozen=True)
class Surveyed:
    """A table that was found."""

    name: str
    files: str  # for the key of that name: a path, a glob or a folder
    places: tuple[TableFile, ...]
    sample: Any  # a pyarrow.Table

    @property
    def types(self) -> dict[str, Any]:
        """The columns and their types."""
        return {field.name: field.type for field in self.sample.schema}

    def is_text(self, column: str) -> bool:
        return bool(pa.types.is_string(self.types[column]))

    def some(self, column: str) -> Any:
        """Return the first distinct values of a column, text or int64."""
        values = pc.unique(self.sample[column].combine_chunks().drop_null()).slice(0, WANTED)
        return values.cast(pa.string() if self.is_text(column) else pa.int64(), safe=False)

    def pieces(self, column: str) -> Iterator[Any]:
        """All values of a column, piece by piece."""
        kind = self.types[column]
        for place in self.places:
            yield from (batch.column(column).cast(kind) for batch in _batches(place, {column: kind}))


def survey(folder: Path) -> tuple[list[Surveyed], list[Path]]:
    """The tables in a folder, by name, and the files below it that are empty."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the folder with the tables")
    blank = [path for path in sorted(folder.rglob("*")) if _is_table(path, folder) and _is_blank(_place(path))]
    tables = list(_tables(folder, folder, blank))
    if not tables:
        raise ConfigError(f"{folder} holds no table; give a folder with Parquet, CSV or Arrow files")
    return tables, [path.relative_to(folder) for path in blank]


def _is_blank(file: TableFile) -> bool:
    """Whether a file has not even a header."""
    if file.kind not in ("csv", "tsv"):
        return False
    try:
        with file.open() as opened:
            return not opened.read(64).strip()
    except OSError:  # it is damaged, which is said where its columns are read
        return False


def _tables(folder: Path, root: Path, blank: Collection[Path]) -> Iterator[Surveyed]:
    """Files whose names differ by numbers only are one table, and so are all files of a folder, if they are alike."""
    shards: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        if _is_table(file, folder) and file not in blank:
            shards.setdefault(_pattern(file), []).append(file)
    for pattern, files in shards.items():
        if len(files) > 1 and sorted(folder.glob(pattern)) == files and _alike(files):
            name = re.sub(r"[^A-Za-z0-9]*part$", "", NUMBER.sub("", _stem(files[0])).strip("-_. ")) or folder.name
            yield _surveyed(name, files, folder.relative_to(root) / pattern)
        else:
            yield from (_surveyed(_stem(file), [file], file.relative_to(root)) for file in files)
    for child in sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] not in "._"):
        inside = sorted(path for path in child.rglob("*") if _is_table(path, child) and path not in blank)
        is_whole = not any(path.is_relative_to(child) for path in blank)
        if is_whole and len({path.parent for path in inside}) == 1 and _alike(inside):
            yield _surveyed(child.name, inside, child.relative_to(root))
        elif inside:
            yield from _tables(child, root, blank)


def _is_table(path: Path, root: Path) -> bool:
    hidden = any(part[0] in "._" for part in path.relative_to(root).parts)
    return path.is_file() and not hidden and kind_of(path.name) is not None


def _stem(file: Path) -> str:
    return file.name.partition(".")[0]


def _pattern(file: Path) -> str:
    return NUMBER.sub("*", _stem(file)) + file.name.removeprefix(_stem(file))


def _alike(files: Sequence[Path]) -> bool:
    """Whether files have the same columns."""
    return len({tuple(sorted(_sample([_place(file)]).schema.names)) for file in files}) == 1


def _place(file: Path) -> TableFile:
    return TableFile(os.path.abspath(file), str(file), kind_of(file.name) or "")


def _surveyed(name: str, files: Sequence[Path], pattern: Path) -> Surveyed:
    places = tuple(map(_place, files))
    return Surveyed(name, str(pattern), places, _sample(places))


def _sample(places: Sequence[TableFile]) -> Any:
    """The first rows of a table, with plain types; a name that comes twice is taken once."""
    batches = (batch for place in places for batch in _batches(place))
    empty = next(batches)
    batch = next((batch for batch in batches if batch.num_rows), empty)
    names = list(batch.schema.names)
    once = pa.table({name: batch.column(names.index(name)) for name in names})
    return once.slice(0, SAMPLE).cast(plain_schema(once.schema, once.schema.names))


def _batches(file: TableFile, types: dict[str, Any] | None = None) -> Iterator[Any]:
    """The rows of a file, of all columns or of those with a type, piece by piece; the first piece is empty."""
    columns = list(types or ())
    if file.kind in ("csv", "tsv"):
        with CsvFile(file).opened(columns, types) as reader:
            yield pa.RecordBatch.from_pylist([], reader.schema)
            yield from reader
    elif file.kind == "parquet":
        with opened(file) as parquet:
            yield pa.RecordBatch.from_pylist([], parquet.schema_arrow.empty_table().schema)
            yield from parquet.iter_batches(BATCH if columns else SAMPLE, columns=columns or None)
    else:
        with arrow_batches(file) as (schema, batches):
            yield pa.RecordBatch.from_pylist([], schema)
            yield from batches


# --- looking further -----------------------------------------------------------------------------


def found_among(wanted: Any, table: Surveyed, column: str) -> Any:
    """Return those of some values that stand in a column of a table. Reads the column until all are found."""
    missing = wanted
    for piece in table.pieces(column):
        missing = missing.filter(pc.invert(pc.is_in(missing, piece.cast(missing.type, safe=False))))
        if len(missing) == 0:
            break
    return wanted.filter(pc.invert(pc.is_in(wanted, missing)))


def largest(table: Surveyed, column: str) -> int | None:
    """The largest of integer ids; None where they are none, or below 0."""
    if not pa.types.is_integer(table.types[column]):
        return None
    ends = [pc.min_max(piece).as_py() for piece in table.pieces(column)]
    lows = [one["min"] for one in ends if one["min"] is not None]
    return max(one["max"] for one in ends if one["max"] is not None) if lows and min(lows) >= 0 else None
