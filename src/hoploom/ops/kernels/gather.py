"""Gather rows by id from device memory, pinned host memory or another GPU, with one kernel per field.

A field is ranges of ids, each with the address of its rows. Equal dtypes copy bytes, in the widest words that all
addresses allow; others convert, rounding to nearest even as torch does; int8 rows are multiplied by float32 scales.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hoploom.errors import ConfigError, DataError
from hoploom.ops.kernels.launch import SOURCE_OUT_OF_RANGE, blocks_of, launch

FLOATS = torch.float16, torch.bfloat16, torch.float32
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
VECTOR = 16  # bytes that one thread loads at once
TILE = 1024  # elements that a program loads at once
WIDEST = 512  # columns of a tile
QUANTISED_ROWS = 1 << 16  # rows quantized at once

# What changes from batch to batch must not compile kernels afresh; only where `out` lies makes faster code.
SIZES = ["num_rows", "num_segments", "end"]
ANYWHERE = ["ids", "bounds", "bases", "faults", "size", "scales", "like"]

BAD_SOURCE = tl.constexpr(SOURCE_OUT_OF_RANGE)


@dataclass(frozen=True)
class Segments:
    """The rows of one field: ids from bounds[s] to the next bound are the rows from address bases[s] on."""

    bounds: Tensor  # [S] int64, ascending, on the device that gathers
    bases: Tensor  # [S] int64
    end: int  # of the last segment
    shape: tuple[int, ...]  # of a row
    kept: torch.dtype
    out: torch.dtype
    align: int  # bytes, a power of two that divides every row's address
    scales: Tensor | None = None  # [S] int64: addresses of float32 scales, one per row
    keep: tuple[Tensor, ...] = ()  # tensors that own the memory at the addresses

    @classmethod
    def of(
        cls,
        pieces: Sequence[tuple[int, Tensor]],
        device: torch.device,
        out: torch.dtype | None = None,
        scales: Sequence[Tensor] | None = None,
    ) -> "Segments":
        """Make segments from (first id, rows), ordered by id without gaps; int8 rows need a scale per row."""
        rows = [piece for _, piece in pieces]
        shape, kept = tuple(rows[0].shape[1:]), rows[0].dtype
        ends = [first + piece.shape[0] for first, piece in pieces]
        assert all(end == first for end, (first, _) in zip(ends, pieces[1:], strict=False)), "ids have a gap"
        assert all(piece.shape[1:] == shape and piece.dtype == kept for piece in rows), "rows of one field are alike"
        keep = (*rows, *(scales or ()))
        _check(kept, out or kept, scales is not None, keep, device)
        row_bytes = math.prod(shape) * kept.itemsize
        return cls(
            bounds=torch.tensor([first for first, _ in pieces], dtype=torch.int64, device=device),
            bases=_addresses(rows, device),
            end=ends[-1],
            shape=shape,
            kept=kept,
            out=out or kept,
            align=math.gcd(VECTOR, row_bytes, *(piece.data_ptr() for piece in rows)),
            scales=None if scales is None else _addresses(scales, device),
            keep=keep,
        )


def gather(segments: Segments, ids: Tensor, out: Tensor, *, faults: Tensor, size: Tensor | None = None) -> Tensor:
    """Write rows[ids[i]] to out[i] for all i, or for i < `size` on the device. A bad id is skipped and is a fault."""
    assert (out.dtype, out.shape) == (segments.out, (ids.numel(), *segments.shape))
    assert out.is_contiguous()
    if out.numel() == 0:
        return out
    width, num_segments = math.prod(segments.shape), segments.bounds.numel()
    is_copy = segments.kept == segments.out and segments.scales is None
    align = math.gcd(segments.align, out.data_ptr()) if is_copy else segments.align
    if is_copy:
        word = min(8, align)
        width, written = width * segments.kept.itemsize // word, out.view(-1).view(torch.uint8).view(WORDS[word])
    else:
        written = _bits(out)
    columns = columns_of(width)
    tile = TILE // columns
    shared = ids, written, segments.bounds, segments.bases, faults, size, ids.numel(), num_segments, segments.end
    constants = {"STEPS": (num_segments - 1).bit_length(), "WIDTH": width, "ALIGN": align, "ROWS": tile}
    grid = blocks_of(ids.numel(), tile)
    if is_copy:
        launch(copy_rows, grid, *shared, device=ids.device, COLUMNS=columns, **constants)
        return out
    like = _bits(segments.bases.view(segments.kept))  # passes the dtype to the kernel
    constants |= {"FROM_BF16": segments.kept == torch.bfloat16, "TO_BF16": segments.out == torch.bfloat16}
    launch(convert_rows, grid, *shared, segments.scales, like, device=ids.device, COLUMNS=columns, **constants)
    return out


def columns_of(width: int) -> int:
    """Return the columns of a tile: the widest power of two with the least waste in a row's last tile."""
    widest = min(WIDEST, triton.next_power_of_2(width))
    choices = [columns for columns in (512, 256, 128, 64) if columns <= widest] or [widest]
    return min(choices, key=lambda columns: -width % columns)


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as int8 with a float32 scale each: the greatest magnitude of a row becomes 127."""
    small = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    scales = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
    for begin in range(0, rows.shape[0], QUANTISED_ROWS):
        chunk = rows[begin : begin + QUANTISED_ROWS].float()
        flat = chunk.reshape(chunk.shape[0], math.prod(rows.shape[1:]))
        greatest = flat.abs().amax(1) if flat.shape[1] else flat.sum(1)
        if not bool(greatest.isfinite().all()):
            row = begin + int((~greatest.isfinite()).nonzero()[0])
            raise DataError(f"row {row} holds a value that is not finite; int8 rows need finite ones")
        scale = greatest / 127
        levels = (flat / torch.where(scale > 0, scale, 1)[:, None]).round().clamp(-127, 127)
        scales[begin : begin + QUANTISED_ROWS] = scale
        small[begin : begin + QUANTISED_ROWS] = levels.reshape(chunk.shape).to(torch.int8)
    return small, scales


def _check(kept: torch.dtype, out: torch.dtype, has_scales: bool, held: Sequence[Tensor], device: torch.device) -> None:
    """Assert that dtypes and tensors fit: kernels read through unchecked addresses."""
    converts = kept == torch.int8 and out in FLOATS if has_scales else kept == out or {kept, out} <= {*FLOATS}
    assert converts, f"rows of {kept} cannot be gathered as {out}; floats convert, and int8 with scales to floats"
    for tensor in held:
        rows = f"rows of shape {list(tensor.shape)} are"
        if not tensor.is_contiguous():
            raise ConfigError(f"{rows} not contiguous; make them so")
        if device.type == "cuda" and tensor.numel() and not (tensor.is_cuda or tensor.is_pinned()):
            raise ConfigError(f"{rows} in host memory that {device} cannot read; pin them")


def _addresses(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.tensor([held.data_ptr() for held in tensors], dtype=torch.int64, device=device)


def _bits(floats: Tensor) -> Tensor:
    """Return bfloat16 as int16 bits: Triton's interpreter rounds bfloat16 wrongly."""
    return floats.view(torch.int16) if floats.dtype == torch.bfloat16 else floats


