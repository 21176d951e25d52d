"""A store that Spark cuts has the bytes that one process writes."""

from pathlib import Path

import pytest
import torch
from support.stores import contents
from support.tables import IDS, NODES, build_here, needs_spark, write_graph
from torch_geometric.data import HeteroData

pytest.importorskip("pyspark")

import hoploom
from hoploom.cli import main
from hoploom.errors import ConfigError
from hoploom.load.presample import Presampling, count_visits
from hoploom.partition import on_spark
from hoploom.partition.on_spark import SparkOptions, partition_on_spark
from hoploom.store import open_store
from hoploom.store.check import problems

pytestmark = [needs_spark, pytest.mark.slow, pytest.mark.timeout(600)]
GIVEN = SparkOptions(master="local[2]", memory=1 << 30)


@pytest.fixture(autouse=True)
def several_tasks(monkeypatch: pytest.MonkeyPatch, short_java: None) -> None:
    monkeypatch.setattr(on_spark, "LEAST_NODES", 64)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    folder = tmp_path / "graph"
    hoploom.generate(folder, num_nodes=900, num_features=3, heterogeneous=True, num_parts=2, weights=True, times=True)
    return folder


@pytest.mark.parametrize("method", ["hash", "range", "stream"])
def test_the_bytes_are_those_of_one_process(method: str, graph: Path, tmp_path: Path) -> None:
    told = hoploom.partition(graph, tmp_path / "one", 3, method=method, fanouts=None)
    assert partition_on_spark(graph, tmp_path / "shared", 3, GIVEN, method=method, fanouts=None) == told
    assert contents(tmp_path / "shared") == contents(tmp_path / "one")


def test_types_and_relations_may_be_empty(tmp_path: Path) -> None:
    data = HeteroData()
    data["a"].x, data["b"].x, data["c"].x = torch.rand(30, 2), torch.rand(20, 2), torch.rand(0, 2)
    data["a", "to", "b"].edge_index = torch.tensor([[v % 30 for v in range(80)], [v % 20 for v in range(80)]])
    for ends in (("b", "a"), ("a", "c"), ("c", "a"), ("c", "c")):
        data[ends[0], "none", ends[1]].edge_index = torch.empty(2, 0, dtype=torch.int64)
    hoploom.from_pyg(data).save(tmp_path / "graph")
    partition_on_spark(tmp_path / "graph", tmp_path / "shared", 3, GIVEN, method="hash", fanouts=None)
    assert list(problems(tmp_path / "shared")) == []
    hoploom.partition(tmp_path / "graph", tmp_path / "one", 3, method="hash", fanouts=None)
    assert contents(tmp_path / "shared") == contents(tmp_path / "one")


def test_edges_have_the_new_times_of_their_source_nodes(tmp_path: Path) -> None:
    write_graph(tmp_path, IDS["sparse"], 3)
    build_here(tmp_path, NODES, parts=2)
    hoploom.partition(tmp_path / "out.store", tmp_path / "one", 3, method="hash", fanouts=None)
    partition_on_spark(tmp_path / "out.store", tmp_path / "shared", 3, GIVEN, method="hash", fanouts=None)
    assert contents(tmp_path / "shared") == contents(tmp_path / "one")


def test_the_most_used_nodes_come_first_in_their_part(graph: Path, tmp_path: Path) -> None:
    partition_on_spark(graph, tmp_path / "hot", 2, GIVEN, method="range", fanouts=[2, 1])
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
    words = f"{graph} -o {tmp_path / 'out'} --parts 2 --method hash --fanouts none --engine spark"
    assert main(["partition", *words.split(), "--master", "local[2]", "--memory", "1GB"]) == 0
    assert "edges from another part" in capsys.readouterr().out
    hoploom.partition(graph, tmp_path / "one", 2, method="hash", fanouts=None)
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


@pytest.mark.parametrize(("method", "file"), [("stream", "csc.indptr.npy"), ("hash", "x.npy")])
def test_a_damaged_file_is_our_error_and_nothing_is_left(method: str, file: str, graph: Path, tmp_path: Path) -> None:
    damaged = next(graph.rglob(file))
    damaged.write_bytes(damaged.read_bytes()[:-8])
    with pytest.raises(hoploom.errors.StoreError, match=r"copy (the store|it) again"):
        partition_on_spark(graph, tmp_path / "out", 2, GIVEN, method=method, fanouts=None)
    assert [path.name for path in tmp_path.iterdir()] == ["graph"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "best"}, "unknown method"),
        ({"num_parts": 40_000}, "give 1 to"),
        ({"seeds": "tran"}, "name of a split"),
    ],
)
def test_a_wrong_option_is_an_error_before_spark_starts(
    graph: Path, tmp_path: Path, options: dict[str, object], words: str
) -> None:
    given = {"num_parts": 4, "method": "stream", "seeds": None} | options
    num_parts = given.pop("num_parts")
    with pytest.raises(ConfigError, match=words):
        partition_on_spark(graph, tmp_path / "out", num_parts, SparkOptions(), **given)  # type: ignore[arg-type]
