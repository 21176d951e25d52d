"""Learners over a placed store, whose steps are taken whole or at their own size."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

import hoploom
from hoploom import LinkNeighborLoader, NeighborLoader, Store
from hoploom.gpu import whole_steps
from hoploom.gpu.whole_steps import WholeStep
from hoploom.nn import GNN, Bilinear, Shape
from hoploom.ranks.context import Context, init
from hoploom.system import StopRequests
from hoploom.train.link_prediction import LinkPrediction
from hoploom.train.loop import fit
from hoploom.train.step import Learner, StepCounts, Stepper, StepReport, Training
from hoploom.train.tasks import NodeClassification
from support.device_loaders import placed
from support.graphs import random_graph
from support.models import books

NUM_NODES, NUM_TRAIN, NUM_CLASSES, BATCH = 40, 14, 3, 4  # three steps of four seeds, and one of two


def labelled() -> Data:
    data = random_graph(NUM_NODES, 160, 3)
    generator = torch.Generator().manual_seed(4)
    data.x = torch.randn(NUM_NODES, 8, generator=generator)
    data.y = torch.randint(NUM_CLASSES, (NUM_NODES,), generator=generator)
    data.train_mask = torch.arange(NUM_NODES) < NUM_TRAIN
    return data


def homogeneous_learner(device: torch.device, kind: str = "sage", *, on_host: bool = False, **options: Any) -> Learner:
    """Two layers over a graph of one type. `options` are the loader's, the model's are under `shape`."""
    store = hoploom.from_pyg(labelled())
    store = store if on_host else placed(store, device)
    shape = Shape(hidden=8, num_layers=2, out=NUM_CLASSES, **options.pop("shape", {}))
    return _learner(store, kind, shape, device, None, options)


def library_learner(device: torch.device, kind: str = "rsage", *, on_host: bool = False, **options: Any) -> Learner:
    """Three node types; papers are the seeds."""
    data = books()
    data["paper"].y = torch.arange(data["paper"].num_nodes) % NUM_CLASSES
    data["paper"].train_mask = torch.arange(data["paper"].num_nodes) < 8
    store = hoploom.from_pyg(data) if on_host else placed(hoploom.from_pyg(data), device)
    options = {"input_nodes": ("paper", "train"), "batch_size": 3, "fanouts": [2, 2]} | options
    return _learner(store, kind, Shape(hidden=8, num_layers=2, out=NUM_CLASSES), device, ["paper"], options)


def _learner(
    store: Store, kind: str, shape: Shape, device: torch.device, out_types: list[str] | None, options: dict[str, Any]
) -> Learner:
    torch.manual_seed(0)
    model = GNN(kind, store.schema, shape, out_types).to(device)
    options = {"input_nodes": "train", "batch_size": BATCH, "shuffle": True, "seed": 5} | options
    fanouts = options.pop("fanouts", [3, 2])
    loader = NeighborLoader(store, fanouts, device=device, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, capturable=device.type == "cuda")
    return Learner(model, optimizer, NodeClassification(NUM_CLASSES), loader)


def link_learner(device: torch.device, *, on_host: bool = False, task: LinkPrediction, **options: Any) -> Learner:
    """Links of the graph itself, in five steps of eight and one of two, by a model with a decoder."""
    data = labelled()
    store = hoploom.from_pyg(data) if on_host else placed(hoploom.from_pyg(data), device)
    torch.manual_seed(0)
    model = GNN("sage", store.schema, Shape(hidden=8, num_layers=2, out=8)).to(device)
    model.decoder = Bilinear(8).to(device)
    options = {"batch_size": 8, "shuffle": True, "seed": 5} | options
    loader = LinkNeighborLoader(store, [3, 2], data.edge_index[:, :42], device=device, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, capturable=device.type == "cuda")
    return Learner(model, optimizer, task.bound(loader, init(device=device)), loader)


class Overflowing(WholeStep):
    """The last rank's second batch does not fit."""

    def __init__(self, learner: Learner, training: Training, context: Context, *given: Any) -> None:
        super().__init__(learner, training, context, *given)
        fitting, self._num_asked = [slot.fits for slot in self._slots], 0

        def fits(number: int, timeout: float) -> bool:
            self._num_asked += 1
            return fitting[number](timeout) and (self._num_asked != 2 or context.rank + 1 < context.world_size)

        for number, slot in enumerate(self._slots):
            slot.fits = partial(fits, number)  # type: ignore[method-assign]


