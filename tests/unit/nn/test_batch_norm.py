"""Batch and graph norm: as torch and PyG in one process, and the same numbers on several ranks that share nodes."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.edge_workers import trained
from support.fit_workers import alone
from support.graphs import random_graph
from support.infer_workers import read
from torch import nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphNorm

import hoploom
from hoploom import ConfigError
from hoploom.inference import Inference, infer
from hoploom.nn import GNN, GraphSAGE, Shape, batch_norm
from hoploom.nn.batch_norm import BatchNorms
from hoploom.ranks.spawn import spawn
from hoploom.train.runs.run import load_run
from hoploom.train.runs.run_file import check_run, parse_run_file

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")
RUN = """
store = "graph.store"
[model]
hidden = 8
norm = "batch"
[loader]
fanouts = [3, 3]
batch_size = 20
threads = 1
[optimizer]
name = "sgd"
lr = 0.1
[train]
epochs = 2
[output]
loggers = []
"""


def one_type() -> Data:
    """60 nodes with far more edges than a batch has nodes: ranks share most of their sources."""
    graph = random_graph(60, 600, 1)
    graph.x = torch.randn(60, 5, generator=torch.Generator().manual_seed(1)) + 10  # a mean above the deviation
    return labelled(graph, graph)


def many_types() -> HeteroData:
    """60 papers of ten authors and one venue, so that a type has a single row."""
    generator = torch.Generator().manual_seed(2)
    data = HeteroData()
    for name, count in (("paper", 60), ("author", 10), ("venue", 1)):
        data[name].x = torch.randn(count, 4, generator=generator)
    for source, count in (("author", 10), ("venue", 1), ("paper", 60)):
        ends = torch.stack([torch.randint(count, (150,), generator=generator), torch.arange(150) % 60])
        data[source, "to", "paper"].edge_index = ends
        data["paper", "back", source].edge_index = ends.flip(0)
    return labelled(data, data["paper"])


def labelled(graph: Any, storage: Any) -> Any:
    nodes = torch.arange(60)
    storage.y = nodes % 3
    storage.train_mask, storage.val_mask, storage.test_mask = nodes < 50, nodes >= 55, nodes >= 50
    return graph


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "kind", "others"),
    [
        (one_type, "gcn", []),
        (one_type, "sage", ["loader.temporal=uniform"]),
        (many_types, "rsage", ["model.residual=true"]),
        (many_types, "rsage", ["model.norm=graph"]),
    ],
    ids=["one type", "trees", "many types", "graph norm"],
)
def test_several_ranks_train_as_one_process_does(graph: Any, kind: str, others: list[str], tmp_path: Path) -> None:
    """The weights and the running statistics, after two epochs."""
    data = graph()
    dated = {"time_attr": "time"} if "loader.temporal=uniform" in others else {}
    if dated:
        data.time = torch.arange(60) // 30
    hoploom.from_pyg(data, **dated).save(tmp_path / "graph.store")
    (tmp_path / "run.toml").write_text(RUN.replace("[model]\n", f'[model]\nname = "{kind}"\n'))
    found = []
    for world_size in (1, 3):
        spawn(trained, world_size, [str(tmp_path), others], device="cpu", timeout=60)
        found.append(load_run(tmp_path / f"of-{world_size}", checkpoint="last").model.state_dict())
    assert any("running_var" in name for name in found[0])
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, atol=1e-4, rtol=1e-4)


def test_one_process_normalises_as_torch_does() -> None:
    """A layer between two convolutions, in training and after it."""
    graph = one_type()
    model, reference = GraphSAGE(5, 8, 2, 3, norm="batch"), [nn.BatchNorm1d(5), nn.BatchNorm1d(8)]
    first, second = (model.stage(depth).conv(("node", "to", "node")) for depth in range(2))
    for is_training in (True, False):
        model.train(is_training)
        entered = [norm.train(is_training) for norm in reference]
        hidden = first(entered[0](graph.x), graph.edge_index).relu()
        torch.testing.assert_close(model(graph), second(entered[1](hidden), graph.edge_index))


def test_graph_norm_is_that_of_pyg_and_keeps_its_statistics() -> None:
    """Outputs, gradients of rows and parameters; afterwards, rows alone have the output that they have in a batch."""
    norms, reference = BatchNorms({"a": 4}, batch_norm.GraphNorm), GraphNorm(4)
    with torch.no_grad():
        for parameter, value in zip(
            reference.parameters(), ([2.0, 1, 1, 1], [0.0, 3, 0, 0], [1, 1, 0.3, 0]), strict=True
        ):
            parameter.copy_(torch.tensor(value))
    norms["a"].load_state_dict(reference.state_dict(), strict=False)
    norms["a"].momentum = 1
    rows = (torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) + 5).requires_grad_()
    own, expected = norms.normed({"a": rows}, {})["a"], reference(rows)
    torch.testing.assert_close(own, expected)
    grads, wanted = (
        torch.autograd.grad(out.square().sum(), [rows, *module.parameters()])
        for out, module in ((own, norms["a"]), (expected, reference))
    )
    torch.testing.assert_close(grads, wanted, atol=1e-3, rtol=1e-4)
    norms.eval()
    torch.testing.assert_close(norms.normed({"a": rows[:3]}, {})["a"], expected[:3], atol=0.1, rtol=0.02)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize(("norm", "share", "expected"), [("batch", 1, 3), ("graph", 1, 3), ("graph", 0.5, 5)])
def test_less_than_two_nodes_become_parameters(norm: str, share: float, expected: float, count: int) -> None:
    """They become the bias, 3. If graph norm leaves half of a row, this is the deviation, too: the weight is added."""
    norms, rows = BatchNorms({"a": 2, "b.c": 2}, batch_norm.NORMS[norm]), torch.rand(count, 2) + 1
    nn.init.constant_(norms["a"].bias, 3)
    nn.init.constant_(norms["a"].weight, 2)
    if norm == "graph":
        nn.init.constant_(norms["a"].mean_scale, share)
    before = norms["a"].running_var.clone()
    out = norms.normed({"a": rows, "b.c": torch.rand(5, 2)}, {})
    torch.testing.assert_close(out["a"], torch.full((count, 2), float(expected)), atol=1e-3, rtol=0)
    assert torch.equal(norms["a"].running_var, before)
    torch.testing.assert_close(out["b.c"].mean(0), torch.zeros(2))


@pytest.mark.parametrize("num_ranks", [9, 11, 18])
def test_one_node_on_many_ranks_is_no_variance(num_ranks: int) -> None:
    """The sum of 1 / n is 1.0000000000000002 for these."""
    norm, rows, share = nn.BatchNorm1d(1), torch.tensor([[1000.3]]), 1 / torch.tensor(float(num_ranks)).double()
    of_rank = torch.stack([share, share * rows.double()[0, 0], share * rows.double().square()[0, 0]])
    total = sum(of_rank for _ in range(num_ranks))
    assert float(total[0]) > 1
    batch_norm._normed(norm, rows, total)
    assert (float(norm.running_var), int(norm.num_batches_tracked)) == (1, 0)


def test_a_copy_or_a_file_of_a_wrapped_model_has_no_context() -> None:
    model = GraphSAGE(5, 8, 2, 3, norm="batch")
    model.norms[0].context = alone()  # as `wrap` sets it
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert copied.norms[0].context is None
        torch.testing.assert_close(copied.state_dict(), model.state_dict())
    assert model.norms[0].context is not None


@pytest.mark.parametrize("norm", ["batch", "graph"])
def test_inference_is_layer_by_layer_with_the_running_statistics(norm: Any, tmp_path: Path) -> None:
    graph = many_types()
    store = hoploom.from_pyg(graph)
    model = GNN("rsage", store.schema, Shape(8, 2, 3, norm=norm, residual=True))
    model(graph)  # moves the running statistics
    infer(model, store, tmp_path / "out", inference=Inference(columns=["output"], memory=2048))
    expected = model.eval()(graph)["paper"].detach()
    torch.testing.assert_close(read(tmp_path / "out" / "paper", "output"), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm", ["batch_norm", "graphs", 1])
def test_another_norm_is_refused(norm: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"give 'layer' \(or True\), 'batch' or 'graph', before each convolution, or take PyG"
    ):
        GraphSAGE(5, 8, 2, 3, norm=norm)


def test_run_toml_takes_batch_and_refuses_it_for_whole_steps() -> None:
    assert parse_run_file(RUN).model.norm == "batch"
    assert parse_run_file(RUN.replace('"batch"', '"layer"')).model.norm == "layer"
    with pytest.raises(ConfigError, match=r'model.norm.* give true, false, "layer", "batch" or "graph"'):
        parse_run_file(RUN.replace('"batch"', '"layer_norm"'))
    placed = ['placement.topology="cuda"', 'placement.features="cuda"', "train.whole_steps=true"]
    run_file = parse_run_file(RUN, placed)
    with pytest.raises(ConfigError, match=r"whole steps have no batch norm; take model\.norm = true"):
        check_run(run_file, 1, resume=False)
