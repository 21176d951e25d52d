"""What Spark's executors write is what one process with DuckDB writes; files are joined from pieces, however often."""

import io
import json
import subprocess
import sys
import zlib
from collections import deque
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.stores import contents
from support.tables import IDS, build_here, needs_spark, on_spark, shuffled, write_table

from hoploom.errors import DataError, HoploomError, StoreError
from hoploom.schema import Field, NodeType, Schema
from hoploom.store.fetch import fetch
from hoploom.store.format import FileEntry, PartRange
from hoploom.store.storage_path import StoragePath

pytest.importorskip("pyspark")
from pyspark import cloudpickle

from hoploom.ingest.spark import frames, joining
from hoploom.ingest.spark.frames import Ranges, leading_there, murmur3, ranges_for
from hoploom.ingest.spark.joining import JoinTask, Piece, PieceWriter, WholeFile, join_tasks, joined_files, write_plan
from hoploom.ingest.spark.target import MARKER, opened_target

MEMORY = 4 << 30  # also where the process of the tests has grown large: what it holds is taken off
GRAPH = """
[nodes.author]
count = 30

[nodes.paper]
files = "papers*.parquet"
id = "id"
features = "emb"
dtype = "float16"
time = "year"
split = { train = 0.6, test = 0.4 }

[edges."author writes paper"]
files = ["_writes.parquet"]
source = "author"
destination = "paper"
reverse = "written_by"
weight = "w"
fields = { source_time = "w" }

[edges."paper cites paper"]
files = "cites.parquet"
source = "src"
destination = "dst"
undirected = true
self_loops = "drop"
deduplicate = true
"""


@pytest.fixture
def tiny_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LEAST_ROWS", 7)
    monkeypatch.setattr(joining, "TASK_BYTES", 264)  # most files have two ranges, which end inside pieces
    monkeypatch.setattr(joining, "SMALL", 8)


def test_every_partition_has_a_number_whose_hash_leads_there() -> None:
    hashes = [933211791, -559580957, 29417773]  # Spark: SELECT hash(…)
    assert murmur3(np.array([0, 1, 42], np.int32)).tolist() == hashes
    for count in (1, 2, 7, 300):
        assert np.remainder(murmur3(np.array(leading_there(count), np.int32)), count).tolist() == list(range(count))


def test_ranges_cover_all_ids() -> None:
    for num_ids, num_rows, memory, tasks in ((1000, 10**6, 2**20, 4), (7, 3, 2**30, 2), (1, 0, 1, 1)):
        ranges = ranges_for(num_ids, num_rows, 16, memory, tasks)
        limits = [ranges.limits(number) for number in range(ranges.count)]
        assert limits[0][0] == 0
        assert limits[-1][1] == num_ids
        assert [begin for begin, _ in limits[1:]] == [end for _, end in limits[:-1]]
    assert ranges_for(10**6, 10**9, 16, 1 << 30, 2).count >= 16 * 10**9 * 8 / 2**30  # each fits a task's memory
    assert Ranges(0, 5).count == 0


def write_graph(folder: Path, *, dangling: bool = False) -> None:
    """Papers with text ids, some of them cited by themselves; what authors write has ids of no table, if asked for."""
    folder.mkdir()
    ids = [IDS["text"](v) for v in range(40)]
    papers = {"id": ids, "year": [1990 + v % 9 for v in range(40)], "emb": [[2.0 * v, 2.0 * v + 1] for v in range(40)]}
    write_table(folder / "papers.parquet", papers, files=2, row_groups=9)
    writes = {"author": [v % 30 for v in range(90)], "paper": [ids[v * 7 % 40] for v in range(90)]}
    writes["w"] = [v / 8 for v in range(90)]
    if dangling:
        writes["paper"][3:5] = ["nobody's", "nobody's"]
        writes["author"][8] = 99
    write_table(folder / "_writes.parquet", shuffled(writes, 1))  # a name that Spark takes for a file of its own
    cites = {"src": [ids[v % 40] for v in range(120)], "dst": [ids[v * v % 40] for v in range(120)]}
    write_table(folder / "cites.parquet", shuffled(cites, 2))


