"""torch.compile on the built-in models: the same results and gradients, and not compiled for every size of a batch."""

import pytest
import torch
from support.graphs import random_graph
from support.models import books, heterogeneous, homogeneous
from torch._dynamo.utils import counters

from hoploom import NeighborLoader

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of torch about its own


@pytest.mark.parametrize(
    ("kind", "mode", "backend"),
    [
        ("sage", "subgraph", "aot_eager"),
        ("gcn", "subgraph", "eager"),
        ("gat", "subgraph", "eager"),
        ("gin", "blocks", "eager"),
    ],
)
def test_a_compiled_model_gives_what_the_model_gives(kind: str, mode: str, backend: str) -> None:
    data = random_graph(60, 400, 1)
    data.x = torch.randn(60, 8)
    torch._dynamo.reset()
    counters.clear()
    model = homogeneous(kind)
    compiled, graphs = torch.compile(model, backend=backend), []
    for batch_size in (7, 12, 20):
        batch = next(iter(NeighborLoader(data, [4, 3], batch_size=batch_size, mode=mode)))
        found = []
        for one in (model, compiled):
            model.zero_grad()
            out = one(batch)
            out.square().sum().backward()
            found.append([out, *(parameter.grad.clone() for parameter in model.parameters())])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 1  # layers are compiled, not skipped
    assert graphs[1] == graphs[2]  # once for a size, once for any
    assert not counters["recompile_limit"]


def test_a_compiled_model_of_relations_gives_what_the_model_gives() -> None:
    data = books()
    torch._dynamo.reset()
    model = heterogeneous("rsage", data)
    batch = next(iter(NeighborLoader(data, [2, 2], input_nodes="paper", batch_size=2)))
    torch.testing.assert_close(torch.compile(model, backend="eager")(batch)["paper"], model(batch)["paper"])
