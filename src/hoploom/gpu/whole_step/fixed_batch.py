"""One batch of fixed size that is filled on the device again and again, and the step that learns from it.

Filling and learning are two recordings: the next batch is filled while this one is learned from. Nothing in either asks
the device anything; the sizes arrive in pinned memory, and the host looks at them before it starts the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from hoploom.batch import Seeds
from hoploom.gpu.batches.capacity import FAULT, HopPlan
from hoploom.gpu.batches.device_hops import make_buffers, sample_on_device
from hoploom.gpu.place.placed_store import PlacedStore
from hoploom.gpu.whole_step.cuda_graph import Lane, Mark, Recording
from hoploom.gpu.whole_step.fixed_sizes import FixedSizes
from hoploom.load.assemble import FEATURES, IN_DEGREE, Batch
from hoploom.load.maker import NodeMaker
from hoploom.nn import GNN, LayerView
from hoploom.nn.layers import one_per_layer
from hoploom.ops import InEdges
from hoploom.ops.kernels.relabel import DeviceNodeMap
from hoploom.schema import RelationName
from hoploom.store import Wanted
from hoploom.train.tasks import NodeTask

SIGN, WORD = 1 << 63, 1 << 64
STAGED = 2  # entries before the seeds: the key, and one that keeps the seeds' address a multiple of 16


@dataclass(frozen=True)
class FixedBatchSpec:
    """What all batches of a run have in common."""

    plan: HopPlan
    sizes: FixedSizes
    placed: PlacedStore
    maps: tuple[DeviceNodeMap, ...]  # for one batch at a time
    model: GNN
    maker: NodeMaker
    batch_size: int
    targets: Tensor  # of every seed of the loader
    degrees: Tensor | None  # of every node
    lane: Lane  # where batches are filled
    timeout: float  # seconds, of every wait for the device

    @property
    def device(self) -> torch.device:
        return self.placed.device

    @property
    def seed_type(self) -> int:
        return self.plan.schema.type_index[self.maker.seeds.node_type]

    def hold(self, mark: Mark, doing: str) -> None:
        """Hold this thread until a mark is reached; TimeoutError with what was not done by then."""
        if not mark.reached(self.timeout):
            raise TimeoutError(doing)


def targets_of(maker: NodeMaker, task: NodeTask) -> Tensor:
    """What every seed of a loader should come to; an error names the first that has no label that can be learned."""
    seeds, store = maker.seeds, maker.assembler.store
    task.check(store, seeds.nodes[:0], seeds.node_type)
    labels = store.features.gather([Wanted(seeds.node_type, task.label, seeds.nodes)])[0]
    return task.read(labels, seeds.nodes)


def degrees_of(maker: NodeMaker, device: torch.device) -> Tensor | None:
    """The in-degrees of all nodes, where batches tell them."""
    if not maker.assembler.degrees:
        return None
    (relation,), store = maker.assembler.store.schema.relations, maker.assembler.store
    nodes = torch.arange(store.schema.node_type(relation.destination).num_nodes)
    return store.in_degrees(relation.key, nodes).to(device)


class FixedBatch:
    """A batch of fixed size, and when it was filled and learned from."""

    def __init__(self, spec: FixedBatchSpec, learn: "Callable[[FixedBatch], None]", lane: Lane) -> None:
        self._spec = spec
        size = spec.batch_size
        self.on = make_buffers(spec.plan, spec.sizes.capacity, spec.device)
        for nodes in self.on.nodes:
            nodes.zero_()  # rows that no batch has reached are looked up too
        self._staged = torch.zeros(STAGED + 2 * size, dtype=torch.int64, device=spec.device)
        self._sent = _pinned(self._staged)
        self._sizes = _pinned(self.on.totals)
        self.targets = spec.targets.new_empty((size, *spec.targets.shape[1:]))
        self.rows = self._empty_rows()
        self.loss = torch.zeros((), dtype=torch.float64, device=spec.device)
        self._loss = _pinned(self.loss)
        self.filled, self.learned = Mark(spec.device), Mark(spec.device)
        self._fill, self.learn = Recording(self._make, spec.lane), Recording(partial(learn, self), lane)

    def _empty_rows(self) -> dict[int, Tensor]:
        """Features by type: zeros to begin with, and rows of earlier batches later on, so they are always finite.

        They must be. A row beyond the batch has no effect and its gradient is zero, but that is multiplied by the row.
        """
        spec, schema = self._spec, self._spec.plan.schema
        rows = {}
        for index, node_type in enumerate(schema.node_types):
            if FEATURES in node_type.fields and node_type.name in spec.model.types[0]:
                count = self.on.nodes[index].numel()
                rows[index] = spec.placed.empty(node_type.name, FEATURES, count).zero_()
        return rows

    # --- filling ------------------------------------------------------------------------------

    def fill(self, indices: Tensor, key: int) -> None:
        """Start to make the batch of these seeds, once the one before is learned from."""
        self._spec.placed.lease.check()  # a replay would read memory that is gone
        self._spec.hold(self.filled, "sampled")  # what was sent for the batch before may be overwritten now
        lane, size = self._spec.lane, self._spec.batch_size
        self._sent[0] = key - WORD if key >= SIGN else key
        self._sent[STAGED : STAGED + size] = self._spec.maker.seeds.nodes[indices]
        self._sent[STAGED + size :] = indices
        lane.wait(self.learned)
        self._fill()
        lane.set(self.filled)

    def fits(self) -> bool:
        """Wait for the batch's sizes; whether it is whole."""
        self._spec.hold(self.filled, "sampled")
        sizes: list[int] = self._sizes[:, 0].tolist()
        return sizes[FAULT] == 0 and self._spec.sizes.holds(self._spec.plan, sizes)

    def _make(self) -> None:
        spec, on, size = self._spec, self.on, self._spec.batch_size
        self._staged.copy_(self._sent, non_blocking=True)
        seeds: list[Tensor | None] = [None] * len(on.nodes)
        seeds[spec.seed_type] = self._staged[STAGED : STAGED + size]
        nowhere = (None,) * len(on.nodes)
        assert spec.placed.lists is not None
        sample_on_device(spec.plan, spec.placed.lists, spec.maps, Seeds(tuple(seeds), nowhere), self._staged[0], on)
        torch.index_select(spec.targets, 0, self._staged[STAGED + size :], out=self.targets)
        names = spec.plan.schema.node_types
        spec.placed.gather(
            [Wanted(names[index].name, FEATURES, on.nodes[index]) for index in self.rows],
            [on.total(spec.plan.nodes[index][-1]) for index in self.rows],
            outs=list(self.rows.values()),
            faults=on.totals[FAULT, :1],
        )
        self._sizes.copy_(on.totals, non_blocking=True)

    # --- learning -----------------------------------------------------------------------------

    def batch(self) -> Batch:
        """The batch as the models of hoploom.nn take it."""
        spec, schema = self._spec, self._spec.plan.schema
        out: Batch = Data() if schema.homogeneous else HeteroData()
        out.views = self._views()
        for index, node_type in enumerate(schema.node_types):
            storage = out if schema.homogeneous else out[node_type.name]
            if index in self.rows:
                storage[FEATURES] = self.rows[index]
            storage["n_id"] = self.on.nodes[index]
            if index == spec.seed_type:
                storage["batch_size"] = spec.batch_size
        if spec.degrees is not None:
            out[IN_DEGREE] = spec.degrees.index_select(0, self.on.nodes[0])
        return out

    def _views(self) -> list[LayerView]:
        spec = self._spec
        hops = [self._edges(hop) for hop in range(spec.plan.sampling.num_hops)]
        names = [node_type.name for node_type in spec.plan.schema.node_types]
        most_nodes = dict(zip(names, spec.sizes.nodes, strict=True))
        num_layers = spec.model.num_layers
        return padded_views(one_per_layer(hops, num_layers), most_nodes, num_layers, are_blocks=spec.plan.is_blocks)

    def _edges(self, hop: int) -> "dict[RelationName, PaddedEdges]":
        plan = self._spec.plan
        layer = self.on.layers[hop if plan.is_blocks else 0]
        edges = {}
        for index, (relation, own) in enumerate(zip(plan.schema.relations, layer, strict=True)):
            assert own.indptr is not None
            total, most = self.on.total(plan.picks[index][hop][1]), self._spec.sizes.edges[index][hop]
            edges[relation.key] = PaddedEdges(own.edge_index[0], own.indptr, total, most)
        return edges

    def send_loss(self, loss_sum: Tensor) -> None:
        """Send the sum of the losses to the host."""
        self.loss.copy_(loss_sum)
        self._loss.copy_(self.loss, non_blocking=True)

    def read_loss(self) -> float:
        """The sum of the losses, once the step is done."""
        self._spec.hold(self.learned, "learned")
        return float(self._loss)


