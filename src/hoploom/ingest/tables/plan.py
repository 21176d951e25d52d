"""Which columns make which field, and of what dtype: decided from schemas and a few values, before rows are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hoploom.config.toml import as_key
from hoploom.errors import DataError, HoploomError
from hoploom.ingest.tables.engine import Engine
from hoploom.ingest.tables.graph_file import ColumnRule, EdgeTable, GraphFile, NodeTable
from hoploom.ingest.tables.scan import scan
from hoploom.ingest.tables.sources import Source
from hoploom.ingest.tables.transforms import FLOATS, Column, FieldColumns, fill_scalar, prepared
from hoploom.schema import DTYPES, Field

if TYPE_CHECKING:
    import pyarrow as pa

MOST_ONE_HOT, MOST_CODES = 4096, 1_000_000
MOST_BYTES = 16 << 20  # of categories: they are kept in memory
EXACT = ("float64", "int64")  # hold microseconds since 1970
STORED = {"uint16": "int32", "uint32": "int64", "uint64": "int64", "halffloat": "float16"}
STORED |= {"float": "float32", "double": "float64"}  # as Arrow calls them -> as a store does


@dataclass(frozen=True)
class Role:
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
    source: Source

    def field(self, role: Role) -> FieldColumns:
        """The field of a role; ConfigError or DataError where its columns cannot make one."""
        columns = tuple(self._column(role, name) for name in role.columns)
        one = columns[0]
        shape = (
            one.shape
            if len(columns) == 1 and role.field not in ("x", "edge_attr")
            else (sum(c.extent for c in columns),)
        )
        dtype = role.dtype or self._own_dtype(role, one)
        chosen = [column.name for column in columns if column.rule.standardise]
        if chosen and isinstance(self.table, EdgeTable):
            message = "only columns of nodes are standardised, whose rows have an order to sum them in"
            raise self._problem(role, f"{message}; do it in the table", chosen[0])
        if chosen and dtype not in FLOATS:
            raise self._problem(role, f"{role.field} is {dtype}, but what is standardised are fractions", chosen[0])
        return FieldColumns(role.field, Field(dtype, shape), columns, role.limit, role.key == "weight")

    def _column(self, role: Role, name: str) -> Column:
        import pyarrow as pa

        rule = self.table.columns.get(name, ColumnRule())
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
        column = Column(name, given, width, rule)
        words = self._words(role, column) if rule.categories is not None else None
        if words is None and not _is_number(column.result):
            hint = f'give columns.{as_key(name)} a cast, or categories = "codes"'
            raise self._problem(role, f"column {name!r} is {column.result}, not a number; {hint}")
        column = replace(column, words=words)
        self._check_use(role, column)
        return replace(column, null=_null(column)) if role.key == "label" else column

    def _check_use(self, role: Role, column: Column) -> None:
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

    def _words(self, role: Role, column: Column) -> "pa.Array":
        """The categories of a column, in order."""
        import pyarrow as pa
        from pyarrow import compute

        if column.width is not None:
            raise self._problem(role, f"column {column.name!r} holds lists, which have no categories")
        most = MOST_ONE_HOT if column.rule.categories == "one-hot" else MOST_CODES
        rows = self.engine.read(self.source.paths)
        distinct = rows.select(word=rows[column.name]).distinct().limit(most + 1)
        found, count, size = [], 0, 0
        for batch in self.engine.stream(distinct, 256):
            found.append(prepared(column, batch.column(0)).drop_null())
            count, size = count + batch.num_rows, size + found[-1].nbytes
            if count > most or size > MOST_BYTES:
                way_out = 'categories = "codes"' if most == MOST_ONE_HOT else "numbers in the table"
                bound = f"{most} values" if count > most else f"{MOST_BYTES >> 20} MB of values"
                raise self._problem(role, f"column {column.name!r} has more than {bound}; use {way_out}")
        if not any(map(len, found)):
            raise self._problem(role, f"column {column.name!r} holds nulls only, so there are no categories")
        words = pa.concat_arrays(found).unique()
        return words.take(compute.array_sort_indices(words))

    def _own_dtype(self, role: Role, column: Column) -> str:
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

    def _problem(self, role: Role, message: str, column: str | None = None) -> HoploomError:
        at = f"{self.table.owner}.{role.key}" if column is None else f"{self.table.owner}.columns.{as_key(column)}"
        return self.recipe.problem(at, f"{at}: {message}")


def _null(column: Column) -> float | int | None:
    """What stands for a label that is not known."""
    if column.shape:
        return None
    is_code = column.rule.categories is not None
    is_fraction = column.rule.standardise or _dtype_of(column.result) in FLOATS
    return float("nan") if is_fraction and not is_code else -1


def _is_number(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    types = pa.types
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_date, types.is_timestamp)
    return any(test(kind) for test in tests)


def _is_moment(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def _dtype_of(kind: "pa.DataType") -> str:
    import pyarrow as pa

    if pa.types.is_decimal(kind):
        return "float64"
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return "int64"
    name = STORED.get(str(kind), str(kind))
    return name if name in DTYPES else "int64"


def row_bytes(fields: Sequence[FieldColumns]) -> int:
    """Of a row with its ids, about."""
    return 16 + sum(field.field.row_bytes for field in fields)


def arrays_of(batch: "pa.RecordBatch", columns: Mapping[str, str]) -> "dict[str, Any]":
    """The columns of a batch by the names that the table gives them; `columns`: name -> as the engine calls it."""
    return {name: batch.column(alias) for name, alias in columns.items()}
