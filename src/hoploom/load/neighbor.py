"""NeighborLoader and LinkNeighborLoader: PyG's arguments in, PyG's batches out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling, NumNeighbors

from hoploom.config.values import as_int, as_number
from hoploom.errors import ConfigError
from hoploom.load import arguments as inputs
from hoploom.load.arguments import Input, NodeSeeds, PairOrData
from hoploom.load.assemble import Assembler, Batch, Mover
from hoploom.load.loader import Loader, made_here
from hoploom.load.maker import LinkInput, LinkMaker, NodeMaker, NodeTimes, Sampler, Workspaces
from hoploom.load.order import Order, localised
from hoploom.load.pipeline import Producer
from hoploom.sample import LinkTask, SampleFrontier, make_link_task
from hoploom.sample.options import NumNeighbors as Fanouts
from hoploom.sample.options import make_sampling
from hoploom.schema import RelationName, Schema

# What PyG's loaders take and we do not, and what goes to make_sampling as it is.
REFUSED = ("transform_sampler_output", "neighbor_sampler", "custom_cls")
OPTIONS = ("replace", "labor", "disjoint", "temporal_strategy", "time_attr", "weight_attr", "mode")


@dataclass(frozen=True)
class Setup:
    """What both loaders make of their common arguments."""

    given: Mapping[str, Any]  # all arguments, by name
    arguments: Mapping[str, Any]  # torch's DataLoader's, and ours like them
    graph: Input
    sampler: Sampler
    assembler: Assembler
    mover: Mover

    def order(self, node_type: str, nodes: Tensor) -> Order:
        """The order of an epoch of these seeds, or of the links that lead to these nodes."""
        arguments = self.arguments
        order = Order(
            nodes.numel(),
            arguments["batch_size"],
            bool(arguments["shuffle"]),
            bool(arguments["drop_last"]),
            as_int("seed", self.given["seed"], None, "give an integer"),
            as_int("rank", self.given["rank"], 0, "give this process's number among world_size, 0 for the first"),
            as_int("world_size", self.given["world_size"], 1, "give the number of ranks"),
            least_tail=arguments["least_tail"],
        )
        return localised(order, self.graph.store, node_type, nodes, arguments["locality"])


def _set_up(loader: str, given: Mapping[str, Any]) -> Setup:
    """Check the common arguments, open the graph. `given` are all arguments by name."""
    for name in REFUSED:
        if given[name] is not None:
            raise ConfigError(f"{loader} does not support {name}=; use transform= on the batch instead")
    arguments = inputs.loader_arguments(given["kwargs"], loader)
    graph = inputs.read_input(given["data"], weight_attr=given["weight_attr"], time_attr=given["time_attr"])
    schema, hook = graph.store.schema, given["sample_frontier"]
    subgraph = given["subgraph_type"] if given["directed"] else "induced"
    options = {name: given[name] for name in OPTIONS}
    fanouts = inputs.fanouts_of(schema, given["num_neighbors"])
    sampling = make_sampling(schema, fanouts, subgraph_type=subgraph, **options)
    for name in ("sample_frontier", "transform"):
        if given[name] is not None and not callable(given[name]):
            raise ConfigError(f"{name} is of type {type(given[name]).__name__}; give a function")
    if hook is not None and sampling.mode != "blocks":
        raise ConfigError("sample_frontier needs mode='blocks'")
    if hook is not None and sampling.disjoint:
        raise ConfigError("sample_frontier cannot be disjoint or temporal; drop one of the two")
    mover = Mover(given["device"])
    pinned = mover.is_cuda or (arguments["pin_memory"] and torch.cuda.is_available())
    sampler = Sampler(graph.store.graph, sampling, Workspaces(graph.store), hook)
    degrees = given["degrees"]
    reduce = inputs.read_added(schema, sampling, given["aggregate"], degrees)
    assembler = Assembler(graph.store, graph.template, graph.field_order, pinned, reduce, degrees)
    return Setup(given, arguments, graph, sampler, assembler, mover)


class SamplingLoader(Loader):
    """What the two loaders share once their seeds are known."""

    def _start(self, setup: Setup, maker: NodeMaker | LinkMaker, order: Order) -> None:
        delivery, steps = inputs.delivery_of(setup.arguments), setup.arguments["look_ahead"]
        deployed = setup.graph.store.deployment.producer(maker, setup.mover.device, steps, delivery.deadline)
        producer: Producer = made_here(maker, steps or 1) if deployed is None else deployed
        super().__init__(order, producer, delivery, setup.mover)
        self.data, self.store, self.maker = setup.given["data"], setup.graph.store, maker


class NeighborLoader(SamplingLoader):
    """Neighbourhood-sampled batches around nodes.

    Takes PyG's arguments and yields PyG's batches. Beyond PyG: `data` may be a store or its path, `input_nodes` a
    split's name, `num_workers` are threads, and:

    - `seed`, `rank`, `world_size`: the same batches everywhere, every seed once over all ranks
    - `least_tail`: a last step of fewer seeds joins the one before it; at or above every number of ranks that a run
      may have, it makes the steps the same for all of them
    - `locality=[[0], [1]]`: seeds go to the ranks that hold their part, as far as equal batches allow; `True`: the
      parts of every rank are those that `Context.open` found
    - `look_ahead`: of so many steps the rows that lie elsewhere are fetched together, each once
    - `device`: batches arrive there, copied on a side stream; where the store is placed they are made there
    - `mode="blocks"`: message-flow blocks; `sample_frontier(layer, graph, seeds)` draws a layer's edges
    - `labor`: layer-dependent picks that share sources between seeds
    - `aggregate="mean"`: layer one's neighbours arrive aggregated, straight from the store, and `x` holds only the
      nodes that layer one computes; for models of hoploom.nn, whose `first_reduce` says what to give here
    - `degrees`: with `in_degree`, every node's in-degree in the whole graph; GCN normalises by it where it is there

    >>> loader = NeighborLoader("papers.store", [15, 10, 5], input_nodes="train", batch_size=1024, shuffle=True)
    """

    def __init__(
        self,
        data: PairOrData,
        num_neighbors: Fanouts | NumNeighbors,
        input_nodes: Any = None,
        input_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Batch], Any] | None = None,
        transform_sampler_output: Callable[..., Any] | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        *,
        input_id: Tensor | None = None,
        custom_cls: Any = None,
        labor: bool = False,
        mode: str = "subgraph",
        sample_frontier: SampleFrontier | None = None,
        aggregate: str | None = None,
        degrees: bool = False,
        device: torch.device | str | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        **kwargs: Any,
    ) -> None:
        given = locals()
        if input_time is not None and time_attr is None:
            raise ConfigError("input_time is set but time_attr is not; name the time attribute")
        setup = _set_up("NeighborLoader", given)
        seeds = _node_seeds(setup.graph, input_nodes, input_id, input_time, time_attr)
        maker = NodeMaker(setup.sampler, setup.assembler, seeds, transform=transform)
        self._start(setup, maker, setup.order(seeds.node_type, seeds.nodes))


def _node_seeds(
    given: Input, input_nodes: Any, input_id: Tensor | None, input_time: Tensor | None, time_attr: str | None
) -> NodeSeeds:
    store = given.store
    node_type, nodes, implied = inputs.read_input_nodes(store, input_nodes)
    if nodes.numel() == 0:
        raise ConfigError(f"input_nodes is empty ({input_nodes!r:.60}); give at least one seed")
    input_id = inputs.as_input_id(input_id, nodes.numel())
    times = inputs.as_times("input_time", input_time, nodes.numel())
    if time_attr is not None and times is None and time_attr not in store.schema.node_type(node_type).fields:
        raise ConfigError(f"{node_type!r} has no {time_attr!r} to date its seeds; give input_time")
    return NodeSeeds(node_type, nodes, implied if input_id is None else input_id, times)


class LinkNeighborLoader(SamplingLoader):
    """Neighbourhood-sampled batches around links, with negatives.

    Takes PyG's arguments and yields PyG's batches; beyond PyG what NeighborLoader adds, and `strict_negatives`: no
    negative is an edge of the graph.

    >>> loader = LinkNeighborLoader(data, [10, 5], neg_sampling="binary", batch_size=512, shuffle=True)
    """

    def __init__(
        self,
        data: PairOrData,
        num_neighbors: Fanouts | NumNeighbors,
        edge_label_index: Any = None,
        edge_label: Tensor | None = None,
        edge_label_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: NegativeSampling | str | None = None,
        neg_sampling_ratio: float | None = None,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Batch], Any] | None = None,
        transform_sampler_output: Callable[..., Any] | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        *,
        input_id: Tensor | None = None,
        custom_cls: Any = None,
        strict_negatives: bool = False,
        labor: bool = False,
        mode: str = "subgraph",
        sample_frontier: SampleFrontier | None = None,
        aggregate: str | None = None,
        degrees: bool = False,
        device: torch.device | str | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        **kwargs: Any,
    ) -> None:
        given = locals()
        if (edge_label_time is not None) != (time_attr is not None):
            raise ConfigError("edge_label_time and time_attr go together; give both or neither")
        setup = _set_up("LinkNeighborLoader", given)
        negatives = _negatives(neg_sampling, neg_sampling_ratio)
        links = _links(setup.graph, edge_label_index, edge_label, negatives)
        links = replace_fields(
            links,
            times=inputs.as_times("edge_label_time", edge_label_time, links.ends.shape[1]),
            input_id=inputs.as_input_id(input_id, links.ends.shape[1]),
            task=_link_task(setup.graph, links.key, negatives, strict=strict_negatives, temporal=time_attr is not None),
        )
        maker = LinkMaker(setup.sampler, setup.assembler, links, transform=transform)
        self._start(setup, maker, setup.order(links.key[2], links.ends[1]))


def _negatives(neg_sampling: Any, ratio: float | None) -> NegativeSampling | None:
    amount = 0.0 if ratio is None else as_number("neg_sampling_ratio", ratio, "give negatives per link")
    if amount > 0:
        return NegativeSampling("binary", amount)
    try:
        return None if neg_sampling is None else NegativeSampling.cast(neg_sampling)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"neg_sampling is {neg_sampling!r:.80} ({error}); give 'binary', 'triplet' or a NegativeSampling"
        ) from error


def _links(given: Input, edge_label_index: Any, edge_label: Any, negatives: NegativeSampling | None) -> LinkInput:
    key, ends = inputs.read_edge_label_index(given.store, edge_label_index)
    count = ends.shape[1]
    if count == 0:
        raise ConfigError("edge_label_index is empty; give at least one link")
    if edge_label is None:
        return LinkInput(key, ends)
    labels = inputs.read_tensor("edge_label", edge_label)
    if labels.shape[:1] != (count,):
        raise ConfigError(f"edge_label has shape {tuple(labels.shape)} for {count} links; give one each")
    if negatives is not None and negatives.is_triplet():
        raise ConfigError("edge_label has no place in triplet negative sampling; leave it out")
    if negatives is not None and labels.min() == 0:
        labels = labels + 1  # zero now means negative, as in PyG
    return LinkInput(key, ends, labels)


def _link_task(
    given: Input, key: RelationName, negatives: NegativeSampling | None, *, strict: bool, temporal: bool
) -> LinkTask:
    """`temporal`: links have times, at which their negatives must exist."""
    if strict and negatives is None:
        raise ConfigError("strict_negatives needs neg_sampling")
    schema = given.store.schema
    relation = schema.relation_index[key]
    checked = _checked_weights(schema, relation, negatives)
    times = NodeTimes(given.store) if negatives is not None and temporal else None
    return make_link_task(relation, checked, strict=strict, node_times=times)


def _checked_weights(schema: Schema, relation: int, negatives: NegativeSampling | None) -> NegativeSampling | None:
    if negatives is None:
        return None
    ends = (("src_weight", schema.sources), ("dst_weight", schema.destinations))
    weights = {
        name: inputs.read_weight(name, given, schema.node_types[types[relation]].num_nodes)
        for name, types in ends
        if (given := getattr(negatives, name)) is not None
    }
    return NegativeSampling(negatives.mode, negatives.amount, **weights)
