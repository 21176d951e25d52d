"""A standalone cluster of Spark on this machine, from pyspark's own scripts: a master and two workers of one core.

All of them are processes of their own on loopback addresses. A worker starts an executor for every driver: a JVM,
whose children are the Python processes that run tasks. Nothing of it is left afterwards.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from hoploom.deploy.guard import descendants
from support.process_tree import END_DEADLINE, children_of, command_of, daemon, is_java
from support.until import until

NUM_WORKERS = 2
START_DEADLINE = 60.0
EXECUTOR = "CoarseGrainedExecutorBackend"
# JVMs of a minute: to compile well what runs once takes longer than to run it.
JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
DEFAULTS = """
spark.driver.host 127.0.0.1
spark.driver.bindAddress 127.0.0.1
spark.driver.memory 512m
spark.executor.memory 512m
spark.executor.cores 1
spark.sql.shuffle.partitions 8
spark.ui.showConsoleProgress false
spark.driver.extraJavaOptions {java}
spark.executor.extraJavaOptions {java}
"""


@dataclass(frozen=True)
class Executor:
    pid: int
    folder: Path  # where it writes stdout and stderr

    @property
    def number(self) -> int:
        """The driver counts its executors: one that takes another's place has a number of its own."""
        return int(self.folder.name)

    @property
    def running(self) -> set[int]:
        log = (self.folder / "stderr").read_text(errors="replace")
        begun, ended = (
            {int(task) for task in re.findall(rf"Executor: {words} task .*\(TID (\d+)\)", log)}
            for words in ("Running", "(?:Finished|Exception in|Executor killed|Executor interrupted and killed)")
        )
        return begun - ended

    @property
    def python(self) -> list[int]:
        """Its Python processes: one that forks, and those that run tasks."""
        return [pid for pid in descendants(self.pid) if not is_java(pid)]

    @property
    def tasks(self) -> list[int]:
        """The Python processes that run tasks, or wait for the next one."""
        return [pid for forking in children_of(self.pid) for pid in children_of(forking)]


@dataclass(frozen=True)
class SparkCluster:
    url: str  # spark://127.0.0.1:PORT
    folder: Path
    master: int  # pids
    workers: tuple[int, ...]

    @cached_property
    def environment(self) -> dict[str, str]:
        own = {"SPARK_CONF_DIR": str(self.folder / "conf"), "SPARK_LOCAL_IP": "127.0.0.1"}
        return {**os.environ, **own, "PYSPARK_PYTHON": sys.executable}

    @property
    def executors(self) -> list[Executor]:
        found = []
        for pid in (child for worker in self.workers for child in children_of(worker)):
            with suppress(OSError):  # it has ended meanwhile
                folder = Path(os.readlink(f"/proc/{pid}/cwd"))
                if EXECUTOR in command_of(pid) and folder.name.isdecimal():  # a JVM that ends looks elsewhere at last
                    found.append(Executor(pid, folder))
        return sorted(found, key=lambda executor: executor.number)

    @property
    def num_started(self) -> int:
        applications = sorted(self.folder.glob("work-*/app-*"), key=lambda path: path.name)
        return len(list(self.folder.glob(f"work-*/{applications[-1].name}/*"))) if applications else 0

    def roles(self, driver: int) -> Mapping[str, Sequence[int]]:
        """Processes by what they are, beside those of a driver: its own, and its JVM."""
        executors, below = self.executors, descendants(driver)
        return {
            "driver": [driver, *(pid for pid in below if not is_java(pid))],
            "driver's JVM": [pid for pid in below if is_java(pid)],
            "executor": [executor.pid for executor in executors],
            "task": [pid for executor in executors for pid in executor.python],
        }

    def idle(self) -> None:
        """Wait until the executors of drivers that have ended have ended too."""
        until(lambda: not self.executors, "the end of all executors", END_DEADLINE * 6)


@contextmanager
def spark_cluster(
    folder: Path, environment: Mapping[str, str] | None = None, *, worker_memory: str = "1g", java: str = JAVA
) -> Iterator[SparkCluster]:
    """Start master and workers; skips without Java or pyspark. `java` is what drivers and executors are given."""
    pyspark = pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("java is missing: scripts/java.sh installs it")
    program = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    conf = folder / "conf"
    conf.mkdir(parents=True)
    (conf / "spark-defaults.conf").write_text(DEFAULTS.format(java=java))
    given = {**os.environ, **(environment or {}), "SPARK_CONF_DIR": str(conf), "SPARK_LOCAL_IP": "127.0.0.1"}
    given |= {"SPARK_DAEMON_MEMORY": "192m", "SPARK_DAEMON_JAVA_OPTS": JAVA}
    given |= {"SPARK_LOCAL_DIRS": str(folder / "local")}
    with ExitStack() as stack:
        words = [program, "org.apache.spark.deploy.master.Master", *_at("127.0.0.1"), "--port", "0"]
        log = folder / "master.log"
        master = stack.enter_context(daemon(words, given, log))
        _until_said(log, r"Starting Spark master at spark", 1)
        url = re.findall(r"Starting Spark master at (spark://\S+)", log.read_text())[0]
        workers = []
        for number in range(NUM_WORKERS):
            words = [program, "org.apache.spark.deploy.worker.Worker", "--cores", "1", "--memory", worker_memory]
            words += _at(f"127.0.0.{number + 1}")  # hosts of their own, for Spark
            words += ["--work-dir", str(folder / f"work-{number}"), url]
            workers.append(stack.enter_context(daemon(words, given, folder / f"worker-{number}.log")))
        _until_said(log, r"Registering worker", NUM_WORKERS)
        yield SparkCluster(url, folder, master, tuple(workers))


def _at(host: str) -> list[str]:
    return ["--host", host, "--webui-port", "0"]


def _until_said(log: Path, words: str, times: int) -> None:
    def said() -> bool:
        return len(re.findall(words, log.read_text(errors="replace"))) >= times

    try:
        until(said, words, START_DEADLINE)
    except AssertionError as error:
        logs = {path.name: path.read_text(errors="replace")[-1000:] for path in log.parent.glob("*.log")}
        raise AssertionError(f"Spark does not start: {logs}") from error
