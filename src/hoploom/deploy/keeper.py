"""A small program that runs one other and leaves nothing of it behind. It is sent to its host, and needs no hoploom.

One line on stdin says what to run; the lines after it name signals to pass on; an empty one is a sign of life. When
stdin ends, or nothing comes for too long, whoever started it is gone: what it runs is stopped, with all descendants,
also those in sessions of their own. Only Linux has what finds these; elsewhere the process group must do.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

MARK = "\x1ehoploom keeps "  # the first line on stdout, with the process' id
LOGS = "{logs}"  # in words: a folder that the keeper makes, and removes at the end
IS_LINUX = sys.platform == "linux"
DIE_WITH_PARENT, ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of prctl
STOPPING = 5.0  # seconds between SIGTERM and SIGKILL once whoever started it is gone
LEFT_BEHIND = 2.0  # the same for what outlives the program that started it
GIVE_UP = 10.0  # seconds after SIGKILL: what is still there then hangs in the kernel
MISTAKE = 2  # exit code


class Keeper:
    """One program from its start to the end of the last of its descendants."""

    def __init__(self, words: list[str], folder: str, silence: float | None) -> None:
        self.silence = silence  # seconds without a line; None: only the end of stdin counts
        self.code: int | None = None
        self.kill_at: float | None = None
        self.heard = time.monotonic()
        self.wake = self._wake_on_signals()
        self.line = b""
        self.child = subprocess.Popen(
            words, cwd=folder, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent
        )

    def _wake_on_signals(self) -> int:
        """A pipe that is readable after a signal, for a wait that misses none."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        os.set_blocking(reader, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, lambda number, frame: None)  # who sends it to us sends it to whom it is for, too
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: self.stop())
        return reader

    def run(self) -> int:
        """Until the program has ended; its exit code, 128 and the signal's number if one killed it."""
        sources = [0, self.wake]
        while self.code is None:
            ready, _, _ = select.select(sources, [], [], self._patience())
            if self.wake in ready:
                os.read(self.wake, 4096)
            if 0 in ready and not self._listen():
                sources.remove(0)
                self.stop()
            now = time.monotonic()
            if self.silence is not None and now - self.heard > self.silence:
                self.stop()
            if self.kill_at is not None and now >= self.kill_at:
                kill_all(signal.SIGKILL, self.child.pid)
            self._reap()
        self._clear_up()
        return 128 - self.code if self.code < 0 else self.code

    def stop(self) -> None:
        """SIGTERM now, SIGKILL soon."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + STOPPING
            self._send(signal.SIGTERM)

    def _patience(self) -> float:
        return 0.2 if self.kill_at is not None else min(5.0, self.silence or 5.0)

    def _listen(self) -> bool:
        """Take in what stdin has; False at its end."""
        try:
            received = os.read(0, 4096)
        except OSError:
            return False
        self.heard = time.monotonic()
        *lines, self.line = (self.line + received).split(b"\n")
        for line in lines:
            if line == b"KILL":
                self.kill_at = 0.0
            elif line:
                self._send(getattr(signal, "SIG" + line.decode()))
        return bool(received)

    def _send(self, number: int) -> None:
        """To the program and its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child.pid, number)

    def _reap(self) -> None:
        """Also orphans, which are ours now."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.child.pid:
                    self.code = os.waitstatus_to_exitcode(status)
                    self.child.returncode = self.code

    def _clear_up(self) -> None:
        """End what the program has left running."""
        number, begin = int(signal.SIGTERM), time.monotonic()
        while kill_all(number, self.child.pid):
            passed = time.monotonic() - begin
            if passed > GIVE_UP:
                return print("hoploom: some of its processes do not end: see `ps`", file=sys.stderr, flush=True)
            number = signal.SIGKILL if passed > LEFT_BEHIND or self.kill_at == 0.0 else 0
            select.select([], [], [], 0.02)
            self._reap()


def kill_all(number: int, group: int) -> int:
    """Signal all descendants of this process (0: none); how many there are."""
    if not IS_LINUX:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            return 1
        return 0
    found = descendants(os.getpid())
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    return len(found)


def descendants(ancestor: int) -> list[int]:
    """Children, their children, and so on; those that have only to be reaped by their parents too."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found, waiting = [], [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _die_with_parent() -> None:
    """In the child: SIGTERM when this keeper dies, which lets torchrun end its own children."""
    if IS_LINUX:
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGTERM)


def keep(job: dict[str, Any]) -> int:
    """Run what the job says; variables go by the environment, where `ps` shows them to nobody else."""
    words, folder = job["words"], job["folder"]
    if IS_LINUX:
        ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1)
    for name, value in job["environment"].items():
        os.putenv(name, value)
    if not os.path.isdir(folder):
        return _mistake(f"folder is {folder}, which is no directory on this host; make it first, or give another")
    logs = tempfile.mkdtemp(prefix="hoploom-") if LOGS in words else None
    try:
        return Keeper([logs if word == LOGS and logs else word for word in words], folder, job["silence"]).run()
    except OSError as error:
        return _mistake(
            f"{words[0]} cannot be run on this host: {error.strerror}; give the path of a Python with hoploom"
        )
    finally:
        if logs is not None:
            shutil.rmtree(logs, ignore_errors=True)


def _mistake(message: str) -> int:
    print(f"hoploom: {message}", file=sys.stderr, flush=True)
    return MISTAKE


def main() -> None:
    """Read the job, say that we are there, and keep it."""
    with open(0, "rb", 0, closefd=False) as stdin:  # unbuffered: what follows is left for select
        line = stdin.readline()
    if not line:  # whoever started it is gone already
        return
    job = json.loads(line)
    print(f"{MARK}{os.getpid()}", flush=True)
    code = keep(job)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
