"""One optimizer step over all ranks: batches in, one update out, and what everyone must know about it.

Ranks and batches weigh by their rows, so that a step is the step that one process would take with all of them.
Costs one small all-reduce on the CPU per step, before the backward pass that would wait for a failed rank.
"""

import inspect
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from hoploom import keys
from hoploom.errors import BatchError, ConfigError, TrainError
from hoploom.load.assemble import Batch
from hoploom.load.loader import Loader
from hoploom.ops.deadline import BUSY, reached
from hoploom.ranks.context import Context
from hoploom.ranks.stopping import StopRequests
from hoploom.ranks.whereabouts import whereabouts
from hoploom.train.calling import called
from hoploom.train.checkpoint import Checkpoint, last_good
from hoploom.train.learner import Learner, Training, mixed


@dataclass(frozen=True)
class StepReport:
    """The numbers of one step."""

    epoch: int
    step: int  # counted from the start of training, 1 for the first
    loss: float  # mean over the rows of all ranks
    seeds: int  # over all ranks
    rows: int  # of this rank
    learning_rate: float
    seconds: float
    wait_seconds: float  # of them, for batches
    asked: bool  # some rank was asked to stop
    is_due: bool = False  # rank 0 says that it is time for a checkpoint
    parts: Mapping[str, float] = field(default_factory=dict)  # other seconds by what they went to, where that is known


class StepTimer:
    """Seconds by what they went to. Where a device works beside the host, the host's clock tells only of waiting."""

    def __init__(self) -> None:
        self.began = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def parts(self, averaging: float) -> dict[str, float]:
        """Without the wait for batches; so much of the backward pass was a wait for the others' gradients."""
        parts = {name: spent for name, spent in self.seconds.items() if name not in ("wait", "rest")}
        if averaging > 0:
            parts["all-reduce"] = averaging
            parts["backward"] -= averaging
        return parts


class StepResult(NamedTuple):
    """The result of taking a step."""

    reports: list[StepReport]  # of steps whose losses are known by now, in order
    asked: bool  # some rank was asked to stop
    is_due: bool = False  # rank 0 says that it is time for a checkpoint


@dataclass
class StepCounts:
    """How the steps of a run were taken."""

    replayed: int = 0
    first: int = 0  # with batches of fixed size, before anything was recorded
    overflowed: int = 0  # batches that did not fit, each taken at its own size
    shorter: int = 0  # batches of fewer or more seeds, at an epoch's end, likewise

    @property
    def overflow(self) -> str:
        """How many of all steps overflowed, in words; nothing where none has."""
        num_steps = self.replayed + self.first + self.overflowed + self.shorter
        return f"{self.overflowed:,} of {num_steps:,} steps overflowed" if self.overflowed else ""

    @property
    def overflow_often(self) -> bool:
        """Whether more than a tenth of them did."""
        return 9 * self.overflowed > self.replayed + self.first + self.shorter

    def __str__(self) -> str:
        return (
            f"{self.replayed:,} steps replayed, {self.first} before that, {self.overflowed:,} overflowed, "
            f"{self.shorter:,} of another number of seeds"
        )


class Steps(Protocol):
    """The steps left in an epoch of the loader."""

    @property
    def is_empty(self) -> bool:
        """Whether all of them are taken."""
        ...

    def take(self, requests: StopRequests, *, is_due: bool = False) -> StepResult:
        """Take the next one."""
        ...

    def rest(self) -> list[StepReport]:
        """Wait for all losses, and return the reports that `take` has not returned."""
        ...


class AnyStepper(Protocol):
    """The steps of a run: `Stepper`, or one that takes them in another way, such as `hoploom.WholeStep`."""

    @property
    def counts(self) -> StepCounts | None:
        """How steps were taken, if there are several ways."""
        ...

    def steps(self) -> AbstractContextManager[Steps]:
        """Return the steps left in the epoch of the loader."""
        ...


MakeStepper: TypeAlias = Callable[[Learner, Training, Context, Checkpoint | None], AbstractContextManager[AnyStepper]]
Batches = Iterator[tuple[Batch, int, bool]]  # of a step: each with its seeds over all ranks, and whether it is the last


class HostNumber:
    """A number on its way to the host. Waits for what made it, not for what was enqueued since."""

    def __init__(self, number: Tensor) -> None:
        self._host = number
        self.arrived: Any = None
        if number.is_cuda:
            self._host = torch.empty(number.shape, dtype=number.dtype, pin_memory=True)
            self._host.copy_(number, non_blocking=True)
            self.arrived = torch.cuda.current_stream(number.device).record_event()

    def wait(self, seconds: float) -> float:
        """The number."""
        if self.arrived is not None and not reached(self.arrived, seconds):
            raise TimeoutError("computed the loss")
        return float(self._host)


