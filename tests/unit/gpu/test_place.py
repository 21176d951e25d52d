"""A placed store: wherever rows and lists lie, they are those of the store on the host, and the report says where."""

import itertools
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import place_workers
from support.graphs import in_parts, library, random_graph, ring, save_in_parts
from support.place_workers import placed_of
from support.stores import Graph, every_graph, picks_of

import hoploom
from hoploom import Store
from hoploom.gpu import host_memory as hostmemory
from hoploom.gpu import place_plan
from hoploom.ops.kernels.launch import SOURCE_OUT_OF_RANGE
from hoploom.schema import EDGE_ID
from hoploom.store import Draw, Wanted
from hoploom.train.runs.link_splits import LinkShares, hold_out

ON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEATURES = {"device": ON_DEVICE, "host": "host", "share": "30%", "number": 0.5, "bytes": 700, "auto": "auto"}


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with place_workers.own_folder() as folder:
        monkeypatch.setattr(hostmemory, "FOLDER", folder)
        yield
        assert os.listdir(folder) == []


@pytest.mark.parametrize("num_parts", [3])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_every_placement_gives_the_rows_of_the_host(features: Any, num_parts: int) -> None:
    store = in_parts(hoploom.from_pyg(random_graph(30, 200, 1), weight_attr="weight"), num_parts)
    with hoploom.place(store, features=features, device=ON_DEVICE) as placed:
        place_workers.assert_all_rows(placed)


@every_graph
@pytest.mark.parametrize(("num_parts", "topology"), [(1, ON_DEVICE), (3, "host")])
def test_lists_and_rows_hold_all_of_all_parts(graph: Graph, num_parts: int, topology: str) -> None:
    store = in_parts(hoploom.from_pyg(graph.make(), **graph.options), num_parts)
    every = Draw(1, 0, [-1] * len(store.schema.relations))
    with hoploom.place(store, topology, "30%", device=ON_DEVICE) as placed:
        place_workers.assert_all_rows(placed)
        for index, (lists, (counts, sources, _)) in enumerate(
            zip(placed_of(placed).lists, picks_of(store, every), strict=True)
        ):
            assert lists.device == placed_of(placed).device
            assert lists.indptr.tolist() == [0, *counts.cumsum(0).tolist()]
            assert (lists.indices.dtype, lists.indices.tolist()) == (torch.int32, sources.tolist())
            parts = [part.lists[index] for part in store.parts]
            for name in ("weight", "edge_time"):
                columns, column = [getattr(part, name) for part in parts], getattr(lists, name)
                assert (column is None) == (columns[0] is None)
                assert column is None or torch.equal(column.cpu(), torch.cat(columns))
            times = parts[0].source_time
            assert (lists.source_time is None) == (times is None)
            assert times is None or (lists.source_time is not None and torch.equal(lists.source_time.cpu(), times))


def test_edge_ids_are_the_users_own(ring_store: Store) -> None:
    """Position p of the ring is edge p // 2 + p % 2 * 12."""
    with hoploom.place(ring_store, features="50%", device=ON_DEVICE) as store:
        positions, key = torch.tensor([0, 1, 2, 23, 22]), ring_store.schema.relations[0].key
        assert place_workers.placed_rows(store, key, EDGE_ID, positions).tolist() == [0, 12, 1, 23, 11]
        assert place_workers.placed_rows(store, key, "edge_attr", positions).view(-1).tolist() == [0, 12, 1, 23, 11]


def test_edges_held_out_are_not_placed() -> None:
    store = hoploom.from_pyg(random_graph(40, 300, 3), weight_attr="weight")
    left = hold_out(store, store.schema.relations[0].key, (), LinkShares(1, 0.2, 0.2)).store
    assert left.schema.relations[0].num_edges < 300
    with hoploom.place(left, ON_DEVICE, "40%") as placed:
        place_workers.assert_all_rows(placed)


def test_types_without_nodes_or_edges_are_placed() -> None:
    store = hoploom.from_tensors(
        {"a": {"x": torch.ones(3, 2)}, "b": {"x": torch.ones(0, 2)}},
        {("a", "to", "b"): {"edge_index": torch.empty(2, 0, dtype=torch.int64)}},
    )
    for features in FEATURES.values():
        with hoploom.place(store, "host", features, device=ON_DEVICE) as placed:
            place_workers.assert_all_rows(placed)


