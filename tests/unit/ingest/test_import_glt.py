"""GraphLearn-for-PyTorch's partitions become stores of as many parts; nothing in them is unpickled."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.raw_layouts import GLT_PARTS, NUM_NODES, features, glt_book, glt_folder, glt_typed_folder, ring_edges
from support.stores import left_in, rows_of
from torch import Tensor

import hoploom
from hoploom import ConfigError, DataError, NeighborLoader, Store
from hoploom.cli import main
from hoploom.ingest.formats import import_glt
from hoploom.schema import EDGE_ID, ORIGINAL_ID, RelationName
from hoploom.store.check import problems

pytestmark = pytest.mark.usefixtures("one_thread", "no_sync")

RING: RelationName = ("node", "to", "node")
WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    torch.save(torch.arange(NUM_NODES).view(-1, 1), tmp_path / "label.pt")
    return tmp_path / "label.pt"


@pytest.fixture
def train(tmp_path: Path) -> Path:
    (tmp_path / "train").mkdir()
    for rank, ids in enumerate(torch.arange(6).split(3)):
        torch.save(ids, tmp_path / "train" / f"partition{rank}.pt")
    return tmp_path / "train"


def originals(store: Store, name: str) -> Tensor:
    return rows_of(store, name, ORIGINAL_ID)


def edges_of(store: Store, key: RelationName) -> dict[int, tuple[int, int]]:
    index = store.schema.relation_index[key]
    found: dict[int, tuple[int, int]] = {}
    sources, destinations = originals(store, key[0]), originals(store, key[2])
    for part in store.parts:
        lists = part.lists[index]
        into = torch.repeat_interleave(lists.indptr.diff()) + lists.first_node
        ids = part.tables[key, EDGE_ID].rows
        ends = zip(sources[lists.indices.long()].tolist(), destinations[into].tolist(), strict=True)
        found |= dict(zip(ids.tolist(), ends, strict=True))
    return found


def test_the_parts_and_their_nodes_are_glts(tmp_path: Path, labels: Path, train: Path) -> None:
    store = import_glt(glt_folder(tmp_path / "glt"), tmp_path / "out", labels=labels, splits={"train": train})
    assert store.schema.homogeneous
    assert [part.num_nodes for part in store.parts] == [(4,), (3,), (3,)]
    ids = originals(store, "node")
    assert ids.tolist() == [0, 3, 6, 9, 1, 4, 7, 2, 5, 8]  # part by part, ascending within
    assert torch.equal(rows_of(store, "node", "x"), torch.from_numpy(features())[ids])
    assert torch.equal(rows_of(store, "node", "y"), ids)
    assert sorted(ids[store.split("train")].tolist()) == list(range(6))
    assert list(problems(tmp_path / "out")) == []


def test_a_split_given_twice_has_the_ids_of_both_files(tmp_path: Path, labels: Path, train: Path) -> None:
    """GLT's scripts keep a file of training ids for each partition."""
    folder, files = glt_folder(tmp_path / "glt"), [train / "partition1.pt", train / "partition0.pt"]
    torch.save(torch.load(files[1])[:1], tmp_path / "more.pt")
    again = refused(folder, tmp_path, splits={"train": [*files, tmp_path / "more.pt"]})
    assert again == f"split 'train' of 'node': node 0 is in {files[1]} and {tmp_path / 'more.pt'}; list a node once"
    command = ["import", "glt", str(folder), *(word for file in files for word in ("--split", f"train={file}"))]
    assert main([*command, "-o", str(tmp_path / "out")]) == 0
    store = hoploom.open(tmp_path / "out")
    assert sorted(originals(store, "node")[store.split("train")].tolist()) == list(range(6))
    listed = import_glt(folder, tmp_path / "listed", splits={"train": files})
    assert torch.equal(listed.split("train"), store.split("train"))


