"""A build on Spark whose executors, tasks or driver are killed: the same bytes, nothing twice, nothing left over."""

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.spark_builds import SparkBuilds, busy_executor, by_duckdb, spark_builds, unfinished, write_large
from support.spark_cluster import SparkCluster
from support.stores import contents
from support.until import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
OPTIONS = {"parts": 3}
TASKS = {"task_bytes": 1 << 16}  # so there are several


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables") / "graph"
    write_large(folder, 60_000, 300_000)
    return folder


@pytest.fixture(scope="module")
def wanted(tables: Path) -> dict[str, bytes]:
    return by_duckdb(tables, **OPTIONS)


@pytest.fixture
def folder(tables: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "graph"
    folder.mkdir()
    for path in (*tables.glob("*.parquet"), tables / "graph.toml"):
        os.link(path, folder / path.name)
    return folder


MOMENTS = {  # part of the name of a file that is written then, and whether that is a piece which is joined later
    "ranges of nodes": ("/nodes/", True),
    "joining nodes": ("/nodes/", False),
    "ranges of edges": ("/relations/", True),
    "joining edges": ("/relations/", False),
}


def until_moment(builds: SparkBuilds, folder: Path, name: str) -> None:
    def reached() -> bool:
        if name == "numbering":
            return bool(builds.stages) and builds.stages[-1].startswith("numbering the nodes")
        kind, is_piece = MOMENTS[name]
        return any(kind in file and ("/pieces/" in file) == is_piece for file in unfinished(folder))

    builds.until(reached)


@pytest.mark.parametrize("name", ["numbering", *MOMENTS])
def test_a_killed_executor_changes_nothing(
    name: str, cluster: SparkCluster, folder: Path, wanted: dict[str, bytes]
) -> None:
    before = sorted(path.name for path in folder.iterdir())
    cluster.idle()
    with spark_builds(cluster, [folder], **TASKS, **OPTIONS) as builds:
        until_moment(builds, folder, name)
        victim = busy_executor(cluster)
        os.kill(victim.pid, signal.SIGKILL)
        assert not (folder / "out.store").exists()
        (ended,) = builds.finish()
    assert "seconds" in ended
    assert cluster.num_started > 2  # another one took its place
    assert contents(folder / "out.store") == wanted
    assert sorted(path.name for path in folder.iterdir()) == sorted([*before, "out.store"])


def test_a_killed_task_changes_nothing(cluster: SparkCluster, folder: Path, wanted: dict[str, bytes]) -> None:
    """The Python process of a task, as the kernel ends it where memory runs out."""
    cluster.idle()
    with spark_builds(cluster, [folder], **TASKS, **OPTIONS) as builds:
        for name in ("ranges of nodes", "ranges of edges"):
            until_moment(builds, folder, name)
            os.kill(busy_executor(cluster, python=True).tasks[0], signal.SIGKILL)
        (ended,) = builds.finish()
    assert "seconds" in ended
    assert cluster.num_started == 2  # executors outlive it
    assert (contents(folder / "out.store"), list(folder.glob(".*"))) == (wanted, [])


SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.multiplier": "1.2",
    "spark.speculation.quantile": "0.1",
}
SECOND = re.compile(r"Executor: Running task \d+\.1 in stage")  # another one of a task that is slow


@pytest.mark.parametrize("name", ["ranges of edges", "joining edges"])
def test_a_task_that_runs_twice_at_once_leaves_nothing_twice(
    name: str, cluster: SparkCluster, folder: Path, wanted: dict[str, bytes]
) -> None:
    before = {path.name for path in folder.iterdir()}
    cluster.idle()
    with spark_builds(cluster, [folder], conf=SPECULATION, **TASKS, **OPTIONS) as builds:
        until_moment(builds, folder, name)
        executor = busy_executor(cluster, python=True)
        slow = executor.tasks[0]
        os.kill(slow, signal.SIGSTOP)
        logs = [each.folder / "stderr" for each in cluster.executors if each.pid != executor.pid]
        until(lambda: any(SECOND.search(log.read_text()) for log in logs), "a second task beside the slow one", 100)
        with suppress(ProcessLookupError):
            os.kill(slow, signal.SIGCONT)  # it goes on beside the other, until Spark ends it
        (ended,) = builds.finish()
    assert "seconds" in ended
    assert contents(folder / "out.store") == wanted
    assert {path.name for path in folder.iterdir()} == {*before, "out.store"}


def test_tasks_that_are_killed_each_time_end_the_build(cluster: SparkCluster, folder: Path) -> None:
    cluster.idle()
    with spark_builds(cluster, [folder], **TASKS, **OPTIONS) as builds:
        until_moment(builds, folder, "ranges of edges")
        while builds.process.poll() is None:
            for executor in cluster.executors:
                for task in executor.tasks:
                    with suppress(ProcessLookupError):
                        os.kill(task, signal.SIGKILL)
            time.sleep(0.05)
        (ended,) = builds.finish()
    assert re.search("the Python process of a task was ended, .* memory.* --memory", ended["refused"])
    assert "\tat " not in builds.errors.read_text()
    assert {path.suffix for path in folder.iterdir()} == {".parquet", ".toml"}


@pytest.mark.parametrize("name", ["ranges of nodes", "joining nodes", "joining edges"])
def test_a_killed_driver_leaves_what_the_next_one_removes(
    name: str, cluster: SparkCluster, folder: Path, wanted: dict[str, bytes]
) -> None:
    before = {path.name for path in folder.iterdir()}
    cluster.idle()
    with spark_builds(cluster, [folder], **TASKS, **OPTIONS) as builds:
        until_moment(builds, folder, name)
        builds.process.kill()
        builds.process.wait(10)
        (left,) = {path.name for path in folder.iterdir()} - before
        assert left.startswith(".out.store.partial-")
        cluster.idle()  # its JVM ends without it, and so do the executors
        assert {path.name for path in folder.iterdir()} == {*before, left}
    with spark_builds(cluster, [folder], **TASKS, **OPTIONS) as builds:
        (ended,) = builds.finish()
    assert "seconds" in ended
    assert contents(folder / "out.store") == wanted
    assert {path.name for path in folder.iterdir()} == {*before, "out.store"}
