"""Whole training steps as CUDA graphs: recorded once, then replayed on two batches of fixed size in turn.

A step costs the host a few calls, and has the same picks and, up to rounding, the same loss as on an unpadded batch.
The price is memory and work for the padding of batches, and losses that are known two steps later. Filling a batch
(sampling, gathering), its gradients, and the update of the parameters are recordings: the next batch is filled during
learning. Neither waits for the device; a batch's sizes arrive in pinned memory, and the host checks them before it
starts to learn. Ranks add up their gradients between two recordings, so each may have a batch that does not fit.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch_geometric.nn import HeteroBatchNorm

from hoploom.batch import Sampled, Seeds
from hoploom.errors import ConfigError
from hoploom.gpu.batch_memory import BatchMemory, Pool, StagedValue
from hoploom.gpu.capacity import FAULT, PROBED, ROUNDED, Capacity, fixed_capacity, plan_hops, used_capacity
from hoploom.gpu.cuda_graph import LearningRates, Recording, WorkStream, check_optimizer, not_recordable
from hoploom.gpu.device_hops import DeviceBuffers, make_buffers, make_maps, sample_on_device
from hoploom.gpu.loading import DeviceLoading, DeviceSampling, device_assembler
from hoploom.keys import as_int64
from hoploom.load.assemble import Batch, received, spread_shared
from hoploom.load.maker import LocalMaker, NodeMaker
from hoploom.load.order import StepShare
from hoploom.nn import GNN, LayerView
from hoploom.ops import InEdges
from hoploom.ops.deadline import HostCopy, on_host
from hoploom.ranks.context import Context, OverRanks, unwrap
from hoploom.schema import EDGE_ID, RelationName
from hoploom.store.base import NO_IDS
from hoploom.train.batch_adapter import adapted, without_ddp
from hoploom.train.checkpoint import Checkpoint
from hoploom.train.loop import evaluating
from hoploom.train.step import BegunStep, Learner, StepCounts, Stepper, StepTimer, Training
from hoploom.train.tasks import NodeTask

SLOTS = 2  # one is filled while the other is learned from
NEVER = 1 << 62  # a position that no edge has; F.pad takes numbers as float64
STRANGE = 1e4  # a value in padding that would change losses; float16 holds it
TOLERANCE = 1e-3  # of losses, between a batch with padding and the batch without
MIXING = (_NormBase, OverRanks, HeteroBatchNorm)  # norms that mix the rows of a batch, but only in training


class FixedBatch(BatchMemory):
    """Device buffers of fixed size that hold one batch after another, and the recordings that fill and use them."""

    def __init__(self, whole: "WholeStep") -> None:
        super().__init__(whole.pool)
        self._whole, device = whole, whole.placed.device
        self.on = make_buffers(whole.plan, whole.capacity, device)
        # Ids beyond a batch are zeros at first, those of earlier batches later, so always valid: they are looked up
        # too. A row beyond the batch has no effect and its gradient is zero, but that is multiplied by the row.
        for ids in (*self.on.nodes, *(edges.edges for layer in self.on.layers for edges in layer)):
            ids.zero_()
        self._tensors: list[Tensor] = []
        self._staged: StagedValue | None = None  # the key and the seeds; its layout is that of all batches
        self._given = torch.empty(0, dtype=torch.uint8, device=device)  # a copy of them
        self.batch: Batch | None = None
        self._sizes: HostCopy | None = None  # None if there are too many seeds
        self.loss, self.rows = torch.zeros((), dtype=torch.float64, device=device), 0
        self.filled, self.learned = whole.fill_stream.event(), whole.learn_stream.event()
        self._fill = Recording(self._make, whole.fill_stream)
        self.learn = Recording(self._learn, whole.learn_stream)
        whole.learn_stream.record(self.learned)  # the other stream must not fill the batch before it is made

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the tensor that each batch has at this place: the first call for a place makes it."""
        self._number += 1
        if self._number > len(self._tensors):
            self._tensors.append(torch.zeros(tuple(shape), dtype=dtype, device=self.loss.device))
        return self._tensors[self._number - 1]

    # --- filling ------------------------------------------------------------------------------

    def fill(self, share: StepShare) -> None:
        """Start to make the batch of these seeds, once the batch in these buffers is no longer needed."""
        whole, stream = self._whole, self._whole.fill_stream
        whole.placed.lease.check()  # a replay would read memory that is gone
        seeds = whole.padded(whole.maker.start(share))
        staged = None if seeds is None else whole.pool.stage((torch.tensor(as_int64(share.key)), seeds))
        self._sizes = None
        if staged is None or (self._staged is not None and staged.begins != self._staged.begins):
            return
        stream.wait_for(self.learned)
        with stream.current():
            if self._staged is None:
                self._staged, self._given = staged, torch.empty_like(staged.block, device=whole.placed.device)
            self._given.copy_(staged.block, non_blocking=True)
        self._fill()
        with stream.current():
            self._sizes = HostCopy(self.on.totals)
        stream.record(self.filled)

    def fits(self, timeout: float) -> bool:
        """Wait for the batch's sizes; return whether the batch is free of faults and fits the buffers."""
        if self._sizes is None:
            return False
        sizes: list[int] = self._sizes.wait(timeout, "sampled")[:, 0].tolist()
        return sizes[FAULT] == 0 and self._whole.capacity.holds(used_capacity(self._whole.plan, sizes))

    def _make(self) -> None:
        whole = self._whole
        assert self._staged is not None
        assert whole.placed.lists is not None
        key, seeds = self._staged.over(self._given)
        sample_on_device(whole.placed.lists, whole.maps, seeds, key, self.on)
        self._number = 0
        sampled = self._sampled()
        sampled.fields = seeds.fields
        self.batch = replace(whole.assembler, memory=self).assemble(sampled)
        spread_shared(self.batch)
        if whole.views_edges:
            self.batch.views = padded_views(self.on)

    def _sampled(self) -> Sampled:
        """Return the nodes and edges in the buffers. Entries beyond the picks are loops at a spare node behind all.

        For a model of hoploom.nn, edges are left as they are: it reads those of the views.
        """
        if self._whole.views_edges:
            edges = [own.edge_index for own in self.on.layers[0]]
            return Sampled(list(self.on.nodes), None, edges, [None] * len(edges), None, None)
        plan, capacity, found = self._whole.plan, self._whole.capacity, []
        for index, own in enumerate(self.on.layers[0]):
            ends = plan.schema.sources[index], plan.schema.destinations[index]
            most, total = capacity.edges[index][-1], self.on.total(plan.picks[index][-1][1])
            is_pick = torch.arange(most, device=total.device) < total
            spare = (capacity.nodes[end][-1] for end in ends)
            rows = zip(own.edge_index[:, :most], spare, strict=True)
            found.append(torch.stack([torch.where(is_pick, row, node) for row, node in rows]))
        nodes = [F.pad(own, (0, 1)) for own in self.on.nodes]
        positions = [own.edges[: edges.shape[1]] for own, edges in zip(self.on.layers[0], found, strict=True)]
        return Sampled(nodes, None, found, list(positions), None, None)

    # --- learning -----------------------------------------------------------------------------

    def _learn(self) -> None:
        assert self.batch is not None
        loss_sum, self.rows = self._whole.learn_from(self.batch)
        self.loss.copy_(loss_sum)


