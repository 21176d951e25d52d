"""NeighborLoader, LinkNeighborLoader and HGTLoader: PyG's arguments in, PyG's batches out."""

from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Never

import torch
from torch import Tensor
from torch_geometric.sampler import BaseSampler, NegativeSampling, NumNeighbors
from torch_geometric.sampler.base import SubgraphType

from hoploom.errors import ConfigError
from hoploom.load import arguments as inputs
from hoploom.load.adapter import with_sampler
from hoploom.load.arguments import NodeSeeds, PairOrData
from hoploom.load.assemble import Assembler, Batch, Mover
from hoploom.load.calls import Calls
from hoploom.load.fingerprint import Fingerprint
from hoploom.load.loader import EpochSteps, Loader, producer_of
from hoploom.load.maker import LinkInput, LinkMaker, LocalMaker, NodeMaker, NodeTimes, Sampler
from hoploom.load.order import Order, drawn, localised
from hoploom.load.pipeline import DEADLINE, ByteLimit, Pipeline
from hoploom.load.watched_fields import WatchedFields
from hoploom.ranks.share import Share, read_share
from hoploom.sample import LinkTask, SampleFrontier, make_link_task
from hoploom.sample.hops import (
    Fanouts,
    Mode,
    NumSamples,
    Sampling,
    Subgraph,
    Temporal,
    make_hgt_sampling,
    make_sampling,
)
from hoploom.schema import RelationName, Schema
from hoploom.store import Store

# What PyG's loaders take and we do not, and what goes to make_sampling as it is.
REFUSED = ("transform_sampler_output", "custom_cls")
OPTIONS = ("replace", "labor", "disjoint", "temporal_strategy", "time_attr", "weight_attr", "mode")
Given = Mapping[str, Any]  # all arguments of a loader by name


