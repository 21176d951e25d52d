"""Tensors in memory that the core recycles, and operations on rows: gather and scatter by id, reduce over edge lists.

Memory returns to the core's pool when the last tensor over it is dropped. For GPUs, ops.kernels.aggregate has the same
reductions. List i has the entries indptr[i] to indptr[i + 1] - 1. Entry e is row rows[e] of a matrix (row e if `rows`
is None), with weight weights[places[e]] (weights[e] if `places` is None). Entries from indptr[-1] on are ignored.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hoploom import _core

Empty: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]  # an allocator of tensors, such as `empty`
MappedFile = _core.MappedFile  # a file mapped into memory; keeps no descriptor open
any_damaged = _core.any_damaged  # () -> whether reading any mapped file has failed
pool_use = _core.pool_use  # () -> (idle bytes, live bytes)
pool_trim = _core.pool_trim  # () -> None: returns idle bytes to the system
pool_keep_at_most = _core.pool_keep_at_most  # (idle bytes); sys.maxsize: no limit
wait_readable = _core.wait_readable  # (descriptor, microseconds) -> whether it is readable
keep_freed_memory = _core.keep_freed_memory  # makes malloc keep freed memory, so that pages fault in only once
give_back_freed_memory = _core.give_back_freed_memory  # returns idle memory of the pool and malloc to the system


NO_PLACES = torch.empty(0, dtype=torch.int64)


def require_whole(tensors: Iterable[Tensor]) -> None:
    """Raise StoreError if reads of mapped files by torch or NumPy failed: these give zeros. The core checks its own."""
    if _core.any_damaged():
        for tensor in tensors:
            _core.require_whole(tensor.data_ptr())


def read_soon(tensor: Tensor) -> None:
    """Ask the operating system to start reading a mapped tensor's bytes from its file, before they are accessed."""
    if tensor.nbytes:
        _core.read_soon(tensor.data_ptr(), tensor.nbytes)


