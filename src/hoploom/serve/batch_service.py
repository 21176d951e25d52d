"""A server's side of whole batches. A request carries all that a batch is made of; nothing is kept of a client.

Any server can make any batch. Only weights of negatives, a number for each node, stay under their hash: the newest,
as far as memory goes; and the times of nodes, where temporal negatives have needed them.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hoploom.load.maker import NodeTimes, Workspaces
from hoploom.sample.negatives import WeightSums, weight_sums
from hoploom.serve.batch_codec import packed
from hoploom.serve.batch_request import BatchRequest
from hoploom.serve.memory_budget import BusyError, MemoryBudget, MeteredStore, busy
from hoploom.serve.read_batch_request import BatchSource, maker_of, read_asked
from hoploom.serve.wire import Message
from hoploom.store import Store

WAIT = 5.0  # seconds that a batch waits for a thread, or for room
WEIGHTS = 4  # the part of the memory that weights of negatives may take


class BatchService:
    """Makes batches of a store, `threads` at a time. Those made and not yet sent take at most `memory` bytes."""

    def __init__(self, store: Store, threads: int, memory: int, *, wait: float = WAIT) -> None:
        self.budget = MemoryBudget(memory, wait)
        self._metered, self._threads, self._wait = MeteredStore(store, self.budget), threading.Semaphore(threads), wait
        self._weights = WeightCache(memory // WEIGHTS)
        counted = replace(store, graph=self._metered, features=self._metered)
        self._source = BatchSource(counted, Workspaces(store), NodeTimes(store))

    def answer(self, request: Message) -> Message:
        """A batch; or that weights are needed, or that there is no room. ConfigError for what cannot be made."""
        tensors = [tensor for tensor in request.tensors if isinstance(tensor, Tensor)]
        asked = read_asked(request.header, tensors, self._source.store.schema)
        negatives = asked.description.negatives
        sums = self._weights.find(negatives.weights if negatives is not None else [], asked.weights)
        if isinstance(sums, list):
            return Message({"error": "need", "hashes": sums, "message": "weights of negatives are needed"})
        if not self._threads.acquire(timeout=self._wait):
            return busy(f"all threads are making batches; none was free within {self._wait:g} seconds")
        try:
            return self._make(asked, sums)
        except BusyError as error:
            return busy(str(error))
        finally:
            self._threads.release()

    def _make(self, asked: BatchRequest, sums: Mapping[str, WeightSums]) -> Message:
        with self._metered.batch() as reservation:
            count = next(iter(asked.seeds.values())).numel()
            batch = maker_of(self._source, asked, sums).make(torch.arange(count), asked.first, asked.key)
            message = packed(batch)
            reservation.settle(sum(tensor.nbytes for tensor in message.tensors if isinstance(tensor, Tensor)))
            return message._replace(done=reservation.close)


class WeightCache:
    """Weights made ready to be drawn by, under their hash; those not used for longest go first."""

    def __init__(self, memory: int) -> None:
        self._memory, self._lock = memory, threading.Lock()
        self._sums: OrderedDict[str, WeightSums] = OrderedDict()

    def find(self, names: Sequence[str], attached: Mapping[str, Tensor]) -> dict[str, WeightSums] | list[str]:
        """The weights of these names, or the names of those that are neither here nor attached."""
        with self._lock:
            found = {name: self._sums[name] for name in names if name in self._sums}
            for name in found:
                self._sums.move_to_end(name)
        missing = [name for name in names if name not in found and name not in attached]
        if missing:
            return missing
        for name in names:
            if name not in found:
                found[name] = weight_sums(attached[name])
                self._keep(name, found[name])
        return found

    def _keep(self, name: str, sums: WeightSums) -> None:
        with self._lock:
            self._sums[name] = sums
            while sum(kept.sums.nbytes for kept in self._sums.values()) > self._memory:
                self._sums.popitem(last=False)
