"""The run.toml that `hoploom init` writes: every key with its default and a comment, filled in from a store."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hoploom.config.rules import default_of, keys_in
from hoploom.config.values import as_toml, printable
from hoploom.schema import ORIGINAL_ID, NodeType, Schema
from hoploom.store import Store, open_store
from hoploom.train.runs.problem import largest_label
from hoploom.train.runs.reading import applies
from hoploom.train.runs.run_file import FIELDS, HEADINGS, KEYS, LINKS

HEADER = """\
# The settings of a run: `hoploom train` reads this file. Only `store` is required. All other lines show the default,
# and lines that begin with `# ` have no effect. To change a setting for one run: `--set optimizer.lr=0.01`.
"""
COLUMN, WIDTH = 32, 120  # where comments begin, and where they end
WHOLE = ("int8", "int16", "int32", "int64", "uint8", "bool")


def template(known: Mapping[str, Any] | None = None, notes: Mapping[str, str] | None = None) -> str:
    """A commented run.toml. `known` are values to fill in, by full name; `notes` take the place of a key's help.

    >>> Path("run.toml").write_text(template({"store": "papers.store", "loader.fanouts": (10, 5)}))
    """
    known, notes = known or {}, notes or {}
    defaults = {key: default_of(described) for key, described in FIELDS.items()}
    values = defaults | {"store": KEYS["store"].example} | dict(known)
    lines = [HEADER]
    for section, owner in HEADINGS.items():
        lines += [f"\n[{section}]  # {_lowered(owner)}"] if section else []
        for name in keys_in(owner):
            key = f"{section}.{name}".removeprefix(".")
            if KEYS[key].help.startswith("deprecated"):
                continue
            lines.append(_template_line(name, key, values, printable(notes.get(key, KEYS[key].help))))
    return "\n".join(lines) + "\n"


def _lowered(owner: type[Any]) -> str:
    """What a section is for, as a comment."""
    text = str(owner.__doc__).rstrip(".")
    return text[0].lower() + text[1:]


def _template_line(name: str, key: str, values: Mapping[str, Any], help: str) -> str:
    value = values[key]
    in_force = applies(key, values) and value not in (None, {})
    shown = KEYS[key].example if value in (None, {}) and KEYS[key].example is not None else value
    line = f"{'' if in_force else '# '}{name} = {as_toml(shown)}"
    words = KEYS[key].rule.words
    choices = f": {', '.join(words)}" if words and not any(f"{word}:" in help for word in words) else ""
    beside = f"{line:<{COLUMN}}  # {help}{choices}"
    return beside if len(beside) <= WIDTH else f"# {help}{choices}:\n{line}"


def template_for(store: Path, *, beside: Path) -> str:
    """The template, filled in from a store's manifest, to be written into the folder `beside`."""
    known, notes = _of_store(store, beside)
    return template(known, notes)


def _of_store(folder: Path, beside: Path) -> tuple[dict[str, object], dict[str, str]]:
    """What a store's manifest fills in: values, and notes that take the place of some keys' help."""
    store = open_store(folder)
    schema = store.schema
    known: dict[str, object] = {"store": os.path.relpath(folder, beside)}
    notes: dict[str, str] = {}
    labelled, label = _labelled(schema)
    if labelled is None or label is None:
        relation = schema.relations[0].key
        known |= {"task.kind": LINKS, "task.relation": " ".join(relation)}
        notes["task.relation"] = f"the relation whose links the model predicts; one of {_relations(schema)}"
    else:
        known |= {"task.kind": _kind_of(labelled, label), "task.label": label, **_splits_of(labelled)}
        fields = ", ".join(name for name in labelled.fields if name != ORIGINAL_ID)
        notes["task.label"] = f"the field that holds the labels; one of {fields}"
        if known["task.kind"] == "node-classification":
            notes["task.num_classes"] = (
                f"number of classes; default: counted, {_num_classes(store, labelled, label)} here"
            )
        if not schema.homogeneous:
            known["task.node_type"] = labelled.name
    if not schema.homogeneous:
        known["model.name"] = "rsage"
        notes["loader.relation_fanouts"] = f"other fanouts for some relations; the relations are {_relations(schema)}"
    return known, notes


def _labelled(schema: Schema) -> tuple[NodeType | None, str | None]:
    """The first node type with splits and a label, and the label."""
    found = ((t, _label_of(t, schema)) for t in schema.node_types if t.splits)
    return next(((node_type, label) for node_type, label in found if label is not None), (None, None))


def why_task(schema: Schema) -> str:
    """The task that a template for a store has, and why."""
    labelled, label = _labelled(schema)
    if labelled is not None and label is not None:
        return f"task: {_kind_of(labelled, label)}, because {labelled.name!r} has splits and the label {label!r}"
    ready = next((t.name for t in schema.node_types if "y" in t.fields), None)
    if ready is not None:
        way_out = f"to predict it, add split to [nodes.{ready}] in graph.toml, and build again"
        return f"task: {LINKS}, because {ready!r} has the label 'y', but no split; {way_out}"
    way_out = "to predict a column of nodes, name it as label in graph.toml, and build again"
    return f"task: {LINKS}, because the store has no label field; {way_out}"


def _relations(schema: Schema) -> str:
    return ", ".join(as_toml(" ".join(relation.key)) for relation in schema.relations)


def _label_of(node_type: NodeType, schema: Schema) -> str | None:
    """`y`, else the first field of whole numbers."""
    if "y" in node_type.fields:
        return "y"
    others = ("x", ORIGINAL_ID, schema.time)
    whole = [name for name, field in node_type.fields.items() if field.dtype in WHOLE and name not in others]
    return whole[0] if whole else None


def _kind_of(node_type: NodeType, label: str) -> str:
    field = node_type.fields[label]
    if field.shape and field.shape != (1,):
        return "multi-label"
    return "node-classification" if field.dtype in WHOLE else "node-regression"


def _num_classes(store: Store, node_type: NodeType, label: str) -> int:
    splits = [store.split(name, node_type.name) for name in node_type.splits]
    return int(largest_label(store, node_type.name, label, splits)) + 1


def _splits_of(node_type: NodeType) -> dict[str, str]:
    """train, val and test by these names or by alike ones; the first split trains where none is called so."""
    names = list(node_type.splits)
    found = {"train": "train" if "train" in names else names[0]}
    found["val"] = next((name for name in ("val", "valid", "validation") if name in names), "")
    found["test"] = "test" if "test" in names else ""
    return {f"task.{split}": name for split, name in found.items()}