def test_what_names_no_files_of_a_split_is_refused(tmp_path: Path, train: Path) -> None:
    folder, file = glt_folder(tmp_path / "glt"), train / "partition0.pt"
    assert "node 0 is in" in refused(folder, tmp_path, splits={"train": [train, file]})
    wrong = {
        r"'train' is \[\]; give a file of node ids": [[]],
        "'train' is a set; give": [{file}],
        "'train' is a Tensor; give": [torch.arange(3)],
        "'train' is .tensor.0..; give": [[torch.tensor(0)]],
    }
    for message, splits in wrong.items():
        for split in splits:
            with pytest.raises(ConfigError, match=message):
                import_glt(folder, tmp_path / "out", splits={"train": split})


def test_store_json_lists_the_labels_of_all_parts_before_their_ids(tmp_path: Path, labels: Path) -> None:
    import_glt(glt_folder(tmp_path / "glt"), tmp_path / "out", labels=labels)
    files = [file for file in json.loads((tmp_path / "out/store.json").read_text())["files"] if "/nodes/" in file]
    assert [Path(file).stem for file in files] == ["x"] * 3 + ["y"] * 3 + [ORIGINAL_ID] * 3


@pytest.mark.parametrize("order", ["as edges", "another order"])
def test_edges_keep_their_ids_ends_and_features(tmp_path: Path, order: str) -> None:
    folder = glt_folder(tmp_path / "glt")
    for path in folder.glob("part*/edge_feat/*.pt") if order == "another order" else ():
        torch.save(torch.load(path).flip(0), path)
    store = import_glt(folder, tmp_path / "out")
    assert edges_of(store, RING) == dict(enumerate(map(tuple, ring_edges().T.tolist())))
    for part in store.parts:
        assert torch.equal(part.tables[RING, "edge_attr"].rows.view(-1), part.tables[RING, EDGE_ID].rows.float())


