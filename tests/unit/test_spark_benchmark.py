"""What measures builds on Spark: its tables are what it says."""

import os
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
from support import ROOT


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def cluster(benchmarks: None) -> ModuleType:
    """benchmarks/spark_cluster.py"""
    import spark_cluster

    return spark_cluster


def test_tables_have_distinct_ids_with_gaps_and_edges_between_them(benchmarks: None, tmp_path: Path) -> None:
    from spark_tables import write_tables

    write_tables(tmp_path / "tables", 5_000)
    nodes = [pq.read_table(path) for path in sorted((tmp_path / "tables").glob("nodes-*.parquet"))]
    edges = [pq.read_table(path) for path in sorted((tmp_path / "tables").glob("edges-*.parquet"))]
    assert (len(nodes), len(edges)) == (2, 8)
    ids = [one for table in nodes for one in table["id"].to_pylist()]
    assert len(ids) == len(set(ids)) == 500
    assert max(ids) - min(ids) > 1 << 30
    assert sum(table.num_rows for table in edges) == 5_000
    for end in ("source", "destination"):
        found = {one for table in edges for one in table[end].to_pylist()}
        assert found <= set(ids)
        assert len(found) > 490  # of 5,000 draws


def test_a_driver_that_fails_is_named_with_its_last_words(cluster: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "graph.toml").write_text("[nodes.node]\n")
    with pytest.raises(cluster.DriverError, match=r"ended with 1; its last words: .*Error"):
        cluster.in_process(tmp_path, os.environ)


def test_duckdb_builds_the_tables_in_a_process_of_its_own(cluster: ModuleType, tmp_path: Path) -> None:
    from spark_tables import write_tables

    write_tables(tmp_path / "tables", 5_000)
    ended = cluster.in_process(tmp_path / "tables", os.environ)
    assert ended.stages["node to node"] > 0
    assert ended.seconds > sum(ended.stages.values())
    assert (tmp_path / "tables" / "out.store" / "store.json").exists()
