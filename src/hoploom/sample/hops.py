"""Sampling options, and the one sampler of all stores, which works hop by hop: frontier -> picks -> local ids."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hoploom import keys, ops
from hoploom.batch import Block, Sampled, Seeds
from hoploom.config.values import as_fanouts, as_int
from hoploom.errors import ConfigError
from hoploom.ops import Frontier, NodeMap, Picks
from hoploom.sample.exclusions import opposite_relations
from hoploom.sample.layer_graph import EdgeData, LayerGraph, SampleFrontier, call_hook
from hoploom.schema import REVERSE, RelationName, Schema
from hoploom.store import Draw, GraphStore

Subgraph = Literal["directional", "bidirectional", "induced"]
Temporal = Literal["uniform", "last"]
Mode = Literal["subgraph", "blocks"]
Fanouts = Sequence[int] | Mapping[RelationName, Sequence[int]]
NumSamples = Sequence[int] | Mapping[str, Sequence[int]]
NEIGHBORS_READ = 50  # in-edges sampled per node and relation for HGT's budgets, as in PyG's sampler


@dataclass(frozen=True)
class Sampling:
    """The options of sampling. Together with the store, the seeds and the random key, they determine a batch."""

    fanouts: tuple[tuple[int, ...], ...]  # [hop][relation]; -1: all
    replace: bool = False
    weighted: bool = False
    labor: bool = False
    disjoint: bool = False
    temporal: Temporal | None = None
    subgraph: Subgraph = "directional"
    mode: Mode = "subgraph"
    num_samples: tuple[tuple[int, ...], ...] = ()  # [layer][node type]: nodes drawn by budget, as in HGT
    window: int = -1  # temporal: the greatest age of an edge at its seed's time; -1: any
    strictly_before: bool = False  # temporal: an edge at the very time of its seed is too late

    @property
    def num_hops(self) -> int:
        return len(self.fanouts)

    @property
    def greatest_age(self) -> int:
        """The window, counted from the last time that is not too late; -1: any age."""
        return self.window - (self.strictly_before and self.window > 0)


def resolve_fanouts(schema: Schema, num_neighbors: Fanouts) -> tuple[tuple[int, ...], ...]:
    """Return the fanouts as [hop][relation]; raise ConfigError if there is no hop."""
    hops = _resolved(schema, num_neighbors)
    if not hops:
        raise ConfigError("fanouts are empty; give one per layer, e.g. [15, 10, 5]")
    return hops


def _resolved(schema: Schema, num_neighbors: Fanouts) -> tuple[tuple[int, ...], ...]:
    if not isinstance(num_neighbors, Mapping):
        return tuple((fanout,) * len(schema.relations) for fanout in as_fanouts(num_neighbors))
    unknown = [key for key in num_neighbors if key not in schema.relation_index]
    if unknown:
        raise ConfigError(f"fanouts name {unknown[0]!r}; the relations are {list(schema.relation_index)}")
    by_relation = {key: as_fanouts(hops) for key, hops in num_neighbors.items()}
    lengths = {len(hops) for hops in by_relation.values()}
    if len(lengths) > 1:
        raise ConfigError(
            f"fanouts have {sorted(lengths)} entries; the number of hops must be the same across all relations"
        )
    missing = [key for key in schema.relation_index if key not in by_relation]
    if missing:
        raise ConfigError(f"fanouts leave out {missing[0]!r}; give it a list too, [0, ...] to skip it")
    return tuple(zip(*(by_relation[key] for key in schema.relation_index), strict=True))


def make_sampling(
    schema: Schema,
    num_neighbors: Fanouts,
    *,
    replace: bool = False,
    labor: bool = False,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    time_attr: str | None = None,
    weight_attr: str | None = None,
    subgraph_type: str = "directional",
    mode: str = "subgraph",
    window: int = -1,
    strictly_before: bool = False,
) -> Sampling:
    """Return the sampling options of a loader, checked against each other and against the graph."""
    subgraph = _choice("subgraph_type", subgraph_type, Subgraph.__args__)  # type: ignore[attr-defined]
    _choice("mode", mode, Mode.__args__)  # type: ignore[attr-defined]
    temporal = _choice("temporal_strategy", temporal_strategy, Temporal.__args__)  # type: ignore[attr-defined]
    _check_attr("weight_attr", weight_attr, schema.weight)
    _check_attr("time_attr", time_attr, schema.time)
    sampling = Sampling(
        _resolved(schema, num_neighbors),
        replace=replace,
        weighted=weight_attr is not None,
        labor=labor,
        disjoint=disjoint or time_attr is not None,
        temporal=temporal if time_attr is not None else None,  # type: ignore[arg-type]
        subgraph=subgraph,  # type: ignore[arg-type]
        mode=mode,  # type: ignore[arg-type]
        window=window,
        strictly_before=strictly_before,
    )
    for name, is_given in (("time_window", window >= 0), ("strictly_before", strictly_before)):
        if is_given and time_attr is None:
            raise ConfigError(f"{name} is set while 'time_attr' is not set; name the time attribute")
    if window == 0 and strictly_before:
        raise ConfigError("time_window=0 and strictly_before leave out all edges; give a longer window, or drop one")
    if sampling.mode == "blocks" and not sampling.num_hops:
        raise ConfigError("fanouts are empty, but mode='blocks' needs layers; give one per layer, e.g. [15, 10, 5]")
    if sampling.subgraph != "directional" and sampling.mode == "blocks":
        raise ConfigError(f"mode='blocks' has no subgraph_type={sampling.subgraph!r}; leave it out")
    if sampling.weighted and sampling.temporal == "last":
        raise ConfigError("temporal_strategy='last' draws nothing, weight_attr has no effect; drop one of the two")
    if labor and (sampling.replace or sampling.weighted or sampling.disjoint):
        raise ConfigError("labor=True cannot be combined with replace, weights, disjoint or time; drop one of them")
    return sampling


def make_hgt_sampling(schema: Schema, num_samples: NumSamples) -> Sampling:
    """Return the sampling options of HGT, with the checked numbers of nodes to draw per layer and node type."""
    if schema.homogeneous:
        raise ConfigError("HGTLoader draws nodes by their type, but this graph has one; use NeighborLoader")
    names = list(schema.type_index)
    by_type = num_samples if isinstance(num_samples, Mapping) else dict.fromkeys(names, num_samples)
    if unknown := [name for name in by_type if name not in schema.type_index]:
        raise ConfigError(f"num_samples names {unknown[0]!r}; the node types are {names}")
    if missing := [name for name in names if name not in by_type]:
        raise ConfigError(f"num_samples leaves out {missing[0]!r}; give it a list too, [0, ...] to draw none")
    by_type = {name: _counts(name, counts) for name, counts in by_type.items()}
    lengths = {len(counts) for counts in by_type.values()}
    if len(lengths) > 1 or lengths == {0}:
        raise ConfigError(f"num_samples has {sorted(lengths)} entries; give every node type one count per layer")
    layers = tuple(zip(*(by_type[name] for name in names), strict=True))
    return Sampling((), subgraph="induced", num_samples=layers)


def _counts(name: str, given: object) -> tuple[int, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"num_samples of {name!r} is {given!r:.80}; give one count per layer, e.g. [512, 512]")
    return tuple(as_int(f"num_samples of {name!r}", count, 0, "give a count of nodes") for count in given)


def _choice(name: str, value: object, allowed: Sequence[str]) -> str:
    value = getattr(value, "value", value)  # PyG's enums have their word in .value
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; choose one of {list(allowed)}")
    return str(value)


def _check_attr(name: str, wanted: str | None, prepared: str | None) -> None:
    if wanted is not None and wanted != prepared:
        built = f"without {name}" if prepared is None else f"with {prepared!r}"
        raise ConfigError(f"{name} is {wanted!r}, but the store was built {built}; build it with {name}={wanted!r}")


# --- the hop loop ---------------------------------------------------------------------------


class Workspace:
    """The maps from node ids to a batch's local ids, by node type; reused for later batches, one thread at a time."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.maps = [NodeMap(node_type.num_nodes) for node_type in schema.node_types]

    def begin(self, seeds: Seeds) -> None:
        """Start a batch: clear the maps and add the seeds, which get the first local ids."""
        for node_map, nodes, trees in zip(self.maps, seeds.nodes, seeds.trees, strict=True):
            node_map.clear()
            if nodes is not None:
                node_map.add_seeds(nodes, trees)


