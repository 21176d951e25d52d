"""Answer the clients of a server from a GPU: hops and rows of one part, and whole batches.

Values are copied to pinned host memory, and every wait for the device has a deadline. A client whose server's GPU is
late, or is short of memory, asks another server.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import PeerError
from hoploom.gpu.batch_memory import Pool, map_tensors
from hoploom.gpu.capacity import FAULT, ZERO
from hoploom.gpu.device_hops import fault_of
from hoploom.gpu.loading import DeviceLoading, OnDevice
from hoploom.gpu.placed_store import PlacedStore
from hoploom.keys import as_int64
from hoploom.load.assemble import Batch, received, tensors_in
from hoploom.load.maker import LocalMaker
from hoploom.load.order import StepShare
from hoploom.ops import Frontier, Picks, Rule
from hoploom.ops.deadline import BUSY, HostCopy
from hoploom.ops.kernels.gather import Segments
from hoploom.ops.kernels.launch import DeviceFrontier, DeviceLists, DevicePicks, DeviceSpan
from hoploom.ops.kernels.sample import sample
from hoploom.schema import TypeKey
from hoploom.serve.requests import most_picks
from hoploom.serve.service import ENOUGH
from hoploom.store import Part, Store
from hoploom.store.base import Absent, Draw, Wanted
from hoploom.store.sharded import ShardWrapper

DEADLINE = 60.0  # seconds for the device
LATE = f"the device has not answered within {DEADLINE:g} s; {BUSY}"
NODES, PICKS = FAULT + 1, FAULT + 2  # slots of a hop's sizes, after ZERO and FAULT
MOST_LOADERS = 8  # kinds of batches whose buffers are kept, of the loaders that asked last


def answer_on_device(store: Store) -> Store:
    """Return a placed store whose parts answer from the device, and whose batches for clients are made there."""
    here = store.placed
    rows = {key: Segments.of(own, here.device) for key, own in here.partial.items()}
    placed, pool = replace(here, fields={**here.fields, **rows}), Pool(here.device, DEADLINE)
    parts = iter(zip(store.parts, here.of_parts or [here.lists] * len(store.parts), strict=True))
    shards = [
        shard if isinstance(shard, Absent) else PlacedShard(shard, *next(parts), placed, pool) for shard in store.shards
    ]
    return replace(store, shards=tuple(shards), deployment=ServingDevice(**vars(store.deployment)))


@contextmanager
def _or_another_server() -> Iterator[None]:
    """Turn errors of the device into one after which a client asks another server."""
    try:
        yield
    except TimeoutError as error:
        raise PeerError(f"{error}"[:400]) from error
    except torch.OutOfMemoryError as error:
        raise PeerError(f"{error}"[:400] + "; lower the fanouts or batch_size, or start another server") from error


@dataclass(frozen=True, kw_only=True)
class ServingDevice(OnDevice):
    """The deployment of a server's placed store. It keeps the buffers of some kinds of batches, least used first."""

    loadings: dict[Hashable, DeviceLoading] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, maker: LocalMaker, share: StepShare, options: Hashable, reserve: Callable[[int], None]) -> Batch:
        """Return a batch, made on the device and copied to the host. After an error of the device, drop its buffers."""
        with _or_another_server():
            try:
                batch = self._made(maker, share, options)
                reserve(sum(tensor.nbytes for tensor in tensors_in(batch)))
                copies = deque(map(HostCopy, tensors_in(batch)))
                for storage in batch.stores:
                    on_host = map_tensors(storage._mapping, lambda _: copies.popleft().wait(DEADLINE, LATE))
                    storage._mapping.update(on_host)
                return batch
            except (TimeoutError, torch.OutOfMemoryError):
                with self.lock:
                    self.loadings.pop(options, None)
                raise

    def _made(self, maker: LocalMaker, share: StepShare, options: Hashable) -> Batch:
        """Return a batch on the device. If memory is short, drop the buffers of all kinds and try once more."""
        try:
            return received(self._loading(maker, options).make(share, maker))
        except torch.OutOfMemoryError:
            with self.lock:
                self.loadings.clear()
        return received(self._loading(maker, options).make(share, maker))

    def _loading(self, maker: LocalMaker, options: Hashable) -> DeviceLoading:
        """Return the object that makes the batches of one kind, now the kind used last."""
        with self.lock:
            loading = self.loadings.pop(options, None) or DeviceLoading(maker, self.placed, DEADLINE)
            if len(self.loadings) == MOST_LOADERS:
                del self.loadings[next(iter(self.loadings))]
            self.loadings[options] = loading
            return loading


