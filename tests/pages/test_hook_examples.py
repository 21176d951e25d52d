"""The three worked frontier hooks learn, and draw what they say they draw."""

import re
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from support import ROOT
from support.graphs import random_graph
from torch import Tensor

import hoploom

pytestmark = pytest.mark.usefixtures("one_thread")  # small tensors gain nothing from more

Run = Callable[..., float]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return import_module


@pytest.fixture
def accuracy(example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> Run:
    def call(name: str, *words: object) -> float:
        example(name).main([str(word) for word in words])
        return float(re.findall(r"accuracy (\d\.\d+)", capsys.readouterr().out)[-1])

    return call


def blocks(data: Any, hook: Any, num_epochs: int = 1) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """The sources and destinations of the only layer, in global ids, and the data of the edges, an epoch each."""
    loader = hoploom.NeighborLoader(data, [3], mode="blocks", sample_frontier=hook, batch_size=1000)
    found = []
    for _ in range(num_epochs):
        (batch,) = loader
        (block,) = batch.blocks
        found.append((*batch.n_id[block.edge_index], block.data))
    return found


def test_neighbours_drawn_by_degree_tell_more_than_random_ones(accuracy: Run) -> None:
    by_degree = accuracy("importance_sampling", "--nodes", 2500, "--epochs", 4)
    assert by_degree > 0.75
    assert by_degree > accuracy("importance_sampling", "--nodes", 2500, "--epochs", 4, "--uniform") + 0.15


def test_sums_of_neighbours_drawn_by_degree_are_right_on_average(example: Callable[[str], ModuleType]) -> None:
    data = random_graph(40, 600, 1)
    exact = torch.zeros(40).index_add_(0, data.edge_index[1], data.x[data.edge_index[0], 0])
    sums = []
    for sources, destinations, kept in blocks(data, example("importance_sampling").by_degree, num_epochs=300):
        sums.append(torch.zeros(40).index_add_(0, destinations, kept["weight"] * data.x[sources, 0]))
        assert len(sources) < 200  # three of fifteen for each of forty, on average
    found = torch.stack(sums)
    assert ((found.mean(0) - exact).abs() < 5 * found.std(0) / 300**0.5 + 1e-6).all()


def test_layers_drawn_together_learn_from_far_fewer_nodes(accuracy: Run) -> None:
    assert accuracy("ladies", "--nodes", 2000, "--epochs", 4, "--drawn", 200) > 0.75  # one of six classes


def test_all_edges_of_a_layer_lead_from_the_nodes_drawn_for_it(example: Callable[[str], ModuleType]) -> None:
    data = random_graph(40, 600, 1)

    def hook(layer: int, graph: Any, seeds: Tensor) -> hoploom.Edges:
        found: hoploom.Edges = example("ladies").ladies(7, layer, graph, seeds)
        return found

    for sources, destinations, data_of_edges in blocks(data, hook, num_epochs=3):
        drawn = torch.unique(sources)
        assert len(drawn) == 7
        assert len(sources) == int(torch.isin(data.edge_index[0], drawn).sum())  # every edge from them
        total = torch.zeros(40).index_add_(0, destinations, data_of_edges["weight"])
        torch.testing.assert_close(total[destinations], torch.ones(len(sources)))


def test_items_that_walks_visit_most_tell_more_than_an_item_alone(accuracy: Run) -> None:
    near = accuracy("pinsage", "--items", 1000, "--epochs", 4)
    assert near > 0.8  # one of five genres
    assert near > accuracy("pinsage", "--items", 1000, "--epochs", 4, "--alone") + 0.15
