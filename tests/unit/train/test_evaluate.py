"""Evaluation: every seed once, the numbers of scikit-learn, the model left as it was."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn
from support.fit_workers import NUM_CLASSES, Sage, alone, labelled, link_loader, train_loader, val_loader
from torch import Tensor, nn

from hoploom import ConfigError, DataError, NeighborLoader, PeerError
from hoploom.nn import GraphSAGE
from hoploom.train.loop import evaluate, fit
from hoploom.train.step import Learner, Training
from hoploom.train.tasks import LinkPrediction, MultiLabel, NodeClassification, NodeRegression, Task


def rows(model: nn.Module, loader: Any, task: Task) -> tuple[Tensor, np.ndarray]:
    """Return all outputs and targets, collected by hand."""
    model.eval()
    with torch.no_grad():
        pairs = [(task.outputs(model, batch), task.targets(batch)) for batch in loader]
    return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs]).numpy()


def test_classes_are_judged_as_scikit_learn_does() -> None:
    task = NodeClassification(NUM_CLASSES, confusion=True)
    found = evaluate(Sage(), val_loader(), task, alone())
    outputs, truth = rows(Sage(), val_loader(), task)
    guess = outputs.argmax(dim=1).numpy()
    assert len(truth) == 70
    assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(truth, guess))
    assert found["f1_macro"] == pytest.approx(sklearn.f1_score(truth, guess, average="macro"))
    assert "f1_micro" not in found  # it would equal accuracy
    assert found["loss"] == pytest.approx(sklearn.log_loss(truth, outputs.double().softmax(dim=1)), rel=1e-6)
    matrix = [[found[f"confusion/{i}/{j}"] for j in range(NUM_CLASSES)] for i in range(NUM_CLASSES)]
    assert matrix == sklearn.confusion_matrix(truth, guess).tolist()


def test_two_classes_have_an_auroc() -> None:
    data = labelled()
    data.y = data.labels[:, 0].long()
    loader, task = NeighborLoader(data, [4, 3], data.val_mask, batch_size=16), NodeClassification(2)
    found = evaluate(Sage(2), loader, task, alone())
    outputs, truth = rows(Sage(2), loader, task)
    assert found["auroc"] == pytest.approx(sklearn.roc_auc_score(truth, outputs.softmax(dim=1)[:, 1]), abs=1e-6)


def test_labels_numbers_and_links_are_judged_as_scikit_learn_does() -> None:
    task: Task = MultiLabel(4, label="labels")
    found = evaluate(Sage(4), val_loader(), task, alone())
    outputs, truth = rows(Sage(4), val_loader(), task)
    assert found["auroc"] == pytest.approx(sklearn.roc_auc_score(truth, outputs, average="macro"), abs=1e-6)
    assert found["f1_macro"] == pytest.approx(sklearn.f1_score(truth, outputs > 0, average="macro"))
    assert found["f1_micro"] == pytest.approx(sklearn.f1_score(truth, outputs > 0, average="micro"))
    assert found["accuracy"] == pytest.approx(((outputs > 0).numpy() == truth).mean())

    task = NodeRegression(label="amount")
    found = evaluate(Sage(1), val_loader(), task, alone())
    outputs, truth = rows(Sage(1), val_loader(), task)
    assert found["mae"] == pytest.approx(sklearn.mean_absolute_error(truth, outputs))
    assert found["mse"] == pytest.approx(sklearn.mean_squared_error(truth, outputs))
    assert found["rmse"] == pytest.approx(found["mse"] ** 0.5)
    assert found["r2"] == pytest.approx(sklearn.r2_score(truth, outputs))

    links, ends = LinkPrediction(), link_loader(shuffle=False)
    found = evaluate(Sage(4), ends, links, alone())
    outputs, truth = rows(Sage(4), ends, links)
    assert found["auroc"] == pytest.approx(sklearn.roc_auc_score(truth, outputs), abs=1e-6)
    assert found["average_precision"] == pytest.approx(sklearn.average_precision_score(truth, outputs), abs=1e-6)


def test_logits_between_0_and_1_in_one_batch_are_not_taken_for_probabilities() -> None:
    """torchmetrics decides per batch whether scores are logits: 0.9 (a logit) of one batch against 0.6 of another."""

    class Logits(nn.Module):
        def forward(self, batch: Any) -> Tensor:
            first = bool((batch.input_id == 0).any())
            return torch.tensor([0.9, 0.8] if first else [2.0, 0.1]).repeat(4)[: batch.batch_size].view(-1, 1)

    data = labelled()
    truth = [0, 1] * 4 + [1, 0] * 4
    data.labels = torch.tensor(truth + [0] * (len(data.y) - 16)).view(-1, 1)
    loader = NeighborLoader(data, [1], torch.arange(16), batch_size=8, shuffle=False)
    found = evaluate(Logits(), loader, MultiLabel(1, label="labels"), alone())
    scores = [0.9, 0.8] * 4 + [2.0, 0.1] * 4
    assert found["auroc"] == pytest.approx(sklearn.roc_auc_score(truth, scores))


def test_the_model_comes_back_in_the_mode_it_was_in_and_the_loader_where_it_was() -> None:
    model, loader = nn.ModuleDict({"net": Sage(dropout=0.5), "frozen": nn.Dropout()}), train_loader()
    model.train()
    model["frozen"].eval()
    model.forward = lambda batch: model["net"](batch)  # type: ignore[method-assign]
    position = loader.state_dict()
    first, second = (evaluate(model, loader, NodeClassification(NUM_CLASSES), alone()) for _ in range(2))
    assert (model.training, model["net"].training, model["frozen"].training) == (True, True, False)
    assert first == second
    assert loader.state_dict() == position
    assert torch.is_grad_enabled()
    assert evaluate(Sage(), train_loader(), NodeClassification(NUM_CLASSES), alone()) == first


def test_every_call_samples_the_neighbours_of_epoch_0_and_a_loop_new_ones() -> None:
    model, loader = Sage(), NeighborLoader(labelled(), [1, 1], "train", batch_size=16)
    task = NodeClassification(NUM_CLASSES)
    first = evaluate(model, loader, task, alone())
    loops = [rows(model, loader, task)[0] for _ in range(2)]
    loader.set_epoch(1)
    assert evaluate(model, loader, task, alone()) == first
    assert not torch.equal(*loops)
    loader.set_epoch(0)
    outputs, truth = rows(model, loader, task)
    assert task.losses(outputs, torch.from_numpy(truth)).mean().item() == pytest.approx(first["loss"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_close(precision: str) -> None:
    task = NodeClassification(NUM_CLASSES)
    full, half = (evaluate(Sage(), val_loader(), task, alone(), precision=p) for p in ("fp32", precision))
    assert half["loss"] == pytest.approx(full["loss"], rel=0.02)
    assert half["loss"] != full["loss"]


class Losing(nn.Module):
    """A model or a metric of which something times out."""

    def forward(self, *given: Any) -> Any:
        raise RuntimeError("the feature service timed out")


def test_only_what_ranks_do_together_blames_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    context, task = alone(), NodeClassification(NUM_CLASSES)
    monkeypatch.setattr(context, "_peers", SimpleNamespace(missing=lambda: "rank 1 ended"))
    with pytest.raises(RuntimeError, match="the feature service timed out") as raised:
        evaluate(Losing(), val_loader(), task, context)
    assert raised.type is RuntimeError
    monkeypatch.setattr("torchmetrics.MetricCollection.compute", Losing().forward)
    with pytest.raises(PeerError, match="was computing metrics, and rank 1 ended"):
        evaluate(Sage(), val_loader(), task, context)


def test_what_would_leave_seeds_out_is_refused() -> None:
    task, context = NodeClassification(NUM_CLASSES), alone()
    with pytest.raises(ConfigError, match="drop_last=True, which leaves seeds out"):
        evaluate(Sage(), val_loader(drop_last=True), task, context)
    with pytest.raises(ConfigError, match="is for rank 0 of 2, this is rank 0 of 1; leave rank and world_size out"):
        evaluate(Sage(), val_loader(rank=0, world_size=2), task, context)
    with pytest.raises(ConfigError, match="precision is 'int8'"):
        evaluate(Sage(), val_loader(), task, context, precision="int8")


def test_metrics_that_one_seed_cannot_have_are_an_error_that_says_so() -> None:
    loader = NeighborLoader(labelled(), [2, 2], torch.tensor([3]))
    with pytest.raises(DataError, match=r"the metrics of 1 rows cannot be computed: .*r2.*; evaluate more"):
        evaluate(Sage(1), loader, NodeRegression(label="amount"), alone())


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
def test_other_fanouts_than_layers_are_told(mode: str) -> None:
    store = val_loader().store
    width = store.schema.node_type("node").fields["x"].shape[0]
    model = GraphSAGE(width, hidden_channels=4, num_layers=3, out_channels=NUM_CLASSES)
    loader, task = NeighborLoader(store, [2, 2], "train", batch_size=16, mode=mode), NodeClassification(NUM_CLASSES)
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), task, loader)
    message = "with 2 fanouts, the model has 3 layers; give num_neighbors one fanout per"
    with pytest.raises(ConfigError, match=message):
        fit(learner, Training(1, progress=False), alone())
    with pytest.raises(ConfigError, match=message):
        evaluate(model, loader, task, alone())
