"""Run `hoploom train`, `evaluate` and `infer`: start the ranks, print the results, and say how to continue."""

import json
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from hoploom.cli.command import Arguments, say
from hoploom.errors import BatchError, ConfigError, PeerError, TrainError
from hoploom.inference.infer import Inference, folder_of, infer
from hoploom.inference.layerwise import as_layered
from hoploom.ranks import environment
from hoploom.ranks.context import Context, init
from hoploom.ranks.environment import RankInfo
from hoploom.ranks.spawn import spawn
from hoploom.train.checkpoint import last_good
from hoploom.train.evaluation import evaluate
from hoploom.train.runs.run import (
    RESULT_FILE,
    open_graph,
    read_finished,
    result_json,
    run_checked,
    summary,
    trained_model,
    with_placement,
)
from hoploom.train.runs.run_file import RunFile
from hoploom.train.runs.run_toml import LAST, check_run, read_run_file
from hoploom.train.runs.setup import eval_loader, infer_loader, training_setup


def train(arguments: Arguments) -> int:
    """Train as run.toml describes."""
    run_file = read_run_file(arguments.file, arguments.set)
    started = environment.read_rank()
    num_processes = _num_processes(arguments, run_file, started)
    resume = arguments.resume or started.restarts > 0
    check_run(run_file, num_processes, resume=resume)
    if started.rank == 0:
        _announce(run_file, num_processes, quiet=arguments.quiet)
    work = (resume, not arguments.quiet, arguments.json)
    try:
        with environment.quiet() if arguments.quiet else nullcontext():
            complete = _on_ranks(train_rank, run_file, work, started, num_processes)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt("; ".join(_way_on("", arguments, run_file, started))) from interrupt
    except (TrainError, PeerError, BatchError) as error:
        raise type(error)("; ".join([str(error), *_way_on(str(error), arguments, run_file, started)])) from error
    if complete is None:  # other processes trained
        complete = (run_file.output.folder / RESULT_FILE).exists()
    if not complete:
        raise KeyboardInterrupt("; ".join(_way_on("", arguments, run_file, started)))
    return 0


def train_rank(context: Context, run_file: RunFile, resume: bool, progress: bool, as_object: bool) -> bool:
    """Train on this rank; return False if the run was stopped early."""
    result = run_checked(run_file, context, resume=resume, progress=progress)
    if context.is_main:
        try:
            print(summary(result), file=sys.stderr if as_object else sys.stdout, flush=True)
            if as_object and result.is_complete:  # else the command prints how to continue
                print(json.dumps({"folder": str(result.folder), **json.loads(result_json(result))}), flush=True)
        except OSError as error:  # a full disk, or a pipe without a reader
            raise OSError(error.errno, f"{error.strerror}; the run is complete, see {result.folder}") from error
    return result.is_complete


def _announce(run_file: RunFile, num_processes: int, *, quiet: bool) -> None:
    """Print what begins now, and how many seeds each process gets if they do not divide evenly."""
    processes = f"starting {num_processes} processes, " if num_processes > 1 else ""
    say(f"{processes}opening {run_file.store or 'the graph on servers'}")
    least, more = divmod(run_file.loader.batch_size, num_processes)
    if more and not quiet:
        shares = f"{more} with {least + 1:,} seeds and {num_processes - more} with {least:,}"
        text = f"hoploom: a step of {run_file.loader.batch_size:,} seeds goes to {num_processes} processes: {shares}"
        print(text, file=sys.stderr, flush=True)


def _way_on(error: str, arguments: Arguments, run_file: RunFile, started: RankInfo) -> list[str]:
    """Return the last checkpoint, unless `error` names it, and the command that continues from it."""
    path = run_file.output.folder / f"{LAST}.safetensors"
    saved = last_good(path)
    found = [] if saved in error else [saved]
    if not path.exists():
        return found
    if started.source != "single":  # the command line of torchrun or srun is not known
        return [*found, "start it again as before, with --resume at the end"]
    words = ["hoploom", "train", str(arguments.file)]
    for override in arguments.set:
        words += ["--set", override]
    words += ["--processes", str(arguments.processes)] if arguments.processes else []
    return [*found, f"continue with: {shlex.join([*words, '--resume'])}"]


