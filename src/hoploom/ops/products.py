"""Linear layers on the core's matrix products, where these are faster than torch's.

On AMD processors, torch's library (MKL) uses vectors of eight numbers, where AVX-512 has sixteen.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hoploom import _core
from hoploom.ops.compiled import differentiable
from hoploom.ops.rows import _matrix, empty

FAST = _core.has_fast_products()
LEAST_ROWS = 256  # for fewer, copying the weight to the core's layout takes longer than its product saves


def has_fast_product(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` takes the core's products: of many float32 rows, on an AMD processor with AVX-512."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.dim() == 2
        and (torch.compiler.is_compiling() or len(x) >= LEAST_ROWS)  # a graph is for any number of rows
        and x.shape[1] == weight.shape[1]
        and not torch.is_autocast_enabled("cpu")
        and FAST
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias: [..., width]. The core's products have the same bits for any number of threads.

    >>> ops.linear(x, layer.weight, layer.bias)
    """
    if not has_fast_product(x, weight):
        return F.linear(x, weight, bias)
    return _linear(x, weight, bias)


class _Linear(Function):
    num_outs, results, saved = 1, ("out",), ("x", "weight")

    @staticmethod
    def like(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        return (x.new_empty(x.shape[0], weight.shape[0]),)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = empty((x.shape[0], weight.shape[0]), x.dtype)
        added = None if bias is None else bias.detach().contiguous().numpy()
        by = weight.detach().contiguous().numpy()
        _core.multiply_rows(_matrix(x), by, True, added, torch.get_num_threads(), out.numpy())
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        sent, threads = _matrix(grad), torch.get_num_threads()
        to_x = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = empty((grad.shape[0], weight.shape[1]), grad.dtype)
            _core.multiply_rows(sent, weight.detach().contiguous().numpy(), False, None, threads, to_x.numpy())
        if ctx.needs_input_grad[1]:
            to_weight, to_bias = weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])
            _core.multiply_columns(sent, _matrix(x), threads, to_weight.numpy(), to_bias.numpy())
        elif ctx.needs_input_grad[2]:
            to_bias = grad.sum(0)
        return to_x, to_weight, to_bias if ctx.needs_input_grad[2] else None


_linear = differentiable(_Linear)
