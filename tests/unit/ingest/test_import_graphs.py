"""NumPy archives and DGL graphs become stores: those that PyG makes of them; what fits no name is refused."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import ROOT
from support.graphs import library, ring
from support.raw_layouts import NUM_NODES, features, ring_edges
from support.refusals import assert_raises
from support.stores import assert_same, left_in
from torch import Tensor
from torch_geometric.utils import to_undirected

import hoploom
from hoploom import ConfigError, DataError, Store
from hoploom.ingest.formats import from_dgl, import_archive
from hoploom.ingest.stream import EdgeRule
from hoploom.store.check import problems

pytestmark = pytest.mark.usefixtures("one_thread", "no_sync")


DATA = Path(os.environ.get("HOPLOOM_DATA") or ROOT.parent / "shared" / "data")
IDS = np.arange(NUM_NODES)


def archive(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **arrays)
    return path


def expected(edge_index: Any, **more: Tensor) -> Store:
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
    "edge_src and edge_dst": {"edge_src": ROW, "edge_dst": COL, **SHORT, "num_classes": 10, "names": IDS.astype(str)},
    "features by column": {"edge_index": ring_edges(), **SHORT, "x": np.asfortranarray(features())},
}


@pytest.mark.parametrize("arrays", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_of_arrays_is_the_same_graph(tmp_path: Path, arrays: dict[str, Any]) -> None:
    assert_same(import_archive(archive(tmp_path / "graph.npz", **arrays), tmp_path / "out"), expected(ring_edges()))
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


@pytest.mark.parametrize("chunk_bytes", [1, 60, 1 << 20])
def test_the_store_does_not_depend_on_how_much_is_read_at_once(tmp_path: Path, chunk_bytes: int) -> None:
    path = archive(tmp_path / "graph.npz", edge_index=ring_edges(), **SHORT)
    assert_same(import_archive(path, tmp_path / "out", chunk_bytes=chunk_bytes), expected(ring_edges()))


def test_directions_loops_and_repeats_are_as_in_pyg(tmp_path: Path) -> None:
    path = archive(tmp_path / "graph.npz", edge_index=np.c_[ring_edges(), ring_edges(), [[3], [3]]], **SHORT)
    store = import_archive(path, tmp_path / "out", rule=EdgeRule(undirected=True, deduplicate=True, drop_loops=True))
    edges = to_undirected(torch.from_numpy(ring_edges()))
    assert store.schema.relations[0].reverse == "to"  # both directions are in the relation itself
    assert_same(store, expected(edges[:, np.lexsort(edges.numpy())]), but_for_reverse=True)


def test_a_real_archive_is_read_whole(tmp_path: Path) -> None:
    path = DATA / "tolokers.npz"
    if not path.is_file():
        pytest.skip(f"{path} is absent; set HOPLOOM_DATA to the folder that holds it")
    ignore = ["train_masks", "val_masks", "test_masks"]
    store = import_archive(path, tmp_path / "out", rule=EdgeRule(undirected=True), ignore=ignore)
    with np.load(path) as found:
        edges = to_undirected(torch.from_numpy(found["edges"].T))
        assert np.array_equal(store.parts[0].tables["node", "x"].rows.numpy(), found["node_features"])
    (lists,) = store.parts[0].lists
    pairs = torch.stack([lists.indices.long(), torch.repeat_interleave(lists.indptr.diff())])
    assert torch.equal(pairs, edges[:, np.lexsort(edges.numpy())])


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
    "a split beyond": (LONE | SHORT | {"val_idx": np.array([3, 12])}, "val_idx, row 2: node 12 is not in [0, 10)"),
    "a short mask": (
        LONE | SHORT | {"val_mask": IDS[:9] > 3},
        "val_mask has shape (9,) and dtype bool; give masks of one entry per node (10)",
    ),
    "fractions as ends": (LONE | SHORT | {"edge_index": ring_edges() + 0.5}, "edge_index has dtype float64; ends of"),
    "unknown ends": (SHORT | {"src": ROW, "dst": np.where(COL > 3, np.nan, 1)}, "dst has dtype float64; ends"),
    "ends that are yes or no": (LONE | SHORT | {"edge_index": ring_edges() > 3}, "edge_index has dtype bool; ends of"),
    "split of fractions": (LONE | SHORT | {"val_idx": np.array([0.5, 1.7])}, "val_idx has dtype float64; ids of nodes"),
    "more nodes": (LONE | {"x": features(), "y": IDS, "num_nodes": 11}, "x has 10 rows for 11 nodes (num_nodes)"),
    "another number of edges": (LONE | SHORT | {"num_edges": 9}, "edge_index has 20 rows for 9 edges (num_edges)"),
    "half a node": (LONE | {"num_nodes": 10.5}, "num_nodes has dtype float64; save it as an integer"),
    "a field of nodes or of edges": (
        {"row": IDS, "col": IDS, "year": IDS, "x": features()},
        "year has shape (10,) for 10 nodes and 10 edges; give a row for each of one; leave it out with ignore, or call",
    ),
    "a matrix": ({"format": "csr", "data": IDS}, "graph.npz holds a sparse matrix; load it with SciPy and save row"),
    "a negative weight": (LONE | SHORT | {"edge_weight": -np.arange(20.0)}, "weight"),
}


@pytest.mark.parametrize(("arrays", "said"), BAD.values(), ids=BAD.keys())
def test_an_archive_that_is_not_sound_is_refused(tmp_path: Path, arrays: dict[str, Any], said: str) -> None:
    path = archive(tmp_path / "graph.npz", **arrays)
    with pytest.raises(DataError) as raised:
        import_archive(path, tmp_path / "out")
    assert said in str(raised.value)
    assert left_in(tmp_path) == ["graph.npz"]


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "graph.npz").write_bytes(b"not a zip")
    for path in (tmp_path / "graph.npz", tmp_path):
        with pytest.raises(DataError, match=f"^{path} is no .npz; give a file that numpy.savez wrote"):
            import_archive(path, tmp_path / "out")
    archive(tmp_path / "graph.npz", edge_index=ring_edges(), **SHORT)
    (tmp_path / "graph.npz").write_bytes((tmp_path / "graph.npz").read_bytes()[:-30])
    with pytest.raises(DataError, match=r"graph\.npz is cut short or damaged"):
        import_archive(tmp_path / "graph.npz", tmp_path / "out")
    with pytest.raises(DataError, match=r"none\.npz does not exist; give the path of an \.npz"):
        import_archive(tmp_path / "none.npz", tmp_path / "out")


def test_what_is_ignored_must_be_there(tmp_path: Path) -> None:
    path = archive(tmp_path / "graph.npz", edge_index=ring_edges(), **SHORT)
    assert_raises(DataError, "has no array 'z' to ignore", import_archive, path, tmp_path / "out", ignore=["z"])


Name = tuple[str, str, str]


@dataclass
class Frame:
    """What `graph.nodes[name]` and `graph.edges[key]` give."""

    data: Mapping[str, Tensor]


@dataclass
class Edges:
    """DGL's edge view: called for the ends, indexed for the fields."""

    ends: Mapping[Name, Tensor]
    fields: Mapping[Name, Mapping[str, Tensor]]

    def __getitem__(self, key: Name) -> Frame:
        return Frame(self.fields.get(key, {}))

    def __call__(self, form: str = "uv", order: str = "eid", etype: Name | None = None) -> Iterator[Tensor]:
        assert (form, order) == ("uv", "eid"), "ends without order are no edge list"
        return iter(self.ends[etype])


