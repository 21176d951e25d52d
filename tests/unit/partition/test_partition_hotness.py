"""The most used nodes of a store that is cut in buckets: the visits expected of them, and the numbers they get."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pyspark")

import hoploom
from hoploom.load.presample import Presampling, count_visits
from hoploom.partition.spark.exchange import Array, InProcess
from hoploom.partition.spark.hotness import ONE, ExpectedVisits, expect_visits
from hoploom.partition.spark.level import log_class
from hoploom.partition.spark.numbers import PER_DOUBLING, NewNumbers, number_nodes
from hoploom.partition.spark.read import Buckets, StoreOnPlace
from hoploom.partition.spark.state import State
from hoploom.partition.spark.stream import SeedSplit
from hoploom.sample.hops import resolve_fanouts
from hoploom.store import Store, open_store
from hoploom.store.format import read_manifest
from hoploom.store.storage_path import StoragePath


@pytest.fixture(autouse=True)
def quick_disk(no_sync: None) -> None:
    """Nothing here outlives the test."""


def visits_of(folder: Path, work: Path, fanouts: object, size: int = 1000) -> ExpectedVisits:
    work.mkdir(exist_ok=True)
    manifest = read_manifest(folder)
    store = StoreOnPlace(StoragePath(str(folder)), manifest.schema, manifest.parts)
    hops = resolve_fanouts(manifest.schema, fanouts)  # type: ignore[arg-type]
    state = State(StoragePath(str(work)), f"of-{size}")
    visits = ExpectedVisits(store, Buckets(store.bounds[-1], size), state, SeedSplit(0, "train"), hops)
    expect_visits(InProcess(), visits)
    return visits


def all_of(visits: ExpectedVisits) -> Array:
    return np.concatenate([visits.visits(bucket) for bucket in range(visits.buckets.count)])


def by_definition(store: Store, hops: tuple[tuple[int, ...], ...], num_batches: int) -> Array:
    """Edge by edge, with numpy's own exponential."""
    schema = store.schema
    firsts = np.cumsum([0, *(t.num_nodes for t in schema.node_types)])
    visits = np.zeros(firsts[-1])
    visits[np.concatenate([part.split(schema.node_types[0].name, "train").numpy() for part in store.parts])] = 1
    before = np.zeros_like(visits)
    for fanouts in hops:
        new = num_batches * (np.exp(-before / num_batches) - np.exp(-visits / num_batches))
        before = visits.copy()
        for part in store.parts:
            for index, (lists, fanout) in enumerate(zip(part.lists, fanouts, strict=True)):
                degrees = np.diff(lists.indptr.numpy())
                share = np.ones(degrees.size) if fanout < 0 else np.minimum(1, fanout / np.maximum(1, degrees))
                ends = np.repeat(np.arange(degrees.size), degrees)
                given = new[firsts[schema.destinations[index]] + lists.first_node + ends] * share[ends]
                np.add.at(visits, firsts[schema.sources[index]] + lists.indices.numpy(), given)
    return visits


@pytest.fixture(scope="module")
def several_types(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed") / "graph"
    hoploom.generate(folder, num_nodes=900, num_features=1, heterogeneous=True, num_parts=2)
    return folder


@pytest.mark.parametrize("fanouts", [[3, 2], [-1, 4, 1], [2]])
def test_visits_are_those_of_the_definition(several_types: Path, tmp_path: Path, fanouts: list[int]) -> None:
    visits = visits_of(several_types, tmp_path, fanouts)
    wanted = by_definition(open_store(several_types), visits.fanouts, visits.num_batches)  # type: ignore[arg-type]
    assert np.allclose(all_of(visits) / ONE, wanted, rtol=1e-3, atol=1e-3)
    assert wanted.max() > 1.5


def test_a_relation_that_is_not_sampled_leads_to_no_visits(several_types: Path, tmp_path: Path) -> None:
    store = open_store(several_types)
    fanouts = {relation.key: [0] for relation in store.schema.relations}
    assert all_of(visits_of(several_types, tmp_path, fanouts)).sum() == ONE * store.schema.node_types[0].splits["train"]


def test_buckets_do_not_change_the_visits(several_types: Path, tmp_path: Path) -> None:
    one, many = (all_of(visits_of(several_types, tmp_path, [5, 5], size)) for size in (10_000, 170))
    assert (one == many).all()


def test_a_cache_of_the_first_nodes_is_as_good_as_one_by_sampling(tmp_path: Path) -> None:
    """Of what later batches ask for, the tenth of the nodes that comes first has as much either way."""
    rng, num_nodes = np.random.default_rng(1), 20_000
    popular = rng.permutation(1 / np.arange(1, num_nodes + 1) ** 1.1)
    ends = [rng.choice(num_nodes, 10 * num_nodes, p=popular**share / (popular**share).sum()) for share in (1, 0.5)]
    edges, seeds = torch.from_numpy(np.stack(ends)), torch.from_numpy(rng.choice(num_nodes, 4000, replace=False))
    graph = hoploom.from_tensors({}, edges, num_nodes=num_nodes, splits={"train": seeds.sort().values})
    graph.save(tmp_path / "graph")
    store, fanouts = open_store(tmp_path / "graph"), [5, 3]
    asked = count_visits(store, fanouts, "train", Presampling(seed=9, batches=range(100)))["node"].numpy()
    sampled = count_visits(store, fanouts, "train", Presampling(batches=range(100)))["node"].numpy()
    expected = all_of(visits_of(tmp_path / "graph", tmp_path / "work", fanouts, 6000))
    found = {
        name: asked[np.argsort(-log_class(order, PER_DOUBLING), kind="stable")[: num_nodes // 10]].sum() / asked.sum()
        for name, order in (("sampled", sampled), ("expected", expected), ("as they are", np.zeros(num_nodes, int)))
    }
    assert found["expected"] > 0.99 * found["sampled"] > 3 * found["as they are"]


@pytest.mark.parametrize("size", [10_000, 170])
@pytest.mark.parametrize("is_hot", [False, True])
def test_numbers_go_by_part_then_visits_then_the_number_before(
    several_types: Path, tmp_path: Path, size: int, is_hot: bool
) -> None:
    visits = visits_of(several_types, tmp_path, [4, 4], size)
    store, buckets, state = visits.store, visits.buckets, visits.state
    parts = np.random.default_rng(3).integers(0, 3, buckets.num_ids).astype(np.int16)
    for bucket in range(buckets.count):
        state.save("parts", bucket, part=parts[slice(*buckets.span(bucket))])
    numbers = NewNumbers(store, buckets, state, 3, visits if is_hot else None)
    bounds, changed = number_nodes(InProcess(), numbers)
    new = np.concatenate([numbers.new(bucket) for bucket in range(buckets.count)])
    classes = log_class(all_of(visits), PER_DOUBLING) if is_hot else np.zeros(buckets.num_ids, int)
    assert not is_hot or np.unique(classes).size > 20
    for index, (begin, end) in enumerate(zip(store.bounds[:-1], store.bounds[1:], strict=True)):
        order = np.lexsort((np.arange(end - begin), -classes[begin:end], parts[begin:end]))
        assert (new[begin:end][order] == np.arange(end - begin)).all()
        assert bounds[index] == [0, *np.cumsum(np.bincount(parts[begin:end], minlength=3)).tolist()]
    assert changed == set(range(len(bounds)))
