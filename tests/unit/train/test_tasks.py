"""Tasks and evaluation: outputs, targets, losses per seed, the numbers of scikit-learn, and labels that are refused."""

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn
from support.fit_workers import (
    NUM_CLASSES,
    NUM_NODES,
    NUM_TRAIN,
    Sage,
    ScoredSage,
    alone,
    labelled,
    link_loader,
    store,
    train_loader,
    val_loader,
)
from support.graphs import library
from support.refusals import assert_raises
from torch import Tensor, nn
from torch.nn import functional

import hoploom
from hoploom import ConfigError, DataError, LinkNeighborLoader, NeighborLoader, PeerError
from hoploom.nn import GraphSAGE
from hoploom.train.link_prediction import LinkPrediction
from hoploom.train.loop import evaluate, fit
from hoploom.train.step import Learner, Training
from hoploom.train.tasks import MultiLabel, NodeClassification, NodeRegression, NodeTask, SeveralTasks, Task

CPU = torch.device("cpu")


class Rows(nn.Module):
    """Returns what it was made with, whatever the batch."""

    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, batch: Any) -> Any:
        return self.rows


def first_batch(**options: Any) -> Any:
    return next(iter(train_loader(**{"shuffle": False} | options)))


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
def test_outputs_and_targets_are_those_of_the_seeds(mode: str) -> None:
    batch, task, graph = first_batch(mode=mode), NodeClassification(NUM_CLASSES), labelled()
    assert task.targets(batch).tolist() == graph.y[:16].tolist()
    assert task.outputs(Sage(), batch).shape == (16, NUM_CLASSES)
    assert MultiLabel(4, label="labels").targets(batch).tolist() == graph.labels[:16].long().tolist()
    assert NodeRegression(label="amount").targets(batch).flatten().tolist() == graph.amount[:16].tolist()


def library_batch(**options: Any) -> Any:
    return next(iter(NeighborLoader(library(), [2], ("paper", torch.arange(10)), batch_size=4, **options)))


@pytest.mark.parametrize("node_type", ["paper", None])
def test_a_heterogeneous_batch_has_its_seeds_in_one_type(node_type: str | None) -> None:
    batch, task = library_batch(), NodeClassification(10, node_type=node_type)
    outputs = {"paper": torch.arange(100.0).view(10, 10), "author": torch.zeros(9, 10)}
    assert task.targets(batch).tolist() == [0, 1, 2, 3]
    assert task.outputs(Rows(outputs), batch).equal(outputs["paper"][:4])
    assert task.outputs(Rows(outputs["paper"]), batch).equal(outputs["paper"][:4])


def test_losses_are_those_of_torch_one_per_seed() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, generator=generator)
    classes, labels = torch.tensor([0, 2, 1, 1, 0]), torch.randint(2, (5, 3), generator=generator)
    numbers = torch.randn(5, 3, generator=generator)
    expected = {
        NodeClassification(3): (classes, functional.cross_entropy(logits, classes)),
        MultiLabel(3): (labels, functional.binary_cross_entropy_with_logits(logits, labels.float())),
        NodeRegression(num_targets=3): (numbers.double(), functional.mse_loss(logits, numbers)),
        NodeRegression(num_targets=3, loss="mae"): (numbers.double(), functional.l1_loss(logits, numbers)),
    }
    for task, (targets, mean) in expected.items():
        losses = task.losses(logits, targets)
        assert losses.shape == (5,)
        torch.testing.assert_close(losses.mean(), mean)
        assert task.losses(logits.bfloat16(), targets).dtype == torch.float32


def test_a_column_of_outputs_meets_a_row_of_numbers() -> None:
    """[n, 1] minus [n] would be [n, n]."""
    batch, task = first_batch(), NodeRegression(label="amount")
    for rows in (batch.amount[:16], batch.amount[:16].view(-1, 1)):
        losses = task.losses(task.outputs(Rows(rows), batch), task.targets(batch))
        assert losses.tolist() == [0.0] * 16


def test_a_column_of_classes_counts_as_classes() -> None:
    data = labelled()
    data.y = data.y.view(-1, 1).float()  # as OGB has them
    batch = next(iter(NeighborLoader(data, [2], data.train_mask, batch_size=16)))
    assert NodeClassification(NUM_CLASSES).targets(batch).tolist() == labelled().y[:16].tolist()