@triton.jit
def rows_at(ids, bounds, faults, size, num_rows, num_segments, end, STEPS: tl.constexpr, ROWS: tl.constexpr):
    """Return a block's rows: position in `out`, segment, row within it, and mask."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    if size is not None:
        live = live & (row < tl.load(size))
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
    ids, out, bounds, bases, faults, size, num_rows, num_segments, end,
    STEPS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy rows of WIDTH words, with tiles as wide as a row if possible, to read full cache lines."""
    row, segment, place, live = rows_at(ids, bounds, faults, size, num_rows, num_segments, end, STEPS, ROWS)
    word: tl.constexpr = out.dtype.element_ty
    start = tl.load(bases + segment, mask=live, other=0) + place * (WIDTH * (word.primitive_bitwidth // 8))
    kept = tl.multiple_of(start.to(tl.pointer_type(word))[:, None], [ALIGN, ALIGN])
    written = out + row[:, None] * WIDTH
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        mask = live[:, None] & (column < WIDTH)
        tl.store(written + column, tl.load(kept + column, mask=mask), mask=mask)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def convert_rows(
    ids, out, bounds, bases, faults, size, num_rows, num_segments, end, scales, like,
    STEPS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FROM_BF16: tl.constexpr, TO_BF16: tl.constexpr,
):  # fmt: skip
    """Convert rows of WIDTH elements from the dtype of `like` to that of `out`, through float32."""
    row, segment, place, live = rows_at(ids, bounds, faults, size, num_rows, num_segments, end, STEPS, ROWS)
    if scales is not None:
        scale_at = tl.load(scales + segment, mask=live, other=0).to(tl.pointer_type(tl.float32)) + place
        scale = tl.load(scale_at, mask=live, other=0)
    element: tl.constexpr = like.dtype.element_ty
    start = tl.load(bases + segment, mask=live, other=0) + place * (WIDTH * (element.primitive_bitwidth // 8))
    kept = tl.multiple_of(start.to(tl.pointer_type(element))[:, None], [ALIGN, ALIGN])
    written = out + row[:, None] * WIDTH
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        mask = live[:, None] & (column < WIDTH)
        value = widened(tl.load(kept + column, mask=mask), FROM_BF16)
        if scales is not None:
            value = value * scale[:, None]
        tl.store(written + column, narrowed(value, out.dtype.element_ty, TO_BF16), mask=mask)


@triton.jit
def widened(value, IS_BF16: tl.constexpr):
    """Return a value as float32; bfloat16 is passed as bits."""
    if IS_BF16:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def narrowed(value, element: tl.constexpr, IS_BF16: tl.constexpr):
    """Return a float32 rounded to nearest even; bfloat16 is returned as bits."""
    if IS_BF16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        value = tl.where(value == value, rounded, 0x7FC0)
    return value.to(element)
