"""Plan the fields of a table: their columns, dtypes and shapes, from schemas and a few values, before rows are read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from hoploom.config.values import as_key
from hoploom.errors import ConfigError, DataError
from hoploom.ingest.tables import diagnose
from hoploom.ingest.tables.engine import Engine
from hoploom.ingest.tables.graph_file import EdgeTable, rule_of
from hoploom.ingest.tables.sources import TableSource
from hoploom.ingest.tables.transforms import (
    FLOATS,
    FieldColumns,
    SourceColumn,
    UnfitError,
    prepared,
    write_numbers,
)
from hoploom.schema import DTYPES, Field

EXACT = ("float64", "int64")  # hold microseconds since 1970
STORED = {"uint16": "int32", "uint32": "int64", "uint64": "int64", "halffloat": "float16"}  # Arrow's name -> a store's
STORED |= {"float": "float32", "double": "float64"}


@dataclass(frozen=True)
class Planner:
    """Plans the fields of one table."""

    engine: Engine
    source: TableSource
    most_codes: int = 1_000_000
    most_one_hot: int = 4096
    most_bytes: int = 16 << 20  # of categories, which are kept in memory

    def fields(self) -> "TableFields":
        """Return the fields that the table's keys name; raise ConfigError or DataError if columns are unfit."""
        return TableFields(self.source, list(self._fields()))

    def _fields(self) -> Iterator[FieldColumns]:
        table, features = self.source.table, self.source.features
        is_edges = isinstance(table, EdgeTable)
        if features:
            yield self._field("features", "edge_attr" if is_edges else "x", features, table.dtype)
        if isinstance(table, EdgeTable):
            if table.weight:
                yield self._field("weight", "weight", [table.weight], "float32")
        elif table.label:
            yield replace(self._field("label", "y", [table.label]), limit=table.num_classes)
        if table.time:
            yield self._field("time", "time", [table.time])
        for name, column in table.fields.items():
            yield self._field(f"fields.{as_key(name)}", name, [column])

    def _field(self, key: str, name: str, names: Sequence[str], dtype: str | None = None) -> FieldColumns:
        """Return a field of some columns; dtype=None: the dtype of the values."""
        columns = tuple(self._column(key, name, dtype) for name in names)
        shape = (sum(column.extent for column in columns),) if key == "features" else columns[0].shape
        dtype = dtype or self._own_dtype(key, columns[0])
        for column in columns:
            if column.rule.standardise and isinstance(self.source.table, EdgeTable):
                message = "only columns of nodes are standardised, whose rows have an order to sum them in"
                raise self._column_problem(column.name, f"{message}; do it in the table")
            if column.rule.standardise and dtype not in FLOATS:
                raise self._column_problem(column.name, f"{name} is {dtype}, but what is standardised are fractions")
        return FieldColumns(name, Field(dtype, shape), columns, weights=key == "weight")

    def _column(self, key: str, name: str, dtype: str | None) -> SourceColumn:
        rule = rule_of(self.source.table, name)
        given, width = self.source.schema.field(name).type, None
        if pa.types.is_list(given) or pa.types.is_fixed_size_list(given):
            width = given.list_size if pa.types.is_fixed_size_list(given) else self._first_width(name)
            given = given.value_type
        if rule.fill is not None:
            if pa.types.is_null(given):  # there is no value to take the type from
                given = pa.scalar(rule.fill).type if rule.cast is None else pa.type_for_alias(rule.cast)
            try:
                pa.scalar(rule.fill, given)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise self._column_problem(name, f"{rule.fill!r} is no value of a column of {given}") from error
        column = SourceColumn(name, given, width, rule)
        words = self._words(column) if rule.categories is not None else None
        if words is None and not _is_number(column.result):
            raise self.source.problem(key, f"column {name!r} is {self._no_number(column, key)}")
        column = replace(column, words=words)
        if key == "weight" and column.shape:
            raise self.source.problem(key, f"column {name!r} has {column.extent} numbers a row; a weight is one")
        kept = dtype in EXACT or rule.standardise or words is not None
        is_moment = pa.types.is_date(column.result) or pa.types.is_timestamp(column.result)
        if key == "features" and is_moment and not kept:
            what = f"column {name!r} is {column.result}, whose microseconds {dtype} rounds"
            way_out = f'give dtype = "float64", or columns.{as_key(name)}.standardise = true, or leave it out'
            raise self.source.problem(key, f"{what}; {way_out}")
        return replace(column, null=_null(column)) if key == "label" else column

    def _no_number(self, column: SourceColumn, key: str) -> str:
        """Return why a column holds no numbers: the first value that is none, its file and row, and the way out."""
        found, at = diagnose.first_word(self.source, column.name), f"columns.{as_key(column.name)}"
        is_text = pa.types.is_string(column.result)
        if found is None:
            why = f'but its text reads as one; give {at}.cast = "float32"' if is_text else "it holds nulls only"
            return f"{column.result}, not a number; {why}" + ("" if is_text else f"; leave it out, or give {at} a fill")
        place, value = found
        words = is_text and column.width is None and key not in ("weight", "time")
        kind = "one-hot" if key == "features" else "codes"
        way_out = f'correct it, or give {at}.categories = "{kind}"' if words else "write numbers, or leave it out"
        return f"{column.result}, not a number: {place} holds {value!r:.60}; {way_out}"

    def _column_problem(self, column: str, message: str) -> ConfigError:
        return self.source.problem(f"columns.{as_key(column)}", message)

    def _first_width(self, name: str) -> int:
        """Return the length of the first list. Lists of other lengths are errors when rows are read."""
        for _, _, values in self.source.scan(name, 1024):
            lists = values.drop_null()
            if len(lists):
                return len(lists[0])
        raise DataError(f"{self.source.origins[0]}: column {name!r} of {self.source.owner} holds no list at all")

    def _words(self, column: SourceColumn) -> pa.Array:
        """Return the categories of a column, in order."""
        if column.width is not None:
            raise self._column_problem(column.name, "it holds lists, which have no categories")
        is_one_hot = column.rule.categories == "one-hot"
        most = self.most_one_hot if is_one_hot else self.most_codes
        rows = self.engine.read(self.source.paths)
        distinct = rows.select(word=rows[column.name]).distinct().limit(most + 1)
        found, count, size = [], 0, 0
        for batch in self.engine.stream(distinct, 256):
            found.append(prepared(column, batch.column(0)).drop_null())
            count, size = count + batch.num_rows, size + found[-1].nbytes
            if count > most or size > self.most_bytes:
                way_out = 'categories = "codes"' if is_one_hot else "numbers in the table"
                bound = f"{most} values" if count > most else f"{self.most_bytes >> 20} MB of values"
                raise self._column_problem(column.name, f"it has more than {bound}; use {way_out}")
        if not any(map(len, found)):
            raise self._column_problem(column.name, "it holds nulls only, so there are no categories")
        words = pa.concat_arrays(found).unique()
        return words.take(pc.array_sort_indices(words))

    def _own_dtype(self, key: str, column: SourceColumn) -> str:
        """Return the default dtype of a field."""
        held = {"codes": "int64", "one-hot": "uint8", None: _dtype_of(column.result)}[column.rule.categories]
        if column.rule.standardise:
            return "float32"
        if key == "label":
            return "float32" if held in FLOATS or column.shape else "int64"
        if key == "time" and (held in FLOATS or held == "bool" or column.shape):
            message = f"column {column.name!r} is {column.result}; times are integers or timestamps"
            raise self.source.problem(key, message)
        return "int64" if key == "time" else held


