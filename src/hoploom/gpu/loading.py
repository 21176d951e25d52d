"""Make whole batches on the device that holds their store: sample, relabel, gather and assemble there.

`begin` enqueues the sampling of a step and does not wait. `finish` waits for the batch's sizes, the only wait, then
copies the batch out of its buffers and gathers its rows. A loop begins the next step before it finishes one, so that
the device always has work. Costs two sets of buffers per loop, each for the largest possible batch.
"""

import copy
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoploom import ops
from hoploom.batch import Sampled, Seeds
from hoploom.errors import ConfigError
from hoploom.gpu.batch_memory import BatchMemory, Pool, StagedValue
from hoploom.gpu.capacity import (
    LARGE,
    MARGIN,
    Capacity,
    HopPlan,
    first_capacity,
    grow_capacity,
    plan_hops,
    used_capacity,
)
from hoploom.gpu.device_hops import DeviceBuffers, fault_of, make_buffers, make_maps, sample_on_device, sampled_of
from hoploom.gpu.placed_store import PlacedStore
from hoploom.keys import as_int64
from hoploom.load.assemble import Arriving, Assembler, is_there, note_edges
from hoploom.load.loader import local_producer
from hoploom.load.look_ahead import Ids, LookAhead, Request, Window, ids_key
from hoploom.load.maker import LocalMaker, Maker
from hoploom.load.order import Order, StepShare
from hoploom.load.pipeline import Pipeline, Stages
from hoploom.ops import InEdges
from hoploom.ops.deadline import BUSY, HostCopy
from hoploom.ops.kernels.gather import Segments
from hoploom.ops.kernels.gather import gather as gather_rows
from hoploom.ops.kernels.relabel import DeviceNodeMap
from hoploom.schema import DTYPES, Relation, Schema, TypeKey
from hoploom.store import Sharded, Wanted
from hoploom.store.base import Deployment
from hoploom.store.on_disk import OnDisk
from hoploom.store.sharded import empty_rows

BEGUN = 2  # most steps that are begun and not yet copied out of their buffers
FASTER = "make the transform faster, see what else keeps the device busy (nvidia-smi)"


# --- sampling, in two stages ---------------------------------------------------------------------


class HostSampling:
    """Sampling on the host, for modes that the device does not support and for stores without placed topology."""

    def __init__(self, maker: LocalMaker, pool: Pool) -> None:
        self._maker, self._pool = maker, pool

    def begin(self, share: StepShare, maker: LocalMaker | None = None) -> StagedValue:
        """Sample on the host, and return the batch in one block of pinned memory."""
        return self._pool.stage((maker or self._maker).sample(share))

    def finish(self, begun: StagedValue, memory: BatchMemory) -> Sampled:
        """Return the sampled batch on the device, after one asynchronous copy of its block."""
        with self._pool.side_stream():
            return begun.over(memory.copy(begun.block))  # type: ignore[no-any-return]


class Buffers(NamedTuple):
    """Buffers and maps to sample one batch at a time."""

    into: DeviceBuffers
    maps: Sequence[DeviceNodeMap]


class Enqueued(NamedTuple):
    """A batch whose sampling is enqueued and whose sizes are being read."""

    seeds: Seeds
    staged: StagedValue  # the key and the seeds
    block: Tensor  # the copy of `staged` on the device
    buffers: Buffers
    sizes: HostCopy


