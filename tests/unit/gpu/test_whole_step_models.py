"""Whole steps for links, and for models of PyG: as eager steps, up to rounding."""

from typing import Any

import pytest
import torch
from support.device_loaders import placed
from support.models import books
from support.whole_steps import BATCH, NUM_CLASSES, assert_same, homogeneous_learner, labelled, link_learner
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv, to_hetero
from torch_geometric.nn.models import GCN, GraphSAGE
from torch_geometric.sampler import NegativeSampling
from torch_geometric.transforms import ToUndirected

import hoploom
from hoploom import NeighborLoader
from hoploom.train.link_prediction import LinkPrediction
from hoploom.train.step import Learner
from hoploom.train.tasks import NodeClassification, NodeRegression, SeveralTasks

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")

SHARED = {"neg_sampling": NegativeSampling("triplet", 6), "candidates": "joint"}
LINKS: dict[str, tuple[LinkPrediction, dict[str, Any]]] = {
    "binary": (LinkPrediction(), {"neg_sampling": "binary", "exclude": "both"}),
    "blocks": (LinkPrediction(), {"neg_sampling": NegativeSampling("binary", 1.5), "mode": "blocks"}),
    "triplets": (LinkPrediction(loss="bpr", metrics=["mrr"]), {"neg_sampling": NegativeSampling("triplet", 2)}),
    "shared": (LinkPrediction(loss="softmax", metrics=["mrr"]), SHARED),
    "in batch": (LinkPrediction(loss="softmax", metrics=["mrr"]), {"neg_sampling": None}),
}


@pytest.mark.parametrize(("task", "options"), LINKS.values(), ids=LINKS)
def test_links_are_learned_whole(task: LinkPrediction, options: dict[str, Any], device: torch.device) -> None:
    counts = assert_same(lambda *a, **o: link_learner(*a, task=task, **o, **options), device, epochs=1)
    assert (counts.first, counts.replayed, counts.overflowed, counts.shorter) == (4, 1, 0, 1)


def test_links_with_more_ends_than_before_overflow(device: torch.device) -> None:
    task, options = LINKS["binary"]
    make = lambda *a, **o: link_learner(*a, task=task, **o, **options)  # noqa: E731
    assert assert_same(make, device, epochs=1, exact=True, margin=0.0).overflowed > 0


class Two(nn.Module):
    """Layers of PyG over the edges of all hops, one of them more than hops."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(width, 8), SAGEConv(8, 8, aggr="max"), SAGEConv(8, out)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x


def pyg_learner(device: torch.device, make: Any, *, on_host: bool = False, task: Any = None, **options: Any) -> Learner:
    learner = homogeneous_learner(device, on_host=on_host, **options)
    torch.manual_seed(0)
    learner.model = make().to(device)
    learner.optimizer = torch.optim.Adam(learner.model.parameters(), lr=0.02, capturable=device.type == "cuda")
    learner.task = task or learner.task
    return learner


MODELS = {
    "own": lambda: Two(8, NUM_CLASSES),
    "GraphSAGE": lambda: GraphSAGE(8, 8, 2, NUM_CLASSES),
    "GCN": lambda: GCN(8, 8, 2, NUM_CLASSES),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_models_of_pyg_are_learned_whole(make: Any, device: torch.device) -> None:
    counts = assert_same(lambda *a, **o: pyg_learner(*a, make, **o), device, epochs=1)
    assert (counts.first, counts.overflowed, counts.shorter) == (3, 0, 1)


@pytest.mark.slow
def test_a_model_of_pyg_between_types_is_learned_whole(device: torch.device) -> None:
    data = ToUndirected()(books())
    data["paper"].y = torch.arange(data["paper"].num_nodes) % NUM_CLASSES

    def make(device: torch.device, *, on_host: bool = False) -> Learner:
        store = hoploom.from_pyg(data) if on_host else placed(hoploom.from_pyg(data), device)
        torch.manual_seed(0)
        model = to_hetero(Two((-1, -1), NUM_CLASSES), data.metadata()).to(device)  # type: ignore[arg-type]
        loader = NeighborLoader(store, [2, 2], ("paper", torch.arange(9)), batch_size=3, device=device)
        with torch.no_grad():
            model(*(next(iter(loader)).collect(name) for name in ("x", "edge_index")))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Learner(model, optimizer, NodeClassification(NUM_CLASSES, node_type="paper"), loader)

    assert assert_same(make, device, epochs=1).first == 3


def test_several_tasks_are_learned_whole(device: torch.device) -> None:
    task = SeveralTasks({"class": NodeClassification(NUM_CLASSES), "x": NodeRegression(num_targets=8, label="x")})
    make = lambda *a, **o: pyg_learner(*a, lambda: GraphSAGE(8, 8, 2, NUM_CLASSES + 8), task=task, **o)  # noqa: E731
    assert_same(make, device, epochs=1)
    assert len(labelled().y) > BATCH
