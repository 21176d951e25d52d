"""A graph.toml from the tables in a folder: guessed from names, types and values, with a comment where it is a guess.

The text is there to be read and corrected. Tables that say what they are build as they stand.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from hoploom.config.values import as_key, as_toml
from hoploom.ingest.tables.guess import (
    EDGE_WORDS,
    ENDS,
    HALF,
    Section,
    of_what,
    pair_of,
    section_of,
    singular,
    stem,
    type_name,
    words,
)
from hoploom.ingest.tables.survey import Surveyed, largest, share_found, survey
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, RelationName

HEADER = """\
# `hoploom build` makes a store from this file. It was drafted from the tables in {folder}
# Check the lines that say "guessed". A line that begins with `# ` has no effect.

"""
UNDIRECTED = "# undirected = true  # every edge counts in both directions\n"
FEW = 8  # columns that are listed one by one


@dataclass
class _Draft:
    """Types and relations, as they are found."""

    nodes: dict[str, Section] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # types without a table
    relations: dict[RelationName, Section] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what was left out, and why


def draft(folder: Path, beside: Path) -> str:
    """graph.toml for the tables in a folder, to be written into the folder `beside`.

    >>> Path("graph.toml").write_text(draft(Path("tables"), Path()))
    """
    tables, blank = survey(folder)
    found, sections = _Draft(notes=[f"{path} is left out: it is empty" for path in blank]), list[Section]()
    for table in tables:
        section = section_of(table)
        if section is None:
            columns = ", ".join(list(table.types)[:FEW])
            found.notes.append(f"{table.files} is left out: no ids are seen among {columns}")
        else:
            sections.append(section)
    sections = [pair_of(section, sections) for section in sections]
    for section in sections:
        if section.id is not None:
            found.nodes[_free(type_name(section.table), found.nodes)] = section
    for section in sections:
        if section.id is None:
            _place_edges(found, section)
    _name_homogeneous(found)
    _keep_one_time(found)
    return _text(found, os.path.relpath(folder, beside))


def _free(name: str, taken: Collection[str]) -> str:
    """The name, with a number if it is taken."""
    number, free = 2, name
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free


# --- which types an edge joins -------------------------------------------------------------------


def _place_edges(found: _Draft, edges: Section) -> None:
    """Give a relation its types and its name."""
    types = []
    named = [_named_type(found, edges.table, edges.keys[end], side) for end, side in zip(ENDS, (0, -1), strict=True)]
    for end, type_, other in zip(ENDS, named, reversed(named), strict=True):
        column = edges.keys[end]
        if type_ is None:
            type_, is_sure = _type_by_values(found, edges, column, other)
            edges.why |= {} if type_ is None or is_sure else {end: "guessed: these are ids of {}, by their values"}
        type_ = type_ or _counted(found, edges.table, column)
        if type_ is None:
            reason = f"no table has the ids of {column}; add one as [nodes.{as_key(of_what(column) or 'node')}]"
            found.notes.append(f"{edges.table.files} is left out: {reason}")
            return
        types.append(type_)
    said = {word for type_ in types for word in words(type_)}
    kept = [word for word in words(edges.table.name) if singular(word) not in said and word not in EDGE_WORDS]
    name = "_".join(word for word in kept if not word.isdigit()) or "to"
    name = _free(name, [key[1] for key in found.relations if (key[0], key[2]) == (types[0], types[1])])
    found.relations[(types[0], name, types[1])] = edges


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


def _type_by_values(found: _Draft, edges: Section, column: str, other: str | None) -> tuple[str | None, bool]:
    """The type that has the ids of a column, that of the other end if it has, and whether it can be no other.

    Where the two ends are named after different things, numbers found among the ids of either prove nothing: two
    types number their nodes alike.
    """
    said = {of_what(edges.keys[end]) for end in ENDS}
    if len(said) > 1 and "" not in said and not edges.table.is_text(column):
        return None, False
    able = _able(found, edges.table, column)
    shares = {name: share_found(edges.table.sample[column], of.table, of.id or "") for name, of in able.items()}
    best = max(shares, key=lambda name: (name == other and shares[name] > HALF, shares[name]), default=None)
    if best is None:
        return None, False
    is_only = said == {""} and len(found.nodes) == 1
    return best if shares[best] > HALF or is_only else None, is_only and shares[best] == 1


def _able(found: _Draft, table: Surveyed, column: str) -> dict[str, Section]:
    """The types with ids such as a column's: text at both ends, or at none."""
    is_text = table.is_text(column)
    return {name: of for name, of in found.nodes.items() if of.id and of.table.is_text(of.id) == is_text}


