"""How many picks a second does a GPU make and relabel, from its own memory and over the bus?

A batch is sampled by the loop that loaders use: kernels started one by one, and the same recorded as a CUDA graph.
"""

import sys
from collections.abc import Callable
from functools import reduce

import gpu
import graph
import torch
from gpu import Workload
from report import Report, Row, Target

import hoploom
from hoploom import keys
from hoploom.batch import Seeds
from hoploom.gpu.capacity import HopPlan, first_capacity, plan_hops, used_capacity
from hoploom.gpu.cuda_graph import WARM_UP, Recording, WorkStream
from hoploom.gpu.device_hops import DeviceBuffers, fault_of, make_buffers, make_maps, sample_on_device
from hoploom.sample.hops import make_sampling
from hoploom.store import Store

UNIT = "M picks/s"
TARGETS = {"cuda": Target("ours", ">=", 1000), "host": Target("ours", ">=", 300)}
PLACES = {"cuda": "from device memory", "host": "over the bus"}


class Batches:
    """The same few batches, sampled into one set of buffers."""

    def __init__(self, store: Store, work: Workload) -> None:
        placed = store.placed
        assert placed is not None
        assert placed.lists is not None
        self.work = work
        self.lists, self.device = placed.lists, placed.device
        sampling = make_sampling(store.schema, list(work.fanouts))
        self.plan: HopPlan = plan_hops(store.schema, sampling, [0])
        self.seeds = [graph.seeds_at(store, step * work.sampled, work.sampled) for step in range(work.batches)]
        on_device = [seeds.to(self.device) for seeds in self.seeds]
        self._there = torch.stack(on_device)
        bits = [keys.batch_key(0, 0, step) for step in range(self.work.batches)]
        self._keys = torch.tensor([key - 2**64 if key >= 2**63 else key for key in bits]).to(self.device)
        self._own, self._key = self._there[0].clone(), self._keys[0].clone()
        self.maps = make_maps(self.plan, self.device)
        self.into = self._fitted(work.sampled)
        self.picks = sum(self._sizes_of(step)[0] for step in range(self.work.batches))
        self._stream = WorkStream(self.device, own_stream=False)
        self._recording = Recording(self.sample, self._stream)

    def _fitted(self, num_seeds: int) -> DeviceBuffers:
        """Buffers for what the batches take and a tenth more, as recorded steps have them."""
        most = first_capacity(self.plan, [num_seeds], sys.maxsize)
        self.into = make_buffers(self.plan, most, self.device)
        seen = [used_capacity(self.plan, self._sizes_of(step)[1]) for step in range(self.work.batches)]
        greatest = reduce(lambda room, other: room.combine(other, max), seen)
        assert most.holds(greatest), f"{num_seeds} seeds take {greatest}, and there is room for {most}"
        fitted = greatest.combine(most, lambda size, limit: min(size + size // 10, limit))
        return make_buffers(self.plan, fitted, self.device)

    def _sizes_of(self, step: int) -> tuple[int, list[int]]:
        self.choose(step)
        self.sample()
        sizes: list[int] = self.into.totals[:, 0].tolist()
        error = fault_of(sizes)
        if error is not None:
            raise error
        return sum(sizes[hops[-1][1]] for hops in self.plan.picks), sizes

    def choose(self, step: int) -> None:
        """The next batch to sample."""
        self._own.copy_(self._there[step])
        self._key.copy_(self._keys[step])

    def sample(self) -> None:
        """The batch that is chosen; waits for nothing."""
        seeds = Seeds((self._own,), (None,))
        sample_on_device(self.lists, self.maps, seeds, self._key, self.into)

    def record(self) -> None:
        """From now on `replay` replays."""
        for _ in range(WARM_UP + 1):
            self._recording()

    def all_by(self, one: Callable[[], None]) -> Callable[[], None]:
        """A repetition."""

        def run() -> None:
            for step in range(self.work.batches):
                self.choose(step)
                one()

        return run

    def replay(self) -> None:
        self._recording()

    def close(self) -> None:
        """Drop the recording, before what it reads is given back."""
        self._stream.close()


def measure(work: Workload) -> Report:
    """Both placements one after the other; nothing else runs on the device."""
    store = gpu.open_store(work)
    here = gpu.device()
    rows, notes = [], []
    for place, where in PLACES.items():
        with hoploom.place(store, topology=place if place == "host" else str(here), device=here) as placed:
            batches = Batches(placed, work)
            batches.record()
            question = f"sampling and relabelling {where}, batches of {work.sampled}"
            for how, one in (("kernel by kernel", batches.sample), ("as a graph", batches.replay)):
                spread = gpu.repeated(batches.all_by(one), here, work)
                ours = gpu.rate(batches.picks / 1e6, spread)
                rows.append(gpu.found(Row(f"{question}, {how}", UNIT, ours, "-", None, None, TARGETS[place])))
            batches.close()
        notes = [f"one batch of {work.sampled} seeds: {batches.picks // work.batches:,} picks"]
    return gpu.made(rows, notes)


if __name__ == "__main__":
    gpu.main(measure)