@dataclass(frozen=True)
class PlacedShard(ShardWrapper):
    """A part of a placed store: its hops are sampled, and its rows gathered, on the device."""

    part: Part
    lists: Sequence[DeviceLists] | None  # this part's, or those of all parts; None: the host samples
    placed: PlacedStore
    pool: Pool

    def in_memory(self, owner: TypeKey, name: str) -> bool:
        """Return whether the host has the rows of a field. A server sends other rows in pieces, like those on disk."""
        return (owner, name) not in self.placed.fields

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        """Begin to sample a hop. Without placed topology, and by time, this is done on the host."""
        lists = self.lists
        self.placed.lease.check()
        if lists is None or draw.counts_only or any(one is not None and one.times is not None for one in frontiers):
            return self.shard.begin_sample(frontiers, draw)
        begun: list[Callable[[], Picks] | None] = [None] * len(lists)
        for relation, end in enumerate(self.part.schema.destinations):
            frontier = frontiers[end]
            if frontier is not None and draw.fanouts[relation] != 0:
                fanouts = [fanout if index == relation else 0 for index, fanout in enumerate(draw.fanouts)]
                most = most_picks(self.part, frontiers, draw._replace(fanouts=fanouts), ENOUGH)
                first_edge = self.part.lists[relation].first_edge if self.placed.of_parts else 0
                begun[relation] = self._begin_hop(lists[relation], first_edge, frontier, draw.rule(relation), most)
        return lambda: [None if finish is None else finish() for finish in begun]

    def _begin_hop(
        self, lists: DeviceLists, first_edge: int, frontier: Frontier, rule: Rule, most: int
    ) -> Callable[[], Picks]:
        """Begin to sample at most `most` in-edges of one relation; the returned function returns them.

        `first_edge` is the position in the store of the first edge in `lists`.
        """
        device, count = self.placed.device, frontier.nodes.numel()
        sizes = torch.zeros(PICKS + 1, 2, dtype=torch.int64)
        sizes[NODES, 0] = count
        read = frontier.nodes, frontier.trees, rule.excluded, torch.tensor(as_int64(rule.key)), sizes
        with self._on_device(read) as (nodes, trees, excluded, key, sizes):
            sources, edges, destinations = columns = torch.empty([3, most], dtype=torch.int64, device=device)
            indptr = torch.zeros(count + 1, dtype=torch.int64, device=device)
            picks = DevicePicks(sources, edges, destinations, DeviceSpan(sizes[ZERO, 0], sizes[PICKS, 0], most), indptr)
            expanded = DeviceFrontier(nodes, DeviceSpan(sizes[ZERO, 0], sizes[NODES, 0], count), trees)
            excluded = None if excluded is None else excluded - first_edge
            sample(lists, expanded, rule._replace(key=key, excluded=excluded), picks, sizes[FAULT, :1])
            copies = HostCopy(sizes), HostCopy(indptr)

        def finish() -> Picks:
            with _or_another_server():
                on_host, offsets = (copied.wait(DEADLINE, LATE) for copied in copies)
                found: list[int] = on_host[:, 0].tolist()
                if (fault := fault_of(found)) is not None:
                    raise fault
                with self.pool.side_stream():
                    columns[1, : found[PICKS]] += first_edge
                    copied = HostCopy(columns[:2, : found[PICKS]].contiguous())
                return Picks(offsets.diff(), *copied.wait(DEADLINE, LATE))

        return finish

    def begin_gather(
        self, wanted: Sequence[Wanted], positions: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        keys = [(id(want.ids), id(own)) for want, own in zip(wanted, positions, strict=True)]
        ids = {key: ops.select(want.ids, own) for key, want, own in zip(keys, wanted, positions, strict=True)}
        with self._on_device((ids, torch.zeros(1, dtype=torch.int64))) as (on_device, faults):
            placed = [want._replace(ids=on_device[key]) for key, want in zip(keys, wanted, strict=True)]
            copies = list(map(HostCopy, self.placed.gather(placed, faults)))  # a server has checked the ids

        def finish() -> None:
            with _or_another_server():
                for copied, own, out in zip(copies, positions, outs, strict=True):
                    ops.scatter_rows(copied.wait(DEADLINE, LATE), own, out)

        return finish

    @contextmanager
    def _on_device(self, value: Any) -> Iterator[Any]:
        """Yield the value with its tensors copied to the device. The `with` block runs on the side stream."""
        with _or_another_server(), self.pool.side_stream():
            staged = self.pool.stage(value)
            yield staged.over(staged.block.to(self.placed.device, non_blocking=True))
