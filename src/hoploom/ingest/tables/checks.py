"""What must hold between the keys of graph.toml. What needs the tables is in files.py."""

from typing import Any

from hoploom.config.keys import Only, default_of, key_of, keys_in
from hoploom.config.text import as_key, as_toml
from hoploom.errors import ConfigError
from hoploom.ingest.tables.recipe import ColumnRule, EdgeTable, GraphRecipe, NodeTable
from hoploom.schema import EDGE_ID, ORIGINAL_ID

OF_NODES = ("x", "y", "time", ORIGINAL_ID)  # fields that other keys make
OF_EDGES = ("edge_attr", "weight", "time", EDGE_ID)
NO_NUMBERS = ("string", "bool")


def check(recipe: GraphRecipe) -> None:
    """Raise ConfigError for the first keys that disagree."""
    for node_table in recipe.nodes.values():
        _check_nodes(recipe, node_table)
        _check_shared(recipe, node_table, OF_NODES, (node_table.id,))
    for edge_table in recipe.edges.values():
        _check_edges(recipe, edge_table)
        _check_shared(recipe, edge_table, OF_EDGES, (edge_table.source, edge_table.destination))
    _check_times(recipe)


def _check_nodes(recipe: GraphRecipe, table: NodeTable) -> None:
    if not table.files and table.count is None:
        message = f'{table.owner}.files is missing; add a line such as files = "{table.name}.parquet"'
        raise recipe.problem(table.owner, f"{message}, or count = 1000 where ids are 0 to 999")
    for name, described in keys_in(NodeTable).items():
        only = key_of(described).only
        given = f"{table.owner}.{name}" in recipe.where
        if given and only is not None and not only.allows(getattr(table, only.selector) or None):
            raise _without_say(recipe, table, name, only)
    if table.count is not None:
        for name in ("features", "features_npy", "label", "time", "split", "fields", "columns"):
            if getattr(table, name):
                raise _without_say(recipe, table, name, Only("files"))
    elif table.id is None:
        raise recipe.problem(table.owner, f'{table.owner}.id is missing; add a line such as id = "{table.name}_id"')
    if table.features and table.features_npy:
        raise recipe.problem(f"{table.owner}.features_npy", f"{table.owner} has features and features_npy; drop one")


def _without_say(recipe: GraphRecipe, table: NodeTable, name: str, only: Only) -> ConfigError:
    return recipe.problem(f"{table.owner}.{name}", f"{table.owner}.{name} {only.refusal(None)}")


def _check_edges(recipe: GraphRecipe, table: EdgeTable) -> None:
    source, _, destination = table.relation
    if source != destination:
        for name, why in ("undirected", "its edges join two types; use reverse"), ("self_loops", "it has none"):
            if getattr(table, name) != default_of(keys_in(EdgeTable)[name]):
                message = (
                    f"{table.owner}.{name} = {as_toml(getattr(table, name))} is for relations of a type with itself"
                )
                raise recipe.problem(f"{table.owner}.{name}", f"{message}: {why}")
    if table.reverse is None:
        return
    at = f"{table.owner}.reverse"
    if table.undirected:
        raise recipe.problem(at, f"{at} has no say beside undirected, which counts both directions; drop one")
    if " " in table.reverse:
        raise recipe.problem(at, f"{at} is {as_toml(table.reverse)}; give the name only, without types and spaces")
    turned = (destination, table.reverse, source)
    others = [other for other in recipe.edges.values() if other is not table]
    if turned == table.relation or turned in [other.relation for other in others]:
        raise recipe.problem(at, f"{at}: there is a relation {as_toml(' '.join(turned))} already; give another name")
    for other in others:
        if other.reverse and turned == (other.relation[2], other.reverse, other.relation[0]):
            raise recipe.problem(at, f"{at}: {other.owner} makes {as_toml(' '.join(turned))} too; give another name")


def _check_shared(
    recipe: GraphRecipe, table: NodeTable | EdgeTable, made: tuple[str, ...], ids: tuple[str | None, ...]
) -> None:
    has_features = table.features or (isinstance(table, NodeTable) and table.features_npy)
    if f"{table.owner}.dtype" in recipe.where and not has_features:
        raise recipe.problem(f"{table.owner}.dtype", f"{table.owner}.dtype has no say without features; leave it out")
    for name in table.fields:
        if name in made or not name.strip() or not name.isprintable():
            at = f"{table.owner}.fields.{as_key(name)}"
            raise recipe.problem(at, f"{at}: a field {as_toml(name)} cannot be given; choose another name")
    for column, rule in table.columns.items():
        _check_rule(recipe, f"{table.owner}.columns.{as_key(column)}", rule, is_id=column in ids)


def _check_rule(recipe: GraphRecipe, at: str, rule: ColumnRule, *, is_id: bool) -> None:
    def refuse(key: str, message: str) -> ConfigError:
        return recipe.problem(f"{at}.{key}", f"{at}.{key} {message}")

    given: dict[str, Any] = {name: getattr(rule, name) for name in keys_in(ColumnRule)}
    if is_id:
        for name in ("fill", "categories", "standardise"):
            if given[name] is not None and given[name] is not False:  # a fill of 0 is one
                raise refuse(name, "cannot be done to ids; leave it out")
        if rule.cast not in (None, "string", "int64"):
            raise refuse("cast", f'is {as_toml(rule.cast)}, but ids are "int64" or "string"; give one of them')
    if rule.standardise and rule.categories:
        raise refuse("standardise", "is for numbers, categories for words; drop one")
    if rule.standardise and rule.cast in NO_NUMBERS:
        raise refuse("standardise", f"is for numbers, not for {rule.cast}; drop it, or cast to float32")


def _check_times(recipe: GraphRecipe) -> None:
    """A store has times of nodes or of edges."""
    nodes = [table for table in recipe.nodes.values() if table.time]
    edges = [table for table in recipe.edges.values() if table.time]
    if nodes and edges:
        message = f"{edges[0].owner}.time and {nodes[0].owner}.time: a graph has times of nodes or of edges"
        raise recipe.problem(f"{edges[0].owner}.time", f'{message}; keep one, the other as fields = {{ at = "…" }}')
