"""The graph as a frontier hook sees it, and the edges that it returns.

All draws derive from the step, the layer and the number of the call, so a batch is the same wherever it is made. Draws
for ids depend on the ids, on any rank; draws by position are equal on all ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod

import torch
from torch import Tensor

from hoploom import keys, ops
from hoploom.config.values import as_fanouts, as_int
from hoploom.errors import ConfigError
from hoploom.ops import Frontier
from hoploom.sample import walks
from hoploom.schema import RelationName, read_ids
from hoploom.store import Draw, GraphStore
from hoploom.store.base import NO_IDS


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
        """Return the `most` edges with the highest scores of each destination, sorted by score; -1 returns all.

        Of equal scores, the first edge comes first.
        """
        most, num_edges = as_int("most", most, -1, "give a count, or -1 for all edges"), len(self.destinations)
        if not isinstance(scores, Tensor):
            raise ConfigError(f"scores are {_kind(scores)}; give a tensor of one score per edge")
        if scores.shape != (num_edges,):
            raise ConfigError(f"scores have shape {tuple(scores.shape)} for {num_edges} edges; give one per edge")
        return self[walks.top_of_each(self.destinations, scores, num_edges if most < 0 else most)]


HookEdges = Edges | Mapping[RelationName, Edges]
Nodes = Tensor | Mapping[str, Tensor]  # ids; by node type for heterogeneous graphs
Fanout = int | Mapping[RelationName, int]
Size = int | Sequence[int] | Tensor  # a count, a shape, or the ids to draw for


class Layer(int):
    """The number of a layer (0 next to the seeds), with the layer's entry of `num_neighbors`.

    >>> def sample_frontier(layer, graph, seeds):
    ...     return graph.sample_neighbors(seeds, layer.fanout)
    """

    fanout: Fanout  # by relation for heterogeneous graphs

    def __new__(cls, number: int, fanout: Fanout) -> "Layer":
        layer = super().__new__(cls, number)
        layer.fanout = fanout
        return layer


class LayerGraph:
    """The graph as a frontier hook sees it, with the randomness of the layer.

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

    # --- edges ------------------------------------------------------------------------------

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

        A node has the same picks in every call of a layer. With `independent`, every call draws again, and so does
        every repetition of a node within a call.
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
        trees = {name: walks.apart(nodes) if independent else None for name, nodes in by_type.items()}
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
        """Return the in-degree of each node in a relation, loops included: [n] int64. Reads no edges."""
        index = walks.relation_index(self.schema, "relation", relation)
        frontiers: list[Frontier | None] = [None] * len(self.schema.node_types)
        end = self.schema.destinations[index]
        frontiers[end] = Frontier(self._ids("nodes", self.schema.node_types[end].name, nodes))
        fanouts = [-1 if other == index else 0 for other in range(len(self.schema.relations))]
        counted = self._graph.sample(frontiers, Draw(0, 0, fanouts, counts_only=True))[index]
        return torch.zeros_like(frontiers[end].nodes) if counted is None else counted.counts  # type: ignore[union-attr]

    # --- numbers ----------------------------------------------------------------------------

    def uniform(self, size: Size) -> Tensor:
        """Return float32 numbers between 0 and 1, both excluded: `size` of them, of this shape, or one per id.

        >>> order = torch.argsort(graph.uniform(found.positions))  # a shuffle that is equal on every rank
        """
        ids, shape = _numbered(size)
        words = ops.draw_words(self._own_key(), ids, 0).numpy()[:, 0]
        return torch.from_numpy((words >> 9) + 0.5).mul_(2.0**-23).to(torch.float32).view(shape)

    def integers(self, high: int, size: Size) -> Tensor:
        """Return int64 integers from 0 to below `high`: `size` of them, of this shape, or one per id."""
        high = as_int("high", high, 1, "give at least 1")
        ids, shape = _numbered(size)
        return ops.draw_bounded(self._own_key(), ids, 0, 0, high).view(shape)

    def generator(self) -> torch.Generator:
        """Return a generator for torch, equal on all ranks: `torch.multinomial(p, 10, generator=graph.generator())`."""
        return torch.Generator().manual_seed(self._own_key() >> 1)

    # --- walks ------------------------------------------------------------------------------

    def walk(
        self, starts: Tensor, length: int, *, restart: float = 0.0, path: Sequence[RelationName] | None = None
    ) -> Tensor:
        """Return random walks [n, length + 1] int64 against the direction of edges; -1 after a node without in-edges.

        Each step goes to the source of a uniformly drawn in-edge. Walks are independent, also from equal starts.
        `path` names the relations of the steps, repeated as needed; the first one leads to the starts' type. Before
        each repetition of the path, a walk returns to its start with probability `restart`.
        """
        steps = walks.read_path(self.schema, path, length, restart)
        ids = self._ids("starts", self.schema.relations[steps[0]].destination, starts)
        return walks.walk(self._graph, self._own_key(), steps, ids, length, restart)

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

        Visits count at the ends of whole paths, without the seed itself. The edges' `data` has "visits", a count, and
        "weight", a visit's share: the weights of a seed sum to one.
        """
        num_walks = as_int("num_walks", num_walks, 1, "give at least 1")
        fanout = as_int("fanout", fanout, 0, "give a count of neighbours")
        steps = walks.read_path(self.schema, path, length, restart)
        first, last = (self.schema.relations[steps[place]] for place in (0, -1))
        seeds = self._ids("seeds", first.destination, seeds)
        starts = torch.repeat_interleave(seeds, num_walks)
        trace = walks.walk(self._graph, self._own_key(), steps, starts, length, restart)
        ends = trace[:, len(steps) :: len(steps)]
        visited = ends.reshape(seeds.numel(), num_walks * ends.shape[1])
        if last.source == first.destination:  # else an equal id is another node
            visited = visited.masked_fill(visited == seeds.view(-1, 1), -1)
        owners, nodes, visits = walks.most_visited(visited, self.schema.node_type(last.source).num_nodes, fanout)
        total = torch.zeros_like(seeds).index_add_(0, owners, visits)
        return Edges(nodes, seeds[owners], None, {"visits": visits, "weight": visits / total[owners]})

    # --- helpers ----------------------------------------------------------------------------

    def _own_key(self) -> int:
        """Return the key of the next call's draws."""
        return keys.hook_key(self._key, self.layer, next(self._calls))

    def _ids(self, what: str, node_type: str, nodes: Tensor) -> Tensor:
        if not isinstance(nodes, Tensor):
            raise ConfigError(f"{what} are {_kind(nodes)}; give a tensor of ids of {node_type!r}")
        return read_ids(what, nodes.cpu(), self.schema.node_type(node_type).num_nodes, ConfigError)


def _numbered(size: Size) -> tuple[Tensor, tuple[int, ...]]:
    """Return the numbers to draw for, one per entry, and the shape of the result."""
    if isinstance(size, Tensor):
        if size.dim() != 1 or size.is_floating_point() or size.dtype == torch.bool:
            raise ConfigError(f"ids have dtype {size.dtype} and shape {tuple(size.shape)}; give a list of integer ids")
        return walks.apart(size.to("cpu", torch.int64).contiguous()), tuple(size.shape)
    shape = tuple(size) if isinstance(size, list | tuple) else (size,)
    shape = tuple(as_int("a size", extent, 0, "give a count, a shape, or a tensor of ids") for extent in shape)
    return torch.arange(prod(shape)), shape


def _kind(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