@needs_spark
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("short_java")
def test_a_small_graph_gives_the_same_bytes(tmp_path: Path) -> None:
    """The one build on Spark that `make test` runs; those that are slow have all kinds of tables."""
    text = '[nodes.node]\nfiles = "nodes.parquet"\nid = "id"\nfeatures = ["x"]\n'
    text += '[edges."node to node"]\nfiles = "edges.parquet"\nsource = "a"\ndestination = "b"\n'
    text += 'reverse = "back"\n'
    made = []
    for engine in ("duckdb", "spark"):
        folder = tmp_path / engine
        folder.mkdir()
        write_table(folder / "nodes.parquet", {"id": [v * 3 for v in range(20)], "x": [v / 2 for v in range(20)]})
        write_table(folder / "edges.parquet", {"a": [v * 3 for v in range(20)] * 2, "b": [0] * 20 + [9, 57] * 10})
        conf = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "1"}
        build_here(folder, text, engine=engine, parts=2, master="local[1]", memory=MEMORY, conf=conf)
        made.append(contents(folder / "out.store"))
    assert made[0] == made[1]


@on_spark("tiny_ranges")
@pytest.mark.parametrize("parts", [1, 3])
def test_every_kind_of_table_gives_the_same_bytes(tmp_path: Path, parts: int) -> None:
    made, said = [], []
    for engine in ("duckdb", "spark"):
        write_graph(tmp_path / engine, dangling=True)
        options = {"engine": engine, "parts": parts, "drop_dangling": True, "master": "local[2]", "memory": MEMORY}
        _, report = build_here(tmp_path / engine, GRAPH, **options)
        made.append(contents(tmp_path / engine / "out.store"))
        said.append((report.nodes, report.edges, report.dropped))
    assert made[0] == made[1]
    assert said[0] == said[1]
    assert said[0][2]['edges."author writes paper"'] == 3


@on_spark("tiny_ranges")
def test_edges_of_unknown_nodes_are_told_as_by_duckdb(tmp_path: Path) -> None:
    told = []
    for engine in ("duckdb", "spark"):
        write_graph(tmp_path / engine, dangling=True)
        with pytest.raises(DataError) as error:
            build_here(tmp_path / engine, GRAPH, engine=engine, master="local[2]", memory=MEMORY)
        told.append(str(error.value).replace(str(tmp_path / engine), ""))
        assert not (tmp_path / engine / "out.store").exists()
        assert not list((tmp_path / engine).glob(".out*"))
    assert told[0] == told[1]
    assert "row" in told[0]


def once_bad(error: type[HoploomError], folder: Path, number: int, batches: Any) -> int:
    """A task that says each time that it runs; that of partition 1 fails."""
    with (folder / f"task-{number}").open("a") as file:
        file.write("ran\n")
    deque(batches, maxlen=0)
    if number == 1:
        raise error("row 3 of it is bad")
    return number


@on_spark("tiny_ranges")
def test_spark_tries_again_where_that_may_help(tmp_path: Path) -> None:
    """A disk may answer the next time, so a task fails four times before the job does."""
    from hoploom.ingest.spark.session import spark_session

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with spark_session(tmp_path, 1 << 30, "local[2, 4]", {"spark.ui.enabled": "false"}) as session:
        for error, runs in ((DataError, 4), (StoreError, 4)):
            folder = tmp_path / error.__name__
            folder.mkdir()
            task = partial(once_bad, error, folder)
            with pytest.raises(error, match=r"^row 3 of it is bad$"):
                frames.run_tasks(frames.one_row_each(session, 3), 3, task)
            assert (folder / "task-1").read_text().count("ran") == runs


@on_spark("tiny_ranges")
def test_a_store_in_a_bucket_is_fetched_as_it_would_be_built_here(tmp_path: Path, bucket: str) -> None:
    write_graph(tmp_path / "graph")
    build_here(tmp_path / "graph", GRAPH, parts=2)
    (tmp_path / "graph" / "graph.toml").write_text(GRAPH)
    # a process of its own: executors have the environment of the process that has started Spark
    command = [sys.executable, "-m", "hoploom", "build", str(tmp_path / "graph" / "graph.toml")]
    command += ["-o", f"{bucket}/there", "--engine", "spark", "--master", "local[2]", "--memory", "1GB", "--parts", "2"]
    subprocess.run(command, check=True, timeout=250)
    fetch(StoragePath(f"{bucket}/there"), tmp_path / "fetched")
    assert contents(tmp_path / "fetched") == contents(tmp_path / "graph" / "out.store")
    left = {name.split("/")[0] for name, _ in StoragePath(f"{bucket}/there").names()}
    assert left == {"part-00000", "part-00001", "store.json"}
    again = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert again.returncode == 2
    assert f"{bucket}/there exists; give another path, or remove it first" in again.stderr


