"""Ids are integers or text, and the same at both ends of every edge. Only the user casts one to the other."""

from collections.abc import Mapping

from hoploom.config.toml import as_key
from hoploom.errors import ConfigError, DataError
from hoploom.ingest.tables.columns import Table, id_columns
from hoploom.ingest.tables.graph_file import ColumnRule, GraphFile
from hoploom.ingest.tables.locate import find_rows
from hoploom.ingest.tables.sources import Source

INTEGERS, TEXT = "integers", "text"


def id_kind(source: Source, table: Table, column: str) -> str:
    """Whether a column's ids are integers or text once they are cast."""
    import pyarrow as pa

    kind = source.schema.field(column).type
    if pa.types.is_string(kind):
        return TEXT
    return TEXT if table.columns.get(column, ColumnRule()).cast == "string" else INTEGERS


def check_ids(recipe: GraphFile, sources: Mapping[str, Source]) -> None:
    """Raise ConfigError or DataError unless all ids are integers or text, as their nodes' are."""
    tables: list[Table] = [*recipe.nodes.values(), *recipe.edges.values()]
    for table in tables:
        for role, column in id_columns(table).items():
            if table.owner in sources:
                _check_type(recipe, table, role, column, sources[table.owner])
    for edges in recipe.edges.values():
        for role, column, node_type in (
            ("source", edges.source, edges.relation[0]),
            ("destination", edges.destination, edges.relation[2]),
        ):
            nodes = recipe.nodes[node_type]
            ends = id_kind(sources[edges.owner], edges, column)
            theirs = INTEGERS
            if nodes.id is not None and nodes.owner in sources:
                theirs = id_kind(sources[nodes.owner], nodes, nodes.id)
            if ends != theirs:
                raise _mismatch(recipe, edges, role, sources, nodes.owner)


def _check_type(recipe: GraphFile, table: Table, role: str, column: str, source: Source) -> None:
    import pyarrow as pa

    kind = source.schema.field(column).type
    at = f"{table.owner}.{role}"
    what = f"{at}: column {column} of {source.origins[0]} is {kind}"
    if not pa.types.is_string(kind) and not pa.types.is_integer(kind):
        raise recipe.problem(at, f"{what}; ids are integers or text, so write it as one of them")
    if pa.types.is_string(kind) and table.columns.get(column, ColumnRule()).cast == "int64":
        key = f"{table.owner}.columns.{as_key(column)}.cast"
        raise recipe.problem(key, f'{what}; only CSV is read as "int64", so write integers or leave the cast out')
    if kind == pa.uint64():
        _check_fits(column, source)


def _check_fits(column: str, source: Source) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    most = pa.scalar(2**63 - 1, pa.uint64())
    spots = find_rows(source, [column], lambda batch: pc.greater(batch.column(0), most), 1)
    if spots:
        raise DataError(f"{spots[0]}: {column} is {spots[0].value}; integer ids are below 2**63, so write them as text")


def _mismatch(
    recipe: GraphFile, edges: Table, role: str, sources: Mapping[str, Source], nodes_owner: str
) -> ConfigError:
    at = f"{edges.owner}.{role}"
    column = id_columns(edges)[role]
    source = sources[edges.owner]
    ends = f"{at}: column {column} of {source.origins[0]} is {source.schema.field(column).type}"
    nodes = next(table for table in recipe.nodes.values() if table.owner == nodes_owner)
    if nodes.id is None:
        return recipe.problem(at, f"{ends}, but {nodes_owner} has a count, so its ids are integers; give it files")
    theirs = sources[nodes_owner]
    other = f"{nodes.id} of {theirs.origins[0]}, the id of {nodes_owner}, is {theirs.schema.field(nodes.id).type}"
    text_at_edges = id_kind(source, edges, column) == TEXT
    owner, cast = (nodes_owner, nodes.id) if text_at_edges else (edges.owner, column)
    return recipe.problem(at, f'{ends}, but {other}; cast one: [{owner}.columns.{as_key(cast)}] cast = "string"')
