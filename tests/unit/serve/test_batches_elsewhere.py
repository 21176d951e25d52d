"""Invariant 1 where a trainer holds no graph: servers make its batches, and no bit tells."""

from typing import Any

import pytest
import torch
from support.batches import assert_same, assert_same_batches
from support.cases import MakeLoader, every_case, store_of
from support.elsewhere import makers_of, over_the_wire, without_graph
from support.graphs import cut, library, random_graph, ring
from support.shards import elsewhere_of, spread
from torch_geometric.data import HeteroData
from torch_geometric.sampler import NegativeSampling

import hoploom
from hoploom import ConfigError, PeerError
from hoploom.serve import batch_codec as codec
from hoploom.serve.batch_codec import packed, unpacked
from hoploom.serve.batch_request import read_description
from hoploom.serve.batch_service import WeightCache
from hoploom.serve.wire import Message
from hoploom.store import Store, assemble

# --- a batch as a message ------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("narrowed", [1, 1 << 12])
def test_a_batch_arrives_as_it_was_sent(
    heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any], narrowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "NARROWED", narrowed)
    for batch in make(store_of(heterogeneous, attrs)):
        arrived = unpacked(over_the_wire(packed(batch)))
        assert type(arrived) is type(batch)
        assert_same(arrived, batch)


@pytest.mark.parametrize("extreme", [0, 2**31 - 1, 2**31, -1, 2**63 - 1, -(2**63)])
def test_integers_arrive_whole_whatever_they_are(extreme: int) -> None:
    values = torch.arange(2 * codec.NARROWED).view(2, -1)
    values[1, 7] = extreme
    data = HeteroData()
    data["paper"].y = values
    message = packed(data)
    arrived = unpacked(over_the_wire(message))["paper"].y
    assert arrived.dtype == torch.int64
    assert torch.equal(arrived, values)
    assert message.tensors[0].dtype == (torch.int32 if 0 <= extreme < 2**31 else torch.int64)  # type: ignore[union-attr]


def test_a_batch_that_is_none_is_the_peers_fault() -> None:
    good = packed(next(iter(hoploom.NeighborLoader(ring(8), [2], batch_size=4))))
    for header, tensors in (
        ({}, good.tensors),
        (good.header | {"fields": [[None, [["x", {"tensor": 99, "wide": False}]]]]}, good.tensors),
        (good.header, ()),
    ):
        with pytest.raises(PeerError, match="same Hoploom"):
            unpacked(Message(header, tensors))


# --- a loader whose batches are made elsewhere ---------------------------------------------------


@every_case
def test_servers_make_the_batches_of_the_local_loader(
    heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any]
) -> None:
    store = store_of(heterogeneous, attrs)
    kinds = [store, spread(store, 3, {0}), spread(store, 3, {2}, whole_topology=True)]
    trainer, servers = without_graph(store, *map(makers_of, kinds))
    loader = make(trainer)
    asked = sum(shard.samples + len(shard.gathers) for shard in elsewhere_of(trainer))
    assert_same_batches(make(store), loader)
    assert servers.answers == ["ok"] * len(loader)
    assert asked == sum(shard.samples + len(shard.gathers) for shard in elsewhere_of(trainer))
    assert all(makers.budget.taken == 0 for makers in servers.makers)


@every_case
def test_a_restored_loader_without_graph_continues_with_the_same_batches(
    heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any]
) -> None:
    store = store_of(heterogeneous, attrs)
    trainer, _ = without_graph(store)
    whole = list(make(store))
    for step in range(1, len(whole)):
        loader = make(trainer)
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        fresh = make(trainer)
        fresh.load_state_dict(loader.state_dict())
        assert_same_batches(whole[step:], fresh)


def _own_ids(batch: Any) -> Any:
    batch.seen = batch.n_id + 1
    return batch


ADDED: dict[str, dict[str, Any]] = {
    "aggregated": {"aggregate": "mean"},
    "aggregated, blocks": {"aggregate": "sum", "mode": "blocks"},
    "degrees": {"degrees": True},
    "input ids": {"input_id": torch.arange(60) * 3.5},
    "a mask": {"input_nodes": torch.arange(60) % 3 == 0},
    "a transform": {"transform": _own_ids},
    "ranks": {"rank": 1, "world_size": 3, "disjoint": True},
    "threads": {"num_workers": 7, "prefetch_factor": 3},
}