# --- evaluate and infer --------------------------------------------------------------------------


def evaluate_run(arguments: Arguments) -> int:
    """Print the metrics of a finished run on a split."""
    run_file, checkpoint = read_finished(arguments.run, arguments.set, arguments.checkpoint)
    _on_ranks_of_run(arguments, run_file, evaluate_rank, (checkpoint, arguments.split, arguments.json))
    return 0


def evaluate_rank(context: Context, run_file: RunFile, checkpoint: Path, split: str, as_object: bool) -> None:
    """Evaluate on this rank; rank 0 prints the metrics."""
    setup = training_setup(run_file, open_graph(run_file, context))
    if split not in setup.seeds:
        raise ConfigError(f"--split is {split!r}, but the run has only {', '.join(setup.seeds)}; give one of these")
    setup = with_placement(run_file, setup, context)
    model = trained_model(run_file, setup, context, checkpoint)
    loader = eval_loader(run_file, setup, context, model, split)
    found = evaluate(model, loader, setup.task, context, precision=run_file.train.precision)
    if context.is_main:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items() if "/" not in name)
        result = {"checkpoint": str(checkpoint), "split": split, "metrics": found}
        print(json.dumps(result) if as_object else f"{split}: {shown}", flush=True)


def infer_run(arguments: Arguments) -> int:
    """Write the outputs of a finished run for every node."""
    run_file, checkpoint = read_finished(arguments.run, arguments.set, arguments.checkpoint)
    out: Path = arguments.out or run_file.output.folder / "nodes"
    options = {
        "columns": None if arguments.columns is None else arguments.columns.split(","),
        "node_types": None if arguments.node_types is None else arguments.node_types.split(","),
        "memory": arguments.memory,
    }
    _on_ranks_of_run(arguments, run_file, infer_rank, (checkpoint, str(out), options, arguments.json))
    return 0


def infer_rank(
    context: Context, run_file: RunFile, checkpoint: Path, out: str, options: dict[str, Any], as_object: bool
) -> None:
    """Write this rank's share of the rows; rank 0 prints where they are."""
    setup = training_setup(run_file, open_graph(run_file, context))
    model = trained_model(run_file, setup, context, checkpoint)
    options["node_types"] = options["node_types"] or (setup.out_types if as_layered(model) is None else None)
    make = partial(infer_loader, run_file, setup, context, model)
    inference = Inference(task=setup.task, loader=make, **options)
    infer(model, setup.store, out, context, inference=inference)
    if context.is_main:
        print(f"written to {out}", file=sys.stderr if as_object else sys.stdout, flush=True)
        if as_object:
            rows = {t.name: t.num_nodes for t in setup.store.schema.node_types if Path(out, folder_of(t.name)).exists()}
            result = {"checkpoint": str(checkpoint), "out": out}
            print(json.dumps({**result, "columns": list(inference.written_of(model)), "rows": rows}), flush=True)


def _on_ranks_of_run(
    arguments: Arguments, run_file: RunFile, work: Callable[..., None], given: tuple[Any, ...]
) -> None:
    started = environment.read_rank()
    num_processes = _num_processes(arguments, run_file, started)
    say(f"opening {run_file.store or 'the graph on servers'}")
    _on_ranks(work, run_file, given, started, num_processes)


# --- ranks ---------------------------------------------------------------------------------------


def _num_processes(arguments: Arguments, run_file: RunFile, started: RankInfo) -> int:
    """Return how many processes the command or run.toml asks for, or a launcher has started."""
    wanted: int | None = arguments.processes
    if started.source == "single":
        return wanted or run_file.train.processes
    if wanted not in (None, started.world_size):
        raise ConfigError(f"--processes is {wanted}, but {started.source} started {started.world_size}; leave it out")
    return started.world_size


def _on_ranks(
    work: Callable[..., Any], run_file: RunFile, given: tuple[Any, ...], started: RankInfo, num_processes: int
) -> Any:
    """Call work(context, run_file, *given) on every rank; return its result if this process is one of them."""
    device = None if run_file.train.device == "auto" else run_file.train.device
    if started.world_size > 1 or num_processes == 1:
        with init(device=device) as context:
            return work(context, run_file, *given)
    return spawn(work, num_processes, (run_file, *given), device=device)
