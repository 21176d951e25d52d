"""Training on a placed store beside training on the host's batches, and what the processes of its tests run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import hoploom
from hoploom import NeighborLoader, Store
from hoploom.nn import GNN, Shape
from hoploom.ranks.context import Context, chosen_backend
from hoploom.train import Learner, NodeClassification, Training, evaluate, fit
from hoploom.train.loop import Outcome
from support.device_loaders import placed


@dataclass(frozen=True)
class Size:
    num_nodes: int
    num_classes: int
    avg_degree: float
    fanouts: tuple[int, ...]
    batch_size: int  # of all ranks
    epochs: int
    floor: float  # the accuracy that training reaches at least; chance is 1 / num_classes
    tolerance: float  # between two trainings, in accuracy

    def write(self, folder: Path) -> Path:
        options: dict[str, Any] = {"num_features": 16, "num_classes": self.num_classes, "homophily": 0.9}
        hoploom.generate(folder, num_nodes=self.num_nodes, avg_degree=self.avg_degree, **options)
        return folder


TINY = Size(160, 2, 6.0, (4, 3), 24, 4, floor=0.85, tolerance=0.04)
LARGE = Size(6000, 8, 15.0, (10, 5), 256, 10, floor=0.93, tolerance=0.01)


def loader_of(store: Store, size: Size, context: Context, **options: Any) -> NeighborLoader:
    """Blocks of a constant global batch, so that a step is the same for any number of ranks."""
    ranks = {"rank": context.rank, "world_size": context.world_size}
    own = {"input_nodes": "train", "batch_size": size.batch_size // context.world_size, "shuffle": True, "seed": 5}
    return NeighborLoader(store, list(size.fanouts), mode="blocks", device=context.device, **ranks | own | options)


def model_of(store: Store, size: Size) -> GNN:
    torch.manual_seed(1)
    return GNN("sage", store.schema, Shape(hidden=32, num_layers=len(size.fanouts), out=size.num_classes))


def learner_of(store: Store, size: Size, context: Context, **options: Any) -> Learner:
    model = context.wrap(model_of(store, size))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, capturable=context.device.type == "cuda")
    return Learner(model, optimizer, NodeClassification(size.num_classes), loader_of(store, size, context, **options))


def accuracy_of(learner: Learner, store: Store, size: Size, context: Context) -> float:
    loader = NeighborLoader(store, [-1] * len(size.fanouts), "test", batch_size=1024, device=context.device)
    return evaluate(learner.model, loader, learner.task, context)["accuracy"]


def after_steps(learner: Learner, steps: int, context: Context) -> Tensor:
    """All parameters after some steps of SGD, which, unlike Adam, makes no more of the last bits than they are."""
    parameters = list(learner.model.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    learner.optimizer = torch.optim.SGD(parameters, lr=0.1)
    fit(learner, Training(1, max_steps=steps, progress=False), context)
    assert not any(torch.equal(new, old) for new, old in zip(parameters, before, strict=True))
    return torch.cat([parameter.detach().reshape(-1).cpu() for parameter in parameters])


class Meter:
    """Stands where a run's journal does: what the device has reserved after every step."""

    def __init__(self, device: torch.device) -> None:
        self.reserved: list[int] = []
        self._device = device

    def rewind(self, *place: int) -> None:
        """Nothing was written."""

    def step(self, report: Any) -> None:
        self.reserved.append(torch.cuda.memory_reserved(self._device))

    def epoch(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Not asked for."""


def fitted(
    learner: Learner, training: Training, context: Context, meter: Meter | None = None, *, whole: bool = False
) -> Outcome:
    stepper = hoploom.WholeStep if whole else None
    return fit(learner, training, context, journal=meter, stepper=stepper)  # type: ignore[arg-type]


def group_of_one(context: Context, path: str, size: Size, backend: str) -> None:
    """A context starts no group for one rank: here there is one of the user's own.

    Shows that the backend starts on this device, bound to loopback, that DDP averages gradients of our kernels over
    it, and that CPU tensors, which the context's own reductions send, go through the same group. What a context of
    one rank answers does not depend on the group.
    """
    store = dist.HashStore()
    dist.init_process_group(chosen_backend(backend, context.device), store=store, rank=0, world_size=1)
    assert dist.get_world_size() == 1
    assert backend in dist.get_backend_config()
    for device in (context.device, torch.device("cpu")):
        values = torch.arange(3.0, device=device)
        received = [torch.empty_like(values)]
        dist.all_gather(received, values)
        dist.all_reduce(values)
        assert values.tolist() == received[0].tolist() == [0, 1, 2]
    dist.barrier()
    context.barrier()
    assert context.sum(2**60 + 1) == 2**60 + 1
    assert [entry.tolist() for entry in context.gather(torch.arange(2, device=context.device))] == [[0, 1]]
    with placed(hoploom.open(path), context.device) as store:
        parameters = []
        for averaged in (False, True):
            learner = learner_of(store, size, context)
            if averaged:
                devices = [context.device] if context.device.type == "cuda" else None
                learner.model = DistributedDataParallel(learner.model, device_ids=devices)
            parameters.append(after_steps(learner, 1, context))
        torch.testing.assert_close(*parameters, rtol=1e-5, atol=1e-6)