def test_types_and_relations_are_told_from_the_names_of_files(tmp_path: Path, labels: Path, train: Path) -> None:
    store = import_glt(
        glt_typed_folder(tmp_path / "glt"),
        tmp_path / "out",
        labels={"paper": labels},
        splits={"paper": {"train": train}},
    )
    assert [(t.name, t.num_nodes, list(t.fields)) for t in store.schema.node_types] == [
        ("author", 4, [ORIGINAL_ID]),
        ("paper", NUM_NODES, ["x", "y", ORIGINAL_ID]),
    ]
    assert edges_of(store, WRITES) == {e: (e // 2, e // 2 + e % 2) for e in range(8)}
    assert edges_of(store, CITES) == dict(enumerate(map(tuple, ring_edges().T.tolist())))
    assert len(store.parts) == GLT_PARTS
    batch = next(iter(NeighborLoader(store, [-1], input_nodes=("paper", store.split("train", "paper")), batch_size=6)))
    assert sorted(batch["paper"].y[:6].tolist()) == list(range(6))


def test_edge_weights_are_the_stores_weights(tmp_path: Path) -> None:
    folder = glt_folder(tmp_path / "glt")
    for part in range(GLT_PARTS):
        graph = folder / f"part{part}" / "graph"
        torch.save(torch.load(graph / "eids.pt").float() / 2, graph / "weights.pt")
    store = import_glt(folder, tmp_path / "out")
    assert store.schema.weight == "weight"
    for part in store.parts:
        assert torch.equal(part.tables[RING, "weight"].rows, part.tables[RING, EDGE_ID].rows / 2)


def test_nodes_that_stand_in_order_need_no_ids_of_their_own(tmp_path: Path) -> None:
    folder = glt_folder(tmp_path / "glt")
    torch.save(torch.arange(NUM_NODES) * GLT_PARTS // NUM_NODES, folder / "node_pb.pt")
    store = import_glt(folder, tmp_path / "out")
    assert [part.num_nodes for part in store.parts] == [(4,), (3,), (3,)]
    assert torch.equal(rows_of(store, "node", "x"), torch.from_numpy(features()))
    assert ORIGINAL_ID not in store.schema.node_types[0].fields


def refused(folder: Path, tmp_path: Path, **options: Any) -> str:
    before = left_in(tmp_path)
    with pytest.raises(DataError) as raised:
        import_glt(folder, tmp_path / "out", **options)
    assert left_in(tmp_path) == before
    assert not (folder / "LOADED").exists()
    return str(raised.value)


class Book:
    """A partition book that is no tensor, as GLT's RangePartitionBook."""


def test_meta_is_never_loaded(tmp_path: Path) -> None:
    folder = glt_folder(tmp_path / "glt")
    import_glt(folder, tmp_path / "out")
    assert not (folder / "LOADED").exists()
    (folder / "META").unlink()
    import_glt(folder, tmp_path / "without")


def test_what_needs_unpickling_is_refused(tmp_path: Path) -> None:
    folder = glt_folder(tmp_path / "glt")
    torch.save(Book(), folder / "node_pb.pt")
    message = refused(folder, tmp_path)
    assert message.startswith(f"{folder / 'node_pb.pt'} cannot be read without unpickling, which Hoploom never does")
    (folder / "node_pb.pt").write_bytes((folder / "META").read_bytes())
    assert "cannot be read without unpickling" in refused(folder, tmp_path)


def test_all_files_that_are_missing_are_named_at_once(tmp_path: Path) -> None:
    folder = glt_folder(tmp_path / "glt")
    gone = [folder / "part0" / "graph" / "cols.pt", folder / "part2" / "graph" / "rows.pt"]
    for path in gone:
        path.unlink()
    assert refused(folder, tmp_path) == f"{folder} is incomplete; these files are missing: {gone[0]}, {gone[1]}"
    assert "is incomplete; these files are missing" in refused(tmp_path / "empty", tmp_path)


CHANGED: dict[str, tuple[str, Any, str]] = {
    "an end out of range": ("part1/graph/cols.pt", lambda t: t + 8, "cols.pt, row 1: node 10 is not in [0, 10)"),
    "ends of two lengths": ("part1/graph/cols.pt", lambda t: t[:-1], "cols.pt has shape (5,), rows.pt has (6,)"),
    "a bare node": ("node_pb.pt", lambda t: torch.cat([t, t[:1]]), "have 0 rows for node 10; give one each"),
    "features of no node": ("part1/node_feat/ids.pt", lambda t: t + 90, "ids.pt, row 1: node 97 is not in [0, 10)"),
    "fewer rows than ids": ("part1/node_feat/feats.pt", lambda t: t[1:], "feats.pt has torch.float32 (2, 3)"),
    "other features": ("part2/node_feat/feats.pt", lambda t: t.double(), "feats.pt has torch.float64 (3, 3)"),
    "edges lost": ("edge_pb.pt", lambda t: t[1:], "edge_pb.pt counts 19 edges, the parts hold 20"),
    "an edge without features": ("part0/edge_feat/ids.pt", lambda t: t + 1, "has edge 0, but its edge_feat has no"),
    "a node twice": ("part1/node_feat/ids.pt", lambda t: t.clone().fill_(7), "have 0 rows for node 1; give one each"),
    "ends that are fractions": ("part1/graph/rows.pt", lambda t: t + 0.5, "rows.pt has dtype torch.float32 and shape"),
    "ends in a square": ("part1/graph/cols.pt", lambda t: t.view(2, 3), "dtype torch.int64 and shape (2, 3); ids are"),
    "edges without numbers": ("part1/graph/eids.pt", lambda t: t / 2, "eids.pt has dtype torch.float32 and shape"),
    "features of half a node": ("part1/node_feat/ids.pt", lambda t: t / 2, "ids.pt has dtype torch.float32 and shape"),
    "features of half an edge": ("part1/edge_feat/ids.pt", lambda t: t / 2, "ids.pt has dtype torch.float32 and shape"),
    "a tensor in a list": ("part1/graph/cols.pt", lambda t: [t], "cols.pt holds a list; save a plain tensor"),
    "no list": ("part0/graph/rows.pt", lambda t: t[0], "rows.pt holds a single value; rows were expected"),
    "a book of fractions": ("node_pb.pt", lambda t: t.float(), "node_pb.pt has dtype torch.float32"),
}


@pytest.mark.parametrize(("file", "change", "said"), CHANGED.values(), ids=CHANGED.keys())
def test_a_file_that_does_not_fit_is_named(tmp_path: Path, file: str, change: Any, said: str) -> None:
    folder = glt_folder(tmp_path / "glt")
    torch.save(change(torch.load(folder / file)), folder / file)
    assert said in refused(folder, tmp_path)


@pytest.mark.parametrize("kind", ["node_feat", "edge_feat"])
def test_a_part_without_the_features_of_the_others_is_refused(tmp_path: Path, kind: str) -> None:
    folder = glt_folder(tmp_path / "glt")
    shutil.rmtree(folder / "part1" / kind)
    missing = [folder / "part1" / kind / name for name in ("feats.pt", "ids.pt")]
    said = f"the features is incomplete; these files are missing: {missing[0]}, {missing[1]}"
    assert refused(folder, tmp_path) == said


@pytest.mark.parametrize("kept", [0, 0.5, 0.9])
def test_a_tensor_cut_short_is_named(tmp_path: Path, kept: float) -> None:
    folder = glt_folder(tmp_path / "glt")
    path = folder / "part0" / "graph" / "rows.pt"
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    assert refused(folder, tmp_path).startswith(str(path))


def test_a_relation_whose_types_cannot_be_told_is_refused(tmp_path: Path) -> None:
    folder = glt_typed_folder(tmp_path / "glt")
    torch.save(glt_book(3), folder / "node_pb" / "paper__cites.pt")
    torch.save(glt_book(3), folder / "node_pb" / "cites__paper.pt")
    for part in range(GLT_PARTS):
        graph = folder / f"part{part}" / "graph"
        (graph / "paper__cites__paper").rename(graph / "paper__cites__cites__paper")
    assert "edges named 'paper__cites__cites__paper', but it may mean" in refused(folder, tmp_path)


def test_labels_and_splits_must_fit(tmp_path: Path, labels: Path, train: Path) -> None:
    folder = glt_folder(tmp_path / "glt")
    torch.save(torch.arange(9), tmp_path / "short.pt")
    torch.save(torch.tensor([2, 2]), train / "partition1.pt")
    assert "short.pt has 9 rows for 10 nodes" in refused(folder, tmp_path, labels=tmp_path / "short.pt")
    assert "node 2 is in" in refused(folder, tmp_path, splits={"train": train})
    assert "none.pt does not exist" in refused(folder, tmp_path, labels=tmp_path / "none.pt")
    torch.save(torch.tensor([0.5, 1.5]), train / "partition1.pt")
    assert "partition1.pt has dtype torch.float32 and shape" in refused(folder, tmp_path, splits={"train": train})
    torch.save(torch.tensor(3), tmp_path / "short.pt")
    assert "short.pt holds a single value; rows were" in refused(folder, tmp_path, labels=tmp_path / "short.pt")
    with pytest.raises(ConfigError, match=r"labels are given for .'venue'.; give them by node type, of .'node'."):
        import_glt(folder, tmp_path / "out", labels={"venue": labels})


def test_features_pickled_by_newer_releases_are_refused(tmp_path: Path) -> None:
    folder = glt_folder(tmp_path / "glt")
    for name in ("feats", "ids"):
        (folder / "part1" / "node_feat" / f"{name}.pt").rename(folder / "part1" / "node_feat" / f"{name}.pkl")
    message = refused(folder, tmp_path)
    assert message.startswith(f"{folder / 'part1' / 'node_feat' / 'feats.pkl'} is a pickle, which Hoploom never loads")
