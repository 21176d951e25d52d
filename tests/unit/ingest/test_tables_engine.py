"""DuckDB and Spark give the same bytes and keep to their memory; what is wrong around Spark is told at the start."""

import re
import socket
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.refusals import assert_raises
from support.stores import contents
from support.tables import EDGES, IDS, NODES, build_here, by_id, edges_of, on_spark, write_graph, write_table

from hoploom.errors import ConfigError, DataError, StoreError
from hoploom.ingest.spark.session import check_java, check_master, python_problem, reason_of
from hoploom.ingest.tables.build import fitting_threads, open_engine
from hoploom.ingest.tables.engine import Engine, _explained, result_rows
from hoploom.ingest.tables.graph_file import parse_graph
from hoploom.ingest.tables.sources import ReadLimits, read_sources


@pytest.fixture
def duck(tmp_path: Path) -> Iterator[Engine]:
    with open_engine(tmp_path / "scratch", 256 << 20, threads=1) as engine:
        yield engine


def write(path: Path, rows: int = 1000) -> str:
    pq.write_table(pa.table({"a": list(range(rows)), "b": [v % 7 for v in range(rows)]}), path, row_group_size=300)
    return str(path)


def test_rows_are_streamed_in_order_by_several_at_once(duck: Engine, tmp_path: Path) -> None:
    table = duck.read([write(tmp_path / "x.parquet")])
    threes = table.filter(table["b"] == 3)
    assert [row["a"] for row in result_rows(duck, threes.order_by(threes["a"].desc()))] == list(range(997, 0, -7))
    streams = [duck.stream(table, row_bytes=1 << 14, as_read=True) for _ in range(3)]
    first = [next(stream).column("a").to_pylist() for stream in streams]
    assert first == [list(range(256))] * 3
    assert [a for batch in streams[0] for a in batch.column("a").to_pylist()] == list(range(256, 1000))


def test_the_folder_of_an_engine_is_removed(tmp_path: Path) -> None:
    with open_engine(tmp_path, 256 << 20):
        assert (tmp_path / "engine").exists()
    assert not (tmp_path / "engine").exists()


def test_parquet_in_large_row_groups_is_rewritten_and_gives_the_same_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 1000
    nodes = {
        "id": [v * 7 for v in range(count)],
        "emb": pa.array([[v / 4, -v] for v in range(count)], pa.list_(pa.float32())),
        "half": pa.array(np.arange(count).astype(np.float16)),
        "at": pa.array([v * 1001 for v in range(count)], pa.timestamp("ns")),
        "word": pa.array([f"w{v % 3}" for v in range(count)]).dictionary_encode(),
    }
    text = """
    [nodes.node]
    files = "nodes*.parquet"
    id = "id"
    features = "emb"
    label = "word"
    time = "at"
    fields = { half = "half" }
    columns.word.categories = "codes"
    """
    made = []
    for largest in (1 << 60, 1):
        folder = tmp_path / str(largest)
        folder.mkdir()
        pq.write_table(pa.table(nodes), folder / "nodes [a].parquet")  # the engine sees it by a link
        write_table(folder / "edges.parquet", {"src": [0, 7], "dst": [7, 14]})
        before = contents(folder)
        monkeypatch.setattr("hoploom.ingest.tables.build.ReadLimits", lambda **_: ReadLimits(largest_group=largest))  # noqa: B023
        store, _ = build_here(folder, text + EDGES)
        assert {name: contents(folder)[name] for name in before} == before
        made.append(contents(folder / "out.store"))
        scratch = folder / "scratch"
        scratch.mkdir()
        sources = read_sources(parse_graph(text + EDGES, folder=folder), scratch, ReadLimits(largest_group=largest))
        rewritten = [path for source in sources.values() for path in source.paths if path.endswith(".cut.parquet")]
        assert len(rewritten) == (2 if largest == 1 else 0)
    assert made[0] == made[1]
    assert by_id(store, "time")[7] == 1
    assert store.schema.node_types[0].fields["half"].dtype == "float16"


def test_threads_are_as_many_as_memory_has_row_groups_for() -> None:
    for largest, threads in ((0, 16), (1 << 28, 7), (1 << 30, 1), (1 << 40, 1)):
        assert fitting_threads(4 << 30, largest, 16) == threads


def test_spark_without_java_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = pytest.importorskip("pyspark").SparkContext
    from hoploom.ingest.spark.session import spark_session

    monkeypatch.setattr(context, "_gateway", None)  # what an earlier test started
    monkeypatch.setattr(context, "_jvm", None)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"Spark needs Java, which does not start \(.*java: not found\)"):
        spark_session(tmp_path, 1 << 30, "local[2]", {}).__enter__()


