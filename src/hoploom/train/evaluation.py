"""The metrics of a model over every seed of a loader, exactly once, over all ranks.

Whole steps are distributed over ranks, so that every rank sees batches that one process would see; nothing is padded.
"""

import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hoploom.errors import ConfigError, DataError
from hoploom.load.assemble import Batch
from hoploom.load.loader import Loader
from hoploom.ranks.agreement import difference_of
from hoploom.ranks.context import Context, gather_json
from hoploom.train.batch_adapter import adapted, check_outputs, without_ddp
from hoploom.train.checkpoint import is_sharded
from hoploom.train.learner import check_precision, mixed
from hoploom.train.tasks import LinkPrediction, Task, check_labels

if TYPE_CHECKING:
    from torchmetrics import MetricCollection


def evaluate(
    model: nn.Module, loader: Loader, task: Task, context: Context, *, precision: str = "fp32"
) -> dict[str, float]:
    """Return the metrics of the task and the mean loss, exact and the same on every rank. All ranks call.

    The ranks share the steps of the loader, so the batches are those of one process. A loader that was made with
    `rank=` and `world_size=` is read as it is. Every call reads epoch 0, so it samples the same neighbors again; a
    loop over the loader samples new ones each time, and those of `evaluate` after `loader.set_epoch(0)`.

    >>> evaluate(model, NeighborLoader(store, [-1, -1], input_nodes="val", batch_size=4096), task, context)
    """
    check_precision(precision)
    check_outputs(model, task)
    steps, module = _steps(loader, context), adapted(without_ddp(model), loader)
    _check_same_loaders(loader, context)
    if isinstance(task, LinkPrediction):  # fit checks the labels of training nodes, a run those of all splits
        task = check_labels(task, loader, context.device)
    metrics, total = task.metrics(context.device), torch.zeros(2, dtype=torch.float64)
    context.sync_buffers(module)
    num_forwards = context.max(len(steps)) if is_sharded(model) else 0  # its forward waits for all ranks

    def rows(steps: range) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield outputs and targets, step by step."""
        with closing(loader.steps(steps, dealt=not _shares_steps(loader))) as batches:
            for made in batches:
                batch: Batch = made if context.device.type == "cpu" else made.to(context.device, non_blocking=True)
                targets = task.targets(batch)
                with mixed(precision, context.device):
                    outputs = task.outputs(module, batch)
                yield outputs, targets

    with evaluating(module):
        for outputs, targets in rows(steps):
            metrics.update(task.scores(outputs), targets)
            losses = task.losses(outputs, targets).double()
            total += torch.stack([losses.sum().cpu(), torch.tensor(float(losses.numel()), dtype=torch.float64)])
        if len(steps) == 0:
            for outputs, targets in rows(range(1)):
                _update_with_nothing(metrics, task.scores(outputs), targets)
        for _ in rows(range(num_forwards - max(1, len(steps)))):
            pass  # as many as the other ranks have
        loss_sum, num_rows = context.sum(total).tolist()
        with context.guard("computing metrics"):
            computed = _computed(metrics, int(num_rows), warn=len(steps) > 0)
        return {**computed, "loss": loss_sum / num_rows}


def _steps(loader: Loader, context: Context) -> range:
    """Return the steps of this rank."""
    loader.settle(together=True)
    if loader.drop_last:
        raise ConfigError("the loader has drop_last=True, which leaves seeds out; evaluate with drop_last=False")
    if _shares_steps(loader):
        return range(context.rank, loader.num_whole_steps, context.world_size)
    if (loader.rank, loader.world_size) != (context.rank, context.world_size):
        raise ConfigError(
            f"the loader is for rank {loader.rank} of {loader.world_size}, this is rank {context.rank} of "
            f"{context.world_size}; leave rank and world_size out"
        )
    return range(len(loader))


def _shares_steps(loader: Loader) -> bool:
    """Return whether ranks take whole steps of the loader in turn; else each reads its share of every step."""
    return loader.world_size == 1 or not loader.share.is_given


def _check_same_loaders(loader: Loader, context: Context) -> None:
    """Raise ConfigError if ranks have different loaders, which would leave out some seeds, and count others twice."""
    described = [] if context.world_size == 1 else gather_json(context, dict(loader.reading().settings))
    other = next((rank for rank, one in enumerate(described) if one != described[0]), None)
    if other is not None:
        raise ConfigError(difference_of((0, described[0]), (other, described[other]), context.world_size))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients in this block; afterwards every module is in the mode it was in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def _update_with_nothing(metrics: "MetricCollection", scores: Tensor, targets: Tensor) -> None:
    """Give a rank without rows states of the right shapes and types, or torchmetrics could not gather them."""
    for metric in metrics.values():
        metric.update(scores, targets)
        filled = {name: list(s) if isinstance(s, list) else s for name, s in metric.metric_state.items()}
        metric.reset()  # empties the lists themselves
        for name, state in filled.items():
            if isinstance(state, list):
                setattr(metric, name, [rows[:0] for rows in state])
            else:
                setattr(metric, name, getattr(metric, name).to(state.dtype).expand_as(state).clone())


def _computed(metrics: "MetricCollection", num_rows: int, *, warn: bool) -> dict[str, float]:
    """Return the metrics as numbers; the entries of a matrix by name/row/column."""
    with warnings.catch_warnings():
        if not warn:  # of compute() before update(), as this rank has no rows
            warnings.simplefilter("ignore", UserWarning)
        try:
            values = metrics.compute()
        except ValueError as error:
            raise DataError(f"the metrics of {num_rows} rows cannot be computed: {error}; evaluate more") from error
    found: dict[str, float] = {}
    for name, value in values.items():
        if value.numel() == 1:
            found[name] = float(value)
        else:
            for index in torch.cartesian_prod(*(torch.arange(extent) for extent in value.shape)):
                entry = [int(i) for i in index.reshape(-1)]
                found["/".join([name, *map(str, entry)])] = float(value[tuple(entry)])
    return found
