"""What a partitioned store will cost to train on: cut edges, balance, remote rows, what a cache spares.

Cut and balance are counted exactly. Remote rows and hit rates come from batches of each part's own seeds, sampled as
training would; the batches that choose what a cache holds are not those that it is measured on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoploom.config import NumNeighbors
from hoploom.load.inputs import read_input_nodes
from hoploom.load.visits import AS_TRAINED, Presampling
from hoploom.partition.costs import CacheRate, Cut, PartCost, PartitionReport
from hoploom.partition.hotness import Trial
from hoploom.partition.reading import Reader, Reopened, edge_spans, read_store, row_bytes
from hoploom.schema import NodeType
from hoploom.store import Store

FANOUTS = (15, 10, 5)
CACHES = (0.01, 0.05, 0.1, 0.2)  # shares of the nodes that lie in other parts
CHOOSING = 256  # batches, over all parts, that say what a cache holds
MEASURED = 64  # batches, over all parts, that remote rows and hits are counted on
LEAST = 8  # batches per part that choose, however many parts; half as many measure
ID_BYTES = 8
OTHER_BATCHES = 1  # added to the seed


def report(
    store: Store | str | Path,
    fanouts: NumNeighbors | None = FANOUTS,
    seeds: Any = "train",
    *,
    sampling: Presampling = AS_TRAINED,
    memory: int = 4 << 30,
) -> PartitionReport:
    """Measure a partitioned store. Without `fanouts` or without `seeds` nothing is sampled.

    >>> costs = report("papers.parts", [15, 10, 5])
    >>> costs.edge_cut, costs.remote_share
    """
    reader = read_store(store)
    seed_type, seed_ids = None, torch.empty(0, dtype=torch.int64)
    opened = Reopened(store, memory)
    if seeds is not None:
        seed_type, seed_ids, _ = read_input_nodes(opened.store, seeds)
    cuts = tuple(_cut(reader, index) for index in range(len(reader.schema.relations)))
    parts = [_holdings(reader, number, seed_type, seed_ids) for number in range(len(reader.parts))]
    if fanouts is None or seed_type is None:
        return PartitionReport(cuts, tuple(parts))
    costs, hits = [], torch.zeros(len(CACHES), dtype=torch.float64)
    for number, held in enumerate(parts):
        own = seed_ids[_inside(reader, number, seed_type, seed_ids)]
        trial = Trial(opened, fanouts, own if reader.schema.homogeneous else (seed_type, own), sampling)
        cost, answered = _sampled_cost(trial, reader, number, held)
        costs.append(cost)
        hits += answered
    remote = sum(cost.remote_rows or 0 for cost in costs)
    caches = tuple(CacheRate(share, float(hit) / remote) for share, hit in zip(CACHES, hits, strict=True) if remote)
    described = {"seeds": _name_of(seeds), "fanouts": _plain(fanouts), "batch_size": sampling.batch_size}
    return PartitionReport(cuts, tuple(costs), caches, described)


def _name_of(seeds: Any) -> str:
    if isinstance(seeds, tuple | list) and len(seeds) == 2 and isinstance(seeds[0], str):
        return f"{seeds[0]} {_name_of(seeds[1])}"
    return seeds if isinstance(seeds, str) else "given ids"


def _plain(fanouts: NumNeighbors) -> Any:
    if isinstance(fanouts, Mapping):
        return {" ".join(key): list(hops) for key, hops in fanouts.items()}
    return list(fanouts)


# --- counted ---------------------------------------------------------------------------------


def _cut(reader: Reader, index: int) -> Cut:
    schema = reader.schema
    relation, source = schema.relations[index], schema.sources[index]
    inside = 0
    for number, part in enumerate(reader.parts):
        first, end = part.first_nodes[source], part.first_nodes[source] + part.num_nodes[source]
        for span in edge_spans(reader, number, index, ID_BYTES):
            ids = reader.topology(number, index, "indices", span.begin, span.end)
            inside += int(((ids >= first) & (ids < end)).sum())
    return Cut(" ".join(relation.key), relation.num_edges, relation.num_edges - inside)


def _holdings(reader: Reader, number: int, seed_type: str | None, seeds: Tensor) -> PartCost:
    part = reader.parts[number]
    names = [node_type.name for node_type in reader.schema.node_types]
    own = 0 if seed_type is None else int(_inside(reader, number, seed_type, seeds).sum())
    return PartCost(dict(zip(names, part.num_nodes, strict=True)), sum(part.num_edges), own)


def _inside(reader: Reader, number: int, node_type: str, ids: Tensor) -> Tensor:
    part, index = reader.parts[number], reader.schema.type_index[node_type]
    return (ids >= part.first_nodes[index]) & (ids < part.first_nodes[index] + part.num_nodes[index])


# --- sampled ---------------------------------------------------------------------------------


def _sampled_cost(trial: Trial, reader: Reader, number: int, held: PartCost) -> tuple[PartCost, Tensor]:
    """A part's cost, and the rows of a batch that each cache would have answered."""
    answered = torch.zeros(len(CACHES), dtype=torch.float64)
    if held.num_seeds == 0:
        return replace(held, batch_rows=0.0, remote_rows=0.0, remote_bytes=0.0), answered
    num_parts, seed = len(reader.parts), trial.plan.seed
    levels = _cache_levels(trial, reader, number, max(LEAST, min(CHOOSING // num_parts, trial.epoch)))
    count = max(LEAST // 2, MEASURED // num_parts)
    num_rows = num_remote = num_bytes = 0
    for nodes in trial.batches(count, seed + OTHER_BATCHES):
        num_rows += sum(ids.numel() for ids in nodes)
        for node_type, first, ids in _outside(reader, number, nodes):
            num_remote += ids.numel()
            num_bytes += ids.numel() * row_bytes(node_type)
            answered += torch.bincount(levels[ids + first], minlength=len(CACHES) + 1).cumsum(0)[: len(CACHES)]
    cost = replace(held, batch_rows=num_rows / count, remote_rows=num_remote / count, remote_bytes=num_bytes / count)
    return cost, answered / count


def _cache_levels(trial: Trial, reader: Reader, number: int, count: int) -> Tensor:
    """Of every node, all types numbered through, the smallest cache that holds it: [num_nodes] uint8."""
    num_nodes = sum(node_type.num_nodes for node_type in reader.schema.node_types)
    visits = torch.zeros(num_nodes, dtype=torch.int32)
    for nodes in trial.batches(count, trial.plan.seed):
        for _, first, ids in _outside(reader, number, nodes):
            visits[ids + first] += 1
    hottest = torch.nonzero(visits).view(-1)
    hottest = hottest[torch.sort(visits[hottest], descending=True, stable=True).indices]
    levels = torch.full((num_nodes,), len(CACHES), dtype=torch.uint8)
    num_remote = num_nodes - sum(reader.parts[number].num_nodes)
    for level in reversed(range(len(CACHES))):
        levels[hottest[: int(CACHES[level] * num_remote)]] = level
    return levels


def _outside(reader: Reader, number: int, nodes: Sequence[Tensor]) -> Iterator[tuple[NodeType, int, Tensor]]:
    """By node type: what the types before it count, and which of a batch's nodes lie in other parts."""
    first = 0
    for node_type, ids in zip(reader.schema.node_types, nodes, strict=True):
        yield node_type, first, ids[~_inside(reader, number, node_type.name, ids)]
        first += node_type.num_nodes
