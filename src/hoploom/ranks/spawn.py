"""Start ranks of scripts that torchrun does not start, on one host or several: one child process each, never forked.

The first error of any rank ends all and is raised here. Nothing outlives this process, however it ends. What is given
to the ranks travels as multiprocessing sends it, from this process to its own children; nothing comes back but text.
"""

import builtins
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
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
from hoploom.ranks.environment import LOOPBACK, RankInfo
from hoploom.ranks.rendezvous import hold_meeting_point, meet
from hoploom.ranks.stopping import die_with, terminated_as_interrupted
from hoploom.system import keep_imports

LONGEST_TRACEBACK = 20_000  # characters

Options = dict[str, Any]
Work = tuple[Callable[..., object], tuple[Any, ...], Options]


@dataclass(frozen=True)
class Grace:
    """How many seconds ranks get to end by themselves."""

    after_failure: float = 5.0  # of another rank
    after_interrupt: float = 30.0  # to write a checkpoint, say; a second Ctrl-C ends them
    after_terminate: float = 3.0  # between SIGTERM and SIGKILL


def spawn(
    fn: Callable[..., object],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    num_nodes: int = 1,
    node_rank: int | None = None,
    address: str | None = None,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: float | None = None,
) -> None:
    """Call `fn(context, *args)` in `nprocs` processes of this host, and wait until all have returned.

    >>> if __name__ == "__main__":
    ...     hoploom.spawn(train, 2, args=["papers-store"])

    Every rank gets its own context, made with `device`, `backend` and `timeout` as for `hoploom.init`. `fn` is a
    function of a module or script; put the call under `if __name__ == "__main__":`. On several hosts, every host calls
    it with the same `num_nodes` and `address` (HOST:PORT of the first host), and its own `node_rank` from 0 on.
    """
    num_ranks = as_int("nprocs", nprocs, 1, "give the number of processes to start")
    _check_callable(fn)
    node = _node(num_nodes, node_rank, address)
    _check_alone(node)
    options: Options = {
        "device": device,
        "backend": backend,
        "timeout": read_timeout(DEADLINE if timeout is None else timeout),
    }
    work = fn, tuple(args), options
    with terminated_as_interrupted():
        if node.world_size == 1:
            start(num_ranks, work, Grace())
        else:
            _start_among_nodes(num_ranks, work, node)


def start(num_ranks: int, work: Work, grace: Grace) -> None:
    """Start the ranks of one host and wait for them."""
    store = hold_meeting_point(0, timedelta(seconds=DEADLINE))
    _run(RankInfo(0, 0, num_ranks, num_ranks, port=store.port, hosted=True), work, grace)


def _node(num_nodes: int, node_rank: int | None, address: str | None) -> RankInfo:
    """This host among the hosts, as if it were a rank."""
    size = as_int("num_nodes", num_nodes, 1, "give the number of hosts that call spawn")
    if size == 1 and node_rank is None:
        return RankInfo()
    rank = as_int("node_rank", node_rank, 0, f"give this host's number, from 0 to {size - 1}")
    if rank >= size:
        raise ConfigError(f"node_rank is {rank}, but num_nodes is {size}, and hosts count from 0")
    host, port = (LOOPBACK, 0) if size == 1 else environment.meeting_address(address)
    return RankInfo(rank, 0, size, 1, "arguments", address=host, port=port)


def _start_among_nodes(num_ranks: int, work: Work, node: RankInfo) -> None:
    """Meet the other hosts, start this one's ranks; the first host keeps the meeting point a little longer."""
    seconds = work[2]["timeout"]
    notes = meet(node, seconds, kind="node", saying=str(num_ranks))
    try:
        counts = notes.said()
        if len(set(counts)) > 1:
            raise ConfigError(f"the nodes start {', '.join(counts)} processes; give all of them the same nprocs")
        size, first = num_ranks * node.world_size, num_ranks * node.rank
        _run(RankInfo(first, 0, size, num_ranks, address=node.address, port=node.port, hosted=True), work, Grace())
    except BaseException as error:
        notes.leave(f"ended with {type(error).__name__}: {error}"[:300])
        notes.outlast()
        raise
    notes.leave("has finished")
    notes.outlast(Grace().after_failure)  # what ranks still talk about would have held up those of this host, too


def _run(first: RankInfo, work: Work, grace: Grace) -> None:
    """Start this host's ranks from the first one on, and wait for them."""
    with _Ranks(grace) as ranks:
        for number in range(first.local_world_size):
            ranks.start(replace(first, rank=first.rank + number, local_rank=number), work)
        ranks.wait()


@dataclass
class _Rank:
    rank: int
    process: SpawnProcess
    reports: Connection | None  # None: read to its end
    ended: bool = False
    failed: bool = False


