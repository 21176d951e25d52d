"""What a benchmark says: one row per question, the machine and the commit. A missed target says "no"."""

import argparse
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from measure import Spread

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
CORES = 2  # what every figure is for
HEADINGS = ("question", "unit", "ours", "baseline", "its figure", "ratio", "target", "met")


@dataclass(frozen=True)
class Target:
    """What a row has to reach."""

    of: Literal["ours", "ratio"]
    sign: Literal[">=", "<"]
    limit: float

    def is_met(self, ours: float, ratio: float | None) -> bool | None:
        """None: there was nothing to compare with."""
        value = ours if self.of == "ours" else ratio
        if value is None:
            return None
        return value >= self.limit if self.sign == ">=" else value < self.limit

    def __str__(self) -> str:
        return f"{self.of} {self.sign} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """The answer to one question."""

    question: str
    unit: str
    ours: Spread
    baseline: str
    theirs: Spread | None = None
    ratio: float | None = None
    target: Target | None = None

    @property
    def met(self) -> str:
        is_met = None if self.target is None else self.target.is_met(self.ours.median, self.ratio)
        return "-" if is_met is None else "yes" if is_met else "no"

    def cells(self) -> tuple[str, ...]:
        """One text per heading."""
        theirs = "absent" if self.theirs is None else shown(self.theirs)
        ratio = "-" if self.ratio is None else f"{self.ratio:.3g}"
        target = "-" if self.target is None else str(self.target)
        return (self.question, self.unit, shown(self.ours), self.baseline, theirs, ratio, target, self.met)


@dataclass(frozen=True)
class Report:
    """All that one script found."""

    rows: Sequence[Row]
    notes: Sequence[str] = ()
    absent: Sequence[str] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def from_json(text: str) -> Report:
    """The report that another process printed."""
    found = json.loads(text)
    return Report([_row(**row) for row in found["rows"]], found["notes"], found["absent"])


def _row(**cells: Any) -> Row:
    for name, kind in (("ours", Spread), ("theirs", Spread), ("target", Target)):
        if cells[name] is not None:
            cells[name] = kind(**cells[name])
    return Row(**cells)


def shown(spread: Spread) -> str:
    """Median with the spread: `52.1 (50.3 to 53.0)`; a single figure alone."""
    if spread.low == spread.high:
        return _figure(spread.median)
    return f"{_figure(spread.median)} ({_figure(spread.low)} to {_figure(spread.high)})"


def _figure(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown, padded so that a terminal shows them well too."""
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (HEADINGS, rule, *lines[1:])
    )


def surroundings() -> list[str]:
    """Machine, commit, versions and load, one line each; asked for before measuring."""
    model = _field("/proc/cpuinfo", "model name")
    memory = int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20
    return [
        f"machine: {model}, {os.cpu_count()} cores ({len(os.sched_getaffinity(0))} used), {memory:.0f} GiB",
        f"commit: {commit()}",
        f"versions: Python {platform.python_version()}, torch {torch.__version__}",
        f"load before: {os.getloadavg()[0]:.2f}",
    ]


def commit() -> str:
    """The short hash; "dirty" if the working tree differs from it in more than the results."""
    found = find_spec("hoploom")
    if found is None or found.origin is None or not Path(found.origin).is_relative_to(ROOT / "src"):
        return "unknown: the hoploom measured is not this working tree"
    head = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}", ":!benchmarks/results")
    return f"{head} dirty" if changed else head


def _git(*words: str) -> str:
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return f"unknown {name}"


def notes_of(report: Report) -> list[str]:
    """What stands below the table."""
    return [*report.notes, *(f"absent: {name}" for name in report.absent)]


def use_two_cores() -> None:
    """Confine this process, and those it starts, to what the targets are for."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    torch.set_num_threads(CORES)


def main(measure: Callable[[bool], Report], *, all_cores: bool = False) -> None:
    """Run one script's measure(tiny) from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="a hundredth of the graph, to try the script out")
    parser.add_argument("--json", action="store_true", help="print what run.py reads")
    arguments = parser.parse_args()
    if not all_cores:
        use_two_cores()
    header = surroundings()
    report = measure(arguments.tiny)
    if arguments.json:
        print(report.to_json())
        return
    print("\n".join([*header, "", table(report.rows), ""]))
    print("\n".join(notes_of(report)))
    if arguments.tiny:
        print("tiny graph: the figures mean nothing")
