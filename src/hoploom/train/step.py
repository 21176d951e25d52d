"""The learner, the settings of training, and one optimizer step over all ranks, from batches to update and report.

Each rank and each batch counts by its number of rows, so a step is the same as that of one process with all rows.
One small all-reduce per step, on the CPU, finds a failed rank before the backward pass, which would wait for it.
"""

import inspect
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hoploom import keys
from hoploom.config.values import as_int, as_number
from hoploom.errors import ConfigError, TrainError
from hoploom.load.assemble import Batch
from hoploom.load.loader import Loader
from hoploom.nn.embedding import Embedding
from hoploom.ops.deadline import BUSY, HostCopy
from hoploom.ranks.agreement import detector_here
from hoploom.ranks.context import Context
from hoploom.system import Closing, StopRequests
from hoploom.train.batch_adapter import adapted
from hoploom.train.checkpoint import MINUTES, Checkpoint, Stateful, last_good, learned_parts
from hoploom.train.link_prediction import LinkPrediction
from hoploom.train.tasks import Mode, Task

Precision = Literal["fp32", "bf16", "fp16"]
HALF: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
Ending = Literal["done", "early", "asked"]
MARGIN = 0.1  # extra buffer space, as a fraction of the largest sampled batch


@dataclass(frozen=True)
class Training:
    """The settings of training.

    `accumulate`: batches of the loader per optimizer step. `patience`: training stops after this many epochs without a
    better validation. `checkpoint_minutes`: minutes between two checkpoints, by rank 0's clock; the first is saved
    after the first step. The pause is longer if saving takes more than 1 % of it; 0 saves only after every epoch.
    `checkpoint_every`: steps between two checkpoints, in addition to `checkpoint_minutes`.
    `margin`: extra buffer space of `WholeStep`, as a fraction of the largest sampled batch.
    """

    epochs: int
    accumulate: int = 1
    clip_norm: float | None = None
    precision: Precision = "fp32"
    seed: int = 0
    patience: int | None = None
    checkpoint_minutes: float = MINUTES
    checkpoint_every: int | None = None
    max_steps: int | None = None
    progress: bool = True  # a bar on rank 0's stderr
    margin: float = MARGIN

    def __post_init__(self) -> None:
        as_int("epochs", self.epochs, 1, "give how many times to go over the seeds")
        as_int("accumulate", self.accumulate, 1, "give how many batches make a step, 1 or more")
        as_int("seed", self.seed, None, "give an integer")
        for name in ("patience", "checkpoint_every", "max_steps"):
            if getattr(self, name) is not None:
                as_int(name, getattr(self, name), 1, "give at least 1, or leave it out")
        if self.clip_norm is not None and as_number("clip_norm", self.clip_norm, "give a positive number") == 0:
            raise ConfigError("clip_norm is 0, no gradient would be left; give a positive number")
        as_number("checkpoint_minutes", self.checkpoint_minutes, "give minutes, or 0")
        as_number("margin", self.margin, "give a share of what batches take, e.g. 0.1")
        check_precision(self.precision)


def check_precision(precision: str) -> None:
    """Raise ConfigError for an unknown precision."""
    if precision not in ("fp32", *HALF):
        raise ConfigError(f"precision is {precision!r:.80}; give one of 'fp32', 'bf16', 'fp16'")


def mixed(precision: str, device: torch.device, **options: Any) -> AbstractContextManager[Any]:
    """Return a context manager in which the model computes in this precision."""
    half = HALF.get(precision)
    return nullcontext() if half is None else torch.autocast(device.type, half, **options)


@dataclass
class TrainingProgress:
    """The progress of training, which checkpoints store as the part `standing`."""

    epoch: int = 0  # epochs that are complete, their validation included
    steps: int = 0
    loss_sum: float = 0.0  # of the current epoch, over all ranks
    rows: int = 0  # whose losses loss_sum adds up
    best: float | None = None
    best_epoch: int | None = None
    stale: int = 0  # epochs since the best
    history: list[dict[str, float]] = field(default_factory=list)
    first_loss: float | None = None  # of the first step

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])

    def ending(self, training: Training) -> Ending | None:
        """Return how training ends if it ends before the next step; None if there is a next step."""
        if training.patience is not None and self.stale >= training.patience:
            return "early"
        out_of_steps = training.max_steps is not None and self.steps >= training.max_steps
        return "done" if out_of_steps or self.epoch >= training.epochs else None

    def update_best(self, value: float, mode: Mode) -> bool:
        """Compare an epoch's value of the monitored metric with the best so far; return whether it is better."""
        better = self.best is None or (value > self.best if mode == "max" else value < self.best)
        if better and not math.isnan(value):
            self.best, self.best_epoch, self.stale = value, self.epoch, 0
            return True
        self.stale += 1
        return False


