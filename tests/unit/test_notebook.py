"""What a notebook and a terminal show of hoploom's objects: right figures, nothing unescaped, one short line."""

from pathlib import Path

import pytest
import torch
from support.batch_servers import listening
from support.graphs import library, ring

import hoploom
from hoploom import LinkNeighborLoader, NeighborLoader, html
from hoploom.train.loop import Outcome


def test_a_table_is_escaped_and_sets_figures_to_the_right() -> None:
    shown = html.table("a & b", ["name", "count"], [["<i>", "1,234"], ["x", "5 kB"]])
    assert "a &amp; b" in shown
    assert "<td>&lt;i&gt;</td><td class=figure>1,234</td>" in shown
    assert "<th>name</th><th class=figure>count</th>" in shown
    assert "<thead>" not in html.table("none", ["", ""], [["a", "b"]])


@pytest.mark.parametrize(
    ("loader", "line"),
    [
        (
            lambda: NeighborLoader(ring(3005), [5, 3], torch.arange(3005), batch_size=32),
            "NeighborLoader(3,005 seeds, 94 steps of 32, fanouts [5, 3], rank 0 of 1, the only process)",
        ),
        (
            lambda: NeighborLoader(hoploom.from_pyg(ring(24)), [-1], "train", batch_size=4, rank=1, world_size=2),
            "NeighborLoader(train: 12 seeds, 2 steps of 4, fanouts [-1], rank 1 of 2, as given)",
        ),
        (
            lambda: LinkNeighborLoader(library(), [2], ("paper", "cites", "paper"), batch_size=9),
            "LinkNeighborLoader(paper cites paper: 36 seeds, 4 steps of 9, fanouts [2], rank 0 of 1, the only process)",
        ),
    ],
)
def test_a_loader_says_in_one_line_and_one_table_what_it_reads(loader: object, line: str) -> None:
    made = loader()  # type: ignore[operator]
    assert repr(made) == line
    assert str(made) == f"{type(made).__name__}()"  # as PyG's
    assert f"<td>steps</td><td>{made.shown()['steps']}</td>" in made._repr_html_()


def test_fanouts_that_differ_name_their_relation() -> None:
    fanouts = {key: [2, -1] if key[0] == "author" else [1, 0] for key in library().edge_types}
    loader = NeighborLoader(library(), fanouts, "paper", batch_size=5)
    assert ", fanouts author writes paper [2, -1]; " in repr(loader)
    assert loader.shown()["steps"] == "2, of 5 seeds each"


def test_a_store_on_servers_says_so(tmp_path: Path) -> None:
    hoploom.from_pyg(ring(12)).save(tmp_path / "ring")
    assert "Store in memory: 12 nodes" in hoploom.from_pyg(ring(12))._repr_html_()
    with listening(tmp_path / "ring") as served, hoploom.connect([served.address]) as store:
        assert "Store on servers: 12 nodes" in store._repr_html_()


def test_reports_are_tables(tmp_path: Path) -> None:
    hoploom.from_pyg(ring(12)).save(tmp_path / "whole")
    costs = hoploom.partition(tmp_path / "whole", tmp_path / "parts", 2, method="range")  # type: ignore[operator]
    assert "2 parts, edges from another part: 25.0 %" in costs._repr_html_()
    assert costs._repr_html_().count("<tr>") == 3
    assert repr(costs) == (
        "<PartitionReport: 2 parts, edges from another part: 25.0 %, rows of a batch from another part: 50.0 %>"
    )
    outcome = Outcome(20, 2, 0.5, 2, [{"epoch": 1, "train_loss": 1.25}, {"epoch": 2, "train_loss": 0.5}], "done")
    assert "20 steps, 2 epochs, done" in outcome._repr_html_()
    assert "<td class=figure>1.25</td>" in outcome._repr_html_()
