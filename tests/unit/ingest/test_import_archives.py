"""NumPy and SciPy archives become stores that hold what PyG makes of them; what fits no name is refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from support import ROOT
from support.raw_layouts import NUM_NODES, features, ring_edges
from support.stores import assert_same, left_in
from torch import Tensor
from torch_geometric.io.npz import read_npz
from torch_geometric.utils import to_undirected

import hoploom
from hoploom import DataError, Store
from hoploom.ingest.formats import import_archive
from hoploom.ingest.stream import EdgeRule
from hoploom.store.check import problems

pytestmark = pytest.mark.usefixtures("one_thread", "no_sync")

DATA = Path(os.environ.get("HOPLOOM_DATA") or ROOT.parent / "shared" / "data")
IDS = np.arange(NUM_NODES)
UNDIRECTED = EdgeRule(undirected=True, deduplicate=True, drop_loops=True)


def archive(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **arrays)
    return path


def expected(edge_index: Any, **more: Tensor) -> Store:
    """The ring with features, labels and a split; `more` are edge fields."""
    edge_index = torch.as_tensor(edge_index)
    order = torch.argsort(edge_index[1], stable=True)
    edges = {"edge_index": edge_index[:, order], **{name: values[order] for name, values in more.items()}}
    weight = "weight" if "weight" in more else None
    nodes = {"x": torch.from_numpy(features()), "y": torch.from_numpy(IDS)}
    return hoploom.from_tensors(nodes, edges, splits={"train": torch.arange(6)}, weight_attr=weight)


MASK = {"train_mask": IDS < 6}
SHORT = {"x": features(), "y": IDS, **MASK}
LONG = {"node_features": features(), "node_labels": IDS[:, None], "train_idx": IDS[5::-1]}
ROW, COL = ring_edges()
LAYOUTS: dict[str, dict[str, Any]] = {
    "edge_index": {"edge_index": ring_edges(), **SHORT},
    "edge_index by column": {"edge_index": np.asfortranarray(ring_edges()), **LONG},
    "edge_index int32": {"edge_index": ring_edges().astype(np.int32), **SHORT},
    "edges": {"edges": ring_edges().T, **LONG},
    "row and col": {"row": ROW, "col": COL.astype(np.int32), **SHORT},
    "edge_src and edge_dst": {"edge_src": ROW, "edge_dst": COL, **SHORT, "num_classes": 10, "names": np.array(["a"])},
    "features by column": {"edge_index": ring_edges(), **SHORT, "x": np.asfortranarray(features())},
}


@pytest.mark.parametrize("arrays", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_of_arrays_is_the_same_graph(tmp_path: Path, arrays: dict[str, Any]) -> None:
    store = import_archive(archive(tmp_path / "graph.npz", **arrays), tmp_path / "out")
    assert_same(store, expected(ring_edges()))
    assert list(problems(tmp_path / "out")) == []


def test_arrays_of_a_row_per_node_or_edge_are_fields(tmp_path: Path) -> None:
    weight, kind = torch.arange(20) / 4, torch.arange(20) % 3
    arrays = {"edge_weight": weight.numpy()[:, None], "kind": kind.numpy(), "year": 2000 + IDS}
    path = archive(tmp_path / "graph.npz", edge_index=ring_edges(), **SHORT, **arrays)
    store = import_archive(path, tmp_path / "out", ignore=["year"])
    assert_same(store, expected(ring_edges(), weight=weight, kind=kind))
    store = import_archive(path, tmp_path / "more")
    assert store.parts[0].tables["node", "year"].rows.tolist() == [2000 + v for v in range(NUM_NODES)]


def test_the_name_says_whose_field_it_is_where_there_are_as_many_nodes_as_edges(tmp_path: Path) -> None:
    ends = np.stack([IDS, (IDS + 1) % NUM_NODES])
    arrays = {"edge_index": ends, "node_rank": IDS, "edge_time": IDS, "num_nodes": NUM_NODES, "num_edges": [NUM_NODES]}
    store = import_archive(archive(tmp_path / "graph.npz", **arrays), tmp_path / "out")
    assert set(store.schema.node_types[0].fields) == {"node_rank"}
    assert set(store.schema.relations[0].fields) == {"edge_time"}


def test_an_empty_list_of_ids_may_be_of_any_dtype(tmp_path: Path) -> None:
    path = archive(tmp_path / "graph.npz", edge_index=np.empty((2, 0)), x=features(), val_idx=np.array([]))
    store = import_archive(path, tmp_path / "out")
    assert store.schema.relations[0].num_edges == store.split("val").numel() == 0


@pytest.mark.parametrize("chunk_bytes", [1, 6, 1 << 20])
def test_several_masks_under_one_name_are_numbered(tmp_path: Path, chunk_bytes: int) -> None:
    masks = np.stack([IDS < 6, IDS > 6])
    path = archive(tmp_path / "graph.npz", edge_index=ring_edges(), x=features(), train_masks=masks, val_mask=masks.T)
    store = import_archive(path, tmp_path / "out", chunk_bytes=chunk_bytes)
    for name in ("train", "val"):
        assert [store.split(f"{name}{number}").tolist() for number in (0, 1)] == [[0, 1, 2, 3, 4, 5], [7, 8, 9]]


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
def test_a_scipy_matrix_is_a_weighted_graph_from_row_to_column(tmp_path: Path, form: str) -> None:
    weight = torch.arange(20) / 4 + 1
    matrix = sp.coo_matrix((weight.numpy(), (ROW, COL)), shape=(NUM_NODES, NUM_NODES)).asformat(form)
    sp.save_npz(tmp_path / "graph.npz", matrix)
    store = import_archive(tmp_path / "graph.npz", tmp_path / "out", rule=EdgeRule())
    order = np.lexsort([ROW, COL])  # lists in order of their sources, whatever the form
    edges = {"edge_index": torch.from_numpy(ring_edges()[:, order]), "weight": weight.float()[order]}
    assert_same(store, hoploom.from_tensors({}, edges, num_nodes=NUM_NODES, weight_attr="weight"))


def benchmark_archive(path: Path, num_nodes: int, width: int, seed: int) -> Path:
    """The layout of gnn-benchmark's Coauthor and Amazon files, names of nodes as pickled objects among them."""
    draw = np.random.default_rng(seed)
    adjacency = sp.random(num_nodes, num_nodes, 0.1, format="csr", rng=draw)
    adjacency.data[:] = 1
    features = sp.random(num_nodes, width, 0.2, format="csr", rng=draw)
    features.data[:] = 1
    arrays: dict[str, Any] = {"labels": draw.integers(5, size=num_nodes)}
    for prefix, matrix in (("adj", adjacency), ("attr", features)):
        for name in ("data", "indices", "indptr", "shape"):
            arrays[f"{prefix}_{name}"] = np.array(getattr(matrix, name))
    return archive(path, **arrays, idx_to_node=np.array([object()] * num_nodes))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_benchmark_archive_is_what_pyg_makes_of_it(tmp_path: Path, seed: int) -> None:
    path = benchmark_archive(tmp_path / "graph.npz", 30, 20, seed)
    chunk = (56, 80, 600)[seed]  # seven entries; a row of features; several rows
    store = import_archive(path, tmp_path / "out", rule=UNDIRECTED, chunk_bytes=chunk)
    data = read_npz(str(path))
    order = np.lexsort([data.edge_index[0], data.edge_index[1]])
    data.edge_index = data.edge_index[:, order].contiguous()
    assert store.schema.relations[0].reverse == "to"  # both directions are in the relation itself
    assert_same(store, hoploom.from_pyg(data), but_for_reverse=True)


