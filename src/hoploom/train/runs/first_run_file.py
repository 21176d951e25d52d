"""The commented run.toml that `hoploom init` writes, with every key; for a store, with the task that it allows."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hoploom.config.rules import default_of, keys_in
from hoploom.config.values import as_toml, printable
from hoploom.schema import ORIGINAL_ID, NodeType, Schema
from hoploom.store import open_store
from hoploom.train.runs.run_file import FIELDS, HEADINGS, KEYS, LINKS, Values, applies

HEADER = """\
# The settings of a run: `hoploom train` reads this file. Only `store` is required. All other lines show the default,
# and lines that begin with `# ` have no effect. To change a setting for one run: `--set optimizer.lr=0.01`.
"""
COLUMN, WIDTH = 32, 120  # where comments begin, and where they end
WHOLE_NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "bool")


def template(known: Values | None = None, notes: Mapping[str, str] | None = None) -> str:
    """Return a commented run.toml with the values `known`, and `notes` in place of the help; both by keys' full names.

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
            value, help, words = values[key], printable(notes.get(key, KEYS[key].help)), KEYS[key].rule.words
            has_effect = applies(key, values) and value not in (None, {})
            shown = KEYS[key].example if value in (None, {}) and KEYS[key].example is not None else value
            line = f"{'' if has_effect else '# '}{name} = {as_toml(shown)}"
            help += f": {', '.join(words)}" if words and not any(f"{word}:" in help for word in words) else ""
            commented = f"{line:<{COLUMN}}  # {help}"
            lines.append(commented if len(commented) <= WIDTH else f"# {help}:\n{line}")
    return "\n".join(lines) + "\n"


def template_for(folder: Path, *, beside: Path) -> tuple[str, str]:
    """Return a run.toml, to be put in `beside`, for the store in `folder`; and a line that says why this task."""
    schema = open_store(folder).schema
    known: dict[str, Any] = {"store": os.path.relpath(folder, beside)}
    notes: dict[str, str] = {}
    fields = {name: field for relation in schema.relations for name, field in relation.fields.items()}
    numbers = [name for name, field in fields.items() if field.dtype not in WHOLE_NUMBERS]
    if numbers:
        notes["model.edges"] = (
            f"the fields of edges that the model reads as features; numbers are in {', '.join(numbers)}"
        )
    relations = ", ".join(as_toml(" ".join(relation.key)) for relation in schema.relations)
    labelled = next(((t, label) for t in schema.node_types if t.splits and (label := _label_of(t, schema))), None)
    if labelled is None:
        known |= {"task.kind": LINKS, "task.relation": " ".join(schema.relations[0].key)}
        notes["task.relation"] = f"the relation whose links the model predicts; one of {relations}"
        way_out = "to predict a column of nodes, name it as label in graph.toml, and build again"
        why = f"task: {LINKS}, because the store has no label field; {way_out}"
        for ready in [t.name for t in schema.node_types if "y" in t.fields][:1]:
            way_out = f"to predict it, add split to [nodes.{ready}] in graph.toml, and build again"
            why = f"task: {LINKS}, because {ready!r} has the label 'y', but no split; {way_out}"
    else:
        node_type, label = labelled
        field, names = node_type.fields[label], list(node_type.splits)
        kind = "node-classification" if field.dtype in WHOLE_NUMBERS else "node-regression"
        known["task.kind"] = "multi-label" if field.shape and field.shape != (1,) else kind
        known |= {"task.label": label, "task.train": "train" if "train" in names else names[0]}
        known["task.val"] = next((name for name in ("val", "valid", "validation") if name in names), "")
        known["task.test"] = "test" if "test" in names else ""
        notes["task.label"] = "the field that holds the labels; one of " + ", ".join(
            name for name in node_type.fields if name != ORIGINAL_ID
        )
        if not schema.homogeneous:
            known["task.node_type"] = node_type.name
        why = f"task: {known['task.kind']}, because {node_type.name!r} has splits and the label {label!r}"
    if not schema.homogeneous:
        known["model.name"] = "rsage"
        notes["loader.relation_fanouts"] = f"other fanouts for some relations; the relations are {relations}"
    return template(known, notes), why


def _label_of(node_type: NodeType, schema: Schema) -> str | None:
    """Return the name of the label field: `y`, else the first integer field; None if the type has none."""
    if "y" in node_type.fields:
        return "y"
    others = ("x", ORIGINAL_ID, schema.time)
    fields = node_type.fields.items()
    return next((name for name, field in fields if field.dtype in WHOLE_NUMBERS and name not in others), None)
