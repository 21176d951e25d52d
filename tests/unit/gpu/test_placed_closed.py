"""What once went wrong at the edges: a placed store that is closed while it is used, and batches of one seed."""

from typing import Any

import pytest
import torch
from support.graphs import random_graph
from support.whole_steps import homogeneous_learner
from test_whole_step import assert_same

import hoploom
from hoploom import ConfigError
from hoploom.dist.context import init
from hoploom.gpu.batches import stages as sampling
from hoploom.gpu.whole_step.cuda_graph import Recording
from hoploom.gpu.whole_step.epoch import WholeStep
from hoploom.train.learner import Training


def test_no_kernel_reads_a_closed_store(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(sampling, "sample_on_device", lambda *arguments: started.append(arguments))
    store = hoploom.from_pyg(random_graph(40, 160, 3)).place(device, device)
    loader = hoploom.NeighborLoader(store, [3, 2], torch.arange(8), batch_size=4)
    store.close()
    with pytest.raises(ConfigError, match="closed"):
        next(iter(loader))
    assert not started


def test_no_replay_reads_a_closed_store(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = homogeneous_learner(device)
    whole = WholeStep(learner, Training(2), init(device=device))
    assert len(list(whole.epoch())) > 0
    calls: list[Any] = []
    monkeypatch.setattr(Recording, "__call__", lambda recording: calls.append(recording))
    learner.loader.store.close()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="closed"):
        list(whole.epoch())
    assert not calls


def test_a_whole_step_may_be_of_one_seed(device: torch.device) -> None:
    counts = assert_same(lambda *a, **o: homogeneous_learner(*a, batch_size=1, **o), device, epochs=1)
    assert counts.replayed > 0
