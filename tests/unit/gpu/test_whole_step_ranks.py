"""Whole steps of several ranks, in processes of their own."""

import pytest
from support.whole_steps import ranks_learn_whole

import hoploom


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "batch_size"), [(2, 2), (3, 2)])
def test_ranks_learn_whole_what_eager_ddp_learns(num_ranks: int, batch_size: int) -> None:
    hoploom.spawn(ranks_learn_whole, num_ranks, [batch_size], device="cpu", timeout=120)
