"""Which columns of a table are used and for what, found among the names that its files have."""

import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hoploom.config.toml import as_key, quoted
from hoploom.config.values import nearest
from hoploom.errors import ConfigError
from hoploom.ingest.tables.graph_file import EdgeTable, GraphFile, NodeTable
from hoploom.ingest.tables.places import MAGIC

if TYPE_CHECKING:
    import pyarrow as pa

Table = NodeTable | EdgeTable
SHOWN = 12  # names in a message


def id_columns(table: Table) -> dict[str, str]:
    """The columns with ids, by their key."""
    if isinstance(table, EdgeTable):
        return {"source": table.source, "destination": table.destination}
    return {} if table.id is None else {"id": table.id}


def single_columns(table: Table) -> dict[str, str]:
    """The columns of one role each, by their key."""
    roles = ("time", "weight") if isinstance(table, EdgeTable) else ("label", "time", "split")
    given = {role: getattr(table, role) for role in roles}
    found = id_columns(table) | {role: column for role, column in given.items() if isinstance(column, str)}
    return found | {f"fields.{as_key(field)}": column for field, column in table.fields.items()}


def features_of(recipe: GraphFile, table: Table, names: Sequence[str], shown: str) -> tuple[str, ...]:
    """The feature columns in their order. A glob leaves out what has another role."""
    at = f"{table.owner}.features"
    others = set(single_columns(table).values())
    found: list[str] = []
    for pattern in table.features:
        is_glob = pattern not in names and any(sign in pattern for sign in MAGIC)
        matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)] if is_glob else [pattern]
        new = [name for name in matching if name not in found and not (is_glob and name in others)]
        if is_glob and not matching:
            raise recipe.problem(at, f"{at}: no column of {shown} matches {quoted(pattern)}; {_listed(names)}")
        if not is_glob and not new:
            raise recipe.problem(at, f"{at} names {quoted(pattern)} twice; drop one")
        found += new
    return tuple(found)


def used_columns(table: Table, features: Sequence[str]) -> tuple[str, ...]:
    """Every column that is read, once."""
    return tuple(dict.fromkeys([*single_columns(table).values(), *features]))


def check_columns(recipe: GraphFile, table: Table, features: Sequence[str], names: Sequence[str], shown: str) -> None:
    """Raise ConfigError unless a file has every column, once whatever the case, and every rule is for one of them."""
    for role, column in [*single_columns(table).items(), *(("features", column) for column in features)]:
        if column not in names or sum(name.lower() == column.lower() for name in names) > 1:
            raise _not_there(recipe, f"{table.owner}.{role}", column, names, shown)
    used = used_columns(table, features)
    for column in table.columns:
        if column not in used:
            at = f"{table.owner}.columns.{as_key(column)}"
            alike = nearest(column, used)
            hint = f"did you mean {quoted(alike)}?" if alike else f"used are {', '.join(map(quoted, used[:SHOWN]))}"
            raise recipe.problem(at, f"{at}: no key uses a column {quoted(column)}; {hint}")


def _not_there(recipe: GraphFile, at: str, column: str, names: Sequence[str], shown: str) -> ConfigError:
    if column in names:
        same = ", ".join(quoted(name) for name in names if name.lower() == column.lower())
        return recipe.problem(at, f"{at}: {shown} has columns {same}, which engines take for one; rename one")
    alike = nearest(column, names)
    hint = f"did you mean {quoted(alike)}?" if alike else _listed(names)
    return recipe.problem(at, f"{at}: {shown} has no column {quoted(column)}; {hint}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"its columns are {', '.join(map(quoted, names[:SHOWN]))}{more}"


def plain_type(kind: "pa.DataType") -> "pa.DataType":
    """The type of the values, however they are held in memory: dictionaries, views and large offsets are no types."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(plain_type(kind.value_type))
    return kind


def plain_schema(schema: "pa.Schema", names: Sequence[str]) -> "pa.Schema":
    """Some columns of a schema, in this order, with their plain types."""
    import pyarrow as pa

    return pa.schema([(name, plain_type(schema.field(name).type)) for name in names])
