"""Start ranks on this host without torchrun, each in a new child process that is not forked.

The first error of any rank ends all ranks and is raised in this process. No rank outlives this process, however it
ends. multiprocessing sends the arguments to the children; only text comes back.
"""

import builtins
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from hoploom import errors
from hoploom.config.values import as_int
from hoploom.errors import ConfigError, PeerError, TrainError
from hoploom.ranks import environment
from hoploom.ranks.context import DEADLINE, init, read_timeout
from hoploom.ranks.environment import RankInfo
from hoploom.ranks.rendezvous import hold_local_store
from hoploom.system import EndTimeouts, die_with, keep_imports, killed_by, terminated_as_interrupted

LONGEST_TRACEBACK = 20_000  # characters
REAP_TIMEOUT = 3.0  # seconds for the kernel to end a killed process
TIMEOUTS = EndTimeouts()


def spawn(
    fn: Callable[..., object],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: float | None = None,
) -> None:
    """Call `fn(context, *args)` in `nprocs` processes of this host, and wait until all have returned.

    >>> if __name__ == "__main__":
    ...     hoploom.spawn(train, 2, args=["papers-store"])

    Every rank gets its own context, made with `device`, `backend` and `timeout` as for `hoploom.init`. `fn` is a
    function of a module or script; put the call under `if __name__ == "__main__":`. For several hosts, start the script
    with torchrun or `hoploom launch`.
    """
    num_ranks = as_int("nprocs", nprocs, 1, "give the number of processes to start")
    _check_callable(fn)
    _check_alone()
    seconds = read_timeout(DEADLINE if timeout is None else timeout)
    work = fn, tuple(args), {"device": device, "backend": backend, "timeout": seconds}
    held = hold_local_store(0, timedelta(seconds=DEADLINE))  # until all ranks have ended
    ranks = _Ranks()
    with terminated_as_interrupted():
        try:
            for rank in range(num_ranks):
                ranks.start(RankInfo(rank, rank, num_ranks, num_ranks, port=held.port, hosted=True), *work)
            try:
                ranks.wait(None, until_failure=True)
            except KeyboardInterrupt:
                ranks.send(signal.SIGINT)
                ranks.wait(TIMEOUTS.after_interrupt)
                raise
            if ranks.failures:
                ranks.wait(TIMEOUTS.after_failure)
                failures = [*ranks.failures.values()]
                raise next((error for error in failures if not isinstance(error, PeerError)), failures[0])
        finally:
            try:
                ranks.send(signal.SIGTERM)
                ranks.wait(TIMEOUTS.after_terminate)
            finally:
                ranks.kill()


class _Ranks:
    """The child processes of all ranks. Each one has a pipe that carries its error, and closes when it ends."""

    def __init__(self) -> None:
        self.failures: dict[int, Exception] = {}  # by rank, in the order of their arrival
        self._running: dict[Any, tuple[int, SpawnProcess]] = {}  # rank and process, by the pipe

    def start(self, place: RankInfo, *work: Any) -> None:
        """Start the process of the rank `place`. `work` is (fn, the arguments of fn, the arguments of `init`)."""
        pipe, errors = multiprocessing.Pipe(duplex=False)
        process = SpawnProcess(target=_run_rank, args=(place, os.getpid(), errors, *work))
        resource_tracker.ensure_running()  # now, because it unblocks SIGINT when it starts
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # in the child, until it handles Ctrl-C
        try:
            process.start()
            self._running[pipe] = place.rank, process
        except Exception as error:
            pipe.close()
            raise ConfigError(
                f"fn or args cannot be sent to another process: {error}; give paths and numbers, and open and make "
                "everything else inside fn"
            ) from error
        finally:
            errors.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(self, seconds: float | None, *, until_failure: bool = False) -> None:
        """Wait until all ranks have ended or, if `until_failure`, one has failed; at most `seconds`, if given."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._running and not (until_failure and self.failures):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready: list[Any] = connection.wait(self._running, left)
            if not ready:
                return
            for pipe in ready:
                rank, process = self._running[pipe]
                try:
                    self.failures[rank] = _rebuild(rank, json.loads(pipe.recv_bytes()))
                    continue
                except (EOFError, OSError):
                    process.join(REAP_TIMEOUT)
                code = process.exitcode or 0
                if code:  # a failure, too, unless the rank has reported an error
                    ended = killed_by(-code) if code < 0 else f"ended with exit code {code}; its own output says why"
                    self.failures.setdefault(rank, TrainError(f"rank {rank} {ended}"))
                del self._running[pipe]
                pipe.close()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all ranks. A rank that is still importing cannot handle SIGINT: it gets SIGTERM."""
        for _, process in self._running.values():
            pid = process.pid or 0
            with suppress(ProcessLookupError):
                imports = number == signal.SIGINT and os.getpgid(pid) == os.getpgrp()
                os.kill(pid, signal.SIGTERM if imports else number)

    def kill(self) -> None:
        """Kill the ranks that still run."""
        for _, process in self._running.values():  # all, before a wait that Ctrl-C may interrupt
            process.kill()
        for pipe, (_, process) in self._running.items():
            process.join(REAP_TIMEOUT)
            pipe.close()


