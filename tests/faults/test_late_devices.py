"""What reads values of a device waits no longer than its deadline, and says what it waited for."""

from pathlib import Path

import pytest
import torch
from support.graphs import ring
from support.whole_steps import homogeneous_learner
from torch_geometric.data import Data

import hoploom
from hoploom import Embedding, TrainError
from hoploom.nn.relational import _types_of
from hoploom.ops import InEdges
from hoploom.ops.deadline import HostCopy, on_host
from hoploom.ranks.context import init
from hoploom.store import Wanted
from hoploom.system import StopRequests
from hoploom.train.checkpoint import write_state
from hoploom.train.step import Stepper, Training

BUSY = r"see what else keeps it busy \(nvidia-smi\)"


class Hung:
    def query(self) -> bool:
        return False


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy to the host arrives."""
    wait = HostCopy.wait

    def late(copied: HostCopy, seconds: float, message: str) -> torch.Tensor:
        copied._arrived = Hung()
        return wait(copied, min(seconds, 0.02), message)

    monkeypatch.setattr(HostCopy, "wait", late)


def test_evaluation_says_what_the_device_has_not_done(device: torch.device, hung: None) -> None:
    learner, context = homogeneous_learner(device, on_host=True), init(device=device, timeout=7)
    said = rf"^evaluation failed: the device has not evaluated a batch within 7 s; {BUSY}, or give hoploom.init a "
    with pytest.raises(TrainError, match=said + "timeout above 7 seconds$"):
        hoploom.evaluate(learner.model, learner.loader, learner.task, context)


def test_the_scaler_of_half_precision_reads_no_device_that_hangs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    learner, context = homogeneous_learner(device), init(device=device, timeout=7)
    stepper = Stepper(learner, Training(1, precision="fp16"), context, None)
    with stepper.steps() as steps:
        steps.take(StopRequests())
    request.getfixturevalue("hung")
    monkeypatch.setattr(stepper._scaler, "get_scale", lambda: pytest.fail("it was read"))
    with pytest.raises(TrainError, match=r"^epoch 1 step 2: the device has not computed the gradients within 7 s; "):
        stepper._update(1.0)


def test_a_step_says_what_its_model_waited_for(device: torch.device, request: pytest.FixtureRequest) -> None:
    learner, context = homogeneous_learner(device, on_host=True), init(device=device, timeout=7)
    request.getfixturevalue("hung")
    learner.model.register_forward_pre_hook(lambda *given: on_host(torch.ones(1), "found ids to look up"))
    said = rf"^epoch 1 step 1: the device has not found ids to look up within 600 s; {BUSY}; there is no checkpoint$"
    with pytest.raises(TrainError, match=said):
        hoploom.fit(learner, Training(1, progress=False), context)


def test_rows_that_the_host_keeps_wait_for_no_ids_for_ever(device: torch.device, hung: None) -> None:
    with hoploom.place(hoploom.from_pyg(ring(12)), topology=str(device)) as store:
        assert store.placed is not None
        ids, faults = torch.arange(3, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        with pytest.raises(TimeoutError, match=rf"^the device has not computed ids within 600 s; {BUSY}$"):
            store.placed.gather([Wanted("node", "x", ids)], faults)


def test_no_checkpoint_is_written_of_a_state_that_never_comes(tmp_path: Path, hung: None) -> None:
    said = rf"^the checkpoint is not written: the device has not computed 'model/weight' within 600 s; {BUSY}$"
    with pytest.raises(TrainError, match=said):
        write_state(tmp_path / "last.pt", {"model": {"weight": torch.ones(2)}})
    assert list(tmp_path.iterdir()) == []


def test_learned_rows_wait_for_no_device_for_ever(request: pytest.FixtureRequest) -> None:
    data = Data(edge_index=ring(12).edge_index, num_nodes=12)
    embedding = Embedding(hoploom.from_pyg(data), dim=4)
    rows = embedding(torch.arange(3))
    request.getfixturevalue("hung")
    with pytest.raises(TimeoutError, match="has not found ids to look up within 600 s"):
        embedding(torch.arange(3))
    with pytest.raises(TimeoutError, match="has not computed the gradients of learned rows within 600 s"):
        rows.sum().backward()
    with pytest.raises(TimeoutError, match="has not sampled the batch within 600 s"):
        embedding._look_up(torch.arange(3))


def test_layers_that_count_edges_wait_for_no_device_for_ever(hung: None) -> None:
    edges = InEdges.of(torch.tensor([[0, 1], [1, 1]]), 2, 2).with_features(torch.zeros(2, 1))
    with pytest.raises(TimeoutError, match="has not counted the edges within 600 s"):
        _types_of(edges, 2)
