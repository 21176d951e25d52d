"""What a store shows of itself is the same wherever it lies, and is what PyG's data shows."""

import copy
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.batch_servers import listening
from support.graphs import library, ring, save_in_parts
from support.refusals import assert_raises

import hoploom
from hoploom import ConfigError, Store, StoreError

AUTHORS = ("author", "writes", "paper")


@pytest.fixture(scope="module", params=["in memory", "two parts", "on a server"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    made, path = hoploom.from_pyg(ring(12)), tmp_path_factory.mktemp("views") / "parts"
    if request.param == "in memory":
        yield made
    elif request.param == "two parts":
        yield save_in_parts(made, path, 2)
    else:
        save_in_parts(made, path, 2)
        with listening(path) as served, hoploom.connect([served.address]) as there:
            yield there


@pytest.fixture(scope="module")
def books() -> Store:
    return hoploom.from_pyg(library(), weight_attr="weight")


MASK = torch.arange(12) % 5 == 0
INDICES: dict[str, Any] = {
    "an id": 7,
    "from the end": -2,
    "a NumPy id": np.int32(3),
    "a scalar tensor": torch.tensor(4),
    "a slice": slice(2, 9, 3),
    "a slice backwards": slice(None, None, -4),
    "a list": [3, 3, -1],
    "nothing": [],
    "a tensor": torch.tensor([11, 0], dtype=torch.int32),
    "an array": np.array([5, 1]),
    "a mask": MASK,
    "a mask of NumPy": MASK.numpy(),
    "all": Ellipsis,
    "narrow ids from the end": torch.tensor([-1, 3], dtype=torch.int8),
    "unsigned ids": np.array([5, 11], dtype=np.uint16),
    "wide unsigned ids": np.array([11], dtype=np.uint64),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES.keys())
def test_rows_are_indexed_like_a_tensor(store: Store, index: Any) -> None:
    asked = np.array(index, dtype=int) if isinstance(index, list) else index
    asked = asked.numpy() if isinstance(asked, torch.Tensor) else asked
    assert np.array_equal(store.x[index].numpy(), ring(12).x.numpy()[asked])


def test_ids_of_few_bits_count_from_the_end_of_many_rows() -> None:
    rows = hoploom.from_tensors({"x": torch.arange(300)}, torch.tensor([[0], [1]])).x
    assert (rows[torch.tensor([-1, 0], dtype=torch.int8)].tolist(), int(rows[np.int8(-1)])) == ([299, 0], 299)
    assert rows[np.array([255], dtype=np.uint8)].tolist() == [255]


def test_rows_iterate_and_are_an_array(store: Store) -> None:
    assert [int(value) for value in store.y] == list(range(12))
    assert np.asarray(store.x).tolist() == ring(12).x.tolist()
    assert (len(store.x), store.x.shape, store.x.dtype) == (12, (12, 4), torch.float32)
    assert repr(store.x) == "FieldRows(node.x: float32 [12, 4])"


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda s: s.x[12], ["12", "[0, 12)"]),
        (lambda s: s.x[[0, -13]], ["-13", "[0, 12)"]),
        (lambda s: s.x["train"], ["'train'", "a mask"]),
        (lambda s: s.x[:3, 0], ["slice(None, 3, None), 0", "read the rows first: store.x[ids][..., 0]"]),
        (lambda s: s.x[True], ["index of 'x' is True", "read the rows first"]),
        (lambda s: s.y == 3, ["store.y[:] == 3"]),
        (lambda s: s.y != 3, ["store.y[:] == 3"]),
        (lambda s: s.x[np.array([2**64 - 1], dtype=np.uint64)], ["[0, 12)"]),
        (lambda s: s.x[1.5], ["float", "integer ids"]),
        (lambda s: s.x[torch.ones(3, dtype=torch.bool)], ["mask", "12 nodes"]),
        (lambda s: s["paper"], ["'paper'", "'node'"]),
        (lambda s: s.neighbors(12), ["node is 12", "below 12"]),
        (lambda s: s.subgraph([1, 1]), ["twice", "unique()"]),
        (lambda s: s.subgraph("training"), ["'training'", "'train'"]),
    ],
)
def test_what_a_store_does_not_have_is_named(store: Store, ask: Callable[[Store], Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        ask(store)
    assert all(word in str(error.value) for word in words), error.value


def test_a_field_becomes_a_tensor_with_few_requests(store: Store) -> None:
    before = store.traffic().get("requests", 0)
    assert torch.equal(torch.as_tensor(store.x), ring(12).x)
    assert torch.equal(torch.tensor(store.y), torch.arange(12))
    assert torch.equal(store.x[store.y], ring(12).x)
    assert store.subgraph(store.y).num_edges == 24
    assert store.traffic().get("requests", 0) - before <= 4 * 2 + 4 * 2  # of two parts: a subgraph reads 4 things


def test_what_a_store_lacks_is_no_attribute_of_it(store: Store, books: Store) -> None:
    bare = hoploom.from_tensors({"x": torch.zeros(3, 1)}, torch.tensor([[0], [1]]))
    assert not hasattr(bare, "num_classes")
    with pytest.raises(ConfigError, match="needs labels y of one node type"):
        _ = bare.num_classes
    before = (store.num_classes, store.traffic())
    assert (store.num_classes, store.traffic()) == before  # read once
    assert ("x" in store, "z" in store, "paper" in books, AUTHORS in books, "year" in books["paper"]) == (
        (True, False) + (True,) * 3
    )
    assert list(books["paper"]) == books["paper"].keys()
    assert ("num_edges" in dir(books["paper"]), "num_nodes" in dir(books[AUTHORS])) == (False, False)


def test_numpy_says_that_it_has_no_bfloat16() -> None:
    narrow = hoploom.from_tensors({"x": torch.zeros(3, 1).bfloat16()}, torch.tensor([[0], [1]]))
    assert_raises(ConfigError, r"no bfloat16.*store.x\[:\].float", np.asarray, narrow.x)


def test_a_split_of_another_type_is_named(books: Store) -> None:
    with pytest.raises(ConfigError) as error:
        books.subgraph({"author": "train"})
    assert str(error.value) == "unknown split 'train' of 'author'; it has []; ['paper'] have one of this name"


def test_counts_and_names_are_pygs(store: Store, books: Store) -> None:
    data, shelves = ring(12), library()
    assert (store.num_nodes, store.num_edges, store.num_features) == (data.num_nodes, data.num_edges, data.num_features)
    assert store.num_classes == 12
    assert store.splits == {"train": 6, "val": 3, "test": 3}
    assert (books.num_nodes, books.num_edges, books.num_features) == (20, shelves.num_edges, shelves.num_features)
    assert books.metadata() == shelves.metadata() == (books.node_types, books.edge_types)
    assert books.splits["paper"] == {"train": 6}
    assert (books["paper"].num_nodes, books[AUTHORS].num_edges) == (10, 27)
    assert books["paper", "venue"].owner == ("paper", "appears_in", "venue")


def test_neighbours_are_the_sources_of_the_in_edges(store: Store, books: Store) -> None:
    assert store.neighbors(10).tolist() == [11, 0]
    index = library()[AUTHORS].edge_index
    assert books.neighbors(3, AUTHORS).tolist() == index[0, index[1] == 3].tolist()
    assert list(books["paper"].neighbors(3)) == [key for key in books.edge_types if key[2] == "paper"]
    assert_raises(ConfigError, "give of=", books.neighbors, 3)


def assert_same_data(ours: Any, theirs: Any) -> None:
    ours, theirs = ours.to_dict(), theirs.to_dict()
    flat = [
        {(k, n): v for k, of in d.items() for n, v in (of if isinstance(of, dict) else {0: of}).items()}
        for d in (ours, theirs)
    ]
    assert set(flat[0]) == set(flat[1])
    for key, value in flat[0].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(flat[1][key])), key


def test_the_whole_graph_comes_back_as_it_was_given(store: Store) -> None:
    assert_same_data(store.to_pyg(), ring(12))


def test_a_heterogeneous_graph_comes_back_as_it_was_given(books: Store, tmp_path: Path) -> None:
    assert_same_data(books.to_pyg(), library())
    assert_same_data(save_in_parts(books, tmp_path / "parts", 3).to_pyg(), library())


def test_a_subgraph_is_pygs(store: Store, books: Store) -> None:
    ids = torch.tensor([2, 3, 4, 9])
    ours = store.subgraph(ids)
    assert torch.equal(ours.n_id, ids)
    del ours.n_id
    assert_same_data(ours, ring(12).subgraph(ids))
    subset = {"paper": [1, 2, 8], "author": [0, 5], "venue": [2]}
    found = books.subgraph(subset)
    expected = library().subgraph({name: torch.tensor(ids) for name, ids in subset.items()})
    for key in books.edge_types:
        assert torch.equal(found[key].edge_index, expected[key].edge_index)
        assert torch.equal(found[key].edge_attr, expected[key].edge_attr)
    assert torch.equal(store.subgraph("train").n_id, store.split("train"))


def test_what_does_not_fit_into_memory_is_not_begun(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoploom.system.available_memory", lambda: 100)
    said = r"to read the graph takes [\d.]+ kB, 100 B are left; .*hoploom.NeighborLoader"
    assert_raises(ConfigError, said, store.to_pyg)
    assert_raises(ConfigError, r"100 B are left; .*store.subgraph", lambda: store.subgraph(range(12)))
    assert store.subgraph([0]).num_nodes == 1


def test_some_parts_show_what_they_hold_and_name_what_they_lack(tmp_path: Path) -> None:
    save_in_parts(hoploom.from_pyg(ring(12)), tmp_path / "parts", 2)
    half = hoploom.open(tmp_path / "parts", parts=[0])
    assert half.num_nodes == 12
    assert half.x[:6].tolist() == ring(12).x[:6].tolist()
    assert_raises(StoreError, r"reading 'x' of node .* needs part 1", lambda: half.x[:])


def test_names_complete_and_tables_are_escaped(store: Store, books: Store) -> None:
    assert {"x", "y", "edge_attr", "num_nodes", "subgraph"} <= set(dir(store))
    assert {"x", "year"} <= set(dir(books["paper"]))
    assert not {"x"} & set(dir(books))
    assert books._ipython_key_completions_()[:2] == ["author", "paper"]
    with pytest.raises(AttributeError, match="store\\[type\\]"):
        _ = books.x


def test_a_store_says_in_one_line_what_it_is(books: Store, tmp_path: Path) -> None:
    saved = save_in_parts(hoploom.from_pyg(ring(12)), tmp_path / "ring.store", 2)
    assert saved.path == tmp_path / "ring.store"
    assert repr(saved) == f"Store({saved.path}: nodes: node 12; edges: to 24; 2 parts)"
    assert repr(books).startswith("Store(nodes: author 7, paper 10, venue 3; edges: writes 27,")


@pytest.fixture(params=["in memory", "on disk", "placed"])
def kept(request: pytest.FixtureRequest, device: torch.device, sound_stores: object) -> Store:
    if request.param == "on disk":
        return hoploom.open(f"{sound_stores}/ring")
    made = hoploom.from_pyg(ring(12))
    return hoploom.place(made, str(device), str(device)) if request.param == "placed" else made


def test_a_copy_of_a_store_is_the_same_store(kept: Store) -> None:
    for shown in (kept, kept["node"], kept.x):
        assert copy.copy(shown) is copy.deepcopy(shown) is shown
    holder = {"graph": kept, "weights": torch.ones(2)}
    copied = copy.deepcopy(holder)
    assert copied["graph"] is kept
    assert copied["weights"] is not holder["weights"]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_store_is_not_pickled_and_says_what_to_do_instead(kept: Store, protocol: int) -> None:
    said = r"^a store is never pickled; .*its path and hoploom\.open it there.*; save one that is in memory first$"
    for shown in (kept, kept["node"], kept.x):
        assert_raises(ConfigError, said, pickle.dumps, {"graph": shown}, protocol)
        with pytest.raises(ConfigError, match=said):  # as an argument of a spawned process
            ForkingPickler.dumps(shown, protocol)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, ForkingPickler.dumps])
def test_a_loader_is_not_copied_and_says_what_to_do_instead(copied: Callable[[object], object], kept: Store) -> None:
    loader = hoploom.NeighborLoader(kept, [2], torch.arange(4), batch_size=2)
    assert_raises(ConfigError, r"^a loader is never copied or pickled; make another, and give it", copied, loader)