@dataclass
class StandIn:
    """A graph with the part of dgl.DGLGraph's public interface that from_dgl is written to."""

    sizes: Mapping[str, int]
    node_fields: Mapping[str, Mapping[str, Tensor]]
    edges: Edges
    is_block: bool = False
    ntypes: list[str] = field(init=False)
    canonical_etypes: list[Name] = field(init=False)
    nodes: Mapping[str, Frame] = field(init=False)

    def __post_init__(self) -> None:
        self.ntypes, self.canonical_etypes = list(self.sizes), list(self.edges.ends)
        self.nodes = {name: Frame(self.node_fields.get(name, {})) for name in self.sizes}

    def num_nodes(self, ntype: str) -> int:
        return self.sizes[ntype]


def dgl_ring(num_nodes: int = 12) -> StandIn:
    """The ring as DGL's datasets have it: types _N and _E, features `feat`, labels `label`, ids int32."""
    data = ring(num_nodes)
    masks = {name: data[name] for name in ("train_mask", "val_mask", "test_mask")}
    fields = {"feat": data.x, "label": data.y, **masks}
    key = ("_N", "_E", "_N")
    edges = Edges({key: data.edge_index.to(torch.int32)}, {key: {"edge_attr": data.edge_attr}})
    return StandIn({"_N": num_nodes}, {"_N": fields}, edges)


def dgl_library() -> StandIn:
    data = library()
    nodes = {name: {k: v for k, v in data[name].items() if k != "num_nodes"} for name in data.node_types}
    fields = {key: {k: v for k, v in data[key].items() if k != "edge_index"} for key in data.edge_types}
    sizes = {name: data[name].num_nodes for name in data.node_types}
    return StandIn(sizes, nodes, Edges({key: data[key].edge_index for key in data.edge_types}, fields))


def test_a_dgl_graph_of_one_type_is_the_store_of_the_same_pyg_graph() -> None:
    assert_same(from_dgl(dgl_ring()), hoploom.from_pyg(ring(12)))


def test_a_dgl_graph_of_several_types_keeps_their_names(tmp_path: Path) -> None:
    store, data = from_dgl(dgl_library(), weight_attr="weight", time_attr="year"), library()
    assert_same(store, hoploom.from_pyg(data, weight_attr="weight", time_attr="year"), until=2004)
    assert_same(store.save(tmp_path / "out"), store, until=2004)


def test_features_keep_their_name_where_x_is_taken() -> None:
    graph = dgl_ring()
    graph.nodes["_N"].data = {"x": torch.zeros(12, 1), "feat": torch.ones(12, 1)}
    assert list(from_dgl(graph).schema.node_types[0].fields) == ["x", "feat"]


def test_what_is_no_graph_is_refused() -> None:
    assert_raises(ConfigError, r"graph is a Data; give a dgl\.DGLGraph", lambda: from_dgl(ring(12)))
    graph = dgl_ring()
    graph.is_block = True
    assert_raises(ConfigError, "graph is a block of a message-flow graph", from_dgl, graph)
    graph = dgl_ring()
    graph.nodes["_N"].data = {"name": ["a"] * 12}  # type: ignore[dict-item]
    assert_raises(DataError, r"node\.name is a list; Hoploom gathers tensors", from_dgl, graph)
