"""A graph.toml from the tables in a folder: guessed from names, types and values, with a comment where it is a guess.

The text is there to be read and corrected. Tables that say what they are build as they stand.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from hoploom.config.values import as_key, as_share, as_toml, printable
from hoploom.ingest.tables.guess import (
    EDGE_WORDS,
    ENDS,
    ID_WORDS,
    ROW_NUMBER,
    Section,
    id_typed,
    named_ends,
    of_what,
    own_id,
    pair,
    refers,
    section_of,
    singular,
    stem,
    type_name,
    words,
)
from hoploom.ingest.tables.survey import WANTED, Surveyed, found_among, largest, survey
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, RelationName

HEADER = """\
# `hoploom build` makes a store from this file. It was drafted from the tables in {folder}
# Check the lines that say "guessed". A line that begins with `# ` has no effect.

"""
UNDIRECTED = "# undirected = true  # every edge counts in both directions\n"
FEW = 8  # columns that are listed one by one
HALF = 0.5  # of a column's values: if more of them are ids, it is no coincidence


@dataclass
class _Draft:
    """The node types and relations that are found."""

    nodes: dict[str, Section] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # types without a table
    relations: dict[RelationName, Section] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what was left out, and why
    shares: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)  # see `_look_up`

    def share(self, table: Surveyed, column: str, node_type: str) -> float:
        """Return the share of a column's first values that are ids of a node type."""
        return self.shares.get((table.files, column), {}).get(node_type, 0.0)


def draft(folder: Path, beside: Path) -> str:
    """Return a graph.toml for the tables in a folder, to be written into the folder `beside`.

    >>> Path("graph.toml").write_text(draft(Path("tables"), Path()))
    """
    tables, blank = survey(folder)
    found = _Draft(notes=[f"{path} is left out: it is empty" for path in blank])
    ids = {table.files: own_id(table, {type_name(one) for one in tables}) for table in tables}
    types = {type_name(table) for table in tables if ids[table.files] is not None}
    for table in tables:
        if (id := ids[table.files]) is not None:
            found.nodes[_free(type_name(table), found.nodes)] = section_of(table, {"id": id}, types)
    _look_up(found, tables)
    found.nodes = {name: nodes for name, nodes in found.nodes.items() if not _is_pair(found, nodes)}
    keyed = {nodes.table.files: name for name, nodes in found.nodes.items()}
    for table in tables:
        if table.files in keyed:
            _place_foreign(found, keyed[table.files])
        elif ends := _ends(found, table):
            _place_edges(found, section_of(table, dict(zip(ENDS, ends, strict=True)), types))
        else:
            columns = ", ".join(list(table.types)[:FEW])
            found.notes.append(f"{table.files} is left out: no ids are seen among {columns}")
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


def _look_up(found: _Draft, tables: Sequence[Surveyed]) -> None:
    """Look up the first values of columns among all ids, in one pass over each node table."""
    keyed = {nodes.table.files for nodes in found.nodes.values()}
    some = {
        (table.files, column): table.some(column)
        for table in tables
        for column in id_typed(table)
        if table.files not in keyed or table.is_text(column) or refers(column, found.nodes)
    }
    for name, nodes in found.nodes.items():
        table, id = nodes.table, nodes.keys["id"]
        alike = {key: values for key, values in some.items() if pa.types.is_string(values.type) == table.is_text(id)}
        there = found_among(pc.unique(pa.concat_arrays([*alike.values()])), table, id)
        for key, values in alike.items():
            found.shares.setdefault(key, {})[name] = pc.mean(pc.is_in(values, there)).as_py() or 0.0


def _is_pair(found: _Draft, nodes: Section) -> bool:
    """Return whether a table of two columns with ids, one of them another table's, holds edges rather than nodes."""
    table, id = nodes.table, nodes.keys["id"]
    others = [name for name in table.types if name != id and not ROW_NUMBER.fullmatch(name)]
    return len(others) == 1 and any(
        of is not nodes and of.id == others[0] and found.share(table, id, name) > HALF
        for name, of in found.nodes.items()
    )


