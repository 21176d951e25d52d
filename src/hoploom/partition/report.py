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

from hoploom.load.presample import AS_TRAINED, Presampling, read_seeds
from hoploom.partition.bounded_graph import Opened
from hoploom.partition.costs import CacheRate, Cut, PartCost, PartitionReport
from hoploom.partition.hotness import Trial
from hoploom.partition.seeds import USUAL, named_seeds
from hoploom.partition.store_reading import Reader, edge_spans, read_store, row_bytes
from hoploom.sample.options import NumNeighbors
from hoploom.schema import NodeType
from hoploom.store import Store

FANOUTS = (15, 10, 5)
CACHES = (0.01, 0.05, 0.1, 0.2)  # shares of the nodes that lie in other parts
CHOOSING = 256  # batches, over all parts, that say what a cache holds
MEASURED = 64  # batches, over all parts, that remote rows and hits are counted on
LEAST = 8  # batches of a part that choose, where that is more than an epoch and there are not many parts
ID_BYTES = 8
OTHER_BATCHES = 1  # added to the seed


def report(
    store: Store | str | Path,
    fanouts: NumNeighbors | None = FANOUTS,
    seeds: Any = USUAL,
    *,
    sampling: Presampling = AS_TRAINED,
    memory: int = 4 << 30,
) -> PartitionReport:
    """Measure a partitioned store. Without `fanouts` or without `seeds` nothing is sampled.

    `seeds` are as for partition(). A part's figures are from few batches where there are many parts.

    >>> costs = report("papers.parts", [15, 10, 5])
    >>> costs.edge_cut, costs.remote_share
    """
    reader = read_store(store)
    seed_type, seed_ids = None, torch.empty(0, dtype=torch.int64)
    opened = Opened(store, memory)
    seeds = named_seeds(reader.schema, seeds)
    if seeds is not None:
        seed_type, seed_ids = read_seeds(opened.store, seeds)
    cuts = tuple(_cut(reader, index) for index in range(len(reader.schema.relations)))
    own = _by_part(reader, seed_type, seed_ids)
    parts = [_holdings(reader, number, own[number].numel()) for number in range(len(reader.parts))]
    if fanouts is None or seed_type is None:
        return PartitionReport(cuts, tuple(parts))
    costs, hits = [], torch.zeros(len(CACHES), dtype=torch.float64)
    caches_of = Caches(reader)
    for number, held in enumerate(parts):
        given = own[number] if reader.schema.homogeneous else (seed_type, own[number])
        cost, answered = _sampled_cost(Trial(opened, fanouts, given, sampling), caches_of, number, held)
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


def _holdings(reader: Reader, number: int, num_seeds: int) -> PartCost:
    part = reader.parts[number]
    names = [node_type.name for node_type in reader.schema.node_types]
    return PartCost(dict(zip(names, part.num_nodes, strict=True)), sum(part.num_edges), num_seeds)


def _by_part(reader: Reader, node_type: str | None, seeds: Tensor) -> Sequence[Tensor]:
    """The seeds of each part; they ascend."""
    index = 0 if node_type is None else reader.schema.type_index[node_type]
    ends = torch.tensor([part.first_nodes[index] + part.num_nodes[index] for part in reader.parts])
    return seeds.tensor_split(torch.searchsorted(seeds, ends[:-1]))


def _inside(reader: Reader, number: int, node_type: str, ids: Tensor) -> Tensor:
    part, index = reader.parts[number], reader.schema.type_index[node_type]
    return (ids >= part.first_nodes[index]) & (ids < part.first_nodes[index] + part.num_nodes[index])


# --- sampled ---------------------------------------------------------------------------------


def _sampled_cost(trial: Trial, caches: "Caches", number: int, held: PartCost) -> tuple[PartCost, Tensor]:
    """A part's cost, and the rows of a batch that each cache would have answered."""
    answered = torch.zeros(len(CACHES), dtype=torch.float64)
    if held.num_seeds == 0:
        return replace(held, batch_rows=0.0, remote_rows=0.0, remote_bytes=0.0), answered
    reader, seed = caches.reader, trial.plan.seed
    share = max(1, CHOOSING // len(reader.parts))
    caches.fill(trial.batches(max(min(LEAST, share), min(share, trial.epoch)), seed), number)
    count = max(1, MEASURED // len(reader.parts))
    num_rows = num_remote = num_bytes = 0
    for nodes in trial.batches(count, seed + OTHER_BATCHES):
        num_rows += sum(ids.numel() for ids in nodes)
        for node_type, first, ids in _outside(reader, number, nodes):
            num_remote += ids.numel()
            num_bytes += ids.numel() * row_bytes(node_type)
            answered += caches.answers(ids + first)
    cost = replace(held, batch_rows=num_rows / count, remote_rows=num_remote / count, remote_bytes=num_bytes / count)
    return cost, answered / count


class Caches:
    """Of every node, all types numbered through, the smallest of a part's caches that holds it; part after part."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._num_nodes = sum(node_type.num_nodes for node_type in reader.schema.node_types)
        self._visits = torch.zeros(self._num_nodes, dtype=torch.int32)
        self._levels = torch.full((self._num_nodes,), len(CACHES), dtype=torch.uint8)
        self._seen = torch.empty(0, dtype=torch.int64)  # nodes of which either says something

    def fill(self, batches: Iterator[list[Tensor]], number: int) -> None:
        """The caches of a part hold what these batches ask for most; those of the part before are forgotten."""
        self._visits[self._seen] = 0
        self._levels[self._seen] = len(CACHES)
        seen = []
        for nodes in batches:
            for _, first, ids in _outside(self.reader, number, nodes):
                ids = ids + first
                seen.append(ids[self._visits[ids] == 0])
                self._visits[ids] += 1
        self._seen = torch.cat(seen).sort().values
        hottest = self._seen[torch.sort(self._visits[self._seen], descending=True, stable=True).indices]
        num_remote = self._num_nodes - sum(self.reader.parts[number].num_nodes)
        for level in reversed(range(len(CACHES))):
            self._levels[hottest[: int(CACHES[level] * num_remote)]] = level

    def answers(self, ids: Tensor) -> Tensor:
        """How many of these nodes each cache holds."""
        return torch.bincount(self._levels[ids], minlength=len(CACHES) + 1).cumsum(0)[: len(CACHES)]


def _outside(reader: Reader, number: int, nodes: Sequence[Tensor]) -> Iterator[tuple[NodeType, int, Tensor]]:
    """By node type: what the types before it count, and which of a batch's nodes lie in other parts."""
    first = 0
    for node_type, ids in zip(reader.schema.node_types, nodes, strict=True):
        yield node_type, first, ids[~_inside(reader, number, node_type.name, ids)]
        first += node_type.num_nodes
