"""Invariant 1: a batch is the same wherever it is made."""

from pathlib import Path
from typing import Any

import pytest
from support.batches import assert_same_batches, with_reference
from support.cases import MakeLoader, every_case, store_of
from support.graphs import cut, random_graph, save_in_parts

import hoploom
from hoploom import ops
from hoploom.store import assemble


@every_case
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_threads_change_nothing(heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any], num_workers: int) -> None:
    store = store_of(heterogeneous, attrs)
    assert_same_batches(make(store), make(store, num_workers=num_workers))


@every_case
@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_disk_and_parts_change_nothing(
    heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any], num_parts: int, tmp_path: Path
) -> None:
    store = store_of(heterogeneous, attrs)
    saved = save_in_parts(store, tmp_path / "store", num_parts)
    assert_same_batches(_in_store_order(make(store)), _in_store_order(make(saved)))


@every_case
def test_parts_in_memory_change_nothing(heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any]) -> None:
    store = store_of(heterogeneous, attrs)
    assert_same_batches(make(store), make(assemble(store.schema, cut(store, 4))))


@every_case
def test_the_core_equals_the_reference(heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any]) -> None:
    store = store_of(heterogeneous, attrs)
    assert_same_batches(make(store), make(with_reference(store)))


@every_case
def test_a_restored_loader_continues_with_the_same_batches(
    heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any]
) -> None:
    store = store_of(heterogeneous, attrs)
    whole = list(make(store))
    for step in range(1, len(whole)):
        loader = make(store)
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        fresh = make(store, num_workers=2)
        fresh.load_state_dict(loader.state_dict())
        assert_same_batches(whole[step:], fresh)


@every_case
def test_a_hashed_node_map_changes_nothing(
    heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(heterogeneous, attrs)
    direct = list(make(store))
    monkeypatch.setattr(ops.NodeMap.__init__, "__defaults__", (0,))
    assert_same_batches(direct, make(store))


def test_the_users_own_data_gives_the_batches_of_its_store() -> None:
    data = random_graph(60, 500, seed=1)
    own = hoploom.NeighborLoader(data, [3, 2], batch_size=7, shuffle=True)
    stored = hoploom.NeighborLoader(hoploom.from_pyg(data), [3, 2], batch_size=7, shuffle=True)
    assert_same_batches(_in_store_order(own), _in_store_order(stored))


def _in_store_order(batches: Any) -> list[Any]:
    """Fields sorted by name: the order of a user's own fields is his."""
    found = []
    for batch in batches:
        for storage in batch.stores:
            storage._mapping = dict(sorted(storage._mapping.items()))
        found.append(batch)
    return found
