"""Whole training steps as CUDA graphs: recorded once, then replayed on two batches of fixed size in turn.

A step costs the host a few calls, and has the same picks and, up to rounding, the same loss as on an unpadded batch.
The price is memory and work for the padding of batches, and losses that are known two steps later. Filling a batch
(sampling, gathering) and learning from it are two recordings: the next batch is filled during learning. Neither waits
for the device; a batch's sizes arrive in pinned memory, and the host checks them before it starts to learn.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data, HeteroData

from hoploom.batch import Seeds
from hoploom.errors import ConfigError
from hoploom.gpu.batch_memory import Pool
from hoploom.gpu.capacity import FAULT, PROBED, ROUNDED, Capacity, fixed_capacity, plan_hops, used_capacity
from hoploom.gpu.cuda_graph import LearningRates, Recording, WorkEvent, WorkStream, check_optimizer, not_recordable
from hoploom.gpu.device_hops import make_buffers, make_maps, sample_on_device
from hoploom.gpu.loading import DeviceSampling
from hoploom.keys import as_int64
from hoploom.load.assemble import IN_DEGREE, Batch
from hoploom.load.loader import EpochSteps
from hoploom.load.maker import NodeMaker
from hoploom.nn import GNN, LayerView
from hoploom.nn.layers import one_per_layer
from hoploom.ops import InEdges
from hoploom.ranks.context import Context, unwrap
from hoploom.schema import FEATURES, RelationName
from hoploom.store import Wanted
from hoploom.system import Closing, StopRequests
from hoploom.train.checkpoint import Checkpoint
from hoploom.train.step import Learner, StepCounts, Stepper, StepReport, StepResult, Training, mixed
from hoploom.train.tasks import NodeTask, SeveralTasks

SLOTS = 2  # one is filled while the other is learned from
STAGED = 2  # entries before the seeds: the key, and one that keeps the seeds' address a multiple of 16


class FixedBatch:
    """Device buffers of fixed size that hold one batch after another, and the recordings that fill and use them."""

    def __init__(self, whole: "WholeStep") -> None:
        self._whole, size, device = whole, whole.batch_size, whole.placed.device
        self.on = make_buffers(whole.plan, whole.capacity, device)
        for nodes in self.on.nodes:
            nodes.zero_()  # rows that no batch has reached are looked up too
        self._staged = torch.zeros(STAGED + 2 * size, dtype=torch.int64, device=device)
        self._sent = _pinned(self._staged)
        self._sizes = _pinned(self.on.totals)
        self.targets = whole.targets.new_empty((size, *whole.targets.shape[1:]))
        # Zeros at first, rows of earlier batches later, so always finite. They must be: a row beyond the batch has no
        # effect and its gradient is zero, but that is multiplied by the row.
        self.rows = {
            index: whole.placed.empty(node_type.name, FEATURES, self.on.nodes[index].numel()).zero_()
            for index, node_type in enumerate(whole.plan.schema.node_types)
            if FEATURES in node_type.fields and node_type.name in whole.model.types[0]
        }
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self._loss = _pinned(self.loss)
        self.filled, self.learned = WorkEvent(device), WorkEvent(device)
        self._fill = Recording(self._make, whole.fill_stream)
        self.learn = Recording(partial(whole.learn_from, self), whole.learn_stream)
        whole.learn_stream.record(self.learned)  # the other stream must not fill the batch before it is made

    # --- filling ------------------------------------------------------------------------------

    def fill(self, indices: Tensor, key: int) -> None:
        """Start to make the batch of the seeds at `indices`, once the batch in these buffers is no longer needed."""
        self._whole.placed.lease.check()  # a replay would read memory that is gone
        self._whole.wait_for(self.filled, "sampled")  # after this, the input of the batch before may be overwritten
        stream, size = self._whole.fill_stream, self._whole.batch_size
        self._sent[0] = as_int64(key)
        self._sent[STAGED : STAGED + size] = self._whole.maker.nodes[indices]
        self._sent[STAGED + size :] = indices
        stream.wait_for(self.learned)
        self._fill()
        stream.record(self.filled)

    def fits(self) -> bool:
        """Wait for the batch's sizes; return whether the batch is free of faults and fits the buffers."""
        self._whole.wait_for(self.filled, "sampled")
        sizes: list[int] = self._sizes[:, 0].tolist()
        return sizes[FAULT] == 0 and self._whole.capacity.holds(used_capacity(self._whole.plan, sizes))

    def _make(self) -> None:
        whole, on, size = self._whole, self.on, self._whole.batch_size
        self._staged.copy_(self._sent, non_blocking=True)
        seeds: list[Tensor | None] = [None] * len(on.nodes)
        seeds[whole.seed_type] = self._staged[STAGED : STAGED + size]
        no_trees = (None,) * len(on.nodes)
        assert whole.placed.lists is not None
        sample_on_device(whole.plan, whole.placed.lists, whole.maps, Seeds(tuple(seeds), no_trees), self._staged[0], on)
        torch.index_select(whole.targets, 0, self._staged[STAGED + size :], out=self.targets)
        names = whole.plan.schema.node_types
        whole.placed.gather(
            [Wanted(names[index].name, FEATURES, on.nodes[index]) for index in self.rows],
            [on.total(whole.plan.nodes[index][-1]) for index in self.rows],
            outs=list(self.rows.values()),
            faults=on.totals[FAULT, :1],
        )
        self._sizes.copy_(on.totals, non_blocking=True)

    # --- learning -----------------------------------------------------------------------------

    def batch(self) -> Batch:
        """Return the batch in the form that the models of hoploom.nn take."""
        whole, schema = self._whole, self._whole.plan.schema
        out: Batch = Data() if schema.homogeneous else HeteroData()
        out.views = self._views()
        for index, node_type in enumerate(schema.node_types):
            storage = out if schema.homogeneous else out[node_type.name]
            if index in self.rows:
                storage[FEATURES] = self.rows[index]
            storage["n_id"] = self.on.nodes[index]
            if index == whole.seed_type:
                storage["batch_size"] = whole.batch_size
        if whole.degrees is not None:
            out[IN_DEGREE] = whole.degrees.index_select(0, self.on.nodes[0])
        return out

    def _views(self) -> list[LayerView]:
        whole, plan, hops = self._whole, self._whole.plan, []
        for hop in range(plan.sampling.num_hops):
            edges = {}
            layer = self.on.layers[hop if plan.is_blocks else 0]
            for index, (relation, own) in enumerate(zip(plan.schema.relations, layer, strict=True)):
                assert own.indptr is not None
                total, most = self.on.total(plan.picks[index][hop][1]), whole.capacity.edges[index][hop]
                edges[relation.key] = PaddedEdges(own.edge_index[0], own.indptr, total, most)
            hops.append(edges)
        names = [node_type.name for node_type in plan.schema.node_types]
        most_nodes = dict(zip(names, whole.capacity.nodes, strict=True))
        num_layers = whole.model.num_layers
        return padded_views(one_per_layer(hops, num_layers), most_nodes, num_layers, are_blocks=plan.is_blocks)

    def send_loss(self, loss_sum: Tensor) -> None:
        """Start to copy the sum of the losses to the host."""
        self.loss.copy_(loss_sum)
        self._loss.copy_(self.loss, non_blocking=True)

    def read_loss(self) -> float:
        """Wait for the training step; return the sum of its losses."""
        self._whole.wait_for(self.learned, "learned")
        return float(self._loss)