@pytest.mark.parametrize("wrong", [12, -1])
def test_an_id_out_of_range_is_noted_and_the_other_rows_are_there(ring_store: Store, wrong: int) -> None:
    with hoploom.place(ring_store, features="50%", device=ON_DEVICE) as store:
        placed, faults = placed_of(store), torch.zeros(1, dtype=torch.int64, device=ON_DEVICE)
        outs = [placed.empty("node", name, 1).fill_(7) for name in ("y", "x")]
        ids = [torch.tensor([at], device=placed.device) for at in (wrong, 5)]
        wanted = [Wanted("node", name, own) for name, own in zip(("y", "x"), ids, strict=True)]
        placed.gather(wanted, faults, outs)
        assert (faults.tolist(), outs[1].tolist()) == ([SOURCE_OUT_OF_RANGE], [[5] * 4])
        with pytest.raises(ValueError, match="shorter"):
            placed.gather(wanted, faults, outs[:1])


def test_a_share_is_the_first_rows_of_every_part(ring_store: Store) -> None:
    """Parts of 4 nodes: a quarter is one row of each, and two runs of rows come of every part."""
    with hoploom.place(in_parts(ring_store, 3), features="25%", device=ON_DEVICE) as store:
        segments = placed_of(store).fields["node", "x"]
        assert segments.bounds.tolist() == [0, 1, 4, 5, 8, 9]
        addresses = segments.bases.tolist()
        assert [after - before for before, after in pairwise(addresses[::2])] == [16, 16]
        assert [after - before for before, after in pairwise(addresses[1::2])] == [48, 48]
        assert {p.what: p.share for p in placed_of(store).report}["x of node"] == 0.25


@settings(max_examples=30)
@given(st.just(0) | st.integers(200, 3000), st.integers(1, 4))
def test_bytes_are_not_exceeded(budget: int, num_parts: int) -> None:
    """No bytes at all are none; 200 hold a row."""
    store = in_parts(hoploom.from_pyg(library()), num_parts)
    plan = place_plan.plan_placement(store, None, budget, torch.device("cpu"), None)
    total = sum(column.num_rows * column.field.row_bytes for column, _ in plan.columns)
    most = sum(column.field.row_bytes for column, _ in plan.columns) * num_parts  # a row of every part is left out
    assert min(budget, total) - most <= plan.device_bytes <= budget
    assert plan.device_bytes + sum(plan.files.values()) == total
    for column, rows in plan.columns:
        spans = sorted(itertools.chain(*(spans for spans, _ in rows)))
        assert [i for begin, end in spans for i in range(begin, end)] == list(range(column.num_rows))


