"""How long does opening a store take, and how much memory does a second process add that iterates it?

Asked of fresh processes, one at a time, while this one has every page of the store mapped. Opening is compared with
mapping the same files by numpy.load; memory with what the imports alone take in the same process. The target is for
batches of 64 seeds and no workers, because batches under way are the consumer's: the other rows show what those add.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import graph
import report
from measure import REPETITIONS, spread_of, take_turns
from report import Report, Row, Target

CHILD = Path(__file__).with_name("second_process.py")
FEW_SEEDS = 64
MB = 1e6

Answers = Sequence[dict[str, float]]  # of one process each


def measure(tiny: bool) -> Report:
    """Fresh processes beside this one, which keeps the store mapped."""
    store = graph.open_warm(graph.MAIN, tiny)
    folder = str(graph.path_of(graph.MAIN, tiny))
    rows, notes = [_opening(folder)], []
    many_seeds = graph.NUM_SEEDS // 100 if tiny else graph.NUM_SEEDS
    for num_seeds, num_workers in ((FEW_SEEDS, 0), (FEW_SEEDS, 2), (many_seeds, 2)):
        answers = [ask("iterate", folder, num_seeds, num_workers) for _ in range(REPETITIONS)]
        what = f"{num_seeds} seeds, {num_workers} workers"
        target = None if num_workers else Target("ours", "<", 100)
        rows += [_memory(answers, what, beyond, target) for beyond in ("torch", "pyg")]
        notes.append(_note(answers, what))
    assert store.parts, "still mapped here"
    return Report(rows, notes)


def _opening(folder: str) -> Row:
    sides = {what: lambda _, what=what: ask(what, folder)["seconds"] * 1e3 for what in ("open", "map")}
    spreads = take_turns(sides)
    opened, mapped = spreads["open"], spreads["map"]
    target = Target("ours", "<", 300)
    return Row("opening the store", "ms", opened, "numpy.load(mmap)", mapped, opened.median / mapped.median, target)


def ask(what: str, folder: str, *counts: int) -> dict[str, float]:
    """What a fresh process says."""
    command = [sys.executable, str(CHILD), what, folder, *map(str, counts)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=600)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def _memory(answers: Answers, what: str, beyond: str, target: Target | None) -> Row:
    added = spread_of((held["iterated"] - held[beyond]) / MB for held in answers)
    imported = spread_of(held[beyond] / MB for held in answers)
    imports = {"torch": "import torch", "pyg": "import torch, PyG"}[beyond]
    question = f"2nd process adds, {what}"
    imports = f"beyond {imports}"
    return Row(question, "MB private", added, imports, imported, added.median / imported.median, target)


def _note(answers: Answers, what: str) -> str:
    batch, buffers, library = (
        median(values) / MB
        for values in (
            [held["batch"] for held in answers],
            [held["buffers"] for held in answers],
            [held["hoploom"] - held["pyg"] for held in answers],
        )
    )
    return f"{what}: one batch {batch:.1f} MB, all batch buffers {buffers:.1f} MB, import hoploom {library:.1f} MB"


if __name__ == "__main__":
    report.main(measure)
