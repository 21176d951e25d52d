"""Expected visits: those of the definition, and as good for a cache as sampled ones."""

from pathlib import Path

import numpy as np
import pytest
import torch

import hoploom
from hoploom.load.presample import BATCH_SIZE, Presampling, count_visits
from hoploom.partition.hotness import ONE, expected_visits, visit_classes
from hoploom.partition.store_files import StoreFiles
from hoploom.sample.hops import resolve_fanouts
from hoploom.store import Store, open_store
from hoploom.store.storage_path import StoragePath

pytestmark = pytest.mark.usefixtures("no_sync")


def visits_of(folder: Path, fanouts: object, memory: int = 1 << 40) -> torch.Tensor:
    files = StoreFiles.at(StoragePath(str(folder)))
    hops = resolve_fanouts(files.schema, fanouts)  # type: ignore[arg-type]
    node_type = files.schema.node_types[0].name
    return expected_visits(files, node_type, "train", hops, memory)


def by_definition(store: Store, hops: tuple[tuple[int, ...], ...], num_batches: int) -> np.ndarray:
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
def test_visits_are_those_of_the_definition(several_types: Path, fanouts: list[int]) -> None:
    store = open_store(several_types)
    num_batches = -(-store.schema.node_types[0].splits["train"] // BATCH_SIZE)
    wanted = by_definition(store, resolve_fanouts(store.schema, fanouts), num_batches)  # type: ignore[arg-type]
    assert np.allclose(visits_of(several_types, fanouts).numpy() / ONE, wanted, rtol=1e-3, atol=1e-3)
    assert wanted.max() > 1.5
    assert torch.equal(visits_of(several_types, fanouts), visits_of(several_types, fanouts, memory=1))


def test_a_relation_that_is_not_sampled_leads_to_no_visits(several_types: Path) -> None:
    store = open_store(several_types)
    fanouts = {relation.key: [0] for relation in store.schema.relations}
    assert visits_of(several_types, fanouts).sum() == ONE * store.schema.node_types[0].splits["train"]


def test_a_cache_of_the_first_nodes_is_as_good_as_one_by_sampling(tmp_path: Path) -> None:
    """Of what later batches ask for, the tenth of the nodes that comes first has as much either way."""
    rng, num_nodes = np.random.default_rng(1), 20_000
    popular = rng.permutation(1 / np.arange(1, num_nodes + 1) ** 1.1)
    ends = [rng.choice(num_nodes, 10 * num_nodes, p=popular**share / (popular**share).sum()) for share in (1, 0.5)]
    edges, seeds = torch.from_numpy(np.stack(ends)), torch.from_numpy(rng.choice(num_nodes, 4000, replace=False))
    graph = hoploom.from_tensors({}, edges, num_nodes=num_nodes, splits={"train": seeds.sort().values})
    graph.save(tmp_path / "graph")
    store, fanouts = open_store(tmp_path / "graph"), [5, 3]
    asked = count_visits(store, fanouts, "train", Presampling(seed=9, batches=range(100)))["node"]
    sampled = count_visits(store, fanouts, "train", Presampling(batches=range(100)))["node"]
    expected = visits_of(tmp_path / "graph", fanouts)
    found = {
        name: asked[visit_classes(visits).argsort(descending=True, stable=True)[: num_nodes // 10]].sum() / asked.sum()
        for name, visits in (("sampled", sampled), ("expected", expected), ("as they are", torch.zeros(num_nodes)))
    }
    assert found["expected"] > 0.99 * found["sampled"] > 3 * found["as they are"]
