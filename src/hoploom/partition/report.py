"""The cost of training on a partitioned store: cut edges and balance are counted, remote rows are sampled."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hoploom.config.values import aligned
from hoploom.load.presample import AS_TRAINED, Presampling, read_seeds
from hoploom.partition.assign import USUAL, named_seeds
from hoploom.partition.bounded_store import BoundedStore, row_bytes
from hoploom.partition.renumber import ID_BYTES
from hoploom.sample.hops import Fanouts
from hoploom.store import Store


@dataclass(frozen=True)
class Cut:
    """The edges of a relation, and how many of them come from another part."""

    relation: str
    num_edges: int
    num_cut: int


@dataclass(frozen=True)
class PartCost:
    """The size of a part, and the mean number of rows that a batch of the part's seeds needs."""

    num_nodes: Mapping[str, int]
    num_edges: int
    num_seeds: int
    batch_rows: float | None = None  # unique nodes of a batch; None if nothing was sampled
    remote_rows: float | None = None  # unique nodes of a batch that other parts hold
    remote_bytes: float | None = None


@dataclass(frozen=True)
class PartitionReport:
    """The cost of training on a partitioned store."""

    cuts: tuple[Cut, ...]
    parts: tuple[PartCost, ...]
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
        table = self._rows()
        right = [False, *[True] * (len(table[0]) - 1)]
        lines = [*aligned(table, right), "", f"edges from another part: {_percent(self.edge_cut)}"]
        if len(self.cuts) > 1:
            lines += [f"  {_percent(cut.num_cut / max(1, cut.num_edges)):>7}  {cut.relation}" for cut in self.cuts]
        if self.remote_share is not None:
            lines.append(f"rows of a batch from another part: {_percent(self.remote_share)}")
        if self.sampling:
            sampling = [str(self.sampling[name]) for name in ("batch_size", "seeds", "fanouts")]
            lines.append("sampled: batches of {}, seeds {}, fanouts {}".format(*sampling))
        return "\n".join(lines)

    def __repr__(self) -> str:
        title = f"{len(self.parts)} parts, edges from another part: {_percent(self.edge_cut)}"
        if self.remote_share is not None:
            title += f", rows of a batch from another part: {_percent(self.remote_share)}"
        return f"<PartitionReport: {title}>"

    def _rows(self) -> list[list[str]]:
        """Return the cells of the table: the names of the columns, then a row for every part."""
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


FANOUTS = (15, 10, 5)
MEASURED = 64  # batches, over all parts, that remote rows are counted on
OTHER_BATCHES = 1  # added to the random seed: batches other than those that found the hottest nodes


def report(
    store: Store | str | Path,
    fanouts: Fanouts | None = FANOUTS,
    seeds: Any = USUAL,
    *,
    sampling: Presampling = AS_TRAINED,
    memory: int = 4 << 30,
) -> PartitionReport:
    """Measure the cost of training on a partitioned store. If `fanouts` or `seeds` is None, nothing is sampled.

    `seeds` are as for partition(). With many parts, the figures of each part come from few batches.

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
    for number, held in enumerate(parts):
        given = own[number] if schema.homogeneous else (seed_type, own[number])
        parts[number] = _sampled_cost(opened, number, held, fanouts, given, sampling)
    described = {"seeds": _name_of(seeds), "fanouts": _plain(fanouts), "batch_size": sampling.batch_size}
    return PartitionReport(cuts, tuple(parts), described)


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


def _sampled_cost(
    opened: BoundedStore, number: int, held: PartCost, fanouts: Fanouts, seeds: Any, plan: Presampling
) -> PartCost:
    """Sample batches from `seeds`. Return `held`, the cost of part `number`, with the mean rows of batches added."""
    if held.num_seeds == 0:
        return replace(held, batch_rows=0.0, remote_rows=0.0, remote_bytes=0.0)
    count, part = max(1, MEASURED // len(opened.ranges)), opened.ranges[number]
    num_rows = num_remote = num_bytes = 0
    plan = replace(plan, batches=range(count), seed=plan.seed + OTHER_BATCHES)
    for nodes in opened.batches(fanouts, seeds, plan):
        for node_type, first, size, ids in zip(
            opened.schema.node_types, part.first_nodes, part.num_nodes, nodes, strict=True
        ):
            remote = int(((ids < first) | (ids >= first + size)).sum())
            num_rows += ids.numel()
            num_remote += remote
            num_bytes += remote * row_bytes(node_type)
    return replace(held, batch_rows=num_rows / count, remote_rows=num_remote / count, remote_bytes=num_bytes / count)
