"""A partition report as a picture: SVG written by hand, so that nothing needs to be installed to draw it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from hoploom.partition.report import PartitionReport

WIDTH, HEIGHT, LEFT, BARS = 920, 290, 70, 150  # pixels of the picture, of a chart, left of it, of its bars
GRID, INK = "#d9d9d9", "#222222"
COLOURS = {
    "nodes": "#0072b2",
    "edges": "#e69f00",
    "seeds": "#009e73",
    "own": "#9ecae1",
    "remote": "#d55e00",
    "hits": "#56b4e9",
}
MOST_LABELS = 12
TICKS = 5


@dataclass(frozen=True)
class Chart:
    """Bars of several series, side by side or on each other."""

    title: str
    axis: str  # what the labels are
    labels: Sequence[str]
    series: Mapping[str, Sequence[float]]  # name -> a value per label
    tick: Callable[[float], str]
    stacked: bool = False


def as_svg(costs: PartitionReport) -> str:
    """The report to look at: balance of the parts, rows of their batches, hit rates of caches.

    >>> Path("report.svg").write_text(as_svg(report("papers.parts")))
    """
    charts = list(_charts(costs))
    height = 70 + HEIGHT * len(charts)
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    shapes = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" fill="{INK}">']
    shapes += [f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *_title(costs)]
    for number, chart in enumerate(charts):
        shapes += _drawn(chart, 70 + HEIGHT * number)
    return "\n".join([*shapes, "</svg>\n"])


def _title(costs: PartitionReport) -> Iterator[str]:
    count = len(costs.parts)
    yield _text(24, 34, f"{count} part{'s' * (count != 1)}", size=20)
    remote = f"{100 * costs.edge_cut:.1f} % of the edges"
    if costs.remote_share is not None:
        remote += f" and {100 * costs.remote_share:.1f} % of the rows of a batch"
    yield _text(24, 56, f"{remote} come from another part")


def _charts(costs: PartitionReport) -> Iterator[Chart]:
    numbers = [str(number) for number in range(len(costs.parts))]
    counts = {
        "nodes": [sum(part.num_nodes.values()) for part in costs.parts],
        "edges": [part.num_edges for part in costs.parts],
        "seeds": [part.num_seeds for part in costs.parts],
    }
    balance = {
        name: [value * len(values) / sum(values) for value in values] for name, values in counts.items() if any(values)
    }
    yield Chart("What each part holds (1 is the average)", "part", numbers, balance, "{:g}".format)
    if costs.remote_share is None:
        return
    remote = [part.remote_rows or 0 for part in costs.parts]
    own = [(part.batch_rows or 0) - rows for part, rows in zip(costs.parts, remote, strict=True)]
    yield Chart("Rows of a batch", "part", numbers, {"own": own, "remote": remote}, "{:,.10g}".format, stacked=True)
    sizes = [f"{100 * cache.nodes:g}" for cache in costs.caches]
    hits = {"hits": [100 * cache.hits for cache in costs.caches]}
    axis = "size of the cache, % of the other parts' nodes"
    yield Chart("Remote rows that a cache answers", axis, sizes, hits, "{:g} %".format)


def _drawn(chart: Chart, top: float) -> Iterator[str]:
    """Title and legend, grid, bars, labels."""
    yield _text(24, top + 30, chart.title, size=15)
    for number, name in enumerate(chart.series):
        x = WIDTH - 100 * (len(chart.series) - number)
        yield _bar(x, top + 19, 12, 12, COLOURS[name])
        yield _text(x + 17, top + 30, name)
    tops = [sum(values) if chart.stacked else max(values) for values in zip(*chart.series.values(), strict=True)]
    highest, bottom, width = _ceiling(max(tops, default=1)), top + 60 + BARS, WIDTH - LEFT - 30
    for tick in range(TICKS + 1):
        y = bottom - BARS * tick / TICKS
        yield _bar(LEFT, y, width, 1, GRID if tick else INK)
        yield _text(LEFT - 8, y + 4, chart.tick(highest * tick / TICKS), anchor="end")
    slot = width / max(1, len(chart.labels))
    for number, label in enumerate(chart.labels):
        left, y = LEFT + slot * number, bottom
        for place, (name, values) in enumerate(chart.series.items()):
            high = BARS * values[number] / highest
            if chart.stacked:
                y -= high
                yield _bar(left + 0.15 * slot, y, 0.7 * slot, high, COLOURS[name])
            else:
                each = 0.7 * slot / len(chart.series)
                yield _bar(left + 0.15 * slot + each * place, bottom - high, each, high, COLOURS[name])
        if number % -(-len(chart.labels) // MOST_LABELS) == 0:
            yield _text(left + slot / 2, bottom + 18, label, anchor="middle")
    yield _text(LEFT + width / 2, bottom + 38, chart.axis, anchor="middle")


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def _ceiling(value: float) -> float:
    """The next number whose fifths are short to write; one of them is 1 for what is an average of 1."""
    power = 1.0
    while power * 10 <= value:
        power *= 10
    return next(power * step for step in (1, 1.25, 2.5, 5, 10) if power * step >= value)
