"""A standalone cluster of Spark for benchmarks, drivers on it, and what their processes took as the kernel shows it."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report

from hoploom import _core
from hoploom.deploy.guard import descendants

sys.path.append(str(report.ROOT / "tests"))
from support.process_tree import memory_of
from support.spark_cluster import SparkCluster, spark_cluster

SIDE = Path(__file__).with_name("spark_side.py")
PARTS = 4
MEMORY = 1 << 30  # of a task's Python process
CONF = {"spark.executor.memory": "2g", "spark.driver.memory": "1g", "spark.pyspark.python": sys.executable}
JAVA = "-XX:+UseSerialGC"
DEADLINE = 720.0  # seconds for one driver
INTERVAL = 0.1  # seconds between two looks
TICKS = os.sysconf("SC_CLK_TCK")


class DriverError(Exception):
    """A driver did not end well."""


@dataclass
class Ended:
    """A driver that has done what it was asked."""

    stages: dict[str, float]  # seconds, by name
    seconds: float = 0.0  # of the whole process
    peaks: dict[str, int] = field(default_factory=dict)  # the most bytes that one process of a role held
    cores: dict[str, float] = field(default_factory=dict)  # seconds of a core, of all processes of a role


@contextmanager
def started(folder: Path) -> Iterator[SparkCluster]:
    """A master and two workers of one core each, whose Java compiles as it does for users."""
    with spark_cluster(folder / "cluster", worker_memory="3g", java=JAVA) as cluster:
        yield cluster


def on_spark(cluster: SparkCluster, side: str, folder: Path, cores: int) -> Ended:
    """Run a side of spark_side.py over the tables in a folder; its store is out.store there."""
    conf = {**CONF, "spark.cores.max": str(cores)}
    options = {"memory": MEMORY, "engine": "spark", "master": cluster.url, "conf": conf}
    cluster.idle()
    with _started(side, folder, options, cluster.environment) as process:
        with _watched(cluster, process.pid) as taken:
            said = _said(process)
        taken.stages = said
    return taken


def in_process(folder: Path, environment: Mapping[str, str]) -> Ended:
    """Build the same without Spark."""
    begin = time.perf_counter()
    with _started("build", folder, {"threads": report.CORES}, environment) as process:
        stages = _said(process)
    return Ended(stages, time.perf_counter() - begin)


def sources_of(commit: str, folder: Path) -> Path:
    """The Python of an earlier commit, with the core of this one: what PYTHONPATH has to name."""
    folder.mkdir()
    packed = subprocess.run(["git", "archive", commit, "src/hoploom"], cwd=report.ROOT, stdout=subprocess.PIPE)
    if packed.returncode:
        raise DriverError(f"git has no commit {commit}")
    subprocess.run(["tar", "--extract", "--directory", str(folder)], input=packed.stdout, check=True)
    shutil.copy(_core.__file__, folder / "src" / "hoploom")
    return folder / "src"


@contextmanager
def _started(
    side: str, folder: Path, options: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[str]"]:
    """A driver, which has been told what to do; nothing of it runs afterwards."""
    asked = {"folder": str(folder), "out": str(folder / "out.store"), "options": {"parts": PARTS, **options}}
    command = [sys.executable, str(SIDE), side, json.dumps(asked)]
    with (folder / "driver.log").open("w+") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            with _killed(process):
                yield process
        except DriverError as error:
            log.seek(0)
            last = (log.read().strip().splitlines() or [""])[-1]
            raise DriverError(f"{error}; its last words: {last}") from error


def _said(process: "subprocess.Popen[str]") -> dict[str, float]:
    """Its stages; DriverError where it fails."""
    try:
        said, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired as error:
        raise DriverError(f"did not end in {DEADLINE:.0f} s") from error
    if process.returncode:
        raise DriverError(f"ended with {process.returncode}")
    return dict(json.loads(said))


@contextmanager
def _killed(process: "subprocess.Popen[str]") -> Iterator[None]:
    try:
        yield
    finally:
        below = descendants(process.pid)
        process.kill()
        process.wait()
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)


@contextmanager
def _watched(cluster: SparkCluster, driver: int) -> Iterator[Ended]:
    taken, stopped = Ended({}), threading.Event()
    cores: dict[str, dict[int, float]] = {}

    def watch() -> None:
        while not stopped.wait(INTERVAL):
            for role, pids in cluster.roles(driver).items():
                for pid in pids:
                    taken.peaks[role] = max(taken.peaks.get(role, 0), memory_of(pid))
                    cores.setdefault(role, {})[pid] = max(cores.get(role, {}).get(pid, 0.0), _cores_of(pid))

    thread = threading.Thread(target=watch, daemon=True)
    begin = time.perf_counter()
    thread.start()
    try:
        yield taken
    finally:
        taken.seconds = time.perf_counter() - begin
        stopped.set()
        thread.join()
        taken.cores = {role: sum(found.values()) for role, found in cores.items()}


def _cores_of(pid: int) -> float:
    """Seconds of a core that a process has had; 0 once it has ended."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(after_name[11]) + int(after_name[12])) / TICKS
