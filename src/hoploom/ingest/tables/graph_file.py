"""graph.toml as frozen dataclasses: which tables hold the nodes and edges, and what becomes of their columns.

Each key stands here once, with its rule and its help; the reader and the table in docs/tables.md are made from them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hoploom.config import rules
from hoploom.config.rules import REQUIRED, Headings, KeyRule, Only, key, key_table, keys_in, problem
from hoploom.config.toml import as_key
from hoploom.errors import ConfigError
from hoploom.schema import DTYPES, HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, RelationName

CASTS = ("string", "bool", "int8", "int16", "int32", "int64", "uint8", "float32", "float64")
WITH_FILES = Only("files")

FILES = rules.texts("a path in quotes, or a list", single=True)
COLUMNS = rules.texts("a column, or a list", single=True)
NAMED_COLUMNS = rules.table_of(rules.TEXT, 'a table of columns by field, e.g. { rank = "pagerank" }')


def _split() -> KeyRule:
    """A column, or the share of the nodes by split."""

    def read(value: Any) -> str | dict[str, float] | None:
        if not isinstance(value, dict):
            return rules.TEXT.read(value)  # type: ignore[no-any-return]
        shares = {name: rules.number(0, 1).read(share) for name, share in value.items()}
        return shares if shares and all(shares.values()) and math.fsum(shares.values()) <= 1 + 1e-9 else None

    example = "{ train = 0.8, val = 0.1, test = 0.1 }"
    return KeyRule(f"a column in quotes, or shares above 0 that add up to at most 1, e.g. {example}", read)


def _reverse() -> KeyRule:
    """Whether, or the name."""

    def read(value: Any) -> bool | str | None:
        return value if isinstance(value, bool) or rules.TEXT.read(value) is not None else None

    return KeyRule('true, false or the name of the reverse relation, e.g. "written_by"', read)


def _fill() -> KeyRule:
    """What stands for nulls."""

    def read(value: Any) -> float | int | str | None:
        if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            return None
        return value if isinstance(value, int | float | str) else None

    return KeyRule("a number or text", read)


@dataclass(frozen=True)
class ColumnRule:
    """What is done to a column, in this order: fill, cast, then categories or standardise."""

    fill: float | int | str | None = key(None, "what stands for nulls", _fill(), example=0)
    cast: str | None = key(None, "to this type", rules.choice(*CASTS), example="float32")
    categories: str | None = key(
        None, "numbers for words: a column per word, or its number", rules.choice("one-hot", "codes"), example="one-hot"
    )
    standardise: bool = key(False, "less the mean, over the standard deviation", rules.FLAG)


@dataclass(frozen=True)
class NodeTable:
    """The nodes of a type: a row each. Without `files`, `count` says how many there are, with the ids 0, 1, 2, …"""

    name: str
    files: tuple[str, ...] = key((), "paths, globs, folders, URLs: .parquet, .csv, .tsv, .arrow", FILES)
    count: int | None = key(
        None, "nodes, where there is no table", rules.whole(1, 2**62), example=1000, only=Only("files", absent=True)
    )
    id: str | None = key(None, "the column with the ids", rules.TEXT, example="paper_id", only=WITH_FILES)
    features: tuple[str, ...] = key((), "columns, side by side in field x; f_* is any that begins so", COLUMNS)
    features_npy: tuple[str, ...] = key((), "or .npy files, with a row for every row of the table", FILES)
    dtype: str = key("float32", "of x", rules.choice(*DTYPES))
    label: str | None = key(None, "the column of field y", rules.TEXT, example="venue")
    num_classes: int | None = key(None, "labels are below", rules.whole(1), example=40, only=Only("label"))
    time: str | None = key(None, "the column of field time", rules.TEXT, example="published")
    split: str | Mapping[str, float] | None = key(
        None, "a column that names each node's split, or the shares of splits drawn by id", _split()
    )
    fields: Mapping[str, str] = key({}, "further fields, and their columns", NAMED_COLUMNS)
    columns: Mapping[str, ColumnRule] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """As messages and `where` call it: nodes.paper."""
        return f"nodes.{as_key(self.name)}"


@dataclass(frozen=True)
class EdgeTable:
    """The edges of a relation: a row each."""

    relation: RelationName
    files: tuple[str, ...] = key(
        REQUIRED,
        "paths, globs, folders, URLs: .parquet, .csv, .tsv, .arrow",
        FILES,
        example="edges.parquet",
    )
    source: str = key(REQUIRED, "the column with the ids of the sources", rules.TEXT, example="source")
    destination: str = key(REQUIRED, "the column with the ids of the destinations", rules.TEXT, example="destination")
    features: tuple[str, ...] = key((), "columns, side by side in field edge_attr", COLUMNS)
    dtype: str = key("float32", "of edge_attr", rules.choice(*DTYPES))
    weight: str | None = key(None, "the column of field weight", rules.TEXT, example="w")
    time: str | None = key(None, "the column of field time", rules.TEXT, example="at")
    fields: Mapping[str, str] = key({}, "further fields, and their columns", NAMED_COLUMNS)
    reverse: str | None = key(None, "also the reverse relation, by this name; true: rev_ and its name", _reverse())
    undirected: bool = key(False, "every edge counts for both directions", rules.FLAG)
    deduplicate: bool = key(False, "of edges with the same ends one is kept", rules.FLAG)
    self_loops: str = key("keep", "edges from a node to itself", rules.choice("keep", "drop"))
    columns: Mapping[str, ColumnRule] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """As messages and `where` call it: edges."author writes paper"."""
        return f"edges.{as_key(' '.join(self.relation))}"


@dataclass(frozen=True)
class GraphSection:
    """What holds for the whole graph."""

    seed: int = key(0, "the splits that are drawn derive from it", rules.whole(0, rules.MOST_SEED))


@dataclass(frozen=True)
class GraphFile:
    """Everything that a store built from tables follows from.

    >>> graph_file = read_graph("graph.toml")
    >>> graph_file.nodes["paper"].id
    'paper_id'
    """

    nodes: Mapping[str, NodeTable]  # by name, in the order of the file
    edges: Mapping[RelationName, EdgeTable]
    seed: int = 0
    folder: Path = Path()  # what relative paths are relative to
    where: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)  # nodes.paper.id -> graph.toml:3

    @property
    def homogeneous(self) -> bool:
        """One type and one relation that carry no names of their own."""
        return list(self.nodes) == [HOMOGENEOUS_TYPE] and list(self.edges) == [HOMOGENEOUS_RELATION]

    def problem(self, name: str, message: str) -> ConfigError:
        """An error about a key (nodes.paper.label) or a table (nodes.paper), to be raised: it begins with its line."""
        return problem(self.where, name, message)


HEADINGS: Headings = {
    "graph": GraphSection,
    "nodes.<type>": NodeTable,
    'edges."<source> <name> <destination>"': EdgeTable,
    "….columns.<column>": ColumnRule,
}


def reference() -> str:
    """The tables of every key, in Markdown, for the documentation: a heading per section, then its keys."""
    lines = []
    for heading, owner in HEADINGS.items():
        lines += ["", f"`[{heading}]`", "", *key_table(keys_in(owner).items())]
    return "\n".join(lines) + "\n"
