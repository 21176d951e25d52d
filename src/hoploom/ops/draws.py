"""Computable order and raw random words."""

import torch
from torch import Tensor

from hoploom import _core
from hoploom.ops.buffers import tensor_of


def permute(key: int, size: int, begin: int, end: int) -> Tensor:
    """Positions [begin, end) of a keyed permutation of [0, size), in O(1) memory."""
    return tensor_of(_core.permute(key, size, begin, end))


def draw_bounded(key: int, ids: Tensor, stream: int, draw: int, bound: int) -> Tensor:
    """One integer in [0, bound) per id: [n] int64, the draw-th of its stream."""
    return tensor_of(_core.draw_bounded(key, ids.numpy(), stream, draw, bound))


def draw_words(key: int, ids: Tensor, stream: int, block: int = 0) -> Tensor:
    """Four random 32-bit words per id: [n, 4] uint32."""
    return tensor_of(_core.draw_words(key, ids.numpy(), stream, block), torch.uint32).view(-1, 4)