@pytest.mark.slow
def test_a_bucket_has_one_writer_at_a_time(bucket: str) -> None:
    place, table = StoragePath(f"{bucket}/left"), "part-00000-8a9f.parquet"  # as Spark names its own files
    for name in ("part-00000/x.npy", "staging-4/mine.txt", table):
        with place.create(name) as file:
            file.write(b"left")
    with pytest.raises(StoreError, match="holds part-00000 of a build"), opened_target(place.url):
        pass
    place.remove("part-00000")
    with opened_target(place.url) as opened:
        with opened.staging.create("pieces/a") as file:
            file.write(b"a")
        with pytest.raises(StoreError, match="holds hoploom-writes of a build"), opened_target(place.url):
            pass
        opened.described = Schema((), (), homogeneous=False), ()
    assert {name for name, _ in place.names()} == {table, "staging-4/mine.txt", "store.json"}


@pytest.mark.slow
def test_a_writer_that_lost_its_bucket_to_another_removes_nothing(bucket: str) -> None:
    place = StoragePath(f"{bucket}/both")
    with ExitStack() as stack:
        opened = stack.enter_context(opened_target(place.url))
        opened.described = Schema((), (), homogeneous=False), ()
        for name in (MARKER, "part-00000/x.npy"):
            with place.create(name) as file:
                file.write(b"theirs")
        with pytest.raises(StoreError, match="another process writes"):
            stack.close()
    assert {name for name, _ in place.names()} == {MARKER, "part-00000/x.npy"}


@on_spark()
@pytest.mark.parametrize("damaged", ["nodes", "edges"])
def test_a_damaged_file_is_named(damaged: str, tmp_path: Path) -> None:
    folder = tmp_path / "50% off"
    folder.mkdir()
    text = '[nodes.node]\nfiles = "nodes.parquet"\nid = "id"\n'
    text += '[edges."node to node"]\nfiles = "edges.parquet"\nsource = "id"\ndestination = "id"\n'
    for name in ("nodes", "edges"):
        ids = torch.randperm(5000, generator=torch.Generator().manual_seed(1)).numpy()
        pq.write_table(pa.table({"id": ids}), folder / f"{name}.parquet", compression="gzip", use_dictionary=False)
    with (folder / f"{damaged}.parquet").open("r+b") as file:
        file.seek(300)
        file.write(b"\x55" * 300)
    with pytest.raises(DataError, match=rf"/50% off/{damaged}.parquet cannot be read; it is damaged or cut short"):
        build_here(folder, text, engine="spark", parts=2, master="local[1]", memory=MEMORY)


FEATURES, INT64 = Field("float32", (3,)), Field("int64")
PIECE = 10 * FEATURES.row_bytes  # bytes of the features that a task has written


def expected() -> dict[str, bytes]:
    """Every file as NumPy writes it. Rows are their numbers; the k-th node of an indptr has k edges."""
    edges = np.arange(40).cumsum()
    arrays = {
        "x.npy": np.arange(120, dtype=np.float32).reshape(40, 3),
        "csc.indptr.npy": np.concatenate([[0], edges]),
        "one/split.npy": np.arange(7),
        "none/csc.indptr.npy": np.zeros(1, np.int64),
        "none/split.npy": np.zeros(0, np.int64),
    }
    made = {}
    for name, array in arrays.items():
        np.save(file := io.BytesIO(), array)
        made[name] = file.getvalue()
    return made


def pieces(staging: StoragePath) -> list[WholeFile]:
    """Four ranges of ten nodes; the second half of the third has none."""
    found: dict[str, list[Piece]] = {"x.npy": [], "csc.indptr.npy": [], "one/split.npy": []}
    edges = []
    for number, (begin, end) in enumerate(((0, 10), (10, 20), (20, 20), (20, 40))):
        with PieceWriter(staging, number) as writer:
            writer.append("x.npy", FEATURES, torch.arange(3 * begin, 3 * end, dtype=torch.float32).view(-1, 3))
            writer.finish("x.npy", FEATURES)
            counts = torch.arange(begin, end)
            writer.append("csc.indptr.npy", INT64, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))
            writer.finish("csc.indptr.npy", INT64)
            if number == 1:
                writer.append("one/split.npy", INT64, torch.arange(7))
                writer.finish("one/split.npy", INT64)
        edges.append(int(counts.sum()))
        for name, piece in writer.pieces.items():
            found[name].append(piece)
    return [
        WholeFile("x.npy", FEATURES, tuple(found["x.npy"])),
        WholeFile("csc.indptr.npy", INT64, tuple(found["csc.indptr.npy"]), tuple(accumulate(edges[:-1], initial=0))),
        WholeFile("one/split.npy", INT64, tuple(found["one/split.npy"])),
        WholeFile("none/csc.indptr.npy", INT64, ()),
        WholeFile("none/split.npy", INT64, ()),
    ]


