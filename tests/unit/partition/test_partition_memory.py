"""Partitioning takes a few numbers per node and chunks of the rest, however many edges and however wide the rows."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.sparse_stores import mapped_kilobytes, save_sparse
from support.watched import Watched, watched

import hoploom
from hoploom import ConfigError
from hoploom.ops import Frontier
from hoploom.ops.assign_parts import FIXED_BYTES, NODE_BYTES
from hoploom.partition.bounded_store import BoundedStore, pieces
from hoploom.partition.partition import partition
from hoploom.partition.report import report
from hoploom.schema import DTYPES, HOMOGENEOUS_RELATION, Field, NodeType, Relation, Schema
from hoploom.store import Draw
from hoploom.store import format as layout

pytestmark = pytest.mark.usefixtures("no_sync")

MB = 1 << 20
PARTITION = """
import os, sys
os.fsync = lambda descriptor: None
from hoploom.errors import ConfigError
from hoploom.partition.partition import partition

path, out, method, memory, *fanouts = sys.argv[1:]
try:
    print(partition(path, out, 3, method=method, fanouts=[int(f) for f in fanouts], memory=int(memory)))
except ConfigError as error:
    sys.exit(str(error))
"""


ASSIGN = """
import sys
from pathlib import Path
from hoploom.partition import assign
from hoploom.system import resident_bytes

