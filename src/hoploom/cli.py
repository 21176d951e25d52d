"""The `hoploom` command. A subcommand is one entry of COMMANDS: a name, its arguments, and a function to run.

Exit codes: 0 done, 1 a check found problems or training failed, 2 the user's mistake (one line, no traceback),
130 interrupted.
"""

import argparse
import inspect
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import hoploom
from hoploom.build import synthetic
from hoploom.config import as_int
from hoploom.errors import BatchError, ConfigError, HoploomError, PeerError, StoreError, TrainError
from hoploom.schema import Field
from hoploom.store import layout
from hoploom.store.check import problems
from hoploom.store.disk import check_manifest
from hoploom.store.layout import Manifest
from hoploom.train import environment
from hoploom.train.context import Context, init
from hoploom.train.recipes.checks import check_world
from hoploom.train.recipes.reader import read_recipe
from hoploom.train.recipes.sections import Recipe
from hoploom.train.recipes.template import template, template_for
from hoploom.train.runs.run import LAST, RESULT_FILE, check_folder, run, summary
from hoploom.train.spawn import spawn

Arguments = argparse.Namespace
BAR_WIDTH = 40
FAILURES = (TrainError, PeerError, BatchError)  # what goes wrong on the way is no mistake in the command


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
        return 1 if isinstance(error, FAILURES) else 2
    except KeyboardInterrupt as interrupt:
        print(f"hoploom: interrupted{f'; {interrupt}' if interrupt.args else ''}", file=sys.stderr)
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


# --- init ----------------------------------------------------------------------------------------


def _init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", type=Path, default=Path("run.toml"), help="where to write it (run.toml)")
    parser.add_argument("--store", type=Path, help="a store, to fill in what it holds")


def _init(arguments: Arguments) -> int:
    path: Path = arguments.recipe
    text = template() if arguments.store is None else template_for(arguments.store, beside=path.parent)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists; give another path, or remove it first") from error
    print(f"wrote {path}; read it through, then: hoploom train {path}")
    return 0


# --- train ---------------------------------------------------------------------------------------


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="run.toml; `hoploom init` writes one")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another value for a key, e.g. train.epochs=3"
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="processes on this machine (default: train.processes)"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint, where there is one")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _train(arguments: Arguments) -> int:
    recipe = read_recipe(arguments.recipe, arguments.set)
    started = environment.read()
    num_processes = _num_processes(arguments, recipe, started)
    check_world(recipe, num_processes)
    resume = arguments.resume or started.restarts > 0
    if started.rank == 0:
        check_folder(recipe, resume=resume)
    try:
        work = (recipe, resume, not arguments.quiet)
        if started.world_size > 1 or num_processes == 1:
            with init(device=_device(recipe)) as context:
                complete = train_rank(context, *work)
        else:
            with _terminated_as_interrupted():
                spawn(train_rank, num_processes, work, device=_device(recipe))
            complete = (recipe.output.folder / RESULT_FILE).exists()
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(*_way_on(arguments, recipe)) from interrupt
    if not complete:
        raise KeyboardInterrupt(*_way_on(arguments, recipe))
    return 0


def train_rank(context: Context, recipe: Recipe, resume: bool, progress: bool) -> bool:
    """What every rank does; whether it was left to finish."""
    result = run(recipe, context, resume=resume, progress=progress)
    if context.is_main:
        print(summary(result), flush=True)
    return result.is_complete


def _num_processes(arguments: Arguments, recipe: Recipe, started: environment.Place) -> int:
    wanted = arguments.processes
    if wanted is not None:
        wanted = as_int("--processes", wanted, 1, "give the number of processes")
    if started.source == "single":
        return wanted or recipe.train.processes
    if wanted not in (None, started.world_size):
        raise ConfigError(f"--processes is {wanted}, but {started.source} started {started.world_size}; leave it out")
    return started.world_size


def _device(recipe: Recipe) -> str | None:
    return None if recipe.train.device == "auto" else recipe.train.device


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the ranks as Ctrl-C does; while they train, they see to both themselves."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _way_on(arguments: Arguments, recipe: Recipe) -> list[str]:
    """The command that goes on, if there is something to go on from."""
    if not (recipe.output.folder / f"{LAST}.safetensors").exists():
        return ["there is no checkpoint yet"]
    words = ["hoploom", "train", str(arguments.recipe)]
    for override in arguments.set:
        words += ["--set", override]
    words += ["--processes", str(arguments.processes)] if arguments.processes else []
    return [f"continue with: {shlex.join([*words, '--resume'])}"]


COMMANDS = (
    Command("info", "show what a store holds", _info_arguments, _info),
    Command("check", "read every byte of a store and name what is damaged", _check_arguments, _check),
    Command("generate", "write a synthetic graph of any size", _generate_arguments, _generate),
    Command("init", "write a commented run.toml to start from", _init_arguments, _init),
    Command("train", "train as a run.toml says", _train_arguments, _train),
)