def _pinned(like: Tensor) -> Tensor:
    """Memory of the host that the device copies to and from by itself."""
    return torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


# --- views ---------------------------------------------------------------------------------------
# All sizes are numbers of the host, so that the same kernels can be replayed for every batch. Rows beyond a batch's own
# have empty lists: they are computed and reach nothing.


@dataclass(frozen=True)
class PaddedEdges:
    """The picks of one relation up to some hop, in arrays of fixed size. Ends are local ids."""

    sources: Tensor  # [at least most] int64; what stands beyond the picks does not matter
    indptr: Tensor  # [most destinations + 1] int64: where each one's picks begin; NO_PICKS beyond those expanded
    total: Tensor  # [] int64: how many picks there are
    most: int  # and can be

    def grouped(self, num_sources: int, num_destinations: int, whole: InEdges | None = None) -> InEdges:
        """By destination. Nodes further out begin where these picks end, so their lists become empty."""
        indptr = torch.minimum(self.indptr[: num_destinations + 1], self.total)
        return InEdges(indptr, self.sources[: self.most], num_sources, whole=whole)


def padded_views(
    hops: Sequence[Mapping[RelationName, PaddedEdges]],
    most_nodes: Mapping[str, Sequence[int]],
    num_layers: int,
    *,
    are_blocks: bool = False,
) -> list[LayerView]:
    """One view per layer, from the input layer on, as `views_of` has them for a batch of its own size.

    `hops` are from the seeds inwards: each with all picks up to it, or for blocks with its own. `most_nodes` are a
    type's nodes within 0, 1, ... hops at most; a batch beyond that must not come here.
    """
    wholes: dict[RelationName, InEdges] = {}
    if not are_blocks:
        last = {name: counts[-1] for name, counts in most_nodes.items()}
        wholes = {key: one.grouped(last[key[0]], last[key[2]]) for key, one in hops[-1].items()}
    views = []
    for follow in range(num_layers - 1, -1, -1):  # layers that follow, so many hops away are a layer's destinations
        sources, destinations = (_within(most_nodes, hop) for hop in (follow + 1, follow))
        edges = {
            key: one.grouped(sources[key[0]], destinations[key[2]], wholes.get(key))
            for key, one in hops[min(follow, len(hops) - 1)].items()
        }
        views.append(LayerView(edges, sources, destinations))
    return views


def _within(most_nodes: Mapping[str, Sequence[int]], hops: int) -> dict[str, int]:
    return {name: counts[min(hops, len(counts) - 1)] for name, counts in most_nodes.items()}