def check_loader(loader: object) -> None:
    """Raise ConfigError for another library's loader, or a graph in its place."""
    if not isinstance(loader, Loader):
        found = f"{type(loader).__module__.partition('.')[0]}'s {type(loader).__name__}"
        raise ConfigError(f"the loader is {found}; give a loader of hoploom, such as hoploom.NeighborLoader")


@dataclass(frozen=True)
class SideTask:
    """A further task that a learner's model learns, from batches of its own loader, such as links beside nodes.

    In each step, the loss is that of the learner's task plus `weight` times the mean loss of a batch of this one. An
    epoch is that of the learner's loader; this loader begins its own next epoch when its batches are used up.
    """

    task: Task
    loader: Loader
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_loader(self.loader)
        as_number("weight", self.weight, "give a number of at least 0")


@dataclass
class Learner:
    """A model, its optimizer, task and loader, and how far training has come. All belong to this rank.

    >>> learner = Learner(context.wrap(model), optimizer, NodeClassification(47), loader)

    `also` has further tasks by name: `also={"links": SideTask(LinkPrediction(), link_loader, weight=0.5)}`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: Task
    loader: Loader
    scheduler: LRScheduler | ReduceLROnPlateau | None = None
    also: dict[str, SideTask] = field(default_factory=dict, kw_only=True)
    progress: TrainingProgress = field(default_factory=TrainingProgress, init=False)
    scaler: torch.amp.GradScaler = field(init=False)  # used for fp16 only

    def __post_init__(self) -> None:
        check_loader(self.loader)
        if len({id(each) for each in self.loaders}) < len(self.loaders):
            raise ConfigError("two tasks have the same loader, which has one position; make a loader for each task")
        owned = {id(parameter) for parameter in self.model.parameters()}
        if owned and owned.isdisjoint(id(each) for group in self.optimizer.param_groups for each in group["params"]):
            raise ConfigError("the optimizer has no parameter of the model; make it from this model's parameters()")
        device = next((parameter.device.type for parameter in self.model.parameters()), "cpu")
        self.scaler = torch.amp.GradScaler(device)

    @property
    def loaders(self) -> tuple[Loader, ...]:
        """The loaders of all tasks, the learner's own first."""
        return self.loader, *(side.loader for side in self.also.values())

    def parts(self) -> dict[str, Stateful]:
        """Return the parts that a checkpoint must save so that training continues at the very next step."""
        parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "loader": self.loader,
            "standing": self.progress,
            **{f"loader of {name}": side.loader for name, side in self.also.items()},
        }
        return {name: part for name, part in parts.items() if part is not None} | learned_parts(self.loader.store)

    @property
    def plateau(self) -> ReduceLROnPlateau | None:
        """The scheduler, if it takes a metric after each epoch instead of a call after each step."""
        return self.scheduler if isinstance(self.scheduler, ReduceLROnPlateau) else None

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


# --- a step ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepReport:
    """The measurements of one step: its loss, rows and seconds."""

    epoch: int
    step: int  # counted from the start of training, 1 for the first
    loss: float  # mean over the rows of all ranks
    seeds: int  # over all ranks
    rows: int  # of this rank
    learning_rate: float
    seconds: float
    wait_seconds: float  # the part of `seconds` spent waiting for batches
    parts: Mapping[str, float] = field(default_factory=dict)  # the other seconds by activity; CPU training only


class StepResult(NamedTuple):
    """The result of `Stepper.take`."""

    reports: list[StepReport]  # of steps whose losses are known by now, in order
    stop_requested: bool  # on some rank
    is_due: bool = False  # whether a checkpoint is due, by rank 0's clock


@dataclass
class BegunStep:
    """A step whose loss may not be known yet."""

    number: int  # counted from the start of training, 1 for the first
    divisor: int  # which gradients are divided by, before the number of rows of all ranks is known
    seeds: int = 0  # over all ranks
    rows: int = 0  # of this rank
    loss_sums: list[HostCopy] = field(default_factory=list)
    rows_of_all: float = 0.0
    report: StepReport | None = None  # without the loss

    def add(self, loss_sum: Tensor, rows: int) -> None:
        """Add a batch's sum of losses, a float64 number on the device, which starts to be copied to the host."""
        self.loss_sums.append(HostCopy(loss_sum))
        self.rows += rows


