"""A partitioned store is the same graph under other numbers, however often it is cut, and its report is arithmetic."""

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support.graphs import in_parts, library, ring, save_in_parts
from support.refusals import assert_raises
from support.stores import GRAPHS, bits, contents, rows_of
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import hoploom
from hoploom import ConfigError, NeighborLoader, Store, StoreError
from hoploom.load.presample import Presampling
from hoploom.ops import Frontier
from hoploom.partition import bounded_store
from hoploom.partition.partition import partition
from hoploom.partition.renumber import order_nodes
from hoploom.partition.report import Cut, PartCost, PartitionReport, report, report_as_json
from hoploom.schema import ORIGINAL_ID, RelationName, Schema
from hoploom.store import Draw
from hoploom.store.check import problems

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")


module = import_module("hoploom.partition.partition")  # the package has a function of this name
METHODS = ["hash", "range", "stream", "any"]


def shop() -> HeteroData:
    """Users rate items (weights, times) and follow each other; random ends, repeats and loops among them."""
    generator = torch.Generator().manual_seed(7)
    data = HeteroData()
    for name, count in (("user", 40), ("item", 25)):
        data[name].x = torch.randn(count, 3, generator=generator)
        data[name].train_mask = torch.rand(count, generator=generator) < (0.5 if name == "user" else 0.0)
    for key in (("user", "rates", "item"), ("item", "rated_by", "user"), ("user", "follows", "user")):
        sizes = torch.tensor([data[key[0]].num_nodes, data[key[2]].num_nodes])
        ends = torch.rand(2, 150, generator=generator) * sizes.view(2, 1)
        data[key].edge_index = ends.long()
        data[key].weight = torch.rand(150, generator=generator)
        data[key].at = torch.randint(30, (150,), generator=generator)
    return data


def ring60() -> Data:
    return ring(60)


@pytest.fixture
def any_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method "any" puts nodes anywhere, evenly or not."""
    by_method = module.assign

    def assign(given: Store | Path, num_parts: int, method: str, **options: Any) -> Mapping[str, Tensor]:
        store = given if isinstance(given, Store) else hoploom.open(given)
        if method != "any":
            return by_method(store, num_parts, method, **options)
        generator = torch.Generator().manual_seed(num_parts)
        return {
            t.name: (torch.rand(t.num_nodes, generator=generator).square() * num_parts).long()
            for t in store.schema.node_types
        }

    monkeypatch.setattr(module, "assign", assign)


def originals(store: Store) -> dict[str, Tensor]:
    return {
        t.name: rows_of(store, t.name, ORIGINAL_ID) if ORIGINAL_ID in t.fields else torch.arange(t.num_nodes)
        for t in store.schema.node_types
    }


def in_lists(store: Store) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Per relation, and per node: the sources and the positions of its in-edges, in order."""
    schema = store.schema
    frontiers: list[Frontier | None] = [Frontier(torch.arange(t.num_nodes)) for t in schema.node_types]
    lists = {}
    for relation, picks in zip(
        schema.relations, store.graph.sample(frontiers, Draw(0, 0, [-1] * len(schema.relations))), strict=True
    ):
        ends = picks.counts.tolist()
        lists[str(relation.key)] = list(zip(picks.sources.split(ends), picks.edges.split(ends), strict=True))
    return lists


def assert_same_graph(found: Store, original: Store) -> None:
    ids = originals(found)
    for node_type in original.schema.node_types:
        name, old = node_type.name, ids[node_type.name]
        assert torch.equal(old.sort().values, torch.arange(node_type.num_nodes))
        for field in node_type.fields:
            assert torch.equal(bits(rows_of(found, name, field)), bits(rows_of(original, name, field)[old]))
        for split in node_type.splits:
            assert torch.equal(old[found.split(split, name)].sort().values, original.split(split, name))
    lists, original_lists = in_lists(found), in_lists(original)
    assert lists.keys() == original_lists.keys()
    for relation in original.schema.relations:
        key = relation.key
        edges, expected = lists[str(key)], [original_lists[str(key)][node] for node in ids[relation.destination]]
        for (sources, _), (old_sources, _) in zip(edges, expected, strict=True):
            assert torch.equal(ids[relation.source][sources], old_sources)
        places, old_places = (torch.cat([positions for _, positions in lists]) for lists in (edges, expected))
        for field in relation.fields:
            rows, old_rows = rows_of(found, key, field)[places], rows_of(original, key, field)[old_places]
            assert torch.equal(bits(rows), bits(old_rows)), (key, field)


