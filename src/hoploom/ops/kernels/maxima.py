"""The greatest of each list and column, and which entry it was: the first of equals, and the first NaN before all."""
# mypy: disable-error-code="assignment, var-annotated"

import triton
import triton.language as tl

from hoploom.ops.kernels.walks import SIZES, at_entry, columns_of, long_list, most_of, short_lists


@triton.jit
def take_entries(best, winner, begin, end, origin, rows, x, stride, winners, columns, inside, AHEAD: tl.constexpr):
    """The best of [lists, columns] and of the entries begin to end, with the entry that it was; -1: none yet.

    Entries count from `origin`, or `winners` has who stands for them.
    """
    for step in range(0, most_of(end - begin), AHEAD):
        first = begin + step
        picked = ()
        for ahead in tl.static_range(AHEAD):
            picked += (at_entry(rows, first + ahead, end),)
        values = ()
        numbers = ()
        for ahead in tl.static_range(AHEAD):
            mask = (first + ahead < end) & inside
            offset = picked[ahead] * stride + columns
            values += (tl.load(x + offset, mask=mask, other=0),)
            if winners is None:
                numbers += ((first + ahead - origin).to(tl.int32),)
            else:
                numbers += (tl.load(winners + offset, mask=mask, other=-1),)
        for ahead in tl.static_range(AHEAD):
            value = values[ahead].to(best.dtype)
            is_better = (winner < 0) | (value > best) | ((value != value) & (best == best))
            wins = is_better & (first + ahead < end)
            best = tl.where(wins, value, best)
            winner = tl.where(wins, numbers[ahead], winner)
    return best, winner


@triton.jit(do_not_specialize=SIZES)
def max_short(
    indptr, rows, x, out, winners, num_lists, window, share_units, stride_units,
    UNIT: tl.constexpr, SUM: tl.constexpr, LISTS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out[i] and winners[i] of all lists within a window's length."""
    width, stride = share_units * UNIT, stride_units * UNIT
    lists, is_short, begin, end = short_lists(indptr, num_lists, window, LISTS)
    _, columns, inside = columns_of(width, COLUMNS)
    best = tl.zeros([LISTS, COLUMNS], SUM)
    winner = tl.full([LISTS, COLUMNS], -1, tl.int32)
    best, winner = take_entries(best, winner, begin, end, begin, rows, x, stride, None, columns, inside, AHEAD)
    mask = is_short & inside
    offset = lists * width + columns
    tl.store(out + offset, best, mask=mask)
    tl.store(winners + offset, winner, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def max_windows(
    indptr, rows, x, pieces, winners, num_lists, steps, window, share_units, stride_units,
    UNIT: tl.constexpr, SUM: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The same of the pieces of long lists, as `sum_windows` lays them out."""
    width, stride = share_units * UNIT, stride_units * UNIT
    begins_here = tl.program_id(2)
    _, is_there, origin, _, begin, end = long_list(indptr, num_lists, steps, window, begins_here == 1)
    if is_there:
        _head, columns, inside = columns_of(width, COLUMNS)
        best = tl.zeros([1, COLUMNS], SUM)
        winner = tl.full([1, COLUMNS], -1, tl.int32)
        first = begin + tl.arange(0, 1)[:, None]
        best, winner = take_entries(best, winner, first, end, origin, rows, x, stride, None, columns, inside, AHEAD)
        piece = begins_here.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        offset = piece * width + columns
        tl.store(pieces + offset, best, mask=inside)
        tl.store(winners + offset, winner, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def max_pieces(
    indptr, pieces, piece_winners, out, winners, num_lists, steps, window, share_units,
    UNIT: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out[i] and winners[i] of the long list that begins in the program's window."""
    width = share_units * UNIT
    row, is_there, _, end, _, _ = long_list(indptr, num_lists, steps, window, True)
    if is_there:
        _head, columns, inside = columns_of(width, COLUMNS)
        own = tl.program_id(0).to(tl.int64)
        begins = (own + tl.num_programs(0)) * width + columns
        best = tl.load(pieces + begins, mask=inside, other=0)
        winner = tl.load(piece_winners + begins, mask=inside, other=-1)
        first = own + 1 + tl.arange(0, 1)[:, None]
        best, winner = take_entries(
            best,
            winner,
            first,
            (end - 1) // window + 1,
            own,
            None,
            pieces,
            width,
            piece_winners,
            columns,
            inside,
            AHEAD,
        )
        offset = row * width + columns
        tl.store(out + offset, best, mask=inside)
        tl.store(winners + offset, winner, mask=inside)