@pytest.fixture
def staging(tmp_path: Path) -> StoragePath:
    (tmp_path / "staging").mkdir()
    return StoragePath(str(tmp_path / "staging"))


@pytest.fixture
def target(tmp_path: Path) -> StoragePath:
    (tmp_path / "target").mkdir()
    return StoragePath(str(tmp_path / "target"))


def as_sent(answer: Any) -> Any:
    return json.loads(json.dumps(answer))


def read(place: StoragePath) -> dict[str, bytes]:
    found = {}
    for name, _ in place.names():
        with place.open(name) as file:
            found[name] = file.read()
    return found


def entries(files: dict[str, bytes]) -> dict[str, FileEntry]:
    return {name: FileEntry(len(raw), zlib.crc32(raw)) for name, raw in files.items()}


@pytest.mark.parametrize("size", [1, PIECE, 1 << 30])
def test_tasks_of_any_size_make_the_same_files(
    staging: StoragePath, target: StoragePath, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "TASK_BYTES", size)
    monkeypatch.setattr(joining, "SMALL", 1)
    files = pieces(staging)
    tasks = join_tasks(files, 1)
    write_plan(staging, "plan", tasks)
    task = JoinTask(staging, target, "plan")
    answers = {number: as_sent(task.write(number, None)) for number in reversed(range(len(tasks)))}
    task.write(0, None)  # it was slow, and another one had taken its place
    made = joined_files(staging, files, tasks, [answers[number] for number in range(len(tasks))])
    assert read(target) == expected()
    assert made == entries(expected())


def test_small_files_share_tasks_and_large_ones_have_their_own() -> None:
    piece = Piece("a", 1000, 8000, 0)
    small = [WholeFile(f"small{number}", INT64, (piece,)) for number in range(512)]
    assert len(join_tasks([*small, large(4)], 1)) == 5  # each costs as much as 2 MB
    assert [len(task) for task in join_tasks([large(2), large(2), large(1), large(1)], 2)] == [1, 1, 2]


def large(num_pieces: int) -> WholeFile:
    return WholeFile("large", INT64, tuple(Piece(str(number), 1 << 23, 1 << 26, 0) for number in range(num_pieces)))


def test_late_tasks_make_no_folders_of_a_store_that_is_gone(staging: StoragePath, tmp_path: Path) -> None:
    write_plan(staging, "plan", join_tasks(pieces(staging), 1))
    gone = StoragePath(str(tmp_path / "gone"))
    with pytest.raises(StoreError, match="there is no such file"):
        JoinTask(staging, gone, "plan").write(0, None)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("name", ["x.npy", "csc.indptr.npy"])
def test_a_piece_that_has_changed_is_noticed(staging: StoragePath, target: StoragePath, name: str) -> None:
    files = pieces(staging)
    tasks = join_tasks(files, 1)
    write_plan(staging, "plan", tasks)
    (piece,) = [piece for file in files if file.name == name for piece in file.pieces[3:]]
    path = Path(staging.url) / piece.name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    task = JoinTask(staging, target, "plan")
    answers = [as_sent(task.write(number, None)) for number in range(len(tasks))]
    with pytest.raises(StoreError, match=rf"{name}/000003 is not what was written; check the disk"):
        joined_files(staging, files, tasks, answers)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=rf"{name}/000003 is cut short; check the disk"):
        [task.write(number, None) for number in range(len(tasks))]


@pytest.mark.slow
def test_in_a_bucket_the_files_are_the_same(bucket: str) -> None:
    staging, target = StoragePath(f"{bucket}/staging"), StoragePath(f"{bucket}/target")
    files = pieces(staging)
    tasks = join_tasks(files, 1)
    write_plan(staging, "plan", tasks)
    task = JoinTask(staging, target, "plan")
    answers = [as_sent(task.write(number, None)) for number in range(len(tasks))]
    assert joined_files(staging, files, tasks, answers) == entries(expected()) == entries(read(target))


def test_what_a_killed_task_was_writing_is_no_file_of_the_store(tmp_path: Path) -> None:
    with opened_target(tmp_path / "out.store") as target:
        writing = target.place.create("part-00000/nodes/node/x.npy")
        writing.__enter__().write(b"half")
        target.described = Schema((NodeType("node", 0),), (), True), (PartRange((0,), (0,), (), (), {}),)
    assert [path.name for path in (tmp_path / "out.store").rglob("*") if path.is_file()] == ["store.json"]
