"""Opening a store maps its files: nothing is copied, nothing grows with the graph, processes share the pages."""

import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TESTS
from support.graphs import save_in_parts
from support.sparse_stores import mapped_kilobytes, save_sparse, touch_every_page
from support.stores import assert_same

import hoploom
from hoploom import NeighborLoader, Store
from hoploom.store.check import problems

pytestmark = pytest.mark.usefixtures("no_sync")


def test_opening_maps_the_files_and_reads_only_their_ends(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path / "store", 100_000, 500)  # 200 MB
    store = hoploom.open(folder)
    assert mapped_kilobytes(folder)["Rss"] < 1024
    assert touch_every_page(store) == 0.0
    in_memory = mapped_kilobytes(folder)
    assert in_memory["Rss"] > 190 * 1024
    assert in_memory["Private_Dirty"] < 1024  # the file's own header may not have reached the disk yet


def test_opening_a_terabyte_takes_as_long_as_opening_a_kilobyte(tmp_path: Path) -> None:
    small = save_sparse(tmp_path / "small", 1, 256)
    large = save_sparse(tmp_path / "large", 1_000_000_000, 256)
    hoploom.open(small)
    begin = time.process_time()
    hoploom.open(small)
    between = time.process_time()
    store = hoploom.open(large)
    end = time.process_time()
    assert (end - between) - (between - begin) < 0.3
    (batch,) = NeighborLoader(store, [2], input_nodes=torch.tensor([999_999_999]))
    assert batch.x.tolist() == [[0.0] * 256]


def test_writing_to_an_opened_tensor_does_not_change_the_file(ring_store: Store, tmp_path: Path) -> None:
    opened = ring_store.save(tmp_path / "store")
    opened.parts[0].tables["node", "x"].rows.fill_(-1.0)
    assert list(problems(tmp_path / "store")) == []
    assert_same(ring_store, hoploom.open(tmp_path / "store"))


SECOND_PROCESS = """
import json, sys
from pathlib import Path
import hoploom
sys.path.insert(0, sys.argv[2])
from support.sparse_stores import mapped_kilobytes, touch_every_page

def held():
    lines = map(str.split, Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {word[:-1]: int(size) for word, size, *_ in lines}

before = held()
store = hoploom.open(sys.argv[1])
touch_every_page(store)
after = held()
grown = {kind: after[kind] - before[kind] for kind in ("Private_Dirty", "Rss")}
print(json.dumps({"grown": grown, "mapped": mapped_kilobytes(sys.argv[1])}))
"""


@pytest.mark.slow  # starts a process that imports torch
def test_a_second_process_shares_every_page_and_adds_none(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path / "store", 100_000, 500)  # 200 MB
    store = hoploom.open(folder)
    touch_every_page(store)
    measured = json.loads(run(SECOND_PROCESS, folder, TESTS))
    assert measured["grown"]["Rss"] > 190 * 1024
    assert measured["grown"]["Private_Dirty"] < 8 * 1024
    assert measured["mapped"]["Private_Dirty"] < 1024
    assert measured["mapped"]["Private_Clean"] < 8 * 1024
    assert measured["mapped"]["Shared_Clean"] > 190 * 1024


def run(code: str, *arguments: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_an_open_store_holds_no_descriptor(ring_store: Store, tmp_path: Path) -> None:
    gc.collect()  # what other tests left is not closed while this one counts
    before = len(list(Path("/proc/self/fd").iterdir()))
    store = save_in_parts(ring_store, tmp_path / "ring", 20)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert len(store.parts) == 20
