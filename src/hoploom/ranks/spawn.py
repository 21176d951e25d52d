"""Start the ranks of scripts that torchrun does not start, on this host: one child process each, no fork.

The first error of any rank ends all ranks and is raised here. No rank outlives this process, however it ends. The
arguments go to the children as multiprocessing sends them; only text comes back.
"""

import builtins
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch

from hoploom import errors
from hoploom.config.values import as_int
from hoploom.errors import ConfigError, PeerError, TrainError
from hoploom.ranks import environment
from hoploom.ranks.context import DEADLINE, init, read_timeout
from hoploom.ranks.environment import RankInfo, terminated_as_interrupted
from hoploom.ranks.rendezvous import hold_local_store
from hoploom.ranks.supervise import EndTimeouts, ProcessEvent, SignalName, Supervisor, die_with, killed_by
from hoploom.system import keep_imports

LONGEST_TRACEBACK = 20_000  # characters
REAP_TIMEOUT = 3.0  # seconds for the kernel to end a killed process

TIMEOUTS = EndTimeouts()

Work = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]  # fn, its arguments, and those of init


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
    with terminated_as_interrupted():
        _run(
            [RankInfo(rank, rank, num_ranks, num_ranks, port=held.port, hosted=True) for rank in range(num_ranks)], work
        )


def _run(places: list[RankInfo], work: Work) -> None:
    """Run the ranks; raise the first failure that no other rank has caused."""
    failures: list[Exception] = []  # in the order in which they came

    def handle(event: ProcessEvent) -> None:
        rank = supervisor.children[event.label]
        if event.what == "ended":
            rank.reap()
        if rank.failure is not None and rank.failure not in failures:
            failures.append(rank.failure)

    supervisor: Supervisor[RankProcess] = Supervisor(handle)
    try:
        for place in places:
            supervisor.add(RankProcess(place, work, supervisor.events.put))
        try:
            supervisor.until(lambda: bool(failures) or not supervisor.living(), None)
        except KeyboardInterrupt:
            for rank in supervisor.living():
                rank.send("INT")
            supervisor.until(lambda: not supervisor.living(), TIMEOUTS.after_interrupt)
            raise
        if failures:
            supervisor.until(lambda: not supervisor.living(), TIMEOUTS.after_failure)
            raise next((error for error in failures if not isinstance(error, PeerError)), failures[0])
    finally:
        try:
            supervisor.stop("TERM", TIMEOUTS.after_terminate)
        finally:
            supervisor.close()


class RankProcess:
    """A rank in a child process. It reports an error before it ends."""

    def __init__(self, place: RankInfo, work: Work, report: Callable[[ProcessEvent], None]) -> None:
        self.rank, self.label, self.ended = place.rank, f"rank {place.rank}", False
        self.failure: Exception | None = None
        self._report = report
        self._errors, errors = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.get_context("spawn").Process(
            target=_run_rank, args=(place, os.getpid(), errors, work), name=f"hoploom {self.label}"
        )
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        try:
            with _sigint_blocked():  # inherited: in the child, until it can answer Ctrl-C without a traceback
                self._process.start()
                self._watcher.start()
        except Exception as error:
            self._errors.close()
            raise ConfigError(
                f"fn or args cannot be sent to another process: {error}; give paths and numbers, and open and make "
                "everything else inside fn"
            ) from error
        finally:
            errors.close()

    def send(self, name: SignalName | Literal["HEARTBEAT"]) -> None:
        """Send a signal. A rank in the terminal's process group still imports: Ctrl-C has reached it, so end it."""
        if name == "HEARTBEAT" or not self._process.is_alive():
            return
        with suppress(ProcessLookupError):
            pid = self._process.pid or 0
            imports = name == "INT" and os.getpgid(pid) == os.getpgrp()
            os.kill(pid, signal.SIGTERM if imports else getattr(signal, f"SIG{name}"))

    def reap(self) -> None:
        """Read the exit code of the ended process: it is a failure unless an error was reported."""
        self._process.join(REAP_TIMEOUT)
        code = self._process.exitcode or 0
        if code and self.failure is None:
            ended = killed_by(-code) if code < 0 else f"ended with exit code {code}; its own output says why"
            self.failure = TrainError(f"{self.label} {ended}")

    def close(self) -> None:
        """Kill the process, if it is running."""
        self._process.kill()
        self._process.join(REAP_TIMEOUT)
        self._watcher.join(REAP_TIMEOUT)
        self._errors.close()

    def _watch(self) -> None:
        """Report errors and the end. Only the main thread calls the process: two waits for its exit code would race."""
        sources: list[Any] = [self._errors, self._process.sentinel]
        while True:
            if self._errors not in connection.wait(sources):
                return self._report(ProcessEvent("ended", self.label))
            try:
                self.failure = _rebuild(self.rank, json.loads(self._errors.recv_bytes()))
                self._report(ProcessEvent("failed", self.label))
            except (EOFError, OSError):
                sources.remove(self._errors)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    resource_tracker.ensure_running()  # which unblocks SIGINT when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_rank(place: RankInfo, parent: int, report: Connection, work: Work) -> None:
    """Run fn in the child, outside the terminal's process group: the parent alone decides how to end on Ctrl-C."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would pass on ignoring it
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    except KeyboardInterrupt:  # it came during the imports
        raise SystemExit(130) from None
    die_with(parent)
    environment.enter(place)
    keep_imports()
    fn, args, options = work
    try:
        with ExitStack() as stack:
            try:
                fn(stack.enter_context(init(**options)), *args)
            except (Exception, KeyboardInterrupt) as error:  # sent before the other ranks can notice it
                text = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
                kind = type(error)
                failure = {"module": kind.__module__, "type": kind.__qualname__, "message": str(error), "text": text}
                with suppress(OSError):  # the parent is gone, and so will be this process
                    report.send_bytes(json.dumps(failure).encode())
                raise
    except (Exception, KeyboardInterrupt) as error:
        raise SystemExit(1) from error  # it is reported, and the parent raises it


def _rebuild(rank: int, failure: dict[str, str]) -> Exception:
    """Return the error of a rank. It has its own type if that is ours, or a builtin that takes one message."""
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
    if name is None:
        return
    if "<" in name or getattr(module, name.split(".")[0], None) is None:
        raise ConfigError(f"fn is {name}, which other processes cannot import; define it at the top of a module")
    if module is not None and module.__name__ == "__main__" and getattr(module, "__file__", None) is None:
        raise ConfigError(f"fn {name} was typed into Python, so other processes cannot import it; put it into a file")


def _check_alone() -> None:
    """Raise ConfigError in a rank."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError("spawn was called while a rank imported the script; call it under if __name__ == '__main__':")
    place = environment.read_rank()
    if place.world_size > 1:
        names = "SLURM_PROCID and SLURM_NTASKS" if place.source == "slurm" else "RANK and WORLD_SIZE"
        raise ConfigError(
            f"spawn was called in rank {place.rank} of {place.world_size}, as {names} say; call fn(hoploom.init()) "
            "there, or start the script with plain python: spawn starts ranks on one host only"
        )
