"""Plan the fields of a table from schemas and a few values, and convert the values of columns to rows of a field.

The order is fill, cast, then categories; a list becomes several numbers of a row. All arithmetic on values is done
here, not in an engine, so that every engine gives the same bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from hoploom.config.values import as_key
from hoploom.errors import ConfigError, DataError
from hoploom.ingest.tables import diagnose
from hoploom.ingest.tables.diagnose import UnfitError
from hoploom.ingest.tables.engine import Engine
from hoploom.ingest.tables.graph_file import ColumnRule, EdgeTable, rule_of
from hoploom.ingest.tables.sources import TableSource
from hoploom.schema import DTYPES, Field

Values = np.ndarray[Any, np.dtype[Any]]
FLOATS = ("float16", "bfloat16", "float32", "float64")
MOST_SQUARED = 1e145  # largest number to standardise: the sum of a column's squares is still finite
NULL = "is null; give a value, or fill nulls with columns.<name>.fill"
NUMBERS = ("integer", "floating", "boolean", "decimal", "date", "timestamp")  # kinds of Arrow types
UNIT = 1127  # so that every float64 is a multiple of 2 ** -UNIT
EXACT = ("float64", "int64")  # dtypes that hold microseconds since 1970 exactly
STORED = {"uint16": "int32", "uint32": "int64", "uint64": "int64", "halffloat": "float16"}  # Arrow's name -> a store's
STORED |= {"float": "float32", "double": "float64"}


@dataclass(frozen=True)
class SourceColumn:
    """A column of a table, and the way in which its values become numbers."""

    name: str
    type: pa.DataType  # in the user's file, not in the engine; for lists: of the elements
    width: int | None  # length of the lists; None if values are not lists
    rule: ColumnRule
    words: pa.Array | None = None  # the categories, in order
    null: float | int | None = None  # replaces a null

    @property
    def result(self) -> pa.DataType:
        """The type of the values after the cast."""
        return self.type if self.rule.cast is None else pa.type_for_alias(self.rule.cast)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values that the column adds to each row of the field: () for one number."""
        if self.rule.categories == "one-hot":
            assert self.words is not None
            return (len(self.words),)
        return () if self.width is None else (self.width,)

    @property
    def extent(self) -> int:
        """The number of values that the column adds to each row of the field."""
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True)
class FieldColumns:
    """A field of the store, and the columns from which its values are made."""

    name: str
    field: Field  # as it is stored
    columns: tuple[SourceColumn, ...]
    limit: int | None = None  # labels must be below
    weights: bool = False  # values must be finite and not negative

    @property
    def standardised(self) -> tuple[int, ...]:
        """The indices, in a row, of the values that are standardised after all rows have arrived."""
        chosen = [column.rule.standardise for column in self.columns for _ in range(column.extent)]
        return tuple(index for index, one in enumerate(chosen) if one)

    @property
    def arriving(self) -> Field:
        """The field before it is standardised: float64 if some values will be standardised."""
        return Field("float64", self.field.shape) if self.standardised else self.field

    def unlabelled(self, rows: Tensor) -> Tensor:
        """Return which labels are missing, [n] bool: null in the table, or the number that means null."""
        null = self.columns[0].null
        assert null is not None
        return rows.isnan() if isinstance(null, float) else rows.eq(null)

    def numbers(self, column: SourceColumn, given: pa.Array) -> Values:
        """Return the values `given` of a column as numbers; raise UnfitError if some cannot be stored."""
        values = numbers_of(column, given)
        check_range(values, self.arriving.dtype)
        if column.rule.standardise:
            large = np.abs(values.astype(np.float64)) > MOST_SQUARED  # no float32 is as large
            _refuse(values, large, "too large to be standardised; correct it, or make it null")
        if self.weights:
            wrong = ~(np.isfinite(values) & (values >= 0))
            _refuse(values, wrong, "but weights are finite, and none is negative; correct it")
        if self.limit is not None and values.size:
            wrong = (values >= self.limit) | ((values < 0) & (values != column.null))
            _refuse(values, wrong, f"not in [0, {self.limit}); correct it, or num_classes")
        return values