class HopEdges:
    """The edges of one relation, collected hop by hop."""

    def __init__(self) -> None:
        self._hops: list[tuple[Tensor, Tensor, int]] = []  # local sources, counts, first destination
        self._edges: list[Tensor] = []

    def add(self, local: Tensor, picks: Picks, first: int) -> None:
        self._hops.append((local, picks.counts, first))
        self._edges.append(picks.edges)

    def edge_index(self) -> Tensor:
        """Return all edges in local ids, in the order in which they were picked: [2, e] int64."""
        total = sum(local.numel() for local, _, _ in self._hops)
        out = ops.empty((2, total), torch.int64)
        offset = 0
        for local, counts, first in self._hops:
            ops.fill_edges(local, counts, first, offset, out)
            offset += local.numel()
        return out

    def edges(self) -> Tensor:
        """Return the positions of the edges in the store, [e] int64; -1 for unknown ones."""
        return ops.joined(self._edges)


def make_draw(sampling: Sampling, key: int, hop: int) -> Draw:
    last = sampling.temporal == "last"
    flags = sampling.replace, last, sampling.labor, sampling.weighted
    return Draw(key, hop, sampling.fanouts[hop], *flags, window=sampling.greatest_age)


def frontier_of(node_map: NodeMap, begin: int, seeds: Seeds, disjoint: bool) -> Frontier | None:
    """Return the nodes with local ids from `begin` on as a frontier (nodes to sample for); None if there are none."""
    if len(node_map) == begin:
        return None
    nodes = node_map.nodes(begin)
    if not disjoint:
        return Frontier(nodes)
    trees = node_map.trees(begin)
    times = None if seeds.times is None else seeds.times[trees - seeds.first_tree]
    return Frontier(nodes, trees, times)


