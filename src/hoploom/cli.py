"""The `hoploom` command. A subcommand is one entry of COMMANDS: a name, its arguments, and a function to run.

Exit codes: 0 done, 1 a check found problems, 2 the user's mistake (one line, no traceback), 130 interrupted.
"""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hoploom
from hoploom.build import synthetic
from hoploom.errors import HoploomError, StoreError
from hoploom.schema import Field
from hoploom.store import layout
from hoploom.store.check import problems
from hoploom.store.disk import check_manifest
from hoploom.store.layout import Manifest

Arguments = argparse.Namespace
BAR_WIDTH = 40


@dataclass(frozen=True)
class Command:
    """One subcommand."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Arguments], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    try:
        code = command.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (HoploomError, OSError) as error:
        print(f"hoploom: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hoploom: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hoploom", description=hoploom.__doc__)
    parser.add_argument("--version", action="version", version=f"hoploom {hoploom.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = commands.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    return parser


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
        "\n".join((_headline(path, manifest), *fields_read)),
        _table(("node type", "nodes", "fields", "splits"), node_types),
        _table(("relation", "edges", "fields"), relations),
        _table(("part", "nodes", "edges", "bytes"), parts),
    )
    return "\n\n".join(sections)


def _headline(path: Path, manifest: Manifest) -> str:
    num_nodes = sum(t.num_nodes for t in manifest.schema.node_types)
    num_edges = sum(r.num_edges for r in manifest.schema.relations)
    parts = f"{len(manifest.parts)} part" + "s" * (len(manifest.parts) > 1)
    return f"{path}: {num_nodes:,} nodes, {num_edges:,} edges, {parts}, {_megabytes(_bytes(manifest))}"


def _fields(fields: Iterable[tuple[str, Field]]) -> str:
    return ", ".join(f"{name} {f.dtype}{list(f.shape) if f.shape else ''}" for name, f in fields)


def _bytes(manifest: Manifest) -> int:
    return sum(entry.bytes for entry in manifest.files.values())


def _part_bytes(manifest: Manifest, part: int) -> int:
    folder = layout.part_folder(part) + "/"
    return sum(entry.bytes for name, entry in manifest.files.items() if name.startswith(folder))


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _table(header: Sequence[str], rows: Sequence[Sequence[str | int]]) -> str:
    """Columns as wide as they need to be, counts to the right."""
    right = [isinstance(cell, int) for cell in rows[0]] if rows else [False] * len(header)
    written = [header, *([f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*written, strict=True)]
    lines = (
        "  ".join(f"{cell:{'>' if r else '<'}{w}}" for cell, r, w in zip(line, right, widths, strict=True))
        for line in written
    )
    return "\n".join(line.rstrip() for line in lines)


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
    with ProgressBar() as bar:
        synthetic.generate(arguments.out, num_nodes=arguments.num_nodes, progress=bar.show, **given)
    print(_headline(arguments.out, layout.read_manifest(arguments.out)))
    return 0


class ProgressBar:
    """A bar on stderr, drawn only where that is a terminal."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, done: int, total: int) -> None:
        filled = BAR_WIDTH * done // total
        line = f"[{'#' * filled:.<{BAR_WIDTH}}] {100 * done // total:3d} % of {_megabytes(total)}"
        if line != self._shown and sys.stderr.isatty():
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
            self._shown = line

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print(file=sys.stderr)


COMMANDS = (
    Command("info", "show what a store holds", _info_arguments, _info),
    Command("check", "read every byte of a store and name what is damaged", _check_arguments, _check),
    Command("generate", "write a synthetic graph of any size", _generate_arguments, _generate),
)