@pytest.mark.parametrize(
    ("task", "rows", "said"),
    [
        (NodeClassification(3), torch.zeros(9, 3), "returned 9 rows for 16 seeds"),
        (NodeClassification(3), torch.zeros(16, 4), r"rows of shape \(4,\) for 3 classes; give it 3 outputs"),
        (NodeClassification(3), torch.zeros(16), r"rows of shape \(\) for 3 classes"),
        (NodeClassification(3), {"paper": torch.zeros(16, 3)}, r"outputs for \['paper'\], the seeds are of 'node'"),
        (MultiLabel(4), torch.zeros(16, 3), "for 4 labels"),
        (NodeRegression(), torch.zeros(16, 2), "for 1 targets"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(task: Any, rows: Any, said: str) -> None:
    assert_raises(ConfigError, said, lambda: task.outputs(Rows(rows), first_batch()))


def with_label(node: int, value: Any, like: Tensor) -> hoploom.Store:
    data = labelled()
    data.bad = like.clone()
    data.bad[node] = value
    return hoploom.from_pyg(data)


WRONG = {
    "negative": (NodeClassification(3, label="bad"), -1, labelled().y, "bad=-1; classes are 0 to 2: give it one"),
    "too large": (NodeClassification(3, label="bad"), 3, labelled().y, "bad=3; classes are 0 to 2: give it one"),
    "nan": (NodeClassification(3, label="bad"), torch.nan, labelled().y.float(), "bad=nan; classes are 0 to 2"),
    "half": (NodeClassification(3, label="bad"), 0.5, labelled().y.float(), "bad=0.5; classes are 0 to 2"),
    "one of many": (
        MultiLabel(4, label="bad"),
        torch.tensor([0, torch.nan, 1, 0]),
        labelled().labels,
        r"bad=\[0.0, nan, 1.0, 0.0\]; labels are 0 or 1: give it all",
    ),
    "minus one of many": (MultiLabel(4, label="bad"), -1, labelled().labels.long(), r"bad=\[-1, -1, -1, -1\]"),
    "no whole number": (
        NodeRegression(label="bad"),
        -1,
        labelled().y,
        r"bad=-1; -1 is no number to learn unless labels are floats: give it another \(a null label in a table",
    ),
    "no number": (NodeRegression(label="bad"), torch.inf, labelled().amount, "bad=inf; give it a finite number"),
}


@pytest.mark.parametrize(("task", "value", "like", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_seed_without_a_label_is_named_before_training_and_in_its_batch(
    task: NodeTask, value: Any, like: Tensor, said: str
) -> None:
    graph = with_label(21, value, like)
    message = rf"^node 21 is a seed with the label {said}.*, or leave it out of the split$"
    assert_raises(DataError, message, lambda: task.check(graph, graph.split("train")))
    batches = list(NeighborLoader(graph, [2], "train", batch_size=16))
    task.targets(batches[0])
    assert_raises(DataError, message, task.targets, batches[1])
    task.check(graph, graph.split("val"))


@pytest.mark.parametrize("as_text", [False, True])
def test_the_check_before_training_counts_wrong_labels_and_names_the_users_id(as_text: bool) -> None:
    data = labelled()
    text = torch.tensor([list(f"p{v:03}".encode()) for v in range(data.num_nodes)], dtype=torch.uint8)
    data.original_id = text if as_text else 7 * torch.arange(data.num_nodes)
    data.bad = data.y.clone()
    data.bad[torch.tensor([21, 30])] = torch.tensor([3, -1])
    graph = hoploom.from_pyg(data)
    mine = "'p021'" if as_text else "147"
    said = f"node 21 (your id {mine}) is a seed with the label bad=3, the first of 2 such labels; classes are 0 to 2"
    assert_raises(DataError, re.escape(said), lambda: NodeClassification(3, label="bad").check(graph, torch.arange(40)))
    NodeClassification(3, label="bad").check(graph, torch.arange(0))


def test_a_label_that_is_not_there_is_refused_with_those_that_are() -> None:
    task = NodeClassification(3, label="class")
    said = r"type 'node' has no field 'class' to learn; it has \['amount', 'labels', .*'x', 'y'"
    assert_raises(ConfigError, said, lambda: task.check(store(), torch.arange(3)))
    assert_raises(ConfigError, r"has no field 'class' to learn; it has \[.*'y'", lambda: task.targets(first_batch()))


def test_check_finds_the_type_that_has_the_label() -> None:
    graph = hoploom.from_pyg(library())
    NodeClassification(10).check(graph, torch.arange(10))
    with pytest.raises(DataError, match="node 7 is a seed with the label y=7"):
        NodeClassification(7).check(graph, torch.arange(10))
    with pytest.raises(ConfigError, match="'author' has no field 'y'"):
        NodeClassification(7, node_type="author").check(graph, torch.arange(3))
    with pytest.raises(ConfigError, match=r"'x' is in \['author', 'paper'\]; name the seeds' node_type"):
        NodeRegression(label="x").check(graph, torch.arange(3))
    several = SeveralTasks({"one": NodeClassification(10), "other": NodeRegression(num_targets=4, label="x")})
    several.check(graph, torch.arange(10))
    with pytest.raises(ConfigError, match="'author' has no field 'y'"):
        replace(several, node_type="author").check(graph, torch.arange(3))
    with pytest.raises(ConfigError, match=r"the labels \['y', 'z'\] are in no node type; name the seeds' node_type"):
        SeveralTasks({"y": NodeClassification(9), "z": NodeRegression(label="z")}).check(graph, torch.arange(3))


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (NodeClassification(3, label="labels"), "not one class each; use MultiLabel"),
        (MultiLabel(3, label="labels"), r"rows of shape \(4,\) for 3 labels; set num_labels"),
        (NodeRegression(label="labels"), r"rows of shape \(4,\) for 1 targets; set num_targets"),
    ],
)
def test_labels_of_another_width_are_refused(task: NodeTask, said: str) -> None:
    assert_raises(ConfigError, said, lambda: task.check(store(), torch.arange(3)))


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
def test_links_are_scored_by_the_dot_product_or_by_the_decoder(mode: str) -> None:
    batch, task = next(iter(link_loader(mode=mode))), LinkPrediction()
    assert task.targets(batch).tolist() == [1] * 16 + [0] * 16
    model = ScoredSage()
    z, (source, destination) = model(batch), batch.edge_label_index
    form = model.decoder.relations.weight.view(4, 4)
    expected = torch.stack([z[a] @ form @ z[b] for a, b in zip(source, destination, strict=True)])
    torch.testing.assert_close(task.outputs(model, batch), expected)
    plain = Sage(4)
    plain.load_state_dict(model.state_dict(), strict=False)
    expected = torch.stack([z[a] @ z[b] for a, b in zip(source, destination, strict=True)])
    torch.testing.assert_close(task.outputs(plain, batch), expected)


def test_links_between_two_types_take_each_end_from_its_own() -> None:
    links = (("author", "writes", "paper"), torch.tensor([[0, 1, 2], [2, 3, 4]]))
    batch = next(iter(LinkNeighborLoader(library(), [2], links, neg_sampling="binary", batch_size=3)))
    z = {name: torch.randn(batch[name].num_nodes, 4) for name in ("author", "paper")}
    ends = batch["author", "writes", "paper"].edge_label_index
    assert LinkPrediction().outputs(Rows(z), batch).equal((z["author"][ends[0]] * z["paper"][ends[1]]).sum(dim=1))
    assert LinkPrediction().targets(batch).tolist() == [1] * 3 + [0] * 3


def test_links_without_labels_or_with_others_are_refused() -> None:
    links = labelled().edge_index[:, :8]
    unlabelled = next(iter(LinkNeighborLoader(labelled(), [2], links, batch_size=4)))
    with pytest.raises(ConfigError, match="no labelled links; use LinkNeighborLoader with neg_sampling='binary'"):
        LinkPrediction().targets(unlabelled)
    rated = next(iter(LinkNeighborLoader(labelled(), [2], links, edge_label=torch.arange(8), batch_size=4)))
    assert_raises(DataError, r"has the label 2; links are 1, or 0", lambda: LinkPrediction().targets(rated))


@pytest.mark.parametrize(
    ("task", "names", "monitor"),
    [
        (NodeClassification(3), ["accuracy", "f1_macro"], ("accuracy", "max")),
        (NodeClassification(2, best="auroc"), ["accuracy", "auroc", "f1_macro"], ("auroc", "max")),
        (MultiLabel(3), ["accuracy", "auroc", "f1_macro", "f1_micro"], ("auroc", "max")),
        (NodeRegression(), ["mae", "mse", "r2", "rmse"], ("rmse", "min")),
        (NodeRegression(best="r2"), ["mae", "mse", "r2", "rmse"], ("r2", "max")),
        (LinkPrediction(best="loss"), ["auroc", "average_precision"], ("val_loss", "min")),
    ],
)
def test_a_task_has_metrics_and_knows_which_is_best(task: Any, names: list[str], monitor: tuple[str, str]) -> None:
    assert sorted(task.new_metrics(CPU).keys()) == names
    assert task.monitor == monitor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LinkPrediction(best="mrr"),
            r"best is 'mrr', no metric of LinkPrediction; give one of \['val_loss', 'auroc', 'average_precision'\]",
        ),
        (lambda: NodeClassification(3, best="f1_micro"), "f1_micro equals accuracy where a node has one class; give"),
        (lambda: NodeRegression(best="rsme"), r"did you mean 'rmse'\?"),
    ],
)
def test_a_metric_that_the_task_does_not_have_is_named_with_those_it_has(make: Any, message: str) -> None:
    assert_raises(ConfigError, message, make)


