"""Custom sampling: the graph that a `sample_frontier` hook gets, the edges that it returns, and checks of these.

All random numbers derive from the step, the layer and the number of the call, so a batch does not depend on the process
that makes it. A number drawn for an id depends on that id; numbers drawn by count or shape are equal on all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoploom import keys, ops
from hoploom.config.values import as_fanouts, as_int, as_number
from hoploom.errors import ConfigError
from hoploom.ops import Frontier, Picks
from hoploom.sample.exclusions import runs
from hoploom.schema import ID_DTYPES, Relation, RelationName, Schema, read_ids
from hoploom.store import Draw, GraphStore
from hoploom.store.base import NO_IDS, in_edges


@dataclass(frozen=True)
class Edges:
    """Edges that lead to the seeds of a layer, in ids of the whole graph. A `sample_frontier` hook returns them.

    >>> found = graph.in_edges(seeds)
    >>> return found[found.sources != found.destinations]
    """

    sources: Tensor  # [e] int64
    destinations: Tensor  # [e] int64, each of them one of the seeds
    positions: Tensor | None = None  # [e] int64 positions in the store; None if unknown
    data: Mapping[str, Tensor] | None = None  # rows [e, ...], copied to block.data[name]

    def __getitem__(self, chosen: Tensor) -> "Edges":
        """Return some of the edges, by a mask or by indices."""
        return Edges(
            self.sources[chosen],
            self.destinations[chosen],
            None if self.positions is None else self.positions[chosen],
            None if self.data is None else {name: rows[chosen] for name, rows in self.data.items()},
        )

    def top(self, scores: Tensor, most: int) -> "Edges":
        """Return, for each destination, its `most` edges with the highest scores, highest first; -1 returns all edges.

        Edges with equal scores keep their order.
        """
        most, num_edges = as_int("most", most, -1, "give a count, or -1 for all edges"), len(self.destinations)
        if not isinstance(scores, Tensor):
            raise ConfigError(f"scores are {_kind(scores)}; give a tensor of one score per edge")
        if scores.shape != (num_edges,):
            raise ConfigError(f"scores have shape {tuple(scores.shape)} for {num_edges} edges; give one per edge")
        return self[top_of_each(self.destinations, scores, num_edges if most < 0 else most)]


HookEdges = Edges | Mapping[RelationName, Edges]
Nodes = Tensor | Mapping[str, Tensor]  # ids; by node type for heterogeneous graphs
Fanout = int | Mapping[RelationName, int]
Size = int | Sequence[int] | Tensor  # a count, a shape, or the ids to draw for


class Layer(int):
    """The number of a layer, counted from the seeds (0). Its `fanout` is the layer's entry of `num_neighbors`.

    >>> def sample_frontier(layer, graph, seeds):
    ...     return graph.sample_neighbors(seeds, layer.fanout)
    """

    fanout: Fanout  # by relation for heterogeneous graphs

    def __new__(cls, number: int, fanout: Fanout) -> "Layer":
        layer = super().__new__(cls, number)
        layer.fanout = fanout
        return layer


class LayerGraph:
    """The graph that a frontier hook samples from, with the random numbers of one layer.

    >>> def sample_frontier(layer, graph, seeds):
    ...     return graph.sample_neighbors(seeds, layer.fanout)
    """

    def __init__(self, graph: GraphStore, key: int, layer: int, fanouts: Sequence[int]) -> None:
        self.schema = graph.schema
        by_relation = dict(zip((relation.key for relation in graph.schema.relations), fanouts, strict=True))
        self.layer = Layer(layer, fanouts[0] if graph.schema.homogeneous else by_relation)
        self._graph, self._key = graph, key
        self._calls = count()

    @property
    def epoch(self) -> int:
        return self._key.epoch if isinstance(self._key, keys.BatchKey) else -1

    @property
    def step(self) -> int:
        """The step within the epoch; -1 for a batch made by `loader([0, 1, 2])`."""
        return self._key.step if isinstance(self._key, keys.BatchKey) else -1

    @property
    def fanout(self) -> Fanout:
        """The layer's fanout."""
        return self.layer.fanout

    def sample_neighbors(
        self,
        seeds: Nodes,
        fanout: Fanout,
        *,
        replace: bool = False,
        labor: bool = False,
        weighted: bool = False,
        independent: bool = False,
    ) -> HookEdges:
        """Sample in-edges as the built-in sampler does; fanout -1 returns all.

        Without `independent`, a node has the same picks in every call of a layer. With it, every call draws anew, and
        each repetition of a node within a call has its own picks.
        """
        if labor and (replace or weighted or independent):
            raise ConfigError("labor=True cannot be combined with replace, weighted or independent; drop one of them")
        if weighted and self.schema.weight is None:
            raise ConfigError("weighted=True needs a store built with weight_attr; leave it out")
        if isinstance(fanout, Mapping):
            for key in fanout:
                self.schema.relation(key)
            fanouts = as_fanouts(fanout.get(relation.key, 0) for relation in self.schema.relations)
        else:
            fanouts = as_fanouts([fanout] * len(self.schema.relations))
        given = seeds if isinstance(seeds, Mapping) else {self.schema.node_types[0].name: seeds}
        by_type = {name: self._ids(f"seeds of {name!r}", name, nodes) for name, nodes in given.items()}
        trees = {name: apart(nodes) if independent else None for name, nodes in by_type.items()}
        names = [t.name for t in self.schema.node_types]
        frontiers = [Frontier(by_type[name], trees[name]) if name in by_type else None for name in names]
        drawn_from = self._own_key() if independent else self._key
        draw = Draw(drawn_from, self.layer, fanouts, replace, False, labor, weighted)
        found = {}
        for relation, picks in zip(self.schema.relations, self._graph.sample(frontiers, draw), strict=True):
            if picks is not None:
                destinations = torch.repeat_interleave(by_type[relation.destination], picks.counts)
                found[relation.key] = Edges(picks.sources, destinations, picks.edges)
        if not self.schema.homogeneous:
            return found
        return next(iter(found.values()), Edges(NO_IDS, NO_IDS, NO_IDS))

    def in_edges(self, seeds: Nodes) -> HookEdges:
        """Return all in-edges of the seeds."""
        return self.sample_neighbors(seeds, -1)

    def in_degrees(self, nodes: Tensor, relation: RelationName | None = None) -> Tensor:
        """Return the in-degree of each node in a relation, self-loops included: [n] int64. Reads no edges."""
        index = relation_index(self.schema, "relation", relation)
        nodes = self._ids("nodes", self.schema.relations[index].destination, nodes)
        return in_edges(self._graph, index, nodes, counts_only=True).counts

    def uniform(self, size: Size) -> Tensor:
        """Return float32 numbers in (0, 1). `size` is a count, a shape, or a tensor of ids, which get one number each.

        >>> order = torch.argsort(graph.uniform(found.positions))  # a shuffle that is equal on every rank
        """
        ids, shape = _numbered(size)
        words = ops.draw_words(self._own_key(), ids, 0).numpy()[:, 0]
        return torch.from_numpy((words >> 9) + 0.5).mul_(2.0**-23).to(torch.float32).view(shape)

    def integers(self, high: int, size: Size) -> Tensor:
        """Return int64 numbers in [0, high). `size` is a count, a shape, or a tensor of ids, each of which gets one."""
        high = as_int("high", high, 1, "give at least 1")
        ids, shape = _numbered(size)
        return ops.draw_bounded(self._own_key(), ids, 0, 0, high).view(shape)

    def generator(self) -> torch.Generator:
        """Return a generator for torch, equal on all ranks: `torch.multinomial(p, 10, generator=graph.generator())`."""
        return torch.Generator().manual_seed(self._own_key() >> 1)

    def walk(
        self, starts: Tensor, length: int, *, restart: float = 0.0, path: Sequence[RelationName] | None = None
    ) -> Tensor:
        """Return random walks [n, length + 1] int64 against the direction of edges; -1 after a node without in-edges.

        Each step goes to the source of a uniformly drawn in-edge. Walks are independent, also from equal starts.
        `path` names the relations of the steps, repeated as needed; the first one leads to the starts' type. Before
        each repetition of the path, a walk returns to its start with probability `restart`.
        """
        steps = read_path(self.schema, path, length, restart)
        ids = self._ids("starts", self.schema.relations[steps[0]].destination, starts)
        return walk(self._graph, self._own_key(), steps, ids, length, restart)

    def most_visited(
        self,
        seeds: Tensor,
        fanout: int,
        *,
        num_walks: int,
        length: int,
        restart: float = 0.0,
        path: Sequence[RelationName] | None = None,
    ) -> Edges:
        """Return PinSAGE's neighbours: for each seed, the `fanout` nodes that its random walks visit most often.

        A walk visits a node if a repetition of the path ends there; the seed itself does not count. The edges' `data`
        has "visits", the counts, and "weight", their shares: the weights of a seed sum to one.
        """
        num_walks = as_int("num_walks", num_walks, 1, "give at least 1")
        fanout = as_int("fanout", fanout, 0, "give a count of neighbours")
        steps = read_path(self.schema, path, length, restart)
        first, last = (self.schema.relations[steps[place]] for place in (0, -1))
        seeds = self._ids("seeds", first.destination, seeds)
        starts = torch.repeat_interleave(seeds, num_walks)
        trace = walk(self._graph, self._own_key(), steps, starts, length, restart)
        ends = trace[:, len(steps) :: len(steps)]
        visited = ends.reshape(seeds.numel(), num_walks * ends.shape[1])
        if last.source == first.destination:  # else an equal id is another node
            visited = visited.masked_fill(visited == seeds.view(-1, 1), -1)
        owners, nodes, visits = most_visited(visited, self.schema.node_type(last.source).num_nodes, fanout)
        total = torch.zeros_like(seeds).index_add_(0, owners, visits)
        return Edges(nodes, seeds[owners], None, {"visits": visits, "weight": visits / total[owners]})

    def _own_key(self) -> int:
        """Return a new random key, for the random numbers of one call."""
        return keys.mix(keys.mix(keys.mix(self._key, keys.HOOK), self.layer), next(self._calls))

    def _ids(self, what: str, node_type: str, nodes: Tensor) -> Tensor:
        if not isinstance(nodes, Tensor):
            raise ConfigError(f"{what} are {_kind(nodes)}; give a tensor of ids of {node_type!r}")
        return read_ids(what, nodes.cpu(), self.schema.node_type(node_type).num_nodes, ConfigError)


