"""Hoploom's sampling as a BaseSampler of PyG, for PyG's own NodeLoader and LinkLoader.

Batches depend on the seeds and on how many batches came before; PyG's loaders keep no position to resume from.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    NumNeighbors,
    SamplerOutput,
)
from torch_geometric.sampler import NeighborSampler as PygSampler
from torch_geometric.sampler.base import SubgraphType

from hoploom import keys
from hoploom.batch import Sampled
from hoploom.errors import ConfigError
from hoploom.load.arguments import AnyGraph, LinkArguments, NodeArguments, read_fanouts, read_input, shown_counts
from hoploom.load.maker import NodeTimes, Sampler, one_type_seeds
from hoploom.sample import Links, make_link_seeds, make_link_task
from hoploom.sample.hops import Fanouts, Mode, Subgraph, Temporal, make_sampling
from hoploom.schema import EDGE_ID, Owner
from hoploom.store import Store, Wanted
from hoploom.store.base import NOWHERE, Tier
from hoploom.store.from_pyg import PygGraph


class Calls:
    """Random keys for batches that PyG's own DataLoader asks for: it has no steps, so each call draws its own picks.

    Its worker processes are forked for every epoch, so the count of calls starts again in each. The worker's own seed
    tells them apart: torch draws a new one for every epoch, from torch.manual_seed.
    """

    def __init__(self, seed: int, store: Store) -> None:
        self._seed, self._numbers = seed, itertools.count()
        self._can_fork = store.deployment is NOWHERE and all(s.tier > Tier.REMOTE for s in store.shards)

    def key(self) -> int:
        """Return the random key of the next call."""
        worker, seed = get_worker_info(), self._seed
        if worker is not None:
            if not self._can_fork:
                raise ConfigError(
                    "a store on servers or on a GPU cannot be used in forked worker processes; "
                    "give num_workers=0 to PyG's loader, and num_workers= to Hoploom's own, whose workers are threads"
                )
            seed = keys.mix(seed, worker.seed)
        return keys.batch_key(seed, 0, next(self._numbers))


class NeighborSampler(BaseSampler):  # type: ignore[misc]  # PyG ships no types
    """PyG's sampler interface over Hoploom's core.

    >>> sampler = hoploom.NeighborSampler(data, num_neighbors=[15, 10])
    >>> loader = torch_geometric.loader.NodeLoader(data, node_sampler=sampler, batch_size=64)
    """

    def __init__(
        self,
        data: AnyGraph,
        num_neighbors: Fanouts | NumNeighbors,
        subgraph_type: Subgraph | SubgraphType = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: Temporal = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        is_sorted: bool = False,
        share_memory: bool = False,
        directed: bool = True,
        sample_direction: Literal["forward"] = "forward",
        *,
        seed: int = 0,
        labor: bool = False,
        mode: Mode = "subgraph",
    ) -> None:
        if sample_direction != "forward":
            raise ConfigError(f"sample_direction is {sample_direction!r:.80}; only 'forward' is there: leave it out")
        graph = read_input(data, weight_attr=weight_attr, time_attr=time_attr)
        store, schema = graph.store, graph.store.schema
        options: dict[str, Any] = {
            "replace": replace,
            "labor": labor,
            "disjoint": disjoint,
            "temporal_strategy": temporal_strategy,
            "time_attr": time_attr,
            "weight_attr": weight_attr,
            "subgraph_type": subgraph_type if directed else "induced",
            "mode": mode,
        }
        sampling = make_sampling(schema, read_fanouts(schema, num_neighbors), **options)
        self._data, self._graph, self._seed = data, graph, seed
        self._arguments = {**options, "num_neighbors": num_neighbors, "directed": True}
        self._store, self._schema = store, schema
        self._sampler = Sampler(store.graph, sampling)
        self._times = NodeTimes(store)
        self._calls = Calls(seed, store)

    def __repr__(self) -> str:
        return f"NeighborSampler(fanouts {shown_counts(self._schema, self._sampler.sampling)['fanouts']})"

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> SamplerOutput | HeteroSamplerOutput:
        """Sample for nodes; PyG's NodeLoader calls this."""
        node_type = index.input_type or self._schema.node_types[0].name
        times = index.time
        if times is None and self._sampler.sampling.temporal is not None and self._schema.time is not None:
            times = self._store.features.gather([Wanted(node_type, self._schema.time, index.node.to(torch.int64))])[
                0
            ].long()
        seeds = one_type_seeds(self._sampler, node_type, index.node.to(torch.int64).contiguous(), times, 0)
        out = self._output(self._sampler.sample(seeds, self._calls.key()))
        out.metadata = (index.input_id, index.time)
        return out

    def sample_from_edges(
        self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput | HeteroSamplerOutput:
        """Sample for links; PyG's LinkLoader calls this."""
        relation = index.input_type or self._schema.relations[0].key
        links = Links(index.row.to(torch.int64), index.col.to(torch.int64), index.label, index.time)
        key = self._calls.key()
        times = None if neg_sampling is None else self._times
        task = make_link_task(relation, neg_sampling, node_times=times)
        seeds = make_link_seeds(self._store.graph, links, task, key, disjoint=self._sampler.sampling.disjoint)
        sampled = self._sampler.sample(seeds.seeds, key)
        if sampled.trees is not None and seeds.link_of is not None:
            sampled.trees = [seeds.link_of[trees] for trees in sampled.trees]
        out = self._output(sampled)
        out.metadata = (index.input_id, *seeds.fields.values())
        return out

    def _output(self, sampled: Sampled) -> SamplerOutput | HeteroSamplerOutput:
        of_nodes: dict[str, Any] = {
            "node": sampled.nodes,
            "batch": sampled.trees,
            "num_sampled_nodes": sampled.num_nodes,
        }
        of_edges: dict[str, Any] = {
            "row": [edge_index[0] for edge_index in sampled.edge_index],
            "col": [edge_index[1] for edge_index in sampled.edge_index],
            "edge": self._edge_ids(sampled),
            "num_sampled_edges": sampled.num_edges,
        }
        if self._schema.homogeneous:
            first = {name: None if values is None else values[0] for name, values in (of_nodes | of_edges).items()}
            return SamplerOutput(**first)
        return HeteroSamplerOutput(
            **_named(self._schema.type_index, of_nodes), **_named(self._schema.relation_index, of_edges)
        )

    def _edge_ids(self, sampled: Sampled) -> list[Tensor | None]:
        """Return the user's own edge ids, so that PyG needs no permutation."""
        found: list[Tensor | None] = []
        for relation, edges in zip(self._schema.relations, sampled.edges, strict=True):
            if edges is None or EDGE_ID not in relation.fields:
                found.append(edges)
            else:
                found.append(self._store.features.gather([Wanted(relation.key, EDGE_ID, edges)])[0])
        return found

    @property
    def num_neighbors(self) -> Sequence[Sequence[int]]:
        """The fanouts of each hop; PyG's `model.inference` counts the hops."""
        return self._sampler.sampling.fanouts

    @property
    def edge_permutation(self) -> None:
        """None, because edge ids are your own ids already."""
        return None


GivenArguments = TypeVar("GivenArguments", NodeArguments, LinkArguments)


def given_sampler(given: GivenArguments) -> tuple[GivenArguments, PygGraph]:
    """Return a loader's arguments with those of its `neighbor_sampler`, which take precedence as in PyG; and the graph.

    Loaders that share a sampler of ours, and its data, share the sorted edges.
    """
    sampler, graph = given.neighbor_sampler, None
    if isinstance(sampler, NeighborSampler):
        for name, default in (("mode", "subgraph"), ("labor", False)):
            value = getattr(given, name)
            if value not in (default, sampler._arguments.get(name, default)):
                raise ConfigError(f"{name}={value!r} has no effect beside neighbor_sampler=; give it to the sampler")
        graph = sampler._graph if sampler._data is given.data else None
        seed = sampler._seed if given.seed is None and given.generator is None else given.seed
        given = replace(given, **sampler._arguments, seed=seed)
    elif sampler is not None:
        if type(sampler) is not PygSampler or sampler.sample_direction != "forward":
            raise ConfigError(
                f"neighbor_sampler is a {type(sampler).__name__}; give a NeighborSampler of hoploom or of PyG, which "
                "samples forward; for any other one there is PyG's NodeLoader(data, node_sampler=...)"
            )
        for name, found in (("time_attr", sampler.is_temporal), ("weight_attr", sampler.edge_weight is not None)):
            if found and getattr(given, name) is None:
                raise ConfigError(f"neighbor_sampler does not know the name of its {name}; give the loader {name}= too")
        names = ("num_neighbors", "replace", "subgraph_type", "disjoint", "temporal_strategy")
        given = replace(given, **{name: getattr(sampler, name) for name in names}, directed=True)
    return given, graph or read_input(given.data, weight_attr=given.weight_attr, time_attr=given.time_attr)


def _named(owners: Iterable[Owner], columns: Mapping[str, Sequence[Any] | None]) -> dict[str, dict[Owner, Any] | None]:
    """Return columns that are listed by node type or relation as dictionaries by its name."""
    return {name: None if of is None else dict(zip(owners, of, strict=True)) for name, of in columns.items()}
