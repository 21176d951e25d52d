"""What a notebook or a terminal shows of hoploom's objects: one short line."""

from pathlib import Path

import pytest
import torch
from support.graphs import library, ring

import hoploom
from hoploom import LinkNeighborLoader, NeighborLoader


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
def test_a_loader_says_in_one_line_what_it_reads(loader: object, line: str) -> None:
    made = loader()  # type: ignore[operator]
    assert repr(made) == line
    assert str(made) == f"{type(made).__name__}()"  # as PyG's


def test_fanouts_that_differ_name_their_relation() -> None:
    fanouts = {key: [2, -1] if key[0] == "author" else [1, 0] for key in library().edge_types}
    loader = NeighborLoader(library(), fanouts, "paper", batch_size=5)
    assert ", fanouts author writes paper [2, -1]; " in repr(loader)
    assert loader.shown()["steps"] == "2, of 5 seeds each"


def test_reports_are_one_line(tmp_path: Path) -> None:
    hoploom.from_pyg(ring(12)).save(tmp_path / "whole")
    costs = hoploom.partition(tmp_path / "whole", tmp_path / "parts", 2, method="range")  # type: ignore[operator]
    assert repr(costs) == (
        "<PartitionReport: 2 parts, edges from another part: 25.0 %, rows of a batch from another part: 50.0 %>"
    )
