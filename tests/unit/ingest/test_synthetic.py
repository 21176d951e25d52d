"""Synthetic graphs: the same bits from any chunk and any parts, and the structure that they promise."""

import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from support import reference
from support.stores import contents
from torch import Tensor

import hoploom
from hoploom import ConfigError, Store, keys
from hoploom.ingest import synthetic
from hoploom.ingest import synthetic as draws
from hoploom.ingest.synthetic import generate
from hoploom.store.check import problems

pytestmark = pytest.mark.usefixtures("no_sync")

NUM_NODES, NUM_CLASSES = 10_000, 8
HOMOPHILY = 0.8


def column(store: Store, node_type: str, name: str) -> Tensor:
    return torch.cat([part.tables[node_type, name].rows for part in store.parts])


def lists_of(store: Store, relation: int = 0) -> tuple[Tensor, Tensor]:
    lists = [part.lists[relation] for part in store.parts]
    return torch.cat([each.indptr.diff() for each in lists]), torch.cat([each.indices for each in lists]).long()


def ends_of(store: Store, relation: int = 0) -> tuple[Tensor, Tensor]:
    degrees, sources = lists_of(store, relation)
    return sources, torch.arange(len(degrees)).repeat_interleave(degrees)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("synthetic") / "graph"
    return generate(path, num_nodes=NUM_NODES, num_features=32, num_classes=NUM_CLASSES, homophily=HOMOPHILY)


@pytest.mark.parametrize("heterogeneous", [False, True])
def test_the_bytes_do_not_depend_on_the_chunk(tmp_path: Path, heterogeneous: bool) -> None:
    given: dict[str, Any] = {"num_nodes": 500, "num_features": 6, "weights": True, "times": True}
    for name, chunk in (("small", 100), ("large", 1 << 18)):
        generate(tmp_path / name, heterogeneous=heterogeneous, chunk=chunk, **given)
    small, large = contents(tmp_path / "small"), contents(tmp_path / "large")
    assert len(small) > 10
    assert small == large


@pytest.mark.parametrize("heterogeneous", [False, True])
def test_parts_hold_the_same_graph_as_one_whole(tmp_path: Path, heterogeneous: bool) -> None:
    given: dict[str, Any] = {"num_nodes": 500, "heterogeneous": heterogeneous, "weights": True, "times": True}
    one, three = (generate(tmp_path / str(num_parts), num_parts=num_parts, **given) for num_parts in (1, 3))
    assert one.schema == three.schema
    assert len(three.parts) == 3
    for owner, name in one.parts[0].tables:
        rows = torch.cat([part.tables[owner, name].rows for part in three.parts])
        assert torch.equal(rows, one.parts[0].tables[owner, name].rows)
    for relation in range(len(one.schema.relations)):
        for ours, theirs in zip(lists_of(one, relation), lists_of(three, relation), strict=True):
            assert torch.equal(ours, theirs)
    for split in ("train", "val", "test"):
        assert torch.equal(one.split(split), three.split(split))


