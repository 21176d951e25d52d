"""What the ranks of tests do: spawned processes import these functions, so they live in a module of their own."""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hoploom import ConfigError, PeerError
from hoploom.ranks.context import Context

FEATURES = torch.linspace(-1, 1, 11 * 4).reshape(11, 4)  # eleven seeds: six for rank 0, five for rank 1
LABELS = torch.arange(11) % 3
LOOPBACK = "0100007F"
SPLIT = {0: slice(0, 6), 1: slice(6, 11)}


def model() -> nn.Sequential:
    """The same one on every rank only if somebody makes it so."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.Tanh(), nn.Linear(8, 3))


def losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


def listeners() -> list[str]:
    """The addresses that this process listens on, as Linux tells them: 0100007F is 127.0.0.1."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and _is_open(path)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def _is_open(path: Path) -> bool:
    try:
        return bool(os.readlink(path))
    except FileNotFoundError:
        return False


def _told(wanted: type[Exception], call: Any, *args: Any) -> str:
    try:
        call(*args)
    except wanted as error:
        return str(error)
    return "no error"


def tell_all(context: Context, folder: str) -> None:
    rank = context.rank
    told: dict[str, Any] = {"rank": rank, "local_rank": context.local_rank, "world_size": context.world_size}
    told |= {"is_main": context.is_main, "device": str(context.device), "threads": torch.get_num_threads()}
    told["listeners"] = listeners()
    told["counts"] = context.sum(2**60 + rank)
    told["sum"] = context.sum([0.1, 0.2][rank])
    told["mixed"] = [context.sum([1, 0.5][rank]), context.max([2, 1.5][rank])]
    told["sums"] = context.sum(torch.tensor([1, 2], dtype=torch.int32) * (rank + 1)).tolist()
    told["max"] = [context.max(rank - 5), context.max(torch.tensor([1.5, -rank])).tolist()]
    told["gathered"] = [entry.tolist() for entry in context.gather(torch.tensor([[rank, 7]], dtype=torch.bfloat16))]
    told["gathered_empty"] = [list(entry.shape) for entry in context.gather(torch.empty(0, 3))]
    told["gathered_flag"] = [bool(entry) for entry in context.gather(torch.tensor(rank == 1))]
    told["broadcast"] = context.broadcast(torch.full((2,), float(rank + 3))).tolist()
    told["mismatch"] = _told(ConfigError, context.gather, torch.zeros(rank + 1))
    order = [nn.Linear(2, 3), nn.Linear(3, 2)][:: 1 - 2 * rank]  # as a loop over a set may have it
    told["other_order"] = _told(ConfigError, context.wrap, nn.Sequential(*order))
    context.barrier()
    told["gradients"], told["loss"], told["share"] = _uneven_step(context)
    told["buffer"] = _buffers(context)
    Path(folder, f"{rank}.json").write_text(json.dumps(told))


def _uneven_step(context: Context) -> tuple[list[list[float]], float, float]:
    torch.manual_seed(5 + context.rank)  # wrap must make the models equal
    wrapped = context.wrap(model()).eval()
    for _ in range(context.rank + 1):
        wrapped(FEATURES)  # forward passes of different number hang nobody
    own = SPLIT[context.rank]
    loss = context.mean_loss(losses(wrapped(FEATURES[own]), LABELS[own]))
    loss.backward()
    gradients = [parameter.grad.flatten().tolist() for parameter in wrapped.parameters() if parameter.grad is not None]
    return gradients, float(context.sum(loss) / context.world_size), loss.item()


def _buffers(context: Context) -> list[float]:
    norm = nn.BatchNorm1d(1)
    norm.running_mean = torch.tensor([float(context.rank + 1)])
    context.sync_buffers(norm)
    return norm.state_dict()["running_mean"].tolist()


def check_two_ranks(folder: Path) -> None:
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, found in enumerate(told):
        assert (found["rank"], found["local_rank"], found["world_size"]) == (rank, rank, 2)
        assert found["is_main"] == (rank == 0)
        assert set(found["listeners"]) == {LOOPBACK}
        assert found["threads"] >= 1
        assert found["mixed"] == [1.5, 2.0]
        assert "in another order" in found["other_order"]
        assert found["counts"] == 2**61 + 1
        assert found["sum"] == 0.1 + 0.2
        assert found["sums"] == [3, 6]
        assert found["max"] == [-4, [1.5, 0.0]]
        assert found["gathered"] == [[[0, 7]], [[1, 7]]]
        assert found["gathered_empty"] == [[0, 3], [0, 3]]
        assert found["gathered_flag"] == [False, True]
        assert found["broadcast"] == [3, 3]
        assert found["mismatch"] == (
            "rank 0 was gathering from all ranks: a torch.float32 tensor of shape [1], but rank 1 has a torch.float32 "
            "tensor of shape [2]; give all ranks the same"
        )
        assert found["buffer"] == [1]
    check_gradients(told[0]["gradients"], told[0]["loss"])
    assert told[0]["gradients"] == told[1]["gradients"]
    assert told[0]["loss"] == told[1]["loss"] == pytest.approx((told[0]["share"] + told[1]["share"]) / 2)
    assert abs(told[0]["share"] - told[0]["loss"]) > 1e-4  # a rank's own value is no mean over all


def check_gradients(gradients: list[list[float]], loss: float) -> None:
    torch.manual_seed(5)
    single = model().eval()
    expected = losses(single(FEATURES), LABELS).mean()
    expected.backward()
    for found, parameter in zip(gradients, single.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(torch.tensor(found), parameter.grad.flatten(), rtol=0, atol=1e-6)
    assert loss == pytest.approx(expected.item(), abs=1e-6)


def raise_in_rank_one(context: Context, folder: str) -> None:
    if context.rank == 1:
        raise KeyError("the missing column")
    _wait_for_peers(context, folder)


def kill_rank_one(context: Context, folder: str) -> None:
    wrapped = context.wrap(nn.Linear(4, 3))
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        context.mean_loss(losses(wrapped(FEATURES), LABELS), total=22).backward()
    except PeerError as error:
        Path(folder, "told").write_text(str(error))
        raise


def stop_rank_one(context: Context, folder: str) -> None:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    _wait_for_peers(context, folder)


def leave_early(context: Context, folder: str) -> None:
    for _ in range(3 - context.rank):
        context.sum(1.0)


def _wait_for_peers(context: Context, folder: str) -> None:
    try:
        context.barrier()
    except PeerError as error:
        Path(folder, "told").write_text(str(error))
        raise


def exit_with(context: Context, code: int) -> None:
    sys.exit(code)


def wait_to_be_ended(context: Context, folder: str) -> None:
    """Both ranks say that they run, then wait, one of them for the other; on Ctrl-C they say goodbye."""
    context.barrier()
    Path(folder, f"pid-{os.getpid()}").touch()
    try:
        if context.rank == 0:
            threading.Event().wait(60)
        context.barrier()
    except KeyboardInterrupt:
        Path(folder, f"clean-{context.rank}").touch()
        raise