class Stepper:
    """Takes steps with batches of their own size, on any device and for any learner."""

    counts: StepCounts | None = None  # none is replayed

    def __init__(self, learner: Learner, training: Training, context: Context, checkpoint: Checkpoint | None) -> None:
        self._learner, self._training, self._context = learner, training, context
        self._checkpoint, self._model = checkpoint, called(learner.model, learner.loader)
        self._parameters = [parameter for parameter in learner.model.parameters() if parameter.requires_grad]
        self._scaler = learner.scaler if training.precision == "fp16" else None
        self._whereabouts = whereabouts()

    def steps(self) -> "EagerSteps":
        """What is left of the loader's epoch."""
        return EagerSteps(self, self._learner.loader, self._training.accumulate)

    def take(self, batches: Batches, expected: int, requests: StopRequests, *, is_due: bool = False) -> StepReport:
        """The next step, of about as many seeds as expected. Where this rank was asked to stop, all learn it, and
        where rank 0 says that a checkpoint is due."""
        is_due = is_due and self._context.is_main
        timer, standing, averaging_before = StepTimer(), self._learner.standing, self._averaging_seconds()
        is_alone = self._context.world_size == 1  # a backward pass waits for nobody, and the loss is read beside it
        loss_sums, rows, seeds, last = [], 0, 0, False
        self.reseed()
        self._learner.optimizer.zero_grad(set_to_none=True)
        while not last:
            timer.end("rest")
            batch, num_seeds, last = next(batches)
            timer.end("wait")
            seeds += num_seeds
            with self._gradients(reduced=last):
                losses = self._losses(batch)
                loss_sums.append(HostNumber(losses.detach().double().sum()))
                rows += losses.numel()
                timer.end("forward")
                if last and not is_alone:
                    totals = self._agree(loss_sums, rows, asked=requests.asked, is_due=is_due)
                    timer.end("ranks")
                self._backward(losses.sum() * (self._context.world_size / expected))
                timer.end("backward")
        if is_alone:
            totals = self._agree(loss_sums, rows, asked=requests.asked, is_due=is_due)
        loss_sum_everywhere, rows_everywhere, num_asked, num_due = totals
        learning_rate = self._learner.learning_rate
        timer.end("rest")
        if self._update(expected / rows_everywhere):
            self.schedule()
        timer.end("optimizer")
        standing.steps += 1
        self.count(loss_sum_everywhere, int(rows_everywhere))
        return StepReport(
            standing.epoch,
            standing.steps,
            loss_sum_everywhere / rows_everywhere,
            seeds,
            rows,
            learning_rate,
            time.perf_counter() - timer.began,
            timer.seconds["wait"],
            num_asked > 0,
            num_due > 0,
            timer.parts(self._averaging_seconds() - averaging_before) if self._context.device.type == "cpu" else {},
        )

    def _averaging_seconds(self) -> float:
        return 0.0 if self._whereabouts is None else self._whereabouts.averaging_seconds

    def reseed(self) -> None:
        """What the next step draws, dropout say, follows from its number."""
        standing = self._learner.standing
        key = keys.batch_key(self._training.seed, standing.epoch, standing.steps)
        torch.manual_seed(keys.mix(key, self._context.rank))

    def on_device(self, batch: Batch) -> Batch:
        """A loader's batch where the model is."""
        device = self._context.device
        return batch if device.type == "cpu" else batch.to(device, non_blocking=True)

    def _gradients(self, *, reduced: bool) -> AbstractContextManager[Any]:
        """Within: whether DDP reduces the gradients of a backward pass."""
        model = self._learner.model
        no_sync = getattr(model, "no_sync", None)
        return nullcontext() if reduced or no_sync is None else cast(AbstractContextManager[Any], no_sync())

    def _losses(self, batch: Batch) -> Tensor:
        task, targets = self._learner.task, self._learner.task.targets(batch)
        with mixed(self._training.precision, self._context.device):
            return task.losses(task.outputs(self._model, batch), targets)

    def _agree(self, loss_sums: Sequence[HostNumber], rows: int, *, asked: bool, is_due: bool) -> list[float]:
        """Loss sum, rows, how many were asked to stop and say that a checkpoint is due, over all ranks; all raise if
        some loss is not finite."""
        with self.in_time(self._learner.standing.steps + 1):
            loss_sum = sum(value.wait(self._context.timeout) for value in loss_sums)
        finite = math.isfinite(loss_sum)
        mine = torch.tensor([loss_sum if finite else 0.0, rows, asked, is_due, not finite], dtype=torch.float64)
        *totals, num_broken = self._context.sum(mine).tolist()
        if num_broken:
            sums = [float(each) for each in self._context.gather(torch.tensor([loss_sum], dtype=torch.float64))]
            rank = next(rank for rank, each in enumerate(sums) if not math.isfinite(each))
            self.refuse(sums[rank], self._learner.standing.steps + 1, rank)
        return totals

    @contextmanager
    def in_time(self, step: int) -> Iterator[None]:
        """Within, a TimeoutError of the device, which says what it has not done, becomes one that names the step."""
        try:
            yield
        except TimeoutError as error:
            seconds, is_alone = self._context.timeout, self._context.world_size == 1
            place = f"epoch {self._learner.standing.epoch + 1} step {step}"
            others = "" if is_alone else "look at what the other ranks say, it may wait for one of them; "
            raise TrainError(
                f"{place}: the device has not {error} within {seconds:g} s; "
                f"{others}{BUSY}, or give hoploom.init a timeout above {seconds:g} seconds; {self._last_good()}"
            ) from error

    def refuse(self, loss_sum: float, step: int, rank: int = 0) -> NoReturn:
        """Raise for a loss that is not finite."""
        raise TrainError(
            f"the loss is {loss_sum} at epoch {self._learner.standing.epoch + 1} step {step} on rank {rank}; "
            f"lower the learning rate ({self._learner.learning_rate:g}), clip gradients (clip_norm=1.0), or look at "
            f"that batch; {self._last_good()}"
        )

    def _last_good(self) -> str:
        return last_good(None if self._checkpoint is None else self._checkpoint.path("last"))

    def _backward(self, loss: Tensor) -> None:
        standing = self._learner.standing
        with self._context.guard(f"averaging the gradients of epoch {standing.epoch + 1} step {standing.steps + 1}"):
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def _update(self, weight: float) -> bool:
        """Bring the gradients to the mean over all rows, clip them; whether they changed the parameters."""
        optimizer, clip_norm = self._learner.optimizer, self._training.clip_norm
        if weight != 1.0:
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], weight)
        if clip_norm is not None:
            if self._scaler is not None:
                self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self._parameters, clip_norm)
        if self._scaler is None:
            optimizer.step()
            return True
        scale = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        return self._scaler.get_scale() >= scale  # it falls where the gradients overflowed

    def schedule(self) -> None:
        """The learning rate of the next step."""
        learner = self._learner
        if learner.scheduler is not None and learner.plateau is None:
            learner.scheduler.step()

    def count(self, loss_sum: float, rows: int) -> None:
        """Add a step's losses to the epoch's."""
        standing = self._learner.standing
        standing.loss_sum += loss_sum
        standing.rows += rows


