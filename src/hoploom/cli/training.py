"""The commands train, evaluate and infer, and init, which writes a file to start from."""

import argparse
import sys
from pathlib import Path

from hoploom.cli.command import Arguments, Command, add_json, add_option, check_writable, read_up_to
from hoploom.config.values import parse_bytes, printable
from hoploom.errors import ConfigError


def _add_set(parser: argparse.ArgumentParser) -> None:
    text = "another value for a key of run.toml, e.g. train.epochs=3"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)


def _add_processes(parser: argparse.ArgumentParser) -> None:
    text = "processes on this machine (default: train.processes)"
    add_option(parser, "--processes", read_up_to(4096), metavar="N", help=text)


# --- train ---------------------------------------------------------------------------------------


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="run.toml; `hoploom init` writes one")
    _add_set(parser)
    _add_processes(parser)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint, if there is one")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_json(parser)


# --- evaluate and infer --------------------------------------------------------------------------


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the output folder of a run")
    _add_set(parser)
    _add_processes(parser)
    text = "the checkpoint to load (default: best; last if the run had no validation)"
    parser.add_argument("--checkpoint", choices=("best", "last"), help=text)


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    text = "train, val or test: what task.train, task.val and task.test name (default: test)"
    parser.add_argument("--split", choices=("train", "val", "test"), default="test", help=text)
    add_json(parser)


def _infer_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("-o", "--out", type=Path, metavar="DIR", help="where to write (default: RUN/nodes)")
    text = "embedding, output, prediction (default: embedding,prediction; for links embedding,output)"
    parser.add_argument("--columns", metavar="NAME,...", help=text)
    text = "the node types to write (default: all with outputs)"
    parser.add_argument("--node-types", metavar="NAME,...", help=text)
    text = "memory of each process besides the model (default: 256MiB)"
    add_option(parser, "--memory", parse_bytes, default="256MiB", metavar="SIZE", help=text)
    add_json(parser)


# --- init ----------------------------------------------------------------------------------------


def _init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, help="where to write it (run.toml; graph.toml with --tables)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--store", type=Path, help="a store; its node types, labels and splits are written into the new file"
    )
    source.add_argument("--tables", type=Path, metavar="DIR", help="a folder with tables: draft a graph.toml from them")


def _init(arguments: Arguments) -> int:
    path: Path = arguments.file or Path("run.toml" if arguments.tables is None else "graph.toml")
    if not path.exists():
        check_writable("FILE", path)
    way_on = f"hoploom train {path}"
    if arguments.tables is not None:
        from hoploom.ingest.tables.draft import draft

        text, section = draft(arguments.tables, path.parent), ""
        way_on = f"hoploom build {path} -o {path.stem}.store"
        for line in text.splitlines():
            section = line if line.startswith("[") else section
            if "  # guessed" in line:
                print(f"{section} {line}", file=sys.stderr)
    else:
        from hoploom.train.runs.run_toml import template, template_for

        text, why = (template(), "") if arguments.store is None else template_for(arguments.store, beside=path.parent)
        if why:
            print(printable(why, "\n"), file=sys.stderr)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists; give another path, or remove it first") from error
    print(f"wrote {path}; read it through, then: {way_on}")
    return 0


COMMANDS = {
    "train": Command(_train_arguments, "running:train", lambda a: f"reading {a.file}"),
    "evaluate": Command(_evaluate_arguments, "running:evaluate_run", lambda a: f"reading {a.run}"),
    "infer": Command(_infer_arguments, "running:infer_run", lambda a: f"reading {a.run}"),
    "init": Command(
        _init_arguments,
        _init,
        lambda a: f"reading {a.tables or a.store}" if a.tables or a.store else "",
        lambda a: "hoploom.ingest.tables.draft" if a.tables else "hoploom.train.runs.run_toml",
    ),
}
