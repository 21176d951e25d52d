"""Partitioned stores on a page of the same form."""

from pathlib import Path

from hoploom.cli import main
from hoploom.ingest.synthetic import generate


def test_a_partition_is_a_page_by_the_name_of_its_file(tmp_path: Path) -> None:
    generate(tmp_path / "graph.store", num_nodes=2000, num_features=4)
    words = ["partition", str(tmp_path / "graph.store"), "-o", str(tmp_path / "graph.parts"), "--parts", "2"]
    assert main([*words, "--report", str(tmp_path / "parts.html")]) == 0
    html = (tmp_path / "parts.html").read_text()
    for expected in ("edges from another part", "part 1", "rows of other parts"):
        assert expected in html
