"""What a process of ours does about its imports, and how much memory it may use, by files as the kernel writes them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hoploom.system import available_memory, memory_limit

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


@pytest.mark.parametrize(("membership", "files", "expected"), CASES.values(), ids=CASES.keys())
def test_the_smallest_limit_of_a_processs_groups_counts(
    membership: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_limit(tmp_path / "membership", tmp_path / "mounted") == expected


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
