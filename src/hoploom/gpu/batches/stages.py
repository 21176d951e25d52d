"""The two stages of sampling for batches that are assembled on a device: there, or here and then moved."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hoploom.batch import Sampled, Seeds
from hoploom.gpu.batches.batch_memory import BatchMemory, Pool, Reading, Staged
from hoploom.gpu.batches.capacity import LARGE, MARGIN, Capacity, HopPlan, first_capacity, grown, plan_hops, used
from hoploom.gpu.batches.device_hops import (
    DeviceBuffers,
    fault_of,
    make_buffers,
    make_maps,
    sample_on_device,
    sampled_of,
)
from hoploom.gpu.place.placed_store import PlacedStore
from hoploom.load.maker import LocalMaker
from hoploom.ops.kernels.relabel import DeviceNodeMap


class HostSampling:
    """Samples on the host: modes that the device does not know, or a topology that is not placed."""

    num_redone = 0

    def __init__(self, maker: LocalMaker, pool: Pool) -> None:
        self._maker, self._pool = maker, pool

    def begin(self, indices: Tensor, first: int, key: int) -> Staged:
        """Sample."""
        return self._pool.staged(self._maker.sample(indices, first, key))

    def finish(self, begun: Staged, memory: BatchMemory) -> Sampled:
        """What was sampled goes over in one copy."""
        with self._pool.working():
            return begun.over(memory.copy(begun.block))  # type: ignore[no-any-return]


class Buffers(NamedTuple):
    """What one batch at a time is sampled in."""

    into: DeviceBuffers
    maps: Sequence[DeviceNodeMap]


class Enqueued(NamedTuple):
    """A batch whose sizes are on their way."""

    seeds: Seeds
    staged: Staged  # the key and the seeds
    block: Tensor  # the same on the device
    buffers: Buffers
    reading: Reading

    def sizes(self) -> list[int]:
        """The totals by slot. Waits for the device."""
        return [size for size, _ in self.reading.wait()]


class DeviceSampling:
    """Samples on the device, with a capacity that is learned: a batch that needs more is made again."""

    def __init__(self, maker: LocalMaker, placed: PlacedStore, pool: Pool, large: int = LARGE) -> None:
        self.num_redone = 0
        self._maker, self._placed, self._pool = maker, placed, pool
        self._plan: HopPlan | None = None
        self._capacity: Capacity | None = None
        self.large = large  # picks that are held from the first batch on
        self._idle: deque[Buffers] = deque()
        self._lock = threading.Lock()

    def begin(self, indices: Tensor, first: int, key: int) -> Enqueued:
        """Seeds and key go over in one copy; the kernels of all hops follow."""
        seeds = self._maker.start(indices, first, key)
        self._grow(seeds)
        staged = self._pool.staged((torch.tensor(key - (1 << 64) if key >> 63 else key), seeds))
        with self._pool.working():
            block = staged.block.to(self._pool.device, non_blocking=True)
            with self._lock:
                buffers = self._idle.pop() if self._idle else None
            return self._run(seeds, staged, block, buffers)

    def _run(self, seeds: Seeds, staged: Staged, block: Tensor, idle: Buffers | None) -> Enqueued:
        """Sample in buffers with the capacity of today: in these, or in larger ones with the same maps."""
        plan, capacity, device = self._plan, self._capacity, self._pool.device
        lists = self._placed.lists  # an error once it is closed
        assert plan is not None
        assert capacity is not None
        assert lists is not None
        if idle is None or idle.into.capacity != capacity:
            maps = make_maps(plan, device) if idle is None else idle.maps
            idle = Buffers(make_buffers(plan, capacity, device), maps)
        key, there = staged.over(block)
        sample_on_device(plan, lists, idle.maps, there, key, idle.into)
        return Enqueued(seeds, staged, block, idle, self._pool.reading(idle.into.totals))

    def finish(self, begun: Enqueued, memory: BatchMemory) -> Sampled:
        """Read the sizes, make the batch again if it did not fit, and cut it out."""
        plan, seeds = self._plan, begun.seeds
        assert plan is not None
        sizes = begun.sizes()
        while not begun.buffers.into.capacity.holds(seen := used(plan, sizes)):
            begun = self._again(begun, seen)
            sizes = begun.sizes()
        if (fault := fault_of(sizes)) is not None:
            raise fault
        with self._pool.working():
            sampled = sampled_of(plan, begun.buffers.into, sizes, seeds.first_tree, memory.copy)
            for trees in sampled.trees or ():
                if seeds.link_of is not None:
                    trees.copy_(seeds.link_of.to(trees.device)[trees])
            _, there = begun.staged.over(memory.copy(begun.block))
        self._idle.append(begun.buffers)  # used again on the same stream, after it was cut
        sampled.fields = there.fields
        return sampled

    def _again(self, begun: Enqueued, seen: Capacity) -> Enqueued:
        with self._lock:
            assert self._capacity is not None
            self._capacity = grown(self._capacity, seen)
            self.num_redone += 1
        with self._pool.working():
            return self._run(begun.seeds, begun.staged, begun.block, begun.buffers)

    def _grow(self, seeds: Seeds) -> None:
        """Have capacity for so many seeds: their number is known beforehand."""
        num_seeds = [0 if nodes is None else nodes.numel() for nodes in seeds.nodes]
        with self._lock:
            if self._plan is None:
                types = [index for index, nodes in enumerate(seeds.nodes) if nodes is not None]
                self._plan = plan_hops(self._maker.assembler.store.schema, self._maker.sampler.sampling, types)
            if self._capacity is None:
                self._capacity = first_capacity(self._plan, num_seeds, self.large)
            elif any(map(int.__gt__, num_seeds, self._capacity.rows[0])):
                more = first_capacity(self._plan, [count + count // MARGIN for count in num_seeds], self.large)
                self._capacity = self._capacity.joined(more, max)
