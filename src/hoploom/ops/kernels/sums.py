"""Sums of rows over lists: each program adds the rows of a few lists, in their order, in some columns.

Loads of several entries are under way at once, and no thread waits for another. Lists longer than a window are added
window by window, then the windows' sums: always the same way, so results do not change from run to run.
"""
# mypy: disable-error-code="assignment, var-annotated"

import triton
import triton.language as tl

from hoploom.ops.kernels.walks import SIZES, at_entry, columns_of, long_list, most_of, short_lists


@triton.jit
def add_entries(
    total, begin, end, rows, places, x, stride, weights, heads, head, winners, starts, width, columns, inside,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """total [lists, columns] plus the entries begin to end; of `winners` only those that the entry has won."""
    for step in range(0, most_of(end - begin), AHEAD):
        first = begin + step
        picked = ()
        stands = ()
        for ahead in tl.static_range(AHEAD):
            picked += (at_entry(rows, first + ahead, end),)
            stands += (at_entry(places, first + ahead, end),)
        values = ()
        factors = ()
        origins = ()
        for ahead in tl.static_range(AHEAD):
            live = first + ahead < end
            mask = live & inside
            values += (tl.load(x + picked[ahead] * stride + columns, mask=mask, other=0),)
            if weights is not None:
                factors += (tl.load(weights + stands[ahead] * heads + head, mask=live, other=0),)
            if winners is not None:
                offset = picked[ahead] * width + columns
                factors += (tl.load(winners + offset, mask=mask, other=-1),)
                origins += (tl.load(starts + picked[ahead], mask=live, other=0),)
        for ahead in tl.static_range(AHEAD):
            value = values[ahead].to(total.dtype)
            if weights is not None:
                value = value * factors[ahead].to(total.dtype)
            if winners is not None:
                value = tl.where(factors[ahead] == stands[ahead] - origins[ahead], value, 0)
            total += value
    return total


@triton.jit
def scaled(total, count, MEAN: tl.constexpr):
    """Sums over counts, or as they are."""
    if MEAN:
        divisor = tl.maximum(count, 1).to(total.dtype)
        one = divisor * 0 + 1
        total = total * (one / divisor if total.dtype == tl.float64 else tl.div_rn(one, divisor))
    return total


@triton.jit(do_not_specialize=SIZES)
def sum_short(
    indptr, rows, places, x, weights, winners, starts, out, num_lists, window, heads, share_units, stride_units,
    MEAN: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr, LISTS: tl.constexpr, COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """out[i] of all lists within a window's length."""
    share, stride = share_units * UNIT, stride_units * UNIT
    width = share * heads
    lists, is_short, begin, end = short_lists(indptr, num_lists, window, LISTS)
    head, columns, inside = columns_of(share, COLUMNS)
    total = tl.zeros([LISTS, COLUMNS], SUM)
    total = add_entries(
        total, begin, end, rows, places, x, stride, weights, heads, head, winners, starts, width, columns, inside, AHEAD
    )
    total = scaled(total, end - begin, MEAN)
    tl.store(out + lists * width + columns, total, mask=is_short & inside)


@triton.jit
def parts_of(begin, end, PARTS: tl.constexpr):
    """A range of entries as so many parts [parts, 1] of one length; the last ones may be shorter."""
    length = tl.cdiv(end - begin, PARTS)
    first = begin + tl.arange(0, PARTS)[:, None] * length
    return tl.minimum(first, end), tl.minimum(first + length, end)


@triton.jit(do_not_specialize=SIZES)
def sum_windows(
    indptr, rows, places, x, weights, winners, starts, pieces, num_lists, steps, window, heads, share_units,
    stride_units, UNIT: tl.constexpr, SUM: tl.constexpr, LISTS: tl.constexpr, COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """pieces[0, w] and pieces[1, w]: what window w adds to a long list from before it, and to one that begins in it."""
    share, stride = share_units * UNIT, stride_units * UNIT
    width = share * heads
    begins_here = tl.program_id(2)
    _, is_there, _, _, begin, end = long_list(indptr, num_lists, steps, window, begins_here == 1)
    if is_there:
        head, columns, inside = columns_of(share, COLUMNS)
        first, last = parts_of(begin, end, LISTS)
        total = tl.zeros([LISTS, COLUMNS], SUM)
        total = add_entries(
            total, first, last, rows, places, x, stride, weights, heads, head, winners, starts, width, columns, inside,
            AHEAD,
        )  # fmt: skip
        piece = begins_here.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        tl.store(pieces + piece * width + columns, tl.sum(total, 0)[None, :], mask=inside)


@triton.jit(do_not_specialize=SIZES)
def sum_pieces(
    indptr, pieces, out, num_lists, steps, window, heads, share_units,
    MEAN: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr, LISTS: tl.constexpr, COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """out[i] of the long list that begins in the program's window."""
    share = share_units * UNIT
    width = share * heads
    row, is_there, begin, end, _, _ = long_list(indptr, num_lists, steps, window, True)
    if is_there:
        head, columns, inside = columns_of(share, COLUMNS)
        own = tl.program_id(0).to(tl.int64)
        first, last = parts_of(own + 1, (end - 1) // window + 1, LISTS)
        total = tl.zeros([LISTS, COLUMNS], SUM)
        total = add_entries(
            total, first, last, None, None, pieces, width, None, heads, head, None, None, width, columns, inside, AHEAD
        )
        begins = pieces + tl.num_programs(0).to(tl.int64) * width
        sums = tl.load(begins + own * width + columns, mask=inside, other=0) + tl.sum(total, 0)[None, :]
        tl.store(out + row * width + columns, scaled(sums, end - begin, MEAN), mask=inside)
