"""Invariant 1: a batch is the same wherever it is made.

The table of support/cases.py x support/placements.py.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import pytest
import torch
from support.batches import assert_same_batches, on_host
from support.cases import CASES, Case
from support.graphs import random_graph
from support.made_by import Made
from support.placements import ENDS, PLACEMENTS, Placement, Site

import hoploom
from hoploom import ConfigError, HoploomError
from hoploom.load.loader import Loader

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Site:
    return Site(tmp_path_factory.mktemp("same"), device, partial(request.getfixturevalue, "server_process"))


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    with ExitStack() as shared.closing:
        yield shared


TABLE = [
    pytest.param(
        placement, CASES[name], id=f"{where}: {name}", marks=() if name in placement.quick else pytest.mark.slow
    )
    for where, placement in PLACEMENTS.items()
    for name in placement.only
]


@pytest.mark.parametrize(("placement", "case"), TABLE)
def test_a_batch_is_the_same_wherever_it_is_made(placement: Placement, case: Case, site: Site) -> None:
    store, options = placement.place(case, site)
    loaders: list[Loader] = []

    def make() -> Loader:
        loaders.append(case.make(store, **options))
        return loaders[-1]

    if case.name in placement.missing:
        with pytest.raises(HoploomError, match=placement.missing[case.name]):
            list(placement.batches(make))
        return
    found = [_comparable(batch) for batch in placement.batches(make)]
    expected = _expected(case)
    assert_same_batches([*expected[:1], *expected[1:][-1:]] if placement.batches in ENDS else expected, found)
    placement.made_by(Made(case, store, loaders))


@cache
def _expected(case: Case) -> list[Any]:
    """What one thread of this process makes of a graph in memory."""
    return [_comparable(batch) for batch in case.make(case.store)]


def _comparable(batch: Any) -> Any:
    """On the CPU, fields sorted by name: their order is the user's own."""
    batch = on_host(batch)
    for storage in batch.stores:
        storage._mapping = dict(sorted(storage._mapping.items()))
    return batch


def test_the_users_own_data_gives_the_batches_of_its_store() -> None:
    data = random_graph(60, 500, seed=1)
    loaders = [
        hoploom.NeighborLoader(given, [3, 2], batch_size=7, shuffle=True) for given in (data, hoploom.from_pyg(data))
    ]
    assert_same_batches(*(map(_comparable, loader) for loader in loaders))


ROWS = [("node", "x", torch.tensor([41, 0, 59, 41])), ("node", "node_time", torch.arange(0, 60, 7))]


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_rows_are_gathered_by_plain_triples_wherever_they_are(placement: Placement, site: Site) -> None:
    case = CASES["uniform"]
    store, _ = placement.place(case, site)
    rows = store.features.gather([*ROWS, (("node", "to", "node"), "weight", torch.tensor([3, 499]))])
    tables = case.store.parts[0].tables
    for (owner, name, ids), found in zip(ROWS, rows, strict=False):
        assert torch.equal(found.cpu(), tables[owner, name].rows[ids])
    with pytest.raises(ConfigError, match=r"'node' has no field 'z'; it has \['node_time', 'train_mask', 'x'\]"):
        store.features.gather([("node", "z", torch.tensor([0]))])
    with pytest.raises(ConfigError, match="unknown node type 'nobody'"):
        store.features.gather([("nobody", "x", torch.tensor([0]))])
