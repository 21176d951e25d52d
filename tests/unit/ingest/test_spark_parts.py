"""What Spark's executors write is what one process with DuckDB writes, however small the ranges."""

import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.object_store import object_store
from support.stores import contents
from support.tables import IDS, build_here, needs_spark, on_spark, shuffled, write_table

from hoploom.errors import DataError, HoploomError, StoreError
from hoploom.schema import Schema
from hoploom.store.fetch import fetch
from hoploom.store.storage_path import StoragePath

pytest.importorskip("pyspark")
from pyspark import cloudpickle

from hoploom.ingest.spark import frames, joining, target
from hoploom.ingest.spark.frames import Ranges, leading_there, murmur3, ranges_for

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
def short_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", prepend=" ")


@pytest.fixture
def tiny_ranges(monkeypatch: pytest.MonkeyPatch, short_java: None) -> None:
    monkeypatch.setattr(frames, "LEAST_ROWS", 7)
    monkeypatch.setattr(joining, "TASK_BYTES", 264)  # most files have two ranges, which end inside pieces
    monkeypatch.setattr(joining, "SMALL", 8)


def test_every_partition_has_a_number_whose_hash_leads_there() -> None:
    assert murmur3(np.array([0, 1, 42], np.int32)).tolist() == [
        933211791,
        -559580957,
        29417773,
    ]  # Spark: SELECT hash(…)
    for count in (1, 2, 7, 300):
        leading = np.array(leading_there(count), np.int32)
        assert np.remainder(murmur3(leading), count).tolist() == list(range(count))


def test_ranges_cover_all_ids_in_whole_steps() -> None:
    for num_ids, num_rows, memory, tasks, step in (
        (1000, 10**6, 1 << 20, 4, 64),
        (7, 3, 1 << 30, 2, 1),
        (1, 0, 1, 1, 8),
    ):
        ranges = ranges_for(num_ids, num_rows, 16, memory, tasks, step)
        limits = [ranges.limits(number) for number in range(ranges.count)]
        assert limits[0][0] == 0
        assert limits[-1][1] == num_ids
        assert [begin for begin, _ in limits[1:]] == [end for _, end in limits[:-1]]
        assert all(begin % step == 0 for begin, _ in limits)
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


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with object_store(tmp_path_factory.mktemp("moto") / "log") as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.variables.items():
            patch.setenv(name, value)
        yield store.new_bucket()


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
    with (
        pytest.raises(StoreError, match="holds part-00000 of a build"),
        target.opened_target(place.url),
    ):
        pass
    place.remove("part-00000")
    with target.opened_target(place.url) as opened:
        with opened.staging.create("pieces/a") as file:
            file.write(b"a")
        with pytest.raises(StoreError, match="holds hoploom-writes of a build"), target.opened_target(place.url):
            pass
        opened.described = Schema((), (), homogeneous=False), ()
    assert {name for name, _ in place.names()} == {table, "staging-4/mine.txt", "store.json"}


@pytest.mark.slow
def test_a_writer_that_lost_its_bucket_to_another_removes_nothing(bucket: str) -> None:
    place = StoragePath(f"{bucket}/both")
    with ExitStack() as stack:
        opened = stack.enter_context(target.opened_target(place.url))
        opened.described = Schema((), (), homogeneous=False), ()
        for name in (target.MARKER, "part-00000/x.npy"):
            with place.create(name) as file:
                file.write(b"theirs")
        with pytest.raises(StoreError, match="another process writes"):
            stack.close()
    assert {name for name, _ in place.names()} == {target.MARKER, "part-00000/x.npy"}


@on_spark("short_java")
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
