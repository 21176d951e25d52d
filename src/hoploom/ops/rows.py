"""The core's reductions over lists of rows, on tensors. The same for other devices: ops.kernels.aggregate.

List i is the entries indptr[i] to indptr[i + 1]; entry e is row rows[e] of a matrix, or row e where `rows` is None, and
its weight stands at places[e], or at e. Only indptr decides: what follows its last value is no entry.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hoploom import _core
from hoploom.ops.buffers import empty
from hoploom.ops.edges import InEdges

NATIVE = (torch.float32, torch.float64)  # wider ones first


def sum_rows(
    indptr: Tensor, rows: Tensor | None, places: Tensor | None, x: Tensor, weights: Tensor | None, mean: bool
) -> Tensor:
    """The sum of every list's rows, times weights [num_entries, heads]; divided by the list's length for a mean."""
    length = int(indptr[-1])
    out = empty((indptr.numel() - 1, x.shape[1]), x.dtype)
    entries = torch.arange(length) if rows is None else rows[:length]
    at = None if places is None else places[:length].numpy()
    given = None if weights is None else weights[:length].detach().contiguous().numpy()
    lists = (indptr.numpy(), entries.numpy(), at)
    _core.sum_rows(*lists, _matrix(x), given, mean, torch.get_num_threads(), out.numpy())
    return out


def max_rows(indptr: Tensor, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest of every list and column, and which entry it was, the first of equals: int32, -1 for no entry."""
    out = empty((indptr.numel() - 1, x.shape[1]), x.dtype)
    winners = empty((indptr.numel() - 1, x.shape[1]), torch.int32)
    lists = (indptr.numpy(), rows[: int(indptr[-1])].numpy())
    _core.max_rows(*lists, _matrix(x), torch.get_num_threads(), out.numpy(), winners.numpy())
    return out, winners


def max_rows_backward(
    indptr: Tensor, rows: Tensor, places: Tensor | None, starts: Tensor, grad: Tensor, winners: Tensor
) -> Tensor:
    """Over the transposed lists: the sum of those rows whose entry had won. `starts` is the indptr of the lists."""
    length = int(indptr[-1])
    out = empty((indptr.numel() - 1, grad.shape[1]), grad.dtype)
    at = None if places is None else places[:length].numpy()
    lists = (indptr.numpy(), rows[:length].numpy(), at, starts.numpy())
    _core.max_rows_backward(*lists, _matrix(grad), winners.numpy(), torch.get_num_threads(), out.numpy())
    return out


def dot_rows(edges: InEdges, x: Tensor, y: Tensor, heads: int) -> Tensor:
    """For every edge and head, the dot product of its source's row in x and its destination's in y."""
    length = int(edges.indptr[-1])
    out = empty((edges.num_edges, heads), x.dtype)
    lists = (edges.indptr.numpy(), edges.sources[:length].numpy())
    _core.dot_rows(*lists, _matrix(x), _matrix(y), torch.get_num_threads(), out[:length].numpy())
    out[length:] = 0
    return out


def softmax_lists(indptr: Tensor, scores: Tensor, grad: Tensor | None) -> Tensor:
    """Scores [num_entries, heads] to weights that sum to one in every list. With `grad` it is the backward of that."""
    length = int(indptr[-1])
    out = empty(tuple(scores.shape), scores.dtype)
    given = None if grad is None else grad[:length].contiguous().numpy()
    entries = scores[:length].detach().contiguous().numpy()
    _core.softmax_lists(indptr.numpy(), entries, given, torch.get_num_threads(), out[:length].numpy())
    out[length:] = 0
    return out


def _matrix(tensor: Tensor) -> Any:
    """For the core: columns beside each other, rows as far apart as they are."""
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        tensor = tensor.contiguous()
    return tensor.detach().numpy()


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