def _pinned(like: Tensor) -> Tensor:
    """Return zeros in host memory with the shape and dtype of `like`, pinned if `like` is on a GPU."""
    return torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


# --- views of a padded batch ---------------------------------------------------------------------
# All sizes are Python numbers, so that the same kernels can be replayed for every batch. Rows beyond the batch's nodes
# have no edges: they are computed and affect nothing.


@dataclass(frozen=True)
class PaddedEdges:
    """The edges of one relation that were sampled up to some hop, in arrays of fixed size. Node ids are local."""

    sources: Tensor  # [at least most] int64; entries beyond the picks are ignored
    indptr: Tensor  # [most destinations + 1] int64: offset of each destination's picks; NO_PICKS if not expanded
    total: Tensor  # [] int64: the number of picks
    most: int  # limit of `total`

    def grouped(self, num_sources: int, num_destinations: int, whole: InEdges | None = None) -> InEdges:
        """Return the edges grouped by destination. Nodes not expanded yet get none. `whole`: the edges of all hops."""
        indptr = torch.minimum(self.indptr[: num_destinations + 1], self.total)
        return InEdges(indptr, self.sources[: self.most], num_sources, whole=whole)


def padded_views(
    hops: Sequence[Mapping[RelationName, PaddedEdges]],
    most_nodes: Mapping[str, Sequence[int]],
    num_layers: int,
    *,
    are_blocks: bool = False,
) -> list[LayerView]:
    """Return one view per layer, input layer first.

    hops[h] has the edges of hop h and, unless `are_blocks`, of the hops before. `most_nodes` has the largest number of
    nodes within 0, 1, ... hops.
    """
    wholes: dict[RelationName, InEdges] = {}
    if not are_blocks:
        last = {name: counts[-1] for name, counts in most_nodes.items()}
        wholes = {key: one.grouped(last[key[0]], last[key[2]]) for key, one in hops[-1].items()}
    views = []
    for follow in range(num_layers - 1, -1, -1):  # layers that follow: the distance in hops of a layer's destinations
        sources, destinations = (
            {name: counts[min(hop, len(counts) - 1)] for name, counts in most_nodes.items()}
            for hop in (follow + 1, follow)
        )
        edges = {
            key: one.grouped(sources[key[0]], destinations[key[2]], wholes.get(key))
            for key, one in hops[min(follow, len(hops) - 1)].items()
        }
        views.append(LayerView(edges, sources, destinations))
    return views


