"""What a frontier hook returns wrongly is told with its layer."""

from typing import Any

import pytest
import torch
from support.graphs import library, ring
from torch import Tensor

from hoploom import ConfigError, Edges, NeighborLoader
from hoploom.sample import LayerGraph

WRITES = ("author", "writes", "paper")
NONE = Edges(*torch.empty(2, 0, dtype=torch.int64))
ONE, TWO = torch.tensor([1]), torch.tensor([1, 2])
ZERO = torch.tensor([0])
WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (None, "returned None; return hoploom.Edges"),
    "a tuple": ((ONE, ZERO), "returned a tuple"),
    "a tensor": (torch.stack([ONE, ZERO]), "a tensor of torch.int64 and shape"),
    "nothing for a relation": ({("node", "to", "node"): None}, "returned None for"),
    "an unknown relation": ({("a", "b", "c"): NONE}, "edges of .'a', 'b', 'c'.; the relations are"),
    "lists": (Edges([1], [0]), "gave sources as a list"),
    "floats": (Edges(torch.tensor([1.0]), ZERO), "gave sources as a tensor of torch.float32"),
    "a matrix": (Edges(ONE, ZERO.view(1, 1)), r"gave destinations as a tensor of torch.int64 and shape \(1, 1\)"),
    "a source too high": (Edges(torch.tensor([12]), ZERO), r"sources that hold 12, out of range \[0, 12\)"),
    "a source too low": (Edges(torch.tensor([-1]), ZERO), "sources that hold -1"),
    "a destination too high": (Edges(ONE, torch.tensor([12])), "destinations that hold 12"),
    "a position too high": (Edges(ONE, ZERO, torch.tensor([24])), r"positions that hold 24, out of range \[-1, 24\)"),
    "no seed": (Edges(ONE, torch.tensor([5])), "an edge to 5, which is no seed"),
    "lengths": (Edges(TWO, ZERO), "'sources': 2, 'destinations': 1"),
    "positions": (Edges(ONE, ZERO, TWO), "'positions': 2"),
    "data too long": (Edges(ONE, ZERO, None, {"w": torch.ones(2)}), r"data\['w'\]\": 2"),
    "data of lists": (Edges(ONE, ZERO, None, {"w": [1.0]}), "gave a list as data"),
    "data without a name": (Edges(ONE, ZERO, None, torch.ones(1)), "as data; give tensors by name"),
    "data without rows": (Edges(ONE, ZERO, None, {"w": torch.tensor(1.0)}), "as data; give tensors by name"),
}


@pytest.mark.parametrize(("answer", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_answer_of_a_hook_is_told_with_its_layer(answer: Any, message: str) -> None:
    def hook(layer: int, graph: LayerGraph, seeds: Tensor) -> Any:
        return NONE if layer == 0 else answer

    with pytest.raises(ConfigError, match=f"sample_frontier, at layer 1, .*{message}"):
        list(NeighborLoader(ring(12), [2, 2], [0, 3], mode="blocks", sample_frontier=hook, batch_size=9))


def loader_of(hook: Any) -> NeighborLoader:
    return NeighborLoader(library(), [2], ("paper", [1]), mode="blocks", sample_frontier=hook)


def test_edges_of_no_relation_are_refused_where_there_are_several() -> None:
    with pytest.raises(ConfigError, match="returned Edges of no relation"):
        list(loader_of(lambda layer, graph, seeds: NONE))
    wrong = {WRITES: Edges(torch.tensor([7]), torch.tensor([1]))}
    with pytest.raises(ConfigError, match=r"layer 0, for \('author', 'writes', 'paper'\) gave sources that hold 7"):
        list(loader_of(lambda layer, graph, seeds: wrong))
