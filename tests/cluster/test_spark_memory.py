"""Memory of a build on Spark, measured from outside: of the driver, and of the tasks of executors."""

from pathlib import Path
from typing import Any

import pytest
from support.process_tree import PeakMemory
from support.spark_builds import by_duckdb, spark_builds, write_large
from support.spark_cluster import SparkCluster
from support.stores import contents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MB = 1 << 20
MEMORY = 560 * MB  # of a task's process
JVM = (512 + 350) * MB  # the heap that spark_cluster gives it, garbage included, and what it needs beside that


def built(cluster: SparkCluster, folder: Path, **options: Any) -> PeakMemory:
    cluster.idle()
    with (
        spark_builds(cluster, [folder], memory=MEMORY, **options) as builds,
        PeakMemory(lambda: cluster.roles(builds.process.pid)) as peaks,
    ):
        (ended,) = builds.finish(600)
    assert "seconds" in ended
    return peaks


def test_the_driver_holds_no_more_for_eight_times_the_graph(cluster: SparkCluster, tmp_path: Path) -> None:
    """Its JVM keeps to its heap, and a part that is larger than the memory of a task is written within that."""
    peaks = []
    for name, scale in (("small", 1), ("large", 8)):
        write_large(tmp_path / name, 50_000 * scale, 500_000 * scale, files=4 * scale, width=32)
        peaks.append(built(cluster, tmp_path / name, parts=1))
    small, large = peaks
    print({role: [peak.of(role) // MB for peak in peaks] for role in small.peaks})  # shown where it fails
    store = contents(tmp_path / "large" / "out.store")
    assert sum(map(len, store.values())) > MEMORY
    assert store == by_duckdb(tmp_path / "large", parts=1)
    assert 0 < large.of("driver") < 1.1 * small.of("driver")
    assert 0 < large.of("driver's JVM") < JVM
    assert 0 < large.of("task") < MEMORY
