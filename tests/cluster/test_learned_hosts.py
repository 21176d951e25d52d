"""Learned rows on several hosts: to the last bit those of one host. Each host has the rows of its own ranks only."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.learned_hosts import every_way, on_hosts
from support.learned_workers import fitted, save_rows

from hoploom.errors import TrainError
from hoploom.nn.row_memory import SHARED
from hoploom.ranks.spawn import spawn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # up to eight processes import torch
OPTIMIZERS, DTYPES = ("rowwise_adagrad", "adagrad", "lazy_adam", "sgd"), ("float32", "bfloat16")
HOSTS = [(1, 1), (2, 2)]  # ranks of each


def done(found: list[tuple[int, str]]) -> None:
    assert [code for code, _ in found] == [0] * len(found), [text[-2000:] for _, text in found]


def of_both(folder: Path, hosts: tuple[int, ...], worker: Any, *arguments: Any) -> tuple[Path, Path]:
    """Return the folders with the results of a worker: of ranks on these hosts, and of as many on one host."""
    several, one = folder / "several", folder / "one"
    for each in (several, one):
        each.mkdir()
    done(on_hosts(hosts, worker.__name__, str(several), *arguments))
    spawn(worker, sum(hosts), [str(one), *arguments], device="cpu", timeout=120)
    return several, one


def assert_same(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("hosts", HOSTS)
def test_ranks_of_several_hosts_learn_the_rows_of_one_host(hosts: tuple[int, ...], tmp_path: Path) -> None:
    rules = [{"optimizer": name, "dtype": dtype} for name, dtype in product(OPTIMIZERS, DTYPES)]
    several, one = of_both(tmp_path, hosts, save_rows, [*rules, {"folder": str(tmp_path)}])
    for number in range(len(rules) + 1):
        name = f"{number}-of-{sum(hosts)}.pt"
        assert_same(torch.load(several / name), torch.load(one / name))
    assert list(tmp_path.glob("hoploom-*")) == []


@pytest.mark.parametrize("hosts", [(1, 1), (1, 2)])
def test_they_evaluate_export_and_infer_as_one_host(hosts: tuple[int, ...], tmp_path: Path) -> None:
    """Also where the last batches are not on all ranks, and one rank has none at all."""
    several, one = (torch.load(folder / "found.pt") for folder in of_both(tmp_path, hosts, every_way))
    assert several[:2] == one[:2]
    assert_same(several[2], one[2])
    assert several[3] == one[3]


def test_a_host_has_the_rows_of_its_own_ranks_alone() -> None:
    done(on_hosts((1, 1), "wide"))


def test_one_rank_alone_does_not_infer_from_rows_of_other_hosts() -> None:
    """It would take the rows that it lacks for zeros."""
    done(on_hosts((1, 1), "one_rank_infers"))


@pytest.mark.parametrize("killed_on", ["one host", "two hosts"])
def test_a_killed_run_resumes_on_other_hosts(killed_on: str, tmp_path: Path) -> None:
    """From two hosts to one and back, to the rows of ranks that never stopped."""
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    for folder in (stopped, whole):
        folder.mkdir()
    spawn(fitted, 2, [str(whole)], device="cpu", timeout=120)
    if killed_on == "one host":
        with pytest.raises(TrainError, match="was killed by SIGKILL"):
            spawn(fitted, 2, [str(stopped), ("step", 8)], device="cpu", timeout=120)
        done(on_hosts((1, 1), "fitted", str(stopped)))
    else:
        assert on_hosts((1, 1), "fitted", str(stopped), ("step", 8))[1][0] == -9
        spawn(fitted, 2, [str(stopped)], device="cpu", timeout=120)
    assert_same(torch.load(stopped / "found.pt"), torch.load(whole / "found.pt"))


def test_a_killed_rank_ends_those_of_other_hosts_with_its_name() -> None:
    before = set(SHARED.glob("hoploom-rows-*"))
    *others, (code, _) = on_hosts((2, 1), "killed")
    assert code == -9
    for code, text in others:
        assert code == 1
        assert "and no sign of life came from rank 2" in text, text[-2000:]
    assert set(SHARED.glob("hoploom-rows-*")) == before
