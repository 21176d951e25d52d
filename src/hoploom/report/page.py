"""Make one HTML page from cards, with its scripts and styles inside and all text escaped.

The page asks the browser to forbid every request (Content-Security-Policy), so even a mistake cannot send data out.
The page contains uPlot (51 kB), which draws the curves and lets the reader zoom in and read values.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any, Literal

State = Literal["good", "busy", "bad"]


@dataclass(frozen=True)
class Curve:
    """A line of a chart: points, and the band of least and largest values if a point stands for several steps."""

    label: str
    run: int  # the index of the run, which determines the colour
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    is_dotted: bool = False  # a curve of few points, each drawn with a mark


@dataclass(frozen=True)
class Figure:
    """A chart of curves over training steps. The values are numbers or bytes, as `unit` tells."""

    key: str
    title: str
    curves: Sequence[Curve]
    unit: str = "number"
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        curves = [
            {
                "label": curve.label,
                "run": curve.run,
                "dotted": curve.is_dotted,
                "data": [curve.x, curve.y, *([curve.low, curve.high] if curve.low else [])],
            }
            for curve in self.curves
        ]
        return {"key": self.key, "title": self.title, "unit": self.unit, "curves": curves}


@dataclass(frozen=True)
class Card:
    """A titled section of a page. `body` is HTML, made by functions such as `table_markup` and `charts`."""

    title: str
    body: str
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The content of a page, top to bottom."""

    title: str
    subtitle: str
    cards: Sequence[Card]
    charts: Sequence[Figure] = ()
    states: Sequence[tuple[str, State]] = ()
    steps_per_epoch: Sequence[float] = ()  # by run; 0: not known

    def markup(self) -> str:
        """Return the HTML of the page's body."""
        pills = "".join(f'<span class="pill {state}">{escape(text)}</span>' for text, state in self.states)
        head = f"<header><h1>{escape(self.title)} {pills}</h1><p>{escape(self.subtitle)}</p></header>"
        for card in self.cards:
            note = f'<p class="note">{escape(card.note)}</p>' if card.note else ""
            head += f'<section class="card"><h2>{escape(card.title)}</h2>{note}{card.body}</section>'
        return head

    def figures(self) -> dict[str, Any]:
        """Return the charts in the form that the page's script reads."""
        return {"charts": [chart.as_dict() for chart in self.charts], "perEpoch": self.steps_per_epoch}


def as_html(page: Page, *, is_live: bool = False) -> str:
    """Return the whole page as HTML. With `is_live`, the page's script asks the server for changes."""
    connect = "'self'" if is_live else "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src {connect}; "
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}img-src data:; base-uri \'none\'">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
            f'<title>{escape(page.title)}</title>\n<link rel="icon" href="data:,">',
            f"<style>\n{_asset('uPlot.min.css')}\n{_asset('page.css')}</style>\n</head>",
            f"<body{' data-live' if is_live else ''}>\n<main>{page.markup()}</main>",
            f'<script type="application/json" id="figures">{as_script_json(page.figures())}</script>',
            f"<script>\n/*! uPlot:\n{_asset('uPlot.LICENSE')}\n*/\n{_asset('uPlot.min.js')}\n</script>",
            f"<script>\n{_asset('page.js')}\n</script>\n</body>\n</html>\n",
        )
    )


def encoded(page: Page, *, is_live: bool = False) -> bytes:
    """Return the whole page as HTML in UTF-8. Folder names that are not valid UTF-8 are shown with escapes."""
    return as_html(page, is_live=is_live).encode("utf-8", "backslashreplace")


def as_script_json(content: Any) -> str:
    """Return JSON for a script element, with <, > and & escaped so that no text can end the element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (resources.files("hoploom.report") / "assets" / name).read_text(encoding="utf-8")


# --- bodies of cards -----------------------------------------------------------------------------


def key_figures(shown: Sequence[tuple[str, str, str]]) -> str:
    """Return the HTML of important numbers in large type, side by side: a name, a value and a remark of each."""
    cells = (
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"
        for what, value, remark in shown
    )
    return f'<dl class="numbers">{"".join(cells)}</dl>'


def table_markup(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_text: int = 1) -> str:
    """Return an HTML table; the first `num_text` columns are text, the other columns are numbers."""
    kinds = [' class="n"' if column >= num_text else "" for column in range(len(header))]
    head = "".join(f"<th{kind}>{escape(cell)}</th>" for kind, cell in zip(kinds, header, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def bars(rows: Sequence[tuple[str, Mapping[str, float], str]], names: Sequence[str]) -> str:
    """Return the HTML of stacked bars on one scale.

    A row is a label, amounts by name, and a remark; `names` gives the order of colours.
    """
    most = max((sum(amounts.values()) for _, amounts, _ in rows), default=0.0) or 1.0
    colours = {name: number for number, name in enumerate(names)}
    present = [name for name in names if any(amounts.get(name, 0) > 0 for _, amounts, _ in rows)]
    keys = "".join(f'<li><i class="c{colours[name]}"></i>{escape(name)}</li>' for name in present)
    drawn = []
    for label, amounts, remark in rows:
        pieces = "".join(
            f'<i class="c{colours[name]}" style="width:{100 * amount / most:.3f}%" '
            f'title="{escape(name)}: {100 * amount / (sum(amounts.values()) or 1):.1f} %"></i>'
            for name, amount in amounts.items()
            if amount > 0
        )
        drawn.append(
            f'<div class="row"><span>{escape(label)}</span><div class="bar">{pieces}</div><b>{escape(remark)}</b></div>'
        )
    return f'<div class="bars">{"".join(drawn)}</div><ul class="keys">{keys}</ul>'


def charts(shown: Sequence[Figure]) -> str:
    """Return the HTML elements into which the page's script draws charts. They have text for screen readers."""
    figures = ""
    for chart in shown:
        ends = []
        for curve in chart.curves:
            known = [value for value in curve.y if value is not None]
            if known:
                ends.append(f"{curve.label}: from {known[0]:.4g} to {known[-1]:.4g} at step {curve.x[-1]:,.0f}")
        label = escape(f"{chart.title}. {'; '.join(ends)}")
        figures += (
            f'<figure data-chart="{escape(chart.key)}" role="img" aria-label="{label}">'
            f"<figcaption><h3>{escape(chart.title)}</h3></figcaption>"
            f'<p class="note">{escape(chart.note)}</p></figure>'
        )
    return f'<div class="charts">{figures}</div>'


def notices(texts: Sequence[str]) -> str:
    return f'<ul class="notices">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ul>'


def listing(title: str, text: str) -> str:
    """Return the HTML of a file's text, collapsed at first; the page's script adds a button that copies the text."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
