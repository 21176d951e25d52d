"""A partition report as a picture: SVG written by hand, so that nothing needs to be installed to draw it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from hoploom.partition.report import PartCost, PartitionReport

WIDTH, ROW = 920, 300  # pixels of the picture, and of a row of charts
GRID, INK = "#d9d9d9", "#222222"
COLOURS = {"nodes": "#0072b2", "edges": "#e69f00", "seeds": "#009e73", "own": "#9ecae1", "remote": "#d55e00"}
MOST_LABELS = 12
TICKS = 5
AROUND_ONE = (1.25, 2.5, 5, 10)  # heights of a chart one of whose ticks is 1


def as_svg(costs: PartitionReport) -> str:
    """The report to look at: balance of the parts, rows of their batches, hit rates of caches.

    >>> Path("report.svg").write_text(as_svg(report("papers.parts")))
    """
    sampled = costs.remote_share is not None
    height = 70 + ROW * (1 + sampled)
    shapes = [*_title(costs), *_balance(Frame(70, 120, WIDTH - 100, ROW - 130), costs.parts)]
    if sampled:
        shapes += _batches(Frame(70, 120 + ROW, 360, ROW - 130), costs.parts)
        shapes += _caches(Frame(540, 120 + ROW, 350, ROW - 130), costs)
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    style = f'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="{INK}"'
    background = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', background, *shapes, "</svg>\n"])


@dataclass(frozen=True)
class Frame:
    """Where a chart's bars or points lie."""

    left: float
    top: float
    width: float
    height: float

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, share: float) -> float:
        return self.left + share * self.width

    def y(self, share: float) -> float:
        return self.bottom - share * self.height


# --- charts ----------------------------------------------------------------------------------


def _title(costs: PartitionReport) -> Iterator[str]:
    count = len(costs.parts)
    yield _text(24, 34, f"{count} part{'s' * (count != 1)}", size=20, bold=True)
    told = f"{100 * costs.edge_cut:.1f} % of the edges"
    if costs.remote_share is not None:
        told += f" and {100 * costs.remote_share:.1f} % of the rows of a batch"
    yield _text(24, 56, f"{told} come from another part")


def _balance(frame: Frame, parts: Sequence[PartCost]) -> Iterator[str]:
    """What each part holds, as a multiple of the average."""
    counts = {
        "nodes": [sum(part.num_nodes.values()) for part in parts],
        "edges": [part.num_edges for part in parts],
        "seeds": [part.num_seeds for part in parts],
    }
    shown = {name: _by_average(values) for name, values in counts.items() if any(values)}
    top = _ceiling(max(max(values) for values in shown.values()), AROUND_ONE)
    yield from _headed(frame, "What each part holds (1 is the average)", list(shown))
    yield from _grid(frame, top, lambda value: f"{value:g}")
    bars = [[(name, values[number] / top) for name, values in shown.items()] for number in range(len(parts))]
    for number, group in enumerate(bars):
        left, width = _slot(frame, number, len(parts))
        for place, (name, share) in enumerate(group):
            yield _bar(frame, left + width * place / len(group), width / len(group), (0, share), COLOURS[name])
    yield from _part_labels(frame, len(parts))


def _by_average(values: Sequence[int]) -> list[float]:
    return [value * len(values) / sum(values) for value in values]


def _batches(frame: Frame, parts: Sequence[PartCost]) -> Iterator[str]:
    """How many rows a batch of each part needs, and where they come from."""
    top = _ceiling(max(max(part.batch_rows or 0 for part in parts), 1))
    yield from _headed(frame, "Rows of a batch", ["own", "remote"])
    yield from _grid(frame, top, _short)
    for number, part in enumerate(parts):
        left, width = _slot(frame, number, len(parts))
        own = ((part.batch_rows or 0) - (part.remote_rows or 0)) / top
        yield _bar(frame, left, width, (0, own), COLOURS["own"])
        yield _bar(frame, left, width, (own, (part.batch_rows or 0) / top), COLOURS["remote"])
    yield from _part_labels(frame, len(parts))


