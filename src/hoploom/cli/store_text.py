"""What a store holds, as text for people and as JSON. It is apart from the commands' arguments, as it imports torch."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hoploom.cli.command import megabytes, table
from hoploom.config.values import printable
from hoploom.fields import Field
from hoploom.store import format as layout
from hoploom.store.format import Manifest


def headline(path: Path | str, manifest: Manifest) -> str:
    """A line about a store."""
    num_nodes = sum(t.num_nodes for t in manifest.schema.node_types)
    num_edges = sum(r.num_edges for r in manifest.schema.relations)
    parts = f"{len(manifest.parts)} part" + "s" * (len(manifest.parts) > 1)
    return (
        f"{printable(str(path))}: {num_nodes:,} nodes, {num_edges:,} edges, {parts}, {megabytes(num_bytes(manifest))}"
    )


def contents_of(manifest: Manifest) -> dict[str, Any]:
    """store.json, with sizes instead of the list of files."""
    contents: dict[str, Any] = json.loads(layout.manifest_to_json(manifest))
    del contents["files"]
    for number, part in enumerate(contents["parts"]):
        part["bytes"] = _part_bytes(manifest, number)
    return contents | {"num_files": len(manifest.files), "bytes": num_bytes(manifest)}


def as_text(path: Path) -> str:
    """A store as tables of its types, relations and parts."""
    manifest = layout.read_manifest(path)
    schema = manifest.schema
    node_types = [
        (t.name, t.num_nodes, _fields(t.fields.items()), ", ".join(f"{k} {n:,}" for k, n in t.splits.items()))
        for t in schema.node_types
    ]
    relations = [(" ".join(r.key), r.num_edges, _fields(r.fields.items())) for r in schema.relations]
    parts = [
        (number, sum(part.num_nodes), sum(part.num_edges), _part_bytes(manifest, number))
        for number, part in enumerate(manifest.parts)
    ]
    named = (("weights", schema.weight), ("times", schema.time))
    fields_read = [f"{what} are in field {name!r}" for what, name in named if name]
    sections = (
        "\n".join((headline(path, manifest), *fields_read)),
        table(("node type", "nodes", "fields", "splits"), node_types),
        table(("relation", "edges", "fields"), relations),
        table(("part", "nodes", "edges", "bytes"), parts),
    )
    return "\n\n".join(sections)


def _fields(fields: Iterable[tuple[str, Field]]) -> str:
    return ", ".join(f"{name} {f.dtype}{list(f.shape) if f.shape else ''}" for name, f in fields)


def num_bytes(manifest: Manifest) -> int:
    """Of all files of a store."""
    return sum(entry.bytes for entry in manifest.files.values())


def _part_bytes(manifest: Manifest, part: int) -> int:
    folder = layout.part_folder(part) + "/"
    return sum(entry.bytes for name, entry in manifest.files.items() if name.startswith(folder))