@pytest.mark.parametrize("name", ["tolokers", "coauthor_physics"])
def test_real_archives_are_read_whole(tmp_path: Path, name: str) -> None:
    path = DATA / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"{path} is absent; set HOPLOOM_DATA to the folder that holds it")
    with np.load(path) as arrays:
        found = dict(arrays)
    if name == "tolokers":
        store = import_archive(path, tmp_path / "out", rule=UNDIRECTED)
        edge_index = to_undirected(torch.from_numpy(found["edges"].T))
        x, train = found["node_features"], np.flatnonzero(found["train_masks"][3])
        assert store.split("train3").tolist() == train.tolist()
    else:
        wide = found["x_shape"][1] // 100  # dense, all of it would be over a GB
        matrix = sp.csr_matrix((found["x_values"], found["x_indices"], found["x_indptr"]), found["x_shape"])
        matrix = matrix[:, :wide].tocsr()
        small = {name: values for name, values in found.items() if not name.startswith("x_")}
        parts = {f"x_{n}": getattr(matrix, n) for n in ("indptr", "indices")} | {"x_values": matrix.data}
        path = archive(tmp_path / "narrow.npz", **small, **parts, x_shape=np.array(matrix.shape))
        store = import_archive(path, tmp_path / "out")
        edge_index, x = torch.from_numpy(np.stack([found["edge_src"], found["edge_dst"]])).long(), matrix.todense()
        assert store.split("test").tolist() == np.flatnonzero(found["test_mask"]).tolist()
    (part,) = store.parts
    assert np.array_equal(part.tables["node", "x"].rows.numpy(), np.asarray(x))
    (lists,) = part.lists
    destinations = torch.repeat_interleave(lists.indptr.diff())
    pairs = torch.stack([lists.indices.long(), destinations])
    assert torch.equal(_sorted(pairs), _sorted(edge_index))