class EagerSteps:
    """What is left of the loader's epoch, each step with batches of its own size."""

    def __init__(self, stepper: Stepper, loader: Loader, accumulate: int) -> None:
        self._stepper, self._loader, self._accumulate = stepper, loader, accumulate
        self._batches = cast(Generator[Batch, None, None], iter(loader))
        self._epoch, self._step = loader.epoch, int(loader.state_dict()["step"])

    @property
    def is_empty(self) -> bool:
        """Whether all of them are taken."""
        return self._loader.epoch != self._epoch

    def take(self, requests: StopRequests, *, is_due: bool = False) -> StepResult:
        """Take the next one."""
        expected = self._loader.num_seeds(self._step) * self._accumulate  # the same number on all ranks
        report = self._stepper.take(self._group(), expected, requests, is_due=is_due)
        return StepResult([report], report.asked, report.is_due)

    def _group(self) -> Batches:
        """The batches of the next step."""
        for count in range(1, self._accumulate + 1):
            batch = self._stepper.on_device(next(self._batches))
            num_seeds = self._loader.num_seeds(self._step)
            self._step += 1
            yield batch, num_seeds, count == self._accumulate or self.is_empty

    def rest(self) -> list[StepReport]:
        """The reports that are still to come: none, every loss is known once its step is taken."""
        return []

    def __enter__(self) -> "EagerSteps":
        return self

    def __exit__(self, *error: object) -> None:
        with nullcontext() if error[0] is None else suppress(BatchError):  # the first error is the one to raise
            self._batches.close()


def check_closure(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer whose step cannot do without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} asks for a step's loss several times, a step has it once; take AdamW, Adam or "
            "SGD, or train in a loop of your own"
        )
