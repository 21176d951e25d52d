"""What a loader tells the other ranks of itself names every option that changes its batches."""

from typing import Any

import pytest
from support.graphs import ring

from hoploom import NeighborLoader


def told(**options: Any) -> dict[str, str]:
    return dict(NeighborLoader(ring(12), [2], **options).reading().settings)


def hook(layer: int, graph: Any, seeds: Any) -> Any:
    return graph.in_edges(seeds)


@pytest.mark.parametrize(
    ("name", "value", "beside"),
    [
        ("sample_frontier", hook, {"mode": "blocks"}),
        ("fields", ["x"], {}),
        ("degrees", True, {}),
        ("replace", True, {}),
        ("batch_size", 3, {}),
    ],
)
def test_ranks_that_differ_in_an_option_see_it_by_its_name(name: str, value: Any, beside: dict[str, Any]) -> None:
    one, other = told(**beside), told(**beside, **{name: value})
    assert [key for key in one if one[key] != other[key]] == [name]
    assert told(**beside, **{name: value}) == other
