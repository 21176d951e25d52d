"""A store of which parts are on other hosts is placed as far as it is here; other rows come through the window."""

import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import assert_same_batches, on_host
from support.device_loaders import nodes
from support.fleets import within
from support.graphs import random_graph, ring, save_in_parts
from support.place_workers import placed_of, placed_rows
from support.refusals import assert_refused
from support.servers import addresses_of, serving
from support.shards import elsewhere_of, spread

import hoploom
from hoploom import PeerError, Store
from hoploom.gpu import host_memory, loading, place_plan
from hoploom.gpu.loading import DeviceAhead
from hoploom.load.order import Order
from hoploom.load.pipeline import Pipeline
from hoploom.ops.deadline import HostCopy
from hoploom.serve.connect import RemotePart
from hoploom.store import Wanted
from hoploom.store.row_cache import cache_of, cached

ALL = [-1, -1]


def _ring() -> Store:
    """The ring of 40 nodes in four parts, the first here, whose topology is here."""
    return spread(hoploom.from_pyg(ring(40)), 4, here=[0], whole_topology=True)


def _placed(store: Store, device: torch.device, **given: Any) -> Store:
    return hoploom.place(store, **{"topology": "auto", "features": str(device), "device": device, **given})


def _in_order(store: Store, **options: Any) -> Any:
    """Eight steps of five nodes in order; step s reaches the nodes 5s to 5s + 8."""
    given = {"num_neighbors": ALL, "input_nodes": torch.arange(40), "batch_size": 5, "shuffle": False, **options}
    return nodes(store, **given)


@pytest.mark.parametrize("features", ["0%", "30%", "host", None])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16, torch.bool, torch.int64], ids=str)
def test_rows_of_any_dtype_are_those_of_the_host(
    dtype: torch.dtype, features: str | None, device: torch.device
) -> None:
    data = random_graph(60, 500, seed=1)
    data.x = (torch.arange(60).view(-1, 1) * torch.arange(1, 4) % 101).to(dtype)
    data.edge_attr = torch.arange(500).view(-1, 1).expand(-1, 5).to(dtype).contiguous()
    whole = hoploom.from_pyg(data)
    store = spread(whole, 4, here=[1, 2], whole_topology=True)
    store = cached(store, 0.2, {"node": torch.arange(60) % 7})
    options = {"num_neighbors": [3, 2], "shuffle": True, "look_ahead": 2}
    with _placed(store, device, features=features or str(device)) as placed:
        assert_same_batches(islice(nodes(whole, **options), 4), map(on_host, islice(nodes(placed, **options), 4)))


@pytest.mark.parametrize(("look_ahead", "num_workers"), [(1, 0), (1, 2), (3, 0), (3, 2)])
def test_a_group_asks_every_peer_for_every_row_once(look_ahead: int, num_workers: int, device: torch.device) -> None:
    """A row that the group before has is not asked for, either."""
    store = _ring()
    with _placed(store, device) as placed:
        loader = _in_order(placed, look_ahead=look_ahead, num_workers=num_workers)
        assert_same_batches(_in_order(hoploom.from_pyg(ring(40))), map(on_host, loader))
    reached = [{v % 40 for v in range(5 * step, 5 * step + 9) if v % 40 >= 10} for step in range(8)]
    groups = [set().union(*reached[at : at + look_ahead]) for at in range(0, 8, look_ahead)]
    fresh = [new - old for old, new in zip([set(), *groups], groups, strict=False)]
    asked = [one for shard in elsewhere_of(store) for one in shard.rows_of("node", "x")]
    assert sorted(asked) == sorted(v for group in fresh for v in group)


@pytest.mark.parametrize("look_ahead", [1, 3])
def test_no_more_steps_are_in_flight_than_the_window_has_rows_of(look_ahead: int, device: torch.device) -> None:
    """A group's fetch may write over rows of the group before the last, whose batches must be made by then."""
    with _placed(_ring(), device) as placed:
        producer = _in_order(placed, look_ahead=look_ahead, num_workers=4)._producer
        with producer.stages(Order(40, 5), Pipeline(num_threads=4)) as stages:
            assert (stages.group, stages.window) == (look_ahead, 2 * look_ahead)
            assert stages.fetch is not None


def test_cached_rows_are_on_the_device_and_are_not_asked_for(device: torch.device) -> None:
    counts = torch.zeros(40, dtype=torch.int64)
    counts[15:27] = 1
    ring_store = _ring()
    store, filled = cached(ring_store, 12 / 30, {"node": counts}), set(range(15, 27))
    for shard in elsewhere_of(ring_store):
        shard.gathers.clear()
    with _placed(store, device, features="host") as placed:
        assert_same_batches(_in_order(hoploom.from_pyg(ring(40))), map(on_host, _in_order(placed, look_ahead=2)))
        report = {row.what: row for row in placed_of(placed).report}
        x, (width,) = report["x of node"], placed.schema.node_type("node").fields["x"].shape
        assert (x.where, x.share) == (f"{device} and host and other hosts", 12 / 40)
        assert x.device_bytes == 12 * 4 * width
    asked = {v for shard in elsewhere_of(ring_store) for v in shard.rows_of("node", "x")}
    assert asked == set(range(10, 40)) - filled


