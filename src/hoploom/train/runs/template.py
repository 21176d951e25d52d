"""The run.toml that `hoploom init` writes: every key with its default and its help, filled in from a store."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hoploom.config.rules import default_of, keys_in
from hoploom.config.values import as_toml, printable
from hoploom.schema import ORIGINAL_ID, NodeType, Schema
from hoploom.store import Store, open_store
from hoploom.train.runs.run_file import FIELDS, HEADINGS, KEYS, LINKS, Values, applies
from hoploom.train.tasks import largest_label

HEADER = """\
# The settings of a run: `hoploom train` reads this file. Only `store` is required. All other lines show the default,
# and lines that begin with `# ` have no effect. To change a setting for one run: `--set optimizer.lr=0.01`.
"""
COLUMN, WIDTH = 32, 120  # where comments begin, and where they end
WHOLE_NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "bool")


def template(known: Values | None = None, notes: Mapping[str, str] | None = None) -> str:
    """Return a commented run.toml. `known` are values to fill in, by full name; `notes` replace a key's help.

    >>> Path("run.toml").write_text(template({"store": "papers.store", "loader.fanouts": (10, 5)}))
    """
    known, notes = known or {}, notes or {}
    values = {key: default_of(described) for key, described in FIELDS.items()}
    values |= {"store": KEYS["store"].example} | dict(known)
    lines = [HEADER]
    for section, owner in HEADINGS.items():
        purpose = str(owner.__doc__).rstrip(".")
        lines += [f"\n[{section}]  # {purpose[0].lower()}{purpose[1:]}"] if section else []
        for name in keys_in(owner):
            key = f"{section}.{name}".removeprefix(".")
            lines.append(_template_line(name, key, values, printable(notes.get(key, KEYS[key].help))))
    return "\n".join(lines) + "\n"


def _template_line(name: str, key: str, values: Values, help: str) -> str:
    value = values[key]
    has_effect = applies(key, values) and value not in (None, {})
    shown = KEYS[key].example if value in (None, {}) and KEYS[key].example is not None else value
    line = f"{'' if has_effect else '# '}{name} = {as_toml(shown)}"
    words = KEYS[key].rule.words
    choices = f": {', '.join(words)}" if words and not any(f"{word}:" in help for word in words) else ""
    commented = f"{line:<{COLUMN}}  # {help}{choices}"
    return commented if len(commented) <= WIDTH else f"# {help}{choices}:\n{line}"


def template_for(folder: Path, *, beside: Path) -> tuple[str, str]:
    """Return the template filled in from a store, for a file in the folder `beside`, and why it has this task."""
    store = open_store(folder)
    schema = store.schema
    known: dict[str, Any] = {"store": os.path.relpath(folder, beside)}
    notes: dict[str, str] = {}
    relations = ", ".join(as_toml(" ".join(relation.key)) for relation in schema.relations)
    labelled = next(((t, label) for t in schema.node_types if t.splits and (label := _label_of(t, schema))), None)
    if labelled is None:
        known |= {"task.kind": LINKS, "task.relation": " ".join(schema.relations[0].key)}
        notes["task.relation"] = f"the relation whose links the model predicts; one of {relations}"
        why = _why_links(schema)
    else:
        node_type, label = labelled
        known |= {"task.kind": _kind_of(node_type, label), "task.label": label, **_splits_of(node_type)}
        notes["task.label"] = "the field that holds the labels; one of " + ", ".join(
            name for name in node_type.fields if name != ORIGINAL_ID
        )
        if known["task.kind"] == "node-classification":
            counted = _num_classes(store, node_type, label)
            notes["task.num_classes"] = f"number of classes; default: counted, {counted} here"
        if not schema.homogeneous:
            known["task.node_type"] = node_type.name
        why = f"task: {known['task.kind']}, because {node_type.name!r} has splits and the label {label!r}"
    if not schema.homogeneous:
        known["model.name"] = "rsage"
        notes["loader.relation_fanouts"] = f"other fanouts for some relations; the relations are {relations}"
    return template(known, notes), why


def _why_links(schema: Schema) -> str:
    ready = next((t.name for t in schema.node_types if "y" in t.fields), None)
    if ready is not None:
        way_out = f"to predict it, add split to [nodes.{ready}] in graph.toml, and build again"
        return f"task: {LINKS}, because {ready!r} has the label 'y', but no split; {way_out}"
    way_out = "to predict a column of nodes, name it as label in graph.toml, and build again"
    return f"task: {LINKS}, because the store has no label field; {way_out}"


def _label_of(node_type: NodeType, schema: Schema) -> str | None:
    """Return `y`, else the first field of whole numbers."""
    if "y" in node_type.fields:
        return "y"
    others = ("x", ORIGINAL_ID, schema.time)
    fields = node_type.fields.items()
    return next((name for name, field in fields if field.dtype in WHOLE_NUMBERS and name not in others), None)


def _kind_of(node_type: NodeType, label: str) -> str:
    field = node_type.fields[label]
    if field.shape and field.shape != (1,):
        return "multi-label"
    return "node-classification" if field.dtype in WHOLE_NUMBERS else "node-regression"


def _num_classes(store: Store, node_type: NodeType, label: str) -> int:
    splits = [store.split(name, node_type.name) for name in node_type.splits]
    return int(largest_label(store, node_type.name, label, splits)) + 1


def _splits_of(node_type: NodeType) -> dict[str, str]:
    """Return train, val and test by these names or similar ones; the first split trains if none is called so."""
    names = list(node_type.splits)
    found = {"train": "train" if "train" in names else names[0]}
    found["val"] = next((name for name in ("val", "valid", "validation") if name in names), "")
    found["test"] = "test" if "test" in names else ""
    return {f"task.{split}": name for split, name in found.items()}
