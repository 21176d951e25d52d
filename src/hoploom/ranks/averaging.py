"""Averaging gradients so that a rank which waits for the others in backward() says so, and learns whom it lost.

The sums are those of DDP itself, bucket by bucket beside the backward pass; only the wait at its end is ours.
"""

import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from hoploom.ranks.shared_calls import is_over
from hoploom.ranks.whereabouts import Whereabouts, calling

DOING = "averaging gradients"


class Averaging:
    """DDP's communication hook for one model on Gloo."""

    def __init__(
        self,
        model: DistributedDataParallel,
        whereabouts: Whereabouts,
        guard: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._model = weakref.proxy(model)  # it holds this hook in a way that no garbage collection sees through
        self._whereabouts, self._guard = whereabouts, guard
        self._channel = f"gradients {whereabouts.begin('models')}"
        self._pending: list[dist.Work] = []
        self._settled = False

    def register(self) -> None:
        """From now on."""
        self._model.register_comm_hook(self, _begin)

    def begin(self, bucket: GradBucket) -> None:
        """Start to average these gradients; the first ones of a backward pass ask for a wait at its end."""
        if bucket.index() == 0:
            self._pending = []
            self._whereabouts.begin(self._channel)
            Variable._execution_engine.queue_callback(self._finish)
        gradients = bucket.buffer().div_(self._whereabouts.world_size)
        self._pending.append(dist.all_reduce(gradients, group=self._model.process_group, async_op=True))

    def _finish(self) -> None:
        says, began = "{} ({} at {})".format(DOING, *calling("backward")), time.perf_counter()
        with self._guard(says):
            for work in self._pending:
                self._whereabouts.wait(self._channel, says, partial(is_over, work))
        self._pending = []
        self._whereabouts.averaging_seconds += time.perf_counter() - began
        if not self._settled:  # DDP itself chooses its buckets anew in the next forward pass, and would wait there
            self._settled = True
            Variable._execution_engine.queue_callback(self._settle)

    def _settle(self) -> None:
        with self._guard(DOING):
            self._model.reducer._rebuild_buckets()


def _begin(averaging: Averaging, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    averaging.begin(bucket)
    begun: torch.futures.Future[Tensor] = torch.futures.Future()
    begun.set_result(bucket.buffer())  # DDP looks at it after `_finish`
    return begun
