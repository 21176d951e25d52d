"""Which columns of a table are used and for what, and whether ids are integers or text: the same at both ends."""

import fnmatch
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from hoploom.config.values import as_key, nearest, quoted
from hoploom.errors import ConfigError, DataError
from hoploom.ingest.tables.files import MAGIC
from hoploom.ingest.tables.graph_file import ColumnRule, EdgeTable, GraphFile, NodeTable
from hoploom.ingest.tables.table_source import TableSource, scan

Table = NodeTable | EdgeTable
SHOWN = 12  # names in a message
INTEGERS, TEXT = "integers", "text"  # what ids are


def rule_of(table: Table, column: str) -> ColumnRule:
    """What is done to a column; nothing where no rule is given."""
    return table.columns.get(column, ColumnRule())


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


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values, however they are held in memory: dictionaries, views and large offsets are no types."""
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


def plain_schema(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """Some columns of a schema, in this order, with their plain types."""
    return pa.schema([(name, plain_type(schema.field(name).type)) for name in names])


# --- ids -----------------------------------------------------------------------------------------


def id_kind(source: TableSource | None, table: Table, column: str | None) -> str:
    """Whether a column's ids are integers or text once they are cast. Without a table they are integers."""
    if source is None or column is None:
        return INTEGERS
    is_text = pa.types.is_string(source.schema.field(column).type)
    return TEXT if is_text or rule_of(table, column).cast == "string" else INTEGERS


def check_ids(recipe: GraphFile, sources: Mapping[str, TableSource]) -> None:
    """Raise ConfigError or DataError unless all ids are integers or text, as their nodes' are."""
    tables: list[Table] = [*recipe.nodes.values(), *recipe.edges.values()]
    for table in tables:
        for role, column in id_columns(table).items():
            if table.owner in sources:
                _check_type(recipe, table, role, column, sources[table.owner])
    for edges in recipe.edges.values():
        for (role, column), name in zip(id_columns(edges).items(), edges.relation[::2], strict=True):
            nodes = recipe.nodes[name]
            ends = id_kind(sources[edges.owner], edges, column)
            if ends != id_kind(sources.get(nodes.owner), nodes, nodes.id):
                raise _mismatch(recipe, (edges, role), nodes, sources)


def _check_type(recipe: GraphFile, table: Table, role: str, column: str, source: TableSource) -> None:
    kind = source.schema.field(column).type
    at = f"{table.owner}.{role}"
    what = f"{at}: column {column} of {source.origins[0]} is {kind}"
    if not pa.types.is_string(kind) and not pa.types.is_integer(kind):
        raise recipe.problem(at, f"{what}; ids are integers or text, so write it as one of them")
    if pa.types.is_string(kind) and rule_of(table, column).cast == "int64":
        key = f"{table.owner}.columns.{as_key(column)}.cast"
        raise recipe.problem(key, f'{what}; only CSV is read as "int64", so write integers or leave the cast out')
    for file, before, ids in scan(source, column) if kind == pa.uint64() else ():
        at_row = pc.index(pc.greater(ids, pa.scalar(2**63 - 1, kind)), True).as_py()
        if at_row >= 0:
            found = f"{file}, row {before + at_row + 1}: {column} is {ids[at_row]}"
            raise DataError(f"{found}; integer ids are below 2**63, so write them as text")


def _mismatch(
    recipe: GraphFile, end: tuple[Table, str], nodes: NodeTable, sources: Mapping[str, TableSource]
) -> ConfigError:
    edges, role = end
    at, column, source = f"{edges.owner}.{role}", id_columns(edges)[role], sources[edges.owner]
    ends = f"{at}: column {column} of {source.origins[0]} is {source.schema.field(column).type}"
    if nodes.id is None:
        return recipe.problem(at, f"{ends}, but {nodes.owner} has a count, so its ids are integers; give it files")
    theirs = sources[nodes.owner]
    other = f"{nodes.id} of {theirs.origins[0]}, the id of {nodes.owner}, is {theirs.schema.field(nodes.id).type}"
    text_at_edges = id_kind(source, edges, column) == TEXT
    owner, cast = (nodes.owner, nodes.id) if text_at_edges else (edges.owner, column)
    return recipe.problem(at, f'{ends}, but {other}; cast one: [{owner}.columns.{as_key(cast)}] cast = "string"')
