"""Gather rows by id from device memory and pinned host memory, with one kernel per field.

The rows of a field are stored in segments: ranges of ids, each with the address of its first row. Rows are copied as
bytes, in the widest words that the alignment of all addresses allows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hoploom.errors import ConfigError
from hoploom.ops.deadline import on_host
from hoploom.ops.kernels.launch import SOURCE_OUT_OF_RANGE, blocks_of, launch

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
VECTOR = 16  # bytes that one thread loads at once
TILE = 1024  # elements that a program loads at once
WIDEST = 512  # most columns of a tile

# Arguments that change from batch to batch, which must not recompile kernels. Only the alignment of `out` gives speed.
SIZES = ["num_rows", "num_segments", "end"]
ANYWHERE = ["ids", "bounds", "bases", "faults"]

BAD_SOURCE = tl.constexpr(SOURCE_OUT_OF_RANGE)


@dataclass(frozen=True)
class Segments:
    """The rows of one field in memory. The rows of the ids bounds[s] to bounds[s + 1] - 1 begin at address bases[s]."""

    bounds: Tensor  # [S] int64, ascending, on the device that gathers
    bases: Tensor  # [S] int64
    end: int  # id after the last segment
    shape: tuple[int, ...]  # of a row
    dtype: torch.dtype
    align: int  # bytes, a power of two that divides every row's address
    keep: tuple[Tensor, ...] = ()  # tensors that own the memory at the addresses

    @classmethod
    def of(cls, pieces: Sequence[tuple[int, Tensor]], device: torch.device) -> "Segments":
        """Return segments for `pieces`: pairs (first id, rows), ordered by id. No id is gathered that has none."""
        rows = [piece for _, piece in pieces]
        shape, dtype = tuple(rows[0].shape[1:]), rows[0].dtype
        ends = [first + piece.shape[0] for first, piece in pieces]
        assert all(end <= first for end, (first, _) in zip(ends, pieces[1:], strict=False)), "ids are not ascending"
        assert all(piece.shape[1:] == shape and piece.dtype == dtype for piece in rows), "rows of one field are alike"
        for piece in rows:  # kernels read through unchecked addresses
            of_shape = f"rows of shape {list(piece.shape)} are"
            if not piece.is_contiguous():
                raise ConfigError(f"{of_shape} not contiguous; make them so")
            if device.type == "cuda" and piece.numel() and not (piece.is_cuda or piece.is_pinned()):
                raise ConfigError(f"{of_shape} in host memory that {device} cannot read; pin them")
        columns = [[first for first, _ in pieces], [piece.data_ptr() for piece in rows]]
        table = torch.tensor(columns, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        on_host(table, "taken in the addresses of rows")  # kernels on any stream may read them from now on
        bounds, bases = table
        return cls(
            bounds=bounds,
            bases=bases,
            end=ends[-1],
            shape=shape,
            dtype=dtype,
            align=math.gcd(VECTOR, math.prod(shape) * dtype.itemsize, *(piece.data_ptr() for piece in rows)),
            keep=tuple(rows),
        )


def gather(segments: Segments, ids: Tensor, out: Tensor, *, faults: Tensor) -> Tensor:
    """Copy the row of ids[i] to out[i], for all i. Ids out of range are skipped and set `faults`."""
    assert (out.dtype, out.shape) == (segments.dtype, (ids.numel(), *segments.shape))
    assert out.is_contiguous()
    if out.numel() == 0:
        return out
    num_segments = segments.bounds.numel()
    align = math.gcd(segments.align, out.data_ptr())
    word = min(8, align)
    width, written = math.prod(segments.shape) * out.itemsize // word, out.view(-1).view(torch.uint8).view(WORDS[word])
    columns = columns_of(width)
    tile = TILE // columns
    arguments = ids, written, segments.bounds, segments.bases, faults, ids.numel(), num_segments, segments.end
    constants = {"STEPS": (num_segments - 1).bit_length(), "WIDTH": width, "ALIGN": align, "ROWS": tile}
    grid = blocks_of(ids.numel(), tile)
    launch(copy_rows, grid, *arguments, device=ids.device, COLUMNS=columns, **constants)
    return out


def columns_of(width: int) -> int:
    """Return the number of columns of a tile: the widest power of two with the least waste in a row's last tile."""
    widest = min(WIDEST, triton.next_power_of_2(width))
    choices = [columns for columns in (512, 256, 128, 64) if columns <= widest] or [widest]
    return min(choices, key=lambda columns: -width % columns)


@triton.jit
def rows_at(ids, bounds, faults, num_rows, num_segments, end, STEPS: tl.constexpr, ROWS: tl.constexpr):
    """Return, for a program's rows: index in `out`, segment, index within the segment, and the mask of valid rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    id = tl.load(ids + row, mask=live, other=0).to(tl.int64)
    inside = (id >= tl.load(bounds)) & (id < end)
    if tl.max((live & (inside == 0)).to(tl.int32), 0) > 0:
        tl.atomic_max(faults, tl.full([], BAD_SOURCE, tl.int64))
    segment = tl.zeros([ROWS], tl.int32)
    for step in tl.static_range(STEPS):
        further = segment + (1 << (STEPS - 1 - step))
        bound = tl.load(bounds + further, mask=further < num_segments, other=end)
        segment = tl.where(bound <= id, further, segment)
    live = live & inside
    return row, segment, id - tl.load(bounds + segment, mask=live, other=0), live


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def copy_rows(
    ids, out, bounds, bases, faults, num_rows, num_segments, end,
    STEPS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy rows of WIDTH words each, in tiles as wide as a row if possible, so that full cache lines are read."""
    row, segment, place, live = rows_at(ids, bounds, faults, num_rows, num_segments, end, STEPS, ROWS)
    word: tl.constexpr = out.dtype.element_ty
    start = tl.load(bases + segment, mask=live, other=0) + place * (WIDTH * (word.primitive_bitwidth // 8))
    kept = tl.multiple_of(start.to(tl.pointer_type(word))[:, None], [ALIGN, ALIGN])
    written = out + row[:, None] * WIDTH
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        mask = live[:, None] & (column < WIDTH)
        tl.store(written + column, tl.load(kept + column, mask=mask), mask=mask)
