"""Partitioning takes a few numbers per node and chunks of the rest, however wide the rows are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_store_maps import mapped_kilobytes, save_sparse, touch_every_page

import hoploom
from hoploom.partition.reading import Reopened, edge_spans, pieces, read_store

pytestmark = pytest.mark.usefixtures("no_sync")

MEMORY = 600 << 20
PARTITION = """
import json, os, sys
from pathlib import Path
os.fsync = lambda descriptor: None
from hoploom.partition.partition import partition

partition(sys.argv[1], sys.argv[2], 3, method="hash", seeds=None, memory=int(sys.argv[3]))
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
print(json.dumps(int(peak.split()[1]) * 1024))
"""


@pytest.mark.slow  # near a gigabyte is written, twice
def test_a_store_larger_than_the_memory_is_partitioned_within_it(tmp_path: Path) -> None:
    store = save_sparse(tmp_path / "store", 300_000, 700)  # 840 MB
    command = [sys.executable, "-c", PARTITION, store, tmp_path / "parts", MEMORY]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=True)
    assert 200 << 20 < json.loads(done.stdout) < MEMORY
    parts = hoploom.open(tmp_path / "parts").parts
    assert [part.num_nodes[0] > 99_000 for part in parts] == [True] * 3


def test_a_store_is_opened_again_when_its_pages_weigh_too_much(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path / "store", 10_000, 500)  # 20 MB
    roomy, tight = Reopened(folder, 1 << 40), Reopened(folder, 1)
    kept = roomy.store
    touch_every_page(kept)
    assert roomy.store is kept
    del kept, roomy
    touch_every_page(tight.store)
    assert mapped_kilobytes(folder)["Rss"] > 19 * 1024
    assert tight.store.schema.node_types[0].num_nodes == 10_000
    assert mapped_kilobytes(folder)["Rss"] < 1024


def test_reading_a_store_maps_none_of_it(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path / "store", 10_000, 500)  # 20 MB
    reader = read_store(folder)
    for begin, end in pieces(10_000, 2000):
        rows = reader.rows(0, "node", "x", begin, end)
        assert rows.shape == (end - begin, 500)
        assert rows.nbytes <= 4 << 20
    assert list(edge_spans(reader, 0, 0, 8)) == []
    assert mapped_kilobytes(folder)["Rss"] == 0