def sample_hops(
    graph: GraphStore,
    workspace: Workspace,
    seeds: Seeds,
    sampling: Sampling,
    key: int,
    sample_frontier: SampleFrontier | None = None,
) -> Sampled:
    """Sample a subgraph, where each node is expanded once, or a block per layer, input first, in order of discovery."""
    schema, maps, in_blocks = graph.schema, workspace.maps, sampling.mode == "blocks"
    workspace.begin(seeds)
    if sampling.num_samples:
        _add_by_budget(graph, maps, seeds, sampling.num_samples, key)
    hop_edges = [HopEdges() for _ in schema.relations]
    num_nodes = [[len(node_map)] for node_map in maps]
    num_edges: list[list[int]] = [[] for _ in schema.relations]
    blocks: list[Block] = []
    begins = [0] * len(maps)
    for hop in range(sampling.num_hops):
        frontiers = [frontier_of(m, begin, seeds, sampling.disjoint) for m, begin in zip(maps, begins, strict=True)]
        ends = [len(node_map) for node_map in maps]
        data: Mapping[RelationName, EdgeData] = {}
        if sample_frontier is None:
            answers = graph.sample(frontiers, make_draw(sampling, key, hop))
        else:
            layer_graph = LayerGraph(graph, key, hop, sampling.fanouts[hop])
            answers, data = call_hook(sample_frontier, layer_graph, frontiers)
        for relation, picks in enumerate(answers):
            source, destination = schema.sources[relation], schema.destinations[relation]
            frontier = frontiers[destination]
            num_edges[relation].append(0 if picks is None else picks.sources.numel())
            if picks is not None and frontier is not None:
                local = maps[source].add(picks.sources, picks.counts, frontier.trees)
                hop_edges[relation].add(local, picks, begins[destination])
        for node_map, end, counts in zip(maps, ends, num_nodes, strict=True):
            counts.append(len(node_map) - end)
        if in_blocks:
            blocks.insert(0, _block(schema, hop_edges, maps, ends, data))
            hop_edges = [HopEdges() for _ in schema.relations]
        else:
            begins = ends
    trees = [node_map.trees() - seeds.first_tree for node_map in maps] if sampling.disjoint else None
    if sampling.subgraph == "induced":
        frontiers = [frontier_of(node_map, 0, seeds, sampling.disjoint) for node_map in maps]
        return _induced(graph, workspace, frontiers, trees, sampling.greatest_age)
    nodes = [node_map.take() for node_map in maps]
    if in_blocks:
        return Sampled(nodes, trees, [], [], None, None, blocks)
    edges: list[Tensor | None] = [one.edges() for one in hop_edges]
    return Sampled(nodes, trees, [one.edge_index() for one in hop_edges], edges, num_nodes, num_edges)


