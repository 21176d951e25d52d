"""Layer-wise inference equals the full-graph forward, in slices, over ranks, out of core, and leaves no half result."""

import ctypes
import gc
import math
import os
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from support.graphs import library, ring, save_in_parts
from support.infer_workers import (
    EVERYTHING,
    SMALL,
    assert_equal_to_forward,
    graph_with_loops,
    in_threads,
    model_of,
    read,
)
from support.models import learned, with_rows_of
from support.shards import spread
from support.stores import left_in
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

import hoploom
from hoploom import ConfigError, Store, StoreError
from hoploom.inference import Inference, infer
from hoploom.inference.files import RowFile
from hoploom.inference.layerwise import Slices, plan_of
from hoploom.nn import GNN, Shape
from hoploom.ops import Reads

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"norm": True},
    "residual": {"residual": True},
    "both": {"norm": True, "residual": True},
    "cat": {"act": "elu", "jk": "cat"},
    "max": {"act": "elu", "jk": "max"},
}
HEADS = {"gat": 2, "rgat": 2, "hgt": 2}
OWN = ["plain", "norm", "residual", "both"]
TO = ("node", "to", "node")
# Those that project rows take every shape.
SINGLE = [
    *product(["gcn", "gat"], OWN),
    *product(["pna"], ["plain", "both"]),
    *product(["sage", "gin"], ["plain", "both"]),
    ("sage", "cat"),
    ("sage", "max"),
]
MANY_TYPES = [*product(["rgat", "hgt"], OWN), *product(["rsage", "rgcn"], ["plain", "both"]), ("pna", "both")]


@pytest.mark.parametrize(("kind", "shape"), SINGLE)
def test_slices_of_one_type_give_what_the_whole_graph_gives(kind: str, shape: str, tmp_path: Path) -> None:
    graph = graph_with_loops()
    store = hoploom.from_pyg(graph)
    model = GNN(kind, store.schema, Shape(8, 3, 4, dropout=0.5, heads=HEADS.get(kind, 1), **SHAPES[shape]))
    calls: list[int] = []
    infer(model, store, tmp_path / "out", inference=EVERYTHING, progress=lambda done, total: calls.append(done))
    assert len(calls) > 15  # it was cut into slices
    assert_equal_to_forward(tmp_path / "out", model, graph)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize(
    ("kind", "shape"), [("sage", "plain"), ("gin", "plain"), ("gcn", "plain"), ("gat", "plain"), ("sage", "norm")]
)
def test_features_on_disk_give_what_those_in_memory_give(kind: str, shape: str, num_parts: int, tmp_path: Path) -> None:
    graph = graph_with_loops()
    save_in_parts(hoploom.from_pyg(graph), tmp_path / "store", num_parts)
    store = hoploom.open(tmp_path / "store", memory=8 * 62 + 10)
    assert store.reads is not None
    model = GNN(kind, store.schema, Shape(8, 3, 4, heads=HEADS.get(kind, 1), **SHAPES[shape]))
    before = store.reads.requests
    infer(model, store, tmp_path / "out", inference=EVERYTHING)
    assert_equal_to_forward(tmp_path / "out", model, graph)
    assert store.reads.requests > before or kind == "gat" or shape == "norm"  # these read rows in order first


@pytest.mark.parametrize(("kind", "shape"), MANY_TYPES)
def test_slices_of_many_types_give_what_the_whole_graph_gives(kind: str, shape: str, tmp_path: Path) -> None:
    store = learned(save_in_parts(hoploom.from_pyg(library(), weight_attr="weight"), tmp_path / "store", 3))
    graph = with_rows_of(store, library())
    model = GNN(kind, store.schema, Shape(8, 3, 4, heads=HEADS.get(kind, 1), **SHAPES[shape]))
    infer(model, store, tmp_path / "out", inference=EVERYTHING)
    assert_equal_to_forward(tmp_path / "out", model, graph)


