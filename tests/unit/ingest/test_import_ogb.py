"""OGB's raw folders become stores that hold what OGB's own reader gives; folders that are not sound are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.raw_layouts import NUM_NODES, column, features, ogb_csv, ogb_mag, ogb_papers, ring_edges, write_csv
from support.stores import assert_same, left_in
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import ToUndirected

import hoploom
from hoploom import ConfigError, DataError
from hoploom.ingest.formats import import_ogb
from hoploom.ingest.formats.archives import npz_pairs, npz_table, read_arrays
from hoploom.ingest.formats.ogb import csv_table
from hoploom.ingest.formats.row_source import Count, EdgeSource, RowSource, edge_stream, flat, labels, members
from hoploom.ingest.stream import EdgeRule
from hoploom.schema import Field
from hoploom.store.check import problems

pytestmark = pytest.mark.usefixtures("one_thread", "no_sync")


def by_destination(edge_index: Tensor) -> Tensor:
    """The same lists; edges that come by destination need no ids of their own in a store."""
    return edge_index[:, torch.argsort(edge_index[1], stable=True)]


def nodes(*, year: bool, labelled: int = NUM_NODES) -> dict[str, Tensor]:
    ids = torch.arange(NUM_NODES)
    fields = {"x": torch.from_numpy(features()), "y": torch.where(ids < labelled, ids, -1)}
    return fields | ({"year": 2000 + ids} if year else {})


SPLITS = {"train": torch.arange(6), "val": torch.arange(6, 8), "test": torch.arange(8, 10)}


def homogeneous(edge_index: Tensor, *, year: bool, labelled: int = NUM_NODES) -> hoploom.Store:
    return hoploom.from_tensors(nodes(year=year, labelled=labelled), by_destination(edge_index), splits=SPLITS)


def test_arxiv_is_what_ogb_reads(tmp_path: Path) -> None:
    store = import_ogb("ogbn-arxiv", ogb_csv(tmp_path / "ogbn_arxiv", "time", year=True), tmp_path / "out")
    assert_same(store, homogeneous(torch.from_numpy(ring_edges()), year=True))
    assert list(problems(tmp_path / "out")) == []


def test_products_has_every_edge_both_ways_and_loops_twice(tmp_path: Path) -> None:
    folder = ogb_csv(tmp_path / "products", "sales_ranking", year=False)
    write_csv(folder / "raw" / "edge.csv.gz", [(0, 1), (2, 2), (1, 0), (9, 3)])
    write_csv(folder / "raw" / "num-edge-list.csv.gz", [[4]])
    store = import_ogb("ogbn-products", tmp_path, tmp_path / "out")  # the folder above serves too
    repeated = torch.tensor([[0, 1, 2, 2, 1, 0, 9, 3], [1, 0, 2, 2, 0, 1, 3, 9]])  # as OGB's reader repeats them
    assert_same(store, homogeneous(repeated, year=False))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_papers_is_what_ogb_reads_however_its_arrays_are_stored(
    tmp_path: Path, order: str, save: Callable[..., None]
) -> None:
    folder = ogb_papers(tmp_path / "papers", edge_index=np.asarray(ring_edges(), order=order))
    with np.load(folder / "raw" / "data.npz") as arrays:
        arrays = dict(arrays)
    save(folder / "raw" / "data.npz", **arrays)
    store = import_ogb("ogbn-papers100M", folder, tmp_path / "out")
    assert_same(store, homogeneous(torch.from_numpy(ring_edges()), year=True, labelled=5))


def mag() -> HeteroData:
    data = HeteroData()
    data["author"].num_nodes = 4
    data["institution"].num_nodes = 2
    for name, rows in nodes(year=True).items():
        data["paper"][name] = rows
    author = torch.arange(8) // 2
    data["author", "affiliated_with", "institution"].edge_index = torch.tensor([[0, 2, 1, 3], [0, 0, 1, 1]])
    data["author", "writes", "paper"].edge_index = by_destination(torch.stack([author, author + torch.arange(8) % 2]))
    data["paper", "cites", "paper"].edge_index = by_destination(torch.from_numpy(ring_edges()))
    return data


def test_mag_has_its_types_and_relations_in_ogbs_order(tmp_path: Path) -> None:
    edges, counts = {key: mag()[key].edge_index for key in mag().edge_types}, {"author": 4, "institution": 2}
    fields = {"author": {}, "institution": {}, "paper": nodes(year=True)}
    expected = hoploom.from_tensors(fields, edges, num_nodes=counts, splits={"paper": SPLITS})
    assert_same(import_ogb("ogbn-mag", ogb_mag(tmp_path / "mag"), tmp_path / "out"), expected)


def test_undirected_adds_the_edges_that_pygs_to_undirected_adds(tmp_path: Path) -> None:
    store = import_ogb("ogbn-mag", ogb_mag(tmp_path / "mag"), tmp_path / "out", undirected=True)
    expected = ToUndirected()(mag())
    assert {relation.key for relation in store.schema.relations} == set(expected.edge_types)
    for relation in store.schema.relations:
        wanted = expected[relation.key].edge_index
        assert sorted(edges_of(store, relation.key)) == sorted(map(tuple, wanted.t().tolist()))


@pytest.mark.parametrize("name", ["ogbn-arxiv", "ogbn-products"])
def test_undirected_leaves_one_edge_each_way_between_two_nodes(tmp_path: Path, name: str) -> None:
    folder = ogb_csv(tmp_path / "raw", "time" if name == "ogbn-arxiv" else "sales_ranking", year=True)
    store = import_ogb(name, folder, tmp_path / "out", undirected=True)
    expected = ToUndirected()(Data(edge_index=torch.from_numpy(ring_edges()), num_nodes=NUM_NODES)).edge_index
    assert sorted(edges_of(store, ("node", "to", "node"))) == sorted(map(tuple, expected.t().tolist()))


def edges_of(store: hoploom.Store, key: tuple[str, str, str]) -> list[tuple[int, int]]:
    (part,) = store.parts
    lists = part.lists[store.schema.relation_index[key]]
    return list(zip(lists.indices.tolist(), torch.repeat_interleave(lists.indptr.diff()).tolist(), strict=True))


@pytest.mark.parametrize("word", ["", "NA", "N/A", "null", "#N/A", "nan"])
def test_what_pandas_takes_for_missing_is_nan(tmp_path: Path, word: str) -> None:
    write_csv(tmp_path / "a.csv.gz", [[1.5, 2.5], [word, 3.5]])
    (chunk,) = csv_table(tmp_path / "a.csv.gz", "float32").chunks()
    assert torch.equal(chunk.isnan(), torch.tensor([[False, False], [True, False]]))


def test_rows_are_counted_over_chunks(tmp_path: Path) -> None:
    values = [v % 5 for v in range(1000)]
    write_csv(tmp_path / "rows.csv.gz", column([*values[:-1], 5]))
    table = csv_table(tmp_path / "rows.csv.gz", "float64", block=256)
    with pytest.raises(DataError, match=r"rows\.csv\.gz, row 1000: label 5 is not in \[0, 5\)"):
        list(labels(table, 5).chunks())
    table = csv_table(tmp_path / "rows.csv.gz", "int64", block=256)
    with pytest.raises(DataError, match=r"rows\.csv\.gz, row 1000: node 5 is not in \[0, 5\)"):
        list(members(table, 5)())
    stream = edge_stream(
        ("a", "to", "b"), EdgeSource([flat(table)] * 2, Count("edges", 1000, "it")), (6, 5), EdgeRule()
    )
    with pytest.raises(DataError, match=r"row 1000: destination 5 is not in \[0, 5\)"):
        list(stream.rows())


def test_arrays_are_read_in_chunks_from_the_zip(tmp_path: Path) -> None:
    pairs = np.arange(200).reshape(2, 100)
    np.savez_compressed(tmp_path / "a.npz", pairs=pairs, big_endian=pairs.T.astype(">i4"))
    arrays = read_arrays(tmp_path / "a.npz", chunk_bytes=64)
    halves = [list(table.chunks()) for table in npz_pairs(arrays["pairs"])]
    assert [len(half) for half in halves] == [13, 13]  # 8 of 8 bytes each
    assert [torch.cat(half).tolist() for half in halves] == pairs.tolist()
    assert torch.cat(list(npz_table(arrays["big_endian"]).chunks())).tolist() == pairs.T.tolist()


def test_arrays_in_fortran_order_are_the_same_rows(tmp_path: Path) -> None:
    pairs = np.arange(200).reshape(2, 100)
    np.savez(tmp_path / "a.npz", pairs=np.asfortranarray(pairs), rows=np.asfortranarray(pairs.T.astype(np.uint16)))
    arrays = read_arrays(tmp_path / "a.npz", chunk_bytes=64)
    (both,) = npz_pairs(arrays["pairs"])
    assert torch.cat(list(both.chunks())).tolist() == pairs.T.tolist()
    rows = torch.cat(list(npz_table(arrays["rows"]).chunks()))
    assert (rows.dtype, rows.tolist()) == (torch.int32, pairs.T.tolist())


@pytest.mark.parametrize(
    ("values", "read", "message"),
    [
        (np.array([[object()]] * 10), npz_table, "holds pickled objects, which are never loaded; save it as plain"),
        (np.array([["a"]] * 10), npz_table, "has dtype <U1; save it as one of"),
        (np.array(3), npz_table, "is a single value; rows were expected"),
        (np.arange(40).reshape(20, 2), npz_pairs, r"has shape \(20, 2\); give \[2, number of edges\]"),
        (np.array([0.5, 1.7]), lambda one: members(npz_table(one), 9), "dtype float64; ids of nodes are integers"),
    ],
    ids=["objects", "text", "one value", "edges the wrong way", "a split of fractions"],
)
def test_arrays_that_are_not_sound_are_refused(tmp_path: Path, values: Any, read: Any, message: str) -> None:
    np.savez(tmp_path / "a.npz", values=values)
    with pytest.raises(DataError, match=f"a.npz:values {message}|a.npz:values has {message}"):
        read(read_arrays(tmp_path / "a.npz")["values"])


def test_ends_of_edges_that_are_no_integers_are_refused() -> None:
    for ends in (torch.full((3, 2), 0.5), torch.ones(3, 2, dtype=torch.bool)):
        dtype = str(ends.dtype).removeprefix("torch.")
        table = RowSource("it", Field(dtype, (2,)), lambda ends=ends: iter([ends]), 3)
        with pytest.raises(DataError, match=f"it has dtype {dtype}; ends of edges are integers"):
            edge_stream(("a", "to", "b"), EdgeSource([table], Count("edges", 3, "it")), (6, 5), EdgeRule())


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "graph.npz").write_bytes(b"not a zip")
    for path in (tmp_path / "graph.npz", tmp_path):
        with pytest.raises(DataError, match=f"^{path} is no .npz; give a file that numpy.savez wrote"):
            read_arrays(path)
    np.savez(tmp_path / "graph.npz", x=features())
    (tmp_path / "graph.npz").write_bytes((tmp_path / "graph.npz").read_bytes()[:-30])
    with pytest.raises(DataError, match=r"graph\.npz is cut short or damaged"):
        read_arrays(tmp_path / "graph.npz")
    with pytest.raises(DataError, match=r"none\.npz does not exist; give the path of an \.npz"):
        read_arrays(tmp_path / "none.npz")


def refused(name: str, folder: Path, tmp_path: Path) -> str:
    with pytest.raises(DataError) as raised:
        import_ogb(name, folder, tmp_path / "out")
    assert not [left for left in left_in(tmp_path) if "out" in left]
    return str(raised.value)


def test_all_files_that_are_missing_are_named_at_once(tmp_path: Path) -> None:
    folder = ogb_csv(tmp_path / "raw", "time", year=False)
    (folder / "raw" / "edge.csv.gz").unlink()
    message = refused("ogbn-arxiv", folder, tmp_path)
    assert message == (
        f"{folder} is incomplete; these files are missing: {folder}/raw/edge.csv.gz, {folder}/raw/node_year.csv.gz"
    )


def test_missing_arrays_are_named(tmp_path: Path) -> None:
    folder = ogb_papers(tmp_path / "papers", node_year=None, num_nodes_list=None)
    message = refused("ogbn-papers100M", folder, tmp_path)
    assert message.endswith("data.npz:num_nodes_list, " + f"{folder}/raw/data.npz:node_year")


def test_an_unknown_dataset_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'ogbn-product' is not known; did you mean 'ogbn-products'"):
        import_ogb("ogbn-product", tmp_path, tmp_path / "out")


BAD_ROWS = {
    "an edge to no node": ("edge.csv.gz", [(0, 1)] * 19 + [(3, 10)], "row 20: destination 10 is not in [0, 10)"),
    "an edge from a negative node": ("edge.csv.gz", [(-1, 1)] + [(0, 1)] * 19, "row 1: source -1 is not in [0, 10)"),
    "too few edges": ("edge.csv.gz", [(0, 1)] * 19, "has 19 rows for 20 edges (num-edge-list.csv.gz)"),
    "too many edges": ("edge.csv.gz", [(0, 1)] * 21, "has more than 20 rows for 20 edges (num-edge-list.csv.gz)"),
    "three ends": ("edge.csv.gz", [(0, 1, 2)] * 20, "has rows of shape (3,); an edge has a source and a destination"),
    "no number": (
        "edge.csv.gz",
        [(0, 1)] * 5 + [(0, "one")] + [(0, 1)] * 14,
        "Row #6: CSV conversion error to int64: invalid value 'one'",
    ),
    "a row cut": ("edge.csv.gz", [(0, 1)] * 5 + [(0,)] + [(0, 1)] * 14, "Row #6: Expected 2 columns, got 1"),
    "no end": (
        "edge.csv.gz",
        [(0, 1), (0, "")] + [(0, 1)] * 18,
        "Row #2: CSV conversion error to int64: invalid value ''",
    ),
    "too few labels": ("node-label.csv.gz", column(range(9)), "has 9 rows for 10 nodes (num-node-list.csv.gz)"),
    "a label out of range": ("node-label.csv.gz", column([0, 1, 40, *range(7)]), "row 3: label 40 is not in [0, 40)"),
    "a label between classes": ("node-label.csv.gz", column([0, 1.5, *range(8)]), "row 2: label 1.5 is no class"),
    "too many features": ("node-feat.csv.gz", [(0, 1)] * 11, "more than 10 rows for 10 nodes (num-node-list.csv.gz)"),
    "two graphs": ("num-node-list.csv.gz", [[5], [5]], "one number was expected"),
    "a seed that is no node": ("../split/time/valid.csv.gz", column([3, 10]), "row 2: node 10 is not in [0, 10)"),
    "a seed that comes twice": ("../split/time/test.csv.gz", column([8, 9, 8]), "'test' of 'node': node 8 came twice"),
}


@pytest.mark.parametrize(("file", "rows", "said"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_bad_row_is_named_by_file_row_and_value(tmp_path: Path, file: str, rows: list[object], said: str) -> None:
    folder = ogb_csv(tmp_path / "raw", "time", year=True)
    write_csv(folder / "raw" / file, rows)
    message = refused("ogbn-arxiv", folder, tmp_path)
    assert said in message
    assert "came twice" in said or Path(file).name in message


@pytest.mark.parametrize("file", ["edge.csv.gz", "node-feat.csv.gz", "num-node-list.csv.gz"])
def test_a_file_cut_short_is_named(tmp_path: Path, file: str) -> None:
    folder = ogb_csv(tmp_path / "raw", "time", year=True)
    path = folder / "raw" / file
    path.write_bytes(path.read_bytes()[:-9])
    message = refused("ogbn-arxiv", folder, tmp_path)
    assert message.startswith(f"{path} is cut short or damaged")


def test_a_file_that_is_not_gzipped_is_named(tmp_path: Path) -> None:
    path = ogb_csv(tmp_path / "raw", "time", year=True) / "raw" / "edge.csv.gz"
    path.write_text("0,1\n" * 20)
    said = refused("ogbn-arxiv", tmp_path / "raw", tmp_path)
    assert said.startswith(f"{path} is cut short or damaged (Not a gzipped")


def test_mag_without_a_file_of_a_relation_is_refused(tmp_path: Path) -> None:
    path = ogb_mag(tmp_path / "mag") / "raw" / "relations" / "author___writes___paper" / "edge.csv.gz"
    path.unlink()
    assert refused("ogbn-mag", tmp_path / "mag", tmp_path).endswith(f"these files are missing: {path}")


def test_an_array_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    folder = ogb_papers(tmp_path / "papers")
    path = folder / "raw" / "data.npz"
    np.savez(path, **dict(np.load(path)))  # not compressed
    path.write_bytes(path.read_bytes().replace(features().tobytes(), features()[::-1].tobytes()))
    said = refused("ogbn-papers100M", folder, tmp_path)
    assert said.startswith(f"{path} is cut short or damaged (Bad CRC-32 for file 'node_feat.npy'")


def test_arrays_of_other_lengths_than_counted_are_refused(tmp_path: Path) -> None:
    folder = ogb_papers(tmp_path / "papers", node_feat=features(9))
    assert "node_feat has 9 rows for 10 nodes (num_nodes_list)" in refused("ogbn-papers100M", folder, tmp_path)
    folder = ogb_papers(tmp_path / "others", num_edges_list=np.array([19]))
    assert "edge_index has 20 rows for 19 edges (num_edges_list)" in refused("ogbn-papers100M", folder, tmp_path)
