"""The cost of training on a partitioned store: cut edges, balance, remote rows, and hit rates of caches.

Cut and balance are exact counts. Remote rows and hit rates come from batches of each part's own seeds, sampled as in
training; caches are filled from some batches and measured on others.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoploom.load.presample import AS_TRAINED, Presampling, read_seeds
from hoploom.partition.assign import USUAL, named_seeds
from hoploom.partition.bounded_store import BoundedStore, row_bytes
from hoploom.partition.renumber import ID_BYTES
from hoploom.sample.hops import Fanouts
from hoploom.schema import NodeType
from hoploom.store import Store

Batches = Callable[[Presampling], Iterator[list[Tensor]]]


@dataclass(frozen=True)
class Cut:
    """The number of a relation's edges that come from another part."""

    relation: str
    num_edges: int
    num_cut: int


@dataclass(frozen=True)
class PartCost:
    """The size of a part, and the mean rows of a batch of its own seeds."""

    num_nodes: Mapping[str, int]
    num_edges: int
    num_seeds: int
    batch_rows: float | None = None  # unique nodes of a batch; None: nothing was sampled
    remote_rows: float | None = None  # those of other parts
    remote_bytes: float | None = None


@dataclass(frozen=True)
class CacheRate:
    """The share of remote rows that a cache answers, by its share of the remote nodes."""

    nodes: float
    hits: float


