"""Training: epochs of steps, a validation and a checkpoint after each, and a reason to end.

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

from hoploom import html
from hoploom.errors import ConfigError, PeerError, StoreError, TrainError
from hoploom.nn import GNN
from hoploom.ranks.collectives import gather_json
from hoploom.ranks.context import Context, unwrap
from hoploom.ranks.stopping import StopRequests
from hoploom.train.calling import check_outputs
from hoploom.train.checkpoint import Checkpoint, SaveClock, last_good
from hoploom.train.disk_use import DiskMeter, DiskUse
from hoploom.train.journal import Journal, Progress, machine_of
from hoploom.train.learner import Ending, Learner, Standing, Training
from hoploom.train.sharding import is_sharded
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
    history: list[dict[str, float]] = field(
        repr=False
    )  # per epoch: number, train_loss, val_loss, what validate returned
    stopped: Ending
    whole_steps: StepCounts | None = None  # how a stepper such as WholeStep took the steps
    disk: DiskUse | None = None  # by this rank, where the store is larger than its budget

    def _repr_html_(self) -> str:
        """The table that a notebook shows: an epoch a row."""
        columns = list(dict.fromkeys(name for epoch in self.history for name in epoch))
        rows = [[f"{epoch[name]:.4g}" if name in epoch else "" for name in columns] for epoch in self.history]
        return html.table(f"{self.steps:,} steps, {self.epochs} epochs, {self.stopped}", columns, rows)


def fit(
    learner: Learner,
    training: Training,
    context: Context,
    *,
    validate: Validate | None = None,
    checkpoint: Checkpoint | None = None,
    journal: Journal | None = None,
    check: Callable[[], None] | None = None,
    stepper: MakeStepper | None = None,
) -> Outcome:
    """Train a model. All ranks call, each with its own learner and journal.

    `check` is called after every step, and ends training with what it raises. `stepper=hoploom.WholeStep` runs each
    step as CUDA graphs, for a store that is placed on a GPU.

    Training continues where the learner is; to resume a run, restore a checkpoint first.

    >>> checkpoint = Checkpoint("runs/papers", context)
    >>> checkpoint.restore("last", learner.parts())
    >>> fit(learner, Training(epochs=10), context, validate=validate, checkpoint=checkpoint)
    """
    _check(learner, context, validate)
    _find_place(learner)
    taking: AbstractContextManager[AnyStepper] = (
        nullcontext(Stepper(learner, training, context, checkpoint))
        if stepper is None
        else stepper(learner, training, context, checkpoint)
    )
    if training.progress and context.is_main:
        print(f"hoploom: loader threads {learner.loader.num_workers}", file=sys.stderr, flush=True)
        _tell_of_edge_features(learner)
    machines = gather_json(context, machine_of(context))  # also of ranks without a journal
    recording = nullcontext() if journal is None else journal.recording(learner, machines)
    meter = DiskMeter(learner.loader)
    progress = Progress(sys.stderr, learner, training, meter, shown=training.progress and context.is_main)
    with recording, taking as chosen, StopRequests() as requests, progress:
        clock = SaveClock(0.0 if checkpoint is None else training.checkpoint_minutes)
        run = _Run(
            learner,
            training,
            context,
            validate,
            checkpoint,
            journal,
            check,
            meter,
            progress,
            requests,
            chosen,
            clock,
            _LossWatch(learner.standing),
        )
        try:
            ending = run.until_it_ends()
        except PeerError as error:
            raise PeerError(f"{error}; {last_good(None if checkpoint is None else checkpoint.path('last'))}") from error
        if journal is not None:
            journal.ended(ending, step=learner.standing.steps)
    standing, counts = learner.standing, chosen.counts
    if counts is not None and counts.overflow_often:
        warnings.warn(
            f"{counts.overflow}: their batches did not fit, so they were made twice and nothing of them was replayed; "
            f"give Training a larger margin, e.g. margin={max(0.5, 2 * training.margin):g}",
            stacklevel=2,
        )
    history = list(standing.history)
    best_epoch = None if standing.best_epoch is None else standing.best_epoch + 1
    return Outcome(standing.steps, standing.epoch, standing.best, best_epoch, history, ending, counts, meter.use())


def _tell_of_edge_features(learner: Learner) -> None:
    """What a built-in model leaves unused."""
    store = getattr(learner.loader, "store", None)
    if store is None or not isinstance(unwrap(learner.model), GNN):
        return
    relations = [" ".join(relation.key) for relation in store.schema.relations if "edge_attr" in relation.fields]
    if relations:
        _tell(f"the built-in models do not use edge_attr of {', '.join(relations)}; PyG's GAT(edge_dim=...) does")


@cache
def _tell(line: str) -> None:
    """Once a process."""
    print(f"hoploom: {line}", file=sys.stderr, flush=True)


def _check(learner: Learner, context: Context, validate: Validate | None) -> None:
    """What cannot work, before the first step."""
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


def _find_place(learner: Learner) -> None:
    """Put the loader where training stands: a loop left halfway, or another run, may have moved it."""
    loader, standing = learner.loader, learner.standing
    is_unfinished = standing.rows > 0
    if is_unfinished and loader.epoch in (standing.epoch, standing.epoch + 1):
        loader.load_state_dict(loader.state_dict())
    elif is_unfinished:
        raise ConfigError(
            f"training is within epoch {standing.epoch}, the loader is at {loader.epoch}; restore both together"
        )
    elif loader.epoch != standing.epoch:
        loader.set_epoch(standing.epoch)


@dataclass
class _LossWatch:
    """A warning, once, at a loss that is a thousand times the first; a loss that is not finite ends a step itself."""

    standing: Standing
    has_warned: bool = False

    def step(self, report: StepReport) -> None:
        first = self.standing.first_loss
        if first is None:
            self.standing.first_loss = report.loss
        elif not self.has_warned and report.loss > max(MOST_GROWTH * abs(first), 1):  # the first may be zero
            warnings.warn(
                f"the loss is {report.loss:.3g} at epoch {report.epoch + 1} step {report.step}, over {MOST_GROWTH:,} "
                f"times what it was at the first step; lower the learning rate ({report.learning_rate:g}), or clip "
                "gradients (clip_norm=1.0)",
                stacklevel=2,
            )
            self.has_warned = True


@dataclass(frozen=True)
class _Run:
    """What takes part in training."""

    learner: Learner
    training: Training
    context: Context
    validate: Validate | None
    checkpoint: Checkpoint | None
    journal: Journal | None
    check: Callable[[], None] | None
    meter: DiskMeter
    progress: Progress
    requests: StopRequests
    stepper: AnyStepper
    clock: SaveClock
    loss_watch: _LossWatch

    def until_it_ends(self) -> Ending:
        """Steps and validations in turn; a run that is resumed may begin with either."""
        asked = False
        while not asked:
            if self._epoch_is_taken():
                asked = self._end_epoch()
            elif (ending := self.learner.standing.is_over(self.training)) is not None:
                return ending
            else:
                asked = self._take_steps()
        return "asked"

    def _epoch_is_taken(self) -> bool:
        """All steps of the epoch are behind us, its validation may not be."""
        return self.learner.standing.rows > 0 and self.learner.loader.epoch > self.learner.standing.epoch

    def _take_steps(self) -> bool:
        """Take what is left of the epoch's steps; whether some rank was asked to stop."""
        learner, training, standing = self.learner, self.training, self.learner.standing
        learner.model.train()
        asked = False
        with self.stepper.steps() as steps:
            while not (asked or steps.is_empty) and standing.is_over(training) is None:
                reports, asked, is_due = steps.take(self.requests, is_due=self.clock.is_due)
                if self.check is not None:
                    self.check()
                self._report(reports)
                every = training.checkpoint_every
                is_due = is_due or (every is not None and standing.steps % every == 0)
                if is_due and not (asked or steps.is_empty):
                    self._report(steps.rest())
                    self._save("last")
            self._report(steps.rest())
        if asked or self.validate is not None or not self._epoch_is_taken():
            self._save("last")
        return asked

    def _report(self, reports: Sequence[StepReport]) -> None:
        for report in reports:
            self.meter.step(report)
            self.progress.step(report)
            self.loss_watch.step(report)
            if self.journal is not None:
                self.journal.step(report)

    def _end_epoch(self) -> bool:
        """Validate and keep what came of it; whether some rank was asked to stop meanwhile."""
        standing = self.learner.standing
        found: dict[str, float] = {}
        if self.validate is not None:
            with self._timed("validation"):
                self.progress.doing(f"epoch {standing.epoch + 1}  validating")
                found = dict(self.validate())
            self.meter.skip()
        metrics = {VAL_LOSS: found.pop("loss"), **found} if "loss" in found else found
        standing.history.append(
            {"epoch": standing.epoch + 1, "train_loss": standing.loss_sum / standing.rows, **metrics}
        )
        is_best = self.validate is not None and self._judge(metrics)
        overflow = "" if self.stepper.counts is None else self.stepper.counts.overflow
        self.progress.epoch(standing.history[-1], is_best=is_best, note=overflow)
        if self.journal is not None:
            self.journal.epoch(standing.history[-1], step=standing.steps)
        standing.epoch, standing.loss_sum, standing.rows = standing.epoch + 1, 0.0, 0
        self._save(("last", "best") if is_best else "last")
        return self.context.sum(int(self.requests.asked)) > 0

    def _timed(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.journal is None else self.journal.timed(name)

    def _judge(self, metrics: Mapping[str, float]) -> bool:
        """Whether this epoch is the best so far, by rank 0's metrics."""
        name, mode = self.learner.task.monitor
        name = VAL_LOSS if name == "loss" else name  # of tasks of your own
        if name not in metrics:
            raise ConfigError(f"validate returned no {name!r}, which the task monitors, only {sorted(metrics)}")
        value = float(self.context.gather(torch.tensor([metrics[name]], dtype=torch.float64))[0])
        if self.learner.plateau is not None:
            self.learner.plateau.step(value)
        return self.learner.standing.judge(value, mode)

    def _save(self, name: str | tuple[str, str]) -> None:
        if self.checkpoint is None:
            return
        for parameter_name, parameter in self.learner.model.named_parameters():
            if not parameter.isfinite().all():
                raise TrainError(
                    f"parameter {parameter_name!r} is not finite after step {self.learner.standing.steps}; "
                    f"lower the learning rate, or clip gradients (clip_norm=1.0); no checkpoint was written"
                )
        try:
            with self._timed("checkpoint"), self.clock.saving():
                self.checkpoint.save(name, self.learner.parts())
            if self.journal is not None:
                self.journal.checkpoint()
        except StoreError as error:
            raise StoreError(
                f"after step {self.learner.standing.steps}: {error}; make room there, or give Checkpoint another "
                f"folder; {last_good(self.checkpoint.path('last'))}"
            ) from error
