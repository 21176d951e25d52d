"""A graph.toml from the tables in a folder: guessed from names, types and values, with a comment where it is a guess.

The text is there to be read and corrected. Tables that say what they are build as they stand.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hoploom.config.toml import as_key, as_toml
from hoploom.ingest.tables.files import TableFile, open_array
from hoploom.ingest.tables.guess import (
    EDGE_WORDS,
    HALF,
    Roles,
    of_what,
    pair_of,
    roles_of,
    singular,
    stem,
    type_name,
    words,
)
from hoploom.ingest.tables.survey import Surveyed, count_rows, largest, share_found, survey
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, RelationName

HEADER = """\
# What `hoploom build` makes a store of, drafted from the tables in {folder}
# Lines that say "guessed" are worth a look; a line behind `# ` is not in force.
"""
SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}
FEW = 8  # columns that are listed one by one


@dataclass
class _Draft:
    """Types and relations, as they are found."""

    nodes: dict[str, Roles] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # types without a table
    relations: dict[RelationName, Roles] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what was left out, and why


def draft(folder: Path, beside: Path) -> str:
    """graph.toml for the tables in a folder, to be written into the folder `beside`.

    >>> Path("graph.toml").write_text(draft(Path("tables"), Path()))
    """
    tables, arrays, blank = survey(folder)
    found = _Draft(notes=[f"{path} is left out: it is empty" for path in blank])
    able = []
    for table in tables:
        roles = roles_of(table)
        if roles is None:
            columns = ", ".join(list(table.types)[:FEW])
            found.notes.append(f"{table.files} is left out: no ids are seen among {columns}")
        else:
            able.append(roles)
    able = [pair_of(roles, able) for roles in able]
    for roles in able:
        if roles.ends is None:
            found.nodes[_free(type_name(roles.table), found.nodes)] = roles
    for roles in able:
        if roles.ends is not None:
            _place_edges(found, roles)
    _name_homogeneous(found)
    return _text(found, folder, beside, arrays)


def _free(name: str, taken: Sequence[str] | dict[str, Any]) -> str:
    """The name, with a number if it is taken."""
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free


# --- which types an edge joins -------------------------------------------------------------------


def _place_edges(found: _Draft, roles: Roles) -> None:
    """Give a relation its types and its name."""
    assert roles.ends is not None
    types, guessed = [], []
    named = [_named_type(found, roles.table, column, side) for column, side in zip(roles.ends, (0, -1), strict=True)]
    for column, type_, other in zip(roles.ends, named, reversed(named), strict=True):
        if type_ is None:
            type_, is_sure = _type_by_values(found, roles, column, other)
            guessed += [column] if type_ is not None and not is_sure else []
        type_ = type_ or _counted(found, roles.table, column)
        if type_ is None:
            reason = f"no table has the ids of {column}; add one as [nodes.{as_key(of_what(column) or 'node')}]"
            found.notes.append(f"{roles.table.files} is left out: {reason}")
            return
        types.append(type_)
    said = {word for type_ in types for word in words(type_)}
    kept = [word for word in words(roles.table.name) if singular(word) not in said and word not in EDGE_WORDS]
    name = "_".join(word for word in kept if not word.isdigit()) or "to"
    name = _free(name, [key[1] for key in found.relations if (key[0], key[2]) == (types[0], types[1])])
    found.relations[(types[0], name, types[1])] = replace(roles, guessed=tuple(guessed))


def _named_type(found: _Draft, table: Surveyed, column: str, side: int) -> str | None:
    """By the column's name, else by the file's."""
    able = _able(found, table, column)
    for name, of in able.items():
        if stem(column) and (singular(stem(column)) == name or of.id == column):
            return name
    if of_what(column):
        return of_what(column) if of_what(column) in able else None
    of_file = words(table.name)
    return singular(of_file[side]) if len(of_file) > 1 and singular(of_file[side]) in able else None


def _type_by_values(found: _Draft, roles: Roles, column: str, other: str | None) -> tuple[str | None, bool]:
    """The type that has the ids of a column, that of the other end if it has, and whether it can be no other.

    Where the two ends are named after different things, numbers found among the ids of either prove nothing: two
    types number their nodes alike.
    """
    said = {of_what(end) for end in roles.ends or ()}
    able = _able(found, roles.table, column)
    if len(said) > 1 and "" not in said and not roles.table.is_text(column):
        return None, False
    shares = {name: share_found(roles.table.sample[column], of.table, of.id or "") for name, of in able.items()}
    best = max(shares, key=lambda name: (name == other and shares[name] > HALF, shares[name]), default=None)
    if best is None:
        return None, False
    is_only = said == {""} and len(found.nodes) == 1
    return best if shares[best] > HALF or is_only else None, is_only and shares[best] == 1


def _able(found: _Draft, table: Surveyed, column: str) -> dict[str, Roles]:
    """The types with ids such as a column's: text at both ends, or at none."""
    is_text = table.is_text(column)
    return {name: of for name, of in found.nodes.items() if of.id and of.table.is_text(of.id) == is_text}


def _counted(found: _Draft, table: Surveyed, column: str) -> str | None:
    """A type without a table, where ids are numbers from 0."""
    most = largest(table, column)
    if most is None:
        return None
    name = of_what(column) or "node"
    if name in found.nodes:
        return None
    found.counts[name] = max(found.counts.get(name, 0), most + 1)
    return name


def _name_homogeneous(found: _Draft) -> None:
    """One type and one relation: the names by which a store is homogeneous."""
    types = [*found.nodes, *found.counts]
    if len(types) != 1 or len(found.relations) != 1:
        return
    if found.nodes:
        found.nodes = {HOMOGENEOUS_TYPE: next(iter(found.nodes.values()))}
    if found.counts:
        found.counts = {HOMOGENEOUS_TYPE: next(iter(found.counts.values()))}
    found.relations = {HOMOGENEOUS_RELATION: next(iter(found.relations.values()))}
    found.notes.append('with the one type "node" and the one relation "node to node" the graph is homogeneous')


