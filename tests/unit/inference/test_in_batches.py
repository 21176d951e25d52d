"""Inference of models that cannot run layer by layer: in batches, the same rows for any number of ranks."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from support.graphs import random_graph
from support.infer_workers import in_threads, read
from support.stores import left_in
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import GAT, SAGEConv, to_hetero

import hoploom
from hoploom import ConfigError
from hoploom.cli import main
from hoploom.inference import Inference, infer
from hoploom.ingest.synthetic import generate
from hoploom.train import NodeClassification

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")


class Mean(nn.Module):
    """The mean of the neighbours in a batch, twice."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for _ in range(2):
            sums = torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]])
            x = sums / edge_index[1].bincount(minlength=len(x)).clamp(min=1)[:, None]
        return x


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_model_of_pyg_gives_the_rows_of_the_whole_graph(
    world_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("hoploom.inference.infer"), "BATCH_SIZE", 17)
    graph = random_graph(60, 400, 1)
    torch.manual_seed(0)
    model = GAT(graph.x.shape[1], 8, num_layers=2, out_channels=4).eval()
    store, chosen = hoploom.from_pyg(graph), Inference(task=NodeClassification(4))
    assert (
        in_threads(world_size, lambda context: infer(model, store, tmp_path / "out", context, inference=chosen))
        == [None] * world_size
    )
    with torch.no_grad():
        whole = model(graph.x, graph.edge_index)
    torch.testing.assert_close(read(tmp_path / "out" / "node", "output"), whole, atol=1e-5, rtol=1e-5)
    assert read(tmp_path / "out" / "node", "id").tolist() == list(range(60))
    assert read(tmp_path / "out" / "node", "prediction").tolist() == whole.argmax(dim=1).tolist()
    assert "GAT cannot run layer by layer, so its outputs are computed in batches" in capsys.readouterr().err
    assert left_in(tmp_path) == ["out"]


def test_types_with_outputs_are_written_with_the_fanouts_of_a_loader(tmp_path: Path) -> None:
    graph = HeteroData()
    graph["user"].x, graph["item"].x = torch.randn(20, 4), torch.randn(30, 4)
    graph["user", "buys", "item"].edge_index = torch.randint(20, (2, 90))
    graph["item", "rev_buys", "user"].edge_index = graph["user", "buys", "item"].edge_index.flip(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv(-1, 4)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index)

    model, store = to_hetero(Net(), graph.metadata(), debug=False), hoploom.from_pyg(graph)
    with torch.no_grad():
        whole = model.eval()(graph.x_dict, graph.edge_index_dict)
    make: Any = lambda nodes: hoploom.NeighborLoader(store, [-1], nodes, batch_size=3)  # noqa: E731
    out = infer(model, store, tmp_path / "out", inference=Inference(loader=make, node_types=list(whole)))
    for name, rows in whole.items():
        torch.testing.assert_close(read(out / name, "output"), rows, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_written_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    graph = random_graph(60, 400, 1)
    store, model = hoploom.from_pyg(graph), GAT(graph.x.shape[1], 8, num_layers=2, out_channels=4)
    for options, message in (
        ({"columns": ["embedding"]}, "columns has 'embedding', but GAT cannot run layer by layer"),
        ({"task": NodeClassification(3)}, "returns rows of shape \\(4,\\) for 3 classes"),
    ):
        with pytest.raises(ConfigError, match=message):
            infer(model, store, tmp_path / "out", inference=Inference(**options))
    with pytest.raises(
        ConfigError, match=r"Mean cannot run layer by layer and has no num_layers, .* Inference\(loader="
    ):
        infer(Mean(), store, tmp_path / "out")
    some = Inference(loader=lambda nodes: hoploom.NeighborLoader(store, [-1], torch.arange(7), batch_size=3))
    with pytest.raises(ConfigError, match=r"the loader has 7 seeds for the 60 nodes of 'node'"):
        infer(Mean(), store, tmp_path / "out", inference=some)
    assert left_in(tmp_path) == []


MODEL = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, batch):
        sums = batch.x.index_add(0, batch.edge_index[1], batch.x[batch.edge_index[0]])
        return self.linear(sums)[: batch.batch_size]

def make(store, num_outputs):
    return Own(store.schema.node_types[0].fields["x"].shape[0], num_outputs)
"""
RUN = """
store = "graph.store"
[model]
factory = "own_of_infer:make"
[loader]
fanouts = [3]
mode = "subgraph"
batch_size = 100
[train]
epochs = 1
[output]
loggers = []
"""


def test_infer_of_a_run_takes_its_fanouts_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate(tmp_path / "graph.store", num_nodes=400, avg_degree=6, num_features=8, num_classes=4)
    (tmp_path / "own_of_infer.py").write_text(MODEL)
    (tmp_path / "run.toml").write_text(RUN)
    assert main(["train", str(tmp_path / "run.toml"), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["infer", str(tmp_path / "run"), "--json"]) == 0
    printed = capsys.readouterr()
    assert "Own cannot run layer by layer, so its outputs are computed in batches, with fanouts [3]" in printed.err
    told = json.loads(printed.out)
    assert (told["columns"], told["rows"]) == (["output", "prediction"], {"node": 400})
    rows = pyarrow.parquet.read_table(tmp_path / "run" / "nodes" / "node")
    assert (rows["id"].to_pylist(), len(rows["output"][0])) == (list(range(400)), 4)
