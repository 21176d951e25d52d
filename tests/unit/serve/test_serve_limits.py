"""What is too much for one request goes in several, or is refused with a way out; and whoever answers is checked."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.batch_servers import listening
from support.batches import assert_same_batches
from support.graphs import random_graph, save_in_parts
from support.proxy import Proxy
from support.servers import OneProcess
from torch import Tensor

import hoploom
from hoploom import ConfigError, PeerError, Store, StoreError
from hoploom.load.arguments import all_edges
from hoploom.load.maker import NodeTimes
from hoploom.serve.connect import RemotePart
from hoploom.serve.peers import Peers
from hoploom.serve.security import ClientSecurity
from hoploom.serve.server import ServerLimits
from hoploom.serve.wire import Message
from hoploom.store import Wanted
from hoploom.store.row_cache import cached
from hoploom.store.sharded import Sharded

pytestmark = pytest.mark.timeout(120)
LIMIT = 200 * 4  # bytes of a request: 200 ids


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("limits") / "store"
    save_in_parts(hoploom.from_pyg(random_graph(500, 2000, seed=1), time_attr="node_time"), path, 2)
    return path


@pytest.fixture(scope="module")
def peers(path: Path) -> Iterator[Peers]:
    """Of a server that takes 200 ids in a request."""
    with (
        listening(path, limits=ServerLimits(request=LIMIT)) as served,
        Peers([served.address], ClientSecurity(), 60.0, own=()) as peers,
    ):
        yield peers


def _there(path: Path, peers: Peers, max_ids: int) -> Store:
    """The store over peers that are asked for so many ids at a time."""
    local = hoploom.open(path)
    parts = [RemotePart(local.schema, number, peers, max_ids) for number in range(2)]
    sharded = Sharded(local.schema, parts, local.ranges)
    return replace(local, graph=sharded, features=sharded, shards=tuple(parts))


@pytest.fixture(scope="module")
def limited(path: Path, peers: Peers) -> tuple[Store, Store]:
    """A store here, and the same over that server."""
    return hoploom.open(path), _there(path, peers, 200)


def test_a_request_above_the_limit_is_refused_so_these_tests_can_fail(path: Path, peers: Peers) -> None:
    with pytest.raises((ConfigError, PeerError)):
        _there(path, peers, 1 << 22).features.gather([Wanted("node", "x", torch.arange(500))])


def test_many_ids_are_asked_for_in_several_requests(limited: tuple[Store, Store], peers: Peers) -> None:
    local, there = limited
    key = local.schema.relations[0].key
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    wanted = [
        Wanted("node", "x", order),
        Wanted("node", "node_time", order),
        Wanted(key, "weight", torch.arange(2000).flip(0)),
        Wanted("node", "x", torch.arange(3)),
    ]
    before = peers.traffic()
    for ours, theirs in zip(there.features.gather(wanted), local.features.gather(wanted), strict=True):
        assert torch.equal(ours, theirs)
    grown = {name: count - before[name] for name, count in peers.traffic().items()}
    assert grown["requests"] >= 2 * (250 + 1000) // 200
    assert grown["wait_seconds"] > 0


def test_a_whole_stores_edges_times_and_cache_come_in_pieces(limited: tuple[Store, Store], peers: Peers) -> None:
    local, there = limited
    key = local.schema.relations[0].key
    assert torch.equal(all_edges(there, key, 100), all_edges(local, key))
    assert torch.equal(NodeTimes(there)(key)[0], NodeTimes(local)(key)[0])
    held, ids = cached(there, 1.0, {}), [Wanted("node", "x", torch.arange(500))]
    before = peers.traffic()["requests"]
    assert torch.equal(held.features.gather(ids)[0], local.features.gather(ids)[0])
    assert peers.traffic()["requests"] == before


class _Mistaken:
    """Peers that answer with what they are given."""

    def __init__(self, store: Store, *tensors: Tensor) -> None:
        self.identity, self.manifest = store.identity, SimpleNamespace(parts=store.ranges)
        self.asked: list[dict[str, Any]] = []
        self._tensors = tensors

    def ask(self, request: Message, part: int | None = None) -> Message:
        self.asked.append(request.header)
        return Message({}, self._tensors)


def test_a_split_is_checked(tmp_path: Path) -> None:
    store = save_in_parts(hoploom.from_pyg(random_graph(60, 500, seed=1)), tmp_path / "store", 2)
    sound = store.shards[1].split("node", "train")
    for wrong in ([sound.int()], [sound[1:]], [sound.view(1, -1)], [sound - 30], [sound + 30], [], [sound, sound]):
        with pytest.raises(PeerError, match="part 1 answered with"):
            RemotePart(store.schema, 1, _Mistaken(store, *wrong)).split("node", "train")  # type: ignore[arg-type]
    peers = _Mistaken(store, sound)
    part = RemotePart(store.schema, 1, peers)  # type: ignore[arg-type]
    assert part.split("node", "train") is sound
    assert part.split("node", "val").numel() == 0
    assert peers.asked == [{"ask": "split", "identity": store.identity, "part": 1, "type": "node", "split": "train"}]


@pytest.mark.parametrize("made", ["here", "servers"])
def test_a_server_of_another_store_at_the_same_address_gives_an_error_and_no_rows(
    made: Any, tmp_path: Path, server_process: OneProcess, tcp_alone: None
) -> None:
    """Its store is of the same sizes, and no stream is left that would break and have it introduce itself."""
    data = random_graph(60, 500, seed=1)
    hoploom.from_pyg(data).save(tmp_path / "one")
    data.x = data.x + 1
    hoploom.from_pyg(data).save(tmp_path / "other")
    local = hoploom.open(tmp_path / "one")
    (one,), (other,) = (server_process.serve(tmp_path / name, [[0]]) for name in ("one", "other"))

    def loader(store: Store) -> hoploom.NeighborLoader:
        return hoploom.NeighborLoader(store, [2], torch.arange(20), batch_size=10, num_workers=0)

    with Proxy(one) as line, hoploom.connect(line.address, made=made, timeout=60) as store:
        assert_same_batches(loader(local), loader(store))
        deployment: Any = store.deployment
        for peer in deployment.peers._peers:
            peer._drop_idle()
        line.target = other
        with pytest.raises(StoreError, match="another store"):
            next(iter(loader(store)))


def test_what_secures_the_calls_is_given_once() -> None:
    with pytest.raises(ConfigError, match="security is given, and files of it too"):
        hoploom.connect("127.0.0.1:9", security=ClientSecurity(), token_file="token")
    with pytest.raises(TypeError, match="tokenfile"):
        hoploom.connect("127.0.0.1:9", tokenfile="token")  # type: ignore[call-arg]
