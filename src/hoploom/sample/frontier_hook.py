"""Custom sampling: call `sample_frontier(layer, graph, seeds)` for the edges that lead to a layer's seeds.

The edges that a hook returns are checked; error messages name the layer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoploom.errors import ConfigError
from hoploom.ops import Frontier, Picks
from hoploom.sample.layer_graph import Edges, HookEdges, Layer, LayerGraph, Nodes
from hoploom.schema import ID_DTYPES, Relation, RelationName, Schema
from hoploom.store.base import NO_IDS

SampleFrontier = Callable[[Layer, LayerGraph, Nodes], HookEdges]
EdgeData = Mapping[str, Tensor]  # rows by name, one per edge


class Answer(NamedTuple):
    """The picks of one layer by relation, and the edge data that the hook returned."""

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
    order: Tensor  # [n] int64: the index in `distinct` of each sorted one
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
        """Return the number of edges of each seed, and their order by seed; None if they are in order already.

        A repeated seed gets the same edges each time.
        """
        runs, run_of_edge, lengths = torch.unique_consecutive(destinations, return_inverse=True, return_counts=True)
        at = torch.searchsorted(self.ascending, runs).clamp_(max=max(0, self.ascending.numel() - 1))
        strangers = runs if not self.ascending.numel() else runs[self.ascending[at] != runs]
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
        shift = torch.repeat_interleave(begins - (torch.cumsum(counts, 0) - counts), counts)
        repeated = shift + torch.arange(shift.numel())
        return counts, repeated if places is None else places[repeated]


# --- what is checked ------------------------------------------------------------------------


def _by_relation(answer: Any, schema: Schema, who: str) -> Mapping[RelationName, Edges]:
    """Return the edges of a hook by relation."""
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
    """Return checked edges on the CPU, as int64."""
    ends = [schema.node_type(name).num_nodes for name in (relation.source, relation.destination)]
    sources = _ids(edges.sources, f"{who} gave sources", 0, ends[0])
    destinations = _ids(edges.destinations, f"{who} gave destinations", 0, ends[1])
    positions = edges.positions
    if positions is not None:
        positions = _ids(positions, f"{who} gave positions", -1, relation.num_edges)
    data = edges.data
    if data is not None:
        _check_data(data, who)
        data = {name: rows.cpu() for name, rows in data.items()}
    lengths = {"sources": len(sources), "destinations": len(destinations)}
    lengths |= {} if positions is None else {"positions": len(positions)}
    lengths |= {f"data[{name!r}]": len(rows) for name, rows in (data or {}).items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"{who} gave columns of different lengths: {lengths}; give one row per edge in each")
    return Edges(sources, destinations, positions, data)


def _check_data(data: Any, who: str) -> None:
    rows = data if isinstance(data, Mapping) else {None: data}
    for name, values in rows.items():
        if not isinstance(name, str) or not isinstance(values, Tensor) or values.dim() == 0:
            raise ConfigError(f"{who} gave {_shown(values)} as data; give tensors by name, a row per edge in each")


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
