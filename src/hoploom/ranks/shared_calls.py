"""Calls that all ranks make together, such as sums: each begins with a label, and different labels are an error.

The calls use a Gloo group of their own, so they never pair with DDP's or with the user's. The label and up to 64 bytes
beside it travel in one all-gather of 256 bytes per rank: numbers and small tensors need no second one.
Gradients are averaged by DDP itself, bucket by bucket during the backward pass; only the wait at its end is here.
"""

import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from hoploom.errors import ConfigError
from hoploom.ranks.deadlock import SAME_CALLS, DeadlockDetector, calling

LABEL, LINE, CONTENT = 144, 48, 64  # bytes of a message: what must be equal, the script's line, a small value
CHANNEL = "calls"
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
DOING = {SUM: "summing over all ranks", MAX: "finding the maximum over all ranks"}
AVERAGING = "averaging gradients"

Guard = Callable[[str], AbstractContextManager[None]]


class _Label(NamedTuple):
    """The label of a call, the number of which is in front of it."""

    doing: str  # e.g. "summing over all ranks"
    value: str  # "a number", or the dtype and shape of a tensor
    function: str  # of Hoploom, that the script called
    line: str  # of the script

    def __str__(self) -> str:
        return f"{self.doing} ({self.function} at {self.line})"


class SharedCalls:
    """The shared calls of this rank. `guard` turns the ways in which a lost peer shows into a PeerError."""

    def __init__(self, group: dist.ProcessGroup, here: DeadlockDetector, guard: Guard) -> None:
        self._open: dist.ProcessGroup | None = group  # until this rank leaves
        self._here, self._guard = here, guard

    def leave(self, *, for_good: bool) -> None:
        """Make no more shared calls, and average no more gradients if `for_good`."""
        self._open = None  # the group would keep the rendezvous store alive
        if for_good:
            self._here.leave()

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._open is None:
            raise ConfigError("the context is closed, so ranks share no more calls; make them before its `with` ends")
        return self._open

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._agree(_label("waiting at a barrier"))

    def reduce_number(self, value: Any, operation: dist.ReduceOp.RedOpType) -> int | float:
        """Reduce integers exactly, others in float64 and in the order of ranks; to a float if one rank has a float."""
        text = repr(int(value) if isinstance(value, Integral) else float(value))
        if len(text) > CONTENT:
            raise ConfigError(f"the number {value} has more than {CONTENT} digits, and ranks cannot exchange it")
        texts = [each.decode().strip() for each in self._agree(_label(DOING[operation], "a number"), text.encode())]
        is_float = any(not each.lstrip("-").isdecimal() for each in texts)
        numbers = [float(each) if is_float else int(each) for each in texts]
        return sum(numbers) if operation == SUM else max(numbers)

    def reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce a tensor in the memory of this process, which may be overwritten."""
        label = _label(DOING[operation], tensor)
        rows = self._small(label, tensor)
        if rows is None:
            self._call(label, lambda: dist.all_reduce(tensor, operation, group=self._group, async_op=True))
            return tensor
        return torch.stack(rows).sum(dim=0) if operation == SUM else torch.stack(rows).amax(dim=0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in the order of ranks."""
        label = _label("gathering from all ranks", tensor)
        received = self._small(label, tensor)
        if received is not None:
            return received
        sent = _bytes_of(tensor)
        rows = [torch.empty_like(sent) for _ in range(self._group.size())]
        self._call(label, lambda: dist.all_gather(rows, sent, group=self._group, async_op=True))
        return [_tensor_of(row, tensor) for row in rows]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the tensor of rank 0."""
        label = _label("receiving from rank 0", tensor)
        received = self._small(label, tensor)
        if received is not None:
            return received[0]
        sent = _bytes_of(tensor).clone()
        self._call(label, lambda: dist.broadcast(sent, src=0, group=self._group, async_op=True))
        return _tensor_of(sent, tensor)

    def _small(self, label: _Label, tensor: Tensor) -> list[Tensor] | None:
        """Agree on the call; return the tensors of all ranks if they fit beside the label."""
        if tensor.nbytes > CONTENT:
            self._agree(label)
            return None
        contents = self._agree(label, bytes(_bytes_of(tensor).tolist()))
        return [_tensor_of(torch.tensor(list(each[: tensor.nbytes]), dtype=torch.uint8), tensor) for each in contents]

    def _agree(self, label: _Label, content: bytes = b"") -> list[bytes]:
        """Return the content of every rank. Raise ConfigError on all ranks if they do not make the same call."""
        number = self._here.begin(CHANNEL)
        text = "|".join((str(number), label.doing, label.value, label.function)).encode()[:LABEL].ljust(LABEL)
        line = label.line.encode()[-LINE:].ljust(LINE)
        sent = torch.frombuffer(bytearray(text + line + content.ljust(CONTENT)), dtype=torch.uint8)
        received = torch.empty(self._group.size(), len(sent), dtype=torch.uint8)
        rows = list(received.unbind())
        self._call(label, lambda: dist.all_gather(rows, sent, group=self._group, async_op=True))
        messages = [bytes(row) for row in received.numpy()]
        other = next((rank for rank, each in enumerate(messages) if each[:LABEL] != messages[0][:LABEL]), None)
        if other is not None:
            raise ConfigError(_difference(messages[0], messages[other], other))
        lines = [_text(each[LABEL:-CONTENT]) for each in messages]
        if label.doing in DOING.values() and len(set(lines)) > 1:  # in both branches of an if, or one call too many
            other = next(rank for rank, line in enumerate(lines) if line != lines[0])
            warnings.warn(
                f"rank 0 calls {label.function} at {lines[0]}, but rank {other} at {lines[other]}: if these are not "
                "the same value of different ranks, one rank makes more calls than the others; to avoid this warning, "
                "make the call on one line for all ranks",
                stacklevel=2,
            )
        return [each[-CONTENT:] for each in messages]

    def _call(self, label: _Label, begin: Callable[[], dist.Work]) -> None:
        with self._guard(str(label)):
            self._here.wait(CHANNEL, str(label), partial(_is_over, begin()))


class GradientAveraging:
    """DDP's communication hook for one model on Gloo: a rank that waits in backward() posts it, and learns who left."""

    def __init__(self, model: DistributedDataParallel, here: DeadlockDetector, guard: Guard) -> None:
        self._model = weakref.proxy(model)  # it holds this hook in a way that no garbage collection sees through
        self._here, self._guard = here, guard
        self._channel = f"gradients {here.begin('models')}"
        self._pending: list[dist.Work] = []
        self._is_first = True
        model.register_comm_hook(self, _hook)

    def begin(self, bucket: GradBucket) -> None:
        """Start to average these gradients; the first bucket of a backward pass asks for a wait at its end."""
        if bucket.index() == 0:
            self._pending = []
            self._here.begin(self._channel)
            Variable._execution_engine.queue_callback(self._finish)
        gradients = bucket.buffer().div_(self._here.size)
        self._pending.append(dist.all_reduce(gradients, group=self._model.process_group, async_op=True))

    def _finish(self) -> None:
        doing, began = "{} ({} at {})".format(AVERAGING, *calling("backward")), time.perf_counter()
        with self._guard(doing):
            for work in self._pending:
                self._here.wait(self._channel, doing, partial(_is_over, work))
        self._pending = []
        self._here.averaging_seconds += time.perf_counter() - began
        if self._is_first:  # DDP itself chooses its buckets anew in the next forward pass, and would wait there
            self._is_first = False
            Variable._execution_engine.queue_callback(self._rebuild_buckets)

    def _rebuild_buckets(self) -> None:
        with self._guard(AVERAGING):
            self._model.reducer._rebuild_buckets()


