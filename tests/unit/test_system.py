"""What a process of ours does about its imports, and how much memory and how many cores it may use.

Its limits are in files as the kernel writes them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hoploom.system import available_memory, memory_limit, num_cores

SCRIPT = """
import atexit, gc, sys, types
atexit.register(lambda: print("kept" if gc.get_freeze_count() else "collected"))  # what is registered later goes first
for version in sys.argv[1:]:
    sys.modules["triton"] = types.SimpleNamespace(__version__=version)
    sys.modules["triton._C.libtriton"] = None
from hoploom.system import keep_imports
keep_imports()
assert gc.get_freeze_count()
"""


@pytest.mark.parametrize(
    ("triton", "at_the_end"),
    [([], "kept"), (["3.2.0"], "kept"), (["3.7.1"], "kept"), (["3.9.0"], "collected"), (["3.10.0"], "collected")],
)
def test_imports_are_kept_to_the_end_but_for_what_complains_of_leaks(triton: list[str], at_the_end: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *triton], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == (at_the_end, "")


HOST = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
NO_LIMIT = "9223372036854771712\n"  # as version 1 writes it

CASES: dict[str, tuple[str, dict[str, str], int]] = {
    "version 2": ("0::/job/step\n", {"job/step/memory.max": "max\n", "job/memory.max": "4096000\n"}, 4096000),
    "its own is the smallest": ("0::/job/step\n", {"job/step/memory.max": "7\n", "job/memory.max": "9\n"}, 7),
    "in a container": ("0::/\n", {"memory.max": "8192000\n"}, 8192000),
    "version 1": (
        "5:cpu:/a\n4:memory:/a/b\n0::/\n",
        {"memory/a/b/memory.limit_in_bytes": "5\n", "memory/memory.limit_in_bytes": NO_LIMIT},
        5,
    ),
    "version 1 with more": ("4:cpu,memory:/a\n", {"memory/a/memory.limit_in_bytes": "6\n"}, 6),
    "version 1 in a container": ("4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": "3\n"}, 3),
    "another group's": ("4:memory:/a\n", {"memory/b/memory.limit_in_bytes": "3\n"}, HOST),
    "no limit": ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": NO_LIMIT, "memory.max": "max\n"}, HOST),
    "no groups": ("", {}, HOST),
    "what cannot be read": ("nothing\n4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "much\n"}, HOST),
}


def group_of(folder: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """The file that tells a process's groups, and where their control files are."""
    for name, text in {"membership": membership, **{f"mounted/{name}": text for name, text in files.items()}}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "membership", folder / "mounted"


@pytest.mark.parametrize(("membership", "files", "expected"), CASES.values(), ids=CASES.keys())
def test_the_smallest_limit_of_a_processs_groups_counts(
    membership: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert memory_limit(*group_of(tmp_path, membership, files)) == expected


CORES: dict[str, tuple[str, dict[str, str], int]] = {
    "version 2": ("0::/job/step\n", {"job/step/cpu.max": "max 100000\n", "job/cpu.max": "350000 100000\n"}, 3),
    "less than a core": ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
    "version 1": ("1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "200000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 2),
    "no quota": ("1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 12),
    "more than it is bound to": ("0::/\n", {"cpu.max": "6400000 100000\n"}, 12),
    "memory's group": ("1:memory:/a\n", {"memory/a/cpu.max": "100000 100000\n"}, 12),
    "what cannot be read": ("0::/a\n", {"a/cpu.max": "much\n"}, 12),
    "no groups": ("", {}, 12),
}


@pytest.mark.parametrize(("membership", "files", "expected"), CORES.values(), ids=CORES.keys())
def test_a_containers_quota_of_cores_counts(
    membership: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)))
    assert num_cores(*group_of(tmp_path, membership, files)) == expected


def test_without_groups_it_is_the_hosts(tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "nowhere", tmp_path) == HOST
    assert 0 < memory_limit() <= HOST


@pytest.mark.parametrize(
    ("membership", "limit", "held"),
    [
        ("0::/job\n", "job/memory.max", "anon 70\nfile 5000\nshmem 30\n"),
        ("4:memory:/job\n", "memory/job/memory.limit_in_bytes", "rss 7\ntotal_rss 60\ntotal_shmem 40\n"),
    ],
)
def test_what_others_of_a_group_hold_is_not_left(membership: str, limit: str, held: str, tmp_path: Path) -> None:
    (tmp_path / "membership").write_text(membership)
    path = tmp_path / limit
    path.parent.mkdir(parents=True)
    path.with_name("memory.stat").write_text(held)
    for bytes_given, expected in ((1000, 900), (50, 0)):
        path.write_text(str(bytes_given))
        assert available_memory(tmp_path / "membership", tmp_path) == expected
    assert available_memory(tmp_path / "nowhere", tmp_path) > 1 << 20
