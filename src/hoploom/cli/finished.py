"""What `hoploom evaluate` and `hoploom infer` do with a finished run: its run.toml, its graph, its best checkpoint."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from hoploom.cli.command import Arguments, say
from hoploom.cli.running import device_of, num_processes_of
from hoploom.errors import ConfigError
from hoploom.inference.infer import Inference, infer
from hoploom.inference.layered import as_layered
from hoploom.inference.layerwise import folder_of
from hoploom.ranks import environment
from hoploom.ranks.context import Context, init
from hoploom.ranks.spawn import spawn
from hoploom.train.evaluation import evaluate
from hoploom.train.runs.finished import read_finished, trained_model
from hoploom.train.runs.problem import eval_loader, goal_of, infer_loader
from hoploom.train.runs.run import open_graph, with_placement
from hoploom.train.runs.run_file import RunFile


def evaluate_run(arguments: Arguments) -> int:
    """Print the metrics of a split."""
    run_file, checkpoint = read_finished(arguments.run, arguments.set, arguments.checkpoint)
    _on_ranks(arguments, run_file, evaluate_rank, (checkpoint, arguments.split, arguments.json))
    return 0


def evaluate_rank(context: Context, run_file: RunFile, checkpoint: str, split: str, as_object: bool) -> None:
    """What every rank does."""
    goal = goal_of(run_file, open_graph(run_file, context))
    if split not in goal.seeds:
        raise ConfigError(f"--split is {split!r}, but the run has only {', '.join(goal.seeds)}; give one of these")
    goal = with_placement(run_file, goal, context)
    model = trained_model(run_file, goal, context, checkpoint)
    loader = eval_loader(run_file, goal, context, model, split)
    found = evaluate(model, loader, goal.task, context, precision=run_file.train.precision)
    if context.is_main:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items() if "/" not in name)
        told = {"checkpoint": _path_of(run_file, checkpoint), "split": split}
        print(json.dumps({**told, "metrics": found}) if as_object else f"{split}: {shown}", flush=True)


def infer_run(arguments: Arguments) -> int:
    """Write a row for every node."""
    run_file, checkpoint = read_finished(arguments.run, arguments.set, arguments.checkpoint)
    out: Path = arguments.out or run_file.output.folder / "nodes"
    options = {
        "columns": None if arguments.columns is None else arguments.columns.split(","),
        "node_types": None if arguments.node_types is None else arguments.node_types.split(","),
        "memory": arguments.memory,
    }
    _on_ranks(arguments, run_file, infer_rank, (checkpoint, str(out), options, arguments.json))
    return 0


def infer_rank(
    context: Context, run_file: RunFile, checkpoint: str, out: str, options: dict[str, Any], as_object: bool
) -> None:
    """What every rank does."""
    goal = goal_of(run_file, open_graph(run_file, context))
    model = trained_model(run_file, goal, context, checkpoint)
    options["node_types"] = options["node_types"] or (goal.out_types if as_layered(model) is None else None)
    make = partial(infer_loader, run_file, goal, context, model)
    inference = Inference(task=goal.task, loader=make, **options)
    infer(model, goal.store, out, context, inference=inference)
    if context.is_main:
        print(f"written to {out}", file=sys.stderr if as_object else sys.stdout, flush=True)
        if as_object:
            rows = {t.name: t.num_nodes for t in goal.store.schema.node_types if Path(out, folder_of(t.name)).exists()}
            told = {
                "checkpoint": _path_of(run_file, checkpoint),
                "out": out,
                "columns": list(inference.written_of(model)),
            }
            print(json.dumps({**told, "rows": rows}), flush=True)


# --- the run -------------------------------------------------------------------------------------


def _path_of(run_file: RunFile, checkpoint: str) -> str:
    return str(run_file.output.folder / f"{checkpoint}.safetensors")


def _on_ranks(arguments: Arguments, run_file: RunFile, work: Any, given: tuple[Any, ...]) -> None:
    started = environment.read()
    num_processes = num_processes_of(arguments, run_file, started)
    say(f"opening {run_file.store or 'the graph on servers'}")
    if started.world_size > 1 or num_processes == 1:
        with init(device=device_of(run_file)) as context:
            work(context, run_file, *given)
    else:
        spawn(work, num_processes, (run_file, *given), device=device_of(run_file))