@pytest.mark.parametrize("options", ADDED.values(), ids=ADDED.keys())
def test_what_a_loader_adds_is_added(options: dict[str, Any]) -> None:
    store = hoploom.from_pyg(random_graph(60, 500, seed=1))
    servers = [makers_of(kind) for kind in (store, assemble(store.schema, cut(store, 4)))]
    trainer, _ = without_graph(store, *servers)
    given: dict[str, Any] = {"batch_size": 7, "shuffle": True, **options}
    local, remote = (hoploom.NeighborLoader(kind, [3, 2], **given) for kind in (store, trainer))
    assert_same_batches(local, remote)
    assert_same(local([5, 3]), remote([5, 3]))


LINKS: dict[str, dict[str, Any]] = {
    "labels": {"edge_label": torch.arange(20.0)},
    "labels of several": {"edge_label": torch.arange(40).view(20, 2), "neg_sampling": "binary"},
    "weights": {"neg_sampling": NegativeSampling("binary", 1.5, torch.arange(60.0), torch.arange(60) % 7)},
    "one weight": {"neg_sampling": NegativeSampling("triplet", 2, dst_weight=torch.arange(60).to(torch.bfloat16))},
    "times": {"time_attr": "node_time", "edge_label_time": torch.arange(20) * 5},
    "times and negatives": {
        "time_attr": "node_time",
        "edge_label_time": torch.arange(20) * 5,
        "neg_sampling": NegativeSampling("binary", 2),
    },
    "input ids": {"input_id": torch.arange(20) * 2, "neg_sampling": "triplet"},
}


@pytest.mark.parametrize("options", LINKS.values(), ids=LINKS.keys())
@pytest.mark.parametrize("here", [{0, 1, 2}, {1}])
def test_what_comes_with_links_goes_with_them(options: dict[str, Any], here: set[int]) -> None:
    attrs = {"time_attr": "node_time"} if "time_attr" in options else {}
    store = hoploom.from_pyg(random_graph(60, 500, seed=1), **attrs)
    trainer, _ = without_graph(store, makers_of(spread(store, 3, here)))
    links = torch.stack([torch.arange(20), torch.arange(20).flip(0)])
    given: dict[str, Any] = {"batch_size": 6, "shuffle": True, "seed": 3, **options}
    local, remote = (hoploom.LinkNeighborLoader(kind, [3, 2], links, **given) for kind in (store, trainer))
    assert_same_batches(local, remote)


def test_temporal_negatives_of_one_dated_type_among_two() -> None:
    store = hoploom.from_pyg(library(), time_attr="year")
    links = torch.tensor([[0, 1, 2, 3], [8, 7, 6, 5]])
    given: dict[str, Any] = {
        "edge_label_index": (("author", "writes", "paper"), links),
        "edge_label_time": torch.full((4,), 2005),
        "neg_sampling": "binary",
        "time_attr": "year",
    }
    trainer, _ = without_graph(store, makers_of(spread(store, 3, {1})))
    local, remote = (hoploom.LinkNeighborLoader(kind, [3, 2], batch_size=2, **given) for kind in (store, trainer))
    assert_same_batches(local, remote)


def test_two_requests_for_each_server_are_under_way() -> None:
    store = hoploom.from_pyg(ring(40))
    trainer, _ = without_graph(store, *(makers_of(store) for _ in range(3)))
    assert hoploom.NeighborLoader(trainer, [2]).num_workers == 6
    assert hoploom.NeighborLoader(trainer, [2], num_workers=9).num_workers == 9
    assert hoploom.NeighborLoader(store, [2]).num_workers == 0


def test_a_frontier_hook_cannot_travel() -> None:
    trainer, _ = without_graph(hoploom.from_pyg(ring(8)))
    with pytest.raises(ConfigError, match="made='here'"):
        hoploom.NeighborLoader(trainer, [2], mode="blocks", sample_frontier=lambda layer, graph, seeds: None)  # type: ignore[arg-type, return-value]


@every_case
def test_a_description_is_read_as_it_was_written(heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any]) -> None:
    store = store_of(heterogeneous, attrs)
    trainer, servers = without_graph(store)
    loader = make(trainer)
    next(iter(loader))
    asking = loader._source.make.__self__  # type: ignore[union-attr]
    assert read_description(servers.requests[0]["description"], store.schema) == asking.description


@every_case
def test_picks_made_in_pieces_are_the_same(
    heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(heterogeneous, attrs)
    monkeypatch.setattr("hoploom.serve.memory_budget.PIECE", 3)
    monkeypatch.setattr("hoploom.serve.memory_budget.MeteredStore._fit", lambda *_: False)
    trainer, _ = without_graph(store)
    assert_same_batches(make(store), make(trainer))


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