def test_scores_rank_as_outputs_do_even_where_float32_would_round() -> None:
    outputs = torch.tensor([20.0, 21.0, -30.0, -31.0])
    for task in (MultiLabel(1), LinkPrediction()):
        assert task.scores(outputs).argsort().tolist() == outputs.argsort().tolist()
        assert len(set(task.scores(outputs).tolist())) == 4


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
    assert_raises(ConfigError, message, lambda: fit(learner, Training(1, progress=False), alone()))
    assert_raises(ConfigError, message, lambda: evaluate(model, loader, task, alone()))


# --- several tasks ---------------------------------------------------------------------------


def several(**options: Any) -> SeveralTasks:
    tasks = {"class": NodeClassification(3), "labels": MultiLabel(4, label="labels")}
    tasks |= {"amount": NodeRegression(label="amount")}
    return SeveralTasks(tasks, **{"weights": {"amount": 0.5, "labels": 0.0}} | options)


def test_the_loss_of_several_tasks_is_their_weighted_sum() -> None:
    batch, task = first_batch(), several()
    outputs = task.outputs(Sage(8), batch).requires_grad_()
    classes, _, amounts = torch.split(outputs, [3, 4, 1], dim=1)
    wanted = functional.cross_entropy(classes, batch.y[:16], reduction="none")
    wanted = wanted + 0.5 * (amounts[:, 0] - batch.amount[:16]).square()
    torch.testing.assert_close(task.losses(outputs, task.targets(batch)), wanted)


