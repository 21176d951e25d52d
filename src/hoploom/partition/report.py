"""What a partitioned store will cost to train on: cut edges, balance, remote rows, what a cache spares.

Cut and balance are counted exactly. Remote rows and hit rates come from batches of each part's own seeds, sampled as
training would; the batches that choose what a cache holds are not those that it is measured on.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoploom.load.presample import AS_TRAINED, Presampling, read_seeds
from hoploom.partition.bounded_graph import BoundedStore
from hoploom.partition.store_reading import StoreReader, edge_spans, read_store, row_bytes
from hoploom.partition.trial import USUAL, Trial, named_seeds
from hoploom.sample.options import NumNeighbors
from hoploom.schema import NodeType
from hoploom.store import Store

MOST_RELATIONS = 12  # in a table


@dataclass(frozen=True)
class Cut:
    """How many edges of a relation come from another part."""

    relation: str
    num_edges: int
    num_cut: int


@dataclass(frozen=True)
class PartCost:
    """What a part holds, and what a batch of its own seeds asks for, on average."""

    num_nodes: Mapping[str, int]
    num_edges: int
    num_seeds: int
    batch_rows: float | None = None  # unique nodes of a batch; None: nothing was sampled
    remote_rows: float | None = None  # those of other parts
    remote_bytes: float | None = None


@dataclass(frozen=True)
class CacheRate:
    """The share of remote rows that a cache of so many of the remote nodes answers."""

    nodes: float
    hits: float


@dataclass(frozen=True)
class PartitionReport:
    """What a partitioned store costs to train on.

    >>> costs = report("papers.parts", [15, 10, 5])
    >>> print(costs)
    """

    cuts: tuple[Cut, ...]
    parts: tuple[PartCost, ...]
    caches: tuple[CacheRate, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # seeds, fanouts, batch_size

    @property
    def edge_cut(self) -> float:
        """The share of all edges that come from another part."""
        return sum(cut.num_cut for cut in self.cuts) / max(1, sum(cut.num_edges for cut in self.cuts))

    @property
    def remote_share(self) -> float | None:
        """The share of a batch's rows that come from another part; None where nothing was sampled."""
        sampled = [part for part in self.parts if part.batch_rows]
        if not sampled:
            return None
        return sum(part.remote_rows or 0 for part in sampled) / sum(part.batch_rows or 0 for part in sampled)

    def __str__(self) -> str:
        return as_text(self)


def as_json(costs: PartitionReport) -> str:
    """The report for other programs."""
    contents = {"edge_cut": costs.edge_cut, "remote_share": costs.remote_share, **asdict(costs)}
    return json.dumps(contents, indent=1)


def as_text(costs: PartitionReport) -> str:
    """The report to read in a terminal."""
    rows = [_heading(costs)]
    rows += [_part(number, part, costs.remote_share is not None) for number, part in enumerate(costs.parts)]
    lines = [*_aligned(rows), "", f"edges from another part: {_percent(costs.edge_cut)}"]
    if len(costs.cuts) > 1:
        named = [(_percent(cut.num_cut / max(1, cut.num_edges)), cut.relation) for cut in costs.cuts[:MOST_RELATIONS]]
        lines += [f"  {share:>7}  {relation}" for share, relation in named]
        more = len(costs.cuts) - MOST_RELATIONS
        lines += [f"  and {more} more relations"] if more > 0 else []
    if costs.remote_share is not None:
        lines.append(f"rows of a batch from another part: {_percent(costs.remote_share)}")
    if costs.caches:
        sizes = ["cache, of the other parts' nodes", *(_percent(cache.nodes) for cache in costs.caches)]
        lines += _aligned([sizes, ["answers of these rows", *(_percent(cache.hits) for cache in costs.caches)]])
    if costs.sampling:
        told = costs.sampling
        lines.append(f"sampled: batches of {told['batch_size']}, seeds {told['seeds']}, fanouts {told['fanouts']}")
    return "\n".join(lines)


def _heading(costs: PartitionReport) -> tuple[str, ...]:
    counted = ("part", "nodes", "edges", "seeds")
    return counted if costs.remote_share is None else (*counted, "rows a batch", "remote", "remote MB")


def _part(number: int, part: PartCost, sampled: bool) -> tuple[str, ...]:
    counted = (str(number), f"{sum(part.num_nodes.values()):,}", f"{part.num_edges:,}", f"{part.num_seeds:,}")
    if not sampled or part.batch_rows is None or part.remote_rows is None or part.remote_bytes is None:
        return counted
    share = _percent(part.remote_rows / part.batch_rows) if part.batch_rows else "-"
    return (*counted, f"{part.batch_rows:,.0f}", share, f"{part.remote_bytes / 1e6:,.1f}")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


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
    opened = BoundedStore(store, memory)
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


def _cut(reader: StoreReader, index: int) -> Cut:
    schema = reader.schema
    relation, source = schema.relations[index], schema.sources[index]
    inside = 0
    for number, part in enumerate(reader.parts):
        first, end = part.first_nodes[source], part.first_nodes[source] + part.num_nodes[source]
        for span in edge_spans(reader, number, index, ID_BYTES):
            ids = reader.topology(number, index, "indices", span.begin, span.end)
            inside += int(((ids >= first) & (ids < end)).sum())
    return Cut(" ".join(relation.key), relation.num_edges, relation.num_edges - inside)


def _holdings(reader: StoreReader, number: int, num_seeds: int) -> PartCost:
    part = reader.parts[number]
    names = [node_type.name for node_type in reader.schema.node_types]
    return PartCost(dict(zip(names, part.num_nodes, strict=True)), sum(part.num_edges), num_seeds)


def _by_part(reader: StoreReader, node_type: str | None, seeds: Tensor) -> Sequence[Tensor]:
    """The seeds of each part; they ascend."""
    index = 0 if node_type is None else reader.schema.type_index[node_type]
    ends = torch.tensor([part.first_nodes[index] + part.num_nodes[index] for part in reader.parts])
    return seeds.tensor_split(torch.searchsorted(seeds, ends[:-1]))


def _inside(reader: StoreReader, number: int, node_type: str, ids: Tensor) -> Tensor:
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

    def __init__(self, reader: StoreReader) -> None:
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


def _outside(reader: StoreReader, number: int, nodes: Sequence[Tensor]) -> Iterator[tuple[NodeType, int, Tensor]]:
    """By node type: what the types before it count, and which of a batch's nodes lie in other parts."""
    first = 0
    for node_type, ids in zip(reader.schema.node_types, nodes, strict=True):
        yield node_type, first, ids[~_inside(reader, number, node_type.name, ids)]
        first += node_type.num_nodes
