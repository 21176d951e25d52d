"""Where does a step's time on a GPU go? Kernels and gaps, from torch's profiler, kernel by kernel and as graphs.

The profiler makes steps longer: shares are to be read here, times in gpu_epochs.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import gpu
import torch
from gpu import Workload
from gpu_training import Epochs
from measure import Spread
from report import Report, Row
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hoploom.gpu.placement import place

STEPS = 16
SHOWN = 15  # kernels, those that take the longest
LONGEST = 70  # characters of a kernel's name


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel, or a copy."""

    name: str
    begin: float  # microseconds
    end: float


def kernels_of(events: Iterable[Any], on: torch.device) -> list[Kernel]:
    """What ran on the device; on the CPU torch's own operations, the outermost."""
    kind = DeviceType.CUDA if on.type == "cuda" else DeviceType.CPU
    chosen = (e for e in events if e.device_type == kind and not getattr(e, "is_user_annotation", False))
    if on.type != "cuda":
        chosen = (event for event in chosen if event.cpu_parent is None)
    return [Kernel(event.name, event.time_range.start, event.time_range.end) for event in chosen]


def busy(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which at least one of them ran."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin):
        total += max(0.0, kernel.end - max(kernel.begin, until))
        until = max(until, kernel.end)
    return total


def table(kernels: list[Kernel], num_steps: int) -> tuple[float, float, list[str]]:
    """Microseconds of a step and of its gaps, and the lines of a table."""
    spent: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        spent[kernel.name].append(kernel.end - kernel.begin)
    window = max(kernel.end for kernel in kernels) - min(kernel.begin for kernel in kernels)
    gaps = window - busy(kernels)
    together = sum(map(sum, spent.values()))
    ranked = sorted(spent.items(), key=lambda item: -sum(item[1]))
    lines = ["| kernel | runs/step | us/step | share |", "|---|---|---|---|"]
    rest = [time for _, times in ranked[SHOWN:] for time in times]
    for name, times in [*ranked[:SHOWN], (f"{len(ranked[SHOWN:])} others", rest)]:
        shown = name.replace("|", "/")[:LONGEST]
        runs, each = len(times) / num_steps, sum(times) / num_steps
        lines.append(f"| {shown} | {runs:.1f} | {each:.1f} | {sum(times) / window:.1%} |")
    lines.append(f"| side by side with another | | {(together - busy(kernels)) / num_steps:.1f} | |")
    lines.append(f"| gaps: nothing runs | | {gaps / num_steps:.1f} | {gaps / window:.1%} |")
    return window / num_steps, gaps / num_steps, lines


class LastEpoch:
    """Profiles the last epoch of a run."""

    def __init__(self, epochs: int, on: torch.device) -> None:
        self._ended, self._epochs, self._device = 0, epochs, on
        activity = ProfilerActivity.CUDA if on.type == "cuda" else ProfilerActivity.CPU
        self._profiler = profile(activities=[activity])
        self.kernels: list[Kernel] = []

    def at_end(self) -> None:
        """An epoch has ended."""
        self._ended += 1
        gpu.wait(self._device)
        if self._ended == self._epochs - 1:
            self._profiler.start()
        elif self._ended == self._epochs:
            self._profiler.stop()
            self.kernels = kernels_of(self._profiler.events() or [], self._device)


def measure(work: Workload) -> Report:
    """A few steps of each side."""
    store, here = gpu.open_store(work), gpu.device()
    rows, notes = [], []
    num_steps = min(STEPS, work.num_steps)
    with place(store, topology=str(here), features=str(here)) as placed:
        epochs = Epochs(store, placed, work, num_steps)
        for how, whole in (("kernel by kernel", False), ("as graphs", True)):
            count = work.warmups + 2
            last = LastEpoch(count, here)
            epochs.run(count, "fp32", whole=whole, at_end=last.at_end)
            step, gap, lines = table(last.kernels, num_steps)
            share = 100 * gap / step
            rows.append(gpu.found(Row(f"a profiled step {how}", "us", Spread(step, step, step, 1), "-")))
            rows.append(gpu.found(Row(f"of which nothing runs, {how}", "%", Spread(share, share, share, 1), "-")))
            notes += [f"where a step's time goes, {how}:", *lines]
    return gpu.made(rows, notes)


if __name__ == "__main__":
    gpu.main(measure)