def test_a_node_without_a_label_is_left_out_of_that_task_alone() -> None:
    batch, task = first_batch(), several(weights={})
    batch.y[3], batch.amount[5], batch.labels[:2] = -1, torch.nan, torch.nan
    outputs = task.outputs(Sage(8), batch).detach().requires_grad_()
    task.losses(outputs, task.targets(batch)).sum().backward()
    assert outputs.grad is not None
    zeros = outputs.grad.eq(0)
    assert zeros[:, :3].all(1).nonzero().flatten().tolist() == [3]
    assert zeros[:, 3:7].all(1).nonzero().flatten().tolist() == [0, 1]
    assert zeros[:, 7].nonzero().flatten().tolist() == [5]
    metrics = task.new_metrics(CPU)
    metrics.update(task.scores(outputs), task.targets(batch))
    there = torch.arange(16) != 3
    accuracy = (outputs[:, :3].argmax(1) == batch.y[:16])[there].double().mean()
    assert float(metrics.compute()["class_accuracy"]) == pytest.approx(float(accuracy))


def test_several_tasks_have_the_metrics_of_each() -> None:
    task, model = several(best="amount_rmse"), Sage(8)
    found = evaluate(model, val_loader(), task, alone())
    for name, (first, end) in {"class": (0, 3), "labels": (3, 7), "amount": (7, 8)}.items():

        class Head(nn.Module):
            def forward(self, batch: Any, span: slice = slice(first, end)) -> Tensor:
                return model(batch)[:, span]

        for key, value in evaluate(Head(), val_loader(), task.tasks[name], alone()).items():
            if key != "loss":
                assert found[f"{name}_{key}"] == pytest.approx(value), (name, key)
    assert task.monitor == ("amount_rmse", "min")
    assert several(best="class_accuracy").monitor == ("class_accuracy", "max")
    alike = {"year": NodeRegression(label="year"), "year_born": NodeRegression(label="born")}
    assert SeveralTasks(alike, best="year_born_rmse").monitor == ("year_born_rmse", "min")
    assert SeveralTasks(alike, best="year_rmse").monitor == ("year_rmse", "min")
    assert SeveralTasks(alike, best="year_born_r2").monitor == ("year_born_r2", "max")


