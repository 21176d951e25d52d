"""Training: epochs of steps, a validation and a checkpoint after each, until it is done.

A run that is stopped anywhere and restored from its last checkpoint takes the steps that it would have taken.
"""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hoploom.errors import ConfigError, PeerError, StoreError, TrainError
from hoploom.nn import GNN
from hoploom.ranks.context import Context, gather_json, unwrap
from hoploom.ranks.supervise import StopRequests
from hoploom.train.batch_adapter import check_outputs
from hoploom.train.checkpoint import Checkpoint, SaveClock, is_sharded, last_good
from hoploom.train.journal import Journal, ProgressLine, machine_of
from hoploom.train.learner import Ending, Learner, Training
from hoploom.train.records import DiskMeter, DiskUse
from hoploom.train.step import AnyStepper, MakeStepper, StepCounts, Stepper, StepReport, check_closure
from hoploom.train.tasks import VAL_LOSS, check_labels

MOST_GROWTH = 1000  # of the loss, without a warning
Validate = Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Outcome:
    """The result of training. `stopped` is done, early (no better validation) or asked (Ctrl-C or SIGTERM)."""

    steps: int
    epochs: int
    best: float | None  # of the metric that the task names
    best_epoch: int | None  # from 1
    history: list[dict[str, float]] = field(repr=False)  # of epochs: number, train_loss, val_loss, validate's values
    stopped: Ending
    whole_steps: StepCounts | None = None  # how a stepper such as WholeStep took the steps
    disk: DiskUse | None = None  # by this rank, if the store is larger than its budget


def fit(
    learner: Learner,
    training: Training,
    context: Context,
    *,
    validate: Validate | None = None,
    checkpoint: Checkpoint | None = None,
    journal: Journal | None = None,
    stepper: MakeStepper | None = None,
) -> Outcome:
    """Train a model. All ranks call, each with its own learner and journal.

    `stepper=hoploom.WholeStep` runs each step as CUDA graphs, for a store that is placed on a GPU.

    Training continues from the learner's progress; to resume a run, restore a checkpoint first.

    >>> checkpoint = Checkpoint("runs/papers", context)
    >>> checkpoint.restore("last", learner.parts())
    >>> fit(learner, Training(epochs=10), context, validate=validate, checkpoint=checkpoint)
    """
    _check(learner, context, validate)
    _seek_loader(learner)
    stepping: AbstractContextManager[AnyStepper] = (
        nullcontext(Stepper(learner, training, context, checkpoint))
        if stepper is None
        else stepper(learner, training, context, checkpoint)
    )
    shown = training.progress and context.is_main
    if shown:
        print(f"hoploom: loader threads {learner.loader.num_workers}", file=sys.stderr, flush=True)
        _warn_of_edge_features(learner)
    machines = gather_json(context, machine_of(context))  # also of ranks without a journal
    recording = nullcontext() if journal is None else journal.recording(learner, machines)
    meter = DiskMeter(learner.loader)
    line = ProgressLine(sys.stderr, learner, training, meter, shown=shown)
    with recording, stepping as steps, StopRequests() as requests, line:
        loop = _Loop(learner, training, context, validate, checkpoint, journal, meter, line, requests, steps)
        try:
            ending = loop.run()
        except PeerError as error:
            raise PeerError(f"{error}; {last_good(None if checkpoint is None else checkpoint.path('last'))}") from error
        if journal is not None:
            journal.ended(ending, step=learner.progress.steps)
    progress, counts = learner.progress, steps.counts
    if counts is not None and counts.overflow_often:
        warnings.warn(
            f"{counts.overflow}: their batches did not fit, so they were made twice and nothing of them was replayed; "
            f"give Training a larger margin, e.g. margin={max(0.5, 2 * training.margin):g}",
            stacklevel=2,
        )
    best_epoch = None if progress.best_epoch is None else progress.best_epoch + 1
    return Outcome(
        progress.steps, progress.epoch, progress.best, best_epoch, list(progress.history), ending, counts, meter.use()
    )