class SamplingLoader(Loader):
    """Base class of the loaders: everything but their seeds."""

    @abstractmethod
    def _maker_and_seeds(self, given: Given, sampler: Sampler, assembler: Assembler) -> tuple[LocalMaker, str, Tensor]:
        """What makes the batches; and the type and ids of the seeds, or of the nodes that the links lead to."""

    def _set_up(self, loader: str, given: Given) -> None:
        given = with_sampler(given)
        for name in REFUSED:
            if given.get(name) is not None:
                raise ConfigError(f"{loader} does not support {name}=; use transform= on the batch instead")
        arguments = inputs.loader_arguments(given, loader)
        attrs = {name: given.get(name) for name in ("weight_attr", "time_attr")}
        graph = given.get("graph") or inputs.read_input(given["data"], **attrs)
        store, mover = graph.store, Mover(given["device"])
        sampler = _sampler(store, given)
        degrees = given.get("degrees", False)
        reduce = inputs.read_added(store.schema, sampler.sampling, given.get("aggregate"), degrees)
        pinned = mover.is_cuda or (arguments["pin_memory"] and torch.cuda.is_available())
        fields = inputs.read_fields(store.schema, arguments["fields"], graph.frames)
        if fields is not None and sampler.sampling.mode == "blocks":
            inputs.check_block_fields(store.schema, fields)
        assembler = Assembler(
            store,
            graph.template,
            graph.field_order,
            pinned,
            reduce,
            degrees,
            fields,
            graph.frames,
            graph.deleted,
        )
        maker, node_type, nodes = self._maker_and_seeds(given, sampler, assembler)
        share = read_share(given["rank"], given["world_size"])
        self._arguments, self._seeds = arguments, (store, node_type, nodes)
        order = self._order_of(share)
        deadline = arguments["timeout"] or DEADLINE
        producer = producer_of(maker, mover.device, arguments["look_ahead"], deadline)
        byte_limit = None if arguments["prefetch_bytes"] is None else ByteLimit(arguments["prefetch_bytes"])
        pipeline = Pipeline(
            arguments["num_workers"], arguments["prefetch_factor"] or 2, deadline, byte_limit=byte_limit
        )
        super().__init__(order, producer, pipeline, mover, share)
        self.data, self.store, self.maker = given["data"], store, maker
        self._seeds_of = inputs.seeds_name(given)
        self._calls, self._watched = Calls(order.seed, store), WatchedFields(given["data"], graph)
        self._meet()

    def _order_of(self, share: Share) -> Order:
        arguments, (store, node_type, nodes) = self._arguments, self._seeds
        order = Order(
            nodes.numel(),
            arguments["batch_size"],
            bool(arguments["shuffle"]),
            bool(arguments["drop_last"]),
            arguments["seed"],
            share.rank,
            share.world_size,
            least_tail=arguments["least_tail"],
        )
        if arguments["sampler"] is None:
            return localised(order, store, node_type, nodes, arguments["locality"])
        return drawn(order, arguments["sampler"], arguments["locality"])

    def _unread(self, num_seeds: int) -> str:
        store, node_type, nodes = self._seeds
        some = nodes[:: max(1, nodes.numel() // 4096)]
        for name in store.schema.node_type(node_type).splits if isinstance(self.maker, NodeMaker) else ():
            members = store.split(name, node_type)  # [n] int64, ascending
            if members.numel() > num_seeds:
                at = torch.searchsorted(members, some).clamp(max=members.numel() - 1)
                if torch.equal(members[at], some):
                    return f"; {members.numel() - num_seeds:,} seeds of the split {name!r} are on no rank"
        return ""

    def begin_epoch(self) -> EpochSteps:
        self._watched.renew()
        return super().begin_epoch()

    def stage_seconds(self) -> dict[str, float]:
        return self.maker.seconds.so_far()

    def steps(self, steps: range, *, dealt: bool = True) -> Generator[Batch, None, None]:
        self._watched.renew()
        return super().steps(steps, dealt=dealt)

    def _make_of(self, index: Tensor | list[int], key: int) -> Batch:
        self._watched.renew()
        return super()._make_of(index, key)

    def collate_fn(self, index: Tensor | list[int]) -> Batch:
        """The batch of these positions among the seeds, for PyG's ZipLoader: another one at every call."""
        if self.share.world_size > 1:
            raise ConfigError(
                f"this loader has the share of {self.share}, but a ZipLoader or torch's DataLoader counts positions "
                "among all seeds; make the loaders with rank=0, world_size=1, and give the ZipLoader "
                "sampler=DistributedSampler(range(n)) for the n seeds of the shortest loader"
            )
        return self._make_of(index, self._calls.key())

    def filter_fn(self, batch: Batch) -> Batch:
        """What ZipLoader calls on a batch afterwards: nothing is left to do."""
        return batch

    def enable_multithreading(self, worker_threads: int | None = None) -> AbstractContextManager[None]:
        """As in PyG, for its worker processes; workers are threads here, and there is nothing to do."""
        return nullcontext()

    def enable_cpu_affinity(self, loader_cores: Any = None) -> AbstractContextManager[None]:
        """As in PyG, for its worker processes; workers are threads here, and no core is theirs alone."""
        return nullcontext()

    def shown(self) -> dict[str, str]:
        counts = inputs.shown_counts(self.maker.assembler.store.schema, self.maker.sampler.sampling)
        named = {"seeds of": self._seeds_of} if self._seeds_of else {}
        return named | super().shown() | counts

    def _reading(self, order: Order) -> Fingerprint:
        return Fingerprint(type(self).__name__, order, self.maker)


def _sampler(store: Store, given: Given) -> Sampler:
    schema, hook = store.schema, given.get("sample_frontier")
    for name in ("sample_frontier", "transform", "worker_init_fn"):
        if given.get(name) is not None and not callable(given[name]):
            raise ConfigError(f"{name} is of type {type(given[name]).__name__}; give a function")
    if "num_samples" in given:
        return Sampler(store.graph, make_hgt_sampling(schema, given["num_samples"]))
    subgraph = given["subgraph_type"] if given["directed"] else "induced"
    options = {name: given[name] for name in OPTIONS}
    fanouts = inputs.fanouts_of(schema, given["num_neighbors"])
    sampling = make_sampling(schema, fanouts, subgraph_type=subgraph, **options)
    if hook is not None:
        _check_hook(sampling)
    return Sampler(store.graph, sampling, hook)


def _check_hook(sampling: Sampling) -> None:
    """A hook chooses the edges: raise for options that it would override."""
    if sampling.mode != "blocks":
        raise ConfigError("sample_frontier needs mode='blocks'")
    if sampling.disjoint:
        raise ConfigError("sample_frontier cannot be disjoint or temporal; drop one of the two")
    if sampling.weighted:
        raise ConfigError(
            "weight_attr has no effect beside sample_frontier; build the store with it, as in hoploom.from_pyg(data, "
            "weight_attr=...), and let the hook call graph.sample_neighbors(..., weighted=True)"
        )
    for name in ("replace", "labor"):
        if getattr(sampling, name):
            raise ConfigError(
                f"{name}=True has no effect beside sample_frontier; leave it out, and let the hook call "
                f"graph.sample_neighbors(..., {name}=True)"
            )


class NeighborLoader(SamplingLoader):
    """Batches of sampled neighbourhoods of nodes, as PyG's NeighborLoader makes them.

    Takes PyG's arguments and yields PyG's batches. `data` may also be a store or its path, and `input_nodes` the name
    of a split. `num_workers` is a number of threads. Beyond PyG, there are:

    - `seed`: the number from which all random choices derive; default: the seed of `generator`, else 0
    - `rank`, `world_size`: which share of the seeds this loader reads; by default those of the process group, else of
      torchrun's or Slurm's environment, else one process. `rank=0, world_size=1` reads all seeds
    - `least_tail`: a last step with fewer seeds joins the step before it. With a value of at least every number of
      ranks that you may use, the steps are the same for all of them
    - `locality=[[0], [1]]`: seeds go to the ranks that hold their part, as far as equal batches allow; `True`: the
      parts of every rank are those that `hoploom.open` found
    - `look_ahead`: fetch the remote rows of this many steps together, each row once
    - `fields=["x"]`, `fields={"paper": ["x", "y"]}`: batches have only these fields, and ids; `[]`: no fields
    - `prefetch_bytes="1GB"`: limits the memory of batches that are ready or being made. A batch that is not made yet
      counts as large as the largest so far; one group of `look_ahead` steps is always allowed
    - `device`: where batches arrive, copied on a side stream; batches of a placed store are made on its device
    - `mode="blocks"`: message-flow blocks; `sample_frontier(layer, graph, seeds)` chooses the edges of each layer
    - `labor`: the seeds of a batch share neighbours, so a batch has fewer distinct nodes
    - `aggregate="mean"`: the neighbours of layer one arrive aggregated, and `x` has only the nodes that layer one
      computes. Take the value from a model of hoploom.nn: `model.first_reduce`
    - `degrees`: adds `in_degree`, the in-degree of every node in the whole graph; GCN uses it to normalise

    >>> loader = NeighborLoader("papers.store", [15, 10, 5], input_nodes="train", batch_size=1024, shuffle=True)
    """

    def __init__(
        self,
        data: PairOrData,
        num_neighbors: Fanouts | NumNeighbors,
        input_nodes: Any = None,
        input_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: Subgraph | SubgraphType = "directional",
        disjoint: bool = False,
        temporal_strategy: Temporal = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Batch], Any] | None = None,
        transform_sampler_output: None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: BaseSampler | None = None,
        directed: bool = True,
        *,
        input_id: Tensor | None = None,
        custom_cls: None = None,
        labor: bool = False,
        mode: Mode = "subgraph",
        sample_frontier: SampleFrontier | None = None,
        aggregate: Literal["sum", "mean"] | None = None,
        degrees: bool = False,
        device: torch.device | str | None = None,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        batch_size: int = 1,
        shuffle: bool | None = False,
        sampler: Any = None,
        batch_sampler: None = None,
        num_workers: int = 0,
        collate_fn: None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: None = None,
        generator: torch.Generator | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        least_tail: int = 1,
        locality: Any = False,
        look_ahead: int | None = None,
        fields: Any = None,
        prefetch_bytes: int | str | None = None,
        **unknown: Never,
    ) -> None:
        given = locals()
        if input_time is not None and time_attr is None:
            raise ConfigError("'input_time' is set while 'time_attr' is not set; name the time attribute")
        self._set_up("NeighborLoader", given)

    def _maker_and_seeds(self, given: Given, sampler: Sampler, assembler: Assembler) -> tuple[LocalMaker, str, Tensor]:
        return _node_maker(given, sampler, assembler)


