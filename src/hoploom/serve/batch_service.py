"""Whole batches, on the side of the server. A request has all that a batch depends on, so any server can make it.

Nothing of a client is kept but weights of negatives (a number for each node), under their hash, as far as memory goes.
The times of nodes are kept once temporal negatives have needed them.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling

from hoploom.load.arguments import NodeSeeds, empty_batch
from hoploom.load.assemble import Assembler
from hoploom.load.maker import LinkInput, LinkMaker, NodeMaker, NodeTimes, Sampler
from hoploom.sample import LinkTask, Workspace
from hoploom.sample.negatives import WeightSums, weight_sums
from hoploom.schema import RelationName
from hoploom.serve.batch_codec import NARROWED, NEVER, packed
from hoploom.serve.batch_request import BatchRequest, Description, read_batch_request
from hoploom.serve.memory_budget import ALONE, WAIT, BusyError, Call, MemoryBudget, MeteredStore
from hoploom.serve.wire import Message
from hoploom.store import Store

WEIGHTS = 4  # the part of the memory that weights of negatives may take


class BatchService:
    """Makes batches of a store, `threads` at a time. Those made and not yet sent take at most `memory` bytes."""

    def __init__(self, store: Store, threads: int, memory: int, *, wait: float = WAIT) -> None:
        self.budget = MemoryBudget(memory, wait)
        self._metered, self._threads, self._wait = MeteredStore(store, self.budget), threading.Semaphore(threads), wait
        self._weights = WeightCache(memory // WEIGHTS)
        self._store = replace(store, graph=self._metered, features=self._metered)
        self._idle, self._node_times = deque[Workspace](), NodeTimes(store)

    def answer(self, request: Message, call: Call = ALONE) -> Message:
        """A batch, or the answer that weights are needed. ConfigError if it cannot be made, BusyError if not now."""
        tensors = [tensor for tensor in request.tensors if isinstance(tensor, Tensor)]
        wanted = read_batch_request(request.header, tensors, self._store.schema)
        negatives = wanted.description.negatives
        sums = self._weights.find(negatives.weights if negatives is not None else [], wanted.weights)
        if isinstance(sums, list):
            return Message({"error": "need", "hashes": sums, "message": "weights of negatives are needed"})
        if not self._threads.acquire(timeout=self._wait):
            raise BusyError(f"all threads are making batches; none was free within {self._wait:g} seconds")
        try:
            return self._make(wanted, sums, call)
        finally:
            self._threads.release()

    def _make(self, wanted: BatchRequest, sums: Mapping[str, WeightSums], call: Call) -> Message:
        with self._metered.batch(call) as reservation:
            count = next(iter(wanted.seeds.values())).numel()
            batch = self._maker(wanted, sums).make(torch.arange(count), wanted.first, wanted.key)
            message = packed(batch, NEVER if call.is_shared else NARROWED)  # in shared memory nothing is gained
            reservation.settle(sum(tensor.nbytes for tensor in message.tensors if isinstance(tensor, Tensor)))
            return message._replace(done=reservation.close)

    def _maker(self, wanted: BatchRequest, sums: Mapping[str, WeightSums]) -> NodeMaker | LinkMaker:
        """The maker of one batch: the same as the loader would have, for these seeds only."""
        store, description = self._store, wanted.description
        sampler = Sampler(store.graph, description.sampling, idle=self._idle)
        fields = None if description.fields is None else dict(description.fields)
        reduce, degrees = description.aggregate, description.degrees
        assembler = Assembler(store, empty_batch(store), {}, reduce=reduce, degrees=degrees, fields=fields)
        if isinstance(description.owner, str):
            nodes = NodeSeeds(description.owner, wanted.seeds["nodes"], times=wanted.seeds.get("times"))
            return NodeMaker(sampler, assembler, nodes)
        ends = torch.stack([wanted.seeds["sources"], wanted.seeds["destinations"]])
        labels, times = wanted.seeds.get("labels"), wanted.seeds.get("times")
        task = self._link_task(description.owner, description, sums)
        return LinkMaker(sampler, assembler, LinkInput(task, ends, labels, times))

    def _link_task(self, key: RelationName, description: Description, sums: Mapping[str, WeightSums]) -> LinkTask:
        named = description.negatives
        if named is None:
            return LinkTask(key)
        node_times = self._node_times if description.sampling.temporal is not None else None
        weights = [None if name is None else sums[name] for name in (named.src_weight, named.dst_weight)]
        negatives = NegativeSampling(named.mode, named.amount)
        return LinkTask(key, negatives, named.strict, node_times, (weights[0], weights[1]))


class WeightCache:
    """Running sums of weights, to draw by, under the hash of the weights. The least recently used are dropped first."""

    def __init__(self, memory: int) -> None:
        self._memory, self._lock = memory, threading.Lock()
        self._sums: OrderedDict[str, WeightSums] = OrderedDict()

    def find(self, names: Sequence[str], attached: Mapping[str, Tensor]) -> dict[str, WeightSums] | list[str]:
        """The sums of these weights; or the names of those that are neither kept nor attached."""
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
