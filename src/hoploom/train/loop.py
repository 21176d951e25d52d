"""Training in epochs, with a validation and a checkpoint after each; and evaluation over every seed of a loader.

A run that is stopped anywhere and restored from its last checkpoint takes the same steps as one that never stopped.
Evaluation distributes whole steps over ranks, so that the batches are those that a single process would see.
"""

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm.auto import tqdm

from hoploom.errors import ConfigError, DataError, PeerError, StoreError, TrainError
from hoploom.load.assemble import Batch
from hoploom.load.loader import Loader
from hoploom.nn import GNN
from hoploom.nn.models import KINDS
from hoploom.ops.deadline import on_host
from hoploom.ranks.agreement import difference_of
from hoploom.ranks.context import Context, gather_json, unwrap
from hoploom.system import Closing, StopRequests
from hoploom.train.batch_adapter import adapted, check_outputs, without_ddp
from hoploom.train.checkpoint import Checkpoint, SaveClock, last_good
from hoploom.train.journal import Journal, machine_of
from hoploom.train.link_prediction import LinkPrediction, check_labels
from hoploom.train.step import (
    Ending,
    Learner,
    MakeStepper,
    StepCounts,
    Stepper,
    StepReport,
    Training,
    check_closure,
    check_loader,
    check_precision,
    mixed,
)
from hoploom.train.tasks import VAL_LOSS, Task, update_with_nothing

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

MOST_GROWTH = 1000  # a loss of more than this multiple of the first one gets a warning
Validate = Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Outcome:
    """The result of training. `stopped`: "done", "early" (validation no longer improves), "asked" (Ctrl-C, SIGTERM)."""

    steps: int
    epochs: int
    best: float | None  # value of the metric that the task monitors
    best_epoch: int | None  # from 1
    history: list[dict[str, float]] = field(repr=False)  # by epoch: epoch, train_loss, val_loss, other metrics
    stopped: Ending
    whole_steps: StepCounts | None = None  # how a stepper such as WholeStep took the steps


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
    if stepper is not None and not callable(stepper):
        raise ConfigError(f"stepper is {stepper!r:.80}; give a class such as hoploom.WholeStep, or leave it out")
    stepping = (stepper or Stepper)(learner, training, context, checkpoint)
    shown = training.progress and context.is_main
    if shown:
        print(f"hoploom: loader threads {learner.loader.num_workers}", file=sys.stderr, flush=True)
        _warn_of_edge_features(learner)
    machines = gather_json(context, machine_of(context))  # also of ranks without a journal
    recording = nullcontext() if journal is None else journal.recording(learner, machines)
    line = ProgressLine(sys.stderr, learner, training, shown=shown)
    with recording, stepping as steps, StopRequests() as requests, line:
        loop = _Loop(learner, training, context, validate, checkpoint, journal, line, requests, steps)
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
    return Outcome(progress.steps, progress.epoch, progress.best, best_epoch, list(progress.history), ending, counts)


def _check(learner: Learner, context: Context, validate: Validate | None) -> None:
    """Check settings and labels before the first step; raise an error for those that cannot work."""
    if validate is not None and not callable(validate):
        raise ConfigError(f"validate is {validate!r:.80}; give a function of no argument that returns metrics")
    loader = learner.loader
    for each in learner.loaders:
        if (each.rank, each.world_size) != (context.rank, context.world_size):
            raise ConfigError(
                f"the loader is for rank {each.rank} of {each.world_size}, this is rank {context.rank} of "
                f"{context.world_size}; make it after hoploom.init(), without rank and world_size"
            )
        if not len(each):
            raise ConfigError(
                f"a loader makes no step: it has fewer seeds than batch_size={each.batch_size} on "
                f"{each.world_size} ranks, and drop_last=True leaves them out; lower batch_size, or leave out drop_last"
            )
    averaging = [module for module in learner.model.modules() if isinstance(module, DistributedDataParallel)]
    averaged = {id(parameter) for module in averaging for parameter in module.parameters()}
    alone = [name for name, p in learner.model.named_parameters() if p.requires_grad and id(p) not in averaged]
    if alone and context.world_size > 1:
        what = f"parameter {alone[0]!r} of the model" if averaging else "the model"
        raise ConfigError(
            f"{what} is not wrapped in DistributedDataParallel, and fit averages gradients over the "
            f"{context.world_size} ranks in no other way; give Learner context.wrap(model), and make the optimizer "
            "from that model's parameters"
        )
    check_outputs(learner.model, learner.task)
    check_closure(learner.optimizer)
    if learner.plateau is not None:
        name, mode = learner.task.monitor
        if validate is None:
            raise ConfigError("ReduceLROnPlateau needs a metric; give validate")
        if learner.plateau.mode != mode:
            raise ConfigError(f"ReduceLROnPlateau has mode={learner.plateau.mode!r}, {name!r} wants {mode!r}")
    learner.task = check_labels(learner.task, loader, learner.model, context, training=True)
    for name, side in learner.also.items():
        check_outputs(learner.model, side.task)
        task = check_labels(side.task, side.loader, learner.model, context, training=True)
        learner.also[name] = replace(side, task=task)