def assert_batches_are_of(found: Store, original: Store, fanouts: list[int], seeds: Any) -> None:
    """Every sampled edge is one of the original's, of each expanded node there are as many as asked for."""
    schema, ids, lists = original.schema, originals(found), in_lists(original)
    assert schema.homogeneous
    ((name, old),) = ids.items()
    ((_, in_edges),) = lists.items()
    for batch in NeighborLoader(found, fanouts, input_nodes=seeds, batch_size=7, shuffle=True):
        nodes = old[batch.n_id]
        assert torch.equal(batch.x, rows_of(original, name, "x")[nodes])
        expanded = torch.tensor(batch.num_sampled_nodes).cumsum(0)
        for place, node in enumerate(nodes.tolist()):
            hop = int((expanded <= place).sum())
            picked = nodes[batch.edge_index[0, batch.edge_index[1] == place]].tolist()
            have = in_edges[node][0].tolist()
            assert len(picked) == (0 if hop == len(fanouts) else min(fanouts[hop], len(have)))
            assert all(picked.count(source) <= have.count(source) for source in picked)


@pytest.mark.usefixtures("any_assignment")
@pytest.mark.parametrize(("method", "num_parts"), [*((method, 3) for method in METHODS), ("any", 1), ("any", 5)])
@pytest.mark.parametrize("make", [ring60, shop], ids=["ring", "shop"])
def test_a_partitioned_store_opened_whole_is_the_same_graph(
    make: Callable[[], Any], method: str, num_parts: int, tmp_path: Path
) -> None:
    homogeneous = make is ring60
    weighed = hoploom.from_pyg(shop(), weight_attr="weight", time_attr="at")
    original = hoploom.from_pyg(ring(60)) if homogeneous else weighed
    seeds = "train" if homogeneous else ("user", "train")
    partition(original, tmp_path / "parts", num_parts, method=method, seeds=seeds, fanouts=[2, 2])
    found = hoploom.open(tmp_path / "parts")
    assert len(found.parts) == num_parts
    assert list(problems(tmp_path / "parts")) == []
    assert (found.schema.weight, found.schema.time) == (original.schema.weight, original.schema.time)
    assert_same_graph(found, original)
    if homogeneous:
        assert_batches_are_of(found, original, [1, 2], "train")


@pytest.mark.usefixtures("any_assignment")
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())
def test_weights_and_times_and_edge_ids_stay_with_their_edges(graph: Any, tmp_path: Path) -> None:
    original = hoploom.from_pyg(graph.make(), **graph.options)
    partition(original, tmp_path / "parts", 3, method="any", fanouts=[2])
    assert list(problems(tmp_path / "parts")) == []
    assert_same_graph(hoploom.open(tmp_path / "parts"), original)


@pytest.mark.usefixtures("any_assignment")
def test_seeds_given_as_ids_are_found_again_in_their_parts(tmp_path: Path) -> None:
    original = hoploom.from_pyg(shop())
    seeds = torch.tensor([3, 17, 18, 19, 30, 39])
    costs = partition(original, tmp_path / "parts", 3, method="any", seeds=("user", seeds), fanouts=[1])
    assert costs.sampling["seeds"] == "user given ids"
    found = hoploom.open(tmp_path / "parts")
    ends = [part.num_nodes[0] for part in found.parts]
    held = [torch.isin(ids, seeds).sum().item() for ids in originals(found)["user"].split(ends)]
    assert [part.num_seeds for part in costs.parts] == held
    assert sum(held) == 6


@pytest.mark.usefixtures("any_assignment")
def test_a_store_cut_again_keeps_the_users_own_ids(tmp_path: Path) -> None:
    original = hoploom.from_pyg(shop(), weight_attr="weight", time_attr="at").save(tmp_path / "store")
    for before, after, num_parts in (("store", "three", 3), ("three", "two", 2)):
        partition(tmp_path / before, tmp_path / after, num_parts, method="any", seeds=("user", "train"), fanouts=[2])
        assert_same_graph(hoploom.open(tmp_path / after), original)


