"""The pages of a plan and of a partitioned store, in the form of a run's."""

from collections.abc import Mapping, Sequence

from hoploom.config.values import as_bytes, as_count, as_seconds, as_share
from hoploom.partition.report import PartCost, PartitionReport
from hoploom.report.page import Card, Page, State, bars, key_figures, notices, table_markup
from hoploom.scale.plan import ScalePlan, findings
from hoploom.scale.text import Line, headline, sections

STATES: Mapping[str, tuple[str, State]] = {
    "breaks": ("does not fit", "bad"),
    "slow": ("fits, but is slow", "busy"),
    "fits": ("fits", "good"),
}
HOST, STEP = "Memory and disk of a host", "Time of a step"  # sections with a bar


def plan_page(answer: ScalePlan) -> Page:
    """Return the page of a plan."""
    asked, *constants = headline(answer).split("\n")
    limits = findings(answer)
    found = [f"{limit.level}: {limit.what}. Way out: {limit.way_out}" for limit in limits]
    level = limits[0].level if limits else "fits"  # the worst is first
    host = {item.name: item.memory for item in answer.store if item.memory}
    host |= {"trainers": answer.private - answer.cached}
    names = ("sampling", "gathering", "network", "model")
    times = {name: float(getattr(answer.times, name)) for name in names}
    memory = float(answer.question.memory_per_host)
    drawn = {
        HOST: bars(
            [("", host, f"{as_bytes(answer.wanted)} of {as_bytes(answer.question.memory_per_host)}")], [*host], memory
        ),
        STEP: bars([(name, {name: value}, as_seconds(value)) for name, value in times.items() if value], names),
    }
    shown = [
        ("memory of a host", as_bytes(answer.wanted), f"of {as_bytes(answer.question.memory_per_host)}"),
        ("disk of a host", as_bytes(answer.disk), ""),
        ("a step", as_seconds(answer.times.total), f"bound by {answer.times.bottleneck}"),
        ("an epoch", as_seconds(answer.steps_per_epoch * answer.times.total), f"{answer.steps_per_epoch:,} steps"),
    ]
    cards = [
        Card("At a glance", key_figures(shown)),
        Card("Limits", notices(found or ["The plan meets no limit."])),
        *(Card(title, drawn.get(title, "") + _section(lines)) for title, lines in sections(answer).items()),
        Card("Constants", notices(constants)),
    ]
    return Page("Plan", asked, cards, states=[STATES[level]])


def _section(lines: Sequence[Line]) -> str:
    if not lines[0][0]:  # a header
        return table_markup(lines[0], lines[1:], has_remarks=True)
    return table_markup([""] * len(lines[0]), lines, has_remarks=True)


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