def _run_rank(place: RankInfo, parent: int, report: Connection, *work: Any) -> None:
    """Run fn in a child process. This process leaves the terminal's process group, so only its parent gets Ctrl-C."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with SIGINT ignored
    die_with(parent)
    environment.enter(place)
    keep_imports()
    fn, args, options = work
    try:
        with ExitStack() as stack:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # one may have arrived during the imports
                fn(stack.enter_context(init(**options)), *args)
            except (Exception, KeyboardInterrupt) as error:  # sent before the other ranks can notice it
                text = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
                kind = type(error)
                failure = {"module": kind.__module__, "type": kind.__qualname__, "message": str(error), "text": text}
                with suppress(OSError):  # the parent is gone, and this process ends, too
                    report.send_bytes(json.dumps(failure).encode())
                raise
    except (Exception, KeyboardInterrupt) as error:
        raise SystemExit(1) from error  # it is reported, and the parent raises it


def _rebuild(rank: int, failure: dict[str, str]) -> Exception:
    """Return a rank's error as an exception: of its own type if Hoploom or Python defines it, else a TrainError."""
    message, name = failure["message"], failure["type"]
    if name == "KeyboardInterrupt":
        return TrainError(f"rank {rank} was interrupted by SIGINT")
    homes = {errors.__name__: errors, builtins.__name__: builtins}
    made: Exception = TrainError(f"rank {rank} ended with {name}: {message}")
    kind = getattr(homes.get(failure["module"]), name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):
            made = kind(message if message.startswith(f"rank {rank} ") else f"rank {rank}: {message}")
    made.add_note(f"On rank {rank}:\n{failure['text']}")
    return made


def _check_callable(fn: object) -> None:
    if not callable(fn):
        raise ConfigError(f"fn is {fn!r:.80}; give a function that takes a context, and args")
    name, module = getattr(fn, "__qualname__", None), sys.modules.get(getattr(fn, "__module__", None) or "")
    if name is not None and ("<" in name or not hasattr(module, name.split(".")[0]) or not hasattr(module, "__file__")):
        raise ConfigError(
            f"fn is {name}, which other processes cannot import; define it at the top of a module, in a file"
        )


def _check_alone() -> None:
    """Raise ConfigError if this process is itself a rank, or a child process that is importing the script."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError("spawn was called while a rank imported the script; call it under if __name__ == '__main__':")
    place = environment.read_rank()
    if place.world_size > 1:
        names = "SLURM_PROCID and SLURM_NTASKS" if place.source == "slurm" else "RANK and WORLD_SIZE"
        raise ConfigError(
            f"spawn was called in rank {place.rank} of {place.world_size}, as {names} say; call fn(hoploom.init()) "
            "there, or start the script with plain python: spawn starts ranks on one host only"
        )
