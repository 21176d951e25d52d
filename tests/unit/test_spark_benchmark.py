"""What measures builds on Spark: its tables are what it says, and the plan's rates are those of the builds."""

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


def test_the_plan_by_the_rates_of_a_build_takes_as_long_as_that_build(cluster: ModuleType) -> None:
    from spark_plan import constants_of, planned, rates_of

    least = cluster.Ended({"numbering the nodes": 5.0, "node": 1.0, "node to node": 2.0}, 20.0)
    known = cluster.Ended({"numbering the nodes": 15.0, "node": 5.0, "node to node": 52.0}, 84.0)
    joins = {one: cluster.Ended({"joins and shuffle": seconds}) for one, seconds in ((10_000, 1.0), (20_000_000, 31.0))}
    rates = rates_of({10_000: least, 20_000_000: known}, joins, 10_000, 20_000_000)
    assert rates["spark_nodes"] == pytest.approx(2_000_000 / 10 / 2, rel=0.01)
    assert rates["spark_joins"] == pytest.approx(20_000_000 / 30 / 2, rel=0.01)
    assert planned(20_000_000, constants_of(rates)) == pytest.approx(84.0, rel=0.01)
    assert planned(200_000_000, constants_of(rates)) == pytest.approx(20 + 640, rel=0.01)


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