@pytest.mark.usefixtures("any_assignment")
def test_a_store_in_parts_that_has_no_original_ids_gets_them(tmp_path: Path) -> None:
    original = hoploom.from_pyg(shop(), weight_attr="weight", time_attr="at")
    save_in_parts(original, tmp_path / "three", 3)
    partition(tmp_path / "three", tmp_path / "two", 2, method="any", seeds=None)
    assert_same_graph(hoploom.open(tmp_path / "two"), original)


@pytest.mark.usefixtures("any_assignment")
def test_a_directory_and_the_store_in_memory_make_the_same_bytes(tmp_path: Path) -> None:
    original = hoploom.from_pyg(library(), weight_attr="weight")
    original.save(tmp_path / "store")
    for given, out in ((original, "a"), (tmp_path / "store", "b"), (str(tmp_path / "store"), "c")):
        partition(given, tmp_path / out, 3, method="any", fanouts=[2])
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")


@pytest.mark.usefixtures("any_assignment")
def test_the_size_of_chunks_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hoploom.from_pyg(shop(), weight_attr="weight", time_attr="at").save(tmp_path / "store")
    partition(tmp_path / "store", tmp_path / "large", 3, method="any", seeds=("user", "train"), fanouts=[2])
    monkeypatch.setattr(bounded_store, "CHUNK_BYTES", 56)  # seven nodes, one edge
    partition(tmp_path / "store", tmp_path / "small", 3, method="any", seeds=("user", "train"), fanouts=[2])
    assert contents(tmp_path / "small") == contents(tmp_path / "large")


