"""A drafted graph.toml says what the tables say, is read back, and builds as it stands."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from hoploom import ConfigError
from hoploom.ingest.tables.build import BuildOptions, build
from hoploom.ingest.tables.draft import draft
from hoploom.ingest.tables.graph_file import ColumnRule, EdgeTable, GraphFile, NodeTable, parse_graph

pytestmark = pytest.mark.usefixtures("no_sync")

SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}


def _write(folder: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
    for name, columns in tables.items():
        path, table = folder / name, pa.table(dict(columns))
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(table, path)
        elif name.endswith(".arrow"):
            pyarrow.feather.write_feather(table, path)
        else:
            rows = zip(*table.to_pydict().values(), strict=True)
            lines = [",".join("" if value is None else str(value) for value in row) for row in [columns.keys(), *rows]]
            path.write_text("\n".join(lines) + "\n")


def _drafted(folder: Path, tables: Mapping[str, Mapping[str, Any]]) -> GraphFile:
    _write(folder, tables)
    graph = parse_graph(draft(folder, folder), folder=folder)
    build(graph, folder / "out.store", BuildOptions(threads=1))
    return graph


NUMBERS = list(range(6))
TEXT = [f"p{i}" for i in NUMBERS]
RING = {"src": NUMBERS, "dst": [1, 2, 3, 4, 5, 0]}


def test_one_node_table_and_one_edge_table_are_homogeneous(tmp_path: Path) -> None:
    nodes = {"id": NUMBERS, "x0": NUMBERS, "x1": NUMBERS, "x2": NUMBERS, "y": [0, 1] * 3}
    graph = _drafted(tmp_path, {"nodes.csv": nodes, "edges.parquet": RING | {"w": [0.5] * 6, "t": ["a"] * 6}})
    assert graph.homogeneous
    assert graph.nodes == {
        "node": NodeTable("node", files=("nodes.csv",), id="id", features=("x0", "x1", "x2"), label="y", split=SHARES)
    }
    (edges,) = graph.edges.values()
    assert edges == EdgeTable(("node", "to", "node"), ("edges.parquet",), "src", "dst")


def test_types_are_told_by_columns_and_files(tmp_path: Path) -> None:
    graph = _drafted(
        tmp_path,
        {
            "papers.csv": {"paper_id": TEXT, "year": NUMBERS},
            "authors.csv": {"id": [f"a{i}" for i in NUMBERS], "h": NUMBERS},
            "writes.csv": {"author_id": [f"a{i}" for i in NUMBERS], "paper_id": TEXT},  # by the columns
            "paper_cites_paper.csv": {"src": TEXT, "dst": TEXT},  # by the file
        },
    )
    assert list(graph.nodes) == ["author", "paper"]
    assert list(graph.edges) == [("paper", "cites", "paper"), ("author", "writes", "paper")]
    assert [table.reverse for table in graph.edges.values()] == [None, "rev_writes"]


def test_a_column_of_categories_is_one_of_their_type(tmp_path: Path) -> None:
    tables = {name: {"id": NUMBERS, "size": NUMBERS} for name in ("categories.csv", "movies.csv")}
    graph = _drafted(tmp_path, tables | {"belongs.csv": {"movie_id": NUMBERS, "category_id": NUMBERS}})
    assert list(graph.nodes) == ["category", "movie"]
    assert [(source, destination) for source, _, destination in graph.edges] == [("movie", "category")]


def test_columns_find_their_roles(tmp_path: Path) -> None:
    lists = pa.array([[1.0, 2.0]] * 6)
    papers = {
        "paper_id": TEXT,
        "title": TEXT,  # words are no features
        "venue_id": NUMBERS,  # nor are the ids of others
        "year": [2000, None, 2001, 2002, 2003, 2004],
        "emb": lists,
        "uneven": pa.array([[1], [1, 2], [], [1], [1], [1]]),
        "label": ["cs", "maths"] * 3,
        "fold": ["train", "train", "val", "test", "test", None],
        "published": pa.array(NUMBERS, pa.timestamp("us")),
    }
    graph = _drafted(tmp_path, {"papers.parquet": papers, "cites.parquet": {"source": TEXT, "target": TEXT}})
    assert graph.nodes["node"] == NodeTable(
        "node",
        files=("papers.parquet",),
        id="paper_id",
        features=("emb",),
        label="label",
        split="fold",
        columns={"label": ColumnRule(categories="codes")},
    )
    said = "# not used: title (string), venue_id (int64), year (int64, some null), uneven (list<"
    assert said in draft(tmp_path, tmp_path)  # a null may be a class that is not known: no value stands for it


@pytest.mark.parametrize(
    ("names", "files"),
    [
        (["nodes/part-0.parquet", "nodes/part-1.parquet"], "nodes"),
        (["nodes/0.arrow", "nodes/1.arrow"], "nodes"),
        (["nodes/a.csv", "nodes/_left.csv", "nodes/b.csv"], "nodes"),
    ],
)
def test_shards_are_one_table(tmp_path: Path, names: list[str], files: str) -> None:
    halves = {name: {"id": [2 * i, 2 * i + 1], "a": [1, 2]} for i, name in enumerate(names)}
    graph = _drafted(tmp_path, halves | {"edges.csv": {"src": [0], "dst": [1]}})
    assert graph.nodes["node"].files == (files,)


def test_nodes_without_a_table_are_counted(tmp_path: Path) -> None:
    graph = _drafted(tmp_path, {"rated.csv": {"user_id": [0, 1, 7], "item_id": [2, 2, 3], "stars": [1, 2, 3]}})
    assert graph.nodes == {"user": NodeTable("user", count=8), "item": NodeTable("item", count=4)}
    assert graph.edges["user", "rated", "item"].features == ("stars",)


@pytest.mark.parametrize("users", [[0, 1, 2], [70, 80, 90]], ids=["ids that overlap", "ids of their own"])
def test_users_without_a_table_are_not_taken_for_the_movies_that_they_rate(tmp_path: Path, users: list[int]) -> None:
    movies = {"movieId": NUMBERS, "year": [1990] * 6}
    rated = {"userId": users, "movieId": [5, 5, 1], "rating": [1, 2, 3]}
    graph = _drafted(tmp_path, {"movies.csv": movies, "ratings.csv": rated})
    assert graph.nodes["user"] == NodeTable("user", count=max(users) + 1)
    assert graph.nodes["movie"].files == ("movies.csv",)
    assert graph.edges["user", "ratings", "movie"].features == ("rating",)


@pytest.mark.parametrize("more", [{}, {"since": NUMBERS}], ids=["alone", "with a feature"])
def test_friends_are_edges(tmp_path: Path, more: dict[str, Any]) -> None:
    friends = {"user_id": NUMBERS, "friend_id": [1, 2, 3, 4, 5, 1]} | more
    users = {"user_id": NUMBERS, "age": [30, 40, 50, 60, 70, 80]}
    graph = _drafted(tmp_path, {"users.csv": users, "friends.csv": friends, "movies.csv": {"movieId": NUMBERS}})
    (edges,) = graph.edges.values()
    assert edges == EdgeTable(("user", "friends", "user"), ("friends.csv",), "user_id", "friend_id", tuple(more))
    assert 'destination = "friend_id"  # guessed: these are ids of user' in draft(tmp_path, tmp_path)


USERS_, ITEMS_ = [f"u{i}" for i in range(30)], [f"i{i}" for i in range(20)]
THREE = {
    "users.csv": {"user": USERS_, "age": [*range(30)]},
    "items.csv": {"item": ITEMS_, "price": [0.5] * 20, "category": ["book", "toy"] * 10},
    "ratings.csv": {
        "user": [USERS_[i % 30] for i in range(120)],
        "item": [ITEMS_[i * 7 % 20] for i in range(120)],
        "rating": [i % 5 for i in range(120)],
    },
}
NUMBERED = {
    file: {name: [int(v[1:]) if str(v)[0] in "ui" else v for v in column] for name, column in table.items()}
    for file, table in THREE.items()
}


@pytest.mark.parametrize("tables", [THREE, NUMBERED], ids=["text", "numbers"])
def test_columns_that_bear_the_names_of_node_types_hold_ids(tmp_path: Path, tables: Mapping[str, Any]) -> None:
    graph = _drafted(tmp_path, tables)
    assert {name: nodes.id for name, nodes in graph.nodes.items()} == {"item": "item", "user": "user"}
    assert {nodes.label for nodes in graph.nodes.values()} == {None}  # a category is no label
    edges = graph.edges["user", "ratings", "item"]
    assert (edges.source, edges.destination, edges.features) == ("user", "item", ("rating",))


def test_a_label_is_guessed_with_its_reason_or_not_at_all(tmp_path: Path) -> None:
    nodes = {"id": NUMBERS, "class": TEXT, "target": ["a", "b"] * 3}
    _write(tmp_path, {"nodes.csv": nodes, "edges.csv": RING})  # each row has another class: those are names
    said = 'label = "target"  # guessed: the column is called target; is this what you predict?'
    assert said in draft(tmp_path, tmp_path).splitlines()
    _write(tmp_path, {"nodes.csv": {"id": NUMBERS, "x": NUMBERS, "y": NUMBERS}})  # where each node is
    assert "\nlabel" not in draft(tmp_path, tmp_path)


@pytest.mark.parametrize("ends", [("cited_paper_id", "citing_paper_id"), ("paper1", "paper2")])
def test_ends_that_are_both_of_one_thing_are_of_its_type(tmp_path: Path, ends: tuple[str, str]) -> None:
    graph = _drafted(
        tmp_path,
        {
            "papers.csv": {"paper_id": NUMBERS, "year": NUMBERS},
            "authors.csv": {"author_id": [10, 11, 12, 13, 14, 15], "h": NUMBERS},
            "cites.csv": dict(zip(ends, (NUMBERS, [1, 2, 3, 4, 5, 0]), strict=True)),
        },
    )
    assert list(graph.edges) == [("paper", "cites", "paper")]


@pytest.mark.parametrize("name", ["Unnamed: 0", "__index_level_0__", ""])
def test_the_number_of_a_row_is_no_feature(tmp_path: Path, name: str) -> None:
    nodes, ring = {name: NUMBERS, "id": NUMBERS, "a": NUMBERS}, {name: NUMBERS, "one": NUMBERS, "two": NUMBERS}
    graph = _drafted(tmp_path, {"nodes.csv": nodes, "ring.csv": ring})
    assert graph.nodes["node"].features == ("a",)
    (edges,) = graph.edges.values()
    assert (edges.source, edges.destination, edges.features) == ("one", "two", ())


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    tables = {"nodes.csv": {"id": NUMBERS}, "edges.csv": RING, "words.csv": {"of": TEXT, "by": TEXT, "in": TEXT}}
    _drafted(tmp_path, tables | {"likes.csv": {"user_id": TEXT, "page_id": TEXT}})
    text = draft(tmp_path, tmp_path)
    assert "# words.csv is left out: no ids are seen among of, by, in" in text
    assert "# likes.csv is left out: no table has the ids of user_id; add one as [nodes.user]" in text


def test_paths_are_relative_to_where_the_text_is_written(tmp_path: Path) -> None:
    _write(tmp_path / "tables", {"edges.csv": RING})
    for beside, files in (tmp_path, "tables/edges.csv"), (tmp_path / "other", "../tables/edges.csv"):
        graph = parse_graph(draft(tmp_path / "tables", beside))
        assert graph.edges["node", "to", "node"].files == (files,)


def test_names_that_need_quotes_are_read_back(tmp_path: Path) -> None:
    nodes = {'é "id"_id': NUMBERS, "label": TEXT[:2] * 3, "a.b": NUMBERS}
    graph = _drafted(tmp_path, {'é "1" x.parquet': nodes, "edges.csv": RING})
    assert graph.nodes["node"].id == 'é "id"_id'
    assert graph.nodes["node"].features == ("a.b",)


def test_no_folder_and_no_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is no folder; give the folder with the tables"):
        draft(tmp_path / "nowhere", tmp_path)
    with pytest.raises(ConfigError, match="holds no table; give a folder with Parquet, CSV or Arrow files"):
        draft(tmp_path, tmp_path)
    (tmp_path / "a.csv").write_text("x,y\n1\n")
    with pytest.raises(ValueError, match=r"a.csv, row 1: it has 1 fields"):
        draft(tmp_path, tmp_path)
    (tmp_path / "a.csv").write_text("x,y\n")
    with pytest.raises(ValueError, match=r"a.csv has no rows; give a table with rows, or remove it"):
        draft(tmp_path, tmp_path)