class DeviceSampling:
    """Sampling on the device, with a capacity that grows: a batch that needs more is sampled again."""

    def __init__(self, maker: LocalMaker, placed: PlacedStore, pool: Pool) -> None:
        self.num_redone = 0  # batches that exceeded the capacity and were sampled again
        self._maker, self._placed, self._pool = maker, placed, pool
        self._plan: HopPlan | None = None
        self._capacity: Capacity | None = None
        self.large = LARGE  # limit of the first capacity, in picks
        self._idle: deque[Buffers] = deque()
        self._lock = threading.Lock()

    def begin(self, share: StepShare, maker: LocalMaker | None = None) -> Enqueued:
        """Copy the key and the seeds to the device, and enqueue the kernels of all hops; does not wait."""
        seeds = (maker or self._maker).start(share)
        staged = self._pool.stage((torch.tensor(as_int64(share.key)), seeds))
        with self._pool.side_stream():
            block = staged.block.to(self._pool.device, non_blocking=True)
            with self._lock:
                buffers = self._idle.pop() if self._idle else None
            return self._run(seeds, staged, block, buffers)

    def _run(self, seeds: Seeds, staged: StagedValue, block: Tensor, idle: Buffers | None) -> Enqueued:
        """Enqueue sampling in the buffers `idle`; in new buffers if `idle` is None or has another capacity."""
        (plan, capacity), device = self._sizes_for(seeds), self._pool.device
        lists = self._placed.lists  # raises once it is closed
        assert lists is not None
        if idle is None or idle.into.capacity != capacity:
            maps = make_maps(plan, device) if idle is None else idle.maps
            idle = Buffers(make_buffers(plan, capacity, device), maps)
        key, on_device = staged.over(block)
        sample_on_device(lists, idle.maps, on_device, key, idle.into)
        return Enqueued(seeds, staged, block, idle, HostCopy(idle.into.totals))

    def capacity_of(self, share: StepShare) -> Capacity:
        """Sample the batch of these seeds, and return the capacity that it needs."""
        begun, sizes = self._fitting(self.begin(share))
        self._idle.append(begun.buffers)
        return used_capacity(begun.buffers.into.plan, sizes)

    def _fitting(self, begun: Enqueued) -> tuple[Enqueued, list[int]]:
        """Wait for the batch's sizes; sample again until the batch fits the buffers. Return it and its sizes."""
        while True:
            late = f"the device has not sampled within {self._pool.deadline:g} s; {BUSY}, or raise timeout"
            sizes: list[int] = begun.sizes.wait(self._pool.deadline, late)[:, 0].tolist()  # nothing else waits
            if (into := begun.buffers.into).capacity.holds(seen := used_capacity(into.plan, sizes)):
                break
            with self._lock:
                assert self._capacity is not None
                self._capacity = grow_capacity(self._capacity, seen)
                self.num_redone += 1
            with self._pool.side_stream():
                begun = self._run(begun.seeds, begun.staged, begun.block, begun.buffers)
        if (fault := fault_of(sizes)) is not None:
            raise fault
        return begun, sizes

    def finish(self, begun: Enqueued, memory: BatchMemory) -> Sampled:
        """Wait for the batch's sizes, then copy the batch to `memory`."""
        begun, sizes = self._fitting(begun)
        seeds = begun.seeds
        with self._pool.side_stream():
            sampled = sampled_of(begun.buffers.into, sizes, seeds.first_tree, memory.copy)
            for trees in sampled.trees or ():
                if seeds.link_of is not None:
                    trees.copy_(seeds.link_of.to(trees.device)[trees])
            _, on_device = begun.staged.over(memory.copy(begun.block))
        self._idle.append(begun.buffers)  # used again on the same stream, after the copy
        sampled.fields = on_device.fields
        return sampled

    def _sizes_for(self, seeds: Seeds) -> tuple[HopPlan, Capacity]:
        """Return the plan, and the capacity, which grows if it is too small for the number of these seeds."""
        num_seeds = [0 if nodes is None else nodes.numel() for nodes in seeds.nodes]
        with self._lock:
            if self._plan is None:
                types = [index for index, nodes in enumerate(seeds.nodes) if nodes is not None]
                self._plan = plan_hops(self._maker.assembler.store.schema, self._maker.sampler.sampling, types)
            if self._capacity is None:
                self._capacity = first_capacity(self._plan, num_seeds, self.large)
            elif any(map(int.__gt__, num_seeds, self._capacity.rows[0])):
                more = first_capacity(self._plan, [count + count // MARGIN for count in num_seeds], self.large)
                self._capacity = self._capacity.combine(more, max)
            return self._plan, self._capacity


# --- batches -------------------------------------------------------------------------------------


class DeviceLoading(Maker):
    """Makes the batches of a loader whose store is placed, in two stages; only the second waits for the device."""

    def __init__(self, maker: LocalMaker, placed: PlacedStore, deadline: float) -> None:
        self.pool = Pool(placed.device, deadline)
        sampler = maker.sampler
        options = sampler.sampling
        on_host = placed.lists is None or sampler.sample_frontier is not None or not options.num_hops
        if on_host or options.subgraph != "directional":
            self._sampling: HostSampling | DeviceSampling = HostSampling(maker, self.pool)
        else:
            self._sampling = DeviceSampling(maker, placed, self.pool)
        self.samples_on_device = isinstance(self._sampling, DeviceSampling)
        self._maker, self.assembler = maker, device_assembler(maker.assembler, placed, BatchMemory(self.pool))
        # Sets of buffers to sample in, of batches made at once. A loop has its own, as it may be left with some begun.
        self._most_begun = BEGUN if self.samples_on_device else sys.maxsize
        self._idle = threading.BoundedSemaphore(self._most_begun)

    @contextmanager
    def stages(self, order: Order, pipeline: Pipeline) -> Iterator[Stages[Arriving]]:
        """Yield the functions `begin` and `finish` that make each batch of `order`; at the end, wait for the device."""
        window = pipeline.num_ahead + 2  # batches alive: those ahead, one being made, and the consumer's
        idle = threading.BoundedSemaphore(self._most_begun)

        def begin(step: int) -> Any:
            return self._begin(idle, order.step(step))

        def finish(step: int, begun: Any, fetched: None) -> Arriving:
            memory = BatchMemory(self.pool)
            sampled = self._finish(idle, begun, memory)
            made = self.assembled(sampled, memory)
            memory.reserve(window)
            return made

        self.pool.use_current_stream()
        with self.pool:
            yield Stages(finish, window, pipeline.num_ahead + 1, begin, hint=FASTER)

    def make(self, share: StepShare, maker: LocalMaker | None = None) -> Arriving:
        """Return the batch of these seeds, made at once on this thread; they are those of `maker`, if given."""
        self.pool.use_current_stream()
        sampled, _, memory = self.sampled(share, maker)
        return self.assembled(sampled, memory)

    def sampled(self, share: StepShare, maker: LocalMaker | None = None) -> tuple[Sampled, Sampled, BatchMemory]:
        """Return a batch, sampled at once; the same batch where it was sampled; and the memory that the first is in."""
        memory, begun = BatchMemory(self.pool), self._begin(self._idle, share, maker)
        sampled = self._finish(self._idle, begun, memory)
        return sampled, sampled if self.samples_on_device else begun.value, memory

    def _begin(self, idle: threading.BoundedSemaphore, share: StepShare, maker: LocalMaker | None = None) -> Any:
        """Begin to sample a batch, once a set of buffers is idle."""
        if not idle.acquire(timeout=self.pool.deadline):
            raise TimeoutError(f"no buffers to sample in were free within {self.pool.deadline:g} s")
        try:
            return self._sampling.begin(share, maker)
        except BaseException:
            idle.release()
            raise

    def _finish(self, idle: threading.BoundedSemaphore, begun: Any, memory: BatchMemory) -> Sampled:
        try:
            return self._sampling.finish(begun, memory)
        finally:
            idle.release()

    def assembled(self, sampled: Sampled, memory: BatchMemory, **of_batch: Any) -> Arriving:
        """Return the batch, made by the assembler with its settings `of_batch` changed."""
        note_edges(sampled, self.assembler.store.schema)
        with self.pool.side_stream(alone=False):  # transforms may take long
            batch = self._maker.finish(sampled, replace(self.assembler, memory=memory, **of_batch))
            return Arriving(partial(self.pool.hand_over, self.pool.event(), batch, memory), batch)


def first_arrived(schema: Schema, owner: TypeKey) -> int:
    """Return the number of the first row in a window: after all ids, and after as many numbers for cached rows."""
    return 2 * schema.described(owner).count


class DeviceWindow(Window):
    """A Window with tables in device memory. Rows arrive in pinned memory and are copied on the side stream."""

    def __init__(self, pool: Pool, placed: PlacedStore, owner: TypeKey, fields: Collection[str]) -> None:
        self._pool, self._placed = pool, placed
        self.segments: dict[str, Segments] = {}  # by field: all placed rows, then the rows of its table
        super().__init__(placed.schema, owner, fields, little_memory=False)

    def longer(self, name: str, num_rows: int, table: Tensor | None) -> Tensor:
        placed, owner = self._placed, self._owner
        with self._pool.side_stream():
            rows = placed.empty(owner, name, num_rows)
            if table is not None:
                rows[: len(table)].copy_(table)
            pieces = [*placed.partial[owner, name], (first_arrived(self._schema, owner), rows)]
            self.segments[name] = Segments.of(pieces, placed.device)
        return rows

    def requests(self, fresh: Tensor) -> list[Request]:
        ids, empty = ops.select(self.slots.ids, fresh), ops.empty_pinned if self._pool.is_cuda else ops.empty
        rows = {name: empty_rows(self._schema, self._owner, name, ids.numel(), empty) for name in self.tables}
        return [(Wanted(self._owner, name, ids), None, out) for name, out in rows.items()]

    def arrived(self, fresh: Tensor, rows: Sequence[Tensor]) -> None:
        staged = self._pool.stage(fresh)
        with self._pool.side_stream():
            slots = staged.over(staged.block.to(self._pool.device, non_blocking=True))
            for table, own in zip(self.tables.values(), rows, strict=True):
                table.index_copy_(0, slots, own.to(self._pool.device, non_blocking=True))


class SampledAhead(NamedTuple):
    """A sampled batch on the device, and its ids in fields of which some rows are on other hosts."""

    sampled: Sampled
    memory: BatchMemory
    ids: dict[Ids, Tensor]  # on the host, by the tensor of ids on the device
    wanted: list[Wanted]  # the rows to read


class DeviceAhead(LookAhead):
    """Look-ahead for batches made on the device. Rows of other hosts are kept there, in windows.

    The ids of a batch are copied to the host once, to look up its rows. Rows that are cached or have arrived are
    gathered with all others, by numbers that follow the ids of all nodes.
    """

    least_group = 1  # rows must be on the device before a batch is assembled

    def __init__(self, maker: LocalMaker, loading: DeviceLoading, num_steps: int | None) -> None:
        store = maker.assembler.store
        assert isinstance(store.features, Sharded)
        shards = [one.part if isinstance(one, OnDisk) else one for one in store.features.shards]  # are placed
        window = 0 if store.budget is None else store.budget.window
        super().__init__(maker, store.features.over(shards), num_steps, window)
        self.loading, self._placed = loading, loading.assembler.placed

    def sample(self, share: StepShare) -> SampledAhead:
        pool, assembler = self.loading.pool, self.loading.assembler
        sampled, known, memory = self.loading.sampled(share)
        memory.drop_unused()  # the batch waits for its rows
        keys = [(ids_key(want.owner, want.ids), want.field) for want in assembler.wanted(sampled)]
        wanted = [(key, name) for key, name in keys if (key[0], name) in self._placed.partial]
        ids = {key: want.ids for (key, _), want in zip(keys, assembler.wanted(known), strict=True)}
        with pool.side_stream():
            copies = {key: HostCopy(ids[key]) for key in dict.fromkeys(key for key, _ in wanted)}
        late = f"the device has not copied ids within {pool.deadline:g} s; {BUSY}, or raise timeout"
        on_host = {key: one.wait(pool.deadline, late) for key, one in copies.items()}
        return SampledAhead(sampled, memory, on_host, [Wanted(key[0], name, on_host[key]) for key, name in wanted])

    def wanted(self, sampled: SampledAhead) -> list[Wanted]:
        return sampled.wanted

    def new_window(self, owner: TypeKey, fields: Collection[str]) -> Window:
        return DeviceWindow(self.loading.pool, self._placed, owner, fields)

    def fetch(self, batches: Sequence[SampledAhead], windows: dict[TypeKey, Any]) -> Mapping[int, Any]:
        """Fetch rows as LookAhead does. Return, by id() of each batch, the store with windows, and the lookups."""
        found = super().fetch(batches, windows)
        rows = {(owner, name): own for owner, one in windows.items() for name, own in one.segments.items()}
        placed = replace(self._placed, fields={**self._placed.fields, **rows})
        return {number: (placed, lookups) for number, (_, lookups) in found.items()}

    def finish(self, sampled: SampledAhead, found: Any) -> Arriving:
        placed, lookups = found
        pool, looked_up = self.loading.pool, dict[Ids, Tensor]()
        for one in lookups:  # caches first, then the window
            begins = [placed.schema.described(one.owner).count] * (len(one.cached) - 1)
            numbers = one.numbered([*begins, first_arrived(placed.schema, one.owner)])
            looked_up[ids_key(one.owner, one.ids)] = numbers
        staged = pool.stage({key: looked_up[ids_key(key[0], ids)] for key, ids in sampled.ids.items()})
        with pool.side_stream():
            on_device = staged.over(sampled.memory.copy(staged.block))
        return self.loading.assembled(sampled.sampled, sampled.memory, placed=placed, numbers=on_device)

    def make(self, share: StepShare) -> Arriving:
        """Return the batch of these seeds, made without a window: its rows come by way of the host."""
        return self.loading.make(share)

    @contextmanager
    def stages(self, order: Order, pipeline: Pipeline) -> Iterator[Stages[Arriving]]:
        self.loading.pool.use_current_stream()
        with self.loading.pool, super().stages(order, pipeline) as stages:
            yield replace(stages, hint=FASTER)


@dataclass(frozen=True, kw_only=True)
class DeviceAssembler(Assembler):
    """An assembler of batches on the device. It allocates the tensors of a batch with the allocator `memory`."""

    placed: PlacedStore
    memory: BatchMemory
    numbers: Mapping[Ids, Tensor] = field(default_factory=dict)  # in place of ids, for partially placed fields
    faults: Tensor  # [1] int64, not read: ids were checked when they were sampled
    degree_rows: Segments | None = None  # every node's in-degree

    def gather(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        outs, asked = [], []
        for owner, name, ids in wanted:
            field = self.placed.field(owner, name)
            outs.append(self.memory.empty((ids.numel(), *field.shape), DTYPES[field.dtype]))
            is_partial = (owner, name) in self.placed.partial
            asked.append(Wanted(owner, name, self.numbers.get(ids_key(owner, ids), ids) if is_partial else ids))
        return self.placed.gather(asked, self.faults, outs)

    def aggregate(self, wanted: Wanted, edges: InEdges) -> Tensor:
        """Gather rows, then return their aggregate, because no kernel aggregates rows of a placed store directly."""
        (rows,) = self.gather([wanted])
        assert self.reduce is not None
        return self.memory.copy(ops.aggregate(rows.to(torch.float32), edges, self.reduce))

    def in_degrees(self, relation: Relation, nodes: Tensor) -> Tensor:
        assert self.degree_rows is not None
        out = self.memory.empty((nodes.numel(),), torch.int64)
        return gather_rows(self.degree_rows, nodes, out, faults=self.faults)


def device_assembler(host: Assembler, placed: PlacedStore, memory: BatchMemory) -> DeviceAssembler:
    """Return an assembler of batches on the device, with the settings of the assembler `host`."""
    given = {**vars(host), "template": copy.copy(host.template).to(placed.device), "pinned": False}
    faults = torch.zeros(1, dtype=torch.int64, device=placed.device)
    rows = None
    if host.degrees:  # stored where the topology's offsets are: on the device, or in host memory
        (relation,), (node_type,) = host.store.schema.relations, host.store.schema.node_types
        degrees = host.store.in_degrees(relation.key, torch.arange(node_type.num_nodes))
        if placed.lists is not None and placed.lists[0].indptr.device == placed.device:
            degrees = degrees.to(placed.device)
        elif placed.device.type == "cuda":
            degrees = degrees.pin_memory()
        rows = Segments.of([(0, degrees)], placed.device)
    return DeviceAssembler(**given, placed=placed, memory=memory, faults=faults, degree_rows=rows)


@dataclass(frozen=True, kw_only=True)
class OnDevice(Deployment):
    """The deployment of a placed store, which makes batches on the device. `before` is the deployment it replaces."""

    placed: PlacedStore
    before: Deployment

    def producer(
        self, maker: LocalMaker, device: torch.device | None, look_ahead: int | None, deadline: float
    ) -> Maker | None:
        """Return the maker of batches on the device. If batches go elsewhere, ask `before` instead."""
        if not is_there(device, self.placed.device):
            return self.before.producer(maker, device, look_ahead, deadline)  # type: ignore[no-any-return]
        loading = DeviceLoading(maker, self.placed, deadline)
        if self.placed.partial:
            return DeviceAhead(maker, loading, look_ahead or self.look_ahead)
        if not self.placed.fields and isinstance(local_producer(maker, look_ahead or 1), LookAhead):
            raise ConfigError(
                "look_ahead is set, but features are not placed; give place features=, or leave look_ahead out"
            )
        return loading

    def traffic(self) -> dict[str, float]:
        return self.before.traffic()

    def close(self) -> None:
        """Close the placement, then the deployment `before`."""
        try:
            self.placed.lease.close()
        finally:
            self.before.close()
