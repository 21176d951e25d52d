"""Random walks through GraphStore.sample, one pick per walk and step, so that they are equal on every store.

Each step costs a round trip to remote parts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hoploom import keys, ops
from hoploom.config.values import as_int, as_number
from hoploom.errors import ConfigError
from hoploom.ops import Frontier
from hoploom.schema import RelationName, Schema
from hoploom.store import Draw, GraphStore


def apart(ids: Tensor) -> Tensor:
    """Return the ids with repetitions replaced by unique numbers; the second 7 of a list always gets the same one."""
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
    """Return the index of a relation; None means the only one."""
    if relation is None and len(schema.relations) > 1:
        raise ConfigError(f"{what} is missing; choose from {list(schema.relation_index)}")
    return 0 if relation is None else schema.relation_index[schema.relation(relation).key]


def read_path(schema: Schema, path: Sequence[RelationName] | None, length: int, restart: float) -> list[int]:
    """Return the relation index of each step of a path, after checking that they connect."""
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
    """Return walks [n, length + 1] int64 against the edges, repeating these relations; -1 after a walk's end."""
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
    """Return the indices of the `most` highest scores of every owner, grouped by owner."""
    order = torch.argsort(scores, descending=True, stable=True)
    order = order[torch.argsort(owners[order], stable=True)]
    grouped = owners[order]
    return order[torch.arange(grouped.numel()) - torch.searchsorted(grouped, grouped) < most]


def most_visited(visited: Tensor, num_nodes: int, fanout: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `fanout` most frequent nodes of each row: rows, nodes, counts.

    Sorted by row, then by descending count, then by id; -1 does not count.
    """
    owners, nodes = torch.arange(visited.shape[0]).repeat_interleave(visited.shape[1]), visited.reshape(-1)
    counts_as = nodes >= 0
    pairs, visits = torch.unique(owners[counts_as] * num_nodes + nodes[counts_as], return_counts=True)
    order = top_of_each(pairs // num_nodes, visits, fanout)
    return pairs[order] // num_nodes, pairs[order] % num_nodes, visits[order]