def _counted(found: _Draft, table: Surveyed, column: str) -> str | None:
    """A type without a table, where ids are numbers from 0."""
    most, name = largest(table, column), of_what(column) or "node"
    if most is None or name in found.nodes:
        return None
    found.counts[name] = max(found.counts.get(name, 0), most + 1)
    return name


def _name_homogeneous(found: _Draft) -> None:
    """One type and one relation: the names by which a store is homogeneous."""
    if len(found.nodes) + len(found.counts) == len(found.relations) == 1:
        found.nodes = dict(zip([HOMOGENEOUS_TYPE], found.nodes.values(), strict=False))
        found.counts = dict(zip([HOMOGENEOUS_TYPE], found.counts.values(), strict=False))
        found.relations = dict(zip([HOMOGENEOUS_RELATION], found.relations.values(), strict=False))
        found.notes.append('with the one type "node" and the one relation "node to node" the graph is homogeneous')


def _keep_one_time(found: _Draft) -> None:
    """A graph has times of nodes or of edges."""
    for name, section in found.nodes.items() if any("time" in edges.keys for edges in found.relations.values()) else ():
        time = section.keys.pop("time", None)
        if time is not None:
            found.notes.append(f"nodes.{name}.time = {time} is left out: a graph has times of nodes or of edges")


# --- text ----------------------------------------------------------------------------------------


def _text(found: _Draft, prefix: str) -> str:
    text = HEADER.format(folder="this folder." if prefix == "." else f"{prefix}.")
    for name, section in found.nodes.items():
        text += _section_text(f"nodes.{as_key(name)}", section, prefix)
    for name, count in found.counts.items():
        text += f"[nodes.{as_key(name)}]\ncount = {count}  # guessed: one more than the largest id\n\n"
    for key, section in found.relations.items():
        for end, type_ in zip(ENDS, key[::2], strict=True):
            section.why |= {end: section.why[end].format(type_)} if end in section.why else {}
        if key[0] != key[2]:
            section.keys["reverse"], section.why["reverse"] = True, "guessed: messages flow both ways"
        hint = UNDIRECTED if key[0] == key[2] else ""
        text += _section_text(f"edges.{as_key(' '.join(key))}", section, prefix, hint)
    if not found.relations:
        found.notes.append('no edges were found; add a section such as [edges."author writes paper"]')
    return text + "".join(map(_comment, found.notes))


def _section_text(owner: str, section: Section, prefix: str, hint: str = "") -> str:
    files = os.path.normpath(os.path.join(prefix, section.table.files))
    text = f"[{owner}]\nfiles = {as_toml(files)}\n"
    for key, value in section.keys.items():
        text += f"{key} = {as_toml(value)}" + (f"  {_comment(section.why[key])}" if key in section.why else "\n")
    text += hint + "".join(map(_comment, section.hints))
    if section.unused:
        shown = [f"{name} ({section.table.types[name]})" for name in section.unused[:FEW]]
        more = f" and {len(section.unused) - FEW} more" if len(section.unused) > FEW else ""
        text += _comment(f"not used: {', '.join(shown)}{more}")
    return text + "\n"


def _comment(text: str) -> str:
    """On one line, whatever the names in it."""
    return "# " + text.replace("\n", " ") + "\n"