def padded_views(on: DeviceBuffers) -> list[LayerView]:
    """Return a view of the edges in the buffers for each layer, the input layer first, which has those of the last hop.

    All sizes are Python numbers, so that the same kernels can be replayed for every batch. Rows beyond the batch's
    nodes have no edges: they are computed and affect nothing.
    """
    plan, names = on.plan, [node_type.name for node_type in on.plan.schema.node_types]
    within = [dict(zip(names, counts, strict=True)) for counts in zip(*on.capacity.nodes, strict=True)]
    wholes: dict[RelationName, InEdges] = {}  # edges of all hops

    def grouped(hop: int, sources: Mapping[str, int], destinations: Mapping[str, int]) -> dict[RelationName, InEdges]:
        """Return the edges that were sampled up to a hop, by destination. Nodes that are not expanded yet get none."""
        found = {}
        layer = zip(plan.schema.relations, on.layers[hop if plan.is_blocks else 0], plan.picks, strict=True)
        for index, (relation, edges, picks) in enumerate(layer):
            assert edges.indptr is not None
            key, most = relation.key, on.capacity.edges[index][hop]
            indptr = torch.minimum(edges.indptr[: destinations[key[2]] + 1], on.total(picks[hop][1]))
            found[key] = InEdges(indptr, edges.edge_index[0, :most], sources[key[0]], whole=wholes.get(key))
        return found

    if not plan.is_blocks:
        wholes = grouped(plan.sampling.num_hops - 1, within[-1], within[-1])
    return [
        LayerView(grouped(hop, within[hop + 1], within[hop]), within[hop + 1], within[hop])
        for hop in reversed(range(plan.sampling.num_hops))
    ]