def _check(learner: Learner, context: Context, validate: Validate | None) -> None:
    """Raise an error for settings that cannot work, before the first step."""
    loader = learner.loader
    if (loader.rank, loader.world_size) != (context.rank, context.world_size):
        raise ConfigError(
            f"the loader is for rank {loader.rank} of {loader.world_size}, this is rank {context.rank} of "
            f"{context.world_size}; make it after hoploom.init(), without rank and world_size"
        )
    _check_wrapped(learner.model, context)
    check_outputs(learner.model, learner.task)
    check_closure(learner.optimizer)
    if learner.plateau is not None:
        name, mode = learner.task.monitor
        if validate is None:
            raise ConfigError("ReduceLROnPlateau needs a metric; give validate")
        if learner.plateau.mode != mode:
            raise ConfigError(f"ReduceLROnPlateau has mode={learner.plateau.mode!r}, {name!r} wants {mode!r}")
    learner.task = check_labels(learner.task, loader, context.device)


def _check_wrapped(model: nn.Module, context: Context) -> None:
    """Raise ConfigError for a model that each of several ranks would train for itself."""
    if context.world_size == 1 or is_sharded(model):
        return
    averaging = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    averaged = {id(parameter) for module in averaging for parameter in module.parameters()}
    alone = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in averaged]
    if alone:
        what = f"parameter {alone[0]!r} of the model" if averaging else "the model"
        raise ConfigError(
            f"{what} is not wrapped in DistributedDataParallel, and fit averages gradients over the "
            f"{context.world_size} ranks in no other way; give Learner context.wrap(model), and make the optimizer "
            "from that model's parameters"
        )


def _seek_loader(learner: Learner) -> None:
    """Move the loader to the learner's progress: another loop or run may have moved it."""
    loader, progress = learner.loader, learner.progress
    is_unfinished = progress.rows > 0
    if is_unfinished and loader.epoch in (progress.epoch, progress.epoch + 1):
        loader.load_state_dict(loader.state_dict())
    elif is_unfinished:
        raise ConfigError(
            f"training is within epoch {progress.epoch}, the loader is at {loader.epoch}; restore both together"
        )
    elif loader.epoch != progress.epoch:
        loader.set_epoch(progress.epoch)


def _warn_of_edge_features(learner: Learner) -> None:
    store = getattr(learner.loader, "store", None)
    if store is None or not isinstance(unwrap(learner.model), GNN):
        return
    relations = [" ".join(relation.key) for relation in store.schema.relations if "edge_attr" in relation.fields]
    if relations:
        _print_once(f"the built-in models do not use edge_attr of {', '.join(relations)}; PyG's GAT(edge_dim=...) does")


@cache
def _print_once(line: str) -> None:
    print(f"hoploom: {line}", file=sys.stderr, flush=True)


