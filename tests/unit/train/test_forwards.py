"""What a forward may look like: each of these is called so that it works, or refused by one ConfigError."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from support.fit_workers import NUM_CLASSES, QUIET, Sage, alone, labelled, link_loader
from torch import Tensor, nn

from hoploom import ConfigError, NeighborLoader
from hoploom.train.batch_adapter import adapted
from hoploom.train.evaluation import evaluate
from hoploom.train.learner import Learner, Training
from hoploom.train.loop import fit
from hoploom.train.tasks import LinkPrediction, NodeClassification

TASK = NodeClassification(NUM_CLASSES)


def loader_of(data: Any = None, **options: Any) -> NeighborLoader:
    return NeighborLoader(labelled() if data is None else data, [4, 3], "train", batch_size=16, **options)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


def test_a_model_of_torchscript_trains_and_evaluates() -> None:
    model = torch.jit.script(Scripted())
    learner = Learner(model, torch.optim.Adam(model.parameters(), lr=0.05), TASK, loader_of())
    losses = [epoch["train_loss"] for epoch in fit(learner, Training(4, **QUIET), alone()).history]
    assert losses[-1] < losses[0]
    assert evaluate(model, loader_of(), TASK, alone())["loss"] < losses[0]


class OwnCall(NodeClassification):
    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch.x, batch.edge_index)[: batch.batch_size]  # type: ignore[no-any-return]


def test_a_task_may_call_the_model_itself() -> None:
    model = Scripted()
    ours, theirs = (evaluate(model, loader_of(), task(NUM_CLASSES), alone()) for task in (NodeClassification, OwnCall))
    assert ours == theirs


class Defaulted(Scripted):
    def forward(self, x: Any = None, edge_index: Any = None) -> Tensor:
        assert edge_index.shape[0] == 2
        return super().forward(x, edge_index)


class ByPosition(Scripted):
    def forward(self, x: Tensor, edge_index: Tensor, /) -> Tensor:
        return super().forward(x, edge_index)


class Anything(Sage):
    def forward(self, *args: Any) -> Tensor:
        return super().forward(*args)


class BatchAndMore(Sage):
    def forward(self, batch: Any, edge_weight: Any = None) -> Tensor:
        return super().forward(batch)


@pytest.mark.parametrize("made", [Defaulted, ByPosition, Anything, BatchAndMore])
def test_a_forward_of_any_shape_is_called_with_what_it_names(made: Callable[[], nn.Module]) -> None:
    loader, model = loader_of(), made()
    assert adapted(model, loader)(next(iter(loader))).shape[1] == NUM_CLASSES


class Named(Scripted):
    def forward(self, **given: Any) -> Tensor:  # type: ignore[override]
        return super().forward(**given)


class Unpacked(Scripted):
    def forward(self, *given: Any) -> Tensor:
        x, edge_index = given
        return super().forward(x, edge_index)


class Twofold(Scripted):
    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return super().forward(x, edge_index), x


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Named, r"Named.forward was called with the batch.*forward\(self, batch\)"),
        (Unpacked, r"Unpacked.forward was called with the batch.*forward\(self, x, edge_index\)"),
        (lambda: nn.Linear(6, NUM_CLASSES), r"Linear.forward was called with the batch.*forward\(self, x\)"),
        (lambda: nn.Sequential(nn.Linear(6, 3)), r"Sequential.forward was called with the batch"),
        (Twofold, r"the model returned a tuple; return a tensor with a row for every seed"),
    ],
    ids=["names", "positions", "Linear", "Sequential", "tuple"],
)
def test_a_forward_that_cannot_be_called_is_told_what_it_was_given(made: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        evaluate(made(), loader_of(), TASK, alone())


def test_a_forward_that_takes_links_returns_their_scores() -> None:
    class Scores(pyg.GraphSAGE):
        def forward(self, x: Tensor, edge_index: Tensor, edge_label_index: Tensor) -> Tensor:  # type: ignore[override]
            z = super().forward(x, edge_index)
            return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=1, keepdim=True)

    ours, theirs = Scores(6, 8, 2, 4).eval(), pyg.GraphSAGE(6, 8, 2, 4).eval()
    theirs.load_state_dict(ours.state_dict())
    links = link_loader(mode="subgraph", shuffle=False)
    expected = evaluate(theirs, links, LinkPrediction(), alone())
    assert evaluate(ours, links, LinkPrediction(), alone()) == pytest.approx(expected)


def test_edge_features_go_only_to_models_of_pyg_that_were_made_for_them() -> None:
    data = labelled()
    data.edge_attr = torch.rand(data.num_edges, 2)
    loader, degrees = loader_of(data), torch.ones(9, dtype=torch.long)
    model = pyg.PNA(6, 8, 2, NUM_CLASSES, aggregators=["mean"], scalers=["identity"], deg=degrees)
    batch = next(iter(loader))
    torch.testing.assert_close(adapted(model, loader)(batch), model(batch.x, batch.edge_index))
