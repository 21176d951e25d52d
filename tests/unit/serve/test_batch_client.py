"""Invariant 1 where a trainer holds no graph: servers make its batches, and no bit tells."""

from typing import Any

import pytest
import torch
from support.batch_servers import makers_of, without_graph
from support.batches import assert_same
from support.cases import NOT_SENT, Case, every_case, store_of
from support.graphs import ring
from support.shards import elsewhere_of, spread
from support.wires import over_the_wire
from torch_geometric.data import HeteroData

import hoploom
from hoploom import PeerError
from hoploom.serve import batch_messages as codec
from hoploom.serve.batch_messages import decode_batch, encode_batch, read_description
from hoploom.serve.wire import Message


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
    if case.name in NOT_SENT:
        pytest.skip("it is refused")
    loader = case.make(trainer)
    next(iter(loader))
    asking: Any = loader._producer
    assert read_description(servers.requests[0]["description"], case.store.schema) == asking.description