def _caches(frame: Frame, costs: PartitionReport) -> Iterator[str]:
    """How many remote rows a cache answers, by its size."""
    yield from _headed(frame, "Remote rows that a cache answers", [])
    yield from _grid(frame, 1.0, lambda value: f"{100 * value:.0f} %")
    widest = max((cache.nodes for cache in costs.caches), default=1.0)
    points = [(frame.x(0), frame.y(0))]
    points += [(frame.x(cache.nodes / widest), frame.y(cache.hits)) for cache in costs.caches]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{line}" fill="none" stroke="{COLOURS["nodes"]}" stroke-width="2"/>'
    for (x, y), cache in zip(points[1:], costs.caches, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS["nodes"]}"/>'
        below = cache.hits > 0.15  # the line rises to the left of it; close to the axis there is only room above
        anchor = "end" if cache is costs.caches[-1] else "start" if below else "middle"
        place = (x + 6 * (anchor == "start"), y + 18 if below else y - 10)
        yield _text(*place, f"{100 * cache.hits:.0f} %", anchor=anchor)
        yield _text(x, frame.bottom + 18, f"{100 * cache.nodes:g}", anchor="middle")
    yield _text(frame.x(0.5), frame.bottom + 38, "size of the cache, % of the other parts' nodes", anchor="middle")


# --- what charts share -----------------------------------------------------------------------


def _headed(frame: Frame, title: str, names: Sequence[str]) -> Iterator[str]:
    yield _text(frame.left - 46, frame.top - 24, title, size=15, bold=True)
    x = frame.left + frame.width - sum(_legend_width(name) for name in names)
    for name in names:
        yield f'<rect x="{x:.1f}" y="{frame.top - 35:.1f}" width="12" height="12" fill="{COLOURS[name]}"/>'
        yield _text(x + 17, frame.top - 24, name)
        x += _legend_width(name)


def _legend_width(name: str) -> float:
    return 34 + 7 * len(name)


def _grid(frame: Frame, top: float, label: Callable[[float], str]) -> Iterator[str]:
    for tick in range(TICKS + 1):
        y = frame.y(tick / TICKS)
        ends = f'x1="{frame.left:.1f}" x2="{frame.x(1):.1f}" y1="{y:.1f}" y2="{y:.1f}"'
        yield f'<line {ends} stroke="{INK if tick == 0 else GRID}" stroke-width="1"/>'
        yield _text(frame.left - 8, y + 4, label(top * tick / TICKS), anchor="end")


def _slot(frame: Frame, number: int, count: int) -> tuple[float, float]:
    """Left end and width of a part's bars."""
    whole = frame.width / count
    width = min(0.7 * whole, 90)
    return frame.left + whole * (number + 0.5) - width / 2, width


def _part_labels(frame: Frame, count: int) -> Iterator[str]:
    step = -(-count // MOST_LABELS)
    for number in range(0, count, step):
        left, width = _slot(frame, number, count)
        yield _text(left + width / 2, frame.bottom + 18, str(number), anchor="middle")
    yield _text(frame.x(0.5), frame.bottom + 38, "part", anchor="middle")


def _bar(frame: Frame, left: float, width: float, ends: tuple[float, float], colour: str) -> str:
    top, bottom = frame.y(ends[1]), frame.y(ends[0])
    size = f'width="{max(width - 1, 0.5):.1f}" height="{bottom - top:.1f}"'
    return f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="{colour}"/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, bold: bool = False) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}"' + (' font-weight="bold"' if bold else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def _ceiling(value: float, steps: Sequence[float] = (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10)) -> float:
    """The next number whose fifths are short to write."""
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * step for step in steps if power * step >= value)


def _short(value: float) -> str:
    """A count in few letters."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