@dataclass
class StepCounts:
    """Counts of a run's steps: those replayed as CUDA graphs, and those taken in other ways."""

    replayed: int = 0
    first: int = 0  # with batches of fixed size, before anything was recorded
    overflowed: int = 0  # with a batch that did not fit the buffers, and was made again at its own size
    shorter: int = 0  # with another number of seeds, at an epoch's end, also at its own size

    @property
    def overflow(self) -> str:
        """A text with the number of steps whose batches did not fit the fixed buffers; empty if there are none."""
        num_steps = self.replayed + self.first + self.overflowed + self.shorter
        return f"{self.overflowed:,} of {num_steps:,} steps overflowed" if self.overflowed else ""

    @property
    def overflow_often(self) -> bool:
        """Whether more than a tenth of the steps had a batch that did not fit the fixed buffers."""
        return 9 * self.overflowed > self.replayed + self.first + self.shorter

    def __str__(self) -> str:
        return (
            f"{self.replayed:,} steps replayed, {self.first} before that, {self.overflowed:,} overflowed, "
            f"{self.shorter:,} of another number of seeds"
        )


class StepTimer:
    """A timer that divides the seconds of a step by activity, on the host's clock."""

    def __init__(self) -> None:
        self.began = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Add the time since the last call to the seconds of the activity `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def parts(self, averaging: float) -> dict[str, float]:
        """Return seconds by activity, without "wait" and "rest". Count `averaging` as "all-reduce", not "backward"."""
        parts = {name: spent for name, spent in self.seconds.items() if name not in ("wait", "rest")}
        if averaging > 0:
            parts["all-reduce"] = averaging
            parts["backward"] -= averaging
        return parts


class Stepper(Closing):
    """The steps of training. This class learns eagerly, on any device and for any learner; WholeStep by recordings.

    >>> with stepper.steps() as steps:
    ...     while not steps.is_empty:
    ...         reports = steps.take(requests).reports
    ...     reports = steps.rest()
    """

    counts: StepCounts | None = None  # None if there is one way to take steps
    delay = 0  # steps after which the loss of a step is read

    def __init__(
        self, learner: Learner, training: Training, context: Context, checkpoint: Checkpoint | None = None
    ) -> None:
        self.learner, self._training, self._context = learner, training, context
        self._checkpoint, self._model = checkpoint, adapted(learner.model)
        self._parameters = [parameter for parameter in learner.model.parameters() if parameter.requires_grad]
        self._scaler = learner.scaler if training.precision == "fp16" else None
        self._learned: Sequence[Embedding] = learner.loader.store.learned  # type: ignore[assignment]
        if self._learned and self._scaler is not None:
            raise ConfigError(
                'precision is "fp16", which scales gradients, and those of learned rows cannot be unscaled; take "bf16"'
            )
        for name, side in learner.also.items():
            if list(side.loader.store.learned) != list(self._learned):
                raise ConfigError(f"the loader of {name!r} has other learned rows; make both loaders of one store")
        for name, value in (each for module in learner.model.modules() for each in vars(module).items()):
            if isinstance(value, Embedding) and not value.is_fixed and all(value is not of for of in self._learned):
                raise ConfigError(
                    f"the model has learned rows of {value.node_type!r}, as {name!r}, which fit would not update "
                    "or save; make the loader of their .store, whose batches have them as x"
                )
        self._detector = detector_here()
        self._open: deque[BegunStep] = deque()  # in order; their losses are not known yet
        self._batches: list[Generator[Batch, None, None]] = []  # of each task

    @contextmanager
    def steps(self) -> Iterator[Self]:
        """Begin the loader's epoch, or go on with it; yield this object, which takes the steps left in it."""
        loader = self.learner.loader
        self._open.clear()
        sides = (_endless(side.loader) for side in self.learner.also.values())
        self._batches = [cast(Generator[Batch, None, None], iter(loader)), *sides]
        self._epoch, self._step = loader.epoch, int(loader.state_dict()["step"])
        yield self
        self.close()  # after an error, at the end of the stepper's own `with` block

    @property
    def is_empty(self) -> bool:
        """Whether no step is left in the epoch."""
        return self.learner.loader.epoch != self._epoch

    def take(self, requests: StopRequests, *, is_due: bool = False) -> StepResult:
        """Take the next step; return the reports of those steps whose losses are known by now.

        Gradients are rescaled when the true number of rows is known. All ranks learn whether some rank was asked to
        stop (`requests`), and whether rank 0 wants a checkpoint (`is_due`).
        """
        timer, progress, averaging_before = StepTimer(), self.learner.progress, self._averaging_seconds()
        self._reseed()
        with self._failing_late(), self._learning(timer) as step:
            self._open.append(step)
            known = self._open.popleft() if len(self._open) > self.delay else None
            asked, due = requests.stop_requested, is_due and self._context.is_main
            loss_sum, step.rows_of_all, num_asked, num_due = self._agree(known, step.rows, asked=asked, due=due)
            timer.end("ranks" if self._context.world_size > 1 else "rest")
        learning_rate = self.learner.learning_rate
        timer.end("rest")
        is_by_step = self.learner.scheduler is not None and self.learner.plateau is None
        if self._update(step.divisor / step.rows_of_all) and is_by_step:
            self.learner.scheduler.step()  # type: ignore[union-attr]
        timer.end("optimizer")
        progress.steps += 1
        on_cpu = self._context.device.type == "cpu"  # else the host's clock measures waiting only
        step.report = StepReport(
            progress.epoch,
            progress.steps,
            math.nan,
            step.seeds,
            step.rows,
            learning_rate,
            time.perf_counter() - timer.began,
            timer.seconds["wait"],
            timer.parts(self._averaging_seconds() - averaging_before) if on_cpu else {},
        )
        reports = [] if known is None else [self._complete(known, loss_sum)]
        return StepResult(reports, num_asked > 0, num_due > 0)

    def rest(self) -> list[StepReport]:
        """Wait for all losses that are still missing; return the reports of these steps."""
        steps = [self._open.popleft() for _ in range(len(self._open))]
        return [self._complete(step, self._agree(step)[0]) for step in steps]

    @contextmanager
    def _learning(self, timer: "StepTimer") -> Iterator[BegunStep]:
        """Compute the gradients of the next step, over all ranks. Yield the step where the ranks agree on it.

        This is before the backward pass if there are several, which would wait for a rank that has failed.
        """
        loader, accumulate, is_alone = self.learner.loader, self._training.accumulate, self._context.world_size == 1
        number = self.learner.progress.steps + 1
        step = BegunStep(number, loader.num_seeds(self._step) * accumulate)  # the same divisor on all ranks
        self.learner.optimizer.zero_grad(set_to_none=True)
        for embedding in self._learned:
            embedding.zero_grad()
        for left in reversed(range(accumulate)):
            timer.end("rest")
            of_tasks = [next(batches) for batches in self._batches]
            timer.end("wait")
            step.seeds += loader.num_seeds(self._step)
            self._step += 1
            is_last = left == 0 or self.is_empty
            no_sync = None if is_last else getattr(self.learner.model, "no_sync", None)  # of DDP
            with nullcontext() if no_sync is None else no_sync():
                losses, num_rows = self._losses(of_tasks)
                step.add(losses.detach().double().sum(), num_rows)
                timer.end("forward")
                if is_last and not is_alone:
                    yield step
                loss = losses.sum() * (self._context.world_size / step.divisor)
                place = f"epoch {self.learner.progress.epoch + 1} step {number}"
                with self._context.guard(f"averaging the gradients of {place}"):
                    (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
                timer.end("backward")
            if is_last:
                break
        if is_alone:
            yield step

    def _averaging_seconds(self) -> float:
        return 0.0 if self._detector is None else self._detector.averaging_seconds

    def _reseed(self) -> None:
        """Seed torch's generators, which dropout draws from, by the step number and the rank."""
        progress, device = self.learner.progress, self._context.device
        seed = keys.mix(keys.batch_key(self._training.seed, progress.epoch, progress.steps), self._context.rank)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 150 us, for devices that are not there
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)

    def _losses(self, batches: Sequence[Batch]) -> tuple[Tensor, int]:
        """Return the losses of a batch of each task, and how many of them are the first task's.

        Those of side tasks are scaled so that all, divided by the first task's rows, are the weighted sum of means.
        """
        tasks = self.learner.task, *(side.task for side in self.learner.also.values())
        first, *others = [self._losses_of(task, batch) for task, batch in zip(tasks, batches, strict=True)]
        if not others:
            return first, first.numel()
        num_rows, *counts = self._context.sum(torch.tensor([first.numel(), *(own.numel() for own in others)])).tolist()
        of_sides = zip(self.learner.also.values(), others, counts, strict=True)
        scaled = [own * (side.weight * num_rows / count) for side, own, count in of_sides]
        return torch.cat([first, *scaled]), first.numel()

    def _losses_of(self, task: Task, batch: Batch, **options: Any) -> Tensor:
        """Return the loss of every row of a batch. `options` are those of torch.autocast."""
        device = self._context.device
        batch = batch if device.type == "cpu" else batch.to(device, non_blocking=True)
        with mixed(self._training.precision, device, **options):
            if isinstance(task, LinkPrediction):
                return task.batch_losses(self._model, batch)
            return task.losses(task.outputs(self._model, batch), task.targets(batch))

    def _agree(self, known: BegunStep | None, rows: int = 0, *, asked: bool = False, due: bool = False) -> list[float]:
        """Return, summed over all ranks: the losses of the step `known`, `rows`, `asked` and `due`.

        All ranks raise if the loss of one of them is not finite.
        """
        loss_sum = 0.0
        if known is not None:
            with self.in_time(known.number):
                timeout = self._context.timeout
                loss_sum = sum(float(value.wait(timeout, "computed the loss")) for value in known.loss_sums)
        finite = math.isfinite(loss_sum)
        mine = [loss_sum if finite else 0.0, rows, asked, due, not finite]
        *totals, num_broken = self._context.sum(torch.tensor(mine, dtype=torch.float64)).tolist()
        if num_broken:
            assert known is not None
            sums = [float(each) for each in self._context.gather(torch.tensor([loss_sum], dtype=torch.float64))]
            rank = next(rank for rank, each in enumerate(sums) if not math.isfinite(each))
            raise TrainError(
                f"the loss is {sums[rank]} at epoch {self.learner.progress.epoch + 1} step {known.number} on rank "
                f"{rank}; lower the learning rate ({self.learner.learning_rate:g}), clip gradients (clip_norm=1.0), or "
                f"look at that batch; {self._last_good()}"
            )
        return totals

    def _complete(self, step: BegunStep, loss_sum: float) -> StepReport:
        """Add a step's sum of losses over all ranks to those of the epoch; return the step's report."""
        assert step.report is not None
        self.learner.progress.loss_sum += loss_sum
        self.learner.progress.rows += int(step.rows_of_all)
        return replace(step.report, loss=loss_sum / step.rows_of_all)

    @contextmanager
    def in_time(self, step: int) -> Iterator[None]:
        """Turn a TimeoutError of the device in this block into a TrainError that names the step."""
        try:
            yield
        except TimeoutError as error:
            seconds, is_alone = self._context.timeout, self._context.world_size == 1
            place = f"epoch {self.learner.progress.epoch + 1} step {step}"
            others = "" if is_alone else "look at what the other ranks say, it may wait for one of them; "
            raise TrainError(
                f"{place}: the device has not {error} within {seconds:g} s; "
                f"{others}{BUSY}, or give hoploom.init a timeout above {seconds:g} seconds; {self._last_good()}"
            ) from error

    @contextmanager
    def _failing_late(self) -> Iterator[None]:
        """Turn the TimeoutError of a wait within the model, which names the wait, into a TrainError with the step."""
        try:
            yield
        except TimeoutError as error:
            place = f"epoch {self.learner.progress.epoch + 1} step {self.learner.progress.steps + 1}"
            raise TrainError(f"{place}: {error}; {self._last_good()}") from error

    def _last_good(self) -> str:
        return last_good(None if self._checkpoint is None else self._checkpoint.path("last"))

    def _update(self, weight: float) -> bool:
        """Scale the gradients to the mean over all rows, clip and apply them; return False if they overflowed."""
        optimizer, clip_norm = self.learner.optimizer, self._training.clip_norm
        if weight != 1.0:
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], weight)
        if clip_norm is not None:
            if self._scaler is not None:
                self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self._parameters, clip_norm)
        try:
            for embedding in self._learned:
                embedding.step(weight)
        except TrainError as error:
            raise TrainError(f"{error}; {self._last_good()}") from error
        if self._scaler is None:
            optimizer.step()
            return True
        with self.in_time(self.learner.progress.steps + 1):  # the scaler's own reads of the device have no deadline
            HostCopy(torch.empty(0, device=self._context.device)).wait(self._context.timeout, "computed the gradients")
        scale = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        return self._scaler.get_scale() >= scale  # it falls if the gradients overflowed

    def close(self) -> None:
        """End the loops over the loaders."""
        for batches in self._batches:
            batches.close()


def _endless(loader: Loader) -> Generator[Batch, None, None]:
    """Yield the batches of a loader from its position on, epoch after epoch."""
    loader.load_state_dict(loader.state_dict())  # the loop before may have been left within an epoch
    while True:
        yield from loader


MakeStepper: TypeAlias = Callable[[Learner, Training, Context, Checkpoint | None], Stepper]


def check_closure(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer whose step requires a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} asks for a step's loss several times, a step has it once; take AdamW, Adam or "
            "SGD, or train in a loop of your own"
        )
