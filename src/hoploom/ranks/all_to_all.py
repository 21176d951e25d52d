"""Bytes from every rank to every other at once, by torch.distributed. From and to memory of the host: Gloo only."""

from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from hoploom import ops

LEFT = (
    RuntimeError,
    ValueError,
    KeyError,
    AssertionError,
)  # what torch raises of a group that is gone


class AllToAll:
    """A process group of Gloo that nothing else uses."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self._group: dist.ProcessGroup | None = group

    def swap(self, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]) -> list[Tensor]:
        """What every rank has for this one, [n] uint8 of each; sizes are by rank."""
        assert self._group is not None
        received, sizes = ops.empty((sum(received_sizes),), torch.uint8), list(received_sizes)
        work = self._group.alltoall_base(received, sent, sizes, list(sent_sizes), dist.AllToAllOptions())
        work.wait()  # as long as ranks of this group wait for each other
        return split(received, sizes)

    def close(self) -> None:
        """Leave the group. Ranks that are in a call with this one learn it at once."""
        group, self._group = self._group, None
        with suppress(*LEFT):
            dist.destroy_process_group(group)


def split(message: Tensor, sizes: list[int]) -> list[Tensor]:
    """Its pieces of these sizes, without a copy."""
    return list(torch.split_with_sizes(message, sizes))
