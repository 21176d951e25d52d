"""Labels are looked at once, before training: a look at every batch would make each step wait for the device."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.fit_workers import NUM_CLASSES, labelled, link_loader
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch_geometric.data import Data

import hoploom
from hoploom import DataError, LinkNeighborLoader, NeighborLoader
from hoploom.ranks.context import Context, init
from hoploom.train.link_prediction import LinkPrediction
from hoploom.train.link_prediction import check_labels as check
from hoploom.train.loop import evaluate, fit
from hoploom.train.step import Learner, Training
from hoploom.train.tasks import NodeClassification

GPU = torch.device("cuda", 0)
ON_CPU, ON_GPU = (cast(Context, SimpleNamespace(device=device)) for device in (torch.device("cpu"), GPU))
check_labels = partial(check, training=True)


def test_nobody_looks_at_labels_on_a_gpu_that_have_been_looked_at() -> None:
    """A tensor without values has no answer for who looks."""
    known = check_labels(LinkPrediction(), rated(torch.arange(8) % 2), torch.nn.Identity(), ON_GPU)
    with FakeTensorMode():
        labels = torch.empty(4, dtype=torch.int64, device=GPU)
        batch = Data(edge_label=labels, edge_label_index=torch.stack([labels, labels]), input_id=labels)
        targets = known.targets(batch)
        with pytest.raises(DataDependentOutputException):  # who has not looked before looks now
            LinkPrediction().targets(batch)
    assert targets.is_cuda
    assert targets.shape == (4,)


def test_labels_that_nobody_knows_beforehand_are_looked_at_in_every_batch() -> None:
    changed = rated(torch.arange(8), transform=lambda batch: batch)
    task = check_labels(LinkPrediction(), rated(torch.arange(8) % 2), torch.nn.Identity(), ON_GPU)
    assert (
        check_labels(task, changed, torch.nn.Identity(), ON_GPU)
        == check_labels(LinkPrediction(), link_loader(), torch.nn.Identity(), ON_CPU)
        == LinkPrediction()
    )
    assert task != LinkPrediction()


def rated(labels: torch.Tensor, **options: Any) -> LinkNeighborLoader:
    links = labelled().edge_index[:, : len(labels)]
    return LinkNeighborLoader(labelled(), [2], links, edge_label=labels, batch_size=4, **options)


def test_the_labels_of_links_are_checked_before_training() -> None:
    source, destination = labelled().edge_index[:, 2].tolist()
    said = rf"^link \[{source}, {destination}\] has the label 2; links are 1, or 0 where there is none$"
    with pytest.raises(DataError, match=said):
        check_labels(LinkPrediction(), rated(torch.arange(8)), torch.nn.Identity(), ON_GPU)
    with pytest.raises(DataError, match="has the label 2; links are 1"):  # 0 means negative, so 1 has become 2
        check_labels(LinkPrediction(), rated(torch.arange(8) % 2, neg_sampling="binary"), torch.nn.Identity(), ON_GPU)
    for loader in (
        link_loader(),
        rated(torch.arange(8) % 2),
        rated(torch.ones(8), neg_sampling="binary"),
        rated(torch.arange(8), transform=lambda batch: batch),  # nobody knows what becomes of them
    ):
        check_labels(LinkPrediction(), loader, torch.nn.Identity(), ON_GPU)
    check_labels(LinkPrediction(), rated(torch.arange(8)), torch.nn.Identity(), ON_CPU)  # every batch is looked at


def test_the_labels_of_nodes_are_checked_before_training() -> None:
    data = labelled()
    data.y[21] = NUM_CLASSES
    loader, task = NeighborLoader(hoploom.from_pyg(data), [2], "train", batch_size=16), NodeClassification(NUM_CLASSES)
    with pytest.raises(DataError, match="node 21 is a seed with the label"):
        check_labels(task, loader, torch.nn.Identity(), ON_GPU)
    check_labels(task, loader, torch.nn.Identity(), ON_CPU)


def fitted(model: torch.nn.Module, context: Context) -> None:
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), LinkPrediction(), rated(torch.ones(8)))
    fit(learner, Training(1, progress=False), context)


@pytest.mark.parametrize(
    "work",
    [fitted, lambda model, context: evaluate(model, rated(torch.ones(8)), LinkPrediction(), context)],
    ids=["fit", "evaluate"],
)
def test_who_trains_and_who_evaluates_checks(
    work: Callable[[torch.nn.Module, Context], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LinkPrediction, labels: Any, ends: Any) -> None:
        raise DataError("checked")

    monkeypatch.setattr(LinkPrediction, "check", refuse)
    context = init(device="cpu")
    monkeypatch.setattr(context, "device", GPU)
    with pytest.raises(DataError, match="checked"):
        work(torch.nn.Linear(2, 2), context)
