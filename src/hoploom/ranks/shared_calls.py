"""What all ranks do together: each call begins with a label, and calls that do not belong together raise on every rank.

They go through a Gloo group of their own, so that they never pair with DDP's or with yours. The label and what fits
beside it travel in one all-gather: numbers and small tensors need no second one. Costs a quarter of a KiB per rank.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hoploom.errors import ConfigError
from hoploom.ranks.whereabouts import SAME_CALLS, Whereabouts, calling

LABEL, PLACE, CONTENT = 128, 48, 64  # bytes of a message: what must be alike, where the call stands, what it carries
CHANNEL = "calls"
NUMBER = "a number"
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
DOING = {SUM: "summing over all ranks", MAX: "finding the maximum over all ranks"}

Guard = Callable[[str], AbstractContextManager[None]]


class SharedCall(NamedTuple):
    """One of them, as this rank makes it."""

    doing: str  # what the ranks do, e.g. "summing over all ranks"
    of: str  # the dtype and shape that it is done with
    function: str  # of Hoploom, that the user called
    place: str  # where the user called it

    def __str__(self) -> str:
        return f"{self.doing} ({self.function} at {self.place})"


class SharedCalls:
    """Those of this rank. `guard` turns the ways in which a lost peer shows into a PeerError."""

    def __init__(self, group: dist.ProcessGroup, whereabouts: Whereabouts, guard: Guard) -> None:
        self._open: dist.ProcessGroup | None = group  # until this rank leaves
        self._whereabouts, self._guard = whereabouts, guard

    def leave(self, *, for_good: bool) -> None:
        """This rank will make no more of them, nor average gradients if `for_good`."""
        self._open = None  # the group would keep alive where the ranks have met
        if for_good:
            self._whereabouts.leave()

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._open is None:
            raise ConfigError("the context is closed, so ranks share no more calls; make them before its `with` ends")
        return self._open

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._agree(_call("waiting at a barrier"))

    def reduce_number(self, value: Any, operation: dist.ReduceOp.RedOpType) -> int | float:
        """Integers exactly, others in float64 and in the order of ranks; as floats where one rank has a float."""
        text = repr(int(value) if isinstance(value, Integral) else float(value))
        if len(text) > CONTENT:
            raise ConfigError(f"the number {value} has more than {CONTENT} digits, and ranks cannot exchange it")
        texts = [each.decode().strip() for each in self._agree(_call(DOING[operation], NUMBER), text.encode())]
        is_float = any(not each.lstrip("-").isdecimal() for each in texts)
        numbers = [float(each) if is_float else int(each) for each in texts]
        return sum(numbers) if operation == SUM else max(numbers)

    def reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """A tensor of this process's memory, which may be overwritten."""
        call = _call(DOING[operation], _kind(tensor))
        rows = self._small(call, tensor)
        if rows is None:
            self._talk(call, lambda: dist.all_reduce(tensor, operation, group=self._group, async_op=True))
            return tensor
        return torch.stack(rows).sum(dim=0) if operation == SUM else torch.stack(rows).amax(dim=0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in the order of ranks."""
        call = _call("gathering from all ranks", _kind(tensor))
        received = self._small(call, tensor)
        if received is not None:
            return received
        sent = _bytes_of(tensor)
        rows = [torch.empty_like(sent) for _ in range(self._group.size())]
        self._talk(call, lambda: dist.all_gather(rows, sent, group=self._group, async_op=True))
        return [_tensor_of(row, tensor) for row in rows]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor."""
        call = _call("receiving from rank 0", _kind(tensor))
        received = self._small(call, tensor)
        if received is not None:
            return received[0]
        sent = _bytes_of(tensor).clone()
        self._talk(call, lambda: dist.broadcast(sent, src=0, group=self._group, async_op=True))
        return _tensor_of(sent, tensor)

    def _small(self, call: SharedCall, tensor: Tensor) -> list[Tensor] | None:
        """Agree on the call; every rank's tensor where it fits beside the label."""
        if tensor.nbytes > CONTENT:
            self._agree(call)
            return None
        contents = self._agree(call, bytes(_bytes_of(tensor).tolist()))
        return [_tensor_of(torch.tensor(list(each[: tensor.nbytes]), dtype=torch.uint8), tensor) for each in contents]

    def _agree(self, call: SharedCall, content: bytes = b"") -> list[bytes]:
        """What every rank says with this call, once all are seen to make the same one."""
        number = self._whereabouts.begin(CHANNEL)
        label = f"{number}|{call.doing}|{call.of}|{call.function}".encode()[:LABEL].ljust(LABEL)
        place = call.place.encode()[-PLACE:].ljust(PLACE)
        sent = torch.frombuffer(bytearray(label + place + content.ljust(CONTENT)), dtype=torch.uint8)
        received = torch.empty(self._group.size(), len(sent), dtype=torch.uint8)
        rows = list(received.unbind())
        self._talk(call, lambda: dist.all_gather(rows, sent, group=self._group, async_op=True))
        said = [bytes(row) for row in received.numpy()]
        places = [each[LABEL:-CONTENT].decode(errors="replace").strip() for each in said]
        _compare([each[:LABEL] for each in said], places)
        if call.doing in DOING.values():
            _compare_lines(call.function, places)
        return [each[-CONTENT:] for each in said]

    def _talk(self, call: SharedCall, begin: Callable[[], dist.Work]) -> None:
        with self._guard(str(call)):
            work = begin()
            self._whereabouts.wait(CHANNEL, str(call), lambda seconds: is_over(work, seconds))


def is_over(work: dist.Work, seconds: float) -> bool:
    """Wait for it, at most so long; raises if it failed."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it ended since, or this says why it failed
    return True


def _call(doing: str, of: str = "") -> SharedCall:
    return SharedCall(doing, of, *calling(doing))


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _in_words(of: str) -> str:
    """What a call is about: a number, or a tensor of this kind."""
    dtype, _, shape = of.partition(" ")
    return f"a {dtype} tensor of shape {shape}" if shape.startswith("[") else of


def _compare(labels: list[bytes], places: list[str]) -> None:
    """Raise if the ranks do not all make the same call: the same error on all of them."""
    if labels.count(labels[0]) < len(labels):
        other = next(rank for rank, label in enumerate(labels) if label != labels[0])
        ours, theirs = (labels[rank].decode(errors="replace").strip().split("|") for rank in (0, other))
        if [*ours[:2], *ours[3:]] == [*theirs[:2], *theirs[3:]]:
            one, another = _in_words(ours[2]), _in_words(theirs[2])
            raise ConfigError(f"rank 0 was {ours[1]}: {one}, but rank {other} has {another}; give all ranks the same")
        told = [
            f"rank {rank} was {doing}{of and ': '}{_in_words(of)} ({function} at {places[rank]}, call {number})"
            for rank, (number, doing, of, function) in ((0, ours), (other, theirs))
        ]
        raise ConfigError(f"{told[0]}, but {told[1]}; {SAME_CALLS}")


def _compare_lines(function: str, places: list[str]) -> None:
    """A sum may be written twice, in both branches of an if; it may also be another one that is added by mistake."""
    other = next((rank for rank, place in enumerate(places) if place != places[0]), None)
    if other is not None:
        warnings.warn(
            f"rank 0 calls {function} at {places[0]}, but rank {other} at {places[other]}: if these are not the same "
            "value of different ranks, one rank makes more calls than the others; to avoid this warning, "
            "make the call on one line for all ranks",
            stacklevel=2,
        )


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _tensor_of(sent: Tensor, like: Tensor) -> Tensor:
    return sent.view(like.dtype).reshape(like.shape).to(like.device)