# --- the step ------------------------------------------------------------------------------------


def check_learner(learner: Learner, training: Training, device: torch.device) -> LocalMaker:
    """Return the object that makes the loader's batches; raise ConfigError if the step cannot be a CUDA graph."""
    loader, model, task = learner.loader, unwrap(learner.model), learner.task
    maker = getattr(loader, "maker", None)
    across = getattr(task, "across_ranks", False) and loader.world_size > 1
    norms = [type(module).__name__ for module in model.modules() if isinstance(module, MIXING)]
    reasons = [
        (bool(getattr(model, "edge_fields", ())), "read no fields of edges; make the model without edges and weights"),
        (
            getattr(adapted(model), "takes_counts", False),
            "have no counts per hop, which the model's forward takes (num_sampled_nodes, num_sampled_edges); take a "
            "model that does without",
        ),
        (bool(norms), f"have no {norms[:1]}, which reads unused rows, too; take a norm of each row"),
        (bool(learner.also), f"have one task, and the learner also has {[*learner.also]}"),
        (across, "do not go with across_ranks, which asks the other ranks within a step; leave it out"),
        (training.precision == "fp16", 'are not for "fp16": it asks the host at every step; take "bf16" or "fp32"'),
        (bool(loader.store.learned), f"do not update learned rows, here of {loader.store.learned_types}; use features"),
        (training.accumulate > 1, f"do not go with accumulate={training.accumulate}; take a larger batch_size"),
        (not isinstance(maker, LocalMaker), f"are for the loaders of Hoploom, this is a {type(loader).__name__}"),
    ]
    if isinstance(maker, LocalMaker):
        assembler, sampling = maker.assembler, maker.sampler.sampling
        placed, schema = assembler.store.placed, assembler.store.schema
        is_there = placed is not None and placed.lists is not None and placed.device == device
        fields = {} if placed is None else placed.fields
        edges: list[Tensor | None] = [None if isinstance(model, GNN) else NO_IDS] * len(schema.relations)
        wanted = replace(assembler, reduce=None).wanted(
            Sampled([NO_IDS] * len(schema.node_types), None, [], edges, None, None)
        )
        missing = [f"{f} of {owner!r}" for owner, f, _ in wanted if f != EDGE_ID and (owner, f) not in fields]
        give = "hoploom.place(store, topology='auto', features='auto'), or in run.toml set [placement]"
        reasons += [
            (placed is not None and bool(placed.partial), "need all parts of the store on this host"),
            (not is_there, f"need a graph that lies on {device}; give the loader {give}"),
            (bool(missing), f"need features on {device}, and {missing[:1]} is not placed; give the loader {give}"),
            (sampling.disjoint, "do not go with disjoint or temporal sampling; leave these out"),
            (sampling.subgraph != "directional", f"do not go with subgraph_type={sampling.subgraph!r}"),
            (
                sampling.mode == "blocks" and not isinstance(model, GNN),
                "take blocks for the models of hoploom.nn only; give the loader mode='subgraph'",
            ),
            (maker.sampler.sample_frontier is not None, "do not go with sample_frontier; leave it out"),
            (maker.transform is not None, "do not go with transform; leave it out"),
            (assembler.reduce is not None, "do not go with aggregate; leave it out"),
        ]
    for is_so, why in reasons:
        if is_so:
            raise not_recordable(why)
    assert isinstance(maker, LocalMaker)
    check_optimizer(learner.optimizer, device, scheduled=learner.scheduler is not None)
    return maker


