"""Bar charts of the README and docs/disk.md, drawn from what was measured. Colours follow the page: light or dark."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from report import ROOT, Report, Row

WIDTH, LEFT, RIGHT = 760, 220, 60
TITLES, BAR, GAP = 76, 22, 12
STEPS = (
    "PyG, pyg-lib, trim_to_layer",
    "DGL",
)  # each peer at its best: those that sample with torch-sparse are in RESULTS.md


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


@dataclass(frozen=True)
class Group:
    """Bars of one kind of work."""

    title: str
    detail: str
    bars: Sequence[tuple[str, Row]]

    @property
    def height(self) -> int:
        return TITLES + len(self.bars) * (BAR + GAP)


LONGEST = 20.0  # times ours: a bar of more would leave no room for the others
OF_SPEED = "2.1 M nodes, 124 M edges, 100 floats a node; 2 CPU cores; each pair in turns in one run"
OF_DISK = "10 M nodes, 120 M edges, 128 floats a node; 1.5 GB of memory; a disk of 17,600 requests and 530 MB a second"


def drawn(libraries: Report, training: Report, disk: Report) -> dict[Path, str]:
    """The charts' files and texts."""
    loading = Group(
        "Time to load a batch: Hoploom = 1, shorter is better",
        "1,024 seeds, fanouts 15, 10, 5, feature rows included; 2 workers",
        [(row.baseline, row) for row in libraries.rows],
    )
    step = Group(
        "Time of a training step: Hoploom = 1, shorter is better",
        "GraphSAGE, 3 layers of 256; each library's own layers",
        [(row.baseline, row) for row in training.rows if row.baseline in STEPS],
    )
    questions = dict.fromkeys(row.question for row in disk.rows)
    from_disk = [Group(*_titles(question), _compared(disk, question)) for question in questions]
    images = ROOT / "docs" / "images"
    return {
        images / "speed.svg": _svg([group for group in (loading, step) if group.bars], OF_SPEED),
        images / "disk.svg": _svg([group for group in from_disk if group.bars], OF_DISK),
    }


def _titles(question: str) -> tuple[str, str]:
    _, seeds, fanouts = question.split(", ")
    return "Time for a batch from disk: Hoploom with scratch space = 1", f"{seeds}, fanouts {fanouts}"


def _compared(disk: Report, question: str) -> list[tuple[str, Row]]:
    return [(r.baseline, r) for r in disk.rows if r.question == question and 0 < (r.ratio or 0) < LONGEST]


def _svg(groups: Sequence[Group], below: str) -> str:
    """Group below group, all bars to the same scale: a library's time over ours, and ours on top of it."""
    bars = [bar for group in groups for bar in group.bars]
    height = sum(group.height for group in groups) + 30
    scale = (WIDTH - LEFT - RIGHT) / max((row.ratio or 1 for _, row in bars), default=1)
    ratios = "; ".join(f"{name}: {row.ratio:.3g}" for name, row in bars if row.ratio)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title">',
        f'  <title id="title">Time for the same work, where Hoploom takes 1. {escape(ratios)}</title>',
        f"  {STYLE}",
    ]
    top = 0
    for group in groups:
        lines += [_text(0, top + 18, group.title, "title"), _text(0, top + 38, group.detail, "small")]
        for number, bar in enumerate(group.bars):
            lines += _bar(top + 54 + number * (BAR + GAP), *bar, scale)
        top += group.height
    return "\n".join([*lines, _text(0, height - 8, below, "small"), "</svg>", ""])


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
