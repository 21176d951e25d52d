"""What checks a GPU machine: where there is none it can only be tried out, and then claims nothing."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = ("gpu_sampling", "gpu_gathering", "gpu_epochs", "gpu_profile")
ASKED = {"benchmarks_only": True, "tests_only": False, "minutes": None, "began": 0.0}
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/gpu_check.py"""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check

    return gpu_check


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/gpu_profile.py"""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_profile

    return gpu_profile


def asked(path: Path, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"name": "try", "out": str(path), "rehearse": True, "commit": "abc"} | more)


def test_a_rehearsal_claims_no_figure(check: ModuleType) -> None:
    spread = check.report.Row("speed", "M/s", sys.modules["measure"].Spread(7.25, 7.0, 7.5, 3), "-")
    found = check.report.Report([spread], ["took 7.25"])
    assert check.figures(found, claimed=False) == {"ran": ["speed"]}
    (row,) = check.figures(found, claimed=True)["rows"]
    assert row["ours"]["median"] == 7.25


def test_results_of_the_same_commit_are_completed_those_of_another_are_not(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu-try.json"
    monkeypatch.setattr(check.report, "commit", lambda: "unknown: a copy without .git")
    check.Results(asked(path)).put("tests", "one", {"failed": 0})
    check.Results(asked(path)).put("benchmarks", "two", {"rows": []})
    assert {"tests", "benchmarks"} <= json.loads(path.read_text()).keys()
    check.Results(asked(path, commit="abd"))
    assert not {"tests", "benchmarks"} & json.loads(path.read_text()).keys()


def test_what_failed_is_counted_and_kept(check: ModuleType, tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 1 == 2\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    check.WORK = tmp_path
    found = check.run_tests(tests, "not gpu", 60.0)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert "1 == 2" in found["failures"]["test_b"]
    assert "unfinished" in check.run_tests(tests, "not gpu", 0.0)


UNFINISHED = {"unfinished": "stopped after 9 s"}


@pytest.mark.parametrize(
    ("found", "faults"),
    [
        ({}, []),
        (
            {"tests": {"a (gpu)": {"failed": 0}, "b (gpu)": {"failed": 2}, "c (gpu)": UNFINISHED}},
            ["b (gpu)", "c (gpu)"],
        ),
        ({"sanitizer": {"absent": {"said": "compute-sanitizer is not on this machine"}}}, []),
        (
            {"sanitizer": {"memcheck": {"exit": 0, "clean": True}, "racecheck": UNFINISHED}},
            ["compute-sanitizer racecheck"],
        ),
        ({"sanitizer": {"memcheck": {"exit": 86, "clean": False}}}, ["compute-sanitizer memcheck"]),
        ({"benchmarks": {"fast": {"rows": [{"met": True}]}, "slow": {"rows": [{"met": False}]}}}, []),
        ({"benchmarks": {"crashed": UNFINISHED}}, ["crashed"]),
    ],
)
def test_what_failed_or_did_not_finish_is_no_success(check: ModuleType, found: Any, faults: list[str]) -> None:
    assert check.faults(found) == faults


@pytest.mark.parametrize(("outcome", "status"), [({"rows": []}, 0), (UNFINISHED, 1)])
def test_a_benchmark_that_crashed_is_the_exit_status(
    check: ModuleType, outcome: Any, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "parsed", lambda: asked(tmp_path / "gpu-try.json", **ASKED))
    monkeypatch.setattr(check, "WORK", tmp_path)
    monkeypatch.setattr(check, "check_speed", lambda results, *_, **__: results.put("benchmarks", "one", outcome))
    assert check.main() == status


def test_a_sanitizer_that_is_stopped_is_not_clean(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check.shutil, "which", lambda name: str(tool))
    results = SimpleNamespace(found={}, put=lambda section, name, value: results.found[section].update({name: value}))
    check.check_memory(results, SimpleNamespace(left=lambda: 0.1))
    assert check.faults(results.found) == ["compute-sanitizer memcheck", "compute-sanitizer racecheck"]


def test_the_files_of_device_tests_are_found(check: ModuleType) -> None:
    native, marked = check.test_files()
    names = {path.name for path in native}
    assert {"test_kernels_sample.py", "test_on_device.py", "test_place.py", "test_padded.py"} <= names
    assert "test_kernels_compile.py" not in names
    assert {"test_place_gpu.py", "test_gpu_training.py"} <= {path.name for path in marked}
    assert "test_gpu_training.py" in names  # its small tests too
    assert Path(__file__) not in marked


def test_time_side_by_side_counts_once_and_gaps_are_what_is_left(profile: ModuleType) -> None:
    kernels = [profile.Kernel("a", 0, 10), profile.Kernel("b", 5, 15), profile.Kernel("a", 20, 30)]
    assert profile.busy(kernels) == 25
    step, gap, lines = profile.table(kernels, num_steps=2)
    assert (step, gap) == (15, 2.5)
    assert "| a | 1.0 | 10.0 | 66.7% |" in lines


@pytest.mark.slow
@without_a_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_gpu_benchmark_can_be_rehearsed(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"HOPLOOM_BENCH_DIR": str(tmp_path)}
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--tiny", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["rows"]


@pytest.mark.slow
@without_a_gpu
def test_without_a_gpu_the_check_refuses_and_says_how_to_try_it_out() -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "sees no CUDA device" in done.stderr
    assert "--rehearse" in done.stderr