@pytest.fixture(scope="module")
def running_spark() -> Iterator[None]:
    """A Spark of the user's own, which is used and left running."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    yield
    assert session.range(3).count() == 3
    session.stop()


@on_spark("running_spark")
@pytest.mark.parametrize(
    ("name", "parts"), [("sparse", 1), ("sparse", 3), ("dense", 1), ("from 100", 3), ("wide", 3), ("text", 1)]
)
def test_spark_gives_the_same_bytes_whatever_the_ids(tmp_path: Path, name: str, parts: int) -> None:
    for seed, engine in ((3, "duckdb"), (8, "spark")):
        where = tmp_path / engine
        where.mkdir()
        write_graph(where, IDS[name], seed, files=1 + seed % 3)
        text = NODES.replace('split = "fold"', "split = { train = 0.5 }") if parts > 1 else NODES
        text += '[nodes.node.columns.year]\nstandardise = true\n[nodes.node.columns.fold]\ncategories = "one-hot"\n'
        text += '[edges."node to node".columns.a]\nstandardise = true\n'
        text = text.replace('features = ["year", "emb"]', 'features = ["year", "emb", "fold"]')
        text = text.replace('categories = "one-hot"', 'categories = "one-hot"\nfill = "none"')
        build_here(where, text, parts=parts, engine=engine, master="local[2]")
    assert contents(tmp_path / "duckdb" / "out.store") == contents(tmp_path / "spark" / "out.store")


@on_spark("running_spark")
def test_spark_reads_types_as_duckdb_does(tmp_path: Path) -> None:
    """What Spark has no type for comes as another one, and is made what it was."""
    count = 20
    kinds = ("uint8", "uint16", "uint32", "uint64", "int8")
    columns = {kind: pa.array(range(count), getattr(pa, kind)()) for kind in kinds}
    columns |= {
        f"time_{unit}": pa.array(range(0, count * 1000, 1000), pa.timestamp(unit)) for unit in ("ms", "us", "ns")
    }
    columns |= {
        "zone": pa.array(range(count), pa.timestamp("us", tz="Asia/Tokyo")),
        "day": pa.array(range(count), pa.date32()),
    }
    columns |= {"price": pa.array([Decimal(v) / 4 for v in range(count)], pa.decimal128(10, 2))}
    columns |= {"yes": [v % 2 == 0 for v in range(count)], "A": [v / 2 for v in range(count)]}
    columns |= {"fixed": pa.array([[v, v + 1] for v in range(count)], pa.list_(pa.int16(), 2))}
    word = pa.array([f"w{v % 3}" for v in range(count)]).dictionary_encode()
    names = ", ".join(f'"{name}" = "{name}"' for name in columns)
    text = f"""
    [nodes.node]
    files = "n.parquet"
    id = "id"
    label = "word"
    fields = {{ {names} }}
    columns.word.categories = "codes"
    [edges."node to node"]
    files = "e.parquet"
    source = "id"
    destination = "uint64"
    """
    made = []
    for engine in ("duckdb", "spark"):
        folder = tmp_path / engine
        folder.mkdir()
        table = {"id": [v * 3 for v in range(count)], "word": word, **columns}
        pq.write_table(pa.table(table), folder / "n.parquet")
        pq.write_table(pa.table({"id": [0, 3, 6], "uint64": pa.array([3, 9, 6], pa.uint64())}), folder / "e.parquet")
        store, _ = build_here(folder, text, engine=engine, master="local[2]")
        made.append(contents(folder / "out.store"))
    assert made[0] == made[1]
    assert by_id(store, "time_ns")[3] == 1
    assert by_id(store, "price")[9] == 0.75
    assert by_id(store, "fixed")[6] == [2, 3]
    assert edges_of(store) == [(0, 3), (6, 6), (3, 9)]


@on_spark("running_spark")
def test_nodes_without_a_label_are_in_no_drawn_split_of_spark_either(tmp_path: Path) -> None:
    keys = 'label = "y"\nsplit = { train = 0.5, rest = 0.5 }\n'
    for number, label in enumerate(([0.0, None, float("nan")], [0, None, -1])):
        said = []
        for engine in ("duckdb", "spark"):
            folder = tmp_path / f"{engine}{number}"
            folder.mkdir()
            ids = [f"v{v}" for v in range(30)]
            pq.write_table(pa.table({"id": ids, "y": label * 10}), folder / "nodes.parquet")
            pq.write_table(pa.table({"src": ids[:2], "dst": ids[1:3]}), folder / "edges.parquet")
            text = NODES.split("features")[0] + keys + EDGES
            store, report = build_here(folder, text, engine=engine, master="local[2]")
            assert store.split("train").numel() + store.split("rest").numel() == 10
            said.append([report.notes[0], contents(folder / "out.store")])
        assert said[0] == said[1]


TWICE = [0, *(v * 5 for v in range(1, 301) for _ in range(2))]  # batches of 256 rows end between two that are the same


@on_spark("running_spark")
@pytest.mark.parametrize(
    ("ids", "what"),
    [
        ([0, None, 7, None, 3], "row 2: column 'id' of nodes.node has 2 nulls, this is the first"),
        (["a", None, "b"], "row 2: column 'id' of nodes.node has a null"),
        (TWICE, "300 ids have more than one row: 5 (again in"),
        ([f"v{v}" for v in TWICE], "300 ids have more than one row: 'v10' (again in"),
        (["a", "b\0", "c"], r"row 2: column 'id' of nodes.node holds 'b\x00'; remove its zero byte"),
    ],
)
def test_ids_that_are_no_ids_are_named_by_spark_too(
    tmp_path: Path, ids: list[object], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = pytest.importorskip("hoploom.ingest.spark.frames")
    monkeypatch.setattr(frames, "BATCH_BYTES", 1)
    write_table(tmp_path / "nodes.parquet", {"id": ids})
    write_table(tmp_path / "edges.parquet", {"src": ids[:1], "dst": ids[-1:]})
    text = NODES.split("features")[0] + EDGES
    for parts in (1, 3):
        told = []
        for engine in ("duckdb", "spark"):
            with pytest.raises(DataError) as caught:
                build_here(tmp_path, text, engine=engine, parts=parts, master="local[2]")
            told.append(str(caught.value))
        assert what in told[0]
        assert told[0] == told[1]


@on_spark("running_spark")
@pytest.mark.parametrize("column", ["id", "part", "dst"])
def test_text_that_is_not_utf8_is_named_by_spark(tmp_path: Path, column: str) -> None:
    """Spark itself reads it as any other; DuckDB refuses the file."""
    names = ["a", "b", "c", "d"]
    tables = {"nodes": {"id": names, "part": ["train", "val"] * 2}, "edges": {"src": names, "dst": names}}
    bad = pa.array([b"a", b"b", b"\xff\xfe", b"d"]).view(pa.string())
    for name, columns in tables.items():
        rows = pa.table({one: bad if one == column else pa.array(given) for one, given in columns.items()})
        pq.write_table(rows, tmp_path / f"{name}.parquet")
    text = NODES.split("features")[0] + 'split = "part"\n' + EDGES
    owner = 'edges."node to node"' if column == "dst" else "nodes.node"
    with pytest.raises(DataError, match=rf"row 3: column '{column}' of {owner} holds text that is not UTF-8"):
        build_here(tmp_path, text, engine="spark", master="local[2]")
    assert_raises(DataError, "not valid UTF8", build_here, tmp_path, text, engine="duckdb")


def test_too_little_memory_is_told_with_the_way_out(tmp_path: Path) -> None:
    """By DuckDB while a statement runs; by pyarrow while rows are streamed, with advice for programmers."""
    pq.write_table(pa.table({"a": [f"{number:05d}" * 200 for number in range(9000)]}), tmp_path / "wide.parquet")
    said = r"^the memory given is too small for DuckDB; raise --memory by 200 MB, .* \(Out of Memory Error: [^\n]*\)$"
    with open_engine(tmp_path / "scratch", 2 << 20, threads=1) as engine, pytest.raises(ConfigError, match=said):
        list(engine.stream(engine.read([str(tmp_path / "wide.parquet")]).order_by("a")))
    with pytest.raises(ConfigError, match=said), _explained():
        raise OSError("Out of Memory Error: failed to allocate data (81.1 MiB/81.6 MiB used)\n\nPossible solutions:\n*")
    with pytest.raises(StoreError, match=r"^DuckDB cannot read or write: IO Error: no space$"), _explained():
        raise OSError("IO Error: no space")


OLD = """#!/bin/sh
echo 'openjdk version "1.8.0_392"' >&2
echo 'OpenJDK Runtime Environment (build 1.8.0_392-b08)' >&2
"""


def java_that_is(script: str, folder: Path) -> str:
    (folder / "bin").mkdir()
    (folder / "bin" / "java").write_text(script)
    (folder / "bin" / "java").chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("1.8.0_392", False), ("11.0.21", False), ("16", False), ("17.0.15", True), ("21-ea", True), ("25", True)],
)
def test_java_must_be_17_or_later(
    version: str, accepted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = OLD.replace('1.8.0_392"', f'{version}" 2023-10-17').replace("echo", "echo 'Picked up X' >&2; echo", 1)
    monkeypatch.setenv("JAVA_HOME", java_that_is(script, tmp_path))
    if accepted:
        check_java()
    else:
        message = f'Spark needs Java 17 or later, and finds version "{version}"; install Java 17'
        assert_raises(ConfigError, re.escape(message), check_java)


def test_a_java_that_is_missing_or_broken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert_raises(ConfigError, r"Java, which does not start \(.*nowhere/bin/java: not found\); install", check_java)
    broken = java_that_is("#!/bin/sh\necho 'Could not create the Java Virtual Machine.' >&2\nexit 1\n", tmp_path)
    monkeypatch.setenv("JAVA_HOME", broken)
    assert_raises(ConfigError, r"does not start \(Could not create the Java Virtual Machine\.\); install", check_java)
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_raises(ConfigError, r"start \(java: not found\)", check_java)


def test_a_master_that_does_not_answer_is_named_at_once() -> None:
    with socket.socket() as bound:  # nobody listens there
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"answers at spark://127.0.0.1:{port} \(Connection refused\); start it"):
            check_master(f"spark://127.0.0.1:{port}")
        with socket.create_server(("127.0.0.1", 0)) as answering:
            check_master(f"spark://127.0.0.1:{port},127.0.0.1:{answering.getsockname()[1]}")
    assert_raises(ConfigError, "it has no port, which is 7077 in most clusters", check_master, "spark://127.0.0.1")
    for master in ("local[*]", "yarn", "k8s://https://127.0.0.1:1"):
        check_master(master)


def test_what_executors_lack_is_found_in_their_errors() -> None:
    for text, said in (
        ("Traceback\nModuleNotFoundError: No module named 'pyarrow'", "executors has no pyarrow; install it on every"),
        (
            "ModuleNotFoundError: No module named 'hoploom.ingest'",
            "has no hoploom; .* spark.archives=environment.tar.gz#environment",
        ),
        ('java.io.IOException: Cannot run program "/x/py": error=2', "have no Python at /x/py; set PYSPARK_PYTHON"),
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than that in driver: 3.11, PySpark",
            "executors have Python 3.12, but you run Python 3.11",
        ),
        (
            "Lost task 0.3 (executor 1): org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)",
            "the Python process of a task was ended, as it is where memory runs out; give executors more",
        ),
        (
            "Lost task 0.3 (executor 1): java.io.EOFException\n\tat java.base/java.io.DataInputStream.readInt(D:3)\n"
            "\tat org.apache.spark.api.python.PythonWorkerFactory.create(Made.scala:153)",
            "the Python process of a task was ended, as it is where memory runs out; give executors more",
        ),
    ):
        error = python_problem(RuntimeError(text))
        assert re.search(said, str(error))
        assert "\n" not in str(error)
    assert python_problem(RuntimeError("an executor was lost")) is None
    assert python_problem(RuntimeError("java.io.EOFException\n\tat org.apache.spark.io.Block.read(B.java:1)")) is None


JAVA_TRACE = """An error occurred while calling o49.collectToPython.
: org.apache.spark.SparkException: Job aborted: java.io.IOException: No space left on device
\tat java.base/java.lang.ProcessBuilder.start(ProcessBuilder.java:1143)
Caused by: java.io.IOException: err
"""
PYTHON_TRACE = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "tasks.py", line 3, in write
    file.write(values)
OSError: [Errno 28] No space left on device
"""


def test_of_a_trace_one_line_is_shown() -> None:
    assert reason_of(RuntimeError(JAVA_TRACE)).endswith("Job aborted: java.io.IOException: No space left on device")
    assert reason_of(RuntimeError(PYTHON_TRACE)) == "OSError: [Errno 28] No space left on device"
    inner = JAVA_TRACE.replace("java.io.IOException: No space", "PythonException: " + PYTHON_TRACE + "\n\tat x\n", 1)
    assert reason_of(RuntimeError(inner)).startswith("OSError: [Errno 28]")
    plan = "[PATH_NOT_FOUND] Path does not exist: file:/x. SQLSTATE: 42K03;\n'Project [*]\n"
    assert reason_of(RuntimeError(plan)).startswith("[PATH_NOT_FOUND]")
    assert reason_of(RuntimeError()) == "RuntimeError"
