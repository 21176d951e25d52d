"""Bytes from every rank to every other at once, by torch.distributed."""

from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from hoploom import ops

GONE = (RuntimeError, ValueError, AssertionError)  # what torch raises of a group that it does not know any more


class AllToAll:
    """A process group that nothing else uses, and the memory in which its backend wants the bytes."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self._group: dist.ProcessGroup | None = group
        self._device = device

    def swap(self, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]) -> list[Tensor]:
        """What every rank has for this one, [n] uint8 of each; sizes are by rank."""
        assert self._group is not None
        received, sizes = ops.empty((sum(received_sizes),), torch.uint8), list(received_sizes)
        target = received.to(self._device)
        work = self._group.alltoall_base(target, sent.to(self._device), sizes, list(sent_sizes), dist.AllToAllOptions())
        work.wait()  # as long as ranks of this group wait for each other
        return split(target.to("cpu"), sizes)

    def close(self) -> None:
        """Leave the group. Ranks that are in a call with this one learn it at once."""
        group, self._group = self._group, None
        with suppress(*GONE):
            dist.destroy_process_group(group)


def split(message: Tensor, sizes: list[int]) -> list[Tensor]:
    """Its pieces of these sizes, without a copy."""
    return list(message.split(sizes))  # type: ignore[no-untyped-call]
