"""The service that makes whole batches on a server. A request is complete in itself: any server can answer it."""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling

from hoploom import ops
from hoploom.load.arguments import empty_batch
from hoploom.load.assemble import Assembler
from hoploom.load.maker import LinkMaker, NodeMaker, NodeTimes, Sampler
from hoploom.load.order import StepShare
from hoploom.ops import Empty, Frontier, Picks
from hoploom.sample import LinkTask, Workspace
from hoploom.sample.exclusions import ExcludedEdges, Exclusion
from hoploom.sample.negatives import KnownLinks
from hoploom.schema import Field, Schema, TypeKey
from hoploom.serve.batch_messages import NARROW_FROM, NEVER, BatchRequest, encode_batch, read_batch_request
from hoploom.serve.memory_budget import NO_CLIENT, WAIT, BusyError, MemoryBudget, RequestContext, Reservation
from hoploom.serve.requests import most_picks
from hoploom.serve.wire import Message
from hoploom.store import Draw, Store
from hoploom.store.base import Triple

PICK_BYTES = 40  # of a pick: source, edge, local source, both ends in edge_index


class BatchService:
    """Makes batches of a store, up to `threads` at once. Batches that are not sent yet take at most `memory` bytes."""

    def __init__(self, store: Store, threads: int, memory: int, *, wait: float = WAIT) -> None:
        self.budget = MemoryBudget(memory, wait)
        self._metered, self._threads, self._wait = MeteredStore(store, self.budget), threading.Semaphore(threads), wait
        self._store = replace(store, graph=self._metered, features=self._metered)
        self._idle, self._node_times = deque[Workspace](), NodeTimes(store)

    def answer(self, message: Message, context: RequestContext = NO_CLIENT) -> Message:
        """Return the requested batch. Raise ConfigError if it can never be made, BusyError if it can be made later."""
        request = read_batch_request(message.header, message.whole_tensors, self._store.schema)
        if not self._threads.acquire(timeout=self._wait):
            raise BusyError(f"all threads are making batches; none was free within {self._wait:g} seconds")
        try:
            with self._metered.batch(context) as reservation:
                count = next(iter(request.seeds.values())).numel()
                share = StepShare(torch.arange(count), request.first, request.key)
                maker, serve = self._maker(request), self._store.deployment.serve
                batch = serve(maker, share, request.description, reservation.take)
                response = encode_batch(batch, NEVER if context.is_shared else NARROW_FROM)  # shared memory is not sent
                reservation.resize(sum(tensor.nbytes for tensor in response.whole_tensors))
                return response._replace(done=reservation.close)
        finally:
            self._threads.release()

    def _maker(self, request: BatchRequest) -> NodeMaker | LinkMaker:
        """Return the object that makes the batch, as in a local loader. Its only seeds are those of the request."""
        store, description, seeds = self._store, request.description, request.seeds
        sampler = Sampler(store.graph, description.sampling, idle=self._idle)
        fields = None if description.fields is None else dict(description.fields)
        reduce, degrees = description.aggregate, description.degrees
        assembler = Assembler(store, empty_batch(store), {}, reduce=reduce, degrees=degrees, fields=fields)
        if isinstance(description.owner, str):
            return NodeMaker(sampler, assembler, description.owner, seeds["nodes"], times=seeds.get("times"))
        ends = torch.stack([seeds["sources"], seeds["destinations"]])
        task, named, known = LinkTask(description.owner), description.negatives, None
        if named is not None:
            if request.known is not None:
                known = KnownLinks(request.known, store.schema.node_type(description.owner[2]).num_nodes)
            node_times = self._node_times if description.sampling.temporal is not None else None
            negatives = NegativeSampling(named.mode, named.amount)
            task = LinkTask(description.owner, negatives, named.strict, node_times, named.candidates, known)
            task.check(store.schema)
        excluded = []
        for relation, edges in enumerate(request.excluded):
            if edges is not None:  # of the whole step, which may have links on other ranks: the first link has them all
                indptr = torch.full((ends.shape[1] + 1,), edges.numel())
                indptr[0] = 0
                excluded.append(ExcludedEdges(relation, edges, indptr))
        exclusion = Exclusion(len(request.excluded), tuple(excluded)) if excluded else None
        columns = seeds.get("labels"), seeds.get("times")
        listed = seeds.get("candidates")
        return LinkMaker(sampler, assembler, task, ends, *columns, exclusion=exclusion, candidates=listed)


class MeteredStore:
    """Wraps a store. Reserves memory for the picks and rows of the batch that the calling thread makes."""

    def __init__(self, store: Store, budget: MemoryBudget) -> None:
        self.schema: Schema = store.schema
        self._graph, self._features, self._budget = store.graph, store.features, budget
        self._of_thread = threading.local()
        owners: dict[TypeKey, Mapping[str, Field]] = {t.name: t.fields for t in self.schema.node_types}
        owners |= {r.key: r.fields for r in self.schema.relations}
        self._row_bytes = {(o, name): f.row_bytes for o, fields in owners.items() for name, f in fields.items()}

    @contextmanager
    def batch(self, context: RequestContext = NO_CLIENT) -> Iterator[Reservation]:
        """Yield a memory reservation for the batch that this thread makes in the `with` block."""
        with Reservation(self._budget, context) as reservation:
            self._of_thread.reservation = reservation
            yield reservation

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        """Sample one hop. Raise ConfigError before sampling if its picks could never fit the memory budget."""
        reservation: Reservation = self._of_thread.reservation
        reservation.request.check()
        reservation.check(most_picks(self._graph, frontiers, draw, reservation.left // PICK_BYTES) * PICK_BYTES)
        picks = self._graph.sample(frontiers, draw)
        reservation.take(sum(one.sources.numel() for one in picks if one is not None) * PICK_BYTES)
        return picks

    def gather(self, wanted: Sequence[Triple], *, empty: Empty = ops.empty) -> list[Tensor]:
        """Wait for memory for the rows, then gather them, if possible into memory shared with the client."""
        size = sum(ids.numel() * self._row_bytes[owner, name] for owner, name, ids in wanted)
        reservation: Reservation = self._of_thread.reservation
        reservation.take(size)
        return self._features.gather(wanted, empty=reservation.request.empty)