@pytest.mark.parametrize("held", ["one part", "three parts", "elsewhere"])
@pytest.mark.parametrize("kind", ["sage", "gcn"])
def test_where_the_graph_lies_changes_nothing(kind: str, held: str, tmp_path: Path) -> None:
    graph = graph_with_loops()
    store = hoploom.from_pyg(graph, weight_attr="weight", time_attr="edge_time")
    store = save_in_parts(store, tmp_path / "store", 1 if held == "one part" else 3)
    if held == "elsewhere":
        store = Store(store.schema, store.graph, store.features)
    infer(model := model_of(store, kind), store, tmp_path / "out", inference=EVERYTHING)
    assert_equal_to_forward(tmp_path / "out", model, graph)


EDGE_MODELS: list[tuple[str, dict[str, Any]]] = [
    ("sage", {"edges": ["stars", "kind"], "weights": "weight"}),
    ("gat", {"edges": ["stars", "kind"], "norm": True}),
    ("gatv2", {"edges": "stars", "residual": True}),
    ("gine", {"edges": ["kind", "stars"]}),
    ("gin", {"weights": "weight"}),
    ("gcn", {"weights": "weight"}),
]


def _with_edge_data(graph: Any) -> Any:
    """The graph with weights, two numbers in half precision and one of three kinds for every edge."""
    torch.manual_seed(2)
    for storage in graph.edge_stores:
        count = storage.edge_index.shape[1]
        storage.stars, storage.kind = torch.randn(count, 2).to(torch.float16), torch.randint(3, (count,))
        storage.weight = torch.rand(count)
    return graph


@pytest.mark.parametrize("held", ["in memory", "one part", "three parts", "elsewhere", "on disk"])
@pytest.mark.parametrize(("kind", "options"), EDGE_MODELS)
def test_edge_features_and_weights_give_what_the_whole_graph_gives(
    kind: str, options: dict[str, Any], held: str, tmp_path: Path
) -> None:
    store = hoploom.from_pyg(graph := _with_edge_data(graph_with_loops()))
    if held != "in memory":
        store = save_in_parts(store, tmp_path / "store", 3 if held == "three parts" else 1)
    if held == "elsewhere":
        store = Store(store.schema, store.graph, store.features)
    if held == "on disk":
        store = hoploom.open(tmp_path / "store", memory=8 * 62 + 10)
    categories = {"kind": 3} if "kind" in options.get("edges", ()) else {}
    shape = Shape(8, 2, 4, heads=2 if "gat" in kind else 1, categories=categories, **options)
    infer(model := GNN(kind, store.schema, shape), store, tmp_path / "out", inference=EVERYTHING)
    assert_equal_to_forward(tmp_path / "out", model, graph)


@pytest.mark.parametrize("kind", ["rsage", "rgcn", "rgat", "rgatv2"])
def test_edge_features_of_many_types_give_what_the_whole_graph_gives(kind: str, tmp_path: Path) -> None:
    graph = _with_edge_data(library())
    del graph["paper", "cites", "paper"].stars
    store = learned(save_in_parts(hoploom.from_pyg(graph), tmp_path / "store", 3))
    shape = Shape(8, 3, 4, edges=["stars", "kind"], categories={"kind": 3})
    infer(model := GNN(kind, store.schema, shape), store, tmp_path / "out", inference=EVERYTHING)
    assert_equal_to_forward(tmp_path / "out", model, with_rows_of(store, graph))


def test_edge_features_take_their_share_of_a_slices_memory(tmp_path: Path) -> None:
    graph = graph_with_loops()
    graph.wide = torch.randn(400, 64)
    store, sizes = hoploom.from_pyg(graph), []
    calls: list[int] = []
    for edges in ([], ["wide"]):
        calls.clear()
        model = GNN("sage", store.schema, Shape(8, 2, 4, edges=edges))
        infer(
            model, store, tmp_path / f"{len(edges)}", inference=EVERYTHING, progress=lambda done, _: calls.append(done)
        )
        sizes.append(len(calls))
    assert sizes[1] > 5 * sizes[0]


def test_ranks_of_different_budgets_compute_every_row_once(tmp_path: Path) -> None:
    save_in_parts(hoploom.from_pyg(graph := graph_with_loops()), tmp_path / "store", 2)
    stores = [hoploom.open(tmp_path / "store", memory=8 * 62 + 10), hoploom.open(tmp_path / "store")]
    assert_equal_on_ranks(stores, "sage", graph, tmp_path / "out")


