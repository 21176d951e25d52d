"""The commands that train, and that write a file to start from."""

import argparse
import shlex
from pathlib import Path

from hoploom.cli.command import Arguments, Command
from hoploom.config.values import as_int
from hoploom.errors import BatchError, ConfigError, HoploomError, PeerError, TrainError
from hoploom.ranks import environment
from hoploom.ranks.context import Context, init
from hoploom.ranks.spawn import spawn
from hoploom.train.checkpoint import last_good
from hoploom.train.runs.reading import check_packages, check_world, read_run_file
from hoploom.train.runs.run import LAST, RESULT_FILE, check_folder, run, summary
from hoploom.train.runs.run_file import RunFile


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="run.toml; `hoploom init` writes one")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another value for a key, e.g. train.epochs=3"
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="processes on this machine (default: train.processes)"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint, where there is one")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _train(arguments: Arguments) -> int:
    run_file = read_run_file(arguments.file, arguments.set)
    started = environment.read()
    num_processes = _num_processes(arguments, run_file, started)
    check_world(run_file, num_processes)
    check_packages(run_file)
    resume = arguments.resume or started.restarts > 0
    if started.rank == 0:
        check_folder(run_file, resume=resume)
    try:
        work = (run_file, resume, not arguments.quiet)
        if started.world_size > 1 or num_processes == 1:
            with init(device=_device(run_file)) as context:
                complete = train_rank(context, *work)
        else:
            spawn(train_rank, num_processes, work, device=_device(run_file))
            complete = (run_file.output.folder / RESULT_FILE).exists()
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(*_way_on(arguments, run_file)) from interrupt
    except (TrainError, PeerError, BatchError) as error:
        raise type(error)(_lost(error, arguments, run_file, started)) from error
    if not complete:
        raise KeyboardInterrupt(*_way_on(arguments, run_file))
    return 0


def train_rank(context: Context, run_file: RunFile, resume: bool, progress: bool) -> bool:
    """What every rank does; whether it was left to finish."""
    result = run(run_file, context, resume=resume, progress=progress)
    if context.is_main:
        print(summary(result), flush=True)
    return result.is_complete


def _num_processes(arguments: Arguments, run_file: RunFile, started: environment.RankPlace) -> int:
    wanted = arguments.processes
    if wanted is not None:
        wanted = as_int("--processes", wanted, 1, "give the number of processes")
    if started.source == "single":
        return wanted or run_file.train.processes
    if wanted not in (None, started.world_size):
        raise ConfigError(f"--processes is {wanted}, but {started.source} started {started.world_size}; leave it out")
    return started.world_size


def _device(run_file: RunFile) -> str | None:
    return None if run_file.train.device == "auto" else run_file.train.device


def _lost(error: HoploomError, arguments: Arguments, run_file: RunFile, started: environment.RankPlace) -> str:
    """What ended the run, what it can go on from, and how."""
    path = run_file.output.folder / f"{LAST}.safetensors"
    said = [str(error), *(way for way in [last_good(path)] if way not in str(error))]
    by_launcher = started.source != "single" and path.exists()
    return "; ".join([*said, "start it again with --resume" if by_launcher else _way_on(arguments, run_file)[0]])


def _way_on(arguments: Arguments, run_file: RunFile) -> list[str]:
    """The command that goes on, if there is something to go on from."""
    if not (run_file.output.folder / f"{LAST}.safetensors").exists():
        return ["there is no checkpoint yet"]
    words = ["hoploom", "train", str(arguments.file)]
    for override in arguments.set:
        words += ["--set", override]
    words += ["--processes", str(arguments.processes)] if arguments.processes else []
    return [f"continue with: {shlex.join([*words, '--resume'])}"]


# --- init ----------------------------------------------------------------------------------------


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


COMMANDS = {"train": Command(_train_arguments, _train), "init": Command(_init_arguments, _init)}
