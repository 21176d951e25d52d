"""Run one program and leave none of its processes behind. The launcher sends this file to a host and runs it there.

The first line on stdin is the job. Each later line names a signal for the program; an empty line is a heartbeat. If
stdin ends, or no line comes for too long, the launcher counts as gone: the program is stopped with all its descendants,
also those in other sessions. Only Linux can list descendants; other systems stop the process group.
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

MARK = "\x1ehoploom keeps "  # the first line on stdout, with the process id
LOGS = "{logs}"  # in a command: stands for a folder that exists while the program runs
IS_LINUX = sys.platform == "linux"
DIE_WITH_PARENT, ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of prctl
STOPPING = 5.0  # seconds between SIGTERM and SIGKILL once the launcher is gone
LEFT_BEHIND = 2.0  # seconds between SIGTERM and SIGKILL for descendants that outlive the program
GIVE_UP = 10.0  # seconds after SIGKILL: a process that still runs then hangs in the kernel
MISTAKE = 2  # exit code if the program cannot be started


class ProcessGuard:
    """Runs one program, sends it the signals named on stdin, and ends the descendants that it leaves behind."""

    def __init__(self, words: list[str], folder: str, silence: float | None) -> None:
        self.silence = silence  # seconds without a line, after which the launcher counts as gone; None: no limit
        self.code: int | None = None
        self.kill_at: float | None = None
        self.heard_at = time.monotonic()
        self.wake = self._wake_on_signals()
        self.line = b""
        end_with_parent = (lambda: ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGTERM)) if IS_LINUX else None
        self.child = subprocess.Popen(
            words,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,  # torchrun then ends its own children
        )

    def _wake_on_signals(self) -> int:
        """Install signal handlers. Return a file descriptor that becomes readable at each signal, for `select`."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        os.set_blocking(reader, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGINT):  # a terminal sends SIGINT to the launcher, which passes it on
            signal.signal(number, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: self.stop())
        return reader

    def run(self) -> int:
        """Wait for the program, then end its descendants. Return its exit code, or 128 + N if signal N ended it."""
        sources = [0, self.wake]
        while self.code is None:
            pause = 0.2 if self.kill_at is not None else min(5.0, self.silence or 5.0)
            ready, _, _ = select.select(sources, [], [], pause)
            if self.wake in ready:
                os.read(self.wake, 4096)
            if 0 in ready and not self._listen():
                sources.remove(0)
                self.stop()
            now = time.monotonic()
            if self.silence is not None and now - self.heard_at > self.silence:
                self.stop()
            if self.kill_at is not None and now >= self.kill_at:
                kill_all(signal.SIGKILL, self.child.pid)
            self._reap()
        number, begin = int(signal.SIGTERM), time.monotonic()
        while kill_all(number, self.child.pid):  # what the program has left running
            passed = time.monotonic() - begin
            if passed > GIVE_UP:
                print("hoploom: some of its processes do not end: see `ps`", file=sys.stderr, flush=True)
                break
            number = signal.SIGKILL if passed > LEFT_BEHIND or self.kill_at == 0.0 else 0
            select.select([], [], [], 0.02)
            self._reap()
        return 128 - self.code if self.code < 0 else self.code

    def stop(self) -> None:
        """Send SIGTERM to the program now; `run` sends SIGKILL after STOPPING seconds."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + STOPPING
            self._send(signal.SIGTERM)

    def _listen(self) -> bool:
        """Read lines from stdin and send the signals that they name to the program; return False if stdin has ended."""
        try:
            received = os.read(0, 4096)
        except OSError:
            return False
        self.heard_at = time.monotonic()
        *lines, self.line = (self.line + received).split(b"\n")
        for line in lines:
            if line == b"KILL":
                self.kill_at = 0.0
            elif line:
                self._send(getattr(signal, "SIG" + line.decode()))
        return bool(received)

    def _send(self, number: int) -> None:
        """Send a signal to the program and its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child.pid, number)

    def _reap(self) -> None:
        """Reap every child that has ended, also orphans of the program, which become children of this process."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.child.pid:
                    self.code = os.waitstatus_to_exitcode(status)
                    self.child.returncode = self.code


def kill_all(number: int, group: int) -> int:
    """Send a signal to all descendants; return how many there are. Signal 0 only counts.

    Outside Linux, the process group `group` gets it and counts as one.
    """
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
    """Return the process ids of all descendants of `ancestor`, including those that have ended but are not reaped."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found = [ancestor]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def guard(job: dict[str, Any]) -> int:
    """Run a job's command and return its exit code.

    The job carries its environment variables, because `ps` would show them on a command line.
    """
    words, folder = job["words"], job["folder"]
    if IS_LINUX:
        ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1)
    for name, value in job["environment"].items():
        os.putenv(name, value)
    if not os.path.isdir(folder):
        return _mistake(f"folder is {folder}, which is no directory on this host; make it first, or give another")
    logs = tempfile.mkdtemp(prefix="hoploom-") if LOGS in words else None
    try:
        return ProcessGuard([logs if word == LOGS and logs else word for word in words], folder, job["silence"]).run()
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


if __name__ == "__main__":
    with open(0, "rb", 0, closefd=False) as stdin:  # unbuffered: later lines are left for select
        line = stdin.readline()
    if line:  # else the launcher is gone already
        print(f"{MARK}{os.getpid()}", flush=True)
        exit_code = guard(json.loads(line))
        sys.stdout.flush()
        os._exit(exit_code)
