"""Kernels compile for real GPUs, ahead of time and without one; and what comes out is what results depend on.

Triton's interpreter takes programs that its compiler refuses, and rounds as numpy does: only the compiler's own output
shows that nothing was fused. Not shown here: that the machine code does on a GPU what the interpreter did.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import TESTS
from support.kernel_calls import started

WORKER = TESTS / "support" / "compile_workers.py"
SHARED_MEMORY = {"sm_90": 227 << 10, "sm_80": 163 << 10, "gfx942": 64 << 10}  # bytes a program may take
FLOATS_OF_PICKS = ("invert_sums", "keep_lowest")  # whose float64 must be the core's, bit for bit
REDUCING = "reduce.", "messages."  # the modules whose results are the same every time, backward ones too
LITTLE = 16  # bytes of stack a thread may take: for a call, or a register or two
READING_ROWS = ("copy_rows", "sum_short", "max_short", "dot_edges", "sum_messages")
DEADLINE = 1500.0
pytestmark = pytest.mark.slow  # a compiler takes a minute

Found = dict[str, Any]


def run(cache: Path, *words: str, interpreted: bool = False) -> "subprocess.Popen[str]":
    """A worker in a process of its own: Triton decides at its import whether it interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache)} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    return subprocess.Popen([sys.executable, WORKER, *words], env=environment, stdout=subprocess.PIPE, text=True)


def compile_all(cache: Path, target: str, *file: str, processes: int = 2) -> list[Found]:
    """What a target's compiler made of every launch; each process takes its share."""
    shares = [run(cache, "compile", target, str(share), str(processes), *file) for share in range(processes)]
    said = [share.communicate(timeout=DEADLINE)[0] for share in shares]
    assert not any(share.returncode for share in shares)
    return [found for text in said for found in json.loads(text)]


@pytest.fixture(scope="module")
def cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels by source and version: what has not changed is not compiled again."""
    kept = getattr(pytestconfig, "cache", None)  # None: pytest was told to keep nothing
    return tmp_path_factory.mktemp("triton") if kept is None else Path(kept.mkdir("triton"))


@pytest.fixture(scope="module")
def compiled(cache: Path) -> list[Found]:
    """Every kernel once, for an H100 or H200."""
    found = compile_all(cache, "sm_90", processes=1)  # most of its time is importing, once the cache is there
    assert [one for one in found if "error" in one] == []
    return found


def named(found: Sequence[Found], names: Sequence[str]) -> list[Found]:
    chosen = [one for one in found if one["kernel"].split(".")[-1] in names]
    assert {one["kernel"].split(".")[-1] for one in chosen} == set(names)
    return chosen


def spilt(found: Sequence[Found]) -> list[Found]:
    return [one for one in found if one.get("stack", 0) > LITTLE]


def fused(found: Sequence[Found]) -> list[Found]:
    """Where a product and a sum are rounded once; exp, of softmax's forward, is made of such."""
    return [one for one in found if one.get("fused") and one["kernel"] != "reduce.soften"]


def test_every_kernel_compiles_for_a_gpu_and_keeps_what_results_depend_on(compiled: list[Found]) -> None:
    """What a thread holds fits into registers, nothing is fused, rows are read by 16 bytes, sums take no atomics."""
    assert {one["kernel"] for one in compiled} >= started() != set()
    assert all(one["shared"] <= SHARED_MEMORY["sm_90"] for one in compiled)
    assert (spilt(compiled), fused(compiled)) == ([], [])
    assert all(one["has_float64"] for one in named(compiled, FLOATS_OF_PICKS))
    assert all(one["reads_16_bytes"] for one in named(compiled, READING_ROWS))
    reducing = [one for one in compiled if one["kernel"].startswith(REDUCING)]
    assert {"reduce.soften", "reduce.soften_backward"} < {one["kernel"] for one in reducing}
    assert [one for one in reducing if one["atomics"]] == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_every_launch_of_the_tests_compiles_for_every_gpu(target: str, launches: str, cache: Path) -> None:
    found = compile_all(cache, target, launches)
    assert {one["kernel"] for one in found} >= started()
    assert [one for one in found if "error" in one] == []
    assert all(one["shared"] <= SHARED_MEMORY[target] for one in found)
    assert (spilt(found), fused(found)) == ([], [])


@pytest.fixture(scope="module")
def launches(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with every launch that the other tests of kernels make."""
    file = tmp_path_factory.mktemp("launches") / "launches.jsonl"
    tests = [str(path) for path in Path(__file__).parent.glob("test_kernels_*.py") if path.name != Path(__file__).name]
    worker = run(cache, "record", str(file), *tests, interpreted=True)
    said = worker.communicate(timeout=DEADLINE)[0]
    assert worker.returncode == 0, said[-2000:]
    return str(file)
