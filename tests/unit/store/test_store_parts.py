"""A part's folder with store.json is enough to serve that part."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.graphs import library, ring, save_in_parts
from support.stores import assert_same, fields_of

import hoploom
from hoploom import ConfigError, NeighborLoader, Store, StoreError
from hoploom.ops import Frontier
from hoploom.store import Draw, Wanted

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")
ALL = Draw(1, 0, [-1])


def copy_of_parts(store: Path, out: Path, *parts: int) -> Path:
    """What a host is sent that serves these parts."""
    out.mkdir()
    shutil.copy(store / "store.json", out)
    for part in parts:
        shutil.copytree(store / f"part-{part:05d}", out / f"part-{part:05d}")
    return out


@pytest.fixture
def whole(tmp_path: Path) -> Store:
    """The ring of 12 nodes in 3 parts of 4, at tmp_path / "ring"."""
    return save_in_parts(hoploom.from_pyg(ring(12)), tmp_path / "ring", 3)


@pytest.fixture
def second(whole: Store, tmp_path: Path) -> Store:
    """The part with the nodes 4 to 7, opened where nothing else of the ring is."""
    return hoploom.open(copy_of_parts(tmp_path / "ring", tmp_path / "copy", 1), parts=[1])


def test_one_part_answers_for_its_nodes_by_their_ids_in_the_whole(whole: Store, second: Store) -> None:
    assert second.schema == whole.schema
    assert second.split("train").tolist() == [4, 5]
    nodes = torch.tensor([7, 4, 5])
    for store in (whole, second):
        (rows,) = store.features.gather([Wanted("node", "x", nodes)])
        assert rows[:, 0].tolist() == [7.0, 4.0, 5.0]
    (asked,), (expected,) = (store.graph.sample([Frontier(nodes)], ALL) for store in (second, whole))
    assert asked is not None
    assert expected is not None
    assert all(map(torch.equal, asked, expected))
    assert asked.sources.tolist() == [8, 9, 5, 6, 6, 7]


def test_loaders_work_where_all_they_touch_is_at_hand(whole: Store, second: Store) -> None:
    seeds = torch.tensor([4, 5])
    loaders = [NeighborLoader(s, [-1], input_nodes=seeds, batch_size=1, num_workers=2) for s in (second, whole)]
    for batch, expected in zip(*loaders, strict=True):
        assert torch.equal(batch.x, expected.x)
        assert torch.equal(batch.edge_index, expected.edge_index)
        assert torch.equal(batch.edge_attr, expected.edge_attr)


def test_what_lies_elsewhere_is_an_error_that_names_the_part(second: Store) -> None:
    message = "reading 'x' of node 9 of 'node' needs part 2, but only part 1 is open; open part 2 too"
    with pytest.raises(StoreError, match=message):
        second.features.gather([Wanted("node", "x", torch.tensor([5, 9]))])
    with pytest.raises(StoreError, match="reading the in-edges of node 3 of 'node' needs part 0"):
        second.graph.sample([Frontier(torch.tensor([3]))], ALL)
    loader = NeighborLoader(second, [-1, -1], input_nodes=torch.tensor([6]), num_workers=1)
    with pytest.raises(StoreError, match="part 2"):
        next(iter(loader))
    edge = torch.tensor([0])
    with pytest.raises(StoreError, match=r"reading 'edge_attr' of edge 0 of .* needs part 0"):
        second.features.gather([Wanted(("node", "to", "node"), "edge_attr", edge)])
    assert second.graph.sample([Frontier(torch.tensor([3]))], Draw(1, 0, [0])) == [None]  # nothing was asked for


def test_several_parts_of_a_heterogeneous_store(tmp_path: Path) -> None:
    whole = save_in_parts(hoploom.from_pyg(library(), weight_attr="weight"), tmp_path / "library", 4)
    some = hoploom.open(copy_of_parts(tmp_path / "library", tmp_path / "copy", 1, 3), parts=[3, 1])
    for part in (some.parts[0], some.parts[1]):
        for owner, name in fields_of(whole.schema):
            table = part.tables[owner, name]
            ids = torch.arange(table.first, table.first + table.rows.shape[0])
            rows, expected = (store.features.gather([Wanted(owner, name, ids)])[0] for store in (some, whole))
            assert torch.equal(rows, expected)
    with pytest.raises(StoreError, match="only parts 1, 3 are open"):
        some.features.gather([Wanted("paper", "x", torch.tensor([0]))])


def test_all_parts_are_the_whole(whole: Store, tmp_path: Path) -> None:
    assert_same(hoploom.open(tmp_path / "ring", parts=[2, 0, 1, 1]), whole)


def test_parts_that_are_not_there_are_refused(whole: Store, second: Store, tmp_path: Path) -> None:
    bad: list[tuple[Any, str]] = [
        *(([3], r"parts are \[3\], the store has 3"), ([], "parts is empty"), ([-1], "part is -1")),
        *(([0, "a"], "part is 'a'; give numbers below 3"), ([[0]], r"part is \[0\]"), ([0, None], "part is None")),
        (0, "parts are 0, not a list; give numbers below 3"),
    ]
    for parts, message in bad:
        with pytest.raises(ConfigError, match=message):
            hoploom.open(tmp_path / "ring", parts=parts)
        with pytest.raises(ConfigError, match=message):
            hoploom.connect("127.0.0.1:9", tmp_path / "ring", parts=parts)
    with pytest.raises(StoreError, match=r"part-00000.* is missing"):
        hoploom.open(tmp_path / "copy")
    with pytest.raises(StoreError, match=r"part-00002.* is missing"):
        hoploom.open(tmp_path / "copy", parts=[1, 2])
