"""Learners over a placed store, whose steps are taken whole or at their own size."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

import hoploom
from hoploom import NeighborLoader, Store
from hoploom.gpu.whole_steps import WholeStep
from hoploom.nn import GNN, Shape
from hoploom.ranks.context import init
from hoploom.system import StopRequests
from hoploom.train.step import Learner, Stepper, Training
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


def eager(learner: Learner, device: torch.device, epochs: int = 2, **options: Any) -> list[float]:
    """The losses of some epochs, each step at its own size."""
    stepper, losses = Stepper(learner, Training(epochs, **options), init(device=device), None), []
    learner.model.train()
    for _ in range(epochs):
        with stepper.steps() as steps:
            while not steps.is_empty:
                losses += [report.loss for report in steps.take(StopRequests()).reports]
        end_epoch(learner)
    return losses


def taken(
    learner: Learner, device: torch.device, epochs: int = 2, exact: bool = False, **options: Any
) -> tuple[list[float], WholeStep]:
    """The losses of some epochs of whole steps, one after the other. `exact`: sizes are those of one batch."""
    sizes = {"probed": 1, "rounded": 1} if exact else {}
    whole = WholeStep(learner, Training(epochs, **options), init(device=device), **sizes)
    losses: list[float] = []
    learner.model.train()
    for _ in range(epochs):
        losses += [report.loss for report in whole.epoch()]
        end_epoch(learner)
    return losses, whole


def end_epoch(learner: Learner) -> None:
    standing = learner.progress
    standing.epoch, standing.loss_sum, standing.rows = standing.epoch + 1, 0.0, 0


def parameters_of(learner: Learner) -> list[Tensor]:
    return [parameter.detach().cpu().clone() for parameter in learner.model.parameters()]
