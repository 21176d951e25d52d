"""`hoploom build` and imports keep their memory, and a killed build leaves nothing: processes seen from outside."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import csv
from support import raw_layouts
from support.stores import contents
from support.watched import watched

import hoploom
from hoploom import ops
from hoploom.cli import main
from hoploom.ingest.tables.build import engine_share
from hoploom.store.check import problems
from hoploom.system import resident_bytes

NUM_NODES, NUM_EDGES, NUM_FEATURES, NUM_CLASSES = 111_059_956, 1_615_685_872, 128, 172
LABELLED = 0.014
ROWS = 1 << 16  # written at once
RECIPE = """
[nodes.node]
files = "papers/*.parquet"
id = "paper"
features = ["embedding"]
label = "venue"
num_classes = 172
split = "fold"

[edges."node to node"]
files = "cites/*.parquet"
source = "citing"
destination = "cited"
"""


def write_papers(folder: Path, scale: float, files: int = 4) -> int:
    """Write the tables and graph.toml; returns how many bytes of values they hold."""
    num_nodes, num_edges = int(NUM_NODES * scale), int(NUM_EDGES * scale)
    for name, count, chunk in (("papers", num_nodes, paper_chunk), ("cites", num_edges, cite_chunk)):
        (folder / name).mkdir(parents=True)
        bounds = [count * number // files for number in range(files + 1)]
        for number in range(files):
            path = folder / name / f"{number:03d}.parquet"
            spans = range(bounds[number], bounds[number + 1], ROWS)
            schema = chunk(0, 1, num_nodes).schema
            with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as file:
                for begin in spans:
                    file.write_table(chunk(begin, min(begin + ROWS, bounds[number + 1]), num_nodes))
    (folder / "graph.toml").write_text(RECIPE)
    return num_nodes * (8 + 4 * NUM_FEATURES + 8) + num_edges * 16


def paper_id(place: np.ndarray) -> np.ndarray:
    """Scattered ids, one for each place: multiplying by an odd number is a bijection on 62 bits."""
    return (place.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) & np.uint64(2**62 - 1)).astype(np.int64)


def paper_chunk(begin: int, end: int, num_nodes: int) -> pa.Table:
    """Papers by place. Feature f of paper p is (p * 31 + f) mod 1009, so that every row can be recomputed."""
    places = np.arange(begin, end)
    features = ((places[:, None] * 31 + np.arange(NUM_FEATURES)) % 1009).astype(np.float32)
    labelled = places % 1000 < 1000 * LABELLED
    venue = pa.array(places % NUM_CLASSES, mask=~labelled)
    fold = np.array(["train", "val", "test"])[places % 3]
    return pa.table(
        {
            "paper": paper_id(places),
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), NUM_FEATURES),
            "venue": venue,
            "fold": pa.array(fold, mask=~labelled),
        }
    )


def cite_chunk(begin: int, end: int, num_nodes: int) -> pa.Table:
    edges = np.arange(begin, end)
    return pa.table({"citing": paper_id(edges % num_nodes), "cited": paper_id(cited_by(edges, num_nodes))})


def cited_by(edges: np.ndarray, num_nodes: int) -> np.ndarray:
    """Edges by number: paper e mod n cites a paper nearby, or one of a few hubs."""
    far = (edges * 7919 + edges // num_nodes) % num_nodes
    return np.where(edges % 8 == 0, edges // 8 % max(1, num_nodes // 1000), far)


MB = 1 << 20


def build(folder: Path, out: str, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "hoploom", "build", str(folder / "graph.toml"), "-o", str(folder / out), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def check_papers(store: hoploom.Store, num_nodes: int) -> None:
    ids = torch.cat([part.tables["node", "original_id"].rows for part in store.parts])
    place_of = paper_id(np.arange(num_nodes))
    order = np.argsort(place_of)
    places = torch.from_numpy(order[np.searchsorted(place_of[order], ids.numpy())])
    x = torch.cat([part.tables["node", "x"].rows for part in store.parts])
    assert torch.equal(x[:, 5], ((places * 31 + 5) % 1009).float())
    labelled = places % 1000 < 14
    y = torch.cat([part.tables["node", "y"].rows for part in store.parts])
    assert torch.equal(y, torch.where(labelled, places % NUM_CLASSES, -1))
    assert torch.equal(store.split("val"), torch.nonzero(labelled & (places % 3 == 1)).view(-1))
    degrees = torch.cat([part.lists[0].indptr.diff() for part in store.parts])
    expected = np.bincount(cited_by(np.arange(store.schema.relations[0].num_edges), num_nodes), minlength=num_nodes)
    assert np.array_equal(degrees.numpy(), expected[places.numpy()])


def test_a_build_that_is_killed_leaves_what_the_next_one_clears(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_papers(tmp_path, 1 / 5000)
    here = ["build", str(tmp_path / "graph.toml"), "-o"]
    assert main([*here, str(tmp_path / "whole.store")]) == 0
    for number, seconds in enumerate((0.0, 0.6)):
        killed = build(tmp_path, "again.store")
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".again.store.partial-*")) and killed.poll() is None:
            assert time.monotonic() < deadline
            threading.Event().wait(0.002)
        with suppress(subprocess.TimeoutExpired):
            killed.wait(seconds)
        killed.send_signal(signal.SIGKILL)
        if killed.wait(60) == 0:
            break  # it was faster
        assert not (tmp_path / "again.store").exists()
        assert len(list(tmp_path.glob(".again.store.partial-*"))) == 1, number  # the one before was cleared
    else:
        assert main([*here, str(tmp_path / "again.store")]) == 0
    assert not list(tmp_path.glob(".again*"))
    assert contents(tmp_path / "again.store") == contents(tmp_path / "whole.store")
    check_papers(hoploom.open(tmp_path / "again.store"), int(NUM_NODES / 5000))
    assert main([*here, str(tmp_path / "again.store")]) == 2
    assert "exists; give another path" in capsys.readouterr().err


def test_what_the_process_has_freed_is_not_counted() -> None:
    """A process that has trained keeps what it frees; a build in it has all of its own memory."""
    ops.keep_freed_memory()
    rows = [torch.ones(1000, 100) for _ in range(1000)]
    del rows
    held = resident_bytes()
    share = engine_share(held + 500 * MB)
    assert held - resident_bytes() > 300 * MB
    assert share > 300 * MB


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("scale", "share"), [(1 / 50, 2.6), (1 / 13, 10)])
def test_memory_is_kept_at_papers_proportions(tmp_path: Path, scale: float, share: float) -> None:
    """At 1/50 a tenth of the input would be less than the libraries take; a tenth is tested on more."""
    assert_kept(tmp_path, max(int(write_papers(tmp_path, scale) / share), least_memory(tmp_path)))
    if scale < 1 / 40:
        check_papers(hoploom.open(tmp_path / "out.store"), int(NUM_NODES * scale))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_least_memory_that_is_taken_is_enough_at_papers_proportions(tmp_path: Path) -> None:
    """Rows of 512 bytes in groups of 34 MB, which a join that spills holds two of."""
    write_papers(tmp_path, 1 / 100)
    assert_kept(tmp_path, least_memory(tmp_path))


def least_memory(folder: Path) -> int:
    """Return the least that a build takes here: how much the libraries hold differs from machine to machine."""
    command = [sys.executable, "-m", "hoploom", "build", "graph.toml", "-o", "out.store", "--memory", "64MB"]
    least = re.search(r"give at least (\d+) MB", watched(command, folder).said)
    return (int(least[1]) + 5) * 10**6  # another process may take a little more


# A process counts what the one that started it held: this one starts with next to nothing, unlike pytest.
def assert_kept(folder: Path, limit: int) -> None:
    command = [sys.executable, "-m", "hoploom", "build", "graph.toml", "-o", "out.store", "--memory", str(limit)]
    build = watched(command, folder)
    assert build.code == 0, build.said
    print(f"limit {limit / MB:.0f} MB, peak {build.peak / MB:.0f} MB")
    assert build.peak <= limit
    assert list(problems(folder / "out.store")) == []


def write_wide(folder: Path) -> str:
    """Lists of numbers in one row group, as pyarrow writes them unasked: 184 MB that an engine reads at once."""
    count, width = 45_000, 1024
    values = np.random.default_rng(0).standard_normal(count * width, np.float32)
    table = pa.table({"id": np.arange(count) * 3, "v": pa.FixedSizeListArray.from_arrays(values, width)})
    pq.write_table(table, folder / "nodes.parquet")
    return 'files = "nodes.parquet"\nfeatures = "v"'


def write_csv(folder: Path) -> str:
    count, rng = 1_000_000, np.random.default_rng(0)
    columns = {f"v{number}": rng.integers(0, 10**6, count) / 1000 for number in range(20)}
    csv.write_csv(pa.table({"id": np.arange(count) * 3, **columns}), folder / "nodes.csv")
    return 'files = "nodes.csv"\nfeatures = "v*"'


def write_words(folder: Path) -> str:
    words = [f"{number:09d}" for number in range(950_000)]
    pq.write_table(pa.table({"id": np.arange(len(words)) * 3, "v": words}), folder / "nodes.parquet")
    return 'files = "nodes.parquet"\nlabel = "v"\ncolumns.v.categories = "codes"'


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("write", [write_wide, write_csv, write_words])
def test_memory_is_kept_near_the_least_that_is_taken(tmp_path: Path, write: Callable[[Path], str]) -> None:
    keys = write(tmp_path)
    pq.write_table(pa.table({"s": [0, 3], "d": [3, 6]}), tmp_path / "edges.parquet")
    edges = '[edges."node to node"]\nfiles = "edges.parquet"\nsource = "s"\ndestination = "d"\n'
    (tmp_path / "graph.toml").write_text(f'[nodes.node]\nid = "id"\n{keys}\n{edges}')
    assert_kept(tmp_path, least_memory(tmp_path))


BEYOND = 222 << 20  # bytes that an import gets beyond Python, torch and pyarrow; PyG and pandas take 200 MB more
SCRIPT = """
import re, sys
from hoploom.ingest.formats import import_ogb
import pyarrow.parquet, pyarrow.csv
def peak():  # not ru_maxrss, which begins with that of the parent
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) << 10
limit = peak() + int(sys.argv[4])
import_ogb(*sys.argv[1:4], memory=limit)
print(limit, peak())
"""


def papers(root: Path) -> Path:
    """Write the raw folder of ogbn-papers100M at a hundredth."""
    (root / "raw").mkdir(parents=True)
    num_nodes, edge = NUM_NODES // 100, np.arange(NUM_EDGES // 100)
    np.savez(
        root / "raw" / "data.npz",
        edge_index=np.stack([edge * 7919 % num_nodes, edge * 104729 % num_nodes]),
        num_nodes_list=np.array([num_nodes]),
        num_edges_list=np.array([len(edge)]),
        node_feat=np.zeros((num_nodes, NUM_FEATURES), np.float32),
        node_year=np.zeros((num_nodes, 1), np.int64),
    )
    np.savez(root / "raw" / "node-label.npz", node_label=np.zeros((num_nodes, 1), np.float32))
    for number, name in enumerate(("train", "valid", "test")):
        raw_layouts.write_csv(root / "split" / "time" / f"{name}.csv.gz", raw_layouts.column([number]))
    return root


@pytest.mark.parametrize("imported", ["hoploom.ingest.formats", "hoploom.cli.serving"])
def test_importers_and_servers_of_parts_do_without_pyg(imported: str) -> None:
    """It takes 200 MB, and seconds."""
    script = f"import sys, {imported}; print({{'torch_geometric', 'pandas'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.slow
def test_papers_at_a_hundredth_keep_to_less_memory_than_their_size(tmp_path: Path) -> None:
    folder = papers(tmp_path / "papers")
    given = ["ogbn-papers100M", str(folder), str(tmp_path / "out"), str(BEYOND)]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *given], capture_output=True, text=True, check=True)
    limit, peak = map(int, done.stdout.split()[-2:])
    assert (folder / "raw" / "data.npz").stat().st_size > limit * 1.4
    assert peak <= limit
