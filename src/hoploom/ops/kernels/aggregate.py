"""Reductions over lists of rows on a device: the functions of hoploom.ops.rows, as Triton kernels.

Rows of any dtype are summed in float32 (float64 rows in float64), without atomics, so results are reproducible. A
list longer than a window (WINDOW entries or more) takes two more kernels, which start if a list could be so long.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hoploom.ops.kernels import reduce
from hoploom.ops.kernels.launch import blocks_of, launch
from hoploom.ops.rows import Lists

Term = tuple[Tensor | None, Tensor | None]  # features [num_entries, k], and a weight [k, width] or rows as wide as x
NATIVE = SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
THREADS = 128  # per program: four warps, Triton's default
LOAD_BYTES = 16  # that a thread reads at once if addresses allow it
ROW_BYTES = 512  # most bytes of a row that a program reads: one read of a warp
MOST_LISTS = 64  # per program: fewer than threads, so that Triton keeps a list's ends in every thread that needs them
AHEAD = 8  # entries whose rows are loaded at the same time
WINDOW = 256  # entries; longer windows if there would be more than MOST_WINDOWS
MOST_WINDOWS = 1 << 14
FEW, MANY = 16, 128  # entries that a softmax program reads at once, for short and for long lists
TILE_BYTES = 2048  # of a softmax program's values [lists, entries, heads]


class Tiles(NamedTuple):
    """The division of a reduction among programs: each takes a few lists, and some columns of one head."""

    unit: int  # columns: kernels get widths as multiples of this, so that they know the alignment of addresses
    share: int  # columns of a head, in units
    columns: int  # per program
    blocks: int  # programs that share the columns of a row
    lists: int  # lists, or edges, per program

    @property
    def constants(self) -> dict[str, int]:
        return {"UNIT": self.unit, "LISTS": self.lists, "COLUMNS": self.columns, "AHEAD": AHEAD}


def tiles_of(heads: int, *matrices: Tensor) -> Tiles:
    width, size = matrices[0].shape[1], matrices[0].element_size()
    share = width // heads
    unit = math.gcd(share, *(matrix.stride(0) for matrix in matrices), LOAD_BYTES)
    columns = min(triton.next_power_of_2(share), ROW_BYTES // size)
    lists = THREADS * min(unit, LOAD_BYTES // size) // columns
    return Tiles(unit, share // unit, columns, heads * triton.cdiv(share, columns), min(max(lists, 1), MOST_LISTS))


class Windows(NamedTuple):
    """The division of all lists' entries into windows of equal length; no windows if no list can be longer than one."""

    length: int
    number: int
    steps: int  # of the binary search for the list of an entry


def windows_of(num_entries: int, num_lists: int) -> Windows:
    length = max(WINDOW, triton.next_power_of_2(triton.cdiv(num_entries, MOST_WINDOWS)))
    return Windows(length, triton.cdiv(num_entries, length) if num_entries > length else 0, num_lists.bit_length())


def sum_rows(
    indptr: Tensor, rows: Tensor | None, places: Tensor | None, x: Tensor, weights: Tensor | None, mean: bool
) -> Tensor:
    """Implement `hoploom.ops.rows.sum_rows` on a device."""
    num_entries = x.shape[0] if rows is None else rows.numel()
    given = None if weights is None else weights.contiguous()
    return _sum(indptr, (rows, places), x, (given, None, None), num_entries, mean=mean)


def max_rows_backward(lists: Lists, starts: Tensor, grad: Tensor, weights: Tensor | None, winners: Tensor) -> Tensor:
    """Implement `hoploom.ops.rows.max_rows_backward` on a device."""
    indptr, rows, places = lists
    given = None if weights is None else weights.contiguous()
    return _sum(indptr, (rows, places), grad, (given, winners, starts), rows.numel(), mean=False)


