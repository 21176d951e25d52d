"""Learned rows of several ranks: to the last bit those of any placement, and nearly those of one process."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.learned_workers import (
    a_gradient_that_is_not_finite,
    alone,
    differing_paths,
    differing_settings,
    differs,
    few_gradients,
    killed,
    save_rows,
    shop,
    too_little_memory_on_a_rank,
)
from torch import Tensor

from hoploom.errors import TrainError
from hoploom.nn.row_memory import SHARED
from hoploom.ranks.spawn import spawn

OPTIMIZERS, DTYPES = ("rowwise_adagrad", "adagrad", "lazy_adam", "sgd"), ("float32", "bfloat16")
RULES = [{"optimizer": name, "dtype": dtype} for name, dtype in product(OPTIMIZERS, DTYPES)]
QUICK = [{"optimizer": "rowwise_adagrad"}, {"optimizer": "lazy_adam", "dtype": "bfloat16"}]
FOLDER = "a folder"
PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"num_parts": 3},
    {"num_workers": 3},
    {"threads": 2, "dim": 600},  # wide enough for two threads to share the rows
    {"threads": 1, "dim": 600},
    {"folder": FOLDER, "num_parts": 3, "num_workers": 0},
    {"late": True},
    *([] if torch.cuda.is_available() else [{"placed": True}]),  # in host memory for several ranks, to share rows
]
Rows = tuple[Tensor, Tensor]  # and their state


def table(folder: Path, rules: list[dict[str, Any]], world_size: int) -> list[Rows]:
    """Return the rows of each rule in turn. All placements end with the same."""
    places = [place | ({"folder": str(folder)} if "folder" in place else {}) for place in PLACEMENTS]
    cases = [rule | place for rule in rules for place in places]
    before = learned_files()
    if world_size == 1:
        save_rows(alone(), str(folder), cases)
    else:
        spawn(save_rows, world_size, [str(folder), cases], device="cpu", timeout=280)
    assert (learned_files(), list(folder.glob("hoploom-*"))) == (before, [])
    found = [torch.load(folder / f"{number}-of-{world_size}.pt") for number in range(len(cases))]
    first: dict[tuple[Any, ...], Rows] = {}
    for case, ours in zip(cases, found, strict=True):
        theirs = first.setdefault((case["optimizer"], case.get("dtype"), case.get("dim")), ours)
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True)), case
    return found[:: len(places)]


def assert_nearly_the_same(ours: Rows, theirs: Rows, case: Any) -> None:
    """Sums of float32 in another order differ in their last bits.

    bfloat16 rounds up or down by the same random numbers, so most rows are still the same. Where the last bits of a
    sum decide, a value moves by one of its 256 steps between powers of two, and the later gradients see it.
    """
    for mine, other in zip(ours, theirs, strict=True):
        if mine.dtype == torch.bfloat16:
            assert float((mine != other).float().mean()) < 0.01, case
        is_exact = ours[0].dtype == torch.float32
        assert mine.numel() == 0 or differs(mine, other) < (1e-6 if is_exact else 1e-3), case


def learned_files() -> list[str]:
    return sorted(path.name for path in SHARED.glob("hoploom-rows-*"))


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> list[Rows]:
    return table(tmp_path_factory.mktemp("one"), RULES, 1)


def test_two_ranks_learn_the_rows_of_one_process(tmp_path: Path) -> None:
    for case, ours, theirs in zip(QUICK, table(tmp_path, QUICK, 2), table(tmp_path, QUICK, 1), strict=True):
        assert_nearly_the_same(ours, theirs, case)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_number_of_ranks_learns_the_rows_of_one_process(
    world_size: int, tmp_path: Path, of_one: list[Rows]
) -> None:
    for rule, ours, theirs in zip(RULES, table(tmp_path, RULES, world_size), of_one, strict=True):
        assert_nearly_the_same(ours, theirs, rule)


@pytest.mark.slow
@pytest.mark.parametrize("worker", [few_gradients, differing_settings, differing_paths, a_gradient_that_is_not_finite])
def test_ranks_take_few_gradients_and_the_same_settings(worker: Any) -> None:
    spawn(worker, 2, device="cpu", timeout=60)


@pytest.mark.slow
def test_memory_that_one_rank_lacks_is_an_error_on_all(tmp_path: Path) -> None:
    shop().save(tmp_path / "shop.store")
    spawn(too_little_memory_on_a_rank, 2, [str(tmp_path)], device="cpu", timeout=60)


def test_a_killed_rank_leaves_no_file_behind() -> None:
    before = learned_files()
    with pytest.raises(TrainError, match="rank 1 was killed by SIGKILL"):
        spawn(killed, 2, device="cpu", timeout=60)
    assert learned_files() == before
