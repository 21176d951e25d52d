"""A plain, escaped HTML table for notebooks, readable on light and dark pages."""

from collections.abc import Sequence
from html import escape

from hoploom.config.values import printable

STYLE = """
.hoploom {margin: .4em 0 .8em; color: inherit; overflow-x: auto}
.hoploom table {border-collapse: collapse; margin: .3em 0 0; width: auto; font-size: .93em}
.hoploom th, .hoploom td {padding: .25em .9em .25em 0; border: 0; border-bottom: 1px solid rgba(128, 128, 128, .3);
 background: none; color: inherit; text-align: left; vertical-align: top; max-width: 40em}
.hoploom th {font-weight: 600; opacity: .75}
.hoploom th, .hoploom .figure {white-space: nowrap}
.hoploom .figure {text-align: right; font-variant-numeric: tabular-nums}
.hoploom p {margin: 0 0 .2em; font-weight: 600}
"""
FIGURES = set("0123456789")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table with a title; without a head row if `columns` is empty. Columns of figures are right-aligned.

    >>> table("Store", ["nodes", "count"], [["paper", "10"]])
    """
    cells = [[str(cell) for cell in row] for row in rows]
    width = max((len(row) for row in cells), default=0)
    right = [_are_figures([row[place] for row in cells]) for place in range(width)]
    heads = "".join(map(_cell, ["th"] * width, columns, right))
    head = f"<thead><tr>{heads}</tr></thead>" if any(columns) else ""
    body = "".join(f"<tr>{''.join(map(_cell, ['td'] * width, row, right))}</tr>" for row in cells)
    whole = f"<table>{head}<tbody>{body}</tbody></table>" if cells else ""
    return f'<div class="hoploom"><style>{STYLE}</style><p>{escape(printable(title))}</p>{whole}</div>'


def _cell(tag: str, text: str, is_figure: bool) -> str:
    return f"<{tag}{' class=figure' * is_figure}>{escape(printable(text))}</{tag}>"


def _are_figures(column: Sequence[str]) -> bool:
    """Return whether all non-empty entries begin with a digit."""
    texts = [text for text in column if text]
    return bool(texts) and all(text[0] in FIGURES for text in texts)
