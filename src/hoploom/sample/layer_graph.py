"""What a frontier hook sees of the graph, and what it returns.

All that is drawn here follows from the step, the layer and the number of the call: the same batch arises wherever it is
made. Numbers drawn for ids belong to the ids, whichever rank asks; numbers drawn by position are the same on all ranks.
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
    positions: Tensor | None = None  # [e] int64 positions in the store, where they are known
    data: Mapping[str, Tensor] | None = None  # rows [e, ...] that arrive in the block, as block.data[name]

    def __getitem__(self, chosen: Tensor) -> "Edges":
        """Some of the edges, by a mask or by their places."""
        return Edges(
            self.sources[chosen],
            self.destinations[chosen],
            None if self.positions is None else self.positions[chosen],
            None if self.data is None else {name: rows[chosen] for name, rows in self.data.items()},
        )

    def top(self, scores: Tensor, most: int) -> "Edges":
        """For each destination, the `most` edges with the highest scores, in this order; of equal scores the first.

        -1 keeps all edges, in this order.
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
Asked = int | Sequence[int] | Tensor  # how many numbers, their shape, or the ids that they are for


class Layer(int):
    """The number of a layer, 0 for the one at the seeds, with the layer's entry in `num_neighbors`.

    >>> def sample_frontier(layer, graph, seeds):
    ...     return graph.sample_neighbors(seeds, layer.fanout)
    """

    fanout: Fanout  # by relation for heterogeneous graphs

    def __new__(cls, number: int, fanout: Fanout) -> "Layer":
        layer = super().__new__(cls, number)
        layer.fanout = fanout
        return layer


class LayerGraph:
    """What a frontier hook sees of the graph, with the layer's randomness bound.

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
        """The step of the epoch; -1 for a batch made by `loader([0, 1, 2])`."""
        return self._key.step if isinstance(self._key, keys.BatchKey) else -1

    @property
    def fanout(self) -> Fanout:
        """The `fanout` of the layer."""
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
        """Picks of in-edges, as the sampler itself would make them; fanout -1 gives all.

        A node has the same picks wherever it is asked in a layer. With `independent` every call draws anew, and so
        does every repetition of a node in it.
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
        """All in-edges of the seeds."""
        return self.sample_neighbors(seeds, -1)

    def in_degrees(self, nodes: Tensor, relation: RelationName | None = None) -> Tensor:
        """How many edges of a relation lead to each of these nodes, loops counted: [n] int64. No edge is read."""
        index = walks.relation_index(self.schema, "relation", relation)
        frontiers: list[Frontier | None] = [None] * len(self.schema.node_types)
        end = self.schema.destinations[index]
        frontiers[end] = Frontier(self._ids("nodes", self.schema.node_types[end].name, nodes))
        fanouts = [-1 if other == index else 0 for other in range(len(self.schema.relations))]
        counted = self._graph.sample(frontiers, Draw(0, 0, fanouts, counts_only=True))[index]
        return torch.zeros_like(frontiers[end].nodes) if counted is None else counted.counts  # type: ignore[union-attr]

    # --- numbers ----------------------------------------------------------------------------

    def uniform(self, asked: Asked) -> Tensor:
        """Numbers between 0 and 1, never 0 nor 1: float32, `asked` many, of this shape, or one for each of these ids.

        >>> order = torch.argsort(graph.uniform(found.positions))  # a shuffle that does not depend on who asks
        """
        ids, shape = _numbered(asked)
        words = ops.draw_words(self._own_key(), ids, 0).numpy()[:, 0]
        return torch.from_numpy((words >> 9) + 0.5).mul_(2.0**-23).to(torch.float32).view(shape)

    def integers(self, high: int, asked: Asked) -> Tensor:
        """Integers from 0 to below `high`: int64, `asked` many, of this shape, or one for each of these ids."""
        high = as_int("high", high, 1, "give at least 1")
        ids, shape = _numbered(asked)
        return ops.draw_bounded(self._own_key(), ids, 0, 0, high).view(shape)

    def generator(self) -> torch.Generator:
        """For what torch draws, the same on all ranks: `torch.multinomial(p, 10, generator=graph.generator())`."""
        return torch.Generator().manual_seed(self._own_key() >> 1)

    # --- walks ------------------------------------------------------------------------------

    def walk(
        self, starts: Tensor, length: int, *, restart: float = 0.0, path: Sequence[RelationName] | None = None
    ) -> Tensor:
        """Random walks against the direction of edges, from a node to the source of one of its in-edges, all equally
        likely: [n, length + 1] int64, -1 from where a walk met a node without in-edges. They are independent, also
        where a start is given twice.

        `path` names the relation of each step, over and over; the first one leads to the starts' type. Whenever a
        path begins, a walk goes on from its start with probability `restart`.
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
        """PinSAGE's neighbours: for each seed the `fanout` nodes that its random walks visit most, itself left out.

        Only where a whole `path` ends is a visit. The edges' `data` has "visits", a count, and "weight", the share of
        the visits that were kept: a seed's weights sum to one.
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

    # --- what they share --------------------------------------------------------------------

    def _own_key(self) -> int:
        """What one call draws from."""
        return keys.hook_key(self._key, self.layer, next(self._calls))

    def _ids(self, what: str, node_type: str, nodes: Tensor) -> Tensor:
        if not isinstance(nodes, Tensor):
            raise ConfigError(f"{what} are {_kind(nodes)}; give a tensor of ids of {node_type!r}")
        return read_ids(what, nodes.cpu(), self.schema.node_type(node_type).num_nodes, ConfigError)


def _numbered(asked: Asked) -> tuple[Tensor, tuple[int, ...]]:
    """What numbers are drawn for, each entry by itself, and the shape of the answer."""
    if isinstance(asked, Tensor):
        if asked.dim() != 1 or asked.is_floating_point() or asked.dtype == torch.bool:
            raise ConfigError(
                f"ids have dtype {asked.dtype} and shape {tuple(asked.shape)}; give a list of integer ids"
            )
        return walks.apart(asked.to("cpu", torch.int64).contiguous()), tuple(asked.shape)
    shape = tuple(asked) if isinstance(asked, list | tuple) else (asked,)
    shape = tuple(as_int("a size", size, 0, "give a count, a shape, or a tensor of ids") for size in shape)
    return torch.arange(prod(shape)), shape


def _kind(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
