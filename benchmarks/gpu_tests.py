"""Runs test files for benchmarks/gpu_check.py, each in a process of its own, and says what every test came to.

One test must not cost the others: one that hangs is stopped at its own limit, and its process with it; one that leaves
its process without a device ends it; the rest of the file then goes on in a fresh one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from report import ROOT

NATIVE = tuple(
    f"test_{kind}" for kind in ("kernels", "place", "on_device", "device_loader", "whole_step", "padded", "peer")
)
ELSEWHERE = ("test_kernels_compile",)  # compiles for GPUs that are not there
SLOW = ("test_whole_step_ranks",)  # marked slow for what the interpreter takes
FILLING = ("test_place_gpu",)  # takes all of a device's memory: nothing may run beside it
LONGEST = 330.0  # seconds a file may take
TEST_LONGEST = 150  # seconds a test may take that does not say otherwise; kernels may have to be compiled
SLOWEST = 3  # tests of a file that are named with their seconds
KEPT = 3000  # characters of what a process said
ENVIRONMENT = {
    **os.environ,
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # what the machine has may not go with our pytest
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "OMP_NUM_THREADS": "2",  # many processes share the cores
}


class Files(NamedTuple):
    """Files of tests that concern the device, in the order in which they are to run."""

    filling: list[Path]  # with nothing beside them
    others: list[Path]


def files_to_run() -> Files:
    """What is marked gpu, which nothing but a GPU can show, comes first; of the others the longest."""
    texts = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    marked = [path for path, text in texts.items() if "pytest.mark.gpu" in text]
    native = {path for path, text in texts.items() if path.stem.startswith(NATIVE) or "device: torch.device" in text}
    ranked = sorted(native.difference(marked), key=lambda path: len(texts[path]), reverse=True)
    chosen = [path for path in (*marked, *ranked) if path.stem not in ELSEWHERE]
    filling = [path for path in chosen if path.stem in FILLING]
    return Files(filling, [path for path in chosen if path not in filling])


class Found(NamedTuple):
    """What is known of a file's tests."""

    ended: dict[str, dict[str, Any]]  # by test
    begun: set[str]  # and not ended
    is_through: bool


def found_in(lines: Path) -> Found:
    """What the processes of a file have written."""
    ended: dict[str, dict[str, Any]] = {}
    begun, is_through = set(), False
    for line in lines.read_text().splitlines() if lines.exists() else []:
        entry = json.loads(line)
        is_through |= "through" in entry
        if "outcome" in entry:
            ended[entry["test"]] = entry
        elif "test" in entry:
            begun.add(entry["test"])
    return Found(ended, begun - set(ended), is_through)


def run_file(path: Path, seconds: float, work: Path) -> dict[str, Any]:
    """What the tests of a file came to, mostly without those marked slow; in as many processes as that takes."""
    began, lines = time.monotonic(), work / f"{path.stem}.jsonl"
    lines.unlink(missing_ok=True)
    until, known, said = began + min(seconds, LONGEST), -1, "no time was left"
    while time.monotonic() < until:
        found = found_in(lines)
        if found.is_through or len(found.ended) == known:
            break  # or does not get on
        known = len(found.ended)
        status, said = run_command(_command(path, lines), until - time.monotonic(), work / f"{path.stem}.log")
        if status is not None:
            _end(lines, f"its process ended with exit status {status}: {said}")
    return _summary(found_in(lines), said, time.monotonic() - began)


def _command(path: Path, lines: Path) -> list[str]:
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "gpu_outcomes"]
    limits = [f"--timeout={TEST_LONGEST}", "--timeout-method=thread"]  # by a signal, nothing in CUDA is interrupted
    return [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        *options,
        *limits,
        *([] if path.stem in SLOW else ["-m", "not slow"]),
        f"--outcomes={lines}",
        str(path),
    ]


def _end(lines: Path, said: str) -> None:
    """What had begun when its process ended has failed."""
    with lines.open("a") as file:
        for test in found_in(lines).begun:
            file.write(json.dumps({"test": test, "outcome": "failed", "seconds": None, "said": said}) + "\n")


def _summary(found: Found, said: str, seconds: float) -> dict[str, Any]:
    """Counts, what failed how, and what took longest."""
    outcomes = [entry["outcome"] for entry in found.ended.values()]
    counted: dict[str, Any] = {name: outcomes.count(name) for name in ("passed", "failed", "skipped")}
    counted["seconds"] = round(seconds, 1)
    failures = {_name(test): entry["said"] for test, entry in found.ended.items() if entry["outcome"] == "failed"}
    longest = sorted(found.ended.values(), key=lambda entry: entry["seconds"] or 0.0, reverse=True)[:SLOWEST]
    if failures:
        counted["failures"] = failures
    if longest:
        counted["slowest"] = {_name(entry["test"]): entry["seconds"] for entry in longest}
    if not found.is_through:
        at = ", ".join(map(_name, found.begun)) or "no test"
        counted["unfinished"] = f"stopped after {seconds:.0f} s in {at}: {said}"
    return counted


def _name(test: str) -> str:
    return test.partition("::")[2] or test


def run_command(
    command: Sequence[str], seconds: float, log: Path, *, environment: Mapping[str, str] = ENVIRONMENT
) -> tuple[int | None, str]:
    """Its exit status, None where it was stopped, and the end of what it said; what it has started ends with it.

    It says it to a file: a pipe that some grandchild still holds would be waited for.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill_all(process)
    return status, log.read_text(errors="replace")[-KEPT:]


def _kill_all(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # one that hangs in the driver does not end
        process.wait(10)