def _add_by_budget(
    graph: GraphStore, maps: Sequence[NodeMap], seeds: Seeds, num_samples: Sequence[Sequence[int]], key: int
) -> None:
    """Draw nodes of every type for each layer, as HGT does, with probability proportional to budget squared.

    A node's budget is the sum of 1 / in-degree of the batch's nodes it points to.
    """
    schema, budgets, begins = graph.schema, [ops.NodeBudget() for _ in maps], [0] * len(maps)
    for layer, counts in enumerate(num_samples):
        frontiers = [frontier_of(m, begin, seeds, disjoint=False) for m, begin in zip(maps, begins, strict=True)]
        begins = [len(node_map) for node_map in maps]
        answers = graph.sample(frontiers, Draw(key, layer, [NEIGHBORS_READ] * len(schema.relations)))
        for source, picks in zip(schema.sources, answers, strict=True):
            if picks is not None:
                budgets[source].add(picks, maps[source].find(picks.sources))
        for index, node_type in enumerate(schema.node_types):
            count = min(counts[index], node_type.num_nodes)
            drawn = budgets[index].draw(keys.mix(key, keys.BUDGET), keys.stream(layer, index), count)
            maps[index].add_seeds(drawn)


def _block(
    schema: Schema,
    edges: Sequence[HopEdges],
    maps: Sequence[NodeMap],
    ends: Sequence[int],
    data: Mapping[RelationName, EdgeData],
) -> Block:
    """Return one layer's block. Sources are all nodes so far; destinations are the first ends[t] nodes of type t."""
    names = [node_type.name for node_type in schema.node_types]
    keys = [relation.key for relation in schema.relations]
    positions = {key: one.edges() for key, one in zip(keys, edges, strict=True)}
    return Block(
        {key: one.edge_index() for key, one in zip(keys, edges, strict=True)},
        {key: None if known.numel() and int(known.min()) < 0 else known for key, known in positions.items()},
        {name: len(node_map) for name, node_map in zip(names, maps, strict=True)},
        dict(zip(names, ends, strict=True)),
        data,
    )


def _induced(
    graph: GraphStore,
    workspace: Workspace,
    frontiers: Sequence[Frontier | None],
    trees: list[Tensor] | None,
    window: int,
) -> Sampled:
    """Return all edges between the batch's nodes (if disjoint: of one tree), up to the seed time if temporal."""
    schema, maps = graph.schema, workspace.maps
    answers = graph.sample(frontiers, Draw(0, 0, [-1] * len(schema.relations), window=window))
    edge_index, edges = [], []
    for relation, picks in enumerate(answers):
        frontier = frontiers[schema.destinations[relation]]
        if picks is None or frontier is None:
            edge_index.append(torch.empty(2, 0, dtype=torch.int64))
            edges.append(torch.empty(0, dtype=torch.int64))
            continue
        of_tree = None if frontier.trees is None else frontier.trees.repeat_interleave(picks.counts)
        local = maps[schema.sources[relation]].find(picks.sources, of_tree)
        all_edges = ops.empty((2, local.numel()), torch.int64)
        ops.fill_edges(local, picks.counts, 0, 0, all_edges)
        inside = torch.nonzero(local >= 0).view(-1)
        edge_index.append(all_edges[:, inside])
        edges.append(picks.edges[inside])
    nodes = [node_map.take() for node_map in maps]
    return Sampled(nodes, trees, edge_index, list(edges), None, None)


def make_bidirectional(sampled: Sampled, schema: Schema) -> Sampled:
    """Return the subgraph with all reverse edges added, without duplicates, sorted by destination, then by source."""
    edge_index, edges = list(sampled.edge_index), list(sampled.edges)
    for index, relation in enumerate(schema.relations):
        if not schema.homogeneous and relation.name.startswith(REVERSE):
            continue
        found = opposite_relations(schema, index)
        if index not in found and len(found) != 1:
            warnings.warn(f"relation {relation.key} has no reverse; its edges stay directional", stacklevel=2)
            continue
        back = index if index in found else found[0]
        ends = torch.cat([sampled.edge_index[index], sampled.edge_index[back].flip(0)], dim=1)
        order_key = ends[1] * max(1, sampled.nodes[schema.sources[index]].numel()) + ends[0]
        order = torch.argsort(order_key, stable=True)
        ascending = order_key[order]
        first = torch.ones_like(ascending, dtype=torch.bool)
        first[1:] = ascending[1:] != ascending[:-1]
        kept = order[first]
        merged, own, reverse = ends[:, kept].contiguous(), sampled.edges[index], sampled.edges[back]
        edge_index[index] = merged
        edges[index] = None
        if schema.homogeneous and own is not None and reverse is not None:  # another relation's edge has no id here
            edges[index] = torch.cat([own, reverse])[kept]
        if schema.relations[back].name == REVERSE + relation.name:
            edge_index[back], edges[back] = merged.flip(0), None
    return Sampled(sampled.nodes, sampled.trees, edge_index, edges, None, None)