def _sum(
    indptr: Tensor, entries: tuple[Any, Any], x: Tensor, factors: tuple[Any, Any, Any], num_entries: int, *, mean: bool
) -> Tensor:
    x, num_lists = _matrix(x), indptr.numel() - 1
    heads = 1 if factors[0] is None else factors[0].shape[1]
    out = torch.empty((num_lists, x.shape[1]), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    tiles, windows = tiles_of(heads, x), windows_of(num_entries, num_lists)
    sizes = (heads, tiles.share, x.stride(0) // tiles.unit)
    given: dict[str, Any] = {"device": x.device, "SUM": _language(x), **tiles.constants}
    launch(
        reduce.sum_short, (*blocks_of(num_lists, tiles.lists), tiles.blocks),
        indptr, *entries, x, *factors, out, num_lists, windows.length, *sizes, MEAN=mean, **given,
    )  # fmt: skip
    if windows.number:
        pieces = torch.empty((2, windows.number, x.shape[1]), dtype=_wide(x), device=x.device)
        where = (num_lists, windows.steps, windows.length)
        grid = (windows.number, tiles.blocks)
        launch(reduce.sum_windows, (*grid, 2), indptr, *entries, x, *factors, pieces, *where, *sizes, **given)
        launch(reduce.sum_pieces, grid, indptr, pieces, out, *where, *sizes[:2], MEAN=mean, **given)
    return out


def max_rows(
    indptr: Tensor, rows: Tensor, x: Tensor, weights: Tensor | None, term: Term = (None, None)
) -> tuple[Tensor, Tensor]:
    """Implement `hoploom.ops.rows.max_rows` on a device. A term of each entry is added to its weight * row."""
    x, num_lists = _matrix(x), indptr.numel() - 1
    out = torch.empty((num_lists, x.shape[1]), dtype=x.dtype, device=x.device)
    winners = torch.empty((num_lists, x.shape[1]), dtype=torch.int32, device=x.device)
    if out.numel() == 0:
        return out, winners
    heads = 1 if weights is None else weights.shape[1]
    tiles, windows = tiles_of(heads, x), windows_of(rows.numel(), num_lists)
    given = indptr, rows, x, None if weights is None else weights.contiguous(), *term
    sizes = heads, 0 if term[0] is None else term[0].shape[1], tiles.share, x.stride(0) // tiles.unit
    constants: dict[str, Any] = {"device": x.device, "UNIT": tiles.unit, "COLUMNS": tiles.columns, "AHEAD": AHEAD}
    launch(
        reduce.max_short, (*blocks_of(num_lists, tiles.lists), tiles.blocks),
        *given, out, winners, num_lists, windows.length, *sizes, SUM=_language(x), LISTS=tiles.lists, **constants,
    )  # fmt: skip
    if windows.number:
        pieces = torch.empty((2, windows.number, x.shape[1]), dtype=_wide(x), device=x.device)
        won = torch.empty(pieces.shape, dtype=torch.int32, device=x.device)
        where = (num_lists, windows.steps, windows.length)
        grid = (windows.number, tiles.blocks)
        launch(reduce.max_windows, (*grid, 2), *given, pieces, won, *where, *sizes, SUM=_language(x), **constants)
        launch(reduce.max_pieces, grid, indptr, pieces, won, out, winners, *where, heads, tiles.share, **constants)
    return out, winners


def dot_rows(lists: Lists, x: Tensor, y: Tensor, heads: int, winners: Tensor | None) -> Tensor:
    """Implement `hoploom.ops.rows.dot_rows` on a device; return float32 for half-precision rows."""
    (indptr, rows, lists_of), x, y = lists, _matrix(x), _matrix(y)
    out = torch.empty((rows.numel(), heads), dtype=_wide(x), device=x.device)
    if x.shape[1] == 0 or out.numel() == 0:
        return out.zero_()
    tiles = tiles_of(heads, x, y)
    some = min(4 * tiles.lists, MOST_LISTS)
    launch(
        reduce.dot_edges, (*blocks_of(rows.numel(), some), heads),
        indptr, rows, lists_of, x, y, winners, out, indptr.numel() - 1, rows.numel(), heads,
        tiles.share, x.stride(0) // tiles.unit, y.stride(0) // tiles.unit,
        device=x.device, UNIT=tiles.unit, EDGES=some, COLUMNS=tiles.columns,
    )  # fmt: skip
    return out


def softmax_lists(indptr: Tensor, scores: Tensor, grad: Tensor | None) -> Tensor:
    """Implement `hoploom.ops.rows.softmax_lists` on a device; return float32 for half-precision scores."""
    out = torch.zeros(scores.shape, dtype=_wide(scores), device=scores.device)
    num_lists, (num_entries, heads) = indptr.numel() - 1, scores.shape
    entries = FEW if num_entries <= 2 * FEW * num_lists else MANY
    wide_heads = triton.next_power_of_2(max(heads, 1))
    lists = max(1, TILE_BYTES // out.itemsize // (entries * wide_heads))
    arrays = (scores.contiguous(),) if grad is None else (scores.contiguous(), grad.contiguous())
    launch(
        reduce.soften if grad is None else reduce.soften_backward,
        blocks_of(num_lists if heads else 0, lists),
        indptr, *arrays, out, num_lists, heads, num_entries,
        device=scores.device, SUM=_language(out),
        LISTS=lists, ENTRIES=entries, HEADS=wide_heads,
    )  # fmt: skip
    return out


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _matrix(x: Tensor) -> Tensor:
    """Return the matrix, copied only if the values of a row are not contiguous."""
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def _language(x: Tensor) -> Any:
    """Return the Triton dtype in which to sum rows of x."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32
