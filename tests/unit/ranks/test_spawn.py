"""Spawned ranks: the first error is the one shown, and nothing is left running, however it ends."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import TESTS, train_workers
from support.process_tree import runs
from support.until import until

from hoploom import ConfigError, PeerError, StoreError, TrainError
from hoploom.ranks.context import Context
from hoploom.ranks.environment import EndTimeouts, StopRequests, put_back, terminated_as_interrupted
from hoploom.ranks.spawn import _rebuild, spawn


def told_of(kind: type[BaseException], message: str) -> dict[str, str]:
    return {"module": kind.__module__, "type": kind.__qualname__, "message": message, "text": "Traceback ..."}


class OurOwnError(Exception):
    pass


def test_spawned_ranks_do_together_what_one_process_does() -> None:
    spawn(train_workers.check_two_ranks, 2)


def test_the_first_error_is_raised_with_its_rank_and_traceback(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="rank 1: 'the missing column'") as raised:
        spawn(train_workers.raise_in_rank_one, 2, [str(tmp_path)])
    assert "in raise_in_rank_one" in raised.value.__notes__[0]
    text = (tmp_path / "told").read_text()
    assert text.startswith("rank 0 of 2 was waiting at a barrier (barrier at train_workers.py:")
    assert "), and rank 1 ended with KeyError: 'the missing column'" in text


def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="rank 1 was killed by SIGKILL"):
        spawn(train_workers.kill_rank_one, 2, [str(tmp_path)])
    text = (tmp_path / "told").read_text()
    assert text.startswith("rank 0 of 2 was averaging gradients (backward at train_workers.py:")
    assert "), and no sign of life came from rank 1 (" in text
    assert "start again from the last checkpoint" in text


def test_a_rank_that_hangs_is_named_after_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoploom.ranks.spawn.TIMEOUTS", EndTimeouts(after_failure=1, after_terminate=0.5))
    with pytest.raises(PeerError, match=r"no sign of life came from rank 1 .*a timeout above 8 seconds"):
        spawn(train_workers.stop_rank_one, 2, [str(tmp_path)], device="cpu", timeout=8)


def test_a_rank_that_takes_fewer_steps_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="and rank 1 has finished, after fewer steps or calls than this rank"):
        spawn(train_workers.leave_early, 2, [str(tmp_path)])


def test_a_rank_that_exits_gives_its_code() -> None:
    with pytest.raises(TrainError, match="rank 0 ended with exit code 3"):
        spawn(train_workers.exit_with, 1, [3])


def test_an_error_keeps_its_type_where_a_message_makes_it() -> None:
    for kind in (ValueError, StoreError, ConfigError, FileNotFoundError, MemoryError):
        error = _rebuild(2, told_of(kind, "no"))
        assert type(error) is kind
        assert str(error) == "rank 2: no"
        assert error.__notes__ == ["On rank 2:\nTraceback ..."]
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
        ((train_workers.exit_with, 0), "nprocs is 0"),
        ((train_workers.exit_with, 2.5), "nprocs is 2.5"),
        ((train_workers.exit_with, 1, [threading.Lock()]), "cannot be sent to another process: .*open and make"),
    ]:
        with pytest.raises(ConfigError, match=message):
            spawn(*arguments)
    for name, text in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match="spawn was called in rank 1 of 2, as RANK and WORLD_SIZE say; call "):
        spawn(train_workers.exit_with, 2, [3])


SCRIPT = """
import gc, sys
gc.disable()
import hoploom
from support import train_workers
gc.freeze()
gc.enable()

def train(context, folder):
    train_workers.wait_to_be_ended(context, folder)

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
