"""What a table may be, by the names, the types and the first values of its columns. Guesses only: people read them."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hoploom.config.values import as_key, as_toml
from hoploom.ingest.tables.survey import Surveyed

ENDS = ("source", "destination")
SOURCES = ["src", "source", "from", "head", "start", "u", "citing", "follower", "sender", "subject"]
DESTINATIONS = ["dst", "dest", "destination", "target", "to", "tail", "end", "v"]
DESTINATIONS += ["cited", "followee", "receiver", "object"]
PEERS = ["friend", "peer", "neighbor", "neighbour", "parent", "child", "other", "partner", "ref", "reference"]
ID_WORDS = ["id", "ids", "idx", "nid", "uid", "key", "index"]
SINGULARS = {"movies": "movie", "cookies": "cookie", "series": "series", "species": "species"}  # no y, no s
LABELS = ["label", "labels", "y", "target", "class"]
SPLITS = ["split", "fold", "set", "subset", "partition"]
TIMES = ["time", "timestamp", "date", "datetime", "ts", "at", "created", "created_at", "published"]
WEIGHTS = ["weight", "w"]
NODE_WORDS = ["node", "nodes", "vertex", "vertices"]
EDGE_WORDS = ["edge", "edges", "link", "links", "rel", "relation", "relations"]
SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}
ID_NAME = re.compile(r"(.*[_ -])?(id|ids|idx|nid|uid|key|index)|node|vertex", re.IGNORECASE)
CAMEL_ID = re.compile(r".*[a-z](Id|ID)")
ROW_NUMBER = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # pandas' index, which says nothing of a row
MOST_SPLITS = 10
FEW_VALUES = 10  # of a column that may be a class, or become one-hot


@dataclass
class Section:
    """A table as a section of graph.toml whose name is not known yet."""

    table: Surveyed
    keys: dict[str, Any]  # in their order, those of columns dotted
    why: dict[str, str]  # comments by key, where it is guessed
    unused: list[str]  # columns
    hints: list[str] = field(default_factory=list)  # lines to uncomment

    @property
    def id(self) -> str | None:
        """Of a node table; edges have none."""
        return self.keys.get("id")


def words(name: str) -> list[str]:
    """The words of a name: writesPaper, writes_paper and writes-paper have two."""
    return [word for word in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) if word]


def stem(name: str) -> str:
    """What an id is of: author for author_id."""
    return "_".join(word for word in words(name) if word not in ID_WORDS)


def of_what(name: str) -> str:
    """What the ids of an end are said to be of: paper for cited_paper_id and paper2, nothing for src and friend_id."""
    kept = [singular(word.rstrip("0123456789")) for word in words(name)]
    said = (*ID_WORDS, *NODE_WORDS, *SOURCES, *DESTINATIONS, *PEERS)
    return "_".join(word for word in kept if len(word) > 1 and word not in said)


def singular(word: str) -> str:
    """author for authors."""
    if word in SINGULARS:
        return SINGULARS[word]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-1] if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 3 else word


def type_name(table: Surveyed) -> str:
    """What the nodes of a table may be called."""
    kept = [singular(word) for word in words(table.name) if word not in NODE_WORDS]
    return "_".join(kept) or "node"


# --- ids -----------------------------------------------------------------------------------------


def id_typed(table: Surveyed) -> list[str]:
    """Return the columns that can hold ids: integers and text."""
    kinds = ((name, kind) for name, kind in table.types.items() if not ROW_NUMBER.fullmatch(name))
    return [name for name, kind in kinds if pa.types.is_integer(kind) or pa.types.is_string(kind)]


def refers(name: str, types: Collection[str]) -> bool:
    """Return whether a column is called like an id, or like one of some node types."""
    return bool(ID_NAME.fullmatch(name) or CAMEL_ID.fullmatch(name)) or singular(stem(name)) in types


def own_id(table: Surveyed, types: Collection[str]) -> str | None:
    """Return the column that tells the rows apart: called like the table, or like an id; None if there is none."""
    if named_ends(table):
        return None
    id_like = [name for name in id_typed(table) if refers(name, types)]
    like_table = [name for name in id_like if singular(stem(name)) == type_name(table)]
    if any(of_what(name) for name in id_like):
        like_table = [name for name in like_table if of_what(name)]  # the friends of users are users
    others = [name for name in id_like if stem(name) in ("", "node", "vertex")]
    foreign = [name for name in id_like if name not in (*like_table, *others)]
    if len(foreign) > 1 and not any(refers(name, ()) for name in like_table):
        return None  # a number for each edge, or the rating of an item by a user
    named = like_table or others or (foreign if len(foreign) == 1 else [])
    return next((name for name in named if _is_unique(table, name)), None)


def named_ends(table: Surveyed) -> list[str]:
    """Return two columns that are called source and destination, or alike; none if there are no such columns."""
    sources = [name for name in id_typed(table) if stem(name) in SOURCES]
    destinations = [name for name in id_typed(table) if stem(name) in DESTINATIONS and name not in sources[:1]]
    return [sources[0], destinations[0]] if sources and destinations else []


def pair(table: Surveyed) -> list[str]:
    """Return the columns of a table that has two of one type and no others; none for other tables."""
    names = [name for name in table.types if not ROW_NUMBER.fullmatch(name)]
    alike = len(names) == 2 and table.types[names[0]] == table.types[names[1]] and {*names} <= {*id_typed(table)}
    return names if alike and not any(name.isdigit() for name in names) else []


def _is_unique(table: Surveyed, name: str) -> bool:
    column = table.sample[name]
    return bool(column.null_count == 0 and pc.count_distinct(column).as_py() == len(column))


# --- the other columns ---------------------------------------------------------------------------


def section_of(table: Surveyed, keys: dict[str, Any], node_types: Collection[str]) -> Section:
    """Return a section with label, split, time, weight and features. Columns that have no role are unused."""
    types, why = table.types, dict[str, str]()
    node_types = {*node_types} - {type_name(table)}
    left = [name for name in types if name not in keys.values()]
    roles: dict[str, str | None] = {}
    if "id" in keys:
        roles["label"] = label = _named(left, LABELS, lambda name: _is_label(table, name))
        why |= {} if label is None else {"label": f"guessed: the column is called {label}; is this what you predict?"}
        roles["split"] = _named(left, SPLITS, lambda name: _is_split(table, name))
    else:
        roles["weight"] = _named(left, WEIGHTS, lambda name: _is_number(types[name]))
    moments = (name for name in left if pa.types.is_timestamp(types[name]) or pa.types.is_date(types[name]))
    roles["time"] = _named(left, TIMES, lambda name: _is_time(types[name])) or next(moments, None)
    left = [name for name in left if name not in roles.values()]
    named = [name for name in left if not refers(name, node_types) and not ROW_NUMBER.fullmatch(name)]
    asked = [name for name in named if "id" in keys and _may_be_label(table, name)]
    features = [name for name in named if _is_feature(table, name) and name not in asked]
    if features:
        keys["features"] = _globs(features, [name for name in types if name not in features])
    for role, column in roles.items():
        if column is not None:
            keys[role] = column
        elif role == "split" and roles["label"] is not None:
            keys[role], why[role] = SHARES, "guessed: no column names the splits"
    codes = [name for name in (roles.get("label"),) if name is not None and table.is_text(name)]
    rules: list[tuple[str, str, Any, str]]
    rules = [(name, "categories", "codes", "guessed: words stand for classes") for name in codes]
    nulls = [name for name in features if table.sample[name].null_count]
    rules += [(name, "fill", 0, "guessed: some rows are null") for name in nulls]
    for name, rule, value, reason in rules:
        key = f"columns.{as_key(name)}.{rule}"
        keys[key], why[key] = value, reason
    hints = [
        f"label = {as_toml(name)}  # {_values(table, name)} with nulls: is this what you predict?" for name in asked
    ]
    if asked and "split" not in keys:
        hints.append(f"split = {as_toml(SHARES)}  # a label needs splits")
    few = [name for name in left if name in named and _is_few(table, name)]
    hints += [f'columns.{as_key(name)}.categories = "one-hot"  # and add {as_toml(name)} to features' for name in few]
    return Section(table, keys, why, [name for name in left if name not in (*features, *asked)], hints)


def _is_label(table: Surveyed, name: str) -> bool:
    """Return whether a column that is called like a label can be one: numbers, or words that come again."""
    found, across = table.sample[name], table.types.get("x")
    if name == "y" and across is not None and _is_number(across):
        return False  # x and y are a position
    return _is_feature(table, name) or (table.is_text(name) and 2 * pc.count_distinct(found).as_py() <= len(found))


def _may_be_label(table: Surveyed, name: str) -> bool:
    """Classes 0, 1, …, some of which are not known: null."""
    found = table.sample[name]
    if not _is_number(found.type) or not 0 < found.null_count < len(found):
        return False
    values = set(pc.unique(found.drop_null()).to_pylist())
    return values <= {0, 1} or (values <= set(range(FEW_VALUES)) and 2 * len(values) <= len(found))


def _values(table: Surveyed, name: str) -> str:
    most = int(pc.max(table.sample[name]).as_py())
    return "0/1" if most <= 1 else f"0 to {most}"


def _is_few(table: Surveyed, name: str) -> bool:
    """Words that come again and again."""
    found = table.sample[name]
    return table.is_text(name) and 0 < 2 * pc.count_distinct(found).as_py() <= min(2 * FEW_VALUES, len(found))


def _globs(features: Sequence[str], others: Sequence[str]) -> list[str]:
    """The features, by a glob where that gives the same."""
    found = []
    for name in features:
        pattern = name.rstrip("0123456789") + "*"
        same = [one for one in features if fnmatchcase(one, pattern)]
        is_numbered = pattern not in ("*", f"{name}*") and len(same) > 2
        found.append(pattern if is_numbered and not any(fnmatchcase(one, pattern) for one in others) else name)
    return list(dict.fromkeys(found))


def _named(names: Sequence[str], wanted: Sequence[str], able: Callable[[str], bool]) -> str | None:
    """The first that is called like one of some words and can be what they say."""
    return next((name for word in wanted for name in names if name.lower() == word and able(name)), None)


def _is_time(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_split(table: Surveyed, name: str) -> bool:
    return table.is_text(name) and pc.count_distinct(table.sample[name]).as_py() <= MOST_SPLITS


def _is_feature(table: Surveyed, name: str) -> bool:
    """A number, or numbers of which there are as many in every row."""
    kind = table.types[name]
    if pa.types.is_fixed_size_list(kind):
        return _is_number(kind.value_type)
    if pa.types.is_list(kind):
        lengths = pc.list_value_length(table.sample[name])
        return _is_number(kind.value_type) and pc.count_distinct(lengths, mode="all").as_py() == 1
    return _is_number(kind)