def _ends(found: _Draft, table: Surveyed) -> Sequence[str]:
    """Return the two columns that an edge's ends are read from: by their names, else by their values."""
    named = [name for name in id_typed(table) if stem(name) and refers(name, found.nodes)]
    valued = [name for name in id_typed(table) if name in named or _are_ids(found, table, name)]
    return named_ends(table) or next((names[:2] for names in (named, valued) if len(names) > 1), pair(table))


def _are_ids(found: _Draft, table: Surveyed, column: str) -> bool:
    """Return whether a column's values are ids of some nodes. Numbers must be many: 1 to 5 are stars, not ids."""
    if table.is_text(column):
        return any(found.share(table, column, name) > HALF for name in found.nodes)
    most = {name: min(WANTED, nodes.table.sample.num_rows) for name, nodes in found.nodes.items()}
    num_values = len(table.some(column))
    return any(found.share(table, column, name) == 1 and num_values > HALF * most[name] for name in found.nodes)


def _place_foreign(found: _Draft, name: str) -> None:
    """Add the relations from a node table to the other types whose ids are in its columns."""
    nodes = found.nodes[name]
    for column in (column for column in id_typed(nodes.table) if column not in nodes.keys.values()):
        is_sure = nodes.table.is_text(column)
        shares = {of: found.share(nodes.table, column, of) for of in found.nodes if of != name}
        able = [of for of in shares if shares[of] > HALF and (is_sure or of_what(column) == of)]
        if not able:
            continue
        type_ = max(able, key=lambda of: (of_what(column) == of, shares[of]))
        if nodes.table.sample[column].null_count or shares[type_] < 1:
            found.notes.append(f"{nodes.table.files}: {column} has ids of {type_}, but not in every row, as edges need")
            continue
        nodes.unused = [other for other in nodes.unused if other != column]
        why = {"destination": "guessed: these are ids of {}, by their values"}
        edges = Section(nodes.table, {"source": nodes.id, "destination": column}, why, [])
        _name_edges(found, edges, name, type_, column)


def _place_edges(found: _Draft, edges: Section) -> None:
    """Give a relation its types and its name."""
    types = []
    named = [_named_type(found, edges.table, edges.keys[end], side) for end, side in zip(ENDS, (0, -1), strict=True)]
    for end, type_, other in zip(ENDS, named, reversed(named), strict=True):
        column = edges.keys[end]
        if type_ is None:
            type_, is_sure = _type_by_values(found, edges, column, other)
            edges.why |= {} if type_ is None or is_sure else {end: "guessed: these are ids of {}, by their values"}
        elif (share := found.share(edges.table, column, type_)) < 1:
            edges.why[end] = f"guessed by the name, but only {as_share(share)} of the first values are ids of {{}}"
        type_ = type_ or _counted(found, edges.table, column)
        if type_ is None:
            reason = f"no table has the ids of {column}; add one as [nodes.{as_key(of_what(column) or 'node')}]"
            found.notes.append(f"{edges.table.files} is left out: {reason}")
            return
        types.append(type_)
    _name_edges(found, edges, types[0], types[1], edges.table.name)


def _name_edges(found: _Draft, edges: Section, source: str, destination: str, called: str) -> None:
    """Add a relation, with a name from the words of its table or column that are not those of its types."""
    said = {*words(source), *words(destination)}
    kept = [word for word in words(called) if singular(word) not in said and word not in (*EDGE_WORDS, *ID_WORDS)]
    name = "_".join(word for word in kept if not word.isdigit()) or "to"
    name = _free(name, [key[1] for key in found.relations if (key[0], key[2]) == (source, destination)])
    found.relations[(source, name, destination)] = edges


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
    """Return the type that has the ids of a column, and whether it can be no other. The other end's type comes first.

    Where the two ends are named after different things, numbers found among the ids of either prove nothing: two
    types number their nodes alike.
    """
    said = {of_what(edges.keys[end]) for end in ENDS}
    if len(said) > 1 and "" not in said and not edges.table.is_text(column) and refers(column, ()):
        return None, False
    shares = {name: found.share(edges.table, column, name) for name in _able(found, edges.table, column)}
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
    return f"# {printable(text)}\n"