def _node_maker(given: Given, sampler: Sampler, assembler: Assembler) -> tuple[LocalMaker, str, Tensor]:
    store, time_attr = assembler.store, given.get("time_attr")
    node_type, nodes, implied = inputs.read_input_nodes(store, given["input_nodes"])
    if nodes.numel() == 0:
        raise ConfigError(f"input_nodes is empty ({given['input_nodes']!r:.60}); give at least one seed")
    input_id = inputs.as_input_id(given["input_id"], nodes.numel())
    times = inputs.as_times("input_time", given.get("input_time"), nodes.numel())
    if time_attr is not None and times is None and time_attr not in store.schema.node_type(node_type).fields:
        raise ConfigError(f"{node_type!r} has no {time_attr!r} to date its seeds; give input_time")
    seeds = NodeSeeds(node_type, nodes, implied if input_id is None else input_id, times)
    return NodeMaker(sampler, assembler, seeds, transform=given["transform"]), node_type, nodes


class HGTLoader(SamplingLoader):
    """Batches with a fixed number of nodes per type, sampled by budget, as PyG's HGTLoader makes them.

    In each layer, `num_samples` nodes of every type join the batch; give a list for all types, or one by type. They are
    drawn without replacement, in proportion to the square of their budget: the sum, over a node's edges to nodes of the
    batch, of 1 / in-degree within the relation. Of a node with more than 50 in-edges of a relation, 50 are picked. A
    batch has all edges between its nodes.

    Takes PyG's arguments, and of those that NeighborLoader adds `seed`, `rank`, `world_size`, `least_tail`, `locality`,
    `look_ahead`, `fields`, `prefetch_bytes` and `device`.

    >>> loader = HGTLoader(data, [512] * 4, input_nodes=("paper", data["paper"].train_mask), batch_size=128)
    """

    def __init__(
        self,
        data: PairOrData,
        num_samples: NumSamples,
        input_nodes: Any,
        is_sorted: bool = False,
        transform: Callable[[Batch], Any] | None = None,
        transform_sampler_output: None = None,
        filter_per_worker: bool | None = None,
        *,
        input_id: Tensor | None = None,
        custom_cls: None = None,
        device: torch.device | str | None = None,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        batch_size: int = 1,
        shuffle: bool | None = False,
        sampler: Any = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        generator: torch.Generator | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        in_order: bool = True,
        least_tail: int = 1,
        locality: Any = False,
        look_ahead: int | None = None,
        fields: Any = None,
        prefetch_bytes: int | str | None = None,
        **unknown: Any,
    ) -> None:
        self._set_up("HGTLoader", locals())

    def _maker_and_seeds(self, given: Given, sampler: Sampler, assembler: Assembler) -> tuple[LocalMaker, str, Tensor]:
        return _node_maker(given, sampler, assembler)


