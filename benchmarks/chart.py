"""The bar chart of the README, drawn from what was measured. Its colours follow the page: light or dark."""

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from report import ROOT, Report, Row

WIDTH, LEFT, RIGHT = 760, 220, 60
TOP, BAR, GAP = 58, 22, 12


STYLE = """<style>
    text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1d2736; }
    .title { font-size: 16px; font-weight: 600; }
    .figure { font-weight: 600; }
    .small { font-size: 12px; fill: #4a586e; }
    .ours { fill: #00796b; }
    .theirs { fill: #c3ccda; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e8edf5; }
      .small { fill: #b4c0d3; }
      .ours { fill: #4db6ac; }
      .theirs { fill: #4a586e; }
    }
  </style>"""


def drawn(libraries: Report, training: Report) -> dict[Path, str]:
    """The chart's file and text."""
    bars = [(row.baseline, row) for row in libraries.rows]
    bars += [(f"{row.baseline}, a training step", row) for row in training.rows[:1]]
    return {ROOT / "docs" / "images" / "speed.svg": _svg(bars)}


def _svg(bars: Sequence[tuple[str, Row]]) -> str:
    """One bar per library: its time over ours, and ours on top of it."""
    height = TOP + len(bars) * (BAR + GAP) + 30
    longest = max((row.ratio or 1 for _, row in bars), default=1)
    scale = (WIDTH - LEFT - RIGHT) / longest
    ratios = "; ".join(f"{name}: {row.ratio:.3g}" for name, row in bars if row.ratio)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title">',
        f'  <title id="title">Time for the same work, where Hoploom takes 1. {escape(ratios)}</title>',
        f"  {STYLE}",
        _text(0, 18, "Time for the same work; Hoploom takes 1", "title"),
        _text(0, 38, "A batch of 1,024 seeds with fanouts 15, 10, 5 and its feature rows; or a training step", "small"),
        *(line for number, bar in enumerate(bars) for line in _bar(TOP + number * (BAR + GAP), *bar, scale)),
        _text(
            0, height - 8, "2.1 M nodes, 124 M edges, 100 floats a node; 2 CPU cores; in turns in the same run", "small"
        ),
    ]
    return "\n".join([*lines, "</svg>", ""])


def _bar(y: int, name: str, row: Row, scale: float) -> list[str]:
    ratio = row.ratio or 0
    middle = y + BAR - 6
    return [
        _text(LEFT - 10, middle, name, "name", ' text-anchor="end"'),
        f'  <rect class="theirs" x="{LEFT}" y="{y}" width="{ratio * scale:.1f}" height="{BAR}" rx="2"/>',
        f'  <rect class="ours" x="{LEFT}" y="{y}" width="{scale:.1f}" height="{BAR}" rx="2"/>',
        _text(LEFT + ratio * scale + 8, middle, f"{ratio:.3g}", "figure"),
    ]


def _text(x: float, y: float, text: str, kind: str, how: str = "") -> str:
    return f'  <text class="{kind}" x="{x:.1f}" y="{y:.1f}"{how}>{escape(text)}</text>'