def test_cached_rows_that_the_device_has_no_memory_for_are_refused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the plan; and if another process took the memory since, by what was placed before, which is freed."""
    store = cached(_ring(), 12 / 30, {"node": torch.ones(40, dtype=torch.int64)})
    num_bytes = sum(rows.nbytes for rows in cache_of(store).tables["node"].values())
    empty = torch.empty
    monkeypatch.setattr(host_memory, "FOLDER", tmp_path)

    def short(shape: Any, **options: Any) -> torch.Tensor:
        if "device" in options and shape[0] == 12:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(shape, **options)

    with monkeypatch.context() as patch:
        patch.setattr(place_plan, "free_memory", lambda device: num_bytes - 1)
        assert_refused(lambda: _placed(store, device, features="host"), f"takes {num_bytes} B of", "a smaller cache")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", short)
        said = "in one piece: CUDA out of memory", "or a smaller share, a smaller cache"
        assert_refused(lambda: _placed(store, device, features="host"), *said)
    assert os.listdir(tmp_path) == []


def test_ids_are_copied_to_the_host_once_whatever_the_number_of_fields(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ring(40)
    data.z = data.x + 1
    copied = list[int]()
    monkeypatch.setattr(loading, "HostCopy", lambda ids: copied.append(ids.numel()) or HostCopy(ids))
    store = spread(hoploom.from_pyg(data), 4, here=[0], whole_topology=True)
    with _placed(store, device) as placed:
        batch = next(iter(_in_order(placed, look_ahead=1)))
        assert torch.equal(batch.z, batch.x + 1)
    begun = [number for number in copied if number > 4]  # others are of sizes
    assert begun.count(batch.num_nodes) == 1


def test_one_batch_and_rows_by_id_are_right_too(device: torch.device) -> None:
    whole = hoploom.from_pyg(ring(40))
    with _placed(_ring(), device) as placed:
        ids = torch.tensor([39, 0, 12, 39])
        (rows,) = whole.features.gather([Wanted("node", "x", ids)])
        assert torch.equal(placed_rows(placed, "node", "x", ids), rows)
        at = torch.tensor([3, 33])
        assert_same_batches([_in_order(whole)(at)], [on_host(_in_order(placed)(at))])


def test_a_part_of_the_topology_is_left_to_the_host(device: torch.device) -> None:
    parted = spread(hoploom.from_pyg(ring(40)), 4, here=[0])
    for topology in (str(device), "host"):
        said = "some of it is on another host, and every hop would wait for that host; place features alone"
        assert_refused(lambda topology=topology: _placed(parted, device, topology=topology), said)  # type: ignore[misc]
    assert_refused(lambda: hoploom.place(parted, "auto", device=device), "every hop would wait for that host")
    with _placed(parted, device) as placed:
        assert placed_of(placed).lists is None
        last = str(placed_of(placed)).splitlines()[-1]
        assert last.endswith("the topology is not placed, because some of it is on another host")
        loader = _in_order(placed, look_ahead=4)
        assert_same_batches(_in_order(hoploom.from_pyg(ring(40))), map(on_host, loader))
        assert not loader._producer.loading.samples_on_device


def test_a_cache_is_made_before_the_store_is_placed(device: torch.device) -> None:
    with _placed(_ring(), device) as placed:
        said = "the store is placed already; make the cache first, then place the store"
        assert_refused(lambda: cached(placed, 0.5, {"node": torch.ones(40, dtype=torch.int64)}), said)


@pytest.mark.slow
@pytest.mark.parametrize("is_placed", [False, True])
def test_a_server_that_is_killed_while_a_window_is_fetched_is_one_error(
    *, is_placed: bool, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_in_parts(hoploom.from_pyg(random_graph(400, 3000, seed=1)), tmp_path / "store", 2)
    with (
        serving(tmp_path / "store", [[1]]) as servers,
        hoploom.connect(
            addresses_of(servers), tmp_path / "store", parts=[0], topology="local", look_ahead=2, timeout=4
        ) as store,
    ):
        begin, begun = RemotePart.begin_gather, list[int]()

        def killing(part: RemotePart, *given: Any) -> Any:
            """The third request is sent to a server that stands still, which is killed then."""
            begun.append(part.number)
            if len(begun) != 3:
                return begin(part, *given)
            servers[0].pause()
            finish = begin(part, *given)
            servers[0].kill()
            return finish

        monkeypatch.setattr(RemotePart, "begin_gather", killing)
        graph = _placed(store, device) if is_placed else store
        loader = nodes(graph, num_workers=2)
        assert isinstance(loader._producer, DeviceAhead) is is_placed
        found: list[Any] = []
        with (
            within(60),
            pytest.raises(PeerError, match=r"no answer for part 1 within 4 seconds from .* start the server again"),
        ):
            found.extend(map(on_host, loader))
        if is_placed:
            graph.placed.close()