def test_a_type_that_one_rank_alone_has_mapped_is_computed_by_all(tmp_path: Path) -> None:
    graph = HeteroData()
    graph["a"].x, graph["b"].x = torch.randn(1, 4), torch.randn(40, 4)
    graph["b", "to", "b"].edge_index = torch.randint(0, 40, (2, 200))
    graph["a", "to", "b"].edge_index = torch.stack([torch.zeros(40, dtype=torch.int64), torch.arange(40)])
    graph["b", "to", "a"].edge_index = graph["a", "to", "b"].edge_index.flip(0)
    store = hoploom.from_pyg(graph)
    assert_equal_on_ranks([spread(store, 2, [rank]) for rank in range(2)], "rsage", graph, tmp_path / "out")


def assert_equal_on_ranks(stores: list[Store], kind: str, graph: Data | HeteroData, out: Path) -> None:
    models = [model_of(store, kind) for store in stores]
    raised = in_threads(
        len(stores),
        lambda context: infer(models[context.rank], stores[context.rank], out, context, inference=EVERYTHING),
    )
    assert raised == [None] * len(stores)
    assert_equal_to_forward(out, models[0], graph)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.float64])
def test_features_of_any_type_are_read_as_the_model_takes_them(dtype: torch.dtype, tmp_path: Path) -> None:
    graph = graph_with_loops()
    graph.x = (graph.x * 8).to(dtype)
    store = hoploom.from_pyg(graph)
    infer(model := model_of(store), store, tmp_path / "out", inference=EVERYTHING)
    assert_equal_to_forward(tmp_path / "out", model, graph)


def test_types_without_nodes_have_files_without_rows(tmp_path: Path) -> None:
    graph = library()
    graph["author"].x = torch.empty(0, 3)
    for key in (("author", "writes", "paper"), ("author", "reviews", "paper")):
        graph[key].edge_index, graph[key].edge_attr = torch.empty(2, 0, dtype=torch.int64), torch.empty(0, 1)
    del graph["author", "writes", "paper"].weight
    store = learned(hoploom.from_pyg(graph))
    model = GNN("rsage", store.schema, Shape(8, 2, 4, residual=True))
    infer(model, store, tmp_path / "out", inference=EVERYTHING)
    assert pyarrow.parquet.read_table(tmp_path / "out" / "author").num_rows == 0
    assert read(tmp_path / "out" / "paper", "id").tolist() == list(range(10))


@pytest.mark.parametrize("residual", [False, True])
def test_embeddings_are_what_the_last_learned_step_starts_from(residual: bool, tmp_path: Path) -> None:
    graph = graph_with_loops()
    store = hoploom.from_pyg(graph)
    model = GNN("sage", store.schema, Shape(8, 2, 4, residual=residual)).eval()
    first, second = (model.stage(depth).conv(TO) for depth in range(2))
    x = nn.functional.gelu(model.inputs["node"](graph.x)) if residual else graph.x
    expected = x + nn.functional.gelu(first(x, graph.edge_index)) if residual else first(x, graph.edge_index).relu()
    if residual:
        expected = expected + nn.functional.gelu(second(expected, graph.edge_index))
    for columns in (["embedding"], ["embedding", "output"]):
        out = infer(model, store, tmp_path / str(len(columns)), inference=Inference(columns=columns, memory=SMALL))
        torch.testing.assert_close(read(out / "node", "embedding"), expected.detach(), atol=1e-5, rtol=1e-5)
        assert pyarrow.parquet.read_table(out / "node").column_names == ["id", *columns]


@pytest.mark.parametrize(("jk", "width"), [("last", 6), ("cat", 18), ("max", 6)])
def test_embeddings_are_as_wide_as_the_output_layer(jk: Any, width: int, ring_store: Store, tmp_path: Path) -> None:
    model = GNN("sage", ring_store.schema, Shape(6, 3, 5, jk=jk))
    seen: list[Tensor] = []
    assert model.output is not None
    model.output.register_forward_pre_hook(lambda module, given: seen.append(given[0].detach()))
    model.eval()(ring(12))
    infer(model, ring_store, tmp_path / "out", inference=Inference(columns=["embedding"]))
    written = read(tmp_path / "out" / "node", "embedding")
    assert written.shape == (12, width)
    torch.testing.assert_close(written, seen[0], atol=1e-5, rtol=1e-5)