class LinkNeighborLoader(SamplingLoader):
    """Batches of sampled neighbourhoods of links, with negative links, as PyG's LinkNeighborLoader makes them.

    Takes PyG's arguments and yields PyG's batches. Beyond PyG, it has the arguments that NeighborLoader adds, and
    `strict_negatives`: no negative link is an edge of the graph.

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
        subgraph_type: Subgraph | SubgraphType = "directional",
        disjoint: bool = False,
        temporal_strategy: Temporal = "uniform",
        neg_sampling: NegativeSampling | Literal["binary", "triplet"] | None = None,
        neg_sampling_ratio: float | None = None,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Batch], Any] | None = None,
        transform_sampler_output: None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: BaseSampler | None = None,
        directed: bool = True,
        *,
        input_id: Tensor | None = None,
        custom_cls: None = None,
        strict_negatives: bool = False,
        labor: bool = False,
        mode: Mode = "subgraph",
        sample_frontier: SampleFrontier | None = None,
        aggregate: Literal["sum", "mean"] | None = None,
        degrees: bool = False,
        device: torch.device | str | None = None,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        batch_size: int = 1,
        shuffle: bool | None = False,
        sampler: Any = None,
        batch_sampler: None = None,
        num_workers: int = 0,
        collate_fn: None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: None = None,
        generator: torch.Generator | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        least_tail: int = 1,
        locality: Any = False,
        look_ahead: int | None = None,
        fields: Any = None,
        prefetch_bytes: int | str | None = None,
        **unknown: Never,
    ) -> None:
        given = locals()
        if (edge_label_time is None) != (time_attr is None):
            names = ("edge_label_time", "time_attr") if time_attr is None else ("time_attr", "edge_label_time")
            raise ConfigError("{!r} is set while {!r} is not set; give both or neither".format(*names))
        self._set_up("LinkNeighborLoader", given)

    def _maker_and_seeds(self, given: Given, sampler: Sampler, assembler: Assembler) -> tuple[LocalMaker, str, Tensor]:
        store = assembler.store
        negatives = inputs.read_negatives(given["neg_sampling"], given["neg_sampling_ratio"])
        key, ends = inputs.read_edge_label_index(store, given["edge_label_index"])
        count = ends.shape[1]
        if count == 0:
            raise ConfigError("edge_label_index is empty; give at least one link")
        links = LinkInput(
            _link_task(store, key, negatives, given),
            ends,
            _labels(given["edge_label"], count, negatives),
            inputs.as_times("edge_label_time", given["edge_label_time"], count),
            inputs.as_input_id(given["input_id"], count),
        )
        return LinkMaker(sampler, assembler, links, transform=given["transform"]), key[2], ends[1]


def _labels(edge_label: Any, count: int, negatives: NegativeSampling | None) -> Tensor | None:
    if edge_label is None:
        return None
    labels = inputs.read_tensor("edge_label", edge_label)
    if labels.shape[:1] != (count,):
        raise ConfigError(f"edge_label has shape {tuple(labels.shape)} for {count} links; give one each")
    if negatives is not None and negatives.is_triplet():
        raise ConfigError("edge_label has no place in triplet negative sampling; leave it out")
    if negatives is not None and labels.min() == 0:
        return labels + 1  # zero now means negative, as in PyG
    return labels


def _link_task(store: Store, key: RelationName, negatives: NegativeSampling | None, given: Given) -> LinkTask:
    if negatives is None:
        if given["strict_negatives"]:
            raise ConfigError("strict_negatives needs neg_sampling")
        return LinkTask(key)
    if given["strict_negatives"] and key not in store.schema.relation_index:
        raise ConfigError(f"strict_negatives looks for edges of {key}, which the graph does not have; leave it out")
    negatives = _checked_weights(store.schema, key, negatives)
    times = None if given["time_attr"] is None else NodeTimes(store)  # links have times: negatives must exist by then
    return make_link_task(key, negatives, strict=given["strict_negatives"], node_times=times)


def _checked_weights(schema: Schema, key: RelationName, negatives: NegativeSampling) -> NegativeSampling:
    weights = {
        name: inputs.read_weight(name, given, schema.node_type(end).num_nodes)
        for name, end in (("src_weight", key[0]), ("dst_weight", key[2]))
        if (given := getattr(negatives, name)) is not None
    }
    return NegativeSampling(negatives.mode, negatives.amount, **weights)
