"""Aggregation straight from the tables that hold the features: source rows are never copied. No gradient flows."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from hoploom import _core
from hoploom.ops.buffers import empty

ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as csrc/tables.h numbers them


def aggregate_tables(
    tables: Sequence[tuple[Tensor, int]], ids: Tensor, indptr: Tensor, reduce: Literal["sum", "mean"]
) -> Tensor:
    """The rows `ids` summed or averaged per list: [num_lists, width] float32.

    `tables` are (rows [n, width], id of the first row), ascending by that id, all of one dtype of ELEMENTS.
    """
    width, element = tables[0][0].shape[1], ELEMENTS[tables[0][0].dtype]
    out = empty((indptr.numel() - 1, width), torch.float32)
    raw = [(rows.view(torch.uint8).numpy(), first) for rows, first in tables]
    _core.sum_tables(raw, element, ids.numpy(), indptr.numpy(), reduce == "mean", out.numpy())
    return out
