"""Hard candidates against loops in plain Python."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from support.graphs import in_parts, library, random_graph
from support.shards import spread

import hoploom
from hoploom import ConfigError, LinkNeighborLoader
from hoploom.ranking import hard_candidates, near
from hoploom.store import Store

TO, WRITES = ("node", "to", "node"), ("author", "writes", "paper")
GRAPHS: dict[str, tuple[Any, Any]] = {"one type": (random_graph(40, 90, 2), TO), "two types": (library(), WRITES)}


def by_loop(data: Any, key: Any, source: int, k: int, by: str) -> list[int]:
    edges = [(int(s), int(d)) for s, d in (data if key == TO else data[key]).edge_index.t()]
    one_type = key[0] == key[2]
    neighbours: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    for start, end in edges:
        if not (one_type and start == end):
            neighbours[key[0], start].add((key[2], end))
            neighbours[key[2], end].add((key[0], start))
    reached = {(key[0], source): 1.0}
    for _ in range(20 if by == "ppr" else 2 if one_type else 3):
        following: dict[tuple[str, int], float] = defaultdict(float)
        for node in sorted(reached):
            for other in neighbours[node]:
                following[other] += reached[node] * (0.85 / len(neighbours[node]) if by == "ppr" else 1)
        if by == "ppr":
            following[key[0], source] += 0.15
        reached = following
    near = [
        (-round(score, 12), node)
        for (kind, node), score in reached.items()
        if kind == key[2] and (source, node) not in edges and not (one_type and node == source)
    ]
    return ([node for _, node in sorted(near)] + [-1] * k)[:k]


@pytest.mark.parametrize(("data", "key"), GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("by", ["common", "ppr"])
def test_the_nearest_without_an_edge_are_found_as_by_a_loop(
    data: Any, key: Any, by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = hoploom.from_pyg(data)
    sources = torch.tensor([5, 0, 3, 3, 6, 1])  # author 6 wrote nothing
    found = hard_candidates(store, key, sources, 6, by=by)
    assert found.tolist() == [by_loop(data, key, source, 6, by) for source in sources.tolist()]
    monkeypatch.setattr(near, "SCORES", 1)
    for other in (store, in_parts(store, 3), spread(store, 3, here=[1])):
        assert torch.equal(hard_candidates(other, key, sources, 6, by=by), found)


def test_hard_candidates_are_what_a_loader_takes() -> None:
    store, links = hoploom.from_pyg(random_graph(40, 90, 2)), torch.tensor([[5, 1, 2], [0, 1, 2]])
    listed = hard_candidates(store, TO, links[0], 3)
    (batch,) = LinkNeighborLoader(store, [2], links, candidates=listed, batch_size=3)
    index = batch.dst_neg_index
    assert torch.equal(torch.where(index < 0, -1, batch.n_id[index]), listed)


def _fails(store: Store, **options: Any) -> None:
    given: dict[str, Any] = {"relation": WRITES, "sources": torch.tensor([1]), "k": 2, **options}
    hard_candidates(store, given.pop("relation"), given.pop("sources"), given.pop("k"), **given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"relation": ("author", "eats", "wood")}, "eats"),
        ({"sources": torch.tensor([7])}, "out of range"),
        ({"sources": torch.tensor([0.5])}, "float32"),
        ({"k": 0}, "k is 0"),
        ({"k": 11}, "10 nodes of 'paper'"),
        ({"by": "katz"}, "'common' or 'ppr'"),
    ],
)
def test_what_cannot_be_found_is_one_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _fails(hoploom.from_pyg(library()), **options)


def test_edges_that_do_not_fit_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoploom.system.available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match=r"27 edges of .* take"):
        _fails(hoploom.from_pyg(library()))