def _numbered(size: Size) -> tuple[Tensor, tuple[int, ...]]:
    """Return a distinct integer for each random number to be derived, and the shape of the random numbers."""
    if isinstance(size, Tensor):
        if size.dim() != 1 or size.is_floating_point() or size.dtype == torch.bool:
            raise ConfigError(f"ids have dtype {size.dtype} and shape {tuple(size.shape)}; give a list of integer ids")
        return apart(size.to("cpu", torch.int64).contiguous()), tuple(size.shape)
    shape = tuple(size) if isinstance(size, list | tuple) else (size,)
    shape = tuple(as_int("a size", extent, 0, "give a count, a shape, or a tensor of ids") for extent in shape)
    return torch.arange(prod(shape)), shape


def _kind(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


# --- random walks through GraphStore.sample, one pick per walk and step: equal on every store -----


def apart(ids: Tensor) -> Tensor:
    """Return the ids with repetitions replaced by other numbers: the second 7 always becomes the same number."""
    ordered, order = torch.sort(ids, stable=True)
    nth = torch.arange(ids.numel()) - torch.searchsorted(ordered, ordered)
    again = nth > 0
    if not again.any():
        return ids
    out = ids.clone()
    words = ops.draw_words(0, ordered[again], 0)[:, :2].contiguous()
    out[order[again]] = words.view(torch.int64).view(-1) + nth[again]
    return out


def relation_index(schema: Schema, what: str, relation: RelationName | None) -> int:
    """Return the index of a relation. None means the only relation of the graph; raise an error if it has several."""
    if relation is None and len(schema.relations) > 1:
        raise ConfigError(f"{what} is missing; choose from {list(schema.relation_index)}")
    return 0 if relation is None else schema.relation_index[schema.relation(relation).key]


def read_path(schema: Schema, path: Sequence[RelationName] | None, length: int, restart: float) -> list[int]:
    """Check a random walk's path, `length` and `restart`; return the relation index of each step of the path."""
    as_int("length", length, 0, "give a count of steps")
    way_out = "give a probability, from 0 to 1"
    if as_number("restart", restart, way_out) > 1:
        raise ConfigError(f"restart is {restart!r}; {way_out}")
    if path is None:
        path = [schema.relations[relation_index(schema, "path", None)].key]
    if not path or not isinstance(path, list | tuple):
        what = "empty" if isinstance(path, list | tuple) else f"{path!r:.80}"
        raise ConfigError(f"path is {what}; give a list of relations, from {list(schema.relation_index)}")
    steps = [relation_index(schema, "path", name) for name in path]
    for number in range(1, len(path) + (length > len(path))):
        before, after = schema.relations[steps[number - 1]], schema.relations[steps[number % len(path)]]
        if before.source != after.destination:
            raise ConfigError(
                f"path has {after.key} after {before.key}, which leads a walk to {before.source!r}; walks go from "
                "an edge's destination to its source, so name a relation with that destination"
            )
    return steps


def walk(graph: GraphStore, key: int, steps: Sequence[int], starts: Tensor, length: int, restart: float) -> Tensor:
    """Return random walks against edges: [n, length + 1] int64, -1 after the end. Relations `steps` take turns."""
    schema, walkers = graph.schema, apart(starts)
    trace = torch.full((length + 1, starts.numel()), -1)
    trace[0] = starts
    for step in range(length):
        relation = steps[step % len(steps)]
        step_key, at = keys.mix(key, step), trace[step]
        if restart and step % len(steps) == 0:
            bound = 1 << 53
            is_back = ops.draw_bounded(step_key, walkers, 1, 0, bound) < int(restart * bound)
            at = torch.where(is_back & (at >= 0), starts, at)
        walking = at >= 0
        whole = bool(walking.all())
        nodes, trees = (at, walkers) if whole else (at[walking], walkers[walking])
        if not nodes.numel():
            break
        frontiers: list[Frontier | None] = [None] * len(schema.node_types)
        frontiers[schema.destinations[relation]] = Frontier(nodes, trees)
        fanouts = [int(other == relation) for other in range(len(schema.relations))]
        picks = graph.sample(frontiers, Draw(step_key, 0, fanouts, replace=True))[relation]
        if picks is None:
            break
        walking[walking.clone()] = picks.counts > 0
        trace[step + 1, walking] = picks.sources
    return trace.t().contiguous()


def top_of_each(owners: Tensor, scores: Tensor, most: int) -> Tensor:
    """Return, for each distinct owner, the indices of its `most` highest scores, highest first; sorted by owner."""
    order = torch.argsort(scores, descending=True, stable=True)
    order = order[torch.argsort(owners[order], stable=True)]
    grouped = owners[order]
    return order[torch.arange(grouped.numel()) - torch.searchsorted(grouped, grouped) < most]


def most_visited(visited: Tensor, num_nodes: int, fanout: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `fanout` most frequent nodes of each row as rows, nodes, counts, by row, falling count, then id."""
    owners, nodes = torch.arange(visited.shape[0]).repeat_interleave(visited.shape[1]), visited.reshape(-1)
    counts_as = nodes >= 0
    pairs, visits = torch.unique(owners[counts_as] * num_nodes + nodes[counts_as], return_counts=True)
    order = top_of_each(pairs // num_nodes, visits, fanout)
    return pairs[order] // num_nodes, pairs[order] % num_nodes, visits[order]


# --- the call of a hook: its edges are checked, and messages name the layer ------------------------

SampleFrontier = Callable[[Layer, LayerGraph, Nodes], HookEdges]
EdgeData = Mapping[str, Tensor]  # rows by name, one per edge


class Answer(NamedTuple):
    """The edges that a hook returned for one layer, as picks by relation, and the edge data with them."""

    picks: list[Picks | None]
    data: dict[RelationName, EdgeData]


def call_hook(hook: SampleFrontier, graph: LayerGraph, frontiers: Sequence[Frontier | None]) -> Answer:
    """Call the hook for a layer's frontiers and return its checked edges."""
    schema, answer = graph.schema, Answer([], {})
    seeds = {
        t.name: LayerSeeds.of(NO_IDS if frontier is None else frontier.nodes)
        for t, frontier in zip(schema.node_types, frontiers, strict=True)
    }
    distinct = {name: own.distinct for name, own in seeds.items()}
    shown = distinct[schema.node_types[0].name] if schema.homogeneous else distinct
    who = f"sample_frontier, at layer {graph.layer},"
    given = _by_relation(hook(graph.layer, graph, shown), schema, who)
    for relation in schema.relations:
        edges = given.get(relation.key)
        if edges is None:
            answer.picks.append(None)
            continue
        of_relation = who if schema.homogeneous else f"{who} for {relation.key}"
        edges = _checked(edges, relation, schema, of_relation)
        counts, places = seeds[relation.destination].grouped(edges.destinations, of_relation)
        edges = edges if places is None else edges[places]
        positions = torch.full_like(edges.sources, -1) if edges.positions is None else edges.positions
        answer.picks.append(Picks(counts, edges.sources, positions))
        if edges.data is not None:
            answer.data[relation.key] = edges.data
    return answer


@dataclass(frozen=True)
class LayerSeeds:
    """The seeds of one type in a layer, with and without repetitions."""

    distinct: Tensor  # [n] int64: each once, in order of first sight
    ascending: Tensor  # [n] int64: `distinct`, sorted
    order: Tensor  # [n] int64: ascending[i] is distinct[order[i]]
    repeats: Tensor | None  # [seeds] int64: the index in `distinct` of each seed; None if all are distinct

    @staticmethod
    def of(nodes: Tensor) -> "LayerSeeds":
        ascending, inverse = torch.unique(nodes, return_inverse=True)
        places = torch.arange(nodes.numel())
        first = torch.full_like(ascending, nodes.numel()).scatter_reduce(0, inverse, places, "amin")
        if ascending.numel() == nodes.numel():
            return LayerSeeds(nodes, ascending, first, None)
        in_order, by_sight = torch.sort(first)
        order = torch.empty_like(by_sight).scatter_(0, by_sight, torch.arange(by_sight.numel()))
        return LayerSeeds(nodes[in_order], ascending, order, order[inverse])

    def grouped(self, destinations: Tensor, who: str) -> tuple[Tensor, Tensor | None]:
        """Return the number of edges of each seed, and the indices that sort edges by seed (None if sorted).

        A repeated seed gets the same edges; `who` names the hook in errors.
        """
        given, run_of_edge, lengths = torch.unique_consecutive(destinations, return_inverse=True, return_counts=True)
        at = torch.searchsorted(self.ascending, given).clamp_(max=max(0, self.ascending.numel() - 1))
        strangers = given if not self.ascending.numel() else given[self.ascending[at] != given]
        if strangers.numel():
            raise ConfigError(f"{who} gave an edge to {int(strangers[0])}, which is no seed of the layer; leave it out")
        seed_of_run = self.order[at]
        counts = torch.zeros_like(self.distinct).index_add_(0, seed_of_run, lengths)
        places = (
            None if (seed_of_run[1:] > seed_of_run[:-1]).all() else torch.argsort(seed_of_run[run_of_edge], stable=True)
        )
        if self.repeats is None:
            return counts, places
        begins, counts = (torch.cumsum(counts, 0) - counts)[self.repeats], counts[self.repeats]
        repeated = runs(begins, begins + counts)
        return counts, repeated if places is None else places[repeated]


# --- what is checked ------------------------------------------------------------------------


def _by_relation(answer: Any, schema: Schema, who: str) -> Mapping[RelationName, Edges]:
    """Return the result of a hook as Edges by relation; raise ConfigError for any other result."""
    if isinstance(answer, Edges):
        if len(schema.relations) > 1:
            raise ConfigError(
                f"{who} returned Edges of no relation; return a mapping, from {list(schema.relation_index)}"
            )
        return {schema.relations[0].key: answer}
    if not isinstance(answer, Mapping):
        what = "hoploom.Edges" if len(schema.relations) == 1 else "a mapping from relations to hoploom.Edges"
        raise ConfigError(f"{who} returned {_shown(answer)}; return {what}, also where there are none")
    for key, edges in answer.items():
        if key not in schema.relation_index:
            raise ConfigError(f"{who} returned edges of {key!r:.200}; the relations are {list(schema.relation_index)}")
        if not isinstance(edges, Edges):
            raise ConfigError(f"{who} returned {_shown(edges)} for {key}; return hoploom.Edges")
    return answer


def _checked(edges: Edges, relation: Relation, schema: Schema, who: str) -> Edges:
    """Return the edges on the CPU, ids as int64; raise ConfigError for an id out of range or a wrong length."""
    ends = [schema.node_type(name).num_nodes for name in (relation.source, relation.destination)]
    sources = _ids(edges.sources, f"{who} gave sources", 0, ends[0])
    destinations = _ids(edges.destinations, f"{who} gave destinations", 0, ends[1])
    positions = edges.positions
    if positions is not None:
        positions = _ids(positions, f"{who} gave positions", -1, relation.num_edges)
    data = edges.data
    if data is not None:
        for name, rows in data.items() if isinstance(data, Mapping) else [(None, data)]:
            if not isinstance(name, str) or not isinstance(rows, Tensor) or rows.dim() == 0:
                raise ConfigError(f"{who} gave {_shown(rows)} as data; give tensors by name, a row per edge in each")
        data = {name: rows.cpu() for name, rows in data.items()}
    lengths = {"sources": len(sources), "destinations": len(destinations)}
    lengths |= {} if positions is None else {"positions": len(positions)}
    lengths |= {f"data[{name!r}]": len(rows) for name, rows in (data or {}).items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"{who} gave columns of different lengths: {lengths}; give one row per edge in each")
    return Edges(sources, destinations, positions, data)


def _ids(ids: Any, what: str, least: int, limit: int) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dim() != 1 or (ids.dtype not in ID_DTYPES and ids.numel()):
        raise ConfigError(f"{what} as {_shown(ids)}; give a tensor of integer ids, one per edge")
    if ids.numel():
        lowest, highest = (int(bound) for bound in ids.aminmax())
        if lowest < least or highest >= limit:
            wrong = lowest if lowest < least else highest
            raise ConfigError(f"{what} that hold {wrong}, out of range [{least}, {limit}); give ids of the whole graph")
    return ids.to("cpu", torch.int64).contiguous()


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    return f"{value!r:.80}" if value is None else f"a {type(value).__name__}"
