"""A cut on Spark whose executor or driver is killed, or in an object store."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.object_store import ObjectStore
from support.spark_builds import busy_executor, spark_cut, unfinished
from support.spark_cluster import SparkCluster
from support.stores import contents

import hoploom
from hoploom.store.check import problems
from hoploom.store.fetch import fetch
from hoploom.store.storage_path import StoragePath

pytest.importorskip("pyspark")
needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")
pytestmark = [needs_java, pytest.mark.slow, pytest.mark.timeout(900)]
NUM_PARTS = 3
NUMBERED, WRITING = "/new/", "/pieces/"  # folders in the staging folder: they show how far the cut is


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph of two buckets."""
    folder = tmp_path_factory.mktemp("graph") / "graph.store"
    hoploom.generate(folder, num_nodes=80_000, avg_degree=10, num_features=2, num_classes=4)
    return folder


@pytest.fixture(scope="module")
def wanted(graph: Path, cluster: SparkCluster) -> dict[str, bytes]:
    with spark_cut(cluster, graph.parent, NUM_PARTS) as cutting:
        (ended,) = cutting.finish()
    assert ended["edge_cut"] < 0.5
    assert list(problems(graph.parent / "out.store")) == []
    return contents(graph.parent / "out.store")


@pytest.fixture
def folder(graph: Path, tmp_path: Path) -> Path:
    shutil.copytree(graph, tmp_path / "here" / "graph.store", copy_function=os.link)
    return tmp_path / "here"


def test_a_killed_executor_changes_nothing(cluster: SparkCluster, folder: Path, wanted: dict[str, bytes]) -> None:
    cluster.idle()
    with spark_cut(cluster, folder, NUM_PARTS) as cutting:
        cutting.until(lambda: any(WRITING in name for name in unfinished(folder)))
        os.kill(busy_executor(cluster).pid, signal.SIGKILL)
        assert not (folder / "out.store").exists()
        (ended,) = cutting.finish()
    assert "edge_cut" in ended, ended
    assert cluster.num_started > 2  # another one took its place
    assert contents(folder / "out.store") == wanted
    assert sorted(path.name for path in folder.iterdir()) == ["graph.store", "out.store"]


def test_a_killed_driver_leaves_what_the_next_one_removes(
    cluster: SparkCluster, folder: Path, wanted: dict[str, bytes]
) -> None:
    cluster.idle()
    with spark_cut(cluster, folder, NUM_PARTS) as cutting:
        cutting.until(lambda: any(NUMBERED in name for name in unfinished(folder)))
        cutting.kill()
        (left,) = {path.name for path in folder.iterdir()} - {"graph.store"}
        assert left.startswith(".out.store.partial-")
        cluster.idle()  # its JVM ends without it, and so do the executors
        assert {path.name for path in folder.iterdir()} == {"graph.store", left}
    with spark_cut(cluster, folder, NUM_PARTS) as cutting:
        (ended,) = cutting.finish()
    assert "edge_cut" in ended, ended
    assert contents(folder / "out.store") == wanted
    assert sorted(path.name for path in folder.iterdir()) == ["graph.store", "out.store"]


def cut_here(store: Path | str, out: Path | str, num_parts: int) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own: executors have the environment of the process that started Spark."""
    command = [sys.executable, "-m", "hoploom", "partition", str(store), "-o", str(out), "--parts", str(num_parts)]
    command += ["--engine", "spark", "--master", "local[2]", "--memory", "1GB"]
    java = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
    return subprocess.run(command, check=False, timeout=400, capture_output=True, text=True, env=os.environ | java)


def test_a_cut_from_a_bucket_to_a_bucket_gives_the_bytes_of_a_local_one(tmp_path: Path, s3: ObjectStore) -> None:
    hoploom.generate(tmp_path / "graph", num_nodes=900, num_features=3, heterogeneous=True, num_parts=2, times=True)
    bucket = s3.new_bucket()
    there = StoragePath(f"{bucket}/graph")
    for path in sorted((tmp_path / "graph").rglob("*")):
        if path.is_file():
            with there.create(str(path.relative_to(tmp_path / "graph"))) as file:
                file.write(path.read_bytes())
    for store, out in ((tmp_path / "graph", tmp_path / "out"), (f"{bucket}/graph", f"{bucket}/out")):
        ended = cut_here(store, out, NUM_PARTS)
        assert ended.returncode == 0, ended.stderr
    fetch(StoragePath(f"{bucket}/out"), tmp_path / "fetched")
    assert contents(tmp_path / "fetched") == contents(tmp_path / "out")
    left = {name.split("/")[0] for name, _ in StoragePath(f"{bucket}/out").names()}
    assert left == {*(f"part-{part:05d}" for part in range(NUM_PARTS)), "store.json"}
