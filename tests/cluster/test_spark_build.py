"""`hoploom build --engine spark` on a standalone cluster: the bytes and the errors are those of DuckDB."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from support.process_tree import PeakMemory
from support.spark_builds import GRAPH, by_duckdb, spark_builds, write_large
from support.spark_cluster import SparkCluster
from support.stores import contents
from support.tables import IDS, NODES, build_here, graph, write_graph, write_table

from hoploom import HoploomError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_cluster_gives_the_bytes_of_duckdb(cluster: SparkCluster, tmp_path: Path) -> None:
    folders = [tmp_path / f"50% [{name}]" for name in IDS]  # nothing in a name is a pattern
    for folder, of in zip(folders, IDS.values(), strict=True):
        folder.mkdir()
        write_graph(folder, of, 3, files=3)
        (folder / "graph.toml").write_text(NODES)
    with spark_builds(cluster, folders, parts=3) as builds:
        ended = builds.finish()
    assert [event for event in ended if "refused" in event] == []
    for folder in folders:
        assert contents(folder / "out.store") == by_duckdb(folder, parts=3)


def _value(table: str, column: str, row: int, value: Any) -> Callable[[dict[str, dict[str, Any]]], None]:
    def change(tables: dict[str, dict[str, Any]]) -> None:
        tables[table][column][row] = value

    return change


BAD = {
    "an edge begins nowhere": _value("edges", "src", 71, "nobody"),
    "an edge ends nowhere": _value("edges", "dst", 5, "nobody"),
    "an end is null": _value("edges", "dst", 5, None),
    "an id comes twice": _value("nodes", "id", 38, "user-1é"),
    "an id is null": _value("nodes", "id", 38, None),
    "a weight is null": _value("edges", "w", 66, None),
    "a weight is negative": _value("edges", "w", 66, -1.0),
    "a feature is null": _value("nodes", "year", 33, None),
    "a list is too long": _value("nodes", "emb", 33, [1.0, 2.0, 3.0]),
    "a label is too large": _value("nodes", "venue", 27, 7),
}


def test_what_is_wrong_with_tables_is_named_as_by_duckdb(cluster: SparkCluster, tmp_path: Path) -> None:
    folders, messages = [], []
    for number, change in enumerate(BAD.values()):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        nodes, edges = graph(IDS["text"])
        change({"nodes": nodes, "edges": edges})
        nodes["emb"] = pa.array(nodes["emb"], pa.list_(pa.float32()))
        write_table(folder / "nodes.parquet", nodes, files=3)
        write_table(folder / "edges.parquet", edges, files=3)
        (folder / "graph.toml").write_text(NODES)
        folders.append(folder)
        with pytest.raises(HoploomError) as caught:
            build_here(folder, NODES, "duckdb.store", parts=2)
        messages.append(f"{caught.type.__name__}: {caught.value}")
    with spark_builds(cluster, folders, parts=2) as builds:
        ended = builds.finish()
    told = [event.get("refused") for event in ended]
    assert dict(zip(BAD, told, strict=True)) == dict(zip(BAD, messages, strict=True))
    assert [message for message in messages if "\n" in message] == []
    assert "\tat " not in builds.errors.read_text()
    assert "Traceback" not in builds.errors.read_text()
    for folder in folders:
        assert {path.suffix for path in folder.iterdir()} == {".parquet", ".toml"}


def test_csv_is_rewritten(cluster: SparkCluster, tmp_path: Path) -> None:
    """Read by the driver into Parquet, as for DuckDB, whatever the format: 4 files of nodes, 4 of edges."""
    write_large(tmp_path / "csv", 5000, 40_000)
    for path in (tmp_path / "csv").glob("*.parquet"):
        table = pq.read_table(path)
        at = table.schema.get_field_index("kind")
        if at >= 0:
            table = table.set_column(at, "kind", table["kind"].combine_chunks().flatten())
        pa.csv.write_csv(table, path.with_suffix(".csv"))
        path.unlink()
    (tmp_path / "csv" / "graph.toml").write_text(GRAPH.replace(".parquet", ".csv"))
    with spark_builds(cluster, [tmp_path / "csv"], parts=3) as builds:
        (ended,) = builds.finish()
    assert "refused" not in ended
    assert contents(tmp_path / "csv" / "out.store") == by_duckdb(tmp_path / "csv", parts=3)


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


@pytest.mark.timeout(900)
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