def _null(column: SourceColumn) -> float | int | None:
    """Return the value of a label that is not known."""
    if column.shape:
        return None
    is_code = column.rule.categories is not None
    is_fraction = column.rule.standardise or _dtype_of(column.result) in FLOATS
    return float("nan") if is_fraction and not is_code else -1


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_date, types.is_timestamp)
    return any(test(kind) for test in tests)


def _dtype_of(kind: pa.DataType) -> str:
    if pa.types.is_decimal(kind):
        return "float64"
    name = STORED.get(str(kind), str(kind))
    return name if name in DTYPES else "int64"  # dates and timestamps, too


@dataclass(frozen=True)
class TableFields:
    """The fields of a table, and the columns that make them."""

    source: TableSource
    fields: Sequence[FieldColumns]

    @property
    def label(self) -> "TableFields | None":
        """The label alone, if it is one number for each node: then some nodes may have none."""
        found = [field for field in self.fields if field.columns[0].null is not None]
        return replace(self, fields=found) if found else None

    @property
    def aliases(self) -> dict[str, str]:
        """The name of each column in the engine, which does not depend on special characters."""
        names = dict.fromkeys(column.name for field in self.fields for column in field.columns)
        return {name: f"c{index}" for index, name in enumerate(names)}

    @property
    def row_bytes(self) -> int:
        """The bytes of a row with its ids, about."""
        return 16 + sum(field.field.row_bytes for field in self.fields)

    def rows(self, batch: pa.RecordBatch) -> dict[str, Tensor]:
        """Return the rows of every field; raise DataError that names the first row that cannot be used."""
        arrays = {name: batch.column(alias) for name, alias in self.aliases.items()}
        return {field.name: self._rows(field, arrays, batch.num_rows) for field in self.fields}

    def _rows(self, field: FieldColumns, arrays: Mapping[str, pa.Array], count: int) -> Tensor:
        out = torch.empty((count, *field.field.shape), dtype=DTYPES[field.arriving.dtype])
        begin = 0
        for column in field.columns:
            target = out[:, begin : begin + column.extent] if len(field.columns) > 1 else out
            try:
                values = field.numbers(column, arrays[column.name])
            except UnfitError as error:
                check = partial(field.numbers, column)
                raise diagnose.unfit(self.source, column.name, check, error) from error
            write_numbers(target, values)
            begin += column.extent
        return out
