"""Spawned ranks: the first error is the one shown, and nothing is left running, however it ends."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from support import TESTS
from support.process_tree import runs
from support.until import until
from torch import Tensor, nn

from hoploom import ConfigError, PeerError, StoreError, TrainError
from hoploom.ranks.context import Context
from hoploom.ranks.spawn import _rebuild, spawn
from hoploom.system import EndTimeouts, StopRequests, put_back, terminated_as_interrupted

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
    assert (set(listeners()), context.sum(2**60 + rank)) == ({LOOPBACK}, 2**61 + 1)
    assert context.sum([0.1, 0.2][rank]) == 0.1 + 0.2
    assert [context.sum([1, 0.5][rank]), context.max([2, 1.5][rank])] == [1.5, 2.0]
    assert context.sum(torch.tensor([1, 2], dtype=torch.int32) * (rank + 1)).tolist() == [3, 6]
    assert (context.max(rank - 5), context.max(torch.tensor([1.5, -rank])).tolist()) == (-4, [1.5, 0.0])
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


def told_of(kind: type[BaseException], message: str) -> dict[str, str]:
    return {"module": kind.__module__, "type": kind.__qualname__, "message": message, "text": "Traceback ..."}


class OurOwnError(Exception):
    pass


def test_spawned_ranks_do_together_what_one_process_does() -> None:
    spawn(check_two_ranks, 2)


def test_the_first_error_is_raised_with_its_rank_and_traceback(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="rank 1: 'the missing column'") as raised:
        spawn(raise_in_rank_one, 2, [str(tmp_path)])
    assert "in raise_in_rank_one" in raised.value.__notes__[0]
    text = (tmp_path / "told").read_text()
    assert text.startswith("rank 0 of 2 was waiting at a barrier (barrier at test_spawn.py:")
    assert "), and rank 1 ended with KeyError: 'the missing column'" in text


def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="rank 1 was killed by SIGKILL"):
        spawn(kill_rank_one, 2, [str(tmp_path)])
    text = (tmp_path / "told").read_text()
    assert text.startswith("rank 0 of 2 was averaging gradients (backward at test_spawn.py:")
    assert "), and no sign of life came from rank 1 (" in text
    assert "start again from the last checkpoint" in text


def test_a_rank_that_hangs_is_named_after_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoploom.ranks.spawn.TIMEOUTS", EndTimeouts(after_failure=1, after_terminate=0.5))
    with pytest.raises(PeerError, match=r"no sign of life came from rank 1 .*a timeout above 8 seconds"):
        spawn(stop_rank_one, 2, [str(tmp_path)], device="cpu", timeout=8)


def test_a_rank_that_takes_fewer_steps_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="and rank 1 has finished, after fewer steps or calls than this rank"):
        spawn(leave_early, 2, [str(tmp_path)])


def test_a_rank_that_exits_gives_its_code() -> None:
    with pytest.raises(TrainError, match="rank 0 ended with exit code 3"):
        spawn(exit_with, 1, [3])


def test_an_error_keeps_its_type_where_a_message_makes_it() -> None:
    for kind in (ValueError, StoreError, ConfigError, FileNotFoundError, MemoryError):
        error = _rebuild(2, told_of(kind, "no"))
        assert type(error) is kind
        assert (str(error), error.__notes__) == ("rank 2: no", ["On rank 2:\nTraceback ..."])
    for kind in (OurOwnError, UnicodeDecodeError):
        error = _rebuild(2, told_of(kind, "no"))
        assert type(error) is TrainError
        assert str(error) == f"rank 2 ended with {kind.__name__}: no"
    assert str(_rebuild(0, told_of(PeerError, "rank 0 of 2 was busy"))) == "rank 0 of 2 was busy"
    assert str(_rebuild(0, told_of(KeyboardInterrupt, ""))) == "rank 0 was interrupted by SIGINT"


def test_what_cannot_be_spawned_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def local(context: Context) -> None: ...

    for arguments, message in [
        ((lambda context: None, 2), "fn is .*<lambda>, which other processes cannot import; define it at the top"),
        ((local, 2), "cannot import; define it at the top of a module"),
        (("train", 2), "fn is 'train'; give a function"),
        ((exit_with, 0), "nprocs is 0"),
        ((exit_with, 2.5), "nprocs is 2.5"),
        ((exit_with, 1, [threading.Lock()]), "cannot be sent to another process: .*open and make"),
    ]:
        with pytest.raises(ConfigError, match=message):
            spawn(*arguments)
    for name, text in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match="spawn was called in rank 1 of 2, as RANK and WORLD_SIZE say; call "):
        spawn(exit_with, 2, [3])


SCRIPT = """
import gc, sys
gc.disable()
import hoploom
from unit.ranks import test_spawn
gc.freeze()
gc.enable()

def train(context, folder):
    test_spawn.wait_to_be_ended(context, folder)

if __name__ == "__main__":
    hoploom.spawn(train, 2, sys.argv[1:])
"""


@pytest.mark.parametrize(("kind", "shell"), [("KILL", ""), ("TERM", "trap '' INT; ")])
def test_no_rank_outlives_its_parent(kind: str, shell: str, tmp_path: Path) -> None:
    """Killed, or ended by SIGTERM as a shell's background job: one that ignores Ctrl-C, which else does the same."""
    (tmp_path / "train.py").write_text(SCRIPT)
    line = f"{shell}exec {sys.executable} {tmp_path / 'train.py'} {tmp_path}"
    number = signal.Signals[f"SIG{kind}"]
    with subprocess.Popen(
        ["sh", "-c", line], env=os.environ | {"PYTHONPATH": str(TESTS)}, stderr=subprocess.PIPE, text=True
    ) as parent:
        until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
        assert all(runs(pid) for pid in pids)
        assert ignores(parent.pid, signal.SIGINT) == bool(shell)
        parent.send_signal(number)
        _, err = parent.communicate(timeout=30)
    until(lambda: not any(runs(pid) for pid in pids), seconds=10)
    assert parent.returncode == -(signal.SIGKILL if kind == "KILL" else signal.SIGINT)
    assert len(list(tmp_path.glob("clean-*"))) == (0 if kind == "KILL" else 2)
    assert kind == "KILL" or err.count("Traceback") == 1


def ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_an_ignored_ctrl_c_stays_ignored_and_sigterm_asks_to_stop() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequests() as requests:
            os.kill(os.getpid(), signal.SIGINT)
            assert not requests.stop_requested
            os.kill(os.getpid(), signal.SIGTERM)
            assert requests.stop_requested
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_scripts_own_handler_of_sigterm_stays_while_ranks_run() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with terminated_as_interrupted():
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_is_not_pythons_is_passed_over() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        put_back({signal.SIGTERM: None, signal.SIGINT: signal.SIG_IGN})
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
