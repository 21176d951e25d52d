"""The optimizers of a run, of weights and of learned rows, and the schedule of the learning rate.

Schedules are functions of the step number, so that a resumed run follows the same curve.
"""

import math
import sys
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hoploom.errors import ConfigError
from hoploom.nn.embedding import Embedding, record_layout
from hoploom.ops import RowRule
from hoploom.ranks.context import Context
from hoploom.schema import FEATURES
from hoploom.store import Store
from hoploom.system import available_memory
from hoploom.train.runs.run_file import RunFile
from hoploom.train.tasks import Mode


def make_optimizer(run_file: RunFile, model: nn.Module) -> Optimizer:
    """Return the optimizer of all parameters that are learned."""
    section = run_file.optimizer
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if section.name == "sgd":
        return SGD(learned, section.lr, section.momentum, weight_decay=section.weight_decay)
    kind = AdamW if section.name == "adamw" else Adam
    return kind(learned, section.lr, weight_decay=section.weight_decay)


def learn_rows(
    run_file: RunFile, store: Store, input_types: Collection[str], context: Context, *, trains: bool
) -> tuple[Store, list[str]]:
    """Return the store with learned rows: of the types in model.learned, and of `input_types` without features.

    Also return notes to print. All ranks call. Unless the run `trains`, rows are zeros, to be read from a checkpoint.
    Rows that would exceed the memory of a rank, with those of the types before, are in the scratch folder.
    """
    left = min(available_memory(), sys.maxsize if store.budget is None else store.budget.num_bytes)
    section, notes = run_file.model, list[str]()
    bare = [name for name in input_types if FEATURES not in store.schema.node_type(name).fields]
    for name, dim in (dict.fromkeys(bare, section.hidden) | section.learned).items():
        if name not in store.schema.type_index:
            message = f"model.learned names {name!r}, no node type; there are {list(store.schema.type_index)}"
            raise run_file.problem("model.learned", message)
        optimizer: Any = run_file.optimizer.learned if trains else None
        *_, record_bytes = record_layout(dim, "float32", RowRule[optimizer or "sgd"])
        num_bytes = store.schema.node_type(name).num_nodes * record_bytes
        exceeds = run_file.scratch is not None and context.max(int(num_bytes > left)) > 0
        left -= 0 if exceeds else num_bytes
        try:
            embedding = Embedding(
                store,
                name,
                dim=dim,
                optimizer=optimizer,
                lr=run_file.optimizer.learned_lr,
                seed=run_file.seed,
                join="cat" if FEATURES in store.schema.node_type(name).fields else None,
                context=context,
                folder=run_file.scratch if exceeds else None,
            )
        except ConfigError as error:
            raise run_file.problem("model.learned", f"learned rows of {name!r}: {error}") from error
        store = embedding.store
        if name not in section.learned:
            notes.append(f"{name!r} has no features: its nodes have learned rows of {dim} numbers")
    return store, notes


def make_scheduler(
    run_file: RunFile, optimizer: Optimizer, num_batches: int, mode: Mode
) -> LRScheduler | ReduceLROnPlateau | None:
    """Return the scheduler; None if run.toml has none. `mode` is "max" or "min": the better direction of the metric."""
    section = run_file.scheduler
    if section.name == "none":
        return None
    if section.name == "plateau":
        return ReduceLROnPlateau(optimizer, mode, section.factor, section.wait, min_lr=section.min_lr)
    steps_per_epoch = math.ceil(num_batches / run_file.train.accumulate)
    if section.name == "step":
        cut_every = section.every * steps_per_epoch
        return LambdaLR(optimizer, lambda step: float(section.factor ** (step // cut_every)))
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

    return LambdaLR(optimizer, cosine)