@dataclass
class _Ranks:
    """The children. However this block is left, none is running afterwards."""

    grace: Grace
    ranks: list[_Rank] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)  # in the order in which they came in

    def start(self, place: RankInfo, work: Work) -> None:
        reports, report = multiprocessing.Pipe(duplex=False)
        spawning = multiprocessing.get_context("spawn")
        process = spawning.Process(
            target=_run_rank, args=(place, os.getpid(), report, *work), name=f"hoploom rank {place.rank}"
        )
        try:
            with _interrupts_wait():  # the child inherits that, until it can answer Ctrl-C without a traceback
                process.start()
        except Exception as error:
            reports.close()
            raise ConfigError(
                f"fn or args cannot be sent to another process: {error}; give paths and numbers, and open and make "
                "everything else inside fn"
            ) from error
        finally:
            report.close()
        self.ranks.append(_Rank(place.rank, process, reports))

    def wait(self) -> None:
        """Until all ranks have returned; raises the first failure, which is never one that another one caused."""
        try:
            self._watch(None)
        except KeyboardInterrupt:
            self._interrupt()
            raise
        if self.failures:
            self._watch(self.grace.after_failure)
            raise next((error for error in self.failures if not isinstance(error, PeerError)), self.failures[0])

    def __enter__(self) -> "_Ranks":
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            for rank in self._living():
                rank.process.terminate()
            self._watch(self.grace.after_terminate)
        finally:
            for rank in self.ranks:
                rank.process.kill()
                rank.process.join(self.grace.after_terminate)
                if rank.reports is not None:
                    rank.reports.close()

    def _living(self) -> list[_Rank]:
        return [rank for rank in self.ranks if not rank.ended]

    def _interrupt(self) -> None:
        """Pass Ctrl-C on, once, to children that have left the terminal's process group; the others still import."""
        for rank in self._living():
            with suppress(ProcessLookupError):
                pid = rank.process.pid or 0
                os.kill(pid, signal.SIGTERM if os.getpgid(pid) == os.getpgrp() else signal.SIGINT)
        self._watch(self.grace.after_interrupt)

    def _watch(self, seconds: float | None) -> None:
        """Take in reports and ends until all ranks have ended, or `seconds` are over (None: until one has failed)."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while living := self._living():
            if deadline is None and self.failures:
                return
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            reports = [rank.reports for rank in living if rank.reports is not None]
            ready = connection.wait([*reports, *(rank.process.sentinel for rank in living)], left)
            if not ready:
                return
            for rank in living:
                if rank.reports in ready:
                    self._read(rank)
            for rank in living:
                if rank.process.sentinel in ready:
                    self._settle(rank)

    def _read(self, rank: _Rank) -> None:
        if rank.reports is None:
            return
        try:
            self._fail(rank, _rebuild(rank.rank, json.loads(rank.reports.recv_bytes())))
        except (EOFError, OSError):
            rank.reports.close()
            rank.reports = None

    def _settle(self, rank: _Rank) -> None:
        rank.process.join(self.grace.after_terminate)
        rank.ended = True
        while rank.reports is not None and rank.reports.poll():
            self._read(rank)
        code = rank.process.exitcode or 0
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            hint = "; the kernel does that when memory runs out: see dmesg" if name == "SIGKILL" else ""
            self._fail(rank, TrainError(f"rank {rank.rank} was killed by {name}{hint}"))
        elif code > 0:
            self._fail(rank, TrainError(f"rank {rank.rank} ended with exit code {code}; its own output says why"))

    def _fail(self, rank: _Rank, failure: Exception) -> None:
        if not rank.failed:
            rank.failed = True
            self.failures.append(failure)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    resource_tracker.ensure_running()  # which unblocks SIGINT when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_rank(
    place: RankInfo,
    parent: int,
    report: Connection,
    fn: Callable[..., object],
    args: tuple[Any, ...],
    options: Options,
) -> None:
    """What a child does. It leaves the terminal's process group: the parent alone decides how to end on Ctrl-C."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would pass on ignoring it
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    except KeyboardInterrupt:  # it came during the imports
        raise SystemExit(130) from None
    die_with(parent)
    environment.enter(place)
    keep_imports()
    try:
        with ExitStack() as stack, _reported(place.rank, report):
            context = stack.enter_context(init(**options))
            fn(context, *args)
    except (Exception, KeyboardInterrupt) as error:
        raise SystemExit(1) from error  # it is reported, and the parent raises it


@contextmanager
def _reported(rank: int, report: Connection) -> Iterator[None]:
    """Tell the parent about an error before the other ranks can notice."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        text = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
        kind = type(error)
        failure = {"module": kind.__module__, "type": kind.__qualname__, "message": str(error), "text": text}
        with suppress(OSError):  # the parent is gone, and so will be this process
            report.send_bytes(json.dumps(failure).encode())
        raise


def _rebuild(rank: int, failure: dict[str, str]) -> Exception:
    """The error of a rank, of its own type where that is ours or a builtin that a message makes."""
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


def _check_alone(node: RankInfo) -> None:
    """Ranks start no ranks. One process on each host, of Slurm's or of pods, may: the hosts then count alike."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError("spawn was called while a rank imported the script; call it under if __name__ == '__main__':")
    place = environment.read()
    names = "SLURM_PROCID and SLURM_NTASKS" if place.source == "slurm" else "RANK and WORLD_SIZE"
    if place.world_size > 1 and (node.world_size == 1 or not place.may_be_a_host):
        raise ConfigError(
            f"spawn was called in rank {place.rank} of {place.world_size}, as {names} say; call fn(hoploom.init()) "
            "there, or start the script with plain python, or start one process per host and give num_nodes"
        )
    if place.world_size > 1 and (node.rank, node.world_size) != (place.rank, place.world_size):
        raise ConfigError(
            f"node_rank is {node.rank} and num_nodes is {node.world_size}, but {names} say {place.rank} of "
            f"{place.world_size}; give those, or unset the variables"
        )
