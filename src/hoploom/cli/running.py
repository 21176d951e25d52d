"""What `hoploom train` does: the ranks, what they say at the end, and how to go on after a stop."""

import json
import shlex
import sys
from contextlib import nullcontext

from hoploom.cli.command import Arguments, say
from hoploom.errors import BatchError, ConfigError, HoploomError, PeerError, TrainError
from hoploom.ranks import environment
from hoploom.ranks.context import Context, init
from hoploom.ranks.spawn import spawn
from hoploom.train.checkpoint import last_good
from hoploom.train.runs.reading import check_packages, check_world, read_run_file
from hoploom.train.runs.run import LAST, RESULT_FILE, as_json, check_folder, run, summary
from hoploom.train.runs.run_file import RunFile


def train(arguments: Arguments) -> int:
    """Train as run.toml says."""
    run_file = read_run_file(arguments.file, arguments.set)
    started = environment.read()
    num_processes = num_processes_of(arguments, run_file, started)
    check_world(run_file, num_processes)
    check_packages(run_file)
    resume = arguments.resume or started.restarts > 0
    if started.rank == 0:
        check_folder(run_file, resume=resume)
        _announce(run_file, num_processes, quiet=arguments.quiet)
    try:
        with environment.quiet() if arguments.quiet else nullcontext():
            complete = _on_ranks(arguments, run_file, resume, started, num_processes)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(_stopped(arguments, run_file, started)) from interrupt
    except (TrainError, PeerError, BatchError) as error:
        raise type(error)(_lost(error, arguments, run_file, started)) from error
    if not complete:
        raise KeyboardInterrupt(_stopped(arguments, run_file, started))
    return 0


def _on_ranks(
    arguments: Arguments, run_file: RunFile, resume: bool, started: environment.RankPlace, num_processes: int
) -> bool:
    """Whether the ranks were left to finish."""
    work = (run_file, resume, not arguments.quiet, arguments.json)
    if started.world_size > 1 or num_processes == 1:
        with init(device=device_of(run_file)) as context:
            return train_rank(context, *work)
    spawn(train_rank, num_processes, work, device=device_of(run_file))
    return (run_file.output.folder / RESULT_FILE).exists()


def train_rank(context: Context, run_file: RunFile, resume: bool, progress: bool, as_object: bool) -> bool:
    """What every rank does; whether it was left to finish."""
    result = run(run_file, context, resume=resume, progress=progress)
    if context.is_main:
        try:
            print(summary(result), file=sys.stderr if as_object else sys.stdout, flush=True)
            if as_object and result.is_complete:  # else the command prints how to go on
                print(json.dumps({"folder": str(result.folder), **json.loads(as_json(result))}), flush=True)
        except OSError as error:  # a full disk, or a pipe without a reader
            raise OSError(error.errno, f"{error.strerror}; the run is complete, see {result.folder}") from error
    return result.is_complete


def _announce(run_file: RunFile, num_processes: int, *, quiet: bool) -> None:
    """What begins now, and how the seeds of a step are shared out where they do not divide."""
    processes = f"starting {num_processes} processes, " if num_processes > 1 else ""
    say(f"{processes}opening {run_file.store or 'the graph on servers'}")
    least, more = divmod(run_file.loader.batch_size, num_processes)
    if more and not quiet:
        shares = f"{more} with {least + 1:,} seeds and {num_processes - more} with {least:,}"
        text = f"hoploom: a step of {run_file.loader.batch_size:,} seeds goes to {num_processes} processes: {shares}"
        print(text, file=sys.stderr, flush=True)


def num_processes_of(arguments: Arguments, run_file: RunFile, started: environment.RankPlace) -> int:
    """Those that the command or run.toml names, or those that a launcher has started."""
    wanted: int | None = arguments.processes
    if started.source == "single":
        return wanted or run_file.train.processes
    if wanted not in (None, started.world_size):
        raise ConfigError(f"--processes is {wanted}, but {started.source} started {started.world_size}; leave it out")
    return started.world_size


def device_of(run_file: RunFile) -> str | None:
    """The device of the ranks; None: a GPU each, where there is one."""
    return None if run_file.train.device == "auto" else run_file.train.device


def _lost(error: HoploomError, arguments: Arguments, run_file: RunFile, started: environment.RankPlace) -> str:
    """What ended the run, what it can go on from, and how."""
    saved = last_good(run_file.output.folder / f"{LAST}.safetensors")
    way_on = _way_on(arguments, run_file, started)
    return "; ".join([str(error), *([] if saved in str(error) else [saved]), *way_on])


def _stopped(arguments: Arguments, run_file: RunFile, started: environment.RankPlace) -> str:
    """The same for a run that was asked to stop."""
    return "; ".join(
        [last_good(run_file.output.folder / f"{LAST}.safetensors"), *_way_on(arguments, run_file, started)]
    )


def _way_on(arguments: Arguments, run_file: RunFile, started: environment.RankPlace) -> list[str]:
    """The command that goes on, if there is something to go on from; torchrun's and Slurm's own words are not known."""
    if not (run_file.output.folder / f"{LAST}.safetensors").exists():
        return []
    if started.source != "single":
        return ["start it again as before, with --resume at the end"]
    words = ["hoploom", "train", str(arguments.file)]
    for override in arguments.set:
        words += ["--set", override]
    words += ["--processes", str(arguments.processes)] if arguments.processes else []
    return [f"continue with: {shlex.join([*words, '--resume'])}"]
