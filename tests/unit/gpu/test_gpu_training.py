"""Training on a placed store: as accurate as on the CPU, in memory that stays flat, over NCCL and by two processes.

What is marked gpu needs one; the rest runs a few steps in Triton's interpreter too.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.device_loaders import placed
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import hoploom
from hoploom import NeighborLoader, Store
from hoploom.nn import GNN, Shape
from hoploom.ranks.context import Context, chosen_backend, init
from hoploom.train import Learner, NodeClassification, Training, evaluate, fit
from hoploom.train.loop import Outcome


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

    def recording(self, *_: object) -> AbstractContextManager[None]:
        """Nothing is written down."""
        return nullcontext()

    def step(self, report: Any) -> None:
        self.reserved.append(torch.cuda.memory_reserved(self._device))

    def epoch(self, *_: object, **__: object) -> None:
        """Not asked for, like the run's end."""

    ended = epoch


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


pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]  # kernels may have to be compiled
gpu = pytest.mark.gpu


class OnHost(NamedTuple):
    """What training on the CPU, with batches of the C++ core, came to."""

    size: Size
    store: Store
    accuracy: float
    losses: list[float]


@pytest.fixture(scope="module", params=[TINY, pytest.param(LARGE, marks=gpu)], ids=["a few steps", "epochs"])
def on_host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OnHost:
    size: Size = request.param
    store = hoploom.open(size.write(tmp_path_factory.mktemp("graph") / "store"))
    accuracy, losses = trained(store, size, torch.device("cpu"))
    return OnHost(size, store, accuracy, losses)


def trained(store: Store, size: Size, device: torch.device, *, whole: bool = False) -> tuple[float, list[float]]:
    """The accuracy on the test nodes, and the loss of every epoch."""
    with init(device=device) as context:
        learner, training = learner_of(store, size, context), Training(size.epochs, progress=False)
        outcome = fitted(learner, training, context, whole=whole)
        if outcome.whole_steps is not None:
            assert outcome.whole_steps.replayed > 0
        losses = [epoch["train_loss"] for epoch in outcome.history]
        return accuracy_of(learner, store, size, context), losses


@pytest.mark.parametrize("whole", [False, True], ids=["eager", "whole steps"])
def test_a_placed_store_trains_to_the_cpus_accuracy(on_host: OnHost, whole: bool, device: torch.device) -> None:
    """The same picks and the same seeds: what differs is rounding, which many steps make more of."""
    size = on_host.size
    assert on_host.accuracy >= size.floor
    with hoploom.place(on_host.store, topology=device, features=device) as store:
        accuracy, losses = trained(store, size, device, whole=whole)
    assert losses[0] == pytest.approx(on_host.losses[0], rel=1e-3)
    assert accuracy >= size.floor
    assert abs(accuracy - on_host.accuracy) <= size.tolerance


@gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_takes_no_more_memory_from_step_100_on(num_workers: int, device: torch.device, tmp_path: Path) -> None:
    """Batches that reach nearly all of a graph differ little in size; no step leaves anything behind."""
    size = Size(3000, 4, 20.0, (10, 10), 256, 1, floor=0.25, tolerance=0.0)
    torch.cuda.empty_cache()  # what other tests left would hide what this one takes
    with init(device=device) as context, placed(hoploom.open(size.write(tmp_path / "store")), device) as store:
        learner = learner_of(store, size, context, num_workers=num_workers)
        meter, epochs = Meter(context.device), -(-500 // len(learner.loader))
        fitted(learner, Training(epochs, progress=False), context, meter)
    assert len(meter.reserved) >= 500
    assert meter.reserved[99] > 0
    assert max(meter.reserved[100:]) == meter.reserved[99]


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), pytest.param("nccl", marks=gpu)])
def test_a_process_group_of_one_takes_a_step(backend: str, device: torch.device, tmp_path: Path) -> None:
    """In a process with the variables that torchrun sets for one rank."""
    path = TINY.write(tmp_path / "store")
    where = "cuda:0" if device.type == "cuda" else "cpu"
    hoploom.spawn(group_of_one, 1, [str(path), TINY, backend], device=where, backend=backend, timeout=90)
