"""A store cut on Spark is the one that a single process makes, or as good."""

import shutil
from pathlib import Path

import pytest
import torch
from support.tables import IDS, NODES, build_here, contents, write_graph
from torch_geometric.data import HeteroData

pytest.importorskip("pyspark")

import hoploom
from hoploom.cli import main
from hoploom.load.presample import Presampling, count_visits
from hoploom.partition.spark import partition as cutting
from hoploom.partition.spark import placing
from hoploom.partition.spark.partition import SparkOptions, partition_on_spark
from hoploom.store import open_store
from hoploom.store.check import problems

needs_spark = pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")
pytestmark = [needs_spark, pytest.mark.slow, pytest.mark.timeout(600)]
MEMORY = 1 << 30


@pytest.fixture(autouse=True)
def short_lived_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JVM of seconds: to compile well what runs once takes longer than to run it."""
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", prepend=" ")


@pytest.fixture(autouse=True)
def several_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task for every core, however small the graph; and clusters are not so few that the driver does the rest."""
    monkeypatch.setattr(cutting, "LEAST_NODES", 64)
    monkeypatch.setattr(placing, "MOST_CLUSTERS", 40)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Three types, five relations with weights and times, in two parts."""
    folder = tmp_path / "graph"
    hoploom.generate(folder, num_nodes=900, num_features=3, heterogeneous=True, num_parts=2, weights=True, times=True)
    return folder


@pytest.mark.parametrize("method", ["hash", "range"])
def test_the_bytes_are_those_of_one_process(method: str, graph: Path, tmp_path: Path) -> None:
    told = hoploom.partition(graph, tmp_path / "one", 3, method=method, fanouts=None)
    given = SparkOptions(master="local[2]", memory=MEMORY)
    assert partition_on_spark(graph, tmp_path / "shared", 3, given, method=method, fanouts=None) == told
    assert contents(tmp_path / "shared") == contents(tmp_path / "one")


@pytest.mark.parametrize("method", ["hash", "stream"])
def test_types_and_relations_may_be_empty(method: str, tmp_path: Path) -> None:
    data = HeteroData()
    data["a"].x, data["b"].x, data["c"].x = torch.rand(30, 2), torch.rand(20, 2), torch.rand(0, 2)
    data["a", "to", "b"].edge_index = torch.tensor([[v % 30 for v in range(80)], [v % 20 for v in range(80)]])
    for ends in (("b", "a"), ("a", "c"), ("c", "a"), ("c", "c")):
        data[ends[0], "none", ends[1]].edge_index = torch.empty(2, 0, dtype=torch.int64)
    hoploom.from_pyg(data).save(tmp_path / "graph")
    given = SparkOptions(master="local[2]", memory=MEMORY)
    partition_on_spark(tmp_path / "graph", tmp_path / "shared", 3, given, method=method, fanouts=None)
    assert list(problems(tmp_path / "shared")) == []
    if method == "hash":
        hoploom.partition(tmp_path / "graph", tmp_path / "one", 3, method="hash", fanouts=None)
        assert contents(tmp_path / "shared") == contents(tmp_path / "one")


def test_edges_have_the_new_times_of_their_source_nodes(tmp_path: Path) -> None:
    write_graph(tmp_path, IDS["sparse"], 3)
    build_here(tmp_path, NODES, parts=2)
    hoploom.partition(tmp_path / "out.store", tmp_path / "one", 3, method="hash", fanouts=None)
    given = SparkOptions(master="local[2]", memory=MEMORY)
    partition_on_spark(tmp_path / "out.store", tmp_path / "shared", 3, given, method="hash", fanouts=None)
    assert contents(tmp_path / "shared") == contents(tmp_path / "one")


def test_executors_do_not_change_what_stream_makes(graph: Path, tmp_path: Path) -> None:
    made = {}
    for cores in (1, 2):
        given = SparkOptions(master=f"local[{cores}]", memory=cores * MEMORY)
        told = partition_on_spark(graph, tmp_path / f"by-{cores}", 3, given)
        made[cores] = told, contents(tmp_path / f"by-{cores}")
    assert made[1] == made[2]
    assert list(problems(tmp_path / "by-2")) == []
    sizes = [sum(part.num_nodes.values()) for part in told.parts]
    assert max(sizes) <= sum(sizes) / 3 * 1.06
    one = hoploom.partition(graph, tmp_path / "one", 3, fanouts=None)
    assert told.edge_cut <= 1.3 * one.edge_cut


def test_the_most_used_nodes_come_first_in_their_part(graph: Path, tmp_path: Path) -> None:
    given = SparkOptions(master="local[2]", memory=MEMORY)
    partition_on_spark(graph, tmp_path / "hot", 2, given, method="range", fanouts=[2, 1])
    assert list(problems(tmp_path / "hot")) == []
    store = open_store(tmp_path / "hot")
    asked = count_visits(store, [2, 1], "train", Presampling(batches=range(50)))
    first = last = 0.0
    for index, node_type in enumerate(store.schema.node_types):
        for part in store.parts:
            begin, size = part.first_nodes[index], part.num_nodes[index]
            of_part = asked[node_type.name][begin : begin + size].double()
            first, last = first + float(of_part[: size // 4].sum()), last + float(of_part[-(size // 4) :].sum())
    assert first > 1.5 * last


def test_the_command_cuts_on_spark(graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--parts",
        "2",
        "--method",
        "hash",
        "--fanouts",
        "none",
        "--engine",
        "spark",
        "--master",
        "local[2]",
        "--memory",
        "1GB",
    ]
    assert main(["partition", str(graph), "-o", str(tmp_path / "out"), *words]) == 0
    assert "edges from another part" in capsys.readouterr().out
    hoploom.partition(graph, tmp_path / "one", 2, method="hash", fanouts=None)
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_an_error_in_a_task_is_ours_and_nothing_is_left(graph: Path, tmp_path: Path) -> None:
    damaged = next(graph.rglob("csc.indptr.npy"))
    damaged.write_bytes(damaged.read_bytes()[:-8])
    with pytest.raises(hoploom.errors.StoreError, match="copy the store again"):
        partition_on_spark(graph, tmp_path / "out", 2, SparkOptions(master="local[2]", memory=MEMORY))
    assert [path.name for path in tmp_path.iterdir()] == ["graph"]