def test_embeddings_alone_do_not_compute_the_last_layer(ring_store: Store, tmp_path: Path) -> None:
    totals = {}
    for columns in (["embedding"], ["output"]):
        chosen = Inference(columns=columns)
        infer(
            model_of(ring_store, "gcn"),
            ring_store,
            tmp_path / columns[0],
            inference=chosen,
            progress=lambda done, total, name=columns[0]: totals.update({name: (done, total)}),
        )
    # degrees, three projections, two layers and the last one; or two projections, two layers, and reading
    assert totals == {"output": (12 * 7, 12 * 7), "embedding": (12 * 6, 12 * 6)}


@pytest.mark.parametrize("kind", ["sage", "gcn", "gat"])
def test_no_row_is_projected_twice(kind: str, ring_store: Store, tmp_path: Path, monkeypatch: Any) -> None:
    model, projected = model_of(ring_store, kind), []
    stage = type(model.stage(0))
    project = stage.project
    monkeypatch.setattr(stage, "project", lambda self, key, x: projected.append(len(x)) or project(self, key, x))
    infer(model, ring_store, tmp_path / "out", inference=Inference(memory=SMALL))
    probed = 2 * 3  # twice a row per layer
    assert sum(projected) == (probed if kind == "sage" else probed + 3 * 12)


@pytest.mark.parametrize(
    ("kind", "kept"), [("sage", {"rows"}), ("gin", {"rows"}), ("gcn", {"degrees", "rows", "sources"})]
)
def test_rows_lie_on_disk_no_longer_than_they_are_needed(kind: str, kept: set[str], tmp_path: Path) -> None:
    store = hoploom.from_pyg(ring(12))
    model = GNN(kind, store.schema, Shape(hidden=8, num_layers=6, out=4))
    seen: list[list[str]] = []
    infer(model, store, tmp_path / "out", progress=lambda *_: seen.append([p.name for p in tmp_path.rglob("*.rows")]))
    assert {name.split("-")[0] for names in seen for name in names} == kept  # features are read where they are
    assert max(map(len, seen)) == len(kept) + 1  # a layer's rows while those of the next are made


@pytest.mark.parametrize(("kind", "owner"), [("hgt", lambda key: key[0]), ("rgat", lambda key: key)])
def test_relations_of_one_source_type_share_hgts_keys_and_values(
    kind: str, owner: Callable[[Any], Any], library_store: Store
) -> None:
    schema = learned(library_store).schema
    plan = plan_of(GNN(kind, schema, Shape(8, 2, 4)), schema, None, embeds_only=False)
    for layer in plan.layers:
        assert len(layer.rewritten) == len({owner(key) for key in layer.sent})


def test_types_that_nobody_asks_for_are_not_computed(library_store: Store, tmp_path: Path) -> None:
    store = learned(library_store)
    model = GNN("rsage", store.schema, Shape(8, 2, 4))
    everything = infer(model, store, tmp_path / "all")
    totals: list[int] = []
    chosen = Inference(node_types=["venue"])
    infer(model, store, tmp_path / "venue", inference=chosen, progress=lambda done, total: totals.append(total))
    assert left_in(tmp_path / "venue") == ["venue"]
    assert torch.equal(read(tmp_path / "venue" / "venue", "embedding"), read(everything / "venue", "embedding"))
    # embeddings of venues; layer one's papers and venues; layer two's venues
    assert set(totals) == {3 + (10 + 3) + 3}


