"""What is known of a Slurm job. There is no Slurm: scripts answer in the place of its commands."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.launched import keepers
from support.until import until

from hoploom.deploy.slurm_job import Output, _cancelled_if_killed, follow


@pytest.mark.parametrize(
    ("accounted", "expected"),
    [("COMPLETED|0:0", ("COMPLETED", 0)), ("FAILED|3:0", ("FAILED", 3)), ("CANCELLED by 1000|0:15", ("CANCELLED", 0))],
)
def test_a_job_that_the_controller_has_forgotten_is_found_in_the_accounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accounted: str, expected: tuple[str, int]
) -> None:
    forgotten = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    for name, text in {"scontrol": forgotten, "sacct": f"echo '{accounted}'"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ended = follow("7", Output(), silence=0.1)
    assert (ended.state, ended.code) == expected


FOLLOWED = """
import time
from hoploom.deploy.slurm_job import submitted
with submitted("a script"):
    time.sleep(100)
"""


@pytest.mark.parametrize(("number", "cancels"), [(signal.SIGKILL, True), (signal.SIGHUP, False)])
def test_a_killed_launcher_cancels_its_job_and_a_closed_terminal_leaves_it(
    tmp_path: Path, number: signal.Signals, cancels: bool
) -> None:
    for name, text in {"sbatch": "echo 4711", "scancel": 'echo "$@" >cancelled'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(
        [sys.executable, "-c", FOLLOWED], cwd=tmp_path, env=environment, stderr=subprocess.PIPE
    ) as launcher:
        assert launcher.stderr is not None
        assert b"submitted job 4711" in launcher.stderr.readline()
        launcher.send_signal(number)
        launcher.wait(timeout=60)
    until(lambda: not keepers(tmp_path), "the end of all that the launcher started")
    assert launcher.returncode == -number
    assert (tmp_path / "cancelled").exists() == cancels
    assert not cancels or (tmp_path / "cancelled").read_text() == "4711\n"


def fail_without_watcher() -> None:
    with _cancelled_if_killed("4711"):
        *_, watcher = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        os.kill(int(watcher), signal.SIGKILL)
        until(lambda: Path(f"/proc/{watcher}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        raise KeyError("the real error")


def test_an_error_of_the_launcher_shows_though_its_watcher_was_killed() -> None:
    with pytest.raises(KeyError, match="the real error"):
        fail_without_watcher()
