"""Training on a placed store: as accurate as on the CPU, in memory that stays flat, over NCCL and by two processes.

What is marked gpu needs one; the rest runs a few steps in Triton's interpreter too.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support import gpu_workers
from support.device_loaders import placed
from support.gpu_workers import LARGE, TINY, Meter, Size, accuracy_of, fitted, learner_of

import hoploom
from hoploom import Store
from hoploom.ranks.context import init
from hoploom.train import Training

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
        learner = learner_of(store, size, context)
        training = Training(size.epochs, progress=False)
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
        meter = Meter(context.device)
        epochs = -(-500 // len(learner.loader))
        fitted(learner, Training(epochs, progress=False), context, meter)
    assert len(meter.reserved) >= 500
    assert meter.reserved[99] > 0
    assert max(meter.reserved[100:]) == meter.reserved[99]


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), pytest.param("nccl", marks=gpu)])
def test_a_process_group_of_one_takes_a_step(backend: str, device: torch.device, tmp_path: Path) -> None:
    """In a process with the variables that torchrun sets for one rank."""
    path = TINY.write(tmp_path / "store")
    where = "cuda:0" if device.type == "cuda" else "cpu"
    hoploom.spawn(gpu_workers.group_of_one, 1, [str(path), TINY, backend], device=where, backend=backend, timeout=90)
