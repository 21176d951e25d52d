"""Where a list begins and which columns a program has: what all kernels over lists share."""

import triton
import triton.language as tl

# Arguments whose values are no reason to compile again: whether one is 1, or a multiple of 16.
SIZES = ["num_lists", "num_edges", "longest", "steps", "share_units", "stride_units", "x_units", "y_units"]


@triton.jit
def columns_of(share, COLUMNS: tl.constexpr):
    """A program's head, its columns and which of them there are [1, columns]; every head has `share` of them."""
    blocks = tl.cdiv(share, COLUMNS)
    block = tl.program_id(1)
    offset = block % blocks * COLUMNS + tl.arange(0, COLUMNS)
    head = block // blocks
    return head, (head * share + offset)[None, :], (offset < share)[None, :]


@triton.jit
def short_lists(indptr, num_lists, window, LISTS: tl.constexpr):
    """A program's lists: which they are, which it walks by itself, and their ends. Of others both ends are 0.

    All [lists, 1]: where they had one dimension, Triton 3.7 failed to lay some numbers of lists out beside columns.
    """
    lists = tl.program_id(0).to(tl.int64) * LISTS + tl.arange(0, LISTS)[:, None]
    is_list = lists < num_lists
    begin = tl.load(indptr + lists, mask=is_list, other=0)
    end = tl.load(indptr + lists + 1, mask=is_list, other=0)
    is_short = is_list & (end - begin <= window)
    return lists, is_short, tl.where(is_short, begin, 0), tl.where(is_short, end, 0)


@triton.jit
def most_of(count):
    """The greatest of [lists, 1]."""
    return tl.max(tl.max(count, 1), 0)


@triton.jit
def at_entry(array, entry, end):
    """What an array holds for entries before the end, as int64; without an array the entries themselves."""
    found = entry
    if array is not None:
        found = tl.load(array + entry, mask=entry < end, other=0).to(tl.int64)
    return found


@triton.jit
def list_of(indptr, entry, num_lists, steps):
    """The list that an entry stands in: the last that begins at it or before. Found in `steps` halvings."""
    low = entry * 0
    high = low + num_lists
    for _ in range(steps):
        middle = (low + high) // 2
        is_before = tl.load(indptr + middle) <= entry
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def long_list(indptr, num_lists, steps, window, begins_here):
    """The long list that begins in the program's window of entries, or the one that comes from before it.

    Its number, whether there is one, its ends, and the ends of what the window holds of it. A long list is longer than
    a window: one that begins here has the window's last entry, one from before has the first.
    """
    first = tl.program_id(0).to(tl.int64) * window
    last = tl.minimum(first + window, tl.load(indptr + num_lists))
    row = list_of(indptr, tl.maximum(tl.where(begins_here, last - 1, first), 0), num_lists, steps)
    begin = tl.load(indptr + row)
    end = tl.load(indptr + row + 1)
    is_there = (first < last) & (end - begin > window) & ((begin >= first) == begins_here)
    return row, is_there, begin, end, tl.maximum(begin, first), tl.minimum(end, last)