def _hook(averaging: GradientAveraging, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    averaging.begin(bucket)
    begun: torch.futures.Future[Tensor] = torch.futures.Future()
    begun.set_result(bucket.buffer())  # DDP looks at it after `_finish`
    return begun


def _is_over(work: dist.Work, seconds: float) -> bool:
    """Wait for the work, at most so long; return whether it is done. Raise its error if it failed."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it ended since, or this says why it failed
    return True


def _label(doing: str, value: Tensor | str = "") -> _Label:
    if isinstance(value, Tensor):
        value = f"a {value.dtype} tensor of shape {list(value.shape)}"
    return _Label(doing, value, *calling(doing))


def _difference(first: bytes, other: bytes, rank: int) -> str:
    """Return the error about the calls of rank 0 and another rank."""
    ours, theirs = (_text(message[:LABEL]).split("|") for message in (first, other))
    if [*ours[:2], *ours[3:]] == [*theirs[:2], *theirs[3:]]:
        return f"rank 0 was {ours[1]}: {ours[2]}, but rank {rank} has {theirs[2]}; give all ranks the same"
    one, another = (
        f"{doing}{value and ': '}{value} ({function} at {_text(message[LABEL:-CONTENT])}, call {number})"
        for (number, doing, value, function), message in ((ours, first), (theirs, other))
    )
    return f"rank 0 was {one}, but rank {rank} was {another}; {SAME_CALLS}"


def _text(padded: bytes) -> str:
    return padded.decode(errors="replace").strip()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _tensor_of(sent: Tensor, like: Tensor) -> Tensor:
    return sent.view(like.dtype).reshape(like.shape).to(like.device)
