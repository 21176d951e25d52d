"""The pieces of a run as run.toml names them: model, loaders, optimizer, schedule. Each could be made by hand as well.

Schedules are closed forms of the step, so that a resumed run follows the same curve; they take the number of steps
from run.toml and know nothing of an early stop.
"""

import math
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hoploom.errors import ConfigError, HoploomError
from hoploom.load import LinkNeighborLoader, NeighborLoader
from hoploom.load.loader import Loader
from hoploom.nn import GNN, Shape
from hoploom.ranks.context import Context, unwrap
from hoploom.schema import DTYPES, RelationName
from hoploom.train.runs.problem import Goal, relation_of
from hoploom.train.runs.run_file import LINKS, RunFile
from hoploom.train.tasks import Mode

Fanouts = list[int] | dict[RelationName, list[int]]
LEAST_TAIL = 64  # seeds; fewer join the step before them, whatever the number of ranks, as long as it is not above

# --- model ---------------------------------------------------------------------------------------


def model_of(run_file: RunFile, goal: Goal) -> nn.Module:
    """The model, with weights that follow from the file's seed."""
    torch.manual_seed(run_file.seed)
    if run_file.model.factory is not None:
        return _from_factory(run_file, goal)
    section = run_file.model
    shape = Shape(
        hidden=section.hidden,
        num_layers=len(run_file.loader.fanouts),
        out=goal.num_outputs,
        dropout=section.dropout,
        heads=section.heads,
        norm=section.norm,
        residual=section.residual,
    )
    try:
        return GNN(section.name, goal.store.schema, shape, goal.out_types)
    except ConfigError as error:
        raise run_file.problem(
            "model.name", f"model.name = {section.name!r} does not fit the store: {error}"
        ) from error


def _from_factory(run_file: RunFile, goal: Goal) -> nn.Module:
    """What the user's function makes of the store."""
    address, folder, options = str(run_file.model.factory), run_file.model.modules, run_file.model.options
    if folder is not None and str(folder) not in sys.path:  # its modules come first
        sys.path.insert(0, str(folder))
    try:
        make = pkgutil.resolve_name(address)
    except Exception as error:
        message = f"{address} cannot be imported: {_one_line(error)}; mend it, or name its folder in model.modules"
        raise run_file.problem("model.factory", message) from error
    try:
        model = make(goal.store, goal.num_outputs, **options)
    except HoploomError:
        raise
    except Exception as error:
        message = f"{address}(store, {goal.num_outputs}, **{options}) failed: {_one_line(error)}; mend it"
        raise run_file.problem("model.factory", message) from error
    if not isinstance(model, nn.Module):
        message = f"{address} returned a {type(model).__name__}; return a torch.nn.Module"
        raise run_file.problem("model.factory", message)
    return model


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# --- loaders -------------------------------------------------------------------------------------


def train_loader(run_file: RunFile, goal: Goal, context: Context, model: nn.Module) -> Loader:
    """This rank's share of the training seeds, shuffled."""
    return _loader(
        run_file,
        goal,
        model,
        "train",
        per_relation(run_file, goal),
        batch_size=run_file.loader.batch_size // context.world_size,
        rank=context.rank,
        world_size=context.world_size,
        shuffle=True,
        least_tail=LEAST_TAIL,
        locality=run_file.cluster.locality,
        device=context.device,
    )


def eval_loader(run_file: RunFile, goal: Goal, context: Context, model: nn.Module, split: str) -> Loader:
    """All seeds of a split, in order; `evaluate` shares its steps out."""
    section = run_file.loader
    fanouts = list(section.eval_fanouts) if section.eval_fanouts else per_relation(run_file, goal)
    batch_size = section.eval_batch_size or section.batch_size
    return _loader(run_file, goal, model, split, fanouts, batch_size=batch_size, device=context.device)