# --- the step ------------------------------------------------------------------------------------


def check_learner(learner: Learner, training: Training, device: torch.device) -> NodeMaker:
    """Return the object that makes the loader's batches; raise ConfigError if the step cannot be a CUDA graph."""
    loader, model, task = learner.loader, unwrap(learner.model), learner.task
    is_distributed = isinstance(learner.model, DistributedDataParallel) or loader.world_size > 1
    maker = getattr(loader, "maker", None)
    reasons = [
        (is_distributed, f"are for one process, this is one of {loader.world_size}"),
        (not isinstance(model, GNN), f"are for the models of hoploom.nn, the model is a {type(model).__name__}"),
        (
            not isinstance(task, NodeTask) or isinstance(task, SeveralTasks) or bool(learner.also),
            f"are for one task on nodes, the task is {type(task).__name__}",
        ),
        (bool(getattr(model, "edge_fields", ())), "read no fields of edges; make the model without edges and weights"),
        (
            isinstance(model, GNN) and model.shape.norm in ("batch", "graph"),
            "have no batch or graph norm; make the model with norm=True",
        ),
        (training.precision == "fp16", 'are not for "fp16": it asks the host at every step; take "bf16" or "fp32"'),
        (bool(loader.store.learned), f"do not update learned rows, here of {loader.store.learned_types}; use features"),
        (training.accumulate > 1, f"do not go with accumulate={training.accumulate}; take a larger batch_size"),
        (not isinstance(maker, NodeMaker), f"are for a NeighborLoader, this is a {type(loader).__name__}"),
    ]
    if isinstance(maker, NodeMaker):
        assembler, sampler = maker.assembler, maker.sampler
        placed = assembler.store.placed
        is_there = placed is not None and placed.lists is not None and placed.device == device
        fields = {} if placed is None else placed.fields
        types = assembler.store.schema.node_types
        missing = [t.name for t in types if FEATURES in t.fields and (t.name, FEATURES) not in fields]
        give = "hoploom.place(store, topology='auto', features='auto')"
        subgraph = sampler.sampling.subgraph
        reasons += [
            (not is_there, f"need a graph that lies on {device}; give the loader {give}"),
            (bool(missing), f"need features on {device}, and x of {missing} is not placed; give the loader {give}"),
            (sampler.sampling.disjoint, "do not go with disjoint or temporal sampling"),
            (subgraph != "directional", f"do not go with subgraph_type={subgraph!r}"),
            (sampler.sample_frontier is not None, "do not go with sample_frontier"),
            (maker.transform is not None, "do not go with transform"),
            (assembler.reduce is not None, "do not go with aggregate"),
            (assembler.fields is not None, "do not go with fields"),
        ]
    for is_so, why in reasons:
        if is_so:
            raise not_recordable(why)
    assert isinstance(maker, NodeMaker)
    check_optimizer(learner.optimizer, device, scheduled=learner.scheduler is not None)
    return maker


