"""The page of a partitioned store, in the form of a run's."""

from collections.abc import Sequence

from hoploom.config.values import as_bytes, as_count, as_share
from hoploom.partition.report import PartCost, PartitionReport
from hoploom.report.page import Card, Page, bars, key_figures, table_markup


def partition_page(costs: PartitionReport, title: str) -> Page:
    """Return the page of a partitioned store."""
    shown = [
        ("parts", str(len(costs.parts)), ""),
        ("edge cut", as_share(costs.edge_cut), "edges from another part"),
    ]
    if costs.remote_share is not None:
        shown.append(("remote rows", as_share(costs.remote_share), "of a batch"))
    cards = [Card("At a glance", key_figures(shown)), Card("Parts", _parts(costs.parts))]
    if len(costs.cuts) > 1:
        rows = [[cut.relation, as_count(cut.num_edges), _share(cut.num_cut, cut.num_edges)] for cut in costs.cuts]
        cards.append(Card("Relations", table_markup(["relation", "edges", "from another part"], rows)))
    if costs.caches:
        rows = [[as_share(cache.nodes), as_share(cache.hits)] for cache in costs.caches]
        text = "A cache in each process holds the rows of other parts that batches ask for most."
        cards.append(Card("Caches", table_markup(["cached, of the other parts' nodes", "rows it answers"], rows), text))
    sampled = [f"{name}: {value}" for name, value in costs.sampling.items()]
    return Page(title, " · ".join(["partitioned store", *sampled]), cards)


def _parts(parts: Sequence[PartCost]) -> str:
    drawn = ""
    if any(part.batch_rows for part in parts):
        names = ("rows of its own part", "rows of other parts")
        rows = []
        for number, part in enumerate(parts):
            remote = part.remote_rows or 0.0
            amounts = dict(zip(names, ((part.batch_rows or 0.0) - remote, remote), strict=True))
            rows.append((f"part {number}", amounts, f"{as_count(part.batch_rows or 0)} rows a batch"))
        drawn = bars(rows, names)
    header = ["part", "nodes", "edges", "seeds", "remote rows", "remote bytes a batch"]
    cells = []
    for number, part in enumerate(parts):
        counts = (sum(part.num_nodes.values()), part.num_edges, part.num_seeds)
        asked = _share(part.remote_rows or 0, part.batch_rows or 0), as_bytes(part.remote_bytes or 0)
        cells.append([str(number), *map(as_count, counts), *asked])
    return drawn + table_markup(header, cells)


def _share(some: float, of_all: float) -> str:
    return as_share(some / of_all) if of_all else "-"