def test_a_batch_without_any_label_of_a_task_counts_for_its_loss_alone() -> None:
    """The metrics are those of the first batch, which has the labels."""
    graph, model = labelled(), Sage(8)
    graph.y[NUM_TRAIN + 16 :], graph.labels[NUM_TRAIN + 16 :], graph.amount[NUM_TRAIN + 16 :] = -1, torch.nan, torch.nan
    few = hoploom.from_pyg(graph)

    def metrics(nodes: Tensor) -> dict[str, float]:
        return evaluate(model, NeighborLoader(few, [-1, -1], nodes, batch_size=16), several(), alone())

    everyone, first = torch.arange(NUM_TRAIN, NUM_TRAIN + 64), torch.arange(NUM_TRAIN, NUM_TRAIN + 16)
    found, expected = metrics(everyone.flip(0)), metrics(first)
    assert found.pop("loss") == pytest.approx(expected.pop("loss") / 4)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("cast", [torch.int64, torch.int32, torch.float64])
def test_minus_one_is_a_null_label_of_integers_and_a_number_to_learn_of_fractions(cast: torch.dtype) -> None:
    graph = labelled()
    graph.amount = torch.arange(NUM_NODES).to(cast)
    graph.amount[2:4] = -1
    few, task = hoploom.from_pyg(graph), several(weights={})
    batch = next(iter(NeighborLoader(few, [2, 2], torch.arange(8), batch_size=8)))
    is_null = not cast.is_floating_point
    targets = task.targets(batch)
    assert targets[2:4, 5].isnan().tolist() == [is_null] * 2
    outputs = torch.zeros(8, 8)
    outputs[:, 7] = targets[:, 5].nan_to_num(1e6).float()  # far off where there is no label
    metrics = task.new_metrics(CPU)
    metrics.update(task.scores(outputs), targets)
    assert float(metrics.compute()["amount_rmse"]) == 0
    assert task.losses(outputs, targets)[2] < 10
    task.check(few, torch.arange(8))
    with pytest.raises(DataError, match=r"node 2 .*amount=-1") if is_null else nullcontext():
        NodeRegression(label="amount").check(few, torch.arange(8))  # alone, it has nothing else to learn of such a node
    with pytest.raises(ConfigError, match="none of the 2 nodes has a label 'amount'") if is_null else nullcontext():
        task.check(few, torch.arange(2, 4))


def test_several_tasks_learn_together() -> None:
    model, task = Sage(8), several(best="class_accuracy")
    learner = Learner(model, torch.optim.Adam(model.parameters(), 0.05), task, train_loader())
    outcome = fit(
        learner, Training(8, progress=False), alone(), validate=lambda: evaluate(model, val_loader(), task, alone())
    )
    assert outcome.history[-1]["class_accuracy"] > 0.5
    assert outcome.history[-1]["amount_rmse"] < outcome.history[0]["amount_rmse"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": {}}, "tasks is empty"),
        ({"tasks": [NodeClassification(3)]}, r"tasks is \[NodeCl.*; give a dict by task"),
        ({"tasks": {1: NodeClassification(3)}}, "tasks has 1: NodeClassification.*; give a name and one of NodeClassi"),
        ({"tasks": {"links": LinkPrediction()}}, "tasks has 'links': LinkPrediction"),
        ({"tasks": {"both": SeveralTasks({"y": NodeClassification(3)})}}, "tasks has 'both': SeveralTasks"),
        (
            {"tasks": {"a": NodeClassification(3), "b": NodeRegression()}},
            "task 'a' reads the label 'y', as another does",
        ),
        ({"weights": [1.0]}, r"weights is \[1.0\]; give a dict by task"),
        ({"best": None}, "best is None, no metric of SeveralTasks"),
        ({"weights": {"other": 1.0}}, "weights has 'other', and the tasks are"),
        ({"weights": {"amount": -1.0}}, "weights\\['amount'\\] is -1.0"),
        ({"best": "accuracy"}, "best is 'accuracy', no metric of SeveralTasks"),
    ],
)
def test_several_tasks_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SeveralTasks(**{"tasks": several().tasks} | options)


def test_a_label_that_is_wrong_in_one_task_is_refused() -> None:
    batch = first_batch()
    batch.y[2] = 7
    with pytest.raises(DataError, match="y=7; classes are 0 to 2"):
        several().targets(batch)
    graph = labelled()
    graph.y[2], graph.amount[4] = 7, torch.nan
    with pytest.raises(DataError, match="node 2 is a seed with the label y=7"):
        several().check(hoploom.from_pyg(graph), torch.arange(9))
    with pytest.raises(ConfigError, match="has no field 'absent'"):
        SeveralTasks({"a": NodeClassification(3, label="absent")}).check(store(), torch.arange(9))
