"""Tensors over the core's recycled memory, and rows in it: gathered by id, put together again, added up over lists.

Memory returns to the pool with its last reader. Tables of rows are bytes: see byte_rows. ops.kernels.aggregate has the
reductions for other devices, function by function. List i is the entries indptr[i] to indptr[i + 1]; entry e is row
rows[e] of a matrix, or row e where `rows` is None, and its weight stands at places[e], or at e. Only indptr decides:
what follows its last value is no entry.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hoploom import _core

Empty: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]  # memory for a tensor: empty is one
MappedFile = _core.MappedFile  # a file's pages, kept without a descriptor
any_damaged = _core.any_damaged  # whether any file that is mapped can no longer be read
pool_use = _core.pool_use  # () -> (idle bytes, live bytes)
pool_trim = _core.pool_trim
pool_keep_at_most = _core.pool_keep_at_most  # idle bytes, from now on; sys.maxsize: as before
wait_readable = _core.wait_readable  # whether a descriptor has something to read within some microseconds
keep_freed_memory = _core.keep_freed_memory  # malloc's too, from now on: pages are faulted in once
give_back_freed_memory = _core.give_back_freed_memory  # the pool's and malloc's, to the system


NO_PLACES = torch.empty(0, dtype=torch.int64)


def require_whole(tensors: Iterable[Tensor]) -> None:
    """StoreError if a file that one of these is a map of can no longer be read; what was read from it is zeros.

    The core asks by itself, for what it reads. This is for what others read. Cheap while all files are whole.
    """
    if _core.any_damaged():
        for tensor in tensors:
            _core.require_whole(tensor.data_ptr())


def read_soon(tensor: Tensor) -> None:
    """The kernel begins to read what a tensor is a map of. For who goes through a file in order: see MappedFile."""
    if tensor.nbytes:
        _core.read_soon(tensor.data_ptr(), tensor.nbytes)


def tensor_of(buffer: _core.Buffer, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor over a buffer, no copy."""
    try:
        return torch.frombuffer(buffer, dtype=dtype)
    except ValueError:  # torch takes none without bytes
        return torch.empty(0, dtype=dtype)


def empty(shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """An uninitialised tensor: recycled, or pinned (recycled by torch's own host cache)."""
    if pinned:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    size = math.prod(shape) * dtype.itemsize
    return tensor_of(_core.Buffer(size), dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


def empty_pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The same in pinned memory, which a GPU copies from while both go on."""
    return empty(shape, dtype, pinned=True)


def joined(columns: Sequence[Tensor]) -> Tensor:
    """Columns [n] int64 one after the other, by NumPy: torch's cat would start a team of threads in every thread."""
    if len(columns) == 1:
        return columns[0]
    out = empty((sum(column.numel() for column in columns),), torch.int64)
    if columns:
        np.concatenate([column.numpy() for column in columns], out=out.numpy())
    return out


def runs_in_core(tensor: Tensor) -> bool:
    """Whether the core works on a tensor: where it lies in the CPU's memory. Elsewhere nobody waits for a value."""
    return tensor.device.type == "cpu"


# --- by id ---------------------------------------------------------------------------------------


def gather(table: Tensor, ids: Tensor, out: Tensor, first: int = 0, places: Tensor | None = None) -> Tensor:
    """out[i] = table[ids[i] - first], for all i or those in `places`. Rows of any dtype and shape; out has the same."""
    at = None if places is None else places.numpy()
    _core.gather(_array(table), ids.numpy(), at, first, _array(out))
    return out


def _array(rows: Tensor) -> Any:
    """The same memory as the core takes it: any bytes are rows."""
    return (rows if rows.dtype is not torch.bfloat16 else rows.view(torch.int16)).numpy()


def route(ids: Tensor, bounds: Tensor, places: Tensor | None = None) -> list[Tensor]:
    """Per part: the positions in `ids`, or among `places`, that it owns, in order; part p begins at bounds[p - 1]."""
    routed, counts = _core.route(ids.numpy(), bounds.numpy(), None if places is None else places.numpy())
    positions, begin, owned = tensor_of(routed), 0, []
    for count in memoryview(counts).cast("q"):
        owned.append(positions[begin : begin + count] if count else NO_PLACES)
        begin += count
    return owned


def select(ids: Tensor, places: Tensor) -> Tensor:
    """ids[places], [n] int64, by the core: torch would start a team of threads."""
    return tensor_of(_core.select(ids.numpy(), places.numpy()))


def narrow(ids: Tensor, first: int, places: Tensor | None = None) -> Tensor:
    """The ids, or those at some places, counted from the first one: [n] int32."""
    return tensor_of(_core.narrow(ids.numpy(), None if places is None else places.numpy(), first), torch.int32)


def owned(ids: Tensor, first: int, size: int) -> Tensor:
    """What `narrow` has made, as it was: [n] int64. IndexError for ids that are not in [first, first + size)."""
    return tensor_of(_core.owned(ids.numpy(), first, size))


def is_counting(places: Tensor) -> bool:
    """Whether places are 0, 1, 2 and so on."""
    return _core.is_counting(places.numpy())


def byte_rows(rows: Tensor) -> Tensor:
    """The same memory as rows of bytes: [rows, row bytes] uint8."""
    shape = rows.shape[0], math.prod(rows.shape[1:]) * rows.element_size()
    return rows.reshape(-1).view(torch.uint8).view(shape) if rows.numel() else torch.empty(shape, dtype=torch.uint8)


def scatter_rows(rows: Tensor, places: Tensor, out: Tensor) -> None:
    """out[places[i]] = rows[i], as bytes."""
    _core.scatter(_array(rows), places.numpy(), _array(out))


# --- over lists ----------------------------------------------------------------------------------

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


def dot_rows(indptr: Tensor, rows: Tensor, lists_of: Tensor, x: Tensor, y: Tensor, heads: int) -> Tensor:
    """For every entry and head, the dot product of its row in x and its list's in y; `lists_of` has each one's list."""
    length = int(indptr[-1])
    out = empty((rows.numel(), heads), x.dtype)
    lists = (indptr.numpy(), rows[:length].numpy())
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