# --- text ----------------------------------------------------------------------------------------


def _text(found: _Draft, folder: Path, beside: Path, arrays: Sequence[Path]) -> str:
    prefix = os.path.relpath(folder, beside)
    lines = [HEADER.format(folder="this folder." if prefix == "." else f"{prefix}.")]
    has_edge_times = any(roles.time for roles in found.relations.values())
    for name, roles in found.nodes.items():
        owner = f"nodes.{as_key(name)}"
        path = _array_of(roles, arrays)
        array = None if path is None else os.path.normpath(os.path.join(prefix, path.name))
        rules = replace(roles, nulls=()) if array is not None else roles
        lines += [f"[{owner}]{_rows(roles.table)}", _files(roles.table, prefix)]
        lines += [*_node_lines(roles, array, has_edge_times), *_rule_lines(rules), ""]
    for name, count in found.counts.items():
        lines += [f"[nodes.{as_key(name)}]", f"count = {count}  # guessed: one more than the largest id", ""]
    for key, roles in found.relations.items():
        lines += [f"[edges.{as_key(' '.join(key))}]{_rows(roles.table)}", _files(roles.table, prefix)]
        lines += [*_edge_lines(roles, key), *_rule_lines(roles), ""]
    if not found.relations:
        found.notes.append('no edges were found; add a section such as [edges."author writes paper"]')
    lines += [f"# {note}" for note in found.notes]
    return "\n".join(lines).rstrip() + "\n"


def _rows(table: Surveyed) -> str:
    return "" if table.num_rows is None else f"  # {table.num_rows} rows"


def _files(table: Surveyed, prefix: str) -> str:
    return f"files = {as_toml(os.path.normpath(os.path.join(prefix, table.files)))}"


def _node_lines(roles: Roles, array: str | None, has_edge_times: bool) -> list[str]:
    lines = [f"id = {as_toml(roles.id)}"]
    if array is not None:
        lines.append(f"features_npy = {as_toml(array)}  # guessed: as many rows, and a name alike")
    elif roles.features:
        lines.append(_features(roles))
    if roles.label is not None:
        lines.append(f"label = {as_toml(roles.label)}")
    if roles.split is not None:
        lines.append(f"split = {as_toml(roles.split)}")
    elif roles.label is not None:
        lines.append(f"split = {as_toml(SHARES)}  # guessed: no column names the splits")
    if roles.time is not None and has_edge_times:
        lines.append(f"# time = {as_toml(roles.time)}  # a graph has times of nodes or of edges")
    elif roles.time is not None:
        lines.append(f"time = {as_toml(roles.time)}")
    return lines + _unused(roles, array)


def _edge_lines(roles: Roles, key: RelationName) -> list[str]:
    assert roles.ends is not None
    lines = []
    for end, column, type_ in zip(("source", "destination"), roles.ends, (key[0], key[2]), strict=True):
        why = f"  # guessed: these are ids of {type_}, by their values" if column in roles.guessed else ""
        lines.append(f"{end} = {as_toml(column)}{why}".replace("\n", " "))
    lines += [_features(roles)] if roles.features else []
    lines += [f"weight = {as_toml(roles.weight)}"] if roles.weight is not None else []
    lines += [f"time = {as_toml(roles.time)}"] if roles.time is not None else []
    if key[0] == key[2]:
        lines.append("# undirected = true  # every edge counts for both directions")
    else:
        lines.append("reverse = true  # guessed: messages flow both ways")
    return lines + _unused(roles, None)


def _features(roles: Roles) -> str:
    """The columns, by a glob where that gives the same."""
    patterns: list[str] = []
    others = [name for name in roles.table.types if name not in roles.features]
    for name in roles.features:
        pattern = name.rstrip("0123456789") + "*"
        same = [other for other in roles.features if fnmatchcase(other, pattern)]
        is_glob = (
            pattern not in ("*", f"{name}*") and len(same) > 2 and not any(fnmatchcase(o, pattern) for o in others)
        )
        chosen = pattern if is_glob else name
        if chosen not in patterns:
            patterns.append(chosen)
    return f"features = {as_toml(patterns)}"


def _unused(roles: Roles, array: str | None) -> list[str]:
    unused = [*(roles.features if array is not None else ()), *roles.unused]
    if not unused:
        return []
    shown = [f"{name} ({roles.table.types[name]})" for name in unused[:FEW]]
    more = f" and {len(unused) - FEW} more" if len(unused) > FEW else ""
    return [f"# not used: {', '.join(shown)}{more}".replace("\n", " ")]


def _rule_lines(roles: Roles) -> list[str]:
    """What is done to columns: words become numbers, nulls are filled."""
    rules = [(name, 'categories = "codes"', "guessed: words stand for classes") for name in roles.codes]
    rules += [(name, "fill = 0", "guessed: some rows are null") for name in roles.nulls]
    return [f"columns.{as_key(name)}.{rule}  # {why}" for name, rule, why in rules]


def _array_of(roles: Roles, arrays: Sequence[Path]) -> Path | None:
    """The .npy file with a row for every row of the table, called like it."""
    table = roles.table
    for path in arrays:
        alike = words(path.stem)[: len(words(table.name))] == words(table.name) or type_name(table) in words(path.stem)
        if alike:
            rows = len(open_array(TableFile(os.path.abspath(path), str(path), "npy")))
            if rows == (table.num_rows or count_rows(table, roles.id or "")):
                return path
    return None
