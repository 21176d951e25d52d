"""A launch in a process of its own, as the tests of launching see it: what it prints, how it ends, what it leaves."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from support.launch_workers import launch
from support.process_tree import processes_in, runs
from support.until import until

WORKERS = Path(__file__).with_name("launch_workers.py")
LIMIT = 60.0  # seconds that any of these launches may take

Programs = Mapping[str, Sequence[str]]


@contextmanager
def launching(folder: Path, programs: Programs, *, ignored: str = "", **more: Any) -> Iterator["subprocess.Popen[str]"]:
    """Started in this folder, by a shell that ignores a signal; afterwards it is gone, whatever the test found."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"ssh": None, "environment": {}, "programs": programs} | more))
    ignore = f"trap '' {ignored}; " if ignored else ""
    started = subprocess.Popen(
        ["sh", "-c", f"{ignore}exec {shlex.join([sys.executable, str(WORKERS), str(plan)])}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate(timeout=LIMIT)


def launched(folder: Path, programs: Programs, **more: Any) -> tuple[int, str, str]:
    """From start to end, in this process: exit code, stdout, stderr."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = launch({"ssh": None, "environment": {}, "programs": programs} | more, folder)
    return code, out.getvalue(), err.getvalue()


def hoploom_launch(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """The command, in this folder."""
    given = [sys.executable, "-m", "hoploom", "launch", *words]
    return subprocess.run(given, cwd=folder, capture_output=True, text=True, timeout=110, check=False)


def await_programs(folder: Path, *names: str) -> list[int]:
    files = [folder / f"{name}.pid" for name in names]
    until(lambda: all(file.exists() for file in files), f"the start of {names}")
    return [int(file.read_text()) for file in files]


def assert_nothing_is_left(folder: Path, seconds: float = 20.0) -> None:
    """None of the programs that ran in this folder runs any more, nor does a guard of theirs."""
    pids = [int(file.read_text()) for file in folder.glob("*.pid")]
    assert pids
    until(lambda: not any(map(runs, pids)) and not processes_in(folder), "the end of all programs", seconds)


def interrupt(started: "subprocess.Popen[str]", number: int = signal.SIGINT) -> None:
    os.kill(started.pid, number)
