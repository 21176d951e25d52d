"""What a partitioned store costs to train on: the figures, as a table and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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