def tensor_of(buffer: _core.Buffer, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor over a buffer, without a copy."""
    try:
        return torch.frombuffer(buffer, dtype=dtype)
    except ValueError:  # torch rejects empty buffers
        return torch.empty(0, dtype=dtype)


def empty(shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """Return an uninitialized tensor in recycled memory, or in pinned memory (which torch's host cache recycles)."""
    if pinned:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    size = math.prod(shape) * dtype.itemsize
    # a view would keep its base, and torch adds gradients in place only to tensors that share their memory with none
    return tensor_of(_core.Buffer(size), dtype).resize_(shape) if size else torch.empty(shape, dtype=dtype)


def empty_pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor in pinned memory, for asynchronous copies to a GPU."""
    return empty(shape, dtype, pinned=True)


def joined(columns: Sequence[Tensor]) -> Tensor:
    """Return the concatenated columns ([n] int64 each). torch.cat would start a team of threads for every caller."""
    if len(columns) == 1:
        return columns[0]
    out = empty((sum(column.numel() for column in columns),), torch.int64)
    if columns:
        np.concatenate([column.numpy() for column in columns], out=out.numpy())
    return out


def runs_in_core(tensor: Tensor) -> bool:
    """Return whether the C++ core handles this tensor (CPU). On other devices, callers avoid host synchronization."""
    return tensor.device.type == "cpu"


# --- by id ---------------------------------------------------------------------------------------


def gather(table: Tensor, ids: Tensor, out: Tensor, first: int = 0, places: Tensor | None = None) -> Tensor:
    """Copy row table[ids[i] - first] to out[i], for all i or only for i in `places`; return `out`. Any row dtype."""
    at = None if places is None else places.numpy()
    _core.gather(_array(table), ids.numpy(), at, first, _array(out))
    return out


def _array(rows: Tensor) -> Any:
    """Return rows as a NumPy array whose bytes the core copies. As NumPy has no bfloat16, such rows become int16."""
    return (rows if rows.dtype is not torch.bfloat16 else rows.view(torch.int16)).numpy()


def route(ids: Tensor, bounds: Tensor, places: Tensor | None = None) -> list[Tensor]:
    """Return, for each part p, the positions of ids in [bounds[p - 1], bounds[p]). `places` limits the positions."""
    routed, counts = _core.route(ids.numpy(), bounds.numpy(), None if places is None else places.numpy())
    positions, begin, owned = tensor_of(routed), 0, []
    for count in memoryview(counts).cast("q"):
        owned.append(positions[begin : begin + count] if count else NO_PLACES)
        begin += count
    return owned


def select(ids: Tensor, places: Tensor) -> Tensor:
    """Return ids[places]: [n] int64. Indexing with torch would start a team of threads for every caller."""
    return tensor_of(_core.select(ids.numpy(), places.numpy()))


def narrow(ids: Tensor, first: int, places: Tensor | None = None) -> Tensor:
    """Return ids - first, or ids[places] - first: [n] int32. Narrow ids take half the bytes when they are sent."""
    return tensor_of(_core.narrow(ids.numpy(), None if places is None else places.numpy(), first), torch.int32)


def owned(ids: Tensor, first: int, size: int) -> Tensor:
    """Undo `narrow`: [n] int64. int64 ids stay as they are. Raise IndexError for ids outside [first, first + size)."""
    return tensor_of(_core.owned(ids.numpy(), first, size))


def is_counting(places: Tensor) -> bool:
    """Return whether `places` is 0, 1, 2, ..."""
    return _core.is_counting(places.numpy())


def byte_rows(rows: Tensor) -> Tensor:
    """Return a view of the rows as bytes: [num_rows, bytes per row] uint8."""
    shape = rows.shape[0], math.prod(rows.shape[1:]) * rows.element_size()
    return rows.reshape(-1).view(torch.uint8).view(shape) if rows.numel() else torch.empty(shape, dtype=torch.uint8)


def scatter_rows(rows: Tensor, places: Tensor, out: Tensor) -> None:
    """Copy row rows[i] to out[places[i]], for all i."""
    _core.scatter(_array(rows), places.numpy(), _array(out))


# --- over lists ----------------------------------------------------------------------------------

Lists = tuple[Tensor, Tensor, Tensor | None]  # indptr, rows, and places; for dot_rows, the list of each entry
NATIVE = (torch.float32, torch.float64)  # what the core reduces; callers convert half precision first
SUMMED = (*NATIVE, torch.bfloat16)  # what sum_rows takes


def sum_rows(
    indptr: Tensor, rows: Tensor | None, places: Tensor | None, x: Tensor, weights: Tensor | None, mean: bool
) -> Tensor:
    """Return the sum or mean of the rows of every list, times weights [num_entries, heads]: [num_lists, width]."""
    length = int(indptr[-1])
    out = empty((indptr.numel() - 1, x.shape[1]), x.dtype)
    entries = torch.arange(length) if rows is None else rows[:length]
    at = None if places is None else places[:length].numpy()
    lists = (indptr.numpy(), entries.numpy(), at)
    _core.sum_rows(*lists, _matrix(x), _first(weights, length), mean, torch.get_num_threads(), _array(out))
    return out


def max_rows(indptr: Tensor, rows: Tensor, x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return each list's maximum of weight * row per column, and the index in the list of the first entry with it.

    An empty list has zeros, and the index -1.
    """
    length = int(indptr[-1])
    out = empty((indptr.numel() - 1, x.shape[1]), x.dtype)
    winners = empty((indptr.numel() - 1, x.shape[1]), torch.int32)
    lists, given = (indptr.numpy(), rows[:length].numpy()), _first(weights, length)
    _core.max_rows(*lists, _matrix(x), given, torch.get_num_threads(), out.numpy(), winners.numpy())
    return out, winners


def max_rows_backward(lists: Lists, starts: Tensor, grad: Tensor, weights: Tensor | None, winners: Tensor) -> Tensor:
    """Return the gradient of x in `max_rows`. List r names the lists there with row r; `starts` is their `indptr`."""
    indptr, rows, places = lists
    length = int(indptr[-1])
    out = empty((indptr.numel() - 1, grad.shape[1]), grad.dtype)
    at = None if places is None else places[:length].numpy()
    given = (_matrix(grad), _first(weights, length), winners.numpy())
    entries = (indptr.numpy(), rows[:length].numpy(), at, starts.numpy())
    _core.max_rows_backward(*entries, *given, torch.get_num_threads(), out.numpy())
    return out


def dot_rows(lists: Lists, x: Tensor, y: Tensor, heads: int, winners: Tensor | None) -> Tensor:
    """Return, per entry and head, the dot product of the entry's row of x and its list's row of y.

    With `winners` of max_rows, the product is over the columns that the entry has won.
    """
    (indptr, rows, _), length = lists, int(lists[0][-1])
    out = empty((rows.numel(), heads), x.dtype)
    entries, won = (indptr.numpy(), rows[:length].numpy()), None if winners is None else winners.numpy()
    _core.dot_rows(*entries, _matrix(x), _matrix(y), won, torch.get_num_threads(), out[:length].numpy())
    out[length:] = 0
    return out


def softmax_lists(indptr: Tensor, scores: Tensor, grad: Tensor | None) -> Tensor:
    """Return the softmax of each list's `scores`. With `grad`, `scores` are a softmax: return its gradient instead."""
    length = int(indptr[-1])
    out = empty(tuple(scores.shape), scores.dtype)
    given = _first(scores, length), _first(grad, length)
    _core.softmax_lists(indptr.numpy(), *given, torch.get_num_threads(), out[:length].numpy())
    out[length:] = 0
    return out


def _first(rows: Tensor | None, length: int) -> Any:
    """Return the rows of the entries that are there as a NumPy array for the core."""
    return None if rows is None else rows[:length].detach().contiguous().numpy()


def _matrix(tensor: Tensor) -> Any:
    """Return the tensor as a NumPy matrix for the core; copy it only if the values of a row are not contiguous."""
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        tensor = tensor.contiguous()
    return _array(tensor.detach())


def keep_best(scores: Tensor, first: int, known: tuple[Tensor, Tensor] | None, best: Tensor, ids: Tensor) -> None:
    """Merge scores of destinations from id `first` on into each source's best, except `known` (indptr, ids)."""
    indptr, left_out = (None, None) if known is None else (known[0].numpy(), known[1].numpy())
    _core.keep_best(scores.numpy(), first, indptr, left_out, torch.get_num_threads(), best.numpy(), ids.numpy())


class RowRule(IntEnum):
    """The rules by which a learned row follows its gradient, numbered as in csrc/learned.h."""

    sgd = 0
    rowwise_adagrad = 1
    adagrad = 2
    lazy_adam = 3

    def state_width(self, width: int) -> int:
        """Return how many float32 numbers are kept beside a row of `width`."""
        return _core.state_width(int(self), width)


class RowStep(NamedTuple):
    """The options of one update of learned rows."""

    rule: RowRule
    rate: float
    scale: float  # a factor of all gradients
    eps: float
    betas: tuple[float, float]
    key: int  # determines the random bits that round bfloat16
    file: int = -1  # the descriptor of a file with the records of all rows, each a row and its state; -1: in memory


def draw_rows(rows: Tensor, ids: Tensor, key: int, *, normal: bool, spread: float) -> None:
    """Write initial values, a function of `key` and each row's id: even in [-spread, spread), or normal."""
    _core.draw_rows(_learned(rows), ids.numpy(), key, normal, spread, torch.get_num_threads())


def look_up_rows(rows: Tensor, ids: Tensor, file: int = -1) -> Tensor:
    """Return the learned rows of `ids`, [n, width] float32; `file` as in RowStep."""
    shape = ids.numel(), rows.shape[1]
    out = torch.empty(shape, dtype=torch.float32)  # no view of other memory, so that models may write to it
    _core.look_up_rows(_learned(rows), file, ids.numpy(), torch.get_num_threads(), out.numpy())
    return out


def update_rows(rows: Tensor, first: int, state: Tensor, ids: Tensor, gradients: Tensor, step: RowStep) -> int:
    """Update each row that has a gradient once, by their sum. gradients[i] belongs to row ids[i] - first.

    A row stays with its state if one of them would not be finite. Return the id of one such row, or -1.
    """
    rule, rate, scale, eps, betas, key, file = step
    options = int(rule), rate, scale, eps, *betas, key, torch.get_num_threads()
    return _core.update_rows(_learned(rows), file, first, state.numpy(), ids.numpy(), gradients.numpy(), *options)


def _learned(rows: Tensor) -> Any:
    return rows.view(torch.int16).numpy().view("uint16") if rows.dtype is torch.bfloat16 else rows.numpy()


ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as csrc/tables.h numbers them


def aggregate_tables(
    tables: Sequence[tuple[Tensor, int]], ids: Tensor, indptr: Tensor, reduce: Literal["sum", "mean"]
) -> Tensor:
    """Return each list's sum or mean of rows: [num_lists, width] float32. `tables` are (rows, first row's id)."""
    width, element = tables[0][0].shape[1], ELEMENTS[tables[0][0].dtype]
    out = empty((indptr.numel() - 1, width), torch.float32)
    raw = [(rows.view(torch.uint8).numpy(), first) for rows, first in tables]
    _core.sum_tables(raw, element, ids.numpy(), indptr.numpy(), reduce == "mean", out.numpy())
    return out
