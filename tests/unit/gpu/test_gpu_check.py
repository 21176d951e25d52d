"""What checks a GPU machine: where there is none it can only be tried out, and then claims nothing."""

import argparse
import json
import os
import select
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import ROOT

BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = ("gpu_sampling", "gpu_gathering", "gpu_epochs", "gpu_profile")
ASKED = {"benchmarks_only": True, "tests_only": False, "minutes": None, "began": 0.0}
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("gpu_check")


@pytest.fixture
def tests(check: ModuleType) -> ModuleType:
    return check.gpu_tests  # type: ignore[no-any-return]


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("gpu_profile")


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


TESTS = """
import os, threading
import pytest

def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.mark.timeout(1)
def test_hangs(): threading.Event().wait()
def test_bad_neighbour(): pass
def test_dies(): os.kill(os.getpid(), 9)
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.slow
def test_slow(): assert False
def test_last(): pass
"""


@pytest.mark.slow  # three processes that import torch, for a script that is run by hand
@pytest.mark.timeout(240)
def test_a_test_that_hangs_or_dies_costs_no_other(tests: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(TESTS)
    found = tests.run_file(path, 200.0, tmp_path)
    assert (found["passed"], found["failed"], found["skipped"]) == (3, 3, 1)
    assert found["failures"].keys() == {"test_bad", "test_hangs", "test_dies"}
    assert "1 == 2" in found["failures"]["test_bad"]
    assert "Timeout" in found["failures"]["test_hangs"]
    assert "exit status -9" in found["failures"]["test_dies"]
    assert "unfinished" not in found


@pytest.mark.slow
def test_a_test_without_a_device_ends_its_process(tests: ModuleType, tmp_path: Path) -> None:
    """The next one is the next process's: here none follows, as a file is given up that does not get on."""
    path = tmp_path / "test_some.py"
    path.write_text(
        "import gpu_outcomes\n"
        "def test_astray(monkeypatch):\n"
        "    gpu_outcomes._is_lost = lambda: True\n"
        "    assert False\n"
        "def test_after(): assert gpu_outcomes._is_lost() is False\n"
    )
    found = tests.run_file(path, 200.0, tmp_path)
    assert (found["passed"], found["failures"].keys()) == (1, {"test_astray"})


@pytest.mark.slow
def test_a_file_for_which_no_time_is_left_or_that_cannot_be_imported_says_so(tests: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "test_some.py"
    path.write_text("import nothing_of_this_name\n")
    assert "no time was left" in tests.run_file(path, 0.0, tmp_path)["unfinished"]
    found = tests.run_file(path, 100.0, tmp_path)
    assert found["failed"] == 1
    assert "nothing_of_this_name" in str(found["failures"])


def test_what_a_stopped_command_has_started_ends_with_it(tests: ModuleType, tmp_path: Path) -> None:
    """Its child has the same output open, and a pipe, which ends with the last who can write to it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reads = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        said = tests.run_command(["sh", "-c", f"exec 3>{pipe}; echo begun; sleep 60 & wait"], 0.5, tmp_path / "log")
        assert said == (None, "begun\n")
        assert select.select([reads], [], [], 20)[0]
        assert os.read(reads, 1) == b""
    finally:
        os.close(reads)


UNFINISHED = {"unfinished": "stopped after 9 s"}


@pytest.mark.parametrize(
    ("found", "faults"),
    [
        ({}, []),
        ({"tests": {"a": {"failed": 0}, "b": {"failed": 2}, "c": UNFINISHED}}, ["b", "c"]),
        ({"sanitizer": {"absent": {"said": "compute-sanitizer is not on this machine"}}}, []),
        ({"sanitizer": {"memcheck": {"exit": 0, "clean": True}, "race": UNFINISHED}}, ["compute-sanitizer race"]),
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


def test_a_benchmark_that_fails_keeps_the_rows_it_had_found(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spread = sys.modules["measure"].spread_of([1.0, 2.0, 3.0])
    check.gpu.found(check.report.Row("fast", "s", spread, "-"))
    (tmp_path / "some.py").write_text(f"import sys\nsys.stderr.write({capsys.readouterr().err!r})\nsys.exit(3)\n")
    monkeypatch.setattr(check, "__file__", str(tmp_path / "gpu_check.py"))
    monkeypatch.setattr(check, "WORK", tmp_path)
    found = check._benchmark("some", 100.0, tiny=False)
    assert found["unfinished"].startswith("exit status 3")
    assert [(row["question"], row["ours"]["median"]) for row in found["rows"]] == [("fast", 2.0)]


LOST = "Internal Sanitizer Error: Detected a failure to track a kernel launch"


@pytest.mark.parametrize(
    ("said", "status", "is_clean"),
    [
        ("RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, True),
        (f"{LOST}\nRACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", 86, True),
        (f"{LOST}\nRACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", 86, False),
        ("RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", 86, False),
        (LOST, 1, False),
    ],
)
def test_a_launch_that_racecheck_could_not_follow_is_no_race(
    said: str, status: int, is_clean: bool, check: ModuleType, tmp_path: Path
) -> None:
    """It counts one among the hazards."""
    command = ["sh", "-c", f"echo '{said}'; exit {status}"]
    found = check._sanitized(command, 20.0, tmp_path / "log", os.environ)
    assert (found["exit"], found["clean"], found.get("not followed", 0)) == (status, is_clean, said.count(LOST))


def test_the_files_of_device_tests_are_found(tests: ModuleType) -> None:
    filling, others = tests.files_to_run()
    names = [path.name for path in others]
    assert {"test_kernels_sample.py", "test_on_device.py", "test_place.py", "test_padded.py"} <= set(names)
    assert "test_kernels_compile.py" not in names
    assert ([path.name for path in filling], len(set(names))) == (["test_place_gpu.py"], len(names))
    assert names.index("test_gpu_training.py") < names.index("test_on_device.py")  # what only a GPU can show is first
    assert Path(__file__) not in others


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
    given = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run([ROOT / "scripts" / "gpu_check.sh"], env=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "sees no CUDA device" in done.stderr
    assert "--rehearse" in done.stderr