def _refuse(values: Values, wrong: Values, why: str) -> None:
    """Raise UnfitError that names the first value for which `wrong` is true, if there is one."""
    if wrong.any():
        raise UnfitError(f"holds {values[wrong][0]}, {why}")


def numbers_of(column: SourceColumn, given: pa.Array) -> Values:
    """Return the values `given` of a column as numbers: [n] or [n, extent]. Raise UnfitError if that is impossible."""
    count = len(given)
    if column.width is not None:  # the elements of lists; a null list gives nulls
        lengths = pc.list_value_length(given)
        wrong = given.filter(pc.and_(given.is_valid(), pc.not_equal(lengths, column.width)))
        if len(wrong):
            message = f"has a list of {len(wrong[0])} values, others have {column.width}; give lists of one length"
            raise UnfitError(message)
        if given.null_count:
            nulls = pa.array([[None] * column.width], given.type)
            given = pc.coalesce(given, nulls[0])
        given = given.flatten()
    given = prepared(column, given)
    if column.words is not None:
        return _categories(column, given)
    given = _plain(given)
    if column.null is not None and given.null_count:
        if isinstance(column.null, float):
            given = given if pa.types.is_floating(given.type) else given.cast(pa.float64(), safe=False)
        else:
            try:
                given = given.cast(pa.int64())
            except pa.ArrowInvalid as error:
                raise UnfitError("holds a number that does not fit int64; write labels from 0") from error
        given = given.fill_null(pa.scalar(column.null, given.type))
    if given.null_count:
        raise UnfitError(NULL)
    values: Values = given.to_numpy(zero_copy_only=False)
    return signed(values).reshape(count, *column.shape)


def signed(values: Values) -> Values:
    """Return `values` in a dtype that torch computes with: uint16 and wider as int64 or float64, bool as uint8."""
    if values.dtype == np.bool_:
        return values.view(np.uint8)
    if values.dtype.kind != "u" or values.dtype.itemsize == 1:
        return values
    fits = values.dtype.itemsize < 8 or not values.size or values.max() < 2**63
    return values.astype(np.int64 if fits else np.float64)


def prepared(column: SourceColumn, given: pa.Array) -> pa.Array:
    """Return `given` with the type of the user's file, then filled and cast as the column's rule says."""
    given = _typed(given, column.type)
    if column.rule.categories is not None:
        given = _comparable(given)
    if column.rule.fill is not None:
        given = given.fill_null(pa.scalar(column.rule.fill, given.type))
    if column.rule.cast is not None:
        given = _cast(given, column.result)
    return given if column.rule.categories is None else _comparable(given)


# --- one step each --------------------------------------------------------------------------