before = resident_bytes()
assign(sys.argv[1], 4, seeds="train", memory=1)
lines = Path("/proc/self/status").read_text().splitlines()
print(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 - before)
"""


def save_linked(path: Path, num_nodes: int, degree: int, width: int, num_seeds: int) -> Path:
    """A store whose edges come from anywhere, whose rows are zero and take no disk space."""
    node_type = NodeType("node", num_nodes, {"x": Field("float32", (width,))}, {"train": num_seeds})
    relation = Relation(*HOMOGENEOUS_RELATION, num_nodes * degree)
    anywhere = np.random.default_rng(1).integers(0, num_nodes, 1 << 20, dtype=np.int32)
    some = anywhere.tobytes()
    values = {
        layout.node_file(0, "node", "x"): ("float32", (num_nodes, width), iter(())),
        layout.split_file(0, "node", "train"): ("int64", (num_seeds,), iter([np.arange(num_seeds).tobytes()])),
        layout.topology_file(0, relation, "indptr"): (
            "int64",
            (num_nodes + 1,),
            iter([(np.arange(num_nodes + 1) * degree).tobytes()]),
        ),
        layout.topology_file(0, relation, "indices"): (
            "int32",
            (num_nodes * degree,),
            (some for _ in range(0, num_nodes * degree, 1 << 20)),
        ),
    }
    entries = {}
    for name, (dtype, shape, chunks) in values.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as out:
            size = layout.write_npy_header(out, dtype, shape) + int(np.prod(shape)) * DTYPES[dtype].itemsize
            for chunk in chunks:
                out.write(chunk)
            out.truncate(size)
        entries[name] = layout.FileEntry(size, 0)
    part = layout.PartRange((0,), (num_nodes,), (0,), (num_nodes * degree,), {"node": {"train": num_seeds}})
    manifest = layout.Manifest(Schema((node_type,), (relation,), homogeneous=True), (part,), entries)
    (path / layout.STORE_FILE).write_text(layout.manifest_to_json(manifest))
    return path


def run(folder: Path, method: str, memory: int, *fanouts: int) -> Watched:
    paths = (folder / "store", folder / "parts")
    return watched([sys.executable, "-c", PARTITION, *map(str, (*paths, method, memory, *fanouts))])


def assert_kept(folder: Path, method: str, memory: int, *fanouts: int) -> None:
    ran = run(folder, method, memory, *fanouts)
    assert ran.code == 0, ran.said
    print(f"limit {memory / MB:.0f} MB, peak {ran.peak / MB:.0f} MB")
    assert 200 * MB < ran.peak <= memory
    assert len(hoploom.open(folder / "parts").parts) == 3


@pytest.mark.slow  # near two gigabytes are written
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["stream", "hash"])
def test_topology_and_features_larger_than_the_memory_are_partitioned_within_it(method: str, tmp_path: Path) -> None:
    save_linked(tmp_path / "store", 300_000, 560, 600, 20_000)  # 670 MB of edges, 720 MB of rows
    assert_kept(tmp_path, method, 816 * MB, 10, 5)


@pytest.mark.slow  # a graph so large that bytes per node are told from what any graph takes
@pytest.mark.timeout(900)
def test_assigning_takes_24_bytes_a_node(tmp_path: Path) -> None:
    """No node has the eight in-edges with which out-edges are not kept, and there are no clusters to find."""
    num_nodes = 12_000_000
    save_linked(tmp_path / "store", num_nodes, 4, 1, 20_000)
    ran = subprocess.run([sys.executable, "-c", ASSIGN, str(tmp_path / "store")], check=True, stdout=subprocess.PIPE)
    assert int(ran.stdout) < num_nodes * NODE_BYTES + FIXED_BYTES < num_nodes * 50


@pytest.mark.slow  # two whole runs of the command
def test_the_least_memory_that_is_named_works(tmp_path: Path) -> None:
    save_linked(tmp_path / "store", 50_000, 200, 800, 1000)  # 40 MB of edges, 160 MB of rows
    code, _, said = run(tmp_path, "stream", 1024, 4)
    assert code == 1
    found = re.search(r"memory is 1024 bytes, too little for 50000 nodes .*; give at least (\d+) \(", said)
    assert found, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
    assert_kept(tmp_path, "stream", int(found[1]), 4)


def test_memory_that_is_not_enough_is_refused_before_anything_is_done(
    ring_store: hoploom.Store, tmp_path: Path
) -> None:
    said: list[str] = []
    for memory in (1, 1024, 60 * MB):
        with pytest.raises(ConfigError, match=f"memory is {memory} bytes, too little"):
            partition(ring_store, tmp_path / "parts", 2, memory=memory, progress=said.append)
    with pytest.raises(ConfigError, match="memory is 0"):
        partition(ring_store, tmp_path / "parts", 2, memory=0)
    assert said == []
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_to_a_store_of_the_users_stays(tmp_path: Path) -> None:
    folder = save_linked(tmp_path / "store", 3000, 20, 1, 100)
    store = hoploom.open(folder)
    store.parts[0].lists[0].indices.fill_(7)
    partition(store, tmp_path / "parts", 2, fanouts=[2])
    report(store, [2], memory=1)
    assert bool((store.parts[0].lists[0].indices == 7).all())
    assert report(tmp_path / "parts", None).cuts[0].num_edges == 60_000


@pytest.mark.parametrize("memory", [1, 1 << 40])
def test_sampling_lets_go_within_a_hop_what_is_too_much(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_linked(tmp_path / "store", 100_000, 100, 1, 100)  # 40 MB
    opened = BoundedStore(folder, memory)
    seen = []

    def watched() -> None:
        seen.append(mapped_kilobytes(folder)["Rss"])
        BoundedStore.drop(opened)

    monkeypatch.setattr(opened, "drop", watched)
    nodes = Frontier(torch.arange(0, 100_000, 25))
    (picks,) = opened.store.graph.sample([nodes], Draw(1, 0, [3]))
    (expected,) = hoploom.open(folder).graph.sample([nodes], Draw(1, 0, [3]))
    assert all(torch.equal(found, want) for found, want in zip(picks, expected, strict=True))
    if memory == 1:
        assert len(seen) == -(-4000 // 256)
        assert max(seen) < 10 * 1024
    else:
        assert seen == []


def test_reading_a_store_leaves_none_of_it_in_memory(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path / "store", 10_000, 500)  # 20 MB
    opened = BoundedStore(folder, 1 << 30)
    for begin, end in pieces(10_000, 2000):
        rows = opened.rows(0, "node", "x", begin, end)
        assert rows.shape == (end - begin, 500)
        assert rows.nbytes <= 4 << 20
        assert mapped_kilobytes(folder)["Rss"] < 256
    assert list(opened.edge_spans(0, 0, 8)) == []
