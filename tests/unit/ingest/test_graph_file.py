"""graph.toml: what it takes, and what it refuses, in which line and with which way out."""

from pathlib import Path

import pytest
from support import ROOT
from support.key_tables import key_table

from hoploom import ConfigError
from hoploom.config.rules import keys_in
from hoploom.ingest.tables.graph_file import (
    HEADINGS,
    ColumnRule,
    EdgeTable,
    GraphFile,
    NodeTable,
    parse_graph,
    read_graph,
)

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
    "no table": (
        NODES + "columns.year = 3\n",
        4,
        r"columns.year is 3; it is a section, write \[nodes.paper.columns.year\]",
    ),
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
    paper = NodeTable(
        "paper",
        files=("a.parquet", "b/*.parquet"),
        id="paper_id",
        features=("year", "f_*"),
        dtype="float16",
        label="venue",
        num_classes=40,
        split={"train": 0.8, "val": 0.1},
        fields={"rank": "pagerank"},
        columns={"year": ColumnRule(fill=0, cast="float32", standardise=True)},
    )
    writes = EdgeTable(
        ("author", "writes", "paper"),
        files=("writes.csv",),
        source="author_id",
        destination="paper_id",
        features=("share",),
        weight="w",
        time="at",
        reverse="rev_writes",
    )
    cites = EdgeTable(
        ("paper", "cites", "paper"),
        files=("cites.csv",),
        source="a",
        destination="b",
        reverse="cited_by",
        deduplicate=True,
        self_loops="drop",
        columns={"a": ColumnRule(cast="string")},
    )
    nodes = {"paper": paper, "author": NodeTable("author", count=10)}
    expected = GraphFile(nodes, {writes.relation: writes, cites.relation: cites}, 7, Path("here"))
    found = parse_graph(EVERY_KEY, folder=Path("here"))
    assert found == expected
    assert list(found.nodes) == ["paper", "author"]
    assert found.where[f"{cites.owner}.columns.a.cast"] == "graph.toml:34"
    assert not found.homogeneous


def test_names_that_need_quotes_are_found_in_their_line() -> None:
    text = NODES.replace("paper]", "'p.1']") + "num_classes = 3\n[edges.'p.1 é p.1']\nfiles = 'x'\n" + ENDS
    with pytest.raises(ConfigError, match=r'^graph.toml:4: nodes."p.1".num_classes: it has no effect'):
        parse_graph(text)


def test_no_fields_may_be_given_with_a_count() -> None:
    graph = parse_graph(NODES + EDGES + "[nodes.a]\ncount = 3\nfields = {}\n")
    assert graph.nodes["a"].count == 3


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
