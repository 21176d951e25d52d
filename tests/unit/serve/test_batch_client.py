"""Invariant 1 where a trainer holds no graph: servers make its batches, and no bit tells."""

import threading
from typing import Any

import pytest
import torch
from support.batch_servers import makers_of, without_graph
from support.batches import assert_same, assert_same_batches
from support.cases import HOOKS, Case, every_case, store_of
from support.graphs import random_graph, ring
from support.shards import elsewhere_of, spread
from support.wires import over_the_wire
from torch_geometric.data import HeteroData
from torch_geometric.sampler import NegativeSampling

import hoploom
from hoploom import PeerError
from hoploom.serve import batch_messages as codec
from hoploom.serve.batch_messages import decode_batch, encode_batch, read_description
from hoploom.serve.batch_service import WeightCache
from hoploom.serve.wire import Message
from hoploom.store import Store

# --- a batch as a message ------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("narrowed", [1, 1 << 12])
def test_a_batch_arrives_as_it_was_sent(case: Case, narrowed: int) -> None:
    for batch in case.make(case.store):
        arrived = decode_batch(over_the_wire(encode_batch(batch, narrowed)))
        assert type(arrived) is type(batch)
        assert_same(arrived, batch)


@pytest.mark.parametrize("extreme", [0, 2**31 - 1, 2**31, -1, 2**63 - 1, -(2**63)])
def test_integers_arrive_whole_whatever_they_are(extreme: int) -> None:
    values = torch.arange(2 * codec.NARROW_FROM).view(2, -1)
    values[1, 7] = extreme
    data = HeteroData()
    data["paper"].y = values
    message = encode_batch(data)
    arrived = decode_batch(over_the_wire(message))["paper"].y
    assert arrived.dtype == torch.int64
    assert torch.equal(arrived, values)
    assert message.tensors[0].dtype == (torch.int32 if 0 <= extreme < 2**31 else torch.int64)  # type: ignore[union-attr]


def test_a_batch_that_is_none_is_the_peers_fault() -> None:
    good = encode_batch(next(iter(hoploom.NeighborLoader(ring(8), [2], batch_size=4))))
    for header, tensors in (
        ({}, good.tensors),
        (good.header | {"fields": [[None, [["x", {"tensor": 99, "wide": False}]]]]}, good.tensors),
        (good.header, ()),
    ):
        with pytest.raises(PeerError, match="same Hoploom"):
            decode_batch(Message(header, tensors))


# --- a loader whose batches are made elsewhere ---------------------------------------------------


def test_a_trainer_without_graph_asks_for_batches_alone_and_their_memory_is_given_back() -> None:
    store = store_of(False, {})
    trainer, servers = without_graph(store, *(makers_of(kind) for kind in (store, spread(store, 3, {0}))))
    loader = hoploom.NeighborLoader(trainer, [3, 2], batch_size=7)
    asked = sum(shard.samples + len(shard.gathers) for shard in elsewhere_of(trainer))
    assert len(list(loader)) == len(loader) == len(servers.answers)
    assert set(servers.answers) == {"ok"}
    assert asked == sum(shard.samples + len(shard.gathers) for shard in elsewhere_of(trainer))
    assert all(makers.budget.taken == 0 for makers in servers.makers)
    assert_same(hoploom.NeighborLoader(store, [3, 2])([5, 3]), hoploom.NeighborLoader(trainer, [3, 2])([5, 3]))


def test_two_requests_for_each_server_are_under_way() -> None:
    store = hoploom.from_pyg(ring(40))
    trainer, _ = without_graph(store, *(makers_of(store) for _ in range(3)))
    assert hoploom.NeighborLoader(trainer, [2]).num_workers == 6
    assert hoploom.NeighborLoader(trainer, [2], num_workers=9).num_workers == 9
    assert hoploom.NeighborLoader(store, [2]).num_workers == 0


@every_case
def test_a_description_is_read_as_it_was_written(case: Case) -> None:
    trainer, servers = without_graph(case.store)
    if case.name in HOOKS:
        pytest.skip("functions do not travel")
    loader = case.make(trainer)
    next(iter(loader))
    asking: Any = loader._producer
    assert read_description(servers.requests[0]["description"], case.store.schema) == asking.description


# --- weights of negatives ------------------------------------------------------------------------


def _weighted(store: Store, **options: Any) -> Any:
    negatives = NegativeSampling("binary", 1, torch.arange(60.0), torch.arange(60.0).flip(0))
    links = torch.stack([torch.arange(20), torch.arange(20).flip(0)])
    return hoploom.LinkNeighborLoader(store, [2], links, neg_sampling=negatives, batch_size=5, **options)


def test_weights_are_sent_once_to_each_server() -> None:
    store = hoploom.from_pyg(random_graph(60, 500, seed=1))
    trainer, servers = without_graph(store)
    assert_same_batches(_weighted(store), _weighted(trainer))
    assert_same_batches(_weighted(store, seed=2), _weighted(trainer, seed=2))
    assert sum(len(header["weights"]) for header in servers.requests) == 2
    assert servers.answers.count("ok") == 8


def test_two_loaders_that_begin_at_once_send_the_same_weights_once() -> None:
    """The second is told that they are needed while the first sends them: it waits, and does not send its own."""
    store = hoploom.from_pyg(random_graph(60, 500, seed=1))
    trainer, servers = without_graph(store)
    first_loader, second_loader = _weighted(trainer), _weighted(trainer)
    second = threading.Thread(target=second_loader._producer.make, args=(torch.arange(5), 0, 1))
    told, sent_too = threading.Event(), threading.Event()
    ask = servers.ask

    def asked(request: Message, **options: Any) -> Message:
        is_second = threading.current_thread() is second
        if request.header["weights"] and is_second:
            sent_too.set()
        elif request.header["weights"]:
            second.start()
            assert told.wait(30)
            sent_too.wait(0.2)  # what must not come has this long
        answer = ask(request, **options)
        if is_second:
            told.set()
        return answer

    servers.ask = asked  # type: ignore[method-assign,assignment]
    first_loader._producer.make(torch.arange(5), 0, 1)
    second.join(30)
    assert not sent_too.is_set()
    assert sum(len(header["weights"]) for header in servers.requests) == 2


def test_a_server_without_memory_for_weights_still_makes_batches() -> None:
    store = hoploom.from_pyg(random_graph(60, 500, seed=1))
    trainer, servers = without_graph(store, makers_of(store, memory=1 << 15))
    servers.makers[0]._weights = WeightCache(60 * 8)  # one of the two
    assert_same_batches(_weighted(store), _weighted(trainer))


def test_the_weights_used_last_stay() -> None:
    kept = WeightCache(2 * 10 * 8)
    weights = {name: torch.ones(10) for name in "abc"}
    for name in "ab":
        assert not isinstance(kept.find([name], weights), list)
    kept.find(["a"], {})
    kept.find(["c"], weights)
    assert kept.find(["a", "c"], {}) != []
    assert kept.find(["b"], {}) == ["b"]