class WholeStep(Closing):
    """Training steps of a learner on a placed store, as CUDA graphs: give the class to `fit` as `stepper=WholeStep`.

    Create a WholeStep after you have restored the learner: a recording keeps the addresses of the parameters and of
    the optimizer's state.

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
        device = context.device
        maker = check_learner(learner, training, device)
        self.learner, self.counts = learner, StepCounts()
        self._training, self._timeout = training, context.timeout
        self.stepper = Stepper(learner, training, context, checkpoint)
        model, task, store = unwrap(learner.model), learner.task, maker.assembler.store
        assert isinstance(model, GNN)
        assert isinstance(task, NodeTask)
        assert store.placed is not None
        self.model, self.maker, self.placed = model, maker, store.placed
        self.batch_size = size = learner.loader.batch_size
        self.seed_type = store.schema.type_index[maker.node_type]
        self.plan = plan_hops(store.schema, maker.sampler.sampling, [self.seed_type], with_indptr=True)
        order = learner.loader.rehearsal()
        full = [step for step in order.steps if order.step(step).indices.numel() == size]
        if not full:
            raise not_recordable(
                f"need a step of batch_size={size} seeds, and no step of an epoch has so many; give fewer"
            )
        num_seeds = [size if index == self.seed_type else 0 for index in range(len(store.schema.node_types))]
        sampling = DeviceSampling(maker, store.placed, Pool(device, context.timeout))
        sizes = [sampling.capacity_of(order.step(step)) for step in full[:: max(1, len(full) // probed)][:probed]]
        seen = reduce(partial(Capacity.combine, function=max), sizes)
        self.capacity = fixed_capacity(self.plan, seen, num_seeds, training.margin, rounded)
        self.maps = make_maps(self.plan, device)  # for one batch at a time
        task.check(store, maker.nodes[:0], maker.node_type)
        labels = store.features.gather([Wanted(maker.node_type, task.label, maker.nodes)])[0]
        self.targets = task.read(labels, maker.nodes).to(device)  # or an error: the first seed without a label
        self.degrees: Tensor | None = None  # of every node
        if maker.assembler.degrees:
            (relation,) = store.schema.relations
            nodes = torch.arange(store.schema.node_type(relation.destination).num_nodes)
            self.degrees = store.in_degrees(relation.key, nodes).to(device)
        self.fill_stream, self.learn_stream = WorkStream(device, own_stream=True), WorkStream(device, own_stream=False)
        self._rates = LearningRates(learner.optimizer)
        self._slots = deque(FixedBatch(self) for _ in range(SLOTS))

    def close(self) -> None:
        """Wait for the device, and free the batches and recordings."""
        with ExitStack() as last_first:
            last_first.callback(self._slots.clear)
            last_first.callback(self.learn_stream.close)
            last_first.callback(self.fill_stream.close)

    def epoch(self) -> Iterator[StepReport]:
        """Run the steps left in the loader's epoch; yield the report of each step, with its loss, two steps later."""
        requests = StopRequests()
        with self.steps() as steps:
            while not steps.is_empty:
                yield from steps.take(requests).reports
            yield from steps.rest()

    def steps(self) -> "WholeSteps":
        """Return the steps that are left in the loader's epoch."""
        return WholeSteps(self, self.learner.loader.begin_epoch())

    def wait_for(self, event: WorkEvent, doing: str) -> None:
        """Wait until an event is reached; raise TimeoutError(doing) if the device does not reach it in time."""
        if not event.wait(self._timeout):
            raise TimeoutError(doing)

    def fill_next(self, indices: Tensor, key: int) -> FixedBatch | None:
        """Start to make the batch of these seeds, and return its buffers; None if there are too few seeds."""
        if indices.numel() != self.batch_size:
            return None
        if not self._slots:
            raise ConfigError("this WholeStep is closed; make another one")
        slot = self._slots[0]
        self._slots.rotate(-1)
        slot.fill(indices, key)
        return slot

    def learn(self, slot: FixedBatch) -> None:
        """Start the training step on the batch in the buffers `slot`, which it must fit; do not wait for the device."""
        if self.placed.device.type == "cuda":
            self._rates.check()
        self._rates.send()
        self.stepper.reseed()
        self.counts.replayed += slot.learn.is_warm
        self.counts.first += not slot.learn.is_warm
        self.learn_stream.wait_for(slot.filled)
        slot.learn()
        self.learn_stream.record(slot.learned)

    def learn_from(self, slot: FixedBatch) -> None:
        """Run forward, backward and optimizer on the batch in the buffers `slot`; `slot.learn` records this call."""
        learner, task = self.learner, self.learner.task
        learner.optimizer.zero_grad(set_to_none=True)
        # no cache of casts: a later step would use those of the recording as values
        with mixed(self._training.precision, self.placed.device, cache_enabled=False):
            losses = task.losses(task.outputs(learner.model, slot.batch()), slot.targets)
        (losses.sum() * (1 / losses.numel())).backward()  # type: ignore[no-untyped-call]
        if self._training.clip_norm is not None:
            parameters = [parameter for parameter in learner.model.parameters() if parameter.requires_grad]
            torch.nn.utils.clip_grad_norm_(parameters, self._training.clip_norm)
        with self._rates.as_tensors():
            learner.optimizer.step()
        slot.send_loss(losses.detach().double().sum())


