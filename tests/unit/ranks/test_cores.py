"""How many cores a rank takes: its share of what its process may use, never more."""

import pytest
import torch

from hoploom.ranks import environment
from hoploom.ranks.context import init
from hoploom.train.runs.run_file import LoaderSection


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
