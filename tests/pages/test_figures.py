"""Measured figures in the README and the documentation are those of the files in benchmarks/results/."""

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# 16.5<!-- libraries | a batch of subgraphs, 2 workers | PyG, torch-sparse | ratio -->
CITED = re.compile(r"([\d.,]*\d)[^\d\s<]*(?: [^\d<|]{1,30})?<!-- (\w+) \| (.+?) \| (.+?) \| (ours|theirs|ratio) -->")
MARKER = re.compile(r"<!-- \w+ \| ")
CLAIM = re.compile(
    r"\d[\d.,]*(?: ?(?:times|x) (?:faster|slower|as fast|the speed)"
    r"| ?(?:[GM]B/s|M (?:picks|edges|sampled edges)/s|seeds/s|ms/batch)|(?: ?%| percent) (?:faster|slower))"
)
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("recorded")


def stored(group: str, question: str, baseline: str, column: str) -> float:
    folder = RESULTS / "devices" if group.startswith("gpu_") else RESULTS
    found: dict[str, Any] = json.loads((folder / f"{group}.json").read_text())
    rows: list[dict[str, Any]] = found.get("rows") or [
        row for one in found["benchmarks"].values() for row in one.get("rows", [])
    ]
    (row,) = [row for row in rows if (row["question"], row["baseline"]) == (question, baseline)]
    return float(row["ratio"] if column == "ratio" else row[column]["median"])


def as_shown(value: float, text: str) -> str:
    digits = re.sub(r"\D", "", text).lstrip("0")
    places = len(text.partition(".")[2])
    return f"{value:.{places}f}" if places else f"{float(f'{value:.{len(digits)}g}'):.0f}"


def test_the_table_of_results_and_the_chart_are_made_from_what_was_measured(recorded: ModuleType) -> None:
    for path, text in recorded.pages().items():
        assert path.read_text() == text, f"{path.name} differs; python benchmarks/recorded.py writes it again"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_cited_figure_is_the_measured_one(page: Path) -> None:
    text = page.read_text()
    cited = CITED.findall(text)
    assert len(cited) == len(MARKER.findall(text))
    for shown, *where in cited:
        assert as_shown(stored(*where), shown) == shown.replace(",", ""), where


def test_the_first_pages_compare_with_the_fastest_installation_of_each_library() -> None:
    cited = [found for page in ("README.md", "docs/index.md") for found in CITED.findall((ROOT / page).read_text())]
    assert {baseline for _, _, _, baseline, _ in cited} >= {"PyG, pyg-lib", "GraphBolt"}
    assert "torch-sparse" not in str(cited) + (ROOT / "docs/images/speed.svg").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_speed_is_claimed_without_its_measurement(page: Path) -> None:
    prose = CODE.sub("", page.read_text())
    claims = [prose[found.start() : found.end() + 40] for found in CLAIM.finditer(prose)]
    assert not [claim for claim in claims if "<!-- " not in claim]


def test_a_wrong_figure_and_a_bare_claim_are_seen() -> None:
    (cited,) = CITED.findall("16.5 times<!-- core | a question | PyG, torch-sparse | ratio -->")
    assert cited == ("16.5", "core", "a question", "PyG, torch-sparse", "ratio")
    assert [as_shown(16.49, text) for text in ("16.5", "16", "20")] == ["16.5", "16", "16"]
    assert [as_shown(0.0376, text) for text in ("0.04", "0.038")] == ["0.04", "0.038"]
    assert all(CLAIM.search(text) for text in ("it is 12.3 times faster", "1.5 GB/s"))
    assert not CLAIM.search("600 seconds")


def test_the_table_of_the_plan_is_the_measured_one() -> None:
    """docs/scale.md: edges, what, unit, measured, planned, ratio."""
    table = re.findall(r"^\| ([\d.]+ M) \|(.*)\|$", (ROOT / "docs" / "scale.md").read_text(), re.MULTILINE)
    rows = json.loads((RESULTS / "scale.json").read_text())["rows"]
    for edges, cells in table:
        what, _, measured, planned, _ = (cell.strip() for cell in cells.split("|"))
        (row,) = [row for row in rows if row["question"] == f"{edges} edges: {what}"]
        assert as_shown(row["ours"]["median"], measured) == measured
        assert planned == "-" or as_shown(row["theirs"]["median"], planned) == planned
    assert len(table) == len(rows)