def _loader(run_file: RunFile, goal: Goal, model: nn.Module, split: str, fanouts: Fanouts, **given: Any) -> Loader:
    section, task = run_file.loader, run_file.task
    schema = goal.store.schema
    options: dict[str, Any] = given | {
        "seed": run_file.seed,
        "replace": section.replace,
        "labor": section.labor,
        "mode": section.mode,
        "num_workers": section.threads,
        "weight_attr": schema.weight if section.weighted else None,
    }
    module = unwrap(model)
    if isinstance(module, GNN):  # layer one is aggregated where its rows lie
        floats = [DTYPES[t.fields["x"].dtype].is_floating_point for t in schema.node_types if "x" in t.fields]
        is_whole = split == "train" and run_file.train.whole_steps  # then layer one is part of what is recorded
        reduce = module.first_reduce if all(floats) and not is_whole else None
        options |= {"aggregate": reduce, "degrees": _needs_degrees(run_file, goal, module)}
    if task.kind == LINKS:
        options |= {"neg_sampling_ratio": task.negatives, "strict_negatives": task.strict_negatives}
        return LinkNeighborLoader(goal.store, fanouts, goal.seeds[split], **options)
    if section.temporal is not None:
        options |= {"temporal_strategy": section.temporal, "time_attr": schema.time}
    return NeighborLoader(goal.store, fanouts, goal.seeds[split], **options)


def _needs_degrees(run_file: RunFile, goal: Goal, module: GNN) -> bool:
    store = goal.store
    if module.needs_degrees and not store.deployment.makes_batches and len(store.topology) < len(store.ranges):
        message = (
            f'model.name = "{run_file.model.name}" needs in-degrees, and a process maps the edges of its parts only'
        )
        raise run_file.problem("cluster.topology", f'{message}; set cluster.topology = "local", or take another model')
    return module.needs_degrees


def per_relation(run_file: RunFile, goal: Goal) -> Fanouts:
    """One list for all relations, or one for each where run.toml sets some apart."""
    fanouts, others, schema = run_file.loader.fanouts, run_file.loader.relation_fanouts, goal.store.schema
    if not others:
        return list(fanouts)
    apart = {relation_of(run_file, "loader.relation_fanouts", schema, name): counts for name, counts in others.items()}
    return {relation.key: list(apart.get(relation.key, fanouts)) for relation in schema.relations}


# --- optimizer and schedule ----------------------------------------------------------------------


def optimizer_of(run_file: RunFile, model: nn.Module) -> Optimizer:
    """The optimizer of all parameters that are learned."""
    section = run_file.optimizer
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if section.name == "sgd":
        return SGD(learned, section.lr, section.momentum, weight_decay=section.weight_decay)
    if section.name == "adamw":
        return AdamW(learned, section.lr, weight_decay=section.weight_decay)
    return Adam(learned, section.lr, weight_decay=section.weight_decay)


def scheduler_of(
    run_file: RunFile, optimizer: Optimizer, num_batches: int, mode: Mode
) -> LRScheduler | ReduceLROnPlateau | None:
    """The schedule, for epochs of that many batches. A plateau is judged per epoch, all others go by the step."""
    section = run_file.scheduler
    if section.name == "none":
        return None
    if section.name == "plateau":
        return ReduceLROnPlateau(optimizer, mode, section.factor, section.wait, min_lr=section.min_lr)
    steps_per_epoch = math.ceil(num_batches / run_file.train.accumulate)
    return LambdaLR(optimizer, _curve(run_file, steps_per_epoch))


def _curve(run_file: RunFile, steps_per_epoch: int) -> Callable[[int], float]:
    """What the learning rate is multiplied by at a step."""
    section = run_file.scheduler
    if section.name == "step":
        cut_every = section.every * steps_per_epoch
        return lambda step: float(section.factor ** (step // cut_every))
    num_steps = run_file.train.epochs * steps_per_epoch
    if run_file.train.max_steps is not None:
        num_steps = min(num_steps, run_file.train.max_steps)
    num_warm = int(section.warmup * num_steps) if section.name == "warmup-cosine" else 0
    least = section.min_lr / run_file.optimizer.lr

    def cosine(step: int) -> float:
        if step < num_warm:
            return (step + 1) / num_warm
        progress = min(1.0, (step - num_warm) / max(1, num_steps - num_warm))
        return least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2

    return cosine