def test_nodes_and_edges_are_those_of_plain_arithmetic(store: Store) -> None:
    """One word at a time, in Python's integers and floats."""
    key = keys.mix(keys.mix(0, synthetic.GRAPH), 0)

    def word(purpose: int, counter: int, which: int) -> int:
        return reference.Draws(key, counter, purpose << 16).word(which)

    degrees, sources = lists_of(store)
    labels, x = column(store, "node", "y"), column(store, "node", "x")
    for node in (0, 1, 77, NUM_NODES - 1):
        least = 20 / (1 + math.sqrt(1 - 20 / (NUM_NODES // 4)))
        assert int(degrees[node]) == math.floor(least / math.sqrt((word(draws.DEGREE, node, 0) + 1) / 2**32) + 0.5)
        is_noise = word(draws.NODE, node, 0) / 2**32 < draws.LABEL_NOISE
        community = node % NUM_CLASSES
        assert int(labels[node]) == (word(draws.NODE, node, 1) * NUM_CLASSES >> 32 if is_noise else community)
        for feature in (0, 5, 31):  # 8 blocks of 4 words for 32 features
            drawn = word(draws.FEATURE, node * 8 + feature // 4, feature % 4)
            noise = ((drawn >> 16) + (drawn & 0xFFFF) - 65535) * math.sqrt(6) / 65536
            side = 1 if word(draws.CENTRE, community * 32 + feature, 0) & 1 else -1
            assert float(x[node, feature]) == pytest.approx(noise + side / math.sqrt(32), abs=1e-6)
    _, destinations = ends_of(store)
    size = NUM_NODES // NUM_CLASSES
    for edge in (0, 1, 2, 3, 4, 5, 1000, len(sources) - 1):
        chance = word(draws.EDGE, edge, 1) / 2**32
        community = int(destinations[edge]) % NUM_CLASSES
        if chance >= HOMOPHILY:
            community = int((chance - HOMOPHILY) / (1 - HOMOPHILY) * NUM_CLASSES)
        rank = (word(draws.EDGE, edge, 0) ** 2 >> 32) * size >> 32
        member = (rank * draws.SCATTER + keys.mix(key, community) % size) % size
        assert int(sources[edge]) == member * NUM_CLASSES + community


@pytest.mark.parametrize("avg_degree", [1, 2, 5, 30.5])
def test_the_mean_degree_is_the_one_asked_for(tmp_path: Path, avg_degree: float) -> None:
    degrees, _ = lists_of(generate(tmp_path / "graph", num_nodes=20_000, num_features=1, avg_degree=avg_degree))
    assert float(degrees.double().mean()) == pytest.approx(avg_degree, rel=0.05)
    assert int(degrees.min()) >= 1


def test_in_degrees_follow_a_power_law(store: Store) -> None:
    """The least degree is half the mean m, and the share of nodes above d is (m / 2d)^2, to five deviations."""
    degrees, _ = lists_of(store)
    for threshold in (20, 40, 80, 160):
        expected = NUM_NODES * (10 / (threshold - 0.5)) ** 2
        assert abs(int((degrees >= threshold).sum()) - expected) < 5 * math.sqrt(expected)


def test_edges_stay_in_their_community_as_often_as_asked(store: Store) -> None:
    sources, destinations = ends_of(store)
    inside = (sources % NUM_CLASSES == destinations % NUM_CLASSES).double().mean()
    assert float(inside) == pytest.approx(HOMOPHILY + (1 - HOMOPHILY) / NUM_CLASSES, abs=0.005)


def test_splits_share_out_all_nodes(store: Store) -> None:
    splits = [store.split(name) for name in ("train", "val", "test")]
    assert torch.equal(torch.cat(splits).sort().values, torch.arange(NUM_NODES))
    for ids, share in zip(splits, (0.6, 0.2, 0.2), strict=True):
        assert ids.numel() == pytest.approx(share * NUM_NODES, rel=0.05)
        assert torch.equal(ids, ids.sort().values)


def test_neighbourhoods_tell_the_label_and_own_features_do_not(store: Store) -> None:
    """Against the nearest class mean, which no classifier can beat by much where the noise is the same all around."""
    degrees, sources = lists_of(store)
    x, y = column(store, "node", "x"), column(store, "node", "y")
    train, test = store.split("train"), store.split("test")

    def neighbour_mean(rows: Tensor) -> Tensor:
        return torch.segment_reduce(rows[sources], "mean", lengths=degrees)

    def accuracy(rows: Tensor) -> float:
        means = torch.stack([rows[train][y[train] == label].mean(dim=0) for label in range(NUM_CLASSES)])
        return float((torch.cdist(rows[test], means).argmin(dim=1) == y[test]).double().mean())

    assert accuracy(x) < 0.5
    assert accuracy(neighbour_mean(neighbour_mean(x))) > 0.85


def test_weights_and_times_reach_the_sampler_and_the_user(tmp_path: Path) -> None:
    store = generate(tmp_path / "graph", num_nodes=500, weights=True, times=True)
    part, relation = store.parts[0], store.schema.relations[0].key
    lists = part.lists[0]
    weight, time = part.tables[relation, "weight"].rows, part.tables[relation, "time"].rows
    assert torch.equal(weight, lists.weight)
    assert torch.equal(time, lists.edge_time)
    assert 0 < float(weight.min()) < 0.01 < 0.99 < float(weight.max()) <= 1
    assert 0 <= int(time.min()) < 10_000 < 990_000 < int(time.max()) < draws.MAX_TIME
    _, destinations = ends_of(store)
    assert bool((time.diff()[destinations.diff() == 0] >= 0).all())

    at = torch.full((store.split("train").numel(),), 500_000)
    loader = hoploom.NeighborLoader(store, [3, 3], "train", input_time=at, time_attr="time", batch_size=64)
    assert int(next(iter(loader)).time.max()) <= 500_000
    assert next(iter(hoploom.NeighborLoader(store, [3], input_nodes="val", weight_attr="weight"))).num_edges > 0


def test_a_heterogeneous_graph_opens_and_samples(tmp_path: Path) -> None:
    store = generate(tmp_path / "graph", num_nodes=2000, heterogeneous=True, num_classes=4, num_features=5)
    assert [t.name for t in store.schema.node_types] == ["paper", "author", "institution"]
    batch = next(iter(hoploom.NeighborLoader(store, [4, 4], input_nodes="train", batch_size=32)))
    assert batch["paper"].y.shape == batch["paper"].n_id.shape
    for node_type in store.schema.node_types:
        assert batch[node_type.name].x.shape == (batch[node_type.name].n_id.numel(), 5)
        assert batch[node_type.name].n_id.numel() > 0
    for index, relation in enumerate(store.schema.relations):
        sources, destinations = ends_of(store, index)
        assert float((sources % 4 == destinations % 4).double().mean()) > 0.7, relation.key


def test_memory_does_not_grow_with_the_graph(tmp_path: Path) -> None:
    def peak(num_nodes: int) -> int:
        tracemalloc.start()
        generate(tmp_path / str(num_nodes), num_nodes=num_nodes, num_features=2, avg_degree=5, chunk=1 << 15)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(200_000) < 1.5 * peak(20_000)


def test_progress_ends_at_all_nodes_and_their_edges(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    generate(tmp_path / "graph", num_nodes=500, progress=lambda *both: seen.append(both))
    assert seen == sorted(seen)
    assert seen[-1] == (1000, 1000)


def test_a_graph_may_be_as_small_as_one_node(tmp_path: Path) -> None:
    store = generate(tmp_path / "one", num_nodes=1, num_classes=1, avg_degree=1)
    assert torch.equal(lists_of(store)[1], torch.zeros(1, dtype=torch.int64))
    generate(tmp_path / "five", num_nodes=5, num_classes=5, num_parts=5, avg_degree=5, heterogeneous=True)
    for name in ("one", "five"):
        assert list(problems(tmp_path / name)) == []


WRONG = {
    "num_nodes": (0, 2**31 + 1),
    "num_classes": (0, 101),
    "num_features": (0,),
    "avg_degree": (0.5, 101, float("nan")),
    "homophily": (1.1,),
    "num_parts": (0, 101),
    "feature_dtype": ("int8",),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_argument_is_named_before_anything_is_written(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is {value!r}"):
        generate(tmp_path / "graph", **{"num_nodes": 100, name: value})
    assert list(tmp_path.iterdir()) == []


def test_another_seed_draws_another_graph(tmp_path: Path) -> None:
    one, other = (generate(tmp_path / str(seed), num_nodes=500, seed=seed) for seed in (0, 1))
    assert not torch.equal(column(one, "node", "x"), column(other, "node", "x"))
    assert not torch.equal(lists_of(one)[0], lists_of(other)[0])
    assert not torch.equal(one.split("train"), other.split("train"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_features_are_rounded_to_their_dtype(tmp_path: Path, dtype: str) -> None:
    exact, rounded = (
        column(generate(tmp_path / kind, num_nodes=100, feature_dtype=kind), "node", "x") for kind in ("float32", dtype)
    )
    assert torch.equal(rounded, exact.to(getattr(torch, dtype)))
