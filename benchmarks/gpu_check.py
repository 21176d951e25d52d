"""What scripts/gpu_check.sh runs once the core is built: tests, compute-sanitizer, benchmarks, in this order.

Writes benchmarks/results/gpu-NAME.json after every step, so that what was found is there when time runs out. A file
that is there already from the same commit and machine is completed. A rehearsal claims no figure, and writes to build.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import report
import run
import torch
from report import ROOT

FOLDER = ROOT / "benchmarks" / "results"
WORK = ROOT / "build" / "gpu"
NATIVE = tuple(
    f"test_{kind}" for kind in ("kernels", "place", "on_device", "device_loader", "whole_step", "padded", "peer")
)
ELSEWHERE = ("test_kernels_compile",)  # compiles for GPUs that are not there
PACKAGES = ("torch", "triton", "torch-geometric", "torchmetrics", "numpy", "nvidia-nccl-cu13")
ALONE = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # what the machine has may not go with our pytest
AT_ONCE = 4  # test files: most of their time is the compiling of kernels
ABSENT = "absent"  # what stands for compute-sanitizer's runs on a machine without it
LONGEST = 900.0  # seconds one command may take, where --minutes leaves that much
SANITIZERS = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/nvidia/compute-sanitizer/compute-sanitizer")


class Results:
    """The file of results."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        folder = WORK if arguments.rehearse else FOLDER
        self.path = Path(arguments.out or folder / f"gpu-{arguments.name}.json")
        self.found = surroundings(arguments)
        before = json.loads(self.path.read_text()) if self.path.exists() else {}
        same = all(before.get(name) == self.found[name] for name in ("commit", "gpu", "rehearsal"))
        if same and "dirty" not in self.found["commit"]:
            self.found |= {name: before[name] for name in ("tests", "sanitizer", "benchmarks") if name in before}
        self._writing = threading.Lock()
        self.write()

    def put(self, section: str, name: str, value: Any) -> None:
        """Add what a step found; from several threads."""
        with self._writing:
            self.found.setdefault(section, {})[name] = value
            self.write()

    def write(self) -> None:
        """A reader never sees half of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.found, indent=1) + "\n")
        unfinished.replace(self.path)


class Clock:
    """How long commands may still take."""

    def __init__(self, began: float, minutes: float | None) -> None:
        self._end = None if minutes is None else began + 60 * minutes

    def left(self) -> float:
        """Seconds for the next command; 0: none."""
        return LONGEST if self._end is None else min(LONGEST, max(0.0, self._end - time.time()))


def surroundings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Commit, machine and versions."""
    commit = report.commit()
    if arguments.commit and "unknown" in commit:
        commit = arguments.commit
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "name": arguments.name,
        "rehearsal": arguments.rehearse,
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _driver(),
        "machine": report.surroundings()[0].removeprefix("machine: "),
        "versions": {"python": platform.python_version(), **versions},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """What nvidia-smi says of driver, memory and clocks; nothing is set."""
    query = "--query-gpu=driver_version,memory.total,clocks.sm,clocks.mem,power.limit"
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or None


def test_files() -> tuple[list[Path], list[Path]]:
    """Files whose tests run natively where there is a GPU, and files with tests that are marked gpu."""
    texts = {path: path.read_text() for path in sorted((ROOT / "tests").glob("test_*.py"))}
    native = [path for path, text in texts.items() if path.stem.startswith(NATIVE) or "device: torch.device" in text]
    marked = [path for path, text in texts.items() if "pytest.mark.gpu" in text]
    return [path for path in native if path.stem not in ELSEWHERE], marked


def run_tests(path: Path, marks: str, seconds: float) -> dict[str, Any]:
    """One file in a process of its own."""
    if seconds <= 0:
        return {"seconds": 0.0, "unfinished": "no time was left"}
    outcome = WORK / f"{path.stem}-{marks.replace(' ', '-')}.xml"
    outcome.unlink(missing_ok=True)
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-m", marks, f"--junitxml={outcome}"]
    command = [sys.executable, "-m", "pytest", "-q", *options, str(path)]
    began = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, env=ALONE, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode(errors="replace")[-1000:] if error.stdout else ""
        return {"seconds": time.perf_counter() - began, "unfinished": f"stopped after {seconds:.0f} s: {said}"}
    counted = {"seconds": round(time.perf_counter() - began, 1)}
    if not outcome.exists():
        said = f"{done.stdout[-2000:]}\n{done.stderr[:2000]}"
        return counted | {"unfinished": f"exit status {done.returncode}: {said}"}
    return counted | _outcome(outcome)


def _outcome(path: Path) -> dict[str, Any]:
    """Counts, and what failed how."""
    cases = list(ElementTree.parse(path).iter("testcase"))
    failures = {
        case.get("name", ""): (bad.get("message") or "")[:500] + "\n" + (bad.text or "")[-1500:]
        for case in cases
        for kind in ("failure", "error")
        if (bad := case.find(kind)) is not None
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failures) - skipped, "failed": len(failures), "skipped": skipped} | (
        {"failures": failures} if failures else {}
    )