@pytest.mark.parametrize(
    ("free", "where", "share"),
    [
        (100 << 30, "device", 1.0),
        # A quarter stays free: of the 2 ** 30 left, 0.25 GiB are topology and 0.75 GiB are for 1 GiB of rows.
        (3 << 30, "device", 0.75),
        ((2 << 30) + (10 << 20), "host", 0.0),
    ],
)
def test_auto_takes_topology_first_and_leaves_room(
    monkeypatch: pytest.MonkeyPatch, free: int, where: str, share: float
) -> None:
    monkeypatch.setattr(place_plan, "free_memory", lambda device: free)
    indptr = place_plan.PlannedTensor((256 << 20,), torch.uint8, lambda out: None)
    monkeypatch.setattr(place_plan, "plan_relations", lambda parts, **options: [{"indptr": indptr}])
    field = hoploom.schema.Field("uint8", (1 << 20,))
    column = place_plan.FieldColumn("node", "x", field, (), [(0, 1 << 10)], 1 << 10)
    monkeypatch.setattr(place_plan, "fields_of", lambda schema: {("node", "x"): field})
    monkeypatch.setattr(place_plan, "FieldColumn", lambda *given: column)
    store = hoploom.from_pyg(ring(12))
    plan = place_plan.plan_placement(store, "auto", "auto", torch.device("cpu"), None)
    assert (plan.topology[0][0]["indptr"].file is None, plan.share) == (where == "device", share)
    assert plan.device_bytes <= free - max(2 << 30, free // 4)


@pytest.mark.parametrize(("topology", "features"), [("auto", "20%"), (ON_DEVICE, "auto")])
def test_auto_says_its_reason(monkeypatch: pytest.MonkeyPatch, ring_store: Store, topology: str, features: str) -> None:
    monkeypatch.setattr(place_plan, "free_memory", lambda device: 120 * 10**9)
    with hoploom.place(ring_store, topology, features, device=ON_DEVICE) as store:
        last = str(store.placed).splitlines()[-1]
        assert last == f"auto: {placed_of(store).device} had 120 GB free, of which 30.0 GB are left to training"
    with hoploom.place(ring_store, ON_DEVICE, "20%") as store:
        assert "auto" not in str(store.placed)
    monkeypatch.setattr(place_plan, "free_memory", lambda device: 10**9)  # less than what training is left at least
    with hoploom.place(ring_store, topology, features, device=ON_DEVICE) as store:
        assert "had 1.00 GB free, of which 1.00 GB are left" in str(store.placed)


@pytest.mark.parametrize(
    ("told", "room"),
    [
        ([(10, "a"), (12, "b"), (11, "c")], (10, 1)),
        ([(10, "a"), (11, "a"), (4, "b")], (4, 1)),
        ([(10, "a"), (11, "a"), (6, "b")], (5, 2)),
        ([(10, "a"), (10, "a"), (10, "a")], (3, 3)),
    ],
)
def test_ranks_that_share_a_device_share_what_is_free_there(
    told: list[tuple[int, str]], room: tuple[int, int], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    said: list[Any] = []
    here, elsewhere = place_plan.host_key(), [["boot", 1], 1, "a"]  # the device "a" of another host
    monkeypatch.setattr(place_plan, "free_memory", lambda device: 10)
    every = [[here, free, key] for free, key in told] + [elsewhere]
    monkeypatch.setattr(place_plan, "gather_json", lambda among, words: said.append(words) or every)
    among: Any = SimpleNamespace(rank=0)
    assert place_plan.free_memory_of_ranks(device, among) == room
    assert said == [[here, 10, place_plan.device_key(device)]]
    assert place_plan.free_memory_of_ranks(device, None) == (10, 1)


def test_any_type_of_number_is_an_amount(ring_store: Store) -> None:
    shares = {}
    for features in (0.5, np.float32(0.5), np.float64(0.5), "50%", " 50 %", np.int64(400), 400, "400B"):
        with hoploom.place(ring_store, features=features, device=ON_DEVICE) as store:  # type: ignore[arg-type]
            shares[repr(features)] = placed_of(store).report[0].share
    assert list(shares.values()) == [0.5] * 5 + [shares["400"]] * 3


def test_the_report_says_what_lies_where() -> None:
    store = hoploom.from_tensors({"x": torch.randn(1000, 64)}, torch.randint(1000, (2, 5000)))
    with hoploom.place(store, ON_DEVICE, "20%") as placed:
        device = str(placed_of(placed).device)
        # 8,008 bytes of indptr, 20,000 of indices, and a fifth of 256,000 of x and of 40,000 of edge ids; the rest
        assert repr(placed.placed) == f"PlacedStore({device}: 87.2 kB, host: 237 kB)"
        lines = [line.split("  ") for line in str(placed.placed).splitlines()]
        cells = [[cell.strip() for cell in line if cell] for line in lines]
        assert cells[0] == [f"placed on {device}"]
        assert cells[1] == ["what", "dtype", "where", "rows on device", "device bytes", "host bytes"]
        assert cells[2] == ["topology of node to node", "int32", device, "100 %", "28.0 kB", "0 B"]
        assert cells[3] == ["x of node", "float32", f"{device} and host", "20.0 %", "51.2 kB", "205 kB"]
        assert cells[-1][0] == "all"


@pytest.mark.slow
def test_two_ranks_share_host_memory_and_what_is_free(tmp_path: Path) -> None:
    """One set of files; they choose alike, and share what is free on a device."""
    save_in_parts(hoploom.from_pyg(random_graph(90, 400, 1), weight_attr="weight"), tmp_path / "store", 3)
    device = "cuda:0" if place_workers.DEVICE == "cuda" else "cpu"  # one GPU for both, over Gloo: NCCL takes one each
    with place_workers.own_folder() as folder:
        paths = [str(folder), str(tmp_path / "store")]
        hoploom.spawn(place_workers.together, 2, paths, device=device, backend="gloo", timeout=60)
