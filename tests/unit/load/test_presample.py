"""Pre-sampling counts the nodes of the very batches that a loader of the same seed makes."""

import pytest
import torch
from support.graphs import ring

import hoploom
from hoploom import ConfigError, NeighborLoader, Store
from hoploom.load.presample import Presampling, count_visits, visited

pytestmark = pytest.mark.usefixtures("one_thread")


def test_visited_nodes_are_those_of_the_loaders_batches() -> None:
    store = hoploom.from_pyg(ring(60))
    loader = NeighborLoader(store, [1, 1], input_nodes="train", batch_size=7, shuffle=True, seed=3)
    loaded = [batch.n_id for epoch in range(2) for batch in loader]
    plan = Presampling(batch_size=7, seed=3, batches=range(2 * len(loader)))
    found = list(visited(store, [1, 1], "train", plan))
    assert len(found) == len(loaded) == 10
    assert all(torch.equal(nodes, n_id) for (nodes,), n_id in zip(found, loaded, strict=True))


def test_visited_nodes_of_several_types_are_those_of_the_loaders_batches(library_store: Store) -> None:
    seeds = ("paper", torch.arange(9))
    (nodes,) = visited(library_store, [2, 2], seeds, Presampling(batch_size=9, seed=5))
    (batch,) = NeighborLoader(library_store, [2, 2], input_nodes=seeds, batch_size=9, shuffle=True, seed=5)
    for node_type, ids in zip(library_store.schema.node_types, nodes, strict=True):
        assert torch.equal(ids, batch[node_type.name].n_id)


def test_a_node_is_counted_once_for_every_batch_it_is_in() -> None:
    store = hoploom.from_pyg(ring(20))
    one_by_one = count_visits(store, [-1, -1], torch.arange(20), Presampling(batch_size=1))
    assert one_by_one["node"].tolist() == [5] * 20  # of v - 4 to v
    at_once = count_visits(store, [-1], torch.arange(10), Presampling(batch_size=10))
    assert at_once["node"].tolist() == [1] * 12 + [0] * 8


def test_a_seed_given_twice_counts_as_one() -> None:
    store, given = hoploom.from_pyg(ring(20)), torch.tensor([7, 3, 7, 3, 3])
    counts = count_visits(store, [-1], given, Presampling(batch_size=1))
    assert counts["node"].nonzero().view(-1).tolist() == [3, 4, 5, 7, 8, 9]
    assert int(counts["node"].sum()) == 6


def test_weights_decide_what_is_visited(library_store: Store) -> None:
    fanouts = {relation.key: [0] for relation in library_store.schema.relations}
    fanouts["author", "writes", "paper"] = [1]  # to paper 0 by authors 0, 2 and 4; the edge of author 0 weighs nothing
    batches, seeds = range(100), ("paper", torch.tensor([0]))
    plan = Presampling(batch_size=1, batches=batches, options={"weight_attr": "weight"})
    assert count_visits(library_store, fanouts, seeds, plan)["author"][0] == 0
    assert count_visits(library_store, fanouts, seeds, Presampling(batch_size=1, batches=batches))["author"][0] > 0
    with pytest.raises(ConfigError, match="weight_attr is 'w'"):
        count_visits(library_store, fanouts, "train", Presampling(options={"weight_attr": "w"}))


def test_seeds_that_cannot_be_sampled_are_refused(ring_store: Store) -> None:
    with pytest.raises(ConfigError, match="there are no seeds in"):
        count_visits(ring_store, [1], torch.empty(0, dtype=torch.int64))
    with pytest.raises(ConfigError, match="unknown split 'training'"):
        count_visits(ring_store, [1], "training")
    with pytest.raises(ConfigError, match="batch_size is 0"):
        count_visits(ring_store, [1], "train", Presampling(batch_size=0))
