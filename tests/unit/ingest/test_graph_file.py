"""graph.toml: what it takes, what it refuses with which way out, and what a draft of it says of the tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from support import ROOT
from support.key_tables import key_table
from support.refusals import assert_raises

from hoploom import ConfigError
from hoploom.config.rules import keys_in
from hoploom.ingest.tables.build import BuildOptions, build
from hoploom.ingest.tables.draft import draft
from hoploom.ingest.tables.graph_file import (
    HEADINGS,
    ColumnRule,
    EdgeTable,
    GraphFile,
    NodeTable,
    parse_graph,
    read_graph,
)

pytestmark = pytest.mark.usefixtures("no_sync")


NODES = '[nodes.paper]\nfiles = "p.parquet"\nid = "paper_id"\n'  # three lines
MORE = "[nodes.author]\ncount = 10\n"  # two
ENDS = 'source = "s"\ndestination = "d"\n'
EDGES = '[edges."paper cites paper"]\nfiles = "e.csv"\n' + ENDS  # four
WRITES = '[edges."author writes paper"]\nfiles = "e.csv"\n' + ENDS
WITH = NODES + EDGES + "\n"
TOO_MUCH = "give a column in quotes, or shares above 0 that add up to at most 1"

MISTAKES = {  # claim: text, line (0: none), what the message says
    "no TOML": ("[nodes.paper\n", 1, "not TOML"),
    "unknown section": (WITH + "[node.x]\n", 9, r"unknown key node; did you mean \[nodes.<type>\]\?"),
    "key above": ("seed = 3\n" + WITH, 1, r"unknown key seed; did you mean seed in \[graph\]\?"),
    "key of a table": (WITH + "[nodes]\nfiles = 'x'\n", 10, r"nodes.files stands outside .* below \[nodes.<type>\]"),
    "unknown key": (NODES + "feature = 'x'\n", 4, r"unknown key feature in \[nodes.paper\]; did you mean features\?"),
    "nothing alike": (NODES + "qqqq = 'x'\n", 4, r"unknown key qqqq .* did you mean one of files, count, id"),
    "in [graph]": (WITH + "[graph]\nsede = 3\n", 10, r"unknown key sede in \[graph\]; did you mean seed\?"),
    "in an edge table": (
        WITH + "feature = 'x'\n",
        9,
        r'unknown key feature in \[edges."paper cites paper"\]; did you mean features\?',
    ),
    "of a column": (
        NODES + "[nodes.paper.columns.year]\ncats = 'float32'\n",
        5,
        r"unknown key cats in \[nodes.paper.columns.year\]; did you mean cast\?",
    ),
    "no table": (NODES + "columns.at = 3\n", 4, r"columns.at is 3; it is a section, write \[nodes.paper.columns.at\]"),
    "no nodes": (EDGES, 0, r"there is no node type; add a section \[nodes.<type>\]"),
    "no edges": (NODES, 0, r"there is no relation; add a section \[edges"),
    "nodes that are none": ("nodes = 3\n", 1, r"nodes is 3; it is a section, write \[nodes\]"),
    "type that is none": ("[nodes]\npaper = 3\n", 2, r"nodes.paper is 3; it is a section"),
    "no files": ("[nodes.paper]\nid = 'x'\n" + EDGES, 1, r"nodes.paper: files is missing; .* or count = 1000"),
    "no id": ("[nodes.paper]\nfiles = 'x'\n" + EDGES, 1, 'nodes.paper: id is missing; add .* id = "paper_id"'),
    "no source": (NODES + "[edges.'paper a paper']\nfiles='e'\ndestination='d'\n", 4, 'source is missing; .*"source"'),
    "no edge files": (NODES + "[edges.'paper a paper']\n" + ENDS, 4, "files is missing; add a line such as files = "),
    "files of numbers": ("[nodes.paper]\nfiles = 3\n", 2, "nodes.paper.files is 3; give a path in quotes, or a list"),
    "no file listed": ("[nodes.paper]\nfiles = []\n", 2, r"nodes.paper.files is \[\]; give a path"),
    "unknown dtype": (NODES + "features='a'\ndtype = 'flaot32'\n", 5, 'give one of .*did you mean "float32"'),
    "split beyond all": (NODES + "split = { train = 0.8, val = 0.3 }\n", 4, TOO_MUCH),
    "split of none": (NODES + "split = { train = 0.0 }\n", 4, TOO_MUCH),
    "split below": (NODES + "split = { train = -0.5, val = 0.5 }\n", 4, TOO_MUCH),
    "split by number": (NODES + "split = 0.5\n", 4, "nodes.paper.split is 0.5; give a column in quotes, or shares"),
    "fields that are a list": (NODES + "fields = ['a']\n", 4, "give a table of columns by field"),
    "fill with truth": (NODES + "columns.a = { fill = true }\n", 4, "fill is True; give a number or text"),
    "fill with nan": (NODES + "columns.a = { fill = nan }\n", 4, "fill is nan; give a number or text"),
    "unknown category": (NODES + "columns.a = { categories = 'onehot' }\n", 4, 'did you mean "one-hot"'),
    "name with blanks": ("[nodes.'a b']\ncount = 3\n", 1, 'node type "a b" is no name; give a word'),
    "two words": (NODES + "[edges.'cites paper']\n", 4, r"names no relation; give source type, name, destination"),
    "two blanks": (NODES + "[edges.'paper  cites paper']\n", 4, r"names no relation; give source type, name"),
    "unknown type": (NODES + "[edges.'papr cites paper']\n", 4, r"there is no \[nodes.papr\]; did you mean paper\?"),
    "unknown end": (NODES + "[edges.'paper in venue']\n", 4, r"no \[nodes.venue\]; add one, or name one of paper"),
    "both": (WITH + "[nodes.a]\ncount = 3\nfiles = 'x'\nid = 'i'\n", 10, "count: it has no effect with files"),
    "of a count": (WITH + "[nodes.a]\ncount = 3\nfeatures = 'x'\n", 11, "features: it has no effect without files"),
    "count of an id": (WITH + "[nodes.a]\ncount = 3\nid = 'x'\n", 11, "nodes.a.id: it has no effect without files"),
    "classes of nothing": (NODES + "num_classes = 3\n" + EDGES, 4, "num_classes: it has no effect without label"),
    "label, too": (NODES + "features = ['a', 'z']\nlabel = 'z'\n" + EDGES, 4, 'features: "z" is the label, too'),
    "dtype of nothing": (NODES + "dtype = 'float16'\n" + EDGES, 4, "dtype: it has no effect without features"),
    "field x": (NODES + "fields = { x = 'a' }\n" + EDGES, 4, 'a field "x" cannot be given; choose another name'),
    "field weight": (WITH + "fields = { weight = 'a' }\n", 9, 'a field "weight" cannot be given'),
    "filled ids": (NODES + "columns.paper_id = { fill = 0 }\n" + EDGES, 4, "fill: it cannot be done to ids"),
    "ids cast": (WITH + "columns.s = { cast = 'float32' }\n", 9, '"float32" is given, but ids are "int64" or "string"'),
    "standard words": (
        NODES + "columns.a = { standardise = true, categories = 'codes' }\n" + EDGES,
        4,
        "standardise: it is for numbers, categories is not; drop one",
    ),
    "standard text": (
        NODES + "columns.a = { standardise = true, cast = 'string' }\n" + EDGES,
        4,
        'standardise: it is for numbers, cast = "string" is not',
    ),
    "undirected between types": (NODES + MORE + WRITES + "undirected = true\n", 10, "relations of a type with itself"),
    "loops between types": (NODES + MORE + WRITES + "self_loops = 'drop'\n", 10, "relations of a type with itself"),
    "reverse of both": (WITH + "undirected = true\nreverse = true\n", 10, "reverse: it has no effect with undirected"),
    "reverse by three": (WITH + "reverse = 'paper a paper'\n", 9, "is more than a name; leave out types and spaces"),
    "reverse of itself": (WITH + "reverse = 'cites'\n", 9, 'there is a relation "paper cites paper" already'),
    "reverse that is there": (
        NODES + MORE + WRITES + "reverse = 'by'\n[edges.'paper by author']\nfiles = 'x'\n" + ENDS,
        10,
        'there is a relation "paper by author" already',
    ),
    "two times": (NODES + "time = 't'\n" + EDGES + "time = 'at'\n", 9, "a graph has times of nodes or of edges"),
}


@pytest.mark.parametrize(("text", "line", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_graph(text, name="graph.toml")
    assert str(raised.value).startswith(f"graph.toml:{line}: " if line else "graph.toml: ")
    assert "\n" not in str(raised.value)


EVERY_KEY = """
[graph]
seed = 7
[nodes.paper]
files = ["a.parquet", "b/*.parquet"]
id = "paper_id"
features = ["year", "f_*"]
dtype = "float16"
label = "venue"
num_classes = 40
split = { train = 0.8, val = 0.1 }
fields = { rank = "pagerank" }
[nodes.paper.columns.year]
fill = 0
cast = "float32"
standardise = true
[nodes.author]
count = 10
[edges."author writes paper"]
files = "writes.csv"
source = "author_id"
destination = "paper_id"
features = "share"
weight = "w"
time = "at"
reverse = true
[edges."paper cites paper"]
files = "cites.csv"
source = "a"
destination = "b"
reverse = "cited_by"
deduplicate = true
self_loops = "drop"
columns = { a = { cast = "string" } }
"""


def test_every_key_is_read() -> None:
    paper = {"files": ("a.parquet", "b/*.parquet"), "id": "paper_id", "features": ("year", "f_*"), "dtype": "float16"}
    paper |= {"label": "venue", "num_classes": 40, "split": {"train": 0.8, "val": 0.1}, "fields": {"rank": "pagerank"}}
    paper |= {"columns": {"year": ColumnRule(fill=0, cast="float32", standardise=True)}}
    writes = {"files": ("writes.csv",), "source": "author_id", "destination": "paper_id", "features": ("share",)}
    writes |= {"weight": "w", "time": "at", "reverse": "rev_writes"}
    cites = {"files": ("cites.csv",), "source": "a", "destination": "b", "reverse": "cited_by", "deduplicate": True}
    cites |= {"self_loops": "drop", "columns": {"a": ColumnRule(cast="string")}}
    tables = [EdgeTable(("author", "writes", "paper"), **writes), EdgeTable(("paper", "cites", "paper"), **cites)]
    nodes = {"paper": NodeTable("paper", **paper), "author": NodeTable("author", count=10)}
    expected = GraphFile(nodes, {table.relation: table for table in tables}, 7, Path("here"))
    found = parse_graph(EVERY_KEY, folder=Path("here"))
    assert found == expected
    assert list(found.nodes) == ["paper", "author"]
    assert found.where[f"{tables[1].owner}.columns.a.cast"] == "graph.toml:34"
    assert not found.homogeneous


def test_names_that_need_quotes_are_found_in_their_line() -> None:
    text = NODES.replace("paper]", "'p.1']") + "num_classes = 3\n[edges.'p.1 é p.1']\nfiles = 'x'\n" + ENDS
    assert_raises(ConfigError, r'^graph.toml:4: nodes."p.1".num_classes: it has no effect', parse_graph, text)


def test_no_fields_may_be_given_with_a_count() -> None:
    assert parse_graph(NODES + EDGES + "[nodes.a]\ncount = 3\nfields = {}\n").nodes["a"].count == 3


def test_reverse_false_is_no_reverse() -> None:
    (table,) = parse_graph(WITH + "reverse = false\n").edges.values()
    assert table.reverse is None


def test_one_type_node_and_one_relation_to_are_homogeneous() -> None:
    text = NODES.replace("paper]", "node]") + EDGES.replace("paper cites paper", "node to node")
    assert parse_graph(text).homogeneous
    assert not parse_graph(WITH).homogeneous


def test_the_page_has_the_table_of_every_key() -> None:
    lines = []
    for heading, owner in HEADINGS.items():
        lines += ["", f"`[{heading}]`", "", *key_table(keys_in(owner).items())]
    assert "\n".join(lines) + "\n" in (ROOT / "docs" / "tables.md").read_text()


def test_a_file_is_read_and_its_folder_kept(tmp_path: Path) -> None:
    (tmp_path / "graph.toml").write_text(WITH)
    assert read_graph(tmp_path / "graph.toml").folder == tmp_path
    with pytest.raises(ConfigError, match=r"no.toml does not exist; `hoploom init --tables DIR .*no.toml` drafts one"):
        read_graph(tmp_path / "no.toml")


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
    found = {"files": ("papers.parquet",), "id": "paper_id", "features": ("emb",), "label": "label", "split": "fold"}
    found |= {"columns": {"label": ColumnRule(categories="codes")}}
    assert graph.nodes["node"] == NodeTable("node", **found)
    said = "# not used: title (string), venue_id (int64), year (int64, some null), uneven (list<"
    assert said in draft(tmp_path, tmp_path)  # a null may be a class that is not known: no value stands for it


@pytest.mark.parametrize("names", ["part-0.parquet part-1.parquet", "0.arrow 1.arrow", "a.csv _left.csv b.csv"])
def test_shards_are_one_table(tmp_path: Path, names: str) -> None:
    halves = {f"nodes/{name}": {"id": [2 * i, 2 * i + 1], "a": [1, 2]} for i, name in enumerate(names.split())}
    assert _drafted(tmp_path, halves | {"edges.csv": {"src": [0], "dst": [1]}}).nodes["node"].files == ("nodes",)


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
        assert parse_graph(draft(tmp_path / "tables", beside)).edges["node", "to", "node"].files == (files,)


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
    assert_raises(ValueError, r"a.csv, row 1: it has 1 fields", draft, tmp_path, tmp_path)
    (tmp_path / "a.csv").write_text("x,y\n")
    assert_raises(ValueError, r"a.csv has no rows; give a table with rows, or remove it", draft, tmp_path, tmp_path)