def check_tests(results: Results, clock: Clock) -> None:
    """Native tests a few files at a time, then the marked ones alone: some fill the device's memory."""
    native, marked = test_files()
    results.found["tests"] = {}

    def one(path: Path, marks: str) -> None:
        found = run_tests(path, marks, clock.left())
        print(f"{path.name} ({marks}): {summary(found)}", flush=True)
        results.put("tests", f"{path.name} ({marks})", found)

    with ThreadPoolExecutor(AT_ONCE if torch.cuda.is_available() else 1) as pool:
        list(pool.map(lambda path: one(path, "not gpu and not slow"), native))
    for path in marked:
        one(path, "gpu")


def summary(found: dict[str, Any]) -> str:
    """One line."""
    if "unfinished" in found:
        return found["unfinished"].splitlines()[0]
    counts = ", ".join(f"{found[name]} {name}" for name in ("passed", "failed", "skipped") if found[name])
    return f"{counts or 'none'} in {found['seconds']} s"


def check_memory(results: Results, clock: Clock) -> None:
    """A few steps of training on a small graph, under compute-sanitizer."""
    if not torch.cuda.is_available():
        return
    results.found["sanitizer"] = {}
    tool = shutil.which("compute-sanitizer") or next((path for path in SANITIZERS if Path(path).exists()), None)
    if tool is None:
        print("compute-sanitizer is not on this machine", flush=True)
        return results.put("sanitizer", ABSENT, {"said": "compute-sanitizer is not on this machine"})
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else torch's pool hides what lies outside
    for kind in ("memcheck", "racecheck"):
        if clock.left() <= 0:
            results.put("sanitizer", kind, {"unfinished": "no time was left"})
            continue
        script = str(Path(__file__).with_name("gpu_training.py"))
        command = [tool, "--tool", kind, "--error-exitcode", "86", sys.executable, script]
        found: dict[str, Any]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=clock.left())
            found = {"exit": done.returncode, "clean": done.returncode == 0}
            if done.returncode:
                found["said"] = (done.stdout + done.stderr)[-4000:]
        except subprocess.TimeoutExpired as error:
            found = {"unfinished": f"stopped after {error.timeout:.0f} s"}
        print(f"compute-sanitizer {kind}: {found}", flush=True)
        results.put("sanitizer", kind, found)


def check_speed(results: Results, clock: Clock, *, tiny: bool) -> None:
    """Every gpu benchmark."""
    results.found["benchmarks"] = {}
    for name in run.GROUPS["gpu"]:
        seconds = clock.left()
        found = run.run_script(name, tiny, seconds) if seconds > 0 else None
        if found is None:
            results.put("benchmarks", name, {"unfinished": "it failed, or no time was left: see what it said above"})
            continue
        results.put("benchmarks", name, figures(found, claimed=not tiny))
        print(report.table(found.rows) if not tiny else f"{name} ran: {len(found.rows)} rows, no figure claimed")
        print("\n".join(found.notes if not tiny else []), flush=True)


def figures(found: report.Report, *, claimed: bool) -> dict[str, Any]:
    """What a benchmark found, in JSON's types; a rehearsal says only what was asked."""
    if not claimed:
        return {"ran": [row.question for row in found.rows]}
    rows = [asdict(row) | {"target": row.target and str(row.target), "met": row.met} for row in found.rows]
    return {"rows": rows, "notes": list(found.notes)}


def parsed() -> argparse.Namespace:
    """See scripts/gpu_check.sh."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", default="machine")
    parser.add_argument("--tests-only", action="store_true")
    parser.add_argument("--benchmarks-only", action="store_true")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--commit")
    parser.add_argument("--out", help="another file to write")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--began", type=float, default=time.time())
    return parser.parse_args()


def faults(found: dict[str, Any]) -> list[str]:
    """What failed, crashed or did not finish."""
    tests = [name for name, one in found.get("tests", {}).items() if one.get("failed", 1)]
    runs = {kind: one for kind, one in found.get("sanitizer", {}).items() if kind != ABSENT}
    memory = [f"compute-sanitizer {kind}" for kind, one in runs.items() if not one.get("clean", False)]
    speed = [name for name, one in found.get("benchmarks", {}).items() if "unfinished" in one]
    return tests + memory + speed


def main() -> int:
    """Exit status 1 if something failed, crashed or did not finish; a missed target is a result like any other."""
    arguments = parsed()
    WORK.mkdir(parents=True, exist_ok=True)
    clock, results = Clock(arguments.began, arguments.minutes), Results(arguments)
    steps: list[Callable[[], None]] = []
    if not arguments.benchmarks_only:
        steps.append(lambda: check_tests(results, clock))
    if not arguments.tests_only:
        steps.append(lambda: check_speed(results, clock, tiny=arguments.rehearse))
    if not arguments.benchmarks_only:
        steps.append(lambda: check_memory(results, clock))
    for step in steps:
        step()
    print(f"wrote {results.path}")
    bad = faults(results.found)
    if bad:
        print(f"failed or not finished: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
