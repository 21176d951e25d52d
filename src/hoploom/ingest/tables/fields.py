"""Which columns make which field, and of what dtype: decided from schemas and a few values, before rows are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from hoploom.config.toml import as_key
from hoploom.errors import DataError, HoploomError
from hoploom.ingest.tables import diagnose
from hoploom.ingest.tables.columns import rule_of
from hoploom.ingest.tables.diagnose import UnfitError
from hoploom.ingest.tables.engine import Engine
from hoploom.ingest.tables.graph_file import EdgeTable, GraphFile, NodeTable
from hoploom.ingest.tables.table_source import TableSource, scan
from hoploom.ingest.tables.transforms import FLOATS, FieldColumns, SourceColumn, fill_scalar, prepared, write_numbers
from hoploom.schema import DTYPES, Field

EXACT = ("float64", "int64")  # hold microseconds since 1970
STORED = {"uint16": "int32", "uint32": "int64", "uint64": "int64", "halffloat": "float16"}
STORED |= {"float": "float32", "double": "float64"}  # as Arrow calls them -> as a store does


@dataclass(frozen=True)
class FieldRole:
    """What some columns are for."""

    key: str  # of the recipe: label
    field: str  # of the store: y
    columns: Sequence[str]
    dtype: str | None = None  # None: what the columns hold
    limit: int | None = None  # labels are below


@dataclass(frozen=True)
class Planner:
    """Makes fields of one table's columns."""

    engine: Engine
    recipe: GraphFile
    table: NodeTable | EdgeTable
    source: TableSource
    most_codes: int = 1_000_000
    most_one_hot: int = 4096
    most_bytes: int = 16 << 20  # of categories: they are kept in memory

    def fields(self) -> "TableFields":
        """Every field that the table's keys ask for; ConfigError or DataError where its columns cannot make one."""
        table, is_edges = self.table, isinstance(self.table, EdgeTable)
        roles = [FieldRole("time", "time", [table.time])] if table.time else []
        roles += [FieldRole(f"fields.{name}", name, [column]) for name, column in table.fields.items()]
        if isinstance(table, NodeTable) and table.label:
            roles.insert(0, FieldRole("label", "y", [table.label], limit=table.num_classes))
        if isinstance(table, EdgeTable) and table.weight:
            roles.insert(0, FieldRole("weight", "weight", [table.weight], "float32"))
        if self.source.features:
            name = "edge_attr" if is_edges else "x"
            roles.insert(0, FieldRole("features", name, self.source.features, table.dtype))
        return TableFields(self.source, [self._field(role) for role in roles])

    def _field(self, role: FieldRole) -> FieldColumns:
        columns = tuple(self._column(role, name) for name in role.columns)
        shape = (sum(column.extent for column in columns),) if role.key == "features" else columns[0].shape
        dtype = role.dtype or self._own_dtype(role, columns[0])
        chosen = [column.name for column in columns if column.rule.standardise]
        if chosen and isinstance(self.table, EdgeTable):
            message = "only columns of nodes are standardised, whose rows have an order to sum them in"
            raise self._problem(role, f"{message}; do it in the table", chosen[0])
        if chosen and dtype not in FLOATS:
            raise self._problem(role, f"{role.field} is {dtype}, but what is standardised are fractions", chosen[0])
        return FieldColumns(role.field, Field(dtype, shape), columns, role.limit, role.key == "weight")

    def _column(self, role: FieldRole, name: str) -> SourceColumn:
        rule = rule_of(self.table, name)
        given, width = self.source.schema.field(name).type, None
        if pa.types.is_list(given) or pa.types.is_fixed_size_list(given):
            width = given.list_size if pa.types.is_fixed_size_list(given) else self._first_width(name)
            given = given.value_type
        if rule.fill is not None:
            if pa.types.is_null(given):  # no value says what it is
                given = pa.scalar(rule.fill).type if rule.cast is None else pa.type_for_alias(rule.cast)
            try:
                fill_scalar(rule.fill, given)
            except ValueError as error:
                raise self._problem(role, f"fill: {error}", name) from error
        column = SourceColumn(name, given, width, rule)
        words = self._words(role, column) if rule.categories is not None else None
        if words is None and not _is_number(column.result):
            hint = f'give columns.{as_key(name)} a cast, or categories = "codes"'
            raise self._problem(role, f"column {name!r} is {column.result}, not a number; {hint}")
        column = replace(column, words=words)
        self._check_use(role, column)
        return replace(column, null=_null(column)) if role.key == "label" else column

    def _check_use(self, role: FieldRole, column: SourceColumn) -> None:
        """What some roles cannot take."""
        if role.key == "weight" and column.shape:
            raise self._problem(role, f"column {column.name!r} has {column.extent} numbers a row; a weight is one")
        kept = role.dtype in EXACT or column.rule.standardise or column.words is not None
        if role.key == "features" and _is_moment(column.result) and not kept:
            what = f"column {column.name!r} is {column.result}, whose microseconds {role.dtype} rounds"
            at = f"columns.{as_key(column.name)}"
            raise self._problem(role, f'{what}; give dtype = "float64", or {at}.standardise = true, or leave it out')

    def _first_width(self, name: str) -> int:
        """The length of the first list; where others differ is found on the way."""
        for _, _, values in scan(self.source, name, 1024):
            lists = values.drop_null()
            if len(lists):
                return len(lists[0])
        raise DataError(f"{self.source.origins[0]}: column {name!r} of {self.source.owner} holds no list at all")

    def _words(self, role: FieldRole, column: SourceColumn) -> pa.Array:
        """The categories of a column, in order."""
        if column.width is not None:
            raise self._problem(role, f"column {column.name!r} holds lists, which have no categories")
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
                raise self._problem(role, f"column {column.name!r} has more than {bound}; use {way_out}")
        if not any(map(len, found)):
            raise self._problem(role, f"column {column.name!r} holds nulls only, so there are no categories")
        words = pa.concat_arrays(found).unique()
        return words.take(pc.array_sort_indices(words))

    def _own_dtype(self, role: FieldRole, column: SourceColumn) -> str:
        """The dtype of a field that nobody chose."""
        held = "int64" if column.rule.categories == "codes" else _dtype_of(column.result)
        held = "uint8" if column.rule.categories == "one-hot" else held
        if column.rule.standardise:
            return "float32"
        if role.key == "label":
            return "float32" if held in FLOATS or column.shape else "int64"
        if role.key == "time":
            if held in FLOATS or held == "bool" or column.shape:
                raise self._problem(
                    role, f"column {column.name!r} is {column.result}; times are integers or timestamps"
                )
            return "int64"
        return held

    def _problem(self, role: FieldRole, message: str, column: str | None = None) -> HoploomError:
        at = f"{self.table.owner}.{role.key}" if column is None else f"{self.table.owner}.columns.{as_key(column)}"
        return self.recipe.problem(at, f"{at}: {message}")