def _sorted(edge_index: Tensor) -> Tensor:
    return edge_index[:, np.lexsort(edge_index.numpy())]


# --- archives that are not sound ------------------------------------------------------------

LONE = {"edge_index": ring_edges()}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no edges": ({"x": features()}, "has no edges; save them as edge_index [2, e], or as row and col"),
    "no nodes": (LONE, "does not say how many nodes there are; save an array num_nodes with it"),
    "an end out of range": (LONE | {"num_nodes": 9}, "edge_index, row 19: source 9 is not in [0, 9)"),
    "an array of its own": (
        LONE | SHORT | {"extra": np.arange(7)},
        "extra has shape (7,) for 10 nodes and 20 edges; give a row for each of one; leave it out with ignore",
    ),
    "too few labels": (LONE | SHORT | {"y": IDS[:9]}, "y has 9 rows for 10 nodes (as many as x has)"),
    "ends of two lengths": ({"row": ROW, "col": COL[:9], **SHORT}, "col has 9 rows for 20 edges (row)"),
    "a label below -1": (LONE | SHORT | {"y": IDS - 2}, "y, row 1: label -2 is not in"),
    "objects": (LONE | {"x": np.array([[object()]] * 10)}, "x holds pickled objects, which are never loaded"),
    "text": (LONE | {"x": np.array([["a"]] * 10)}, "x has dtype <U1; save it as one of"),
    "edges the wrong way": ({"edge_index": ring_edges().T, **SHORT}, "edge_index has shape (20, 2); give [2, number"),
    "a split out of range": (
        LONE | SHORT | {"val_idx": np.array([3, 12])},
        "val_idx, row 2: node 12 is not in [0, 10)",
    ),
    "a short mask": (
        LONE | SHORT | {"val_mask": IDS[:9] > 3},
        "val_mask has shape (9,) and dtype bool; give masks of one entry per node (10)",
    ),
    "ends that are fractions": (
        LONE | SHORT | {"edge_index": ring_edges() + 0.5},
        "edge_index has dtype float64; ends of",
    ),
    "ends that are not known": (
        SHORT | {"src": ROW, "dst": np.where(COL > 3, np.nan, 1)},
        "dst has dtype float64; ends",
    ),
    "ends that are yes or no": (LONE | SHORT | {"edge_index": ring_edges() > 3}, "edge_index has dtype bool; ends of"),
    "a split of fractions": (
        LONE | SHORT | {"val_idx": np.array([0.5, 1.7])},
        "val_idx has dtype float64; ids of nodes",
    ),
    "another number of nodes": (
        LONE | SHORT | {"num_nodes": 11},
        "graph.npz: num_nodes is 11, but there are 10 nodes (as many as x has); correct one, or leave num_nodes out",
    ),
    "another number of edges": (LONE | SHORT | {"num_edges": 9}, "num_edges is 9, but there are 20 edges (edge_index)"),
    "half a node": (LONE | {"num_nodes": 10.5}, "num_nodes has dtype float64; save it as an integer"),
    "a field of nodes or of edges": (
        {"row": IDS, "col": IDS, "year": IDS, "x": features()},
        "year has shape (10,) for 10 nodes and 10 edges; give a row for each of one; leave it out with ignore, or call",
    ),
    "a format that is a list": (
        {"format": ["csr", "x"], "data": IDS},
        "format holds <U3 (2,); a short text was expect",
    ),
    "a format that is empty": ({"format": np.array([], "U3"), "data": IDS}, "format holds <U3 (0,); a short text"),
    "a format that is a number": ({"format": 5, "data": IDS}, "format holds int64 (); a short text was expected"),
    "a format that is no text": ({"format": b"\xff\xfe", "data": IDS}, "holds a matrix of format"),
    "a format that is a book": ({"format": "x" * 9999, "data": IDS}, "format holds <U9999 (); a short text"),
    "a format alone": ({"format": "csr"}, "a csr matrix lacks ['data', 'shape', 'indices', 'indptr']"),
    "another format alone": ({"format": "dia"}, "graph.npz holds a matrix of format 'dia'; save matrix.tocsr()"),
    "a negative weight": (LONE | SHORT | {"edge_weight": -np.arange(20.0)}, "weight"),
}