class WholeSteps(Closing):
    """The steps left in an epoch. The next batch is filled while the model learns from the current one."""

    def __init__(self, whole: WholeStep, epoch: EpochSteps) -> None:
        self._whole, self._epoch = whole, epoch
        self._left = deque(epoch.order.steps)
        self._begun: tuple[int, FixedBatch | None] | None = None
        self._open: deque[tuple[StepReport, FixedBatch | None]] = deque()  # with the slot that has the loss, if any

    @property
    def is_empty(self) -> bool:
        return self._begun is None and not self._left

    def take(self, requests: StopRequests, *, is_due: bool = False) -> StepResult:
        """Run the next step; return the reports of those earlier steps whose losses are known by now."""
        began = time.perf_counter()
        step, slot = self._begun or self._begin()
        with self._in_time():
            fits = slot is not None and slot.fits()
        waited = time.perf_counter() - began
        known: list[StepReport] = []
        while slot is not None and any(other is slot for _, other in self._open):  # its loss would be overwritten
            known.append(self._complete(*self._open.popleft()))
        if slot is not None and fits:
            report = self._learn(slot, waited)
        else:
            report = self._take_unpadded(step, requests, overflowed=slot is not None)
        self._begun = None
        self._epoch.done(step)
        if self._left:
            self._begun = self._begin()
        report = replace(report, seconds=time.perf_counter() - began)
        self._open.append((report, slot if fits else None))
        return StepResult(known, requests.stop_requested, is_due)

    def rest(self) -> list[StepReport]:
        """Wait for all losses that are still missing; return the reports of these steps."""
        return [self._complete(*self._open.popleft()) for _ in range(len(self._open))]

    def _begin(self) -> tuple[int, FixedBatch | None]:
        step = self._left.popleft()
        indices, _, key, _ = self._epoch.order.step(step)
        with self._in_time():
            return step, self._whole.fill_next(indices, key)

    def _in_time(self) -> AbstractContextManager[None]:
        return self._whole.stepper.in_time(self._whole.learner.progress.steps + 1)

    def _complete(self, report: StepReport, slot: FixedBatch | None) -> StepReport:
        """Wait for a step's loss; add the loss to the epoch's sums and to the report. Raise if it is not finite."""
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
        learning_rate, rows = whole.learner.learning_rate, whole.batch_size
        whole.learn(slot)
        whole.stepper.schedule()
        progress.steps += 1
        return StepReport(progress.epoch, progress.steps, math.nan, rows, rows, learning_rate, 0.0, waited)

    def _take_unpadded(self, step: int, requests: StopRequests, *, overflowed: bool) -> StepReport:
        """Run the step without recordings, because its batch does not fit or has another number of seeds."""
        whole = self._whole
        whole.counts.overflowed += overflowed
        whole.counts.shorter += not overflowed
        num_seeds = whole.learner.loader.num_seeds(step)
        batches = (([self._epoch.make(one)], num_seeds, True) for one in (step,))
        return whole.stepper.take(batches, num_seeds, requests).reports[0]

    def close(self) -> None:
        self._left.clear()