def _null(column: SourceColumn) -> float | int | None:
    """What stands for a label that is not known."""
    if column.shape:
        return None
    is_code = column.rule.categories is not None
    is_fraction = column.rule.standardise or _dtype_of(column.result) in FLOATS
    return float("nan") if is_fraction and not is_code else -1


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_date, types.is_timestamp)
    return any(test(kind) for test in tests)


def _is_moment(kind: pa.DataType) -> bool:
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def _dtype_of(kind: pa.DataType) -> str:
    if pa.types.is_decimal(kind):
        return "float64"
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return "int64"
    name = STORED.get(str(kind), str(kind))
    return name if name in DTYPES else "int64"


@dataclass(frozen=True)
class TableFields:
    """The fields of a table, and the columns that make them."""

    source: TableSource
    fields: Sequence[FieldColumns]

    @property
    def aliases(self) -> dict[str, str]:
        """What the engine calls each column, whatever its name."""
        names = dict.fromkeys(column.name for field in self.fields for column in field.columns)
        return {name: f"c{index}" for index, name in enumerate(names)}

    @property
    def row_bytes(self) -> int:
        """Of a row with its ids, about."""
        return 16 + sum(field.field.row_bytes for field in self.fields)

    def rows(self, batch: pa.RecordBatch) -> dict[str, Tensor]:
        """The rows of every field; DataError names the first row that cannot be used."""
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