@pytest.mark.parametrize(("arrays", "said"), BAD.values(), ids=BAD.keys())
def test_an_archive_that_is_not_sound_is_refused(tmp_path: Path, arrays: dict[str, Any], said: str) -> None:
    path = archive(tmp_path / "graph.npz", **arrays)
    with pytest.raises(DataError) as raised:
        import_archive(path, tmp_path / "out")
    assert said in str(raised.value)
    assert left_in(tmp_path) == ["graph.npz"]


def changed(name: str, change: Callable[[Any], Any], tmp_path: Path) -> str:
    path = benchmark_archive(tmp_path / "graph.npz", 30, 20, 0)
    with np.load(path, allow_pickle=True) as arrays:
        found = dict(arrays)
    archive(path, **(found | {name: change(found[name])}))
    with pytest.raises(DataError) as raised:
        import_archive(path, tmp_path / "out")
    return str(raised.value)


def test_a_matrix_that_is_not_sound_is_refused(tmp_path: Path) -> None:
    assert "adj_indptr falls after entry" in changed("adj_indptr", lambda a: np.r_[0, a[-1], a[2:]], tmp_path)
    assert "adj_indptr has shape (30,) for 30 rows" in changed("adj_indptr", lambda a: a[:-1], tmp_path)
    assert "adj_indptr runs from 0 to" in changed("adj_indptr", lambda a: np.r_[a[:-1], a[-1] + 1], tmp_path)
    assert "adj_indptr has dtype float64; offsets" in changed("adj_indptr", lambda a: a + 0.0, tmp_path)
    assert "adj_indices has dtype float32; ends of" in changed("adj_indices", lambda a: a.astype("f4"), tmp_path)
    assert "attr_indices has dtype float64; columns" in changed("attr_indices", lambda a: a + 0.5, tmp_path)
    assert "is (30, 31) for 30 nodes; give a square one" in changed("adj_shape", lambda a: np.array([30, 31]), tmp_path)
    assert "attr_indices, row 1: column 20 is not in [0, 20)" in changed(
        "attr_indices", lambda a: np.r_[20, a[1:]], tmp_path
    )


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "graph.npz").write_bytes(b"not a zip")
    for path in (tmp_path / "graph.npz", tmp_path):
        with pytest.raises(DataError, match=f"^{path} is no .npz; give a file that numpy.savez or"):
            import_archive(path, tmp_path / "out")
    archive(tmp_path / "graph.npz", edge_index=ring_edges(), **SHORT)
    (tmp_path / "graph.npz").write_bytes((tmp_path / "graph.npz").read_bytes()[:-30])
    with pytest.raises(DataError, match=r"graph\.npz is cut short or damaged"):
        import_archive(tmp_path / "graph.npz", tmp_path / "out")
    with pytest.raises(DataError, match=r"none\.npz does not exist; give the path of an \.npz"):
        import_archive(tmp_path / "none.npz", tmp_path / "out")


def test_what_is_ignored_must_be_there(tmp_path: Path) -> None:
    path = archive(tmp_path / "graph.npz", edge_index=ring_edges(), **SHORT)
    with pytest.raises(DataError, match="has no array 'z' to ignore"):
        import_archive(path, tmp_path / "out", ignore=["z"])
