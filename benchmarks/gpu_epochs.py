"""How long does an epoch take on a GPU, sampling to update, kernel by kernel and as graphs; and with PyG's layers?

GraphSAGE-256 x 3, topology and features in device memory. Ours runs through `fit`; the first epochs, which compile and
record, are left out. Beside it PyG's own layers on the same batches, made by our loader on CPU threads and moved.
"""

import time
from itertools import pairwise

import gpu
from gpu import Workload
from gpu_training import CPU_THREADS, Epochs, Precision, end_times
from measure import Spread, spread_of
from report import Report, Row, Target

from hoploom.gpu.placement import place

SIDES: tuple[tuple[Precision, bool, float], ...] = (
    ("fp32", True, 0.4),
    ("fp32", False, 1.0),
    ("bf16", True, 0.4),
    ("bf16", False, 1.0),
)  # precision, as graphs, seconds to stay below
BASELINE = f"PyG's GraphSAGE in fp32, batches from {CPU_THREADS} CPU threads"


def measure(work: Workload) -> Report:
    """One side after the other: nothing else runs on the device."""
    store, here = gpu.open_store(work), gpu.device()
    rows, notes = [], []
    with place(store, topology=str(here), features=str(here)) as placed:
        epochs = Epochs(store, placed, work, work.num_steps)
        theirs, loss = _peer(epochs)
        notes.append(f"PyG's layers: loss {loss:.5f} in epoch {work.warmups + work.repetitions}")
        for precision, whole, limit in SIDES:
            ours, said = _ours(epochs, precision, whole=whole)
            how = "as graphs" if whole else "kernel by kernel"
            question = f"an epoch of {work.num_steps} steps of {work.batch_size} seeds, {precision}, {how}"
            ratio = theirs.median / ours.median
            rows.append(gpu.found(Row(question, "s", ours, BASELINE, theirs, ratio, Target("ours", "<", limit))))
            notes.append(f"{precision}, {how}: {said}")
    return gpu.made(rows, notes)


def _ours(epochs: Epochs, precision: Precision, *, whole: bool) -> tuple[Spread, str]:
    work = epochs.work
    count = work.warmups + work.repetitions
    ends, outcome = end_times(lambda at_end: epochs.run(count, precision, whole=whole, at_end=at_end))
    seconds = [end - begin for begin, end in pairwise(ends)][work.warmups - 1 :]
    said = f"loss {outcome.history[-1]['train_loss']:.5f} in epoch {count}"
    return spread_of(seconds), said if outcome.whole_steps is None else f"{said}; {outcome.whole_steps}"


def _peer(epochs: Epochs) -> tuple[Spread, float]:
    epoch, work, seconds = epochs.peer(), epochs.work, []
    loss = 0.0
    for _ in range(work.warmups + work.repetitions):
        began = time.perf_counter()
        loss = float(epoch())  # waits for the device
        seconds.append(time.perf_counter() - began)
    return spread_of(seconds[work.warmups :]), loss


if __name__ == "__main__":
    gpu.main(measure)
