"""What the ranks of tests do: spawned processes import these functions, so they live in a module of their own."""

import os
import re
import signal
import sys
import threading
from pathlib import Path

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


def check_two_ranks(context: Context) -> None:
    """All that two ranks do together, beside what one process does."""
    rank = context.rank
    assert (context.local_rank, context.world_size, context.is_main) == (rank, 2, rank == 0)
    assert set(listeners()) == {LOOPBACK}
    assert context.sum(2**60 + rank) == 2**61 + 1
    assert context.sum([0.1, 0.2][rank]) == 0.1 + 0.2
    assert [context.sum([1, 0.5][rank]), context.max([2, 1.5][rank])] == [1.5, 2.0]
    assert context.sum(torch.tensor([1, 2], dtype=torch.int32) * (rank + 1)).tolist() == [3, 6]
    assert context.max(rank - 5) == -4
    assert context.max(torch.tensor([1.5, -rank])).tolist() == [1.5, 0.0]
    gathered = context.gather(torch.tensor([[rank, 7]], dtype=torch.bfloat16))
    assert [entry.tolist() for entry in gathered] == [[[0, 7]], [[1, 7]]]
    assert [list(entry.shape) for entry in context.gather(torch.empty(0, 3))] == [[0, 3], [0, 3]]
    assert [bool(entry) for entry in context.gather(torch.tensor(rank == 1))] == [False, True]
    assert context.broadcast(torch.full((2,), float(rank + 3))).tolist() == [3, 3]
    mismatch = (
        "rank 0 was gathering from all ranks: a torch.float32 tensor of shape [1], but rank 1 has a torch.float32 "
        "tensor of shape [2]; give all ranks the same"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(mismatch)}$"):
        context.gather(torch.zeros(rank + 1))
    order = [nn.Linear(2, 3), nn.Linear(3, 2)][:: 1 - 2 * rank]  # as a loop over a set may have it
    with pytest.raises(ConfigError, match="in another order"):
        context.wrap(nn.Sequential(*order))
    context.barrier()
    check_gradients(context)
    norm = nn.BatchNorm1d(1)
    norm.running_mean = torch.tensor([float(rank + 1)])
    context.sync_buffers(norm)
    assert norm.running_mean.tolist() == [1]


def check_gradients(context: Context) -> None:
    torch.manual_seed(5)
    single = model().eval()
    expected = losses(single(FEATURES), LABELS).mean()
    expected.backward()
    torch.manual_seed(5 + context.rank)  # wrap must make the models equal
    wrapped = context.wrap(model()).eval()
    for _ in range(context.rank + 1):
        wrapped(FEATURES)  # forward passes of different number hang nobody
    own = SPLIT[context.rank]
    loss = context.mean_loss(losses(wrapped(FEATURES[own]), LABELS[own]))
    loss.backward()
    for ours, theirs in zip(wrapped.parameters(), single.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
        assert all(torch.equal(ours.grad, grad) for grad in context.gather(ours.grad))
    whole = float(context.sum(loss) / 2)
    assert whole == pytest.approx(expected.item(), abs=1e-6)
    assert abs(loss.item() - whole) > 1e-4  # a rank's own value is no mean over all


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
