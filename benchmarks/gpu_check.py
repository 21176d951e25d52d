"""What scripts/gpu_check.sh runs once the core is built: tests with compute-sanitizer beside them, then benchmarks.

Writes benchmarks/results/devices/gpu_NAME.json after every step, so that what was found is there when time runs out,
and gives every step a limit, so that one that hangs does not take the others' time. A file that is there already from
the same commit and machine is completed. A rehearsal claims no figure, and writes to build.
"""

import argparse
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import gpu
import gpu_tests
import recorded
import report
import run
import torch
from report import ROOT

WORK = ROOT / "build" / "gpu"
SHARED = Path("/dev/shm")
PACKAGES = ("torch", "triton", "torch-geometric", "torchmetrics", "numpy", "nvidia-nccl-cu13")
AT_ONCE = 12  # test files at most: most of their time is the compiling of kernels, on a core each
ABSENT = "absent"  # what stands for compute-sanitizer's runs on a machine without it
LONGEST = 240.0  # seconds a benchmark may take; the first makes the graph
SANITIZER_LONGEST = 150.0  # seconds
FILLING_LONGEST = 120.0  # seconds of a file that nothing runs beside
NOT_FOLLOWED = "Detected a failure to track a kernel launch"
HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
SANITIZERS = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/nvidia/compute-sanitizer/compute-sanitizer")


class Results:
    """The file of results."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        folder = WORK if arguments.rehearse else recorded.DEVICES
        self.path = Path(arguments.out or folder / f"gpu_{arguments.name}.json")
        self.found = surroundings(arguments)
        before = json.loads(self.path.read_text()) if self.path.exists() else {}
        same = all(before.get(name) == self.found[name] for name in ("commit", "gpu", "rehearsal"))
        if same and "dirty" not in self.found["commit"]:
            self.found |= {name: before[name] for name in ("tests", "sanitizer", "benchmarks") if name in before}
        self._writing = threading.Lock()
        self.write()

    def begin(self, section: str) -> None:
        """What a section held before is found anew."""
        with self._writing:
            self.found[section] = {}

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
        """Seconds; 0: none."""
        return math.inf if self._end is None else max(0.0, self._end - time.time())


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
        "shared_memory": shutil.disk_usage(SHARED).free if SHARED.exists() else None,
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


def check_tests(results: Results, clock: Clock) -> None:
    """Test files beside each other, but those that fill the device's memory; compute-sanitizer among them."""
    filling, others = gpu_tests.files_to_run()
    results.begin("tests")

    def one(path: Path, most: float = math.inf) -> None:
        found = gpu_tests.run_file(path, min(clock.left(), most), WORK)
        print(f"{path.name}: {summary(found)}", flush=True)
        results.put("tests", path.name, found)

    for path in filling:
        one(path, FILLING_LONGEST)
    with ThreadPoolExecutor(at_once()) as pool:
        asked = [pool.submit(check_memory, results, clock), *(pool.submit(one, path) for path in others)]
        for future in asked:
            future.result()


def at_once() -> int:
    """How many processes run beside each other: the interpreter takes a core, and time, for each."""
    return max(1, min(AT_ONCE, len(os.sched_getaffinity(0)) - 2)) if torch.cuda.is_available() else 1


def summary(found: dict[str, Any]) -> str:
    """One line."""
    counts = ", ".join(f"{found[name]} {name}" for name in ("passed", "failed", "skipped") if found[name])
    line = f"{counts or 'none'} in {found['seconds']} s"
    return f"{line}; {found['unfinished'].splitlines()[0]}" if "unfinished" in found else line


def check_memory(results: Results, clock: Clock) -> None:
    """A few steps of training on a small graph, under compute-sanitizer."""
    if not torch.cuda.is_available():
        return
    results.begin("sanitizer")
    tool = shutil.which("compute-sanitizer") or next((path for path in SANITIZERS if Path(path).exists()), None)
    if tool is None:
        print("compute-sanitizer is not on this machine", flush=True)
        return results.put("sanitizer", ABSENT, {"said": "compute-sanitizer is not on this machine"})
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else torch's pool hides what lies outside
    for kind in ("memcheck", "racecheck"):
        script = str(Path(__file__).with_name("gpu_training.py"))
        command = [tool, "--tool", kind, "--error-exitcode", "86", sys.executable, script]
        found = _sanitized(command, min(clock.left(), SANITIZER_LONGEST), WORK / f"{kind}.log", environment)
        print(f"compute-sanitizer {kind}: {found}", flush=True)
        results.put("sanitizer", kind, found)


def _sanitized(command: list[str], seconds: float, log: Path, environment: dict[str, str]) -> dict[str, Any]:
    if seconds <= 0:
        return {"unfinished": "no time was left"}
    status, said = gpu_tests.run_command(command, seconds, log, environment=environment)
    if status is None:
        return {"unfinished": f"stopped after {seconds:.0f} s: {said}"}
    lost = said.count(NOT_FOLLOWED)  # launches, each of which racecheck counts as a hazard
    hazards = HAZARDS.search(said)
    is_clean = status == 0 or (lost > 0 and hazards is not None and int(hazards[1]) == lost)
    return (
        {"exit": status, "clean": is_clean}
        | ({"not followed": lost} if lost else {})
        | ({"said": said} if status else {})
    )


def check_speed(results: Results, clock: Clock, *, tiny: bool) -> None:
    """Every gpu benchmark; of one that fails or takes too long, the rows that it had found by then."""
    results.begin("benchmarks")
    for name in run.GROUPS["gpu"]:
        seconds = min(clock.left(), LONGEST)
        if seconds <= 0:
            results.put("benchmarks", name, {"unfinished": "no time was left"})
            continue
        results.put("benchmarks", name, _benchmark(name, seconds, tiny=tiny))


def _benchmark(name: str, seconds: float, *, tiny: bool) -> dict[str, Any]:
    """In a process of its own."""
    script, log = Path(__file__).with_name(f"{name}.py"), WORK / f"{name}.log"
    command = [sys.executable, str(script), "--json", *(["--tiny"] if tiny else [])]
    began = time.monotonic()
    status, said = gpu_tests.run_command(command, seconds, log, environment=os.environ)
    told = log.read_text(errors="replace").splitlines()
    whole = next((line for line in reversed(told) if line.startswith('{"rows"')), None)
    rows = ", ".join(line.removeprefix(gpu.FOUND) for line in told if line.startswith(gpu.FOUND))
    found = report.from_json(whole or f'{{"rows": [{rows}], "notes": [], "absent": []}}')
    answer = figures(found, claimed=not tiny) | {"seconds": round(time.monotonic() - began, 1)}
    print(report.table(found.rows) if not tiny else f"{name} ran: {len(found.rows)} rows, no figure claimed")
    print("\n".join(found.notes if not tiny else []), flush=True)
    if status == 0 and whole is not None:
        return answer
    how = f"stopped after {seconds:.0f} s" if status is None else f"exit status {status}"
    print(f"{name}: {how}: {said}", flush=True)
    return answer | {"unfinished": f"{how}: {said}"}


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
    tests = [name for name, one in found.get("tests", {}).items() if one.get("failed", 1) or "unfinished" in one]
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
    for step in steps:
        step()
    print(f"wrote {results.path}")
    bad = faults(results.found)
    if bad:
        print(f"failed or not finished: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
