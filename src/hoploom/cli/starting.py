"""The command that writes a file to start from: run.toml for a training, graph.toml for tables."""

import argparse
from pathlib import Path

from hoploom.cli.command import Arguments, Command
from hoploom.errors import ConfigError


def _init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, help="where to write it (run.toml; graph.toml with --tables)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--store", type=Path, help="a store, to fill in what it holds")
    source.add_argument("--tables", type=Path, metavar="DIR", help="a folder with tables: draft a graph.toml from them")


def _init(arguments: Arguments) -> int:
    path: Path = arguments.file or Path("run.toml" if arguments.tables is None else "graph.toml")
    text, way_on = _draft(path, arguments) if arguments.tables is not None else _template(path, arguments)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists; give another path, or remove it first") from error
    print(f"wrote {path}; read it through, then: {way_on}")
    return 0


def _template(path: Path, arguments: Arguments) -> tuple[str, str]:
    from hoploom.train.runs.template import template, template_for

    text = template() if arguments.store is None else template_for(arguments.store, beside=path.parent)
    return text, f"hoploom train {path}"


def _draft(path: Path, arguments: Arguments) -> tuple[str, str]:
    from hoploom.ingest.tables.draft import draft

    return draft(arguments.tables, path.parent), f"hoploom build {path} -o {path.stem}.store"


COMMANDS = {"init": Command(_init_arguments, _init)}
