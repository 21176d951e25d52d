"""Whole batches made on the device where their store is placed: sampled, relabelled, gathered and assembled there.

To begin a step enqueues its sampling and waits for nothing; to finish it reads the batch's sizes, the only wait, cuts
the batch out of its buffers and gathers its rows. The step after it is begun first, so that the device has work
meanwhile. Costs buffers for the most that a batch may hold, twice for every loop.
"""

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hoploom import ops
from hoploom.batch import Sampled
from hoploom.errors import ConfigError
from hoploom.gpu.batches.batch_memory import BatchMemory, Pool
from hoploom.gpu.batches.stages import DeviceSampling, HostSampling
from hoploom.gpu.place.placed_store import PlacedStore
from hoploom.load.assemble import Arriving, Assembler, is_there, note_edges
from hoploom.load.loader import local_producer
from hoploom.load.look_ahead import LookAhead
from hoploom.load.maker import LocalMaker, Maker
from hoploom.load.order import Order
from hoploom.load.pipeline import Pipeline, Stages
from hoploom.ops import InEdges
from hoploom.ops.kernels.gather import Segments, gather
from hoploom.schema import DTYPES, Owner, Relation
from hoploom.store import Store, Wanted
from hoploom.store.base import Deployment

BEGUN = 2  # steps that are begun and not cut out
FASTER = "make the transform faster, see what else keeps the device busy (nvidia-smi)"


class DeviceLoading(Maker):
    """Makes the batches of a loader whose store is placed, in two stages: waits for a size between them alone."""

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
        self._maker, self._assembler = maker, _assembler(maker.assembler, placed, BatchMemory(self.pool))

    @property
    def num_redone(self) -> int:
        """How many batches needed more capacity than there was, and were made again."""
        return self._sampling.num_redone

    @contextmanager
    def stages(self, order: Order, pipeline: Pipeline) -> Iterator[Stages[Arriving]]:
        """One batch is ready and the next one begun while one is used; the memory is left when all threads are gone."""
        if pipeline.byte_limit is not None:
            raise ConfigError("prefetch_bytes is set, but batches are made on the device; give prefetch_factor instead")
        window = pipeline.num_ahead + 2  # these, one that is being made, and the consumer's
        idle = threading.BoundedSemaphore(BEGUN if self.samples_on_device else window)  # what a batch is sampled in

        def begin(step: int) -> Any:
            if not idle.acquire(timeout=pipeline.deadline):
                raise TimeoutError(f"no batch before it was cut out within {pipeline.deadline:g} s")
            try:
                return self._sampling.begin(*order.step(step))
            except BaseException:
                idle.release()
                raise

        def finish(step: int, begun: Any, fetched: None) -> Arriving:
            memory = BatchMemory(self.pool)
            try:
                sampled = self._sampling.finish(begun, memory)
            finally:
                idle.release()
            made = self._assembled(sampled, memory)
            memory.settle(window)
            return made

        self.pool.add_consumer()
        with ExitStack() as running:
            running.push(self.pool.leave)
            yield Stages(finish, window, pipeline.num_ahead + 1, begin, hint=FASTER)

    def make(self, indices: Tensor, first: int, key: int) -> Arriving:
        """The batch of these seeds, at once; on the consumer's thread."""
        self.pool.add_consumer()
        memory = BatchMemory(self.pool)
        begun: Any = self._sampling.begin(indices, first, key)
        return self._assembled(self._sampling.finish(begun, memory), memory)

    def _assembled(self, sampled: Sampled, memory: BatchMemory) -> Arriving:
        note_edges(sampled, self._assembler.store.schema)
        with self.pool.working(alone=False):  # transforms may take long
            batch = self._maker.finish(sampled, replace(self._assembler, memory=memory))
            return Arriving(partial(self.pool.hand_over, self.pool.event(), batch, memory), batch)


@dataclass(frozen=True, kw_only=True)
class DeviceAssembler(Assembler):
    """Assembles on the device; what joins the batch is in its memory."""

    placed: PlacedStore
    memory: BatchMemory
    faults: Tensor  # [1] int64; ids were checked as they were sampled
    degree_rows: Segments | None = None  # every node's in-degree

    def _gather(self, sampled: Sampled) -> dict[tuple[Owner, str], Tensor]:
        wanted = self._wanted(sampled)
        return dict(zip(wanted, self._rows(list(wanted.values())), strict=True))

    def _rows(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        outs = []
        for owner, name, ids in wanted:
            field = self.placed.field(owner, name)
            outs.append(self.memory.empty((ids.numel(), *field.shape), DTYPES[field.dtype]))
        return self.placed.gather(wanted, outs=outs, faults=self.faults)

    def aggregate(self, wanted: Wanted, edges: InEdges) -> Tensor:
        """Their rows are gathered first: kernels read no tables while they add."""
        (rows,) = self._rows([wanted])
        assert self.reduce is not None
        return self.memory.copy(ops.aggregate(rows.to(torch.float32), edges, self.reduce))

    def in_degrees(self, relation: Relation, nodes: Tensor) -> Tensor:
        assert self.degree_rows is not None
        out = self.memory.empty((nodes.numel(),), torch.int64)
        return gather(self.degree_rows, nodes, out, faults=self.faults)


def _assembler(host: Assembler, placed: PlacedStore, memory: BatchMemory) -> DeviceAssembler:
    """The same for batches on the device."""
    given = {**vars(host), "template": copy.copy(host.template).to(placed.device), "pinned": False}
    faults = torch.zeros(1, dtype=torch.int64, device=placed.device)
    degrees = _degree_rows(host.store, placed) if host.degrees else None
    return DeviceAssembler(**given, placed=placed, memory=memory, faults=faults, degree_rows=degrees)


def _degree_rows(store: Store, placed: PlacedStore) -> Segments:
    """All in-degrees, found once on the host; where the topology's own pointers are, on the device or beside it."""
    (relation,) = store.schema.relations
    (node_type,) = store.schema.node_types
    degrees = store.in_degrees(relation.key, torch.arange(node_type.num_nodes))
    if placed.lists is not None and placed.lists[0].indptr.device == placed.device:
        degrees = degrees.to(placed.device)
    elif placed.device.type == "cuda":
        degrees = degrees.pin_memory()
    return Segments.of([(0, degrees)], placed.device)


@dataclass(frozen=True, kw_only=True)
class OnDevice(Deployment):
    """What a store had to do with other processes before it was placed, and where it is placed."""

    placed: PlacedStore
    before: Deployment

    @property
    def makes_batches(self) -> bool:
        return self.before.makes_batches

    def producer(
        self, maker: LocalMaker, device: torch.device | None, look_ahead: int | None, deadline: float
    ) -> Maker | None:
        """The device, unless batches go to another device or servers make them."""
        if self.makes_batches or not is_there(device, self.placed.device):
            return self.before.producer(maker, device, look_ahead, deadline)  # type: ignore[no-any-return]
        if isinstance(local_producer(maker, look_ahead or 1), LookAhead):
            raise ConfigError(
                "look_ahead is set, but batches are made on the device; leave it out, or give device='cpu'"
            )
        return DeviceLoading(maker, self.placed, deadline)

    def traffic(self) -> dict[str, float]:
        return self.before.traffic()

    def close(self, *, wait: bool) -> None:
        """Give back what is shared with other processes, then leave them."""
        try:
            self.placed.close(wait=wait)
        finally:
            self.before.close(wait=wait)
