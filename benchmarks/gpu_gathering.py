"""How fast does a GPU gather 400-byte rows by batches' own node ids, against its own copying, and over the bus?

Both sides move bytes one way and the other: a gathered row is read and written. Over the bus only reading counts. The
gathers are recorded as a CUDA graph: what it costs the host to start them is not asked here.
"""

import gpu
import graph
import torch
from gpu import Workload
from report import Report, Row, Target
from torch import Tensor

from hoploom import keys
from hoploom.batch import Seeds
from hoploom.gpu.cuda_graph import Recording, WorkStream
from hoploom.gpu.placement import place
from hoploom.sample import Workspace, sample_hops
from hoploom.sample.hops import make_sampling
from hoploom.store import Store, Wanted

UNIT = "GB/s"


def node_ids(store: Store, work: Workload) -> list[Tensor]:
    """The nodes of some batches."""
    workspace, sampling = Workspace(store.schema), make_sampling(store.schema, list(work.fanouts))
    ids = []
    for step in range(work.batches):
        seeds = Seeds((graph.seeds_at(store, step * work.batch_size, work.batch_size),), (None,))
        sampled = sample_hops(store.graph, workspace, seeds, sampling, keys.batch_key(0, 0, step))
        ids.append(sampled.nodes[0].clone())
    return ids


class Gathers:
    """The rows of all batches, into the same memory."""

    def __init__(self, store: Store, ids: list[Tensor]) -> None:
        assert store.placed is not None
        self._placed = store.placed
        device = store.placed.device
        self._owner = store.schema.node_types[0].name
        self._ids = [own.to(device) for own in ids]
        self._out = store.placed.empty(self._owner, "x", max(own.numel() for own in ids))
        self._faults = torch.zeros(1, dtype=torch.int64, device=device)
        self.num_bytes = sum(own.numel() for own in ids) * self._out[0].numel() * self._out.element_size()

    def __call__(self) -> None:
        for own in self._ids:
            wanted = [Wanted(self._owner, "x", own)]
            self._placed.gather(wanted, self._faults, [self._out[: own.numel()]])


def copying(size: int, here: torch.device, *, over_the_bus: bool) -> "Copies":
    """Copies within device memory, or from pinned host memory to it."""
    pinned = over_the_bus and here.type == "cuda"
    source = torch.ones(size, dtype=torch.uint8, device="cpu" if over_the_bus else here, pin_memory=pinned)
    return Copies(source, torch.empty(size, dtype=torch.uint8, device=here))


class Copies:
    """As many bytes that lie together."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source, self._target = source, target

    def __call__(self) -> None:
        self._target.copy_(self._source, non_blocking=True)


def measure(work: Workload) -> Report:
    """Each gather beside the copy that it is measured by."""
    store, here = gpu.open_store(work), gpu.device()
    ids = node_ids(store, work)
    rows = []
    for features, what, share, over_the_bus in (
        (str(here), "device memory", 0.6, False),
        ("host", "pinned host memory", 0.8, True),
        ("20%", "a fifth from device memory, the rest pinned", None, True),
    ):
        with place(store, features=features, device=here) as placed:
            gathers = Gathers(placed, ids)
            copies = copying(work.copied, here, over_the_bus=over_the_bus)
            stream = WorkStream(here, own_stream=False)
            taken = [gpu.repeated(side, here, work) for side in (Recording(gathers, stream), copies)]
            stream.close()
        ways = 1 if over_the_bus else 2
        amounts = gathers.num_bytes * ways, work.copied * ways
        ours, theirs = (gpu.rate(size / 1e9, one) for size, one in zip(amounts, taken, strict=True))
        baseline = "copying from pinned memory" if over_the_bus else "copying within the device"
        target = None if share is None else Target("ratio", ">=", share)
        question = f"gathering {store.schema.node_types[0].fields['x'].row_bytes}-byte rows: {what}"
        rows.append(gpu.found(Row(question, UNIT, ours, baseline, theirs, ours.median / theirs.median, target)))
    return gpu.made(rows, [f"gathered at a time: {ids[0].numel():,} rows"])


if __name__ == "__main__":
    gpu.main(measure)