def test_where_nothing_moves_the_files_stay_as_they_are(tmp_path: Path) -> None:
    hoploom.from_pyg(shop(), weight_attr="weight", time_attr="at").save(tmp_path / "store")
    partition(tmp_path / "store", tmp_path / "out", 1, method="range", seeds=None)
    before, after = contents(tmp_path / "store"), contents(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(before[name] == after[name] for name in before if name != "store.json")


def test_text_ids_of_the_user_are_carried_along(tmp_path: Path) -> None:
    words = torch.randint(97, 123, (12, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    data = ring(12)
    data[ORIGINAL_ID] = words
    partition(hoploom.from_pyg(data), tmp_path / "parts", 3, method="hash", fanouts=[2])
    found = hoploom.open(tmp_path / "parts")
    assert torch.equal(rows_of(found, "node", ORIGINAL_ID), words[rows_of(found, "node", "y")])
    assert not torch.equal(rows_of(found, "node", ORIGINAL_ID), words)


def test_nodes_are_ordered_by_part_then_visits_then_age() -> None:
    parts = {"node": torch.tensor([1, 0, 1, 0, 1, 0, 1])}
    order = order_nodes(parts, 2, {"node": torch.tensor([0, 4, 9, 0, 2, 4, 2])})["node"]
    assert order.new_of_old.argsort().tolist() == [1, 5, 3, 2, 4, 6, 0]
    assert order.bounds == (0, 3, 7)
    plain = order_nodes(parts, 3)["node"]
    assert plain.new_of_old.argsort().tolist() == [1, 3, 5, 0, 2, 4, 6]
    assert plain.bounds == (0, 3, 7, 7)
    assert not plain.moves_nothing
    assert order_nodes({"node": torch.tensor([0, 0, 2])}, 3)["node"].moves_nothing


def test_a_part_begins_with_the_nodes_that_training_asks_for(tmp_path: Path) -> None:
    data = ring(40)  # sampled all around 0 to 9: of the others only 10 and 11 are seen
    partition(hoploom.from_pyg(data), tmp_path / "parts", 2, method="range", seeds=torch.arange(10), fanouts=[-1])
    found = originals(hoploom.open(tmp_path / "parts"))["node"]
    assert set(found[:12].tolist()) == set(range(12))
    assert found[12:20].tolist() == list(range(12, 20))
    assert found[20:].tolist() == list(range(20, 40))


def test_what_cannot_be_partitioned_is_refused_and_nothing_written(ring_store: Store, tmp_path: Path) -> None:
    out = tmp_path / "parts"
    for options, message in (
        ({"num_parts": 0}, "num_parts is 0"),
        ({"num_parts": 13}, "num_parts is 13 for 12 nodes"),
        ({"num_parts": 2, "seeds": "training"}, "unknown split 'training'"),
        ({"num_parts": 2, "method": "best"}, "'best'"),
        ({"num_parts": 2, "fanouts": "5"}, "fanouts are '5'"),
    ):
        assert_raises(ConfigError, message, partition, ring_store, out, **options)
        assert list(tmp_path.iterdir()) == []
    out.mkdir()
    assert_raises(StoreError, "exists; give another path", partition, ring_store, out, 2)
    assert list(out.iterdir()) == []


def test_a_store_of_which_parts_are_missing_is_refused(ring_store: Store, tmp_path: Path) -> None:
    partition(ring_store, tmp_path / "parts", 2, method="range", fanouts=None)
    with pytest.raises(ConfigError, match="6 of 12 nodes of 'node' are open; open all parts"):
        partition(hoploom.open(tmp_path / "parts", parts=[0]), tmp_path / "again", 3)


def write_99(store: Path, name: str, where: slice) -> None:
    """Write the number 99 over some bytes of a file."""
    file = next(store.rglob(name))
    stored = bytearray(file.read_bytes())
    stored[where] = (99).to_bytes(len(stored[where]), "little")
    file.write_bytes(stored)


def test_a_damaged_id_is_an_error_that_names_it(ring_store: Store, tmp_path: Path) -> None:
    schema: Schema = ring_store.schema
    ring_store.save(tmp_path / "store")
    write_99(tmp_path / "store", "csc.indices.npy", slice(-4, None))
    message = rf"the indices of \('node', 'to', 'node'\) hold 99, out of range \[0, {schema.node_types[0].num_nodes}\)"
    with pytest.raises(hoploom.DataError, match=message):
        partition(tmp_path / "store", tmp_path / "parts", 2, method="range", seeds=None)
    assert not (tmp_path / "parts").exists()


def test_a_damaged_indptr_names_its_relation(tmp_path: Path) -> None:
    ends = torch.stack([torch.arange(12), torch.arange(12).roll(-1)])
    edges = {("node", "to", "node"): {"edge_index": ends}, ("node", "past", "node"): {"edge_index": ends.flip(0)}}
    store = hoploom.from_tensors({"node": {"x": torch.zeros(12, 1)}}, edges, splits={"node": {"train": ends[0]}})
    store.save(tmp_path / "store")
    write_99(tmp_path / "store", "*past*/csc.indptr.npy", slice(-64, -56))
    relation = r"sampling \('node', 'past', 'node'\) fails: "
    said = rf"{relation}indptr is damaged at node \d+; the store is damaged, run hoploom check"
    with pytest.raises(StoreError, match=said):
        partition(tmp_path / "store", tmp_path / "parts", 2, method="hash", fanouts=[2])


def made_up(num_parts: int, *, sampled: bool = True) -> PartitionReport:
    """Part p has p + 1 times a hundred nodes; a batch has ten times as many rows, a quarter of them remote."""
    parts = []
    for part in range(num_parts):
        count = 100 * (part + 1)
        rows = (10.0 * count, 2.5 * count, 1e4 * count) if sampled else ()
        parts.append(PartCost({"node": count}, 7 * count, 50, *rows))
    sampling = {"seeds": "train", "fanouts": [15, 10], "batch_size": 64}
    cuts = (Cut("node to node", 1000, 125),)
    return PartitionReport(cuts, tuple(parts), sampling) if sampled else PartitionReport(cuts, tuple(parts))


def test_cut_and_balance_of_the_ring_are_those_of_arithmetic(tmp_path: Path) -> None:
    store = hoploom.from_pyg(ring(12))
    for given in (in_parts(store, 2), save_in_parts(store, tmp_path / "ring", 2), tmp_path / "ring"):
        costs = report(given, fanouts=None)
        assert costs.cuts == (Cut("node to node", 24, 6),)  # of 4, 5, 10 and 11: one, two, one and two
        assert costs.edge_cut == 0.25
        assert [part.num_nodes for part in costs.parts] == [{"node": 6}] * 2
        assert [part.num_edges for part in costs.parts] == [12, 12]
        assert [part.num_seeds for part in costs.parts] == [6, 0]
        assert costs.remote_share is None


def test_cut_of_every_relation_by_part_of_its_own_types() -> None:
    store = hoploom.from_pyg(library())
    costs = report(in_parts(store, 2), seeds=None)
    edges = {relation.key: 0 for relation in store.schema.relations}
    middle = {"author": 3, "paper": 5, "venue": 1}  # where the second part begins

    def across(key: RelationName, source: int, destination: int) -> bool:
        return (source >= middle[key[0]]) != (destination >= middle[key[2]])

    data = library()
    for key in edges:
        edges[key] = sum(across(key, *ends) for ends in data[key].edge_index.t().tolist())
    assert {cut.relation: cut.num_cut for cut in costs.cuts} == {" ".join(key): n for key, n in edges.items()}
    assert costs.parts[1].num_nodes == {"author": 4, "paper": 5, "venue": 2}


def test_remote_rows_of_the_ring_are_those_of_arithmetic() -> None:
    costs = report(in_parts(hoploom.from_pyg(ring(12)), 2), [-1])
    first, second = costs.parts
    assert (first.batch_rows, first.remote_rows) == (8.0, 2.0)  # seeds 0 to 5 reach 7
    assert first.remote_bytes == 2 * (16 + 8 + 3)  # x, y and three masks
    assert (second.num_seeds, second.batch_rows, second.remote_rows) == (0, 0.0, 0.0)
    assert costs.remote_share == 0.25


def test_the_batches_measured_are_not_those_that_found_the_most_used_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, range]] = []
    visited = bounded_store.visited

    def watched(store: Store, fanouts: object, seeds: object, plan: Presampling) -> object:
        seen.append((plan.seed, plan.batches))
        return visited(store, [1], seeds, plan)

    monkeypatch.setattr(bounded_store, "visited", watched)
    report(in_parts(hoploom.from_pyg(ring(12)), 2), [1], sampling=Presampling(seed=5))
    assert seen == [(6, range(32))]


def test_a_report_is_the_same_every_time_whatever_the_threads() -> None:
    store = in_parts(hoploom.from_pyg(library()), 3)
    seeds = ("paper", "train")
    one, other = (report(store, [2, 1], seeds, sampling=Presampling(num_threads=n, batch_size=2)) for n in (1, 3))
    assert one == other
    assert one.sampling == {"seeds": "paper train", "fanouts": [2, 1], "batch_size": 2}


def test_a_report_of_what_is_not_there_is_refused(ring_store: Store) -> None:
    assert_raises(ConfigError, "unknown split 'valid'", report, ring_store, [1], "valid")
    assert_raises(ConfigError, "fanouts are empty", report, ring_store, [])


def test_the_table_says_what_the_figures_say() -> None:
    assert str(made_up(2)).splitlines() == [
        "part  nodes  edges  seeds  rows a batch  remote  remote MB",
        "0       100    700     50         1,000  25.0 %        1.0",
        "1       200  1,400     50         2,000  25.0 %        2.0",
        "",
        "edges from another part: 12.5 %",
        "rows of a batch from another part: 25.0 %",
        "sampled: batches of 64, seeds train, fanouts [15, 10]",
    ]
    assert str(made_up(1, sampled=False)).splitlines() == [
        "part  nodes  edges  seeds",
        "0       100    700     50",
        "",
        "edges from another part: 12.5 %",
    ]


def test_the_json_holds_every_figure() -> None:
    contents = json.loads(report_as_json(made_up(3)))
    assert contents["edge_cut"] == 0.125
    assert contents["remote_share"] == 0.25
    assert contents["parts"][2]["num_nodes"] == {"node": 300}
    assert contents["cuts"] == [{"relation": "node to node", "num_edges": 1000, "num_cut": 125}]