@dataclass(frozen=True)
class PartitionReport:
    """The cost of training on a partitioned store.

    >>> costs = report("papers.parts", [15, 10, 5])
    >>> print(costs)
    """

    cuts: tuple[Cut, ...]
    parts: tuple[PartCost, ...]
    caches: tuple[CacheRate, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # seeds, fanouts, batch_size

    @property
    def edge_cut(self) -> float:
        """Share of all edges that come from another part."""
        return sum(cut.num_cut for cut in self.cuts) / max(1, sum(cut.num_edges for cut in self.cuts))

    @property
    def remote_share(self) -> float | None:
        """Share of a batch's rows that come from another part; None if nothing was sampled."""
        sampled = [part for part in self.parts if part.batch_rows]
        if not sampled:
            return None
        return sum(part.remote_rows or 0 for part in sampled) / sum(part.batch_rows or 0 for part in sampled)

    def __str__(self) -> str:
        """Return the report as text for a terminal."""
        lines = [*_aligned(self._rows()), "", f"edges from another part: {_percent(self.edge_cut)}"]
        if len(self.cuts) > 1:
            lines += [f"  {_percent(cut.num_cut / max(1, cut.num_edges)):>7}  {cut.relation}" for cut in self.cuts]
        if self.remote_share is not None:
            lines.append(f"rows of a batch from another part: {_percent(self.remote_share)}")
        if self.caches:
            sizes = ["cache, of the other parts' nodes", *(_percent(cache.nodes) for cache in self.caches)]
            lines += _aligned([sizes, ["answers of these rows", *(_percent(cache.hits) for cache in self.caches)]])
        if self.sampling:
            sampling = [str(self.sampling[name]) for name in ("batch_size", "seeds", "fanouts")]
            lines.append("sampled: batches of {}, seeds {}, fanouts {}".format(*sampling))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<PartitionReport: {self._title()}>"

    def _title(self) -> str:
        title = f"{len(self.parts)} parts, edges from another part: {_percent(self.edge_cut)}"
        if self.remote_share is not None:
            title += f", rows of a batch from another part: {_percent(self.remote_share)}"
        return title

    def _rows(self) -> list[list[str]]:
        """Return the names of the columns, and a row for every part."""
        columns = {**COUNTED, **({} if self.remote_share is None else SAMPLED)}
        rows = [[str(number), *(text(part) for text in columns.values())] for number, part in enumerate(self.parts)]
        return [["part", *columns], *rows]


def report_as_json(costs: PartitionReport) -> str:
    """Return the report as JSON."""
    contents = {"edge_cut": costs.edge_cut, "remote_share": costs.remote_share, **asdict(costs)}
    return json.dumps(contents, indent=1)


COUNTED: Mapping[str, Callable[[PartCost], str]] = {
    "nodes": lambda part: f"{sum(part.num_nodes.values()):,}",
    "edges": lambda part: f"{part.num_edges:,}",
    "seeds": lambda part: f"{part.num_seeds:,}",
}
SAMPLED: Mapping[str, Callable[[PartCost], str]] = {
    "rows a batch": lambda part: f"{part.batch_rows or 0:,.0f}",
    "remote": lambda part: _percent((part.remote_rows or 0) / part.batch_rows) if part.batch_rows else "-",
    "remote MB": lambda part: f"{(part.remote_bytes or 0) / 1e6:,.1f}",
}


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
OTHER_BATCHES = 1  # added to the seed


def report(
    store: Store | str | Path,
    fanouts: Fanouts | None = FANOUTS,
    seeds: Any = USUAL,
    *,
    sampling: Presampling = AS_TRAINED,
    memory: int = 4 << 30,
) -> PartitionReport:
    """Measure the cost of training on a partitioned store. If `fanouts` or `seeds` is None, nothing is sampled.

    `seeds` are as for partition(). If there are many parts, the figures of a part come from few batches.

    >>> costs = report("papers.parts", [15, 10, 5])
    >>> costs.edge_cut, costs.remote_share
    """
    opened = BoundedStore(store, memory)
    schema, seeds = opened.schema, named_seeds(opened.schema, seeds)
    seed_type, seed_ids = schema.node_types[0].name, torch.empty(0, dtype=torch.int64)
    if seeds is not None:
        seed_type, seed_ids = read_seeds(opened.store, seeds)
    cuts = tuple(_count_cut(opened, index) for index in range(len(schema.relations)))
    type_index = schema.type_index[seed_type]
    firsts = torch.tensor([part.first_nodes[type_index] for part in opened.ranges])
    own = seed_ids.tensor_split(torch.searchsorted(seed_ids, firsts[1:]))  # they ascend
    parts = [
        PartCost(dict(zip(schema.type_index, part.num_nodes, strict=True)), sum(part.num_edges), ids.numel())
        for part, ids in zip(opened.ranges, own, strict=True)
    ]
    if fanouts is None or seeds is None:
        return PartitionReport(cuts, tuple(parts))
    costs, hits = [], torch.zeros(len(CACHES), dtype=torch.float64)
    for number, held in enumerate(parts):
        given = own[number] if schema.homogeneous else (seed_type, own[number])
        cost, answered = _sampled_cost(opened, number, held, partial(opened.batches, fanouts, given), sampling)
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


def _plain(fanouts: Fanouts) -> Any:
    if isinstance(fanouts, Mapping):
        return {" ".join(key): list(hops) for key, hops in fanouts.items()}
    return list(fanouts)


def _count_cut(opened: BoundedStore, index: int) -> Cut:
    relation, source = opened.schema.relations[index], opened.schema.sources[index]
    inside = 0
    for number, part in enumerate(opened.ranges):
        first, end = part.first_nodes[source], part.first_nodes[source] + part.num_nodes[source]
        for span in opened.edge_spans(number, index, ID_BYTES):
            inside += int(((span.sources >= first) & (span.sources < end)).sum())
    return Cut(" ".join(relation.key), relation.num_edges, relation.num_edges - inside)


# --- sampled ---------------------------------------------------------------------------------


def _sampled_cost(
    opened: BoundedStore, number: int, held: PartCost, batches: Batches, plan: Presampling
) -> tuple[PartCost, Tensor]:
    """Return a part's cost, and the rows of a batch that each cache would answer."""
    answered = torch.zeros(len(CACHES), dtype=torch.float64)
    if held.num_seeds == 0:
        return replace(held, batch_rows=0.0, remote_rows=0.0, remote_bytes=0.0), answered
    share, epoch = max(1, CHOOSING // len(opened.ranges)), -(-held.num_seeds // plan.batch_size)
    choosing = range(max(min(LEAST, share), min(share, epoch)))
    levels = _cache_levels(opened, number, batches(replace(plan, batches=choosing)))
    count = max(1, MEASURED // len(opened.ranges))
    num_rows = num_remote = num_bytes = 0
    for nodes in batches(replace(plan, batches=range(count), seed=plan.seed + OTHER_BATCHES)):
        num_rows += sum(ids.numel() for ids in nodes)
        for node_type, first, ids in _remote(opened, number, nodes):
            num_remote += ids.numel()
            num_bytes += ids.numel() * row_bytes(node_type)
            answered += torch.bincount(levels[ids + first], minlength=len(CACHES) + 1).cumsum(0)[: len(CACHES)]
    cost = replace(held, batch_rows=num_rows / count, remote_rows=num_remote / count, remote_bytes=num_bytes / count)
    return cost, answered / count


def _cache_levels(opened: BoundedStore, number: int, batches: Iterator[list[Tensor]]) -> Tensor:
    """Return the smallest of a part's caches that holds each node (of all types): [num_nodes] uint8.

    Caches hold the rows that these batches use most.
    """
    num_nodes = sum(node_type.num_nodes for node_type in opened.schema.node_types)
    visits = torch.zeros(num_nodes, dtype=torch.int32)
    for nodes in batches:
        for _, first, ids in _remote(opened, number, nodes):
            visits[ids + first] += 1
    visited = torch.nonzero(visits).view(-1)
    hottest = visited[torch.sort(visits[visited], descending=True, stable=True).indices]
    num_remote = num_nodes - sum(opened.ranges[number].num_nodes)
    levels = torch.full((num_nodes,), len(CACHES), dtype=torch.uint8)
    for level in reversed(range(len(CACHES))):
        levels[hottest[: int(CACHES[level] * num_remote)]] = level
    return levels


def _remote(opened: BoundedStore, number: int, nodes: Sequence[Tensor]) -> Iterator[tuple[NodeType, int, Tensor]]:
    """Yield, by node type, the number of nodes of earlier types, and the batch's nodes in other parts."""
    part, before = opened.ranges[number], 0
    for node_type, first, count, ids in zip(
        opened.schema.node_types, part.first_nodes, part.num_nodes, nodes, strict=True
    ):
        yield node_type, before, ids[(ids < first) | (ids >= first + count)]
        before += node_type.num_nodes