def _seek_loader(learner: Learner) -> None:
    """Set the loader's position to the epoch and step of the learner's progress; another loop may have moved it."""
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
    store, model = getattr(learner.loader, "store", None), unwrap(learner.model)
    if store is None or not isinstance(model, GNN) or model.edge_fields:
        return
    if relations := [" ".join(relation.key) for relation in store.schema.relations if "edge_attr" in relation.fields]:
        able = ", ".join(name for name, kind in KINDS.items() if "features" in kind.reads)
        way = f'{able} do with model.edges = "edge_attr" in run.toml, or Shape(edges="edge_attr")'
        _print_once(f"the model does not read edge_attr of {', '.join(relations)}; {way}")


@cache
def _print_once(line: str) -> None:
    print(f"hoploom: {line}", file=sys.stderr, flush=True)


@dataclass
class _Loop:
    """The state of one call of `fit`: takes steps, validates and saves checkpoints until training ends."""

    learner: Learner
    training: Training
    context: Context
    validate: Validate | None
    checkpoint: Checkpoint | None
    journal: Journal | None
    line: "ProgressLine"
    requests: StopRequests
    stepper: Stepper
    has_warned: bool = False

    def __post_init__(self) -> None:
        self.progress = self.learner.progress
        self.save_clock = SaveClock(0.0 if self.checkpoint is None else self.training.checkpoint_minutes)

    def run(self) -> Ending:
        """Take steps and validate in turn; return how training ended. A resumed run may begin with a validation."""
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
        """Return whether all steps of the current epoch are taken; it may still have to be validated."""
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
            self.line.step(report)
            first = self.progress.first_loss
            if first is None:
                self.progress.first_loss = report.loss
            elif not self.has_warned and report.loss > max(MOST_GROWTH * abs(first), 1):  # the first may be zero
                self.has_warned = True
                warnings.warn(
                    f"the loss is {report.loss:.3g} at epoch {report.epoch + 1} step {report.step}, over "
                    f"{MOST_GROWTH:,} times what it was at the first step; lower the learning rate "
                    f"({report.learning_rate:g}), or clip gradients (clip_norm=1.0)",
                    stacklevel=2,
                )
            if self.journal is not None:
                self.journal.step(report)

    def _end_epoch(self) -> bool:
        """Validate, report the metrics and save checkpoints; return whether some rank was asked to stop meanwhile."""
        progress, found = self.progress, dict[str, float]()
        if self.validate is not None:
            with self._timed("validation"):
                self.line.doing(f"epoch {progress.epoch + 1}  validating")
                found = dict(self.validate())
        metrics = {VAL_LOSS: found.pop("loss"), **found} if "loss" in found else found
        progress.history.append(
            {"epoch": progress.epoch + 1, "train_loss": progress.loss_sum / progress.rows, **metrics}
        )
        is_best = False
        if self.validate is not None:
            name, mode = self.learner.task.monitor
            name = VAL_LOSS if name == "loss" else name  # a user's task may monitor "loss"
            if name not in metrics:
                raise ConfigError(f"validate returned no {name!r}, which the task monitors, only {sorted(metrics)}")
            value = float(self.context.gather(torch.tensor([metrics[name]], dtype=torch.float64))[0])  # rank 0's
            if self.learner.plateau is not None:
                self.learner.plateau.step(value)
            is_best = progress.update_best(value, mode)
        overflow = "" if self.stepper.counts is None else self.stepper.counts.overflow
        self.line.epoch(progress.history[-1], is_best=is_best, note=overflow)
        if self.journal is not None:
            self.journal.epoch(progress.history[-1], step=progress.steps)
        progress.epoch, progress.loss_sum, progress.rows = progress.epoch + 1, 0.0, 0
        self._save(("last", "best") if is_best else "last")
        return self.context.sum(int(self.requests.stop_requested)) > 0

    def _timed(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.journal is None else self.journal.times.timed(name)

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
                self.journal.times.flush()  # a run that is resumed here keeps the measurements so far
        except StoreError as error:
            raise StoreError(
                f"after step {self.progress.steps}: {error}; make room there, or give Checkpoint another "
                f"folder; {last_good(self.checkpoint.path('last'))}"
            ) from error


# --- progress on the terminal ----------------------------------------------------------------------

REDRAW_SECONDS = 0.1
PLAIN_SECONDS = 30.0  # between lines if there is no terminal
WIDEST = 100  # columns of a progress line
FIGURE = 8  # characters of a metric
HEADER_EVERY = 25  # epochs between two headers of the table
SMOOTHING = 0.05  # weight of the newest step in the loss that is shown


class Bar(tqdm):  # type: ignore[misc]
    """A tqdm bar without tqdm's monitor thread and without a lock shared by processes."""

    monitor_interval = 0
    _lock = threading.RLock()

    @property
    def format_dict(self) -> dict[str, Any]:
        """The values that tqdm formats as a line, with a width of at most WIDEST columns."""
        found: dict[str, Any] = super().format_dict
        return found | {"ncols": min(found["ncols"] or WIDEST, WIDEST)}


def progress_bar(stream: TextIO, total: int, *, shown: bool, initial: int = 0, redraw: float = REDRAW_SECONDS) -> Bar:
    """Return a bar, drawn if `shown` and on a terminal or in a notebook. The caller sets its `bar_format`."""
    in_notebook = any(kind.__name__ == "tqdm_notebook" for kind in tqdm.__mro__)
    drawn = shown and not stream.closed and (in_notebook or stream.isatty())
    return Bar(
        total=total,
        initial=initial,
        file=stream,
        bar_format="[{bar:20}]",
        ascii="-#",
        dynamic_ncols=True,
        leave=False,
        mininterval=redraw,
        miniters=1,
        disable=not drawn,
    )


class ProgressLine(Closing):
    """A display of steps and epochs on a stream; silent unless `shown`, which is set on one rank only."""

    def __init__(
        self,
        stream: TextIO,
        learner: Learner,
        training: Training,
        *,
        shown: bool = True,
        redraw: float = REDRAW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._shown, self._clock = stream, shown and not stream.closed, clock
        steps = training.epochs * -(-len(learner.loader) // training.accumulate)
        self._num_steps = steps if training.max_steps is None else min(steps, training.max_steps)
        self._num_epochs, self._first_step = training.epochs, learner.progress.steps
        self._bar = progress_bar(stream, self._num_steps, shown=shown, initial=self._first_step, redraw=0.0)
        self._pause = PLAIN_SECONDS if self._bar.disable else redraw
        self._began = self._last_shown = clock()
        self._loss, self._num_lines = 0.0, 0
        self._columns: tuple[str, ...] = ()  # of the last header
        self.doing("waiting for the first step")
        self._seeds = self._seconds = self._wait_seconds = 0.0

    def step(self, report: StepReport) -> None:
        """Count a step; redraw the line every `redraw` seconds on a terminal, else print a line every PLAIN_SECONDS."""
        if not self._shown:
            return
        taken = report.step - self._first_step
        self._loss += max(SMOOTHING, 1 / taken) * (report.loss - self._loss)  # at first the plain mean
        self._seeds += report.seeds
        self._seconds += report.seconds
        self._wait_seconds += report.wait_seconds
        now = self._clock()
        if now - self._last_shown < self._pause:
            return
        self._last_shown, seconds = now, max(self._seconds, 1e-9)
        place = f"epoch {_of(report.epoch + 1, self._num_epochs)}  step {_of(report.step, self._num_steps)}"
        rate, waited = tqdm.format_sizeof(self._seeds / seconds), 100 * self._wait_seconds / seconds
        figures = f"loss {_figure(self._loss)}  {rate:>5} seeds/s  wait {waited:2.0f} %"
        left = tqdm.format_interval((now - self._began) / taken * max(0, self._num_steps - report.step)) + " left"
        if self._bar.disable:
            self._print("  ".join([place, figures, left]))
            return
        self._bar.bar_format = f"{place}  [{{bar}}]  {figures}  {left}"
        self._bar.update(report.step - self._bar.n)

    def doing(self, what: str) -> None:
        """Show `what`, such as "validating", on a terminal while training takes no steps."""
        if not self._bar.disable:
            self._bar.bar_format = f"{what}  [{{bar:20}}]"
            self._bar.refresh()

    def epoch(self, metrics: Mapping[str, float], *, is_best: bool, note: str = "") -> None:
        """Print an epoch's metrics and a note as a row of a table, which stays on the terminal."""
        if not self._shown:
            return
        columns = tuple(name for name in metrics if name != "epoch" and "/" not in name)  # no entries of a matrix
        place = _of(int(metrics["epoch"]), self._num_epochs)
        if columns != self._columns or self._num_lines % HEADER_EVERY == 0:
            self._columns, self._num_lines = columns, 0
            self._print("  ".join([f"{'epoch':>{len(place)}}", *(f"{name:>{FIGURE}}" for name in columns)]))
        self._num_lines += 1
        values = (f"{_figure(metrics[name]):>{max(FIGURE, len(name))}}" for name in columns)
        self._print("  ".join([f"{place:>5}", *values, *["best"] * is_best, *[note] * bool(note)]))

    def _print(self, line: str) -> None:
        try:
            self._bar.write(line, file=self._stream)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone; training continues
            self._shown = False

    def close(self) -> None:
        self._bar.close()


def _of(number: int, total: int) -> str:
    """Return "number/total" as text of a fixed width: 3/10 is as wide as 10/10."""
    return f"{number:>{len(str(total))}}/{total}"


def _figure(value: float) -> str:
    """Return a metric as text with four decimals, or in scientific notation if it is very small or large."""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e3 or value == 0 else f"{value:.2e}"


# --- evaluation ------------------------------------------------------------------------------------


def evaluate(
    model: nn.Module, loader: Loader, task: Task, context: Context, *, precision: str = "fp32"
) -> dict[str, float]:
    """Return the metrics of the task and the mean loss, exact and the same on every rank. All ranks call.

    The ranks share the steps of the loader, so the batches are those of one process. A loader that was made with
    `rank=` and `world_size=` is not divided again. Every call samples the same neighbors, those of epoch 0 of the
    loader, so results repeat. Your own loop over the loader gets the same ones after `loader.set_epoch(0)`.

    >>> evaluate(model, NeighborLoader(store, [-1, -1], input_nodes="val", batch_size=4096), task, context)
    """
    check_precision(precision)
    check_outputs(model, task)
    check_loader(loader)
    steps, module = _steps(loader, context), adapted(without_ddp(model))
    described = [] if context.world_size == 1 else gather_json(context, dict(loader.reading().settings))
    if (other := next((rank for rank, one in enumerate(described) if one != described[0]), None)) is not None:
        raise ConfigError(difference_of((0, described[0]), (other, described[other]), context.world_size))
    if isinstance(task, LinkPrediction):  # fit checks the labels of training nodes, a run those of all splits
        task = check_labels(task, loader, model, context, training=False)
    metrics, total = task.new_metrics(context.device), torch.zeros(2, dtype=torch.float64)
    context.sync_buffers(module)

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
            try:
                loss = on_host(losses.sum(), "evaluated a batch", context.timeout)
            except TimeoutError as error:
                way_out = f"or give hoploom.init a timeout above {context.timeout:g} seconds"
                raise TrainError(f"evaluation failed: {error}, {way_out}") from error
            total += torch.stack([loss, torch.tensor(float(losses.numel()), dtype=torch.float64)])
        if len(steps) == 0:
            for outputs, targets in rows(range(1)):
                for metric in metrics.values():
                    update_with_nothing(metric, metric.update, task.scores(outputs), targets)
        most = -(-loader.num_whole_steps // context.world_size) if _shares_steps(loader) else len(steps)
        for _ in range(max(1, len(steps)), most):  # batches that other ranks have more than this one
            for learned in loader.learned:
                learned.attach_nothing()
        loss_sum, num_rows = context.sum(total).tolist()
        with context.guard("computing metrics"):
            computed = _computed(metrics, int(num_rows), warn=len(steps) > 0)
        return {**computed, "loss": loss_sum / num_rows}


def _steps(loader: Loader, context: Context) -> range:
    """Return the loader's steps that this rank evaluates; raise ConfigError if they would not cover all seeds."""
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
    """Return whether ranks take whole steps of the loader in turn; otherwise each takes a share of every step."""
    return loader.world_size == 1 or not loader.share.is_given


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode and disable gradients in this block; restore the mode of every submodule afterwards."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def _computed(metrics: "MetricCollection", num_rows: int, *, warn: bool) -> dict[str, float]:
    """Return the metrics as floats by name; a matrix gives one entry per element, named name/row/column."""
    with warnings.catch_warnings():
        if not warn:  # that update() was never called, as this rank has no rows
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