def ranks_learn_whole(context: Context, batch_size: int) -> None:
    """Whole steps of all ranks end where eager DDP ends, though one rank's batch does not fit."""
    training = Training(2, clip_norm=0.5, progress=False)
    for make in (homogeneous_learner, partial(link_learner, task=LinkPrediction(), exclude="both", batch_size=6)):
        found: list[tuple[list[float], list[Tensor]]] = []
        given = {"batch_size": batch_size} if make is homogeneous_learner else {"neg_sampling": "binary"}
        for stepper in (None, Overflowing):
            learner = make(context.device, **given)  # type: ignore[operator]
            with torch.no_grad():
                for parameter in learner.model.parameters():
                    parameter += 0.1 * context.rank  # all begin as rank 0
            learner.model = context.wrap(learner.model)
            learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=0.2, momentum=0.9)
            outcome = fit(learner, training, context, stepper=stepper)
            found.append(([epoch["train_loss"] for epoch in outcome.history], parameters_of(learner)))
        counts = outcome.whole_steps
        assert counts is not None
        assert counts.overflowed == (context.rank + 1 == context.world_size)
        assert counts.first > 0
        (losses, parameters), (whole_losses, whole_parameters) = found
        assert whole_losses == pytest.approx(losses, rel=1e-5)
        for ours, theirs in zip(whole_parameters, parameters, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            assert all(torch.equal(ours, other) for other in context.gather(ours))


def assert_same(
    make: Callable[..., Learner], device: torch.device, tolerance: float = 1e-5, exact: bool = False, **options: Any
) -> StepCounts:
    """Both ways give the same losses and parameters; how the whole steps were taken."""
    own, whole = make(device, on_host=True), make(device)
    expected = eager(own, device, **{name: value for name, value in options.items() if name != "margin"})
    losses, step = taken(whole, device, exact=exact, **options)
    assert losses == pytest.approx(expected, rel=tolerance, abs=tolerance)
    assert_close(whole, own, 10 * tolerance)
    assert whole.loader.state_dict() == own.loader.state_dict()
    assert (whole.progress, whole.learning_rate) == (own.progress, own.learning_rate)
    return step.counts


def assert_close(left: Learner, right: Learner, tolerance: float) -> None:
    for ours, theirs in zip(parameters_of(left), parameters_of(right), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def eager(learner: Learner, device: torch.device, epochs: int = 2, **options: Any) -> list[float]:
    """The losses of some epochs, each step at its own size."""
    stepper, losses = Stepper(learner, Training(epochs, **options), init(device=device)), []
    learner.model.train()
    for _ in range(epochs):
        losses += [report.loss for report in epoch_of(stepper)]
        end_epoch(learner)
    return losses


def taken(
    learner: Learner, device: torch.device, epochs: int = 2, exact: bool = False, **options: Any
) -> tuple[list[float], WholeStep]:
    """The losses of some epochs of whole steps, one after the other. `exact`: sizes are those of one batch."""
    with pytest.MonkeyPatch.context() as patch:
        if exact:
            with_sizes_of_one_batch(patch)
        whole = WholeStep(learner, Training(epochs, **options), init(device=device))
    losses: list[float] = []
    learner.model.train()
    for _ in range(epochs):
        losses += [report.loss for report in epoch_of(whole)]
        end_epoch(learner)
    return losses, whole


def epoch_of(stepper: Stepper) -> Iterator[StepReport]:
    """The reports of the steps that an epoch has left, each when its loss is known."""
    with stepper.steps() as steps:
        while not steps.is_empty:
            yield from steps.take(StopRequests()).reports
        yield from steps.rest()


def with_sizes_of_one_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(whole_steps, "PROBED", 1)
    patch.setattr(whole_steps, "ROUNDED", 1)


def end_epoch(learner: Learner) -> None:
    standing = learner.progress
    standing.epoch, standing.loss_sum, standing.rows = standing.epoch + 1, 0.0, 0


def parameters_of(learner: Learner) -> list[Tensor]:
    return [parameter.detach().cpu().clone() for parameter in learner.model.parameters()]
