"""Calls that all ranks make together, such as sums: each begins with a label, and different labels are an error.

The calls use a Gloo group of their own, so they never pair with DDP's or with the user's. The label and up to 64 bytes
beside it travel in one all-gather of 256 bytes per rank: numbers and small tensors need no second one.
Gradients are averaged by DDP itself, bucket by bucket during the backward pass; only the wait at its end is here.
"""

import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from hoploom.errors import ConfigError
from hoploom.ranks.agreement import SAME_CALLS, DeadlockDetector, calling

LABEL, LINE, CONTENT = 144, 48, 64  # bytes of a message: what must be equal, the script's line, a small value
CHANNEL = "calls"
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
DOING = {SUM: "summing over all ranks", MAX: "finding the maximum over all ranks"}
AVERAGING = "averaging gradients"

Guard = Callable[[str], AbstractContextManager[None]]


class SharedCalls:
    """The shared calls of this rank. `guard` turns the ways in which a lost peer shows into a PeerError."""

    def __init__(self, group: dist.ProcessGroup, here: DeadlockDetector, guard: Guard) -> None:
        self._group: dist.ProcessGroup | None = group  # until this rank leaves
        self._here, self._guard = here, guard

    def leave(self, *, for_good: bool) -> None:
        """Make no more shared calls, and average no more gradients if `for_good`."""
        self._group = None  # it would keep the rendezvous store alive
        if for_good:
            self._here.leave()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._agree("waiting at a barrier")

    def reduce_number(self, value: Any, operation: dist.ReduceOp.RedOpType) -> int | float:
        """Reduce integers exactly, others in float64 and in the order of ranks; to a float if one rank has a float."""
        text = repr(int(value) if isinstance(value, Integral) else float(value))
        if len(text) > CONTENT:
            raise ConfigError(f"the number {value} has more than {CONTENT} digits, and ranks cannot exchange it")
        texts = [_text(each) for each in self._agree(DOING[operation], "a number", text.encode())[1]]
        is_float = any(not each.lstrip("-").isdecimal() for each in texts)
        numbers = [float(each) if is_float else int(each) for each in texts]
        return sum(numbers) if operation == SUM else max(numbers)

    def reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce a tensor in the memory of this process, which may be overwritten."""
        says, rows = self._small(DOING[operation], tensor)
        if rows is None:
            self._call(says, lambda: dist.all_reduce(tensor, operation, group=self._group, async_op=True))
            return tensor
        return torch.stack(rows).sum(dim=0) if operation == SUM else torch.stack(rows).amax(dim=0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in the order of ranks."""
        says, rows = self._small("gathering from all ranks", tensor)
        if rows is None:
            sent = _bytes_of(tensor)
            received = [torch.empty_like(sent) for _ in range(self._here.size)]
            self._call(says, lambda: dist.all_gather(received, sent, group=self._group, async_op=True))
            rows = [_tensor_of(row, tensor) for row in received]
        return rows

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the tensor of rank 0."""
        says, rows = self._small("receiving from rank 0", tensor)
        if rows is None:
            sent = _bytes_of(tensor).clone()
            self._call(says, lambda: dist.broadcast(sent, src=0, group=self._group, async_op=True))
            rows = [_tensor_of(sent, tensor)]
        return rows[0]

    def _small(self, doing: str, tensor: Tensor) -> tuple[str, list[Tensor] | None]:
        """Agree on a call and return it in words, with the tensors of all ranks if they fit beside the label."""
        is_small = tensor.nbytes <= CONTENT
        sent = bytes(_bytes_of(tensor).tolist()) if is_small else b""
        says, received = self._agree(doing, f"a {tensor.dtype} tensor of shape {list(tensor.shape)}", sent)
        rows = [torch.tensor(list(each[: tensor.nbytes]), dtype=torch.uint8) for each in received if is_small]
        return says, [_tensor_of(row, tensor) for row in rows] if is_small else None

    def _agree(self, doing: str, value: str = "", content: bytes = b"") -> tuple[str, list[bytes]]:
        """Return the call in words, and the content of every rank; raise ConfigError on all if their calls differ."""
        number, (function, line) = self._here.begin(CHANNEL), calling(doing)
        says, text = f"{doing} ({function} at {line})", "|".join((str(number), doing, value, function)).encode()
        message = text[:LABEL].ljust(LABEL) + line.encode()[-LINE:].ljust(LINE) + content.ljust(CONTENT)
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        received = torch.empty(self._here.size, len(sent), dtype=torch.uint8)
        rows = list(received.unbind())
        self._call(says, lambda: dist.all_gather(rows, sent, group=self._group, async_op=True))
        messages = [bytes(row) for row in received.numpy()]
        other = next((rank for rank, each in enumerate(messages) if each[:LABEL] != messages[0][:LABEL]), None)
        if other is not None:
            raise ConfigError(_difference(messages[0], messages[other], other))
        return says, [each[-CONTENT:] for each in messages]

    def _call(self, says: str, begin: Callable[[], dist.Work]) -> None:
        if self._group is None:
            raise ConfigError("the context is closed, so ranks share no more calls; make them before its `with` ends")
        with self._guard(says):
            self._here.wait(CHANNEL, says, partial(_is_over, begin()))


class GradientAveraging:
    """DDP's communication hook for one model on Gloo: a rank that waits in backward() posts it, and learns who left."""

    def __init__(self, model: DistributedDataParallel, here: DeadlockDetector, guard: Guard) -> None:
        self._model = weakref.proxy(model)  # it holds this hook in a way that no garbage collection sees through
        self._here, self._guard = here, guard
        self._channel = f"gradients {here.begin('models')}"
        self._pending: list[dist.Work] = []
        self._is_first = True
        model.register_comm_hook(None, self._begin)

    def _begin(self, _: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start to average these gradients; the first bucket of a backward pass asks for a wait at its end."""
        if bucket.index() == 0:
            self._pending = []
            self._here.begin(self._channel)
            Variable._execution_engine.queue_callback(self._finish)
        gradients = bucket.buffer().div_(self._here.size)
        self._pending.append(dist.all_reduce(gradients, group=self._model.process_group, async_op=True))
        begun: torch.futures.Future[Tensor] = torch.futures.Future()
        begun.set_result(bucket.buffer())  # DDP looks at it after `_finish`
        return begun

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


def _is_over(work: dist.Work, seconds: float) -> bool:
    """Wait for the work, at most so long; return whether it is done. Raise its error if it failed."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it ended since, or this says why it failed
    return True


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
