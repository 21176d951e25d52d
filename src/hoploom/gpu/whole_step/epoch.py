"""Whole steps: sampling, gathering and learning are recorded once and replayed, two batches of fixed size in turn.

A step costs the host a few calls, and equals the one at its own size: the same picks, the loss up to rounding. The
price: memory and work for what batches leave unused, and losses that are known two steps later.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace

import torch
from torch import Tensor

from hoploom.errors import ConfigError, TrainError
from hoploom.gpu.batches.capacity import plan_hops
from hoploom.gpu.batches.device_hops import make_maps
from hoploom.gpu.whole_step.cuda_graph import Lane
from hoploom.gpu.whole_step.fixed_batch import FixedBatch, FixedBatchSpec, degrees_of, targets_of
from hoploom.gpu.whole_step.fixed_sizes import PROBED, ROUNDED, measure, probe
from hoploom.gpu.whole_step.recordable import Rates, check_learner, refused
from hoploom.load.loader import EpochSteps
from hoploom.load.maker import NodeMaker
from hoploom.nn import GNN
from hoploom.ranks.context import Context, unwrap
from hoploom.ranks.stopping import StopRequests
from hoploom.train.checkpoint import Checkpoint
from hoploom.train.learner import Learner, Training, mixed
from hoploom.train.step import StepCounts, Stepper, StepReport, StepResult
from hoploom.train.tasks import NodeTask

SLOTS = 2  # one is filled while the other is learned from


class WholeStep:
    """The whole step of a learner, for a store that is placed: give it to `fit` as `stepper=WholeStep`.

    Make it after you have restored the learner: a recording keeps the parameters and the optimizer's state at their
    place in memory.

    >>> with WholeStep(learner, Training(epochs=1), context) as whole:
    ...     losses = [report.loss for report in whole.epoch()]
    >>> print(whole.counts)
    """

    def __init__(
        self,
        learner: Learner,
        training: Training,
        context: Context,
        checkpoint: Checkpoint | None = None,
        *,
        probed: int = PROBED,
        rounded: int = ROUNDED,
    ) -> None:
        maker = check_learner(learner, training, context.device)
        self.learner, self.counts = learner, StepCounts()
        self._training, self._is_cuda = training, context.device.type == "cuda"
        self.stepper = Stepper(learner, training, context, checkpoint)
        self._main = Lane(context.device, beside=False)
        self.spec = _spec_of(learner, maker, context, training.margin, probed, rounded)
        self._rates = Rates(learner.optimizer)
        self._slots = deque(self._slot() for _ in range(SLOTS))

    def _slot(self) -> FixedBatch:
        slot = FixedBatch(self.spec, self._learn, self._main)
        self._main.set(slot.learned)  # it is filled on another lane, not before it is made
        return slot

    def close(self) -> None:
        """Wait for the device, and free the batches and recordings."""
        with ExitStack() as last_first:
            last_first.callback(self._slots.clear)
            last_first.callback(self._main.close)
            last_first.callback(self.spec.lane.close)

    def __enter__(self) -> "WholeStep":
        return self

    def __exit__(self, *error: object) -> None:
        with nullcontext() if error[0] is None else suppress(TrainError):  # the first error is the one to tell
            self.close()

    def epoch(self) -> Iterator[StepReport]:
        """Run the steps that are left in the epoch of the loader. A step is reported two steps later, with its loss."""
        requests = StopRequests()
        with self.steps() as steps:
            while not steps.is_empty:
                yield from steps.take(requests).reports
            yield from steps.rest()

    def steps(self) -> "WholeSteps":
        """The steps that are left in the epoch of the loader."""
        return WholeSteps(self, self.learner.loader.begin_epoch())

    def fill_next(self, indices: Tensor, key: int) -> FixedBatch | None:
        """Start to make a batch in the slot that waits longest; None if it has another number of seeds."""
        if indices.numel() != self.spec.batch_size:
            return None
        if not self._slots:
            raise ConfigError("this WholeStep is closed; make another one")
        slot = self._slots[0]
        self._slots.rotate(-1)
        slot.fill(indices, key)
        return slot

    def learn(self, slot: FixedBatch) -> None:
        """Start to learn from a batch that fits."""
        if self._is_cuda:
            self._rates.check()
        self._rates.send()
        self.stepper.reseed()
        self.counts.replayed += slot.learn.is_warm
        self.counts.first += not slot.learn.is_warm
        self._main.wait(slot.filled)
        slot.learn()
        self._main.set(slot.learned)

    def _learn(self, slot: FixedBatch) -> None:
        """All that is recorded of a step. Gradients are left in place: the next recording or step begins without."""
        learner, task = self.learner, self.learner.task
        learner.optimizer.zero_grad(set_to_none=True)
        # casts are not kept: those of a recording would be taken for values
        with mixed(self._training.precision, self.spec.device, cache_enabled=False):
            losses = task.losses(task.outputs(learner.model, slot.batch()), slot.targets)
        (losses.sum() * (1 / losses.numel())).backward()  # type: ignore[no-untyped-call]
        if self._training.clip_norm is not None:
            parameters = [parameter for parameter in learner.model.parameters() if parameter.requires_grad]
            torch.nn.utils.clip_grad_norm_(parameters, self._training.clip_norm)
        with self._rates.on_the_device():
            learner.optimizer.step()
        slot.send_loss(losses.detach().double().sum())


def _spec_of(
    learner: Learner, maker: NodeMaker, context: Context, margin: float, probed: int, rounded: int
) -> FixedBatchSpec:
    """What all batches of a learner have in common."""
    device, model = context.device, unwrap(learner.model)
    assert isinstance(model, GNN)
    assert isinstance(learner.task, NodeTask)
    schema, store, batch_size = maker.assembler.store.schema, maker.assembler.store, learner.loader.batch_size
    assert store.placed is not None
    seed_type = schema.type_index[maker.seeds.node_type]
    plan = plan_hops(schema, maker.sampler.sampling, [seed_type], with_indptr=True)
    batches = probe(maker, learner.loader.rehearsal(), batch_size, probed)
    if not batches:
        raise refused(f"need a step of batch_size={batch_size} seeds, and no step of an epoch has so many; give fewer")
    num_seeds = [batch_size if index == seed_type else 0 for index in range(len(schema.node_types))]
    return FixedBatchSpec(
        plan,
        measure(plan, batches, num_seeds, margin, rounded),
        store.placed,
        make_maps(plan, device),
        model,
        maker,
        batch_size,
        targets_of(maker, learner.task).to(device),
        degrees_of(maker, device),
        Lane(device, beside=True),
        context.timeout,
    )


# --- an epoch ------------------------------------------------------------------------------------


class WholeSteps:
    """An epoch's steps. The batch after the one that is learned from is made beside it."""

    def __init__(self, whole: WholeStep, epoch: EpochSteps) -> None:
        self._whole, self._epoch = whole, epoch
        self._left = deque(epoch.order.steps)
        self._begun: tuple[int, FixedBatch | None] | None = None
        self._open: deque[tuple[StepReport, FixedBatch | None]] = deque()  # with the slot that has the loss, if any

    @property
    def is_empty(self) -> bool:
        return self._begun is None and not self._left

    def take(self, requests: StopRequests, *, is_due: bool = False) -> StepResult:
        """Take the next step; the reports are of steps before it."""
        began = time.perf_counter()
        step, slot = self._begun or self._begin()
        with self._in_time():
            fits = slot is not None and slot.fits()
        waited = time.perf_counter() - began
        known = self._known(slot)
        if slot is not None and fits:
            report = self._learn(slot, waited)
        else:
            report = self._own_size(step, requests, overflowed=slot is not None)
        self._begun = None
        self._epoch.done(step)
        if self._left:
            self._begun = self._begin()
        report = replace(report, seconds=time.perf_counter() - began)
        self._open.append((report, slot if fits else None))
        return StepResult(known, requests.stop_requested, is_due)

    def rest(self) -> list[StepReport]:
        """Wait for all losses."""
        return [self._close(*self._open.popleft()) for _ in range(len(self._open))]

    def _begin(self) -> tuple[int, FixedBatch | None]:
        step = self._left.popleft()
        indices, _, key = self._epoch.order.step(step)
        with self._in_time():
            return step, self._whole.fill_next(indices, key)

    def _in_time(self) -> AbstractContextManager[None]:
        return self._whole.stepper.in_time(self._whole.learner.progress.steps + 1)

    def _known(self, slot: FixedBatch | None) -> list[StepReport]:
        """The reports up to the one whose loss lies in this slot, before it is written over."""
        known: list[StepReport] = []
        while slot is not None and any(other is slot for _, other in self._open):
            known.append(self._close(*self._open.popleft()))
        return known

    def _close(self, report: StepReport, slot: FixedBatch | None) -> StepReport:
        if slot is None:
            return report
        stepper = self._whole.stepper
        with stepper.in_time(report.step):
            loss_sum = slot.read_loss()
        if not math.isfinite(loss_sum):
            stepper.refuse(loss_sum, report.step)
        stepper.count(loss_sum, report.rows)
        return replace(report, loss=loss_sum / report.rows)

    def _learn(self, slot: FixedBatch, waited: float) -> StepReport:
        whole, progress = self._whole, self._whole.learner.progress
        learning_rate, rows = whole.learner.learning_rate, whole.spec.batch_size
        whole.learn(slot)
        whole.stepper.schedule()
        progress.steps += 1
        return StepReport(progress.epoch, progress.steps, math.nan, rows, rows, learning_rate, 0.0, waited)

    def _own_size(self, step: int, requests: StopRequests, *, overflowed: bool) -> StepReport:
        whole = self._whole
        whole.counts.overflowed += overflowed
        whole.counts.shorter += not overflowed
        num_seeds = whole.learner.loader.num_seeds(step)
        batches = ((self._epoch.make(one), num_seeds, True) for one in (step,))
        return whole.stepper.take(batches, num_seeds, requests).reports[0]

    def __enter__(self) -> "WholeSteps":
        return self

    def __exit__(self, *error: object) -> None:
        self._left.clear()
