"""Whole steps of several ranks, in processes of their own."""

import pytest
import torch
from support.whole_steps import ranks_learn_whole

import hoploom


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "batch_size"), [(2, 2), (3, 2)])
def test_ranks_learn_whole_what_eager_ddp_learns(num_ranks: int, batch_size: int) -> None:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"  # one GPU for all, over Gloo: NCCL takes one each
    hoploom.spawn(ranks_learn_whole, num_ranks, [batch_size], device=device, backend="gloo", timeout=120)
