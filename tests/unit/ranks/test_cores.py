"""How many cores a rank takes: its share of what its process may use, never more."""

import os
from pathlib import Path

import pytest
import torch

from hoploom.ranks import environment
from hoploom.ranks.context import init
from hoploom.system import num_cores
from hoploom.train.runs.run_file import LoaderSection

CASES: dict[str, tuple[str, dict[str, str], int]] = {
    "version 2": ("0::/job/step\n", {"job/step/cpu.max": "max 100000\n", "job/cpu.max": "350000 100000\n"}, 3),
    "less than a core": ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
    "version 1": ("1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "200000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 2),
    "no quota": ("1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 12),
    "more than it is bound to": ("0::/\n", {"cpu.max": "6400000 100000\n"}, 12),
    "memory's group": ("1:memory:/a\n", {"memory/a/cpu.max": "100000 100000\n"}, 12),
    "what cannot be read": ("0::/a\n", {"a/cpu.max": "much\n"}, 12),
    "no groups": ("", {}, 12),
}


@pytest.mark.parametrize(("membership", "files", "expected"), CASES.values(), ids=CASES.keys())
def test_a_containers_quota_of_cores_counts(
    membership: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)))
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert num_cores(tmp_path / "membership", tmp_path / "mounted") == expected


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_torch_has_no_more_threads_than_the_process_has_cores_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("hoploom.ranks.environment.num_cores", lambda: 3)
    for before, after in ((8, 3), (2, 2)):
        torch.set_num_threads(before)
        with init(device="cpu") as context:
            assert torch.get_num_threads() == after
            taken = f"rank 0 of 1 on cpu: cores 3, torch threads {after}"
            assert str(context) == taken
        assert torch.get_num_threads() == before
        assert capsys.readouterr().err == (f"hoploom: {taken}\n" if after < before else "")
    torch.set_num_threads(8)
    with environment.quiet(), init(device="cpu"):
        assert capsys.readouterr().err == ""
    assert not environment.is_quiet()


def test_omp_num_threads_has_the_last_word_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setattr("hoploom.ranks.environment.num_cores", lambda: 3)
    torch.set_num_threads(8)
    with init(device="cpu") as context:
        assert str(context) == "rank 0 of 1 on cpu: cores 3, torch threads 8 (OMP_NUM_THREADS)"


def test_a_process_with_one_core_takes_one_loader_thread_unless_it_is_told_otherwise() -> None:
    assert [LoaderSection().num_threads(cores) for cores in (1, 2, 8)] == [1, 2, 2]
    assert LoaderSection(threads=5).num_threads(1) == 5
