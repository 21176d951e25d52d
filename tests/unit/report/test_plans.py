"""Plans and partitioned stores on a page of the same form."""

import re
from pathlib import Path

import pytest

from hoploom.cli import main
from hoploom.ingest.synthetic import generate


def as_number(text: str) -> float:
    return float(text.replace(",", ""))


def test_a_plan_is_a_page_with_all_its_sections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", "--nodes", "1e9", "--edges", "1e11", "--hosts", "16", "-o", str(page)]) == 0
    text, html = capsys.readouterr().out, page.read_text()
    assert "<h1>Plan" in html
    titles = [block.splitlines()[0] for block in text.split("\n\n")[1:-1]]
    assert len(titles) == 6
    for title in titles:
        assert f"<h2>{title}</h2>" in html
    memory = html.partition("<h2>Memory and disk of a host</h2>")[2].partition("</section>")[0]
    used, whole = (as_number(part) for part in re.findall(r"<b>(.+) GB of (.+) GB</b>", memory)[0])
    drawn = sum(map(float, re.findall(r"width:([\d.]+)%", memory)))
    assert drawn == pytest.approx(100 * used / whole, abs=0.5)  # what is left of the bar is free
    assert main(["plan", "--nodes", "1e9", "--edges", "1e11", "-o", str(tmp_path / "no" / "plan.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_partition_is_a_page_by_the_name_of_its_file(tmp_path: Path) -> None:
    generate(tmp_path / "graph.store", num_nodes=2000, num_features=4)
    words = ["partition", str(tmp_path / "graph.store"), "-o", str(tmp_path / "graph.parts"), "--parts", "2"]
    assert main([*words, "--report", str(tmp_path / "parts.html")]) == 0
    html = (tmp_path / "parts.html").read_text()
    for expected in ("edges from another part", "part 1", "rows of other parts", "Caches"):
        assert expected in html
