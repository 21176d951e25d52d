"""A server on a device: what it keeps, and what becomes of a request when the device fails."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import place_workers
from support.batch_servers import request_of
from support.graphs import dated_library, random_graph, save_in_parts
from support.wires import over_the_wire
from torch import Tensor

import hoploom
from hoploom import ConfigError, PeerError
from hoploom.cli.serving import placed_for_clients
from hoploom.deploy import device_server
from hoploom.deploy.device_server import PlacedShard, ServingDevice
from hoploom.gpu import host_memory, place_plan
from hoploom.gpu.loading import DeviceLoading
from hoploom.ops import Frontier
from hoploom.ops.deadline import HostCopy
from hoploom.serve.graph_server import BatchOptions, GraphServer
from hoploom.serve.wire import Message
from hoploom.store.base import Absent, Draw


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("device") / "store"
    save_in_parts(hoploom.from_pyg(random_graph(60, 500, seed=1)), path, 2)
    return path


@pytest.fixture
def server(path: Path, device: torch.device) -> Iterator[GraphServer]:
    options = BatchOptions(place=partial(placed_for_clients, str(device)), memory=1 << 20)
    with GraphServer(path, None, options) as server:
        yield server


def asked(server: GraphServer, batch_size: int = 4, **changed: Any) -> Message:
    header, seeds = over_the_wire(request_of(hoploom.open(server.store.path), 60, batch_size))[:2]  # type: ignore[arg-type]
    header["description"] = {**header["description"], **changed}
    return Message(header, seeds)


def kept(server: GraphServer) -> dict[Any, Any]:
    deployment = server._batch_service()._store.deployment
    assert isinstance(deployment, ServingDevice)
    return deployment.loadings


SAMPLE = {"ask": "sample", "part": 1, "frontiers": [[0, False, False]], "key": 1, "hop": 0, "fanouts": [2]}
SAMPLE |= dict.fromkeys(("replace", "last", "labor", "weighted"), False)
GATHER = {"ask": "gather", "part": 1, "wanted": [["node", "x", 0]]}
IDS = torch.arange(30, 40)


FULL = "CUDA out of memory; lower the fanouts or batch_size, or start another server"


def late(copied: HostCopy, seconds: float, message: str) -> Tensor:
    raise TimeoutError(message)


def no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (lambda patch: patch.setattr(HostCopy, "wait", late), "the device has not .* within 60 s; see what else keeps"),
        (lambda patch: patch.setattr("hoploom.gpu.batch_memory.Pool.stage", no_memory), FULL),
    ],
    ids=["late", "full"],
)
def test_a_device_that_fails_sends_clients_to_another_server(
    fail: Callable[[pytest.MonkeyPatch], None], said: str, server: GraphServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [asked(server), Message(SAMPLE, [IDS]), Message(GATHER, [IDS])]
    expected = [server.service.answer(request) for request in requests]
    with monkeypatch.context() as patch:
        fail(patch)
        for request in requests:
            with pytest.raises(PeerError, match=said):
                server.service.answer(request)
    assert kept(server) == {}  # the buffers are given up
    for before, request in zip(expected, requests, strict=True):
        for ours, theirs in zip(server.service.answer(request).whole_tensors, before.whole_tensors, strict=True):
            assert torch.equal(ours, theirs)


def test_buffers_are_kept_of_the_kinds_of_batches_asked_for_last(server: GraphServer) -> None:
    fanouts = [[[1 + number]] for number in range(device_server.MOST_LOADERS + 1)]
    sampling = asked(server).header["description"]["sampling"]
    requests = [asked(server, sampling={**sampling, "fanouts": own}) for own in fanouts]
    for request in requests[:-1]:
        server.service.answer(request)
    first, second, *_ = kept(server)
    server.service.answer(requests[0])  # now the second is the oldest
    loading = kept(server)[first]
    server.service.answer(requests[-1])
    assert len(kept(server)) == device_server.MOST_LOADERS
    assert second not in kept(server)
    server.service.answer(requests[0])
    assert kept(server)[first] is loading


def test_buffers_are_dropped_where_memory_is_short_and_kept_where_a_client_is_wrong(
    server: GraphServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = asked(server), asked(server, 5)
    second.header["description"]["sampling"] = {**second.header["description"]["sampling"], "fanouts": [[3]]}
    expected = server.service.answer(first).whole_tensors
    server.service.answer(second)
    (_, other), make, num_made = kept(server), DeviceLoading.make, list[int]()

    def short_once(loading: DeviceLoading, *given: Any) -> Any:
        num_made.append(len(kept(server)))
        return no_memory() if len(num_made) == 1 else make(loading, *given)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceLoading, "make", short_once)
        made = server.service.answer(first).whole_tensors
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(made, expected, strict=True))
    assert num_made == [2, 1]
    assert other not in kept(server)
    (before,) = kept(server).values()
    server._batch_service().budget.size = 1000
    with pytest.raises(ConfigError, match="the server has 1000 for all batches"):
        server.service.answer(asked(server, 30))
    assert list(kept(server).values()) == [before]


def test_a_batch_that_never_fits_the_servers_memory_is_refused_before_it_is_copied(
    server: GraphServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = server._batch_service()
    service.budget.size = 1000
    monkeypatch.setattr(device_server, "HostCopy", no_memory)
    with pytest.raises(ConfigError, match="the server has 1000 for all batches; lower the fanouts or batch_size"):
        server.service.answer(asked(server, 30))
    assert service.budget.taken == 0


def test_a_part_says_that_rows_on_the_device_are_not_in_host_memory(server: GraphServer) -> None:
    shard = server.store.shards[0]
    assert isinstance(shard, PlacedShard)
    assert not shard.in_memory("node", "x")
    rows = hoploom.open(server.store.path).features.gather([("node", "x", IDS)])[0]  # type: ignore[arg-type]
    assert torch.equal(server.store.features.gather([("node", "x", IDS)])[0], rows)


@pytest.mark.parametrize(
    "options", [{}, {"labor": True}, {"weighted": True}, {"replace": True}, {"fanouts": [-1]}], ids=str
)
@pytest.mark.parametrize("parts", [[1], [1, 2]])
def test_a_part_is_sampled_on_the_device_as_on_the_host(
    parts: Sequence[int], options: dict[str, Any], tmp_path: Path, device: torch.device
) -> None:
    """Nodes and edges of the lists there are counted from the part's first. Some edges are excluded."""
    save_in_parts(hoploom.from_pyg(random_graph(60, 500, seed=1), weight_attr="weight"), tmp_path / "store", 4)
    with GraphServer(tmp_path / "store", parts, BatchOptions(place=partial(placed_for_clients, str(device)))) as server:
        for number in parts:
            shard, part = server.store.shards[number], server.store.parts[number - 1]
            assert isinstance(shard, PlacedShard)
            assert shard.placed.lists is None
            first, count = part.lists[0].first_edge, part.lists[0].num_edges
            excluded = torch.arange(first - 3, first + count, 3)
            draw = Draw(**{"key": 5, "hop": 1, "fanouts": [3], "excluded": [excluded], **options})
            frontier = Frontier(torch.arange(part.first_nodes[0], part.first_nodes[0] + part.num_nodes[0]).flip(0))
            (ours,), (theirs,) = shard.begin_sample([frontier], draw)(), part.sample([frontier], draw)
            assert ours is not None
            assert theirs is not None
            assert theirs.edges.min() >= first > 0
            assert all(torch.equal(*columns) for columns in zip(ours, theirs, strict=True))


