"""The ids of tables and of the store, looked up in both directions, and taken where ids are given."""

from typing import Any

import numpy as np
import pytest
import torch

import hoploom
from hoploom import ConfigError, DataError, Store


@pytest.fixture
def store() -> Store:
    """Users with text ids of several lengths, items with integers, tags without ids of their own."""
    names = [f"ü{user}" * (1 + user % 3) for user in range(50)]
    width = max(len(name.encode()) for name in names)
    text = torch.tensor([list(name.encode().ljust(width, b"\0")) for name in names], dtype=torch.uint8)
    likes = {("user", "likes", "item"): torch.stack([torch.arange(50), torch.arange(50) % 20])}
    nodes = {"user": {"original_id": text}, "item": {"original_id": torch.arange(20) * 7 - 30}, "tag": {}}
    return hoploom.from_tensors(nodes, likes, num_nodes={"tag": 5})


def test_ids_are_looked_up_in_both_directions(store: Store) -> None:
    nodes = torch.tensor([49, 3, 3, 0])
    for node_type, wanted in {"user": ["ü49ü49", "ü3", "ü3", "ü0"], "item": [103, -9, -9, -30]}.items():
        ids, some = store.ids(node_type), nodes if node_type == "user" else nodes % 30
        assert ids.original(some).tolist() == wanted
        assert ids.stored(wanted).tolist() == some.tolist()
        assert ids.stored(np.array(wanted)).tolist() == some.tolist()
        assert ids.stored([]).tolist() == []
        assert ids.stored(ids.original(range(20))).tolist() == list(range(20))
    assert store.ids("tag").stored([4, 0]).tolist() == store.ids("tag").original([4, 0]).tolist() == [4, 0]


@pytest.mark.parametrize(
    ("node_type", "given", "kind", "message"),
    [
        ("user", ["ü0", "nobody", "no"], DataError, r"'user' has no node with the id 'nobody' \(2 of 3 are unknown\);"),
        ("user", [3], ConfigError, r"ids of 'user' are \[3\]...; give ids such as 'ü0', which is node 0 of the store"),
        ("item", ["a"], ConfigError, r"ids of 'item' are \['a'\]...; give ids such as -30"),
        ("item", [1.5], ConfigError, r"ids of 'item' are \[1.5\]"),
        ("item", [0], DataError, "'item' has no node with the id 0; give ids such as -30"),
        ("tag", [5], DataError, "'tag' has no node with the id 5; give ids such as 0"),
        ("user", "ü0", ConfigError, "give a list of ids"),
        ("tag", np.array([4.9], object), ConfigError, r"ids of 'tag' are \[4.9\]...; give ids such as 0"),
        ("tag", np.array([True], object), ConfigError, r"ids of 'tag' are \[True\]"),
        ("tag", np.array([2**64 - 1], np.uint64), ConfigError, r"ids of 'tag' are \[.*18446744073709551615"),
        ("tag", [2**70], ConfigError, r"ids of 'tag' are \[1180591620717411303424\]"),
        ("tag", [str(2**70)], ConfigError, r"ids of 'tag' are \['1180591620717411303424'\]"),
    ],
)
def test_an_id_that_no_node_has_is_named(store: Store, node_type: str, given: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        store.ids(node_type).stored(given)


def test_the_node_type_is_named_where_there_are_several(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"name one of \['user', 'item', 'tag'\]"):
        store.ids()


def test_loaders_take_text_ids(store: Store) -> None:
    batch = next(iter(hoploom.NeighborLoader(store, [0], ("user", ["ü7ü7", "ü1ü1"]), batch_size=2)))
    assert batch["user"].n_id.tolist() == [7, 1]
    links = (("user", "likes", "tag"), (["ü1ü1", "ü0"], ["4", "2"]))
    batch = next(iter(hoploom.LinkNeighborLoader(store, [0], links, batch_size=2)))
    assert batch["tag"].n_id[batch["user", "likes", "tag"].edge_label_index[1]].tolist() == [4, 2]
    with pytest.raises(ConfigError, match="object"):  # integers are the store's ids, so they are not looked up
        hoploom.NeighborLoader(store, [0], ("item", np.array([5, 12], object)))
    with pytest.raises(DataError, match="'user' has no node with the id 'nobody'"):
        hoploom.NeighborLoader(store, [0], ("user", ["nobody"]))
