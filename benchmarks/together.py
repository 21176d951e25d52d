"""What do calls that ranks make together cost, against another checkout? Two ranks on this host, in turns.

python benchmarks/together.py OTHER_PYTHON
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import hoploom

ROUNDS, REPEATS = 3, 7
WIDTHS = {"8 k": 64, "10 M": 2236}  # of two linear layers: how many parameters they have


def measure() -> None:
    """In one of the ranks: milliseconds of each call."""
    with hoploom.init(timeout=60) as context:
        numbers = torch.ones(4)
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "sum of an int": (lambda: context.sum(3), 200),
            "barrier": (context.barrier, 200),
            "sum of 4 floats": (lambda: context.sum(numbers), 200),
        }
        for name, width in WIDTHS.items():
            torch.manual_seed(0)
            model = context.wrap(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)))
            calls[f"step of {name} parameters"] = (_step(model, torch.randn(8, width)), 50 if width < 100 else 5)
        found = {name: [_timed(call, times) for _ in range(REPEATS + 1)][1:] for name, (call, times) in calls.items()}
        if context.is_main:
            print(json.dumps(found))


def _step(model: nn.Module, rows: torch.Tensor) -> Callable[[], object]:
    return lambda: model(rows).sum().backward()


def _timed(call: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times * 1e3


def main(other: str) -> None:
    found: dict[str, dict[str, list[float]]] = {sys.executable: {}, other: {}}
    for _ in range(ROUNDS):
        for python in found:
            command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
            printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
            for name, times in json.loads(printed).items():
                found[python].setdefault(name, []).extend(times)
    print("| call | ours, ms | theirs, ms | ratio |\n| --- | --- | --- | --- |")
    for name, ours in found[sys.executable].items():
        theirs = found[other][name]
        medians = statistics.median(ours), statistics.median(theirs)
        spans = [f"{m:.3g} ({min(t):.3g} to {max(t):.3g})" for m, t in zip(medians, (ours, theirs), strict=True)]
        print(f"| {name} | {spans[0]} | {spans[1]} | {medians[0] / medians[1]:.2f} |")


if __name__ == "__main__":
    main(sys.argv[1]) if len(sys.argv) > 1 else measure()