def test_the_times_of_a_part_stay_on_the_host_which_samples_by_time(tmp_path: Path, device: torch.device) -> None:
    """The device samples the other hops, of several relations, and none of a type without a frontier."""
    store = hoploom.from_pyg(dated_library(), time_attr="time")
    save_in_parts(store, tmp_path / "store", 3)
    schema = store.schema
    options = BatchOptions(place=partial(placed_for_clients, str(device)))
    with GraphServer(tmp_path / "store", [1], options) as server:
        shard, part = server.store.shards[1], server.store.parts[0]
        assert isinstance(shard, PlacedShard)
        assert shard.lists is not None
        assert [lists.edge_time for lists in shard.lists] == [None] * len(schema.relations)
        assert any(lists.edge_time is not None for lists in part.lists)
        draw = Draw(7, 0, [2] * len(schema.relations))
        nodes = [
            torch.arange(first, first + count) for first, count in zip(part.first_nodes, part.num_nodes, strict=True)
        ]
        for timed in (False, True):
            frontiers: list[Frontier | None] = [
                Frontier(own, torch.zeros_like(own), torch.full_like(own, 50)) if timed else Frontier(own)
                for own in nodes
            ]
            frontiers[schema.type_index["venue"]] = None
            begun, theirs = shard.begin_sample(frontiers, draw)(), part.sample(frontiers, draw)
            for mine, other in zip(begun, theirs, strict=True):
                assert (mine is None) is (other is None)
                assert mine is None or all(torch.equal(*columns) for columns in zip(mine, other, strict=True))


@pytest.mark.parametrize("peers", [(), ("127.0.0.1:9",)], ids=["alone", "with peers"])
def test_a_server_of_some_parts_has_these_on_the_device(peers: Sequence[str], path: Path, device: torch.device) -> None:
    """And no others, if it has peers for whole batches."""
    options = BatchOptions(peers, place=partial(placed_for_clients, str(device)))
    whole = hoploom.open(path)
    with GraphServer(path, [1], options) as server:
        absent, shard = server.store.shards
        assert isinstance(absent, Absent)
        assert isinstance(shard, PlacedShard)
        assert shard.lists is not None
        placed = {row.what: row for row in shard.placed.report}["topology of node to node"]
        assert placed.share == 0.5
        assert (len(server.store.topology) == 2) is bool(peers)
        rows = server.service.answer(Message(GATHER, [IDS])).whole_tensors[0]
        assert torch.equal(rows, whole.features.gather([("node", "x", IDS)])[0])
        picks = server.service.answer(Message(SAMPLE, [IDS])).whole_tensors
        with GraphServer(path, None, BatchOptions()) as other:
            expected = other.service.answer(Message(SAMPLE, [IDS])).whole_tensors
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(picks, expected, strict=True))


def test_a_server_that_closes_frees_the_host_memory_of_its_store(
    path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_plan, "free_memory", lambda device: 0)
    with place_workers.own_folder() as folder:
        monkeypatch.setattr(host_memory, "FOLDER", folder)
        server = GraphServer(path, [1], BatchOptions(place=partial(placed_for_clients, str(device))))
        assert os.listdir(folder)
        rows = server.service.answer(Message(GATHER, [IDS])).whole_tensors[0]
        server.close()
        assert os.listdir(folder) == []
        assert torch.equal(rows, hoploom.open(path).features.gather([("node", "x", IDS)])[0])
        with pytest.raises(ConfigError, match="the placed store is closed"):
            server.service.answer(Message(SAMPLE, [IDS]))
