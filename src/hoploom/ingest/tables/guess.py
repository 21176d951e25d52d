"""What a table may be, by the names, the types and the first values of its columns. Guesses only: people read them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hoploom.ingest.tables.survey import Surveyed, share_found

SOURCES = ("src", "source", "from", "head", "start", "u", "citing", "follower", "sender", "subject")
DESTINATIONS = (
    "dst",
    "dest",
    "destination",
    "target",
    "to",
    "tail",
    "end",
    "v",
    "cited",
    "followee",
    "receiver",
    "object",
)
PEERS = ("friend", "peer", "neighbor", "neighbour", "parent", "child", "other", "partner", "ref", "reference")
ID_WORDS = ("id", "ids", "idx", "nid", "uid", "key", "index")
SINGULARS = {"movies": "movie", "cookies": "cookie", "series": "series", "species": "species"}  # no y, no s
LABELS = ("label", "labels", "y", "target", "class", "category")
SPLITS = ("split", "fold", "set", "subset", "partition")
TIMES = ("time", "timestamp", "date", "datetime", "ts", "at", "created", "created_at", "published")
WEIGHTS = ("weight", "w")
NODE_WORDS = ("node", "nodes", "vertex", "vertices")
EDGE_WORDS = ("edge", "edges", "link", "links", "rel", "relation", "relations")
ID_NAME = re.compile(r"(.*[_ -])?(id|ids|idx|nid|uid|key|index)|node|vertex", re.IGNORECASE)
CAMEL_ID = re.compile(r".*[a-z](Id|ID)")
ROW_NUMBER = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # pandas' index, which says nothing of a row
MOST_SPLITS = 10
HALF = 0.5  # of the ids of an end: more of them are no coincidence


@dataclass(frozen=True)
class Roles:
    """What the columns of a table are for."""

    table: Surveyed
    id: str | None = None  # of a node table
    ends: tuple[str, str] | None = None  # of an edge table
    label: str | None = None
    split: str | None = None
    time: str | None = None
    weight: str | None = None
    features: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()  # words that numbers shall stand for
    nulls: tuple[str, ...] = ()  # features that are null in some rows
    unused: tuple[str, ...] = ()
    guessed: tuple[str, ...] = ()  # ends whose type was told by their values


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


def roles_of(table: Surveyed) -> Roles | None:
    """Nodes or edges, and the columns of each role; None: neither."""
    ends = _named_ends(table)
    id = None if ends else _own_id(table)
    if ends is None and id is None:
        ends = _other_ends(table)
    if ends is None and id is None:
        return None
    return _with_columns(Roles(table, id, ends))


# --- ids -----------------------------------------------------------------------------------------


def _is_id_type(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind))


def is_id_name(name: str) -> bool:
    return bool(ID_NAME.fullmatch(name) or CAMEL_ID.fullmatch(name))


def _id_like(table: Surveyed) -> list[str]:
    return [name for name, kind in table.types.items() if _is_id_type(kind) and is_id_name(name)]


def _named_ends(table: Surveyed) -> tuple[str, str] | None:
    """Columns called source and destination, or alike."""
    able = [name for name, kind in table.types.items() if _is_id_type(kind)]
    sources = [name for name in able if stem(name) in SOURCES]
    destinations = [name for name in able if stem(name) in DESTINATIONS and name not in sources[:1]]
    return (sources[0], destinations[0]) if sources and destinations else None


def _own_id(table: Surveyed) -> str | None:
    """The column that tells the rows apart: called like the table, or like an id."""
    like_table = [name for name in _id_like(table) if singular(stem(name)) == type_name(table)]
    if any(of_what(name) for name in _id_like(table)):
        like_table = [name for name in like_table if of_what(name)]  # the friends of users are users
    others = [name for name in _id_like(table) if stem(name) in ("", "node", "vertex")]
    foreign = [name for name in _id_like(table) if name not in (*like_table, *others)]
    if len(foreign) > 1 and not like_table:
        return None  # a number for each edge
    named = like_table or others or (foreign if len(foreign) == 1 else [])
    return next((name for name in named if _is_unique(table, name)), None)


def _other_ends(table: Surveyed) -> tuple[str, str] | None:
    """Two columns with ids, or a table of two columns alike."""
    ids = [name for name in _id_like(table) if stem(name)]
    if len(ids) >= 2:
        return ids[0], ids[1]
    types = {name: kind for name, kind in table.types.items() if not ROW_NUMBER.fullmatch(name)}
    able = [name for name, kind in types.items() if _is_id_type(kind)]
    is_pair = len(types) == 2 and len(able) == 2 and len(set(types.values())) == 1
    return (able[0], able[1]) if is_pair and not any(name.isdigit() for name in able) else None


def pair_of(roles: Roles, tables: Sequence[Roles]) -> Roles:
    """A table of two columns with ids, one of them another table's, holds edges rather than nodes."""
    table = roles.table
    others = [name for name in table.types if name != roles.id and not ROW_NUMBER.fullmatch(name)]
    if len(others) != 1 or roles.id is None:
        return roles
    for of in tables:
        is_other = of is not roles and of.id == others[0] and of.table.types[of.id] == table.types[roles.id]
        if is_other and share_found(table.sample[roles.id], of.table, others[0]) > HALF:
            first, second = (name for name in table.types if name in (roles.id, others[0]))
            return _with_columns(Roles(table, ends=(first, second)))
    return roles


def _is_unique(table: Surveyed, name: str) -> bool:
    column = table.sample[name]
    return bool(column.null_count == 0 and pc.count_distinct(column).as_py() == len(column))


# --- the other columns ---------------------------------------------------------------------------


def _with_columns(roles: Roles) -> Roles:
    """Label, split, time, weight, features; what has no role is unused."""
    table = roles.table
    left = [name for name in table.types if name != roles.id and name not in (roles.ends or ())]
    found: dict[str, str | None] = {"time": _first(left, TIMES) or _first_time(table, left)}
    if found["time"] is not None and not _is_time(table.types[found["time"]]):
        found["time"] = None
    if roles.id is not None:
        found["label"] = next((name for name in _named(left, LABELS) if _is_label(table, name)), None)
        found["split"] = next((name for name in _named(left, SPLITS) if _is_split(table, name)), None)
    else:
        found["weight"] = next((name for name in _named(left, WEIGHTS) if _is_number(table.types[name])), None)
    left = [name for name in left if name not in found.values()]
    named = [name for name in left if not is_id_name(name) and not ROW_NUMBER.fullmatch(name)]
    features = tuple(name for name in named if _is_feature(table, name))
    label = found.get("label")
    return replace(
        roles,
        features=features,
        codes=(label,) if label is not None and table.is_text(label) else (),
        nulls=tuple(name for name in features if table.sample[name].null_count),
        unused=tuple(name for name in left if name not in features),
        **found,  # type: ignore[arg-type]
    )


def _named(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    return [name for word in wanted for name in names if name.lower() == word]


def _first(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    return next(iter(_named(names, wanted)), None)


def _first_time(table: Surveyed, names: Sequence[str]) -> str | None:
    types = table.types
    return next((n for n in names if pa.types.is_timestamp(types[n]) or pa.types.is_date(types[n])), None)


def _is_time(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_label(table: Surveyed, name: str) -> bool:
    return table.is_text(name) or _is_feature(table, name)


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
