"""What measures stores larger than memory: the batches made in time count, the limit holds, ours need no peer."""

import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from support import ROOT

BOUND = 4.0  # seconds: Python has started and spoken by then, on a busy machine too
TWO_BATCHES = """
import json, os, threading
for said in ({"opened": 0.5}, {"seconds": 1.0}, {"seconds": 3.0}):
    print(json.dumps(said), flush=True)
print('{"secon', end="", flush=True)
"""


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/disk.py"""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import disk

    return disk


@pytest.mark.parametrize(
    ("at_last", "ending"),
    [
        ("", ""),
        ("threading.Event().wait()", "until it was stopped"),
        ("os.kill(os.getpid(), 9)", "until it was killed"),
    ],
)
def test_the_batches_that_a_contender_made_in_time_count(disk: ModuleType, at_last: str, ending: str) -> None:
    done = disk.said_by([sys.executable, "-c", TWO_BATCHES + at_last], BOUND)
    assert (done.opened, len(done.batches), done.seconds) == (0.5, 2, 1.5)
    assert done.ending.strip().startswith(ending)
    assert bool(done.ending) == bool(ending)


def test_a_contender_that_makes_no_batch_in_time_took_at_least_all_of_it(disk: ModuleType) -> None:
    done = disk.said_by(
        [sys.executable, "-c", "import threading; print('{\"opened\": 0.25}', flush=True); threading.Event().wait()"],
        BOUND,
    )
    assert done.seconds == BOUND - 0.25


def test_a_process_gets_no_more_memory_or_disk_than_its_group(disk: ModuleType, tmp_path: Path) -> None:
    takes = [sys.executable, "-c", "bytearray(200 << 20)"]
    try:
        with disk.memory_group.limited(100 << 20) as group:
            killed = subprocess.run(group.command(takes), timeout=60).returncode
            assert killed == -9
        slow = disk.memory_group.Disk(ROOT, 100, 1 << 20)
        with disk.memory_group.limited(400 << 20, slow) as roomier:
            assert subprocess.run(roomier.command(takes), timeout=60).returncode == 0
            file = tmp_path / "file"
            file.write_bytes(bytes(1 << 20))
            begin = time.perf_counter()
            subprocess.run(roomier.command(["dd", f"if={file}", "of=/dev/null", "bs=4k", "iflag=direct"]), check=True)
            assert time.perf_counter() - begin > 1  # 256 requests, 100 a second
    except disk.memory_group.GroupError as error:
        pytest.skip(str(error))
    assert not any(folder.exists() for folder in group.folders)


@pytest.mark.slow
def test_ours_is_measured_where_no_peer_is(disk: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPLOOM_BENCH_DIR", str(tmp_path))
    monkeypatch.delenv("HOPLOOM_PEERS", raising=False)
    monkeypatch.setattr(disk.graph, "WIDE", disk.graph.Shape(500_000, 12, 16))  # 5,000 nodes where tiny
    monkeypatch.setattr(disk, "CASES", (disk.Case(160, [3, 2], 32, 10.0, 60.0, 0, 0),))
    monkeypatch.setattr(disk, "ROUNDS", 1)
    monkeypatch.setattr(disk, "DROP", tmp_path / "drop")
    found = disk.measure(True)
    assert [row.baseline for row in found.rows][:4] == ["-", *(other.title for other in disk.OTHERS[:3])]
    assert all(0 < row.ours.median < 10 for row in found.rows)
    assert "PyG, mapped" in found.absent
    assert "GraphBolt, DiskBasedFeature" in found.absent
    assert sum(": 4 batches, " in note for note in found.notes) == 4
