"""What the gpu benchmarks share: the workload, the device, and how time on it is taken.

Without a GPU, and with --tiny, a graph of 2,000 nodes takes the workload's place: that tries the scripts out, in
Triton's interpreter where there is no GPU, and measures nothing.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch

if not torch.cuda.is_available():  # read by Triton when it is imported, which other imports may do
    os.environ.setdefault("TRITON_INTERPRET", "1")

import graph
import report
from graph import Shape
from measure import Spread, spread_of
from report import Report, Row

import hoploom
from hoploom.store import Store

FOUND = "found: "  # before each row on stderr, so that what is stopped has said what it found
ABSENT = "the gpu benchmarks: torch sees no CUDA device"


@dataclass(frozen=True)
class Workload:
    """What is measured."""

    shape: Shape
    fanouts: tuple[int, ...]
    batch_size: int
    num_steps: int
    hidden: int
    sampled: int  # seeds of a batch that is only sampled
    copied: int  # bytes, to learn a bandwidth
    batches: int  # that one repetition of sampling or gathering goes through
    repetitions: int
    warmups: int


FULL = Workload(graph.MAIN, (15, 10, 5), 1024, 192, 256, 8192, 2 << 30, batches=8, repetitions=7, warmups=3)
TINY = Workload(Shape(2000, 8, 12), (2, 2, 1), 4, 4, 8, 8, 1 << 16, batches=2, repetitions=1, warmups=1)


def device() -> torch.device:
    """The GPU, or the CPU with kernels in the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def workload(tiny: bool) -> Workload:
    """The real one needs a GPU."""
    return TINY if tiny else FULL


def open_store(work: Workload) -> Store:
    """The graph of a workload, made first if it is not there yet."""
    store = hoploom.open(graph.path_of(work.shape, tiny=False))
    graph.touch(store)
    return store


def wait(on: torch.device) -> None:
    """Until the device is idle."""
    if on.type == "cuda":
        torch.cuda.synchronize(on)


def seconds(run: Callable[[], object], on: torch.device) -> float:
    """What the device takes from the first kernel of a run to the end of the last one; gaps between them count."""
    wait(on)
    if on.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def repeated(run: Callable[[], object], on: torch.device, work: Workload) -> Spread:
    """Seconds of one run."""
    for _ in range(work.warmups):
        run()
    return spread_of(seconds(run, on) for _ in range(work.repetitions))


def rate(amount: float, spread: Spread) -> Spread:
    """So much in so many seconds."""
    return Spread(amount / spread.median, amount / spread.high, amount / spread.low, spread.count)


def machine() -> list[str]:
    """The GPU, one line; nothing of it is set."""
    if not torch.cuda.is_available():
        return ["no GPU: kernels ran in Triton's interpreter"]
    properties = torch.cuda.get_device_properties(0)
    memory = properties.total_memory / 2**30
    return [f"GPU: {properties.name}, {memory:.0f} GiB, CUDA {torch.version.cuda}"]


def found(row: Row) -> Row:
    """A row, said at once."""
    print(FOUND + json.dumps(asdict(row)), file=sys.stderr, flush=True)
    return row


def made(rows: Iterable[Row], notes: Iterable[str] = ()) -> Report:
    """A report that names the GPU."""
    return Report(list(rows), [*machine(), *notes])


def main(measure: Callable[[Workload], Report]) -> None:
    """Run a script on all cores; without a GPU only --tiny does anything."""

    def chosen(tiny: bool) -> Report:
        if not tiny and not torch.cuda.is_available():
            return Report([], [], [ABSENT])
        return measure(workload(tiny))

    report.main(chosen, all_cores=True)
