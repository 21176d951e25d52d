"""Propagated features are powers of the adjacency matrix times x, in slices, parts and ranks, out of core."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.graphs import library, ring, save_in_parts
from support.infer_workers import SMALL, graph_with_loops, in_threads
from support.stores import left_in
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import SGConv

import hoploom
from hoploom import ConfigError, Store, StoreError
from hoploom.inference.files import RowFile

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")
HOPS = 3


def powers(graph: Data, norm: str) -> list[Tensor]:
    """The rows of each hop, by torch.sparse in float64."""
    count, (source, destination) = graph.x.shape[0], graph.edge_index
    if norm != "mean":  # a self-loop at every node, once, or none
        others = source != destination
        loops = torch.arange(count if norm == "gcn" else 0)
        source, destination = torch.cat([source[others], loops]), torch.cat([destination[others], loops])
    degrees = torch.bincount(destination, minlength=count).double()
    shares = 1 / degrees[destination] if norm == "mean" else (degrees[source] * degrees[destination]).rsqrt()
    shares = shares.nan_to_num(posinf=0)  # the source has no in-edges
    ends = torch.stack([destination, source])
    matrix = torch.sparse_coo_tensor(ends, shares, (count, count), check_invariants=True).coalesce()
    rows = [graph.x.double()]
    for _ in range(HOPS):
        rows.append(torch.sparse.mm(matrix, rows[-1]))
    return rows[1:]


def assert_powers(out: Path, expected: list[Tensor], node_type: str = "node") -> None:
    assert left_in(out / node_type) == [f"x_{hop}.npy" for hop in range(1, HOPS + 1)]
    for hop, rows in enumerate(expected, 1):
        found = np.load(out / node_type / f"x_{hop}.npy", mmap_mode="r")
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, rows.numpy(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("norm", ["gcn", "symmetric", "mean"])
@pytest.mark.parametrize("held", ["memory", "one part", "three parts", "elsewhere", "a budget"])
def test_hops_are_powers_of_the_matrix_times_the_features(norm: Any, held: str, tmp_path: Path) -> None:
    store = hoploom.from_pyg(graph := graph_with_loops())
    if held != "memory":
        store = save_in_parts(store, tmp_path / "store", 1 if held == "one part" else 3)
    if held == "elsewhere":
        store = Store(store.schema, store.graph, store.features)
    if held == "a budget":
        store = hoploom.open(tmp_path / "store", memory=8 * 62 + 10)
    out = hoploom.propagate(store, tmp_path / "out", HOPS, norm=norm, memory=SMALL)
    assert_powers(out, powers(graph, norm))
    assert set(left_in(tmp_path)) <= {"out", "store"}


def test_the_last_hop_is_what_sgc_learns_from(tmp_path: Path) -> None:
    graph = ring(12)
    out = hoploom.propagate(hoploom.from_pyg(graph), tmp_path / "out", HOPS)
    rows = torch.from_numpy(np.load(out / "node" / f"x_{HOPS}.npy"))
    layer = SGConv(rows.shape[1], 5, K=HOPS)
    torch.testing.assert_close(layer.lin(rows), layer(graph.x, graph.edge_index))


@pytest.mark.parametrize("norm", ["gcn", "mean"])
def test_ranks_write_their_shares_of_the_same_files(norm: Any, tmp_path: Path) -> None:
    save_in_parts(hoploom.from_pyg(graph := graph_with_loops()), tmp_path / "store", 2)
    store, out = hoploom.open(tmp_path / "store"), tmp_path / "out"
    raised = in_threads(3, lambda context: hoploom.propagate(store, out, HOPS, context, norm=norm, memory=SMALL))
    assert raised == [None] * 3
    assert_powers(out, powers(graph, norm))


@pytest.mark.parametrize("change", [{"hops": 2}, {"norm": "mean"}])
def test_ranks_that_disagree_are_told_before_anything_is_written(change: dict[str, Any], tmp_path: Path) -> None:
    store = hoploom.from_pyg(ring(12))

    def on_rank(context: Any) -> None:
        options: dict[str, Any] = {"hops": HOPS, "norm": "gcn"} | (change if context.rank == 1 else {})
        hoploom.propagate(store, tmp_path / "out", context=context, memory=SMALL, **options)

    raised = in_threads(3, on_rank)
    assert all(isinstance(error, ConfigError) for error in raised), raised
    assert "rank 0 gives {'hops': 3, 'norm': 'gcn'}, rank 1 {" in str(raised[0])
    assert left_in(tmp_path) == []


def test_each_hop_is_written_once_and_read_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = [], RowFile.write

    def counted(file: RowFile, first: int, rows: Tensor) -> None:
        written.append((file.path.name, rows.numel()))
        write(file, first, rows)

    monkeypatch.setattr(RowFile, "write", counted)
    store = save_in_parts(hoploom.from_pyg(graph := ring(12)), tmp_path / "store", 1)
    assert_powers(hoploom.propagate(store, tmp_path / "out", HOPS, norm="mean"), powers(graph, "mean"))
    assert written == [(f"x_{hop}.npy", graph.x.numel()) for hop in range(1, HOPS + 1)]


def test_learned_rows_and_numbers_in_bytes_are_propagated_as_floats(tmp_path: Path) -> None:
    graph = ring(12)
    graph.x = (graph.x * 3).to(torch.int8)
    assert_powers(hoploom.propagate(hoploom.from_pyg(graph), tmp_path / "bytes", HOPS), powers(graph, "gcn"))
    bare = Data(edge_index=graph.edge_index, num_nodes=12)
    store = hoploom.Embedding(hoploom.from_pyg(bare), "node", dim=6).store
    bare.x = store.x[:]
    assert_powers(hoploom.propagate(store, tmp_path / "learned", HOPS), powers(bare, "gcn"))


def test_a_linear_layer_trains_on_hops_without_the_graph(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_nodes": 600, "avg_degree": 10, "num_features": 16, "num_classes": 4}
    store = hoploom.generate(tmp_path / "store", **options)
    out = hoploom.propagate(store, tmp_path / "out", 2)
    rows = [torch.from_numpy(np.load(out / "node" / f"x_{hop}.npy")) for hop in (1, 2)]
    x, y = torch.cat(rows, dim=1), store.y[:]
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 4)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(5):
        for ids in torch.utils.data.DataLoader(store.split("train").tolist(), batch_size=64, shuffle=True):
            torch.nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
    test = store.split("test")
    assert (model(x[test]).argmax(1) == y[test]).float().mean() > 0.5


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hops": 0}, ConfigError, "hops is 0; give the number of hops, at least 1"),
        ({"hops": 1.5}, ConfigError, "hops is 1.5"),
        ({"norm": "sum"}, ConfigError, "norm is 'sum'; give 'gcn', 'symmetric' or 'mean'"),
        ({"memory": 3}, ConfigError, "memory is 3"),
        ({"out": "taken"}, StoreError, "taken exists"),
        (
            {"graph": "library"},
            ConfigError,
            "one node type and one relation, and the store has 3 node types and 5 relations",
        ),
        ({"graph": "bare"}, ConfigError, "'node' has no features x"),
        ({"graph": "cube"}, ConfigError, r"rows of shape \[2, 2\]; models need one dimension"),
        ({"graph": "empty"}, ConfigError, r"rows of shape \[0\]; models need one dimension, of 1 or more"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], error: type[Exception], match: str, tmp_path: Path) -> None:
    edges = ring(12).edge_index
    graphs: dict[str, Data | HeteroData] = {
        "ring": ring(12),
        "library": library(),
        "bare": Data(edge_index=edges, num_nodes=12),
        "cube": Data(x=torch.zeros(12, 2, 2), edge_index=edges),
        "empty": Data(x=torch.zeros(12, 0), edge_index=edges),
    }
    (tmp_path / "taken").mkdir()
    options = {"hops": 2} | change
    store = hoploom.from_pyg(graphs[options.pop("graph", "ring")])
    with pytest.raises(error, match=match):
        hoploom.propagate(store, tmp_path / options.pop("out", "out"), options.pop("hops"), **options)
    assert left_in(tmp_path) == ["taken"]


@pytest.mark.parametrize("given", [ring(12), "graph.store", Path("graph.store")])
def test_a_graph_that_is_not_opened_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"store is .*; give hoploom.open\(path\) or hoploom.from_pyg\(graph\)"):
        hoploom.propagate(given, tmp_path / "out", 2)
