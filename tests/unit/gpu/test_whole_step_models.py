"""Whole steps for links, and for models of PyG: as eager steps, up to rounding."""

from typing import Any

import pytest
import torch
from support.device_loaders import placed
from support.models import books
from support.whole_steps import BATCH, NUM_CLASSES, assert_same, homogeneous_learner, labelled, link_learner
from torch import Tensor, nn
from torch_geometric.nn import GraphNorm, LayerNorm, PairNorm, SAGEConv, to_hetero
from torch_geometric.nn.models import GCN, GraphSAGE
from torch_geometric.sampler import NegativeSampling
from torch_geometric.transforms import ToUndirected

import hoploom
from hoploom import NeighborLoader
from hoploom.gpu.whole_steps import WholeStep
from hoploom.ranks.context import init
from hoploom.train.link_prediction import LinkPrediction
from hoploom.train.step import Learner, Training
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


class Mixing(nn.Module):
    """A layer that reads all rows of a batch, before one of each row."""

    def __init__(self, mix: Any) -> None:
        super().__init__()
        self.mix, self.lin = mix, nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(self.mix(x))  # type: ignore[no-any-return]


ALL_ROWS = {
    "mean": lambda x: x - x.mean(0),
    "max": lambda x: x - x.max(0).values,
    "min": lambda x: x - x.min(0).values,
    "virtual node": lambda x: torch.cat([x[:, :4], x[:, 4:].sum(0).expand(len(x), 4)], 1),
    "GraphNorm": GraphNorm(8),
    "LayerNorm": LayerNorm(8, mode="graph"),
    "PairNorm": PairNorm(),
}


@pytest.mark.parametrize("mix", ALL_ROWS.values(), ids=ALL_ROWS)
def test_a_model_that_reads_all_rows_of_a_batch_is_refused(mix: Any, device: torch.device) -> None:
    learner = pyg_learner(device, lambda: Mixing(mix))
    learner.model.lin.eval()  # type: ignore[operator, union-attr]
    with pytest.raises(hoploom.ConfigError, match=r"whole steps need outputs that .* change with the padding"):
        WholeStep(learner, Training(1), init(device=device))
    assert [module.training for module in (learner.model, learner.model.lin)] == [True, False]  # type: ignore[union-attr]
    learner = pyg_learner(device, lambda: Mixing(LayerNorm(8, mode="node")))
    WholeStep(learner, Training(1, precision="bf16"), init(device=device)).close()


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