@dataclass
class _Loop:
    """The epochs of one call of fit."""

    learner: Learner
    training: Training
    context: Context
    validate: Validate | None
    checkpoint: Checkpoint | None
    journal: Journal | None
    meter: DiskMeter
    line: ProgressLine
    requests: StopRequests
    stepper: AnyStepper
    has_warned: bool = False

    def __post_init__(self) -> None:
        self.progress = self.learner.progress
        self.save_clock = SaveClock(0.0 if self.checkpoint is None else self.training.checkpoint_minutes)

    def run(self) -> Ending:
        """Take steps and validate in turn; a run that is resumed may begin with either."""
        stop_requested = False
        while not stop_requested:
            if self._epoch_is_taken():
                stop_requested = self._end_epoch()
            elif (ending := self.progress.ending(self.training)) is not None:
                return ending
            else:
                stop_requested = self._take_steps()
        return "asked"

    def _epoch_is_taken(self) -> bool:
        """Return whether all steps of the epoch are taken; its validation may be missing."""
        return self.progress.rows > 0 and self.learner.loader.epoch > self.progress.epoch

    def _take_steps(self) -> bool:
        """Take the steps left in the epoch; return whether some rank was asked to stop."""
        self.learner.model.train()
        stop_requested, every = False, self.training.checkpoint_every
        with self.stepper.steps() as steps:
            while not (stop_requested or steps.is_empty) and self.progress.ending(self.training) is None:
                reports, stop_requested, is_due = steps.take(self.requests, is_due=self.save_clock.is_due)
                self._report(reports)
                is_due = is_due or (every is not None and self.progress.steps % every == 0)
                if is_due and not (stop_requested or steps.is_empty):
                    self._report(steps.rest())
                    self._save("last")
            self._report(steps.rest())
        if stop_requested or self.validate is not None or not self._epoch_is_taken():
            self._save("last")
        return stop_requested

    def _report(self, reports: Sequence[StepReport]) -> None:
        for report in reports:
            self.meter.step(report)
            self.line.step(report)
            self._watch_loss(report)
            if self.journal is not None:
                self.journal.step(report)

    def _watch_loss(self, report: StepReport) -> None:
        """Warn once of a loss that is a thousand times the first; a loss that is not finite ends a step itself."""
        first = self.progress.first_loss
        if first is None:
            self.progress.first_loss = report.loss
        elif not self.has_warned and report.loss > max(MOST_GROWTH * abs(first), 1):  # the first may be zero
            warnings.warn(
                f"the loss is {report.loss:.3g} at epoch {report.epoch + 1} step {report.step}, over {MOST_GROWTH:,} "
                f"times what it was at the first step; lower the learning rate ({report.learning_rate:g}), or clip "
                "gradients (clip_norm=1.0)",
                stacklevel=2,
            )
            self.has_warned = True

    def _end_epoch(self) -> bool:
        """Validate, and save what follows from it; return whether some rank was asked to stop meanwhile."""
        progress, found = self.progress, dict[str, float]()
        if self.validate is not None:
            with self._timed("validation"):
                self.line.doing(f"epoch {progress.epoch + 1}  validating")
                found = dict(self.validate())
            self.meter.skip()
        metrics = {VAL_LOSS: found.pop("loss"), **found} if "loss" in found else found
        progress.history.append(
            {"epoch": progress.epoch + 1, "train_loss": progress.loss_sum / progress.rows, **metrics}
        )
        is_best = self.validate is not None and self._update_best(metrics)
        overflow = "" if self.stepper.counts is None else self.stepper.counts.overflow
        self.line.epoch(progress.history[-1], is_best=is_best, note=overflow)
        if self.journal is not None:
            self.journal.epoch(progress.history[-1], step=progress.steps)
        progress.epoch, progress.loss_sum, progress.rows = progress.epoch + 1, 0.0, 0
        self._save(("last", "best") if is_best else "last")
        return self.context.sum(int(self.requests.stop_requested)) > 0

    def _timed(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.journal is None else self.journal.timed(name)

    def _update_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether this epoch is the best so far, by rank 0's metrics."""
        name, mode = self.learner.task.monitor
        name = VAL_LOSS if name == "loss" else name  # of tasks of your own
        if name not in metrics:
            raise ConfigError(f"validate returned no {name!r}, which the task monitors, only {sorted(metrics)}")
        value = float(self.context.gather(torch.tensor([metrics[name]], dtype=torch.float64))[0])
        if self.learner.plateau is not None:
            self.learner.plateau.step(value)
        return self.progress.update_best(value, mode)

    def _save(self, name: str | tuple[str, str]) -> None:
        if self.checkpoint is None:
            return
        for parameter_name, parameter in self.learner.model.named_parameters():
            if not parameter.isfinite().all():
                raise TrainError(
                    f"parameter {parameter_name!r} is not finite after step {self.progress.steps}; "
                    f"lower the learning rate, or clip gradients (clip_norm=1.0); no checkpoint was written"
                )
        try:
            with self._timed("checkpoint"), self.save_clock.saving():
                self.checkpoint.save(name, self.learner.parts())
            if self.journal is not None:
                self.journal.checkpoint()
        except StoreError as error:
            raise StoreError(
                f"after step {self.progress.steps}: {error}; make room there, or give Checkpoint another "
                f"folder; {last_good(self.checkpoint.path('last'))}"
            ) from error