def _typed(given: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Cast `given` back to `wanted`, the type in the user's file, because an engine may have returned a wider type."""
    if pa.types.is_dictionary(given.type):
        given = given.dictionary_decode()
    wanted = wanted.value_type if pa.types.is_dictionary(wanted) else wanted
    if given.type == wanted:
        return given
    if given.null_count == len(given):
        return pa.nulls(len(given), wanted)
    if pa.types.is_timestamp(wanted):  # in UTC anyway; the zone is for display
        given = given.cast(pa.timestamp(given.type.unit)) if pa.types.is_timestamp(given.type) else given
        return given.cast(pa.timestamp(wanted.unit))
    return given.cast(wanted, safe=False)


def _cast(given: pa.Array, wanted: pa.DataType) -> pa.Array:
    if pa.types.is_integer(wanted) and pa.types.is_floating(given.type):  # there is no integer for NaN
        given = pc.if_else(pc.is_nan(given), pa.scalar(None, given.type), given)
    try:
        made = given.cast(wanted, safe=not pa.types.is_floating(wanted))
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise UnfitError(f"cannot be cast to {wanted}: {reason}; correct it, or leave the cast out") from error
    if pa.types.is_float64(given.type) and pa.types.is_float32(wanted):
        lost = pc.and_(pc.is_finite(given), pc.is_inf(made))
        if pc.any(lost).as_py():
            raise UnfitError(f"holds {given.filter(lost)[0]}, too large for float32; cast it to float64")
    return made


def _comparable(given: pa.Array) -> pa.Array:
    """Return floats in a form that can be compared: -0.0 as 0.0, NaN as null."""
    if not pa.types.is_floating(given.type):
        return given
    given = given.cast(pa.float32()) if pa.types.is_float16(given.type) else given
    given = pc.if_else(pc.is_nan(given), pa.scalar(None, given.type), given)
    return pc.add(given, pa.scalar(0, given.type))


def _categories(column: SourceColumn, given: pa.Array) -> Values:
    assert column.words is not None
    if given.null_count and column.null is None:
        raise UnfitError(NULL)
    found = pc.index_in(given, value_set=column.words)
    unknown = pc.and_(found.is_null(), given.is_valid())
    if pc.any(unknown).as_py():
        raise UnfitError(f"holds {given.filter(unknown)[0]!s:.60}, which it did not before; is it being written?")
    codes: Values = found.fill_null(-1 if column.null is None else column.null).to_numpy().astype(np.int64)
    if column.rule.categories == "codes":
        return codes
    rows = np.zeros((len(codes), len(column.words)), np.uint8)
    rows[np.arange(len(codes)), codes] = 1
    return rows


def _plain(given: pa.Array) -> pa.Array:
    """Return decimals as float64, and dates and timestamps as microseconds since 1970: int64."""
    if pa.types.is_decimal(given.type):
        return given.cast(pa.float64())
    if pa.types.is_date(given.type) or pa.types.is_timestamp(given.type):
        return given.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    return given.cast(pa.int8()) if pa.types.is_null(given.type) else given


def check_range(values: Values, dtype: str) -> None:
    """Raise UnfitError if `dtype` cannot hold a value: a fraction in an integer dtype, or too large a number."""
    exact = dtype == "float64" or (dtype == "float32" and values.dtype != np.float64)
    if exact or not values.size or str(values.dtype) == dtype:
        return
    if dtype in FLOATS:
        with np.errstate(over="ignore"):
            stored = torch.from_numpy(values.astype(np.float32)).to(DTYPES[dtype])
        if not torch.equal(torch.isfinite(stored), torch.from_numpy(np.isfinite(values))):
            large = values.reshape(-1)[np.nanargmax(np.where(np.isfinite(values), np.abs(values), 0))]
            raise UnfitError(f"holds {large}, too large for {dtype}; choose a wider dtype")
        return
    least, most = (0, 1) if dtype == "bool" else (torch.iinfo(DTYPES[dtype]).min, torch.iinfo(DTYPES[dtype]).max)
    _refuse(values, ~np.isfinite(values) | (np.floor(values) != values), f"which is no {dtype}; choose another dtype")
    for extreme in (values.min(), values.max()):
        if not least <= int(extreme) <= most:
            raise UnfitError(f"holds {extreme}, which does not fit {dtype}; choose a wider dtype")


# --- standardising, which needs the sums of all rows --------------------------------------------


def measured(engine: Engine, planned: "TableFields") -> "TableFields":
    """Return the fields with the means and standard deviations of the columns to standardise, over all rows.

    NaN is left out, and a constant column becomes zeros. Sums are exact integers, so that no order of rows, thread or
    executor changes a bit of the mean, or of the sum of squared distances from it.
    """
    some = replace(planned, fields=[field for field in planned.fields if field.standardised])
    if not some.fields:
        return planned
    rows = engine.read(some.source.paths)
    rows = rows.select(**{alias: rows[name] for name, alias in some.aliases.items()})
    zeros = {field.name: np.zeros(len(field.standardised)) for field in some.fields}
    means = _mean(engine.fold(rows, partial(_sums, some, zeros, 1), some.row_bytes), zeros)
    squares = _mean(engine.fold(rows, partial(_sums, some, means, 2), some.row_bytes), zeros)
    deviations = {name: np.where(own == 0, 1.0, np.sqrt(own)) for name, own in squares.items()}
    fields = []
    for field in planned.fields:
        stored, width = field.field, prod(field.field.shape)
        if field.standardised:
            mean, deviation = np.zeros(width), np.ones(width)
            mean[list(field.standardised)] = means[field.name]
            deviation[list(field.standardised)] = deviations[field.name]
            stored = replace(stored, mean=tuple(mean.tolist()), deviation=tuple(deviation.tolist()))
        fields.append(replace(field, field=stored))
    return replace(planned, fields=fields)


def _sums(planned: "TableFields", centres: Mapping[str, Values], power: int, batches: Iterator[pa.RecordBatch]) -> Any:
    """Return, by field, the numbers of values that are not NaN, and exact sums of powers of distances to `centres`."""
    found = {name: [[0, 0] for _ in centre] for name, centre in centres.items()}
    for batch in batches:
        rows = planned.rows(batch)
        for field in planned.fields:
            values = rows[field.name].view(batch.num_rows, -1)[:, list(field.standardised)].numpy()
            for own, column, centre in zip(found[field.name], values.T, centres[field.name], strict=True):
                given = column[~np.isnan(column)]
                own[0] += given.size
                own[1] += exact_sum((given - centre) ** power)
    return found


def _mean(found: Sequence[Mapping[str, Sequence[Sequence[int]]]], like: Mapping[str, Values]) -> dict[str, Values]:
    """Return, by field, the means that follow from what `_sums` has returned for each share of the rows."""
    means = {}
    for name in like:
        totals = [
            [sum(part) for part in zip(*own, strict=True)] for own in zip(*(each[name] for each in found), strict=True)
        ]
        means[name] = np.array([float(Fraction(total, max(count, 1) << UNIT)) for count, total in totals])
    return means


def exact_sum(values: Values) -> int:
    """Return the sum of finite float64 values, without rounding, in units of 2 ** -UNIT."""
    fractions, exponents = np.frexp(values)
    whole = np.ldexp(fractions, 53).astype(np.int64)
    kinds, places = np.unique(exponents, return_inverse=True)
    halves = (np.bincount(places, half).tolist() for half in (whole >> 27, whole & (1 << 27) - 1))  # below 2 ** 53
    return sum(
        (int(high) << 27) + int(low) << int(kind) + UNIT - 53 for kind, high, low in zip(kinds, *halves, strict=True)
    )


# --- planning -------------------------------------------------------------------------------


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
        table, features, found = self.source.table, self.source.features, list[FieldColumns]()
        if features:
            name = "edge_attr" if isinstance(table, EdgeTable) else "x"
            found.append(self._field("features", name, features, table.dtype))
        if isinstance(table, EdgeTable):
            if table.weight:
                found.append(self._field("weight", "weight", [table.weight], "float32"))
        elif table.label:
            found.append(replace(self._field("label", "y", [table.label]), limit=table.num_classes))
        if table.time:
            found.append(self._field("time", "time", [table.time]))
        found += [self._field(f"fields.{as_key(name)}", name, [column]) for name, column in table.fields.items()]
        return TableFields(self.source, found)

    def _field(self, key: str, name: str, names: Sequence[str], dtype: str | None = None) -> FieldColumns:
        """Plan the field `name` for the key `key`, made of the columns `names`. dtype=None takes the key's default."""
        columns = tuple(self._column(key, name, dtype) for name in names)
        shape = (sum(column.extent for column in columns),) if key == "features" else columns[0].shape
        dtype = dtype or self._own_dtype(key, columns[0])
        for column in columns:
            if column.rule.standardise and dtype not in FLOATS:
                raise self._column_problem(column.name, f"{name} is {dtype}, but what is standardised are fractions")
        return FieldColumns(name, Field(dtype, shape), columns, weights=key == "weight")

    def _column(self, key: str, name: str, dtype: str | None) -> SourceColumn:
        rule = rule_of(self.source.table, name)
        given, width = self.source.schema.field(name).type, None
        if pa.types.is_list(given) or pa.types.is_fixed_size_list(given):
            if pa.types.is_fixed_size_list(given):
                width = given.list_size
            else:  # lists of other lengths than the first are errors when rows are read
                lists = chain.from_iterable(values.drop_null() for _, _, values in self.source.scan(name, 1024))
                if (first := next(lists, None)) is None:
                    where = f"column {name!r} of {self.source.owner}"
                    raise DataError(f"{self.source.origins[0]}: {where} holds no list at all")
                width = len(first)
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
        is_number = any(getattr(pa.types, f"is_{kind}")(column.result) for kind in NUMBERS)
        if words is None and not is_number:
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
        if key != "label" or column.shape:
            return column
        is_fraction = (rule.standardise or _dtype_of(column.result) in FLOATS) and rule.categories is None
        return replace(column, null=float("nan") if is_fraction else -1)

    def _no_number(self, column: SourceColumn, key: str) -> str:
        """Return text for an error: the first value of a column that is not a number, where it is, and a hint."""
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

    def _words(self, column: SourceColumn) -> pa.Array:
        """Return the categories of a column: its distinct values in ascending order."""
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
        """Return the dtype that a field for the key `key` has by default, if its values come from `column`."""
        held = {"codes": "int64", "one-hot": "uint8", None: _dtype_of(column.result)}[column.rule.categories]
        if column.rule.standardise:
            return "float32"
        if key == "label":
            return "float32" if held in FLOATS or column.shape else "int64"
        if key == "time" and (held in FLOATS or held == "bool" or column.shape):
            message = f"column {column.name!r} is {column.result}; times are integers or timestamps"
            raise self.source.problem(key, message)
        return "int64" if key == "time" else held


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
        """These fields reduced to the label; None if there is no label, or if labels cannot be missing."""
        found = [field for field in self.fields if field.columns[0].null is not None]
        return replace(self, fields=found) if found else None

    @property
    def aliases(self) -> dict[str, str]:
        """The alias of each column in the engine: c0, c1, ..., because names may have special characters."""
        names = dict.fromkeys(column.name for field in self.fields for column in field.columns)
        return {name: f"c{index}" for index, name in enumerate(names)}

    @property
    def row_bytes(self) -> int:
        """The approximate bytes of a row with its ids."""
        return 16 + sum(field.field.row_bytes for field in self.fields)

    def rows(self, batch: pa.RecordBatch) -> dict[str, Tensor]:
        """Return the rows of every field; raise DataError that names the first row that cannot be used."""
        arrays = {name: batch.column(alias) for name, alias in self.aliases.items()}
        found = {field.name: self._rows(field, arrays, batch.num_rows) for field in self.fields}
        for name, stored in ((field.name, field.field) for field in self.fields if field.field.mean):
            mean, deviation = (np.array(numbers).reshape(stored.shape) for numbers in (stored.mean, stored.deviation))
            found[name] = torch.from_numpy((found[name].numpy() - mean) / deviation).to(DTYPES[stored.dtype])
        return found

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
            if target.dtype == torch.bfloat16:  # NumPy has none
                target.copy_(torch.from_numpy(values.astype(np.float32)).view(target.shape))
            else:
                np.copyto(target.numpy(), values.reshape(tuple(target.shape)), casting="unsafe")
            begin += column.extent
        return out