def test_original_ids_are_written_where_the_store_keeps_them(tmp_path: Path) -> None:
    graph = library()
    graph["paper"].original_id = torch.arange(10).flip(0) * 7
    graph["venue"].original_id = torch.tensor([list(b"KDD\0\0"), list("Zürs".encode()), list(b"NeurI")]).byte()
    store = learned(hoploom.from_pyg(graph))
    model = GNN("rsage", store.schema, Shape(8, 1, 4))
    out = infer(model, store, tmp_path / "out")
    assert read(out / "paper", "id").tolist() == [63, 56, 49, 42, 35, 28, 21, 14, 7, 0]
    assert pyarrow.parquet.read_table(out / "venue").column("id").to_pylist() == ["KDD", "Zürs", "NeurI"]


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_slices_have_every_node_once_and_fit_the_budget(num_parts: int, world_size: int, tmp_path: Path) -> None:
    graph = graph_with_loops()
    store = save_in_parts(hoploom.from_pyg(graph), tmp_path / "store", num_parts)
    degrees = torch.bincount(graph.edge_index[1], minlength=60)
    slices = Slices(store, [TO], 400, row_bytes={"node": 20}, edge_bytes=10)
    found = [list(slices.of("node", *share)) for share in pairwise(slices.borders("node", world_size).tolist())]
    assert [node for some in found for one in some for node in one.ids.tolist()] == list(range(60))
    costs = [[int(20 * len(one) + 10 * degrees[one.span].sum()) for one in some] for some in found]
    assert max(max(some) for some in costs) <= 400
    assert sum(map(len, costs)) <= math.ceil((60 * 20 + 400 * 10) / 300) + num_parts + world_size
    assert max(map(sum, costs)) - min(map(sum, costs)) <= 2 * (20 + 10 * int(degrees.max()))
    assert [len(one) for one in Slices(store, [TO], 1, {"node": 20}, 10).of("node", 0, 60)] == [1] * 60


def test_a_slice_takes_what_the_rows_of_its_nodes_take(tmp_path: Path) -> None:
    count = 1000
    edges = torch.stack([torch.arange(2 * count) % count, torch.arange(count).repeat_interleave(2)])
    store = hoploom.from_tensors({"x": torch.zeros(count, 128)}, edges)
    of_a_node = 4 * (2 * 128 + 128 + 3 * 8) + 2 * 16  # rows before, aggregated, and after a layer; two edges
    calls: list[int] = []
    chosen = Inference(memory=100 * of_a_node)
    model = GNN("sage", store.schema, Shape(hidden=8, num_layers=2, out=4))
    infer(model, store, tmp_path / "out", inference=chosen, progress=lambda done, total: calls.append(done))
    assert calls == list(range(100, 2 * count + 1, 100))


def test_rows_between_layers_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    with RowFile(tmp_path / "rows", (4000, 2), torch.float32) as file:
        file.write(0, torch.arange(8000.0).view(4000, 2))
        gather, outs = file.gatherer(Reads()), [torch.empty(2, 2), torch.empty(1, 2)]
        gather([torch.tensor([1, 3999]), torch.tensor([3])], outs)
        assert [out.tolist() for out in outs] == [[[2, 3], [7998, 7999]], [[6, 7]]]
        os.truncate(tmp_path / "rows", 4096)
        with pytest.raises(StoreError, match=r"rows between layers cannot be read: .*; check the disk"):
            gather([torch.tensor([3999])], [torch.empty(1, 2)])


def test_private_memory_does_not_grow_with_the_graph(tmp_path: Path) -> None:
    count, width, memory = 60_000, 128, 4 << 20
    torch.manual_seed(0)
    edges = torch.randint(count, (2, 3 * count))
    store = hoploom.from_tensors({"x": torch.rand(count, width)}, edges).save(tmp_path / "store")
    model = GNN("gcn", store.schema, Shape(width, 3, width))
    del edges
    chosen, small = Inference(columns=["output"], memory=memory), hoploom.from_pyg(ring(12))
    infer(model_of(small), small, tmp_path / "warm", inference=chosen)  # libraries and threads
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else the process keeps what it has freed, and what is taken next does not show
    before, peaks = private_bytes(), [0]
    infer(model, store, tmp_path / "out", inference=chosen, progress=lambda done, total: peaks.append(private_bytes()))
    assert max(peaks) - before < count * width * 4  # 30 MB: what the rows of one layer take


def private_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def test_the_store_may_be_a_path_and_is_no_graph(tmp_path: Path) -> None:
    graph = graph_with_loops()
    store = hoploom.from_pyg(graph).save(tmp_path / "graph.store")
    model, given = GNN("sage", store.schema, Shape(8, 2, 4)), tmp_path / "graph.store"
    infer(model, given, tmp_path / "out", inference=EVERYTHING)
    assert_equal_to_forward(tmp_path / "out", model, graph)
    with pytest.raises(ConfigError, match="store is a Data; give a store or its path"):
        infer(model, graph, tmp_path / "other")