class WholeStep(Stepper):
    """Training steps of a learner on a placed store, as CUDA graphs: give the class to `fit` as `stepper=WholeStep`.

    Create a WholeStep after you have restored the learner: a recording keeps the addresses of the parameters and of
    the optimizer's state.

    >>> outcome = hoploom.fit(learner, Training(epochs=1), context, stepper=hoploom.WholeStep)
    >>> print(outcome.whole_steps)
    """

    counts: StepCounts
    delay = SLOTS

    def __init__(
        self,
        learner: Learner,
        training: Training,
        context: Context,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        device = context.device
        self.maker = maker = check_learner(learner, training, device)
        super().__init__(learner, training, context, checkpoint)
        self._model, self.counts = adapted(without_ddp(learner.model)), StepCounts()
        store, size = maker.assembler.store, learner.loader.batch_size
        assert store.placed is not None
        self.placed, self.pool = store.placed, Pool(device, context.timeout)
        self.views_edges = isinstance(unwrap(learner.model), GNN)
        self.assembler = device_assembler(maker.assembler, store.placed, BatchMemory(self.pool))
        if isinstance(maker, NodeMaker) and isinstance(learner.task, NodeTask):
            learner.task.check(store, maker.nodes, maker.node_type)
        order = learner.loader.rehearsal()
        full = [step for step in order.steps if order.step(step).indices.numel() == size]
        if not full:
            raise not_recordable(
                f"need a step of batch_size={size} seeds, and no step of an epoch has so many; give fewer"
            )
        sampling = DeviceSampling(maker, store.placed, self.pool)
        shares = [order.step(step) for step in full[:: max(1, len(full) // PROBED)][:PROBED]]
        starts, sizes = [maker.start(share) for share in shares], [sampling.capacity_of(share) for share in shares]
        lengths = zip(*([0 if t is None else t.numel() for t in _varying(seeds)] for seeds in starts), strict=True)
        # exact if it is the same of all batches: the number of seeds of a loader of nodes
        self._most = [
            max(own) if len({*own}) == 1 else -(-int(max(own) * (1 + training.margin)) // ROUNDED) * ROUNDED
            for own in lengths
        ]
        num_seeds = self._most[: len(store.schema.node_types)]
        types = [index for index, count in enumerate(num_seeds) if count]
        self.plan = plan_hops(store.schema, maker.sampler.sampling, types, with_indptr=True)
        seen = reduce(partial(Capacity.combine, function=max), sizes)
        self.capacity = fixed_capacity(self.plan, seen, num_seeds, training.margin, ROUNDED)
        self.maps = make_maps(self.plan, device)  # for one batch at a time
        self.fill_stream, self.learn_stream = WorkStream(device, own_stream=True), WorkStream(device, own_stream=False)
        self._divisor = size * context.world_size  # of gradients, a constant of the recordings
        self._gradients = list(map(torch.zeros_like, self._parameters))
        self._rates = LearningRates(learner.optimizer)
        self._step_optimizer = Recording(self._apply, self.learn_stream)
        self._slots = deque(FixedBatch(self) for _ in range(SLOTS))
        self._begun: tuple[int, FixedBatch | None] | None = None  # the next step, whose batch is being filled
        if not self.views_edges:
            self._check_rows(shares[0])

    def _check_rows(self, share: StepShare) -> None:
        """Raise ConfigError if the losses of a batch that fits the buffers change with its padding."""
        slot = self._slots[0]
        slot.fill(share)
        self.learn_stream.wait_for(slot.filled)
        assert slot.batch is not None
        unpadded = received(DeviceLoading(self.maker, self.placed, self._context.timeout).make(share))
        for wide, narrow in zip(slot.batch.node_stores, unpadded.node_stores, strict=True):
            for name, rows in wide.items():  # in the padding, to be seen in means and in maxima
                if isinstance(rows, Tensor) and rows.is_floating_point():
                    count = len(narrow[name])
                    rows[count::2], rows[count + 1 :: 2] = STRANGE, -2 * STRANGE  # a sum is not zero
        with evaluating(self._model):
            padded = self._losses_of(self.learner.task, slot.batch, enabled=False)
            own = self._losses_of(self.learner.task, unpadded, enabled=False)
        self.learn_stream.record(slot.learned)
        alike = torch.isclose(padded, own, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True).all()
        if not on_host(alike, "computed a loss", self._context.timeout):
            raise not_recordable(
                "need outputs that depend only on the nodes that a node's edges reach, and those of this model change "
                "with the padding of a batch; take no norm, mean or pooling over all rows"
            )

    def close(self) -> None:
        """Wait for the device, and free the batches and recordings."""
        self._begun = None
        with ExitStack() as last_first:
            last_first.callback(self._slots.clear)
            last_first.callback(self.learn_stream.close)
            last_first.callback(self.fill_stream.close)

    @contextmanager
    def steps(self) -> Iterator[Self]:
        self._epoch_steps = self.learner.loader.begin_epoch()
        self._left, self._open = deque(self._epoch_steps.order.steps), deque()
        self._begun = None
        yield self

    @property
    def is_empty(self) -> bool:
        return self._begun is None and not self._left

    def padded(self, seeds: Seeds) -> Seeds | None:
        """Return the seeds with their nodes and excluded edges in arrays of fixed length; None if they do not fit."""
        given, count = _varying(seeds), len(seeds.nodes)
        if any(t is not None and t.numel() > most for t, most in zip(given, self._most, strict=True)):
            return None
        padded = [
            t if t is None else F.pad(t, (0, most - t.numel()), value=-1 if index < count else NEVER)
            for index, (t, most) in enumerate(zip(given, self._most, strict=True))
        ]
        return replace(seeds, nodes=tuple(padded[:count]), excluded=tuple(padded[count:]))

    def _begin(self) -> tuple[int, FixedBatch | None]:
        """Start to fill the next batch. Return its step and its buffers, or None if it has too few seeds."""
        step = self._left.popleft()
        share = self._epoch_steps.order.step(step)
        if not self._slots:
            raise ConfigError("this WholeStep is closed; make another one")
        slot = self._slots[0]
        self._slots.rotate(-1)
        if share.indices.numel() != self.learner.loader.batch_size:
            return step, None
        slot.fill(share)
        return step, slot

    @contextmanager
    def _learning(self, timer: StepTimer) -> Iterator[BegunStep]:
        number, slot = self._begun or self._begin()
        step = BegunStep(self.learner.progress.steps + 1, self._divisor, self.learner.loader.num_seeds(number))
        with self.in_time(step.number):
            fits = slot is not None and slot.fits(self._context.timeout)
        timer.end("wait")
        if slot is not None and fits:
            self._learn(slot)
            step.add(slot.loss.clone(), slot.rows)  # the next batch in the slot overwrites it
        else:
            self.counts.overflowed += slot is not None
            self.counts.shorter += slot is None
            step.add(*self.learn_from(self._epoch_steps.make(number)))
        timer.end("forward")
        yield step
        if self._context.world_size > 1:
            flat = torch.cat([gradient.view(-1) for gradient in self._gradients])
            self._context.add_up(flat, f"averaging the gradients of step {step.number}")
            parts = flat.split([gradient.numel() for gradient in self._gradients])  # type: ignore[no-untyped-call]
            torch._foreach_copy_(self._gradients, list(map(Tensor.view_as, parts, self._gradients)))
        timer.end("backward")
        self._epoch_steps.done(number)
        self._begun = self._begin() if self._left else None
        timer.end("rest")

    def _learn(self, slot: FixedBatch) -> None:
        """Start to compute the gradients of the batch in the buffers `slot`, which it must fit; do not wait."""
        self.counts.replayed += slot.learn.is_warm
        self.counts.first += not slot.learn.is_warm
        self.learn_stream.wait_for(slot.filled)
        slot.learn()
        self.learn_stream.record(slot.learned)

    def learn_from(self, batch: Batch) -> tuple[Tensor, int]:
        """Compute the gradients of a batch, divided by a constant. Return the sum of its losses and their number."""
        with leaves_of(self._model, self._parameters) as leaves:
            # no cache of casts: a later step would use those of the recording as values
            losses = self._losses_of(self.learner.task, batch, cache_enabled=False)
            loss = losses.sum() * (1 / self._divisor)
            found = torch.autograd.grad(loss, leaves, materialize_grads=True)
        torch._foreach_copy_(self._gradients, found)
        return losses.detach().double().sum(), losses.numel()

    def _update(self, weight: float) -> bool:
        if weight != 1.0:
            torch._foreach_mul_(self._gradients, weight)
        if self.placed.device.type == "cuda":
            self._rates.check()
        self._rates.send()
        self._step_optimizer()
        return True

    def _apply(self) -> None:
        """Clip the gradients, and apply them to the parameters."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        if self._training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._training.clip_norm)
        with self._rates.as_tensors():
            self.learner.optimizer.step()


def _varying(seeds: Seeds) -> tuple[Tensor | None, ...]:
    """Return the arrays whose lengths may differ from batch to batch."""
    return *seeds.nodes, *seeds.excluded


@contextmanager
def leaves_of(model: nn.Module, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Replace a model's parameters in this `with` block by tensors over the same memory, which it yields.

    DDP has noted the parameters on the stream on which it was made; a recording must not use that stream.
    """
    made: dict[Any, Tensor] = {parameter: parameter.detach().requires_grad_() for parameter in parameters}
    owners = [(own._parameters, name, p) for own in model.modules() for name, p in own._parameters.items() if p in made]
    for held, name, parameter in owners:
        held[name] = made[parameter]  # type: ignore[assignment]
    try:
        yield list(made.values())
    finally:
        for held, name, parameter in owners:
            held[name] = parameter
