"""Look-ahead fetches what several steps miss together, each row once, and changes no batch."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.batches import assert_same_batches
from support.graphs import ring
from support.shards import elsewhere_of, spread

import hoploom
from hoploom import BatchError, ConfigError, NeighborLoader, PeerError, Store, ops
from hoploom.load.look_ahead import LookAhead
from hoploom.load.order import StepShare
from hoploom.serve.connect import Connected
from hoploom.store.row_cache import cached, report

pytestmark = pytest.mark.usefixtures("one_thread")


def _ring() -> Store:
    """The ring of 40 nodes in four parts, the first here, whose topology is here."""
    return spread(hoploom.from_pyg(ring(40)), 4, here=[0], whole_topology=True)


def _loader(store: Store, **options: Any) -> NeighborLoader:
    """Eight steps of five nodes in order; step s reaches the nodes 5s to 5s + 8."""
    given = {"input_nodes": torch.arange(40), "batch_size": 5, "look_ahead": 3, **options}
    return NeighborLoader(store, [-1, -1], **given)


def _ahead(loader: Any) -> LookAhead:
    ahead = loader._producer
    assert isinstance(ahead, LookAhead)
    return ahead


def _reached(first_step: int, end_step: int) -> set[int]:
    """The nodes elsewhere that these steps reach."""
    return {v % 40 for v in range(5 * first_step, 5 * (end_step - 1) + 9) if v % 40 >= 10}


@pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
def test_a_group_asks_every_peer_once_and_for_every_row_once(num_workers: int) -> None:
    store = _ring()
    loader = _loader(store, num_workers=num_workers)
    assert_same_batches(_loader(hoploom.from_pyg(ring(40))), loader)
    for shard in elsewhere_of(store):
        own = range(10 * shard.number, 10 * shard.number + 10)
        groups = [_reached(0, 3), _reached(3, 6) - _reached(0, 3), _reached(6, 8) - _reached(3, 6)]
        expected = [sorted(group.intersection(own)) for group in groups]
        assert [sorted(asked["node", "x"]) for asked in shard.gathers] == [ids for ids in expected if ids]
        assert all(len(asked["node", "y"]) == len(asked["node", "x"]) for asked in shard.gathers)
    assert sum(shard.samples for shard in elsewhere_of(store)) == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_row_of_a_batch_is_looked_up_once(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, counts = _ring(), torch.zeros(40, dtype=torch.int64)
    counts[15:20] = 9
    held = cached(store, 5 / 30, {"node": counts})
    looked_up = {ops.IdMap: 0, ops.IdRanks: 0, ops.SlotMap: 0}

    def counted(kind: Any, find: Any) -> Any:
        def found(self: Any, ids: torch.Tensor, places: torch.Tensor) -> Any:
            looked_up[kind] += places.numel()
            return find(self, ids, places)

        return found

    for kind in looked_up:
        monkeypatch.setattr(kind, "find", counted(kind, kind.find))
    batches = list(_loader(held, num_workers=num_workers))
    nodes = torch.cat([batch.n_id for batch in batches])
    edges = torch.cat([batch.e_id for batch in batches])
    remote, of_cache = int((nodes >= 10).sum()), int(((nodes >= 15) & (nodes < 20)).sum())
    remote_edges = int((edges >= 20).sum())  # two of each node
    assert looked_up == {ops.IdMap: 0, ops.IdRanks: remote, ops.SlotMap: remote - of_cache + remote_edges}
    found = report(held)
    assert found is not None
    assert (found.hits, found.misses) == (of_cache, remote - of_cache)


def test_the_store_says_how_far_to_look_and_the_loader_may_say_otherwise() -> None:
    store = _ring()
    store = replace(store, deployment=Connected(peers=Any, by_servers=False, look_ahead=4))  # type: ignore[arg-type]
    assert _ahead(_loader(store, look_ahead=None)).num_steps == 4
    assert _ahead(_loader(store, look_ahead=2)).num_steps == 2
    assert not isinstance(_loader(store, look_ahead=1)._producer, LookAhead)
    all_here = hoploom.from_pyg(ring(40))
    assert not isinstance(_loader(all_here, look_ahead=4)._producer, LookAhead)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="look_ahead is"):
            _loader(store, look_ahead=wrong)


def _collected(loader: Any, found: list[Any]) -> list[Any]:
    for batch in loader:
        found.append(batch)
    return []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_that_cannot_be_drawn_fails_alone(num_workers: int) -> None:
    store = _ring()
    loader = _loader(store, num_workers=num_workers)
    draw = loader._producer._maker.sample

    def drawn(share: StepShare) -> Any:
        if 20 in share.indices:
            raise ValueError("no")
        return draw(share)

    object.__setattr__(loader._producer._maker, "sample", drawn)
    found: list[Any] = []
    with pytest.raises(BatchError, match="step 4 of epoch 0 on rank 0 failed: ValueError: no"):
        _collected(loader, found)
    assert_same_batches(list(_loader(hoploom.from_pyg(ring(40))))[:4], found)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_peer_that_is_lost_is_the_error_of_the_group_that_needs_it(num_workers: int) -> None:
    store = _ring()
    (last,) = (shard for shard in elsewhere_of(store) if shard.number == 3)
    last.error = PeerError("part 3 is lost")
    found: list[Any] = []
    with pytest.raises(PeerError, match="part 3 is lost"):
        _collected(_loader(store, num_workers=num_workers), found)
    assert len(found) == 3  # the second group reaches node 30


def test_rows_of_at_most_two_groups_are_held() -> None:
    loader = _loader(_ring(), num_workers=1, prefetch_factor=1, look_ahead=2, batch_size=2)
    ahead, tables = _ahead(loader), []
    fetch = ahead.fetch

    def watched(*asked: Any) -> Any:
        fetched = fetch(*asked)
        windows = asked[1]
        tables.append(len(windows["node"].tables["x"]) if "node" in windows else 0)
        return fetched

    object.__setattr__(ahead, "fetch", watched)
    list(loader)
    groups = [{v for v in range(4 * group, 4 * group + 7) if v >= 10} for group in range(10)]  # steps reach 6 nodes
    most = max(len(one | other) for one, other in pairwise(groups))
    assert len(tables) == 10
    assert max(tables) <= most + 1  # one in sixteen to spare


def test_times_of_nodes_are_fetched_once_for_temporal_negatives() -> None:
    data = ring(40)
    data.time = torch.arange(40)
    store = spread(hoploom.from_pyg(data, time_attr="time"), 4, here=[0], whole_topology=True)
    links = {"edge_label_index": data.edge_index[:, 20:60], "edge_label_time": torch.full((40,), 39)}
    loader = hoploom.LinkNeighborLoader(
        store, [2], **links, time_attr="time", neg_sampling="binary", batch_size=5, num_workers=2, fields=[]
    )
    for _ in range(2):
        assert len(list(loader)) == 8
    for shard in elsewhere_of(store):
        assert shard.rows_of("node", "time") == [*range(10 * shard.number, 10 * shard.number + 10)]
