"""Commands about stores: info, check, generate."""

import argparse
import inspect
import json
from collections.abc import Iterable
from pathlib import Path

from hoploom.cli.command import Arguments, Command, megabytes, progress_bar, table
from hoploom.errors import StoreError
from hoploom.ingest import synthetic
from hoploom.schema import Field
from hoploom.store import format as layout
from hoploom.store.check import problems
from hoploom.store.disk import check_manifest
from hoploom.store.format import Manifest

# --- info ----------------------------------------------------------------------------------------


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="a store's directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _info(arguments: Arguments) -> int:
    manifest = layout.read_manifest(arguments.store)
    check_manifest(arguments.store, manifest)
    print(_as_json(manifest) if arguments.json else _as_text(arguments.store, manifest))
    return 0


def _as_json(manifest: Manifest) -> str:
    """store.json, with sizes instead of the list of files."""
    contents = json.loads(layout.to_json(manifest))
    del contents["files"]
    for number, part in enumerate(contents["parts"]):
        part["bytes"] = _part_bytes(manifest, number)
    return json.dumps(contents | {"num_files": len(manifest.files), "bytes": _bytes(manifest)}, indent=1)


def _as_text(path: Path, manifest: Manifest) -> str:
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


def headline(path: Path, manifest: Manifest) -> str:
    num_nodes = sum(t.num_nodes for t in manifest.schema.node_types)
    num_edges = sum(r.num_edges for r in manifest.schema.relations)
    parts = f"{len(manifest.parts)} part" + "s" * (len(manifest.parts) > 1)
    return f"{path}: {num_nodes:,} nodes, {num_edges:,} edges, {parts}, {megabytes(_bytes(manifest))}"


def _fields(fields: Iterable[tuple[str, Field]]) -> str:
    return ", ".join(f"{name} {f.dtype}{list(f.shape) if f.shape else ''}" for name, f in fields)


def _bytes(manifest: Manifest) -> int:
    return sum(entry.bytes for entry in manifest.files.values())


def _part_bytes(manifest: Manifest, part: int) -> int:
    folder = layout.part_folder(part) + "/"
    return sum(entry.bytes for name, entry in manifest.files.items() if name.startswith(folder))


# --- check ---------------------------------------------------------------------------------------


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="a store's directory")


def _check(arguments: Arguments) -> int:
    if not arguments.store.exists():
        raise StoreError(f"{arguments.store} does not exist; give a store's directory")
    found = False
    for problem in problems(arguments.store):
        print(problem)
        found = True
    if found:
        return 1
    manifest = layout.read_manifest(arguments.store)
    print(f"ok: {len(manifest.files)} files, {_bytes(manifest):,} bytes")
    return 0


# --- generate ------------------------------------------------------------------------------------

GENERATE_OPTIONS = (  # flag, argument of synthetic.generate, help
    ("--degree", "avg_degree", "mean in-degree"),
    ("--features", "num_features", "features of a node"),
    ("--classes", "num_classes", "communities, and so labels"),
    ("--homophily", "homophily", "share of the edges that stay in their community"),
    ("--seed", "seed", "what all is drawn from"),
    ("--parts", "num_parts", "parts of the store"),
    ("--feature-dtype", "feature_dtype", "float32, float16 or bfloat16"),
    ("--heterogeneous", "heterogeneous", "papers, authors and institutions"),
    ("--weights", "weights", "add edge weights"),
    ("--times", "times", "add edge times"),
)


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="where to write the store; must not exist")
    parser.add_argument(
        "--nodes", dest="num_nodes", type=int, required=True, metavar="N", help="nodes of the labelled type"
    )
    parameters = inspect.signature(synthetic.generate).parameters
    for flag, keyword, text in GENERATE_OPTIONS:
        default = parameters[keyword].default
        if default is False:
            parser.add_argument(flag, dest=keyword, action="store_true", help=text)
        else:
            help_text = f"{text} (default: {default})"
            kind = type(default)
            parser.add_argument(flag, dest=keyword, type=kind, default=default, metavar="X", help=help_text)


def _generate(arguments: Arguments) -> int:
    given = {keyword: getattr(arguments, keyword) for _, keyword, _ in GENERATE_OPTIONS}
    with progress_bar() as show:
        synthetic.generate(arguments.out, num_nodes=arguments.num_nodes, progress=show, **given)
    print(headline(arguments.out, layout.read_manifest(arguments.out)))
    return 0


COMMANDS = {
    "info": Command(_info_arguments, _info),
    "check": Command(_check_arguments, _check),
    "generate": Command(_generate_arguments, _generate),
}
