"""Reductions of rows over lists: sums, maxima, and the dot products of the rows at both ends of every edge.

Each program reduces a few lists in some columns, entry by entry. Loads of several entries overlap, and no thread waits
for another. Lists longer than a window of entries are reduced window by window, then the windows' results are reduced,
always in the same order: results are reproducible.
"""
# mypy: disable-error-code="assignment, var-annotated"

import triton
import triton.language as tl

# Arguments that must not recompile a kernel when they become 1 or a multiple of 16.
SIZES = ["num_lists", "num_edges", "longest", "steps", "share_units", "stride_units", "x_units", "y_units"]


@triton.jit
def columns_of(share, COLUMNS: tl.constexpr):
    """Return the head and columns [1, COLUMNS] that a program reduces, and their mask; a head has `share` columns."""
    blocks = tl.cdiv(share, COLUMNS)
    block = tl.program_id(1)
    offset = block % blocks * COLUMNS + tl.arange(0, COLUMNS)
    head = block // blocks
    return head, (head * share + offset)[None, :], (offset < share)[None, :]


@triton.jit
def short_lists(indptr, num_lists, window, LISTS: tl.constexpr):
    """Return a program's lists, the mask of lists no longer than a window, and their first and end entries.

    All are [LISTS, 1]: with one dimension, Triton 3.7 failed to broadcast some numbers of lists against columns.
    """
    lists = tl.program_id(0).to(tl.int64) * LISTS + tl.arange(0, LISTS)[:, None]
    is_list = lists < num_lists
    begin = tl.load(indptr + lists, mask=is_list, other=0)
    end = tl.load(indptr + lists + 1, mask=is_list, other=0)
    is_short = is_list & (end - begin <= window)
    return lists, is_short, tl.where(is_short, begin, 0), tl.where(is_short, end, 0)


@triton.jit
def most_of(count):
    """Return the maximum of a tile [lists, 1], as a scalar."""
    return tl.max(tl.max(count, 1), 0)


@triton.jit
def at_entry(array, entry, end):
    """Return array[entry] as int64, or 0 for entries from `end` on; without an array, return `entry`."""
    found = entry
    if array is not None:
        found = tl.load(array + entry, mask=entry < end, other=0).to(tl.int64)
    return found


@triton.jit
def list_of(indptr, entry, num_lists, steps):
    """Return the index of the list that has this entry, by binary search in `steps` steps."""
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
    """Find the list longer than a window that begins in this program's window (`begins_here`) or continues into it.

    Return the list's index, whether there is one, its first and end entry, and the first and end of its entries in the
    window. A long list that begins in a window has its last entry; one that continues into it has its first entry.
    """
    first = tl.program_id(0).to(tl.int64) * window
    last = tl.minimum(first + window, tl.load(indptr + num_lists))
    row = list_of(indptr, tl.maximum(tl.where(begins_here, last - 1, first), 0), num_lists, steps)
    begin = tl.load(indptr + row)
    end = tl.load(indptr + row + 1)
    is_there = (first < last) & (end - begin > window) & ((begin >= first) == begins_here)
    return row, is_there, begin, end, tl.maximum(begin, first), tl.minimum(end, last)


@triton.jit
def term_of(like, term, weight, at, width, num_features, columns, live, inside):
    """Return the terms of edges `at`, in the dtype of `like`: weight @ features, or rows of full width."""
    mask = live & inside
    if weight is None:
        added = tl.load(term + at * width + columns, mask=mask, other=0).to(like.dtype)
    else:
        added = tl.zeros(mask.shape, like.dtype)
        for k in range(num_features):
            feature = tl.load(term + at * num_features + k, mask=live, other=0).to(like.dtype)
            added += feature * tl.load(weight + k * width + columns, mask=inside, other=0).to(like.dtype)
    return added


# --- sums ------------------------------------------------------------------------------------------


@triton.jit
def add_entries(
    total, begin, end, rows, places, x, stride, weights, heads, head, winners, starts, width, columns, inside,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Add each list's rows to `total` [lists, columns]; return it. With `winners`, add only gradients of maxima."""
    for step in range(0, most_of(end - begin), AHEAD):
        first = begin + step
        picked = ()
        stands = ()
        for ahead in tl.static_range(AHEAD):
            picked += (at_entry(rows, first + ahead, end),)
            stands += (at_entry(places, first + ahead, end),)
        values = ()
        factors = ()
        numbers = ()
        origins = ()
        for ahead in tl.static_range(AHEAD):
            live = first + ahead < end
            mask = live & inside
            values += (tl.load(x + picked[ahead] * stride + columns, mask=mask, other=0),)
            if weights is not None:
                factors += (tl.load(weights + stands[ahead] * heads + head, mask=live, other=0),)
            if winners is not None:
                numbers += (tl.load(winners + picked[ahead] * width + columns, mask=mask, other=-1),)
                origins += (tl.load(starts + picked[ahead], mask=live, other=0),)
        for ahead in tl.static_range(AHEAD):
            value = values[ahead].to(total.dtype)
            if weights is not None:
                value = value * factors[ahead].to(total.dtype)
            if winners is not None:
                value = tl.where(numbers[ahead] == stands[ahead] - origins[ahead], value, 0)
            total += value
    return total


@triton.jit
def scaled(total, count, MEAN: tl.constexpr):
    """Return the mean, total / count, if MEAN, else `total`."""
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
    """Write the sum or mean of every list no longer than a window to out[list]."""
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
    """Return the first and end entries of PARTS equal parts of a range, [PARTS, 1]; the last parts may be shorter."""
    length = tl.cdiv(end - begin, PARTS)
    first = begin + tl.arange(0, PARTS)[:, None] * length
    return tl.minimum(first, end), tl.minimum(first + length, end)


@triton.jit(do_not_specialize=SIZES)
def sum_windows(
    indptr, rows, places, x, weights, winners, starts, pieces, num_lists, steps, window, heads, share_units,
    stride_units, UNIT: tl.constexpr, SUM: tl.constexpr, LISTS: tl.constexpr, COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Write the sum of a long list's entries in window w to pieces[1, w] if it begins there, else to pieces[0, w]."""
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
    """Add up the sums per window (`pieces`) of the long list that begins in this program's window; write the result."""
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


# --- maxima: of equal entries the first wins; the first NaN wins over all numbers ------------------


@triton.jit
def take_entries(
    best, winner, begin, end, origin, rows, x, stride, winners, weights, term, weight, heads, head, num_features,
    width, columns, inside, AHEAD: tl.constexpr,
):  # fmt: skip
    """Raise `best` [lists, columns] to the maxima of weight * row + term; return `best`, and `winner`, their entries.

    An entry's number is counted from `origin` or, with `winners`, read from there at the entry's row; -1: none yet.
    """
    for step in range(0, most_of(end - begin), AHEAD):
        first = begin + step
        picked = ()
        for ahead in tl.static_range(AHEAD):
            picked += (at_entry(rows, first + ahead, end),)
        values = ()
        factors = ()
        numbers = ()
        for ahead in tl.static_range(AHEAD):
            mask = (first + ahead < end) & inside
            offset = picked[ahead] * stride + columns
            values += (tl.load(x + offset, mask=mask, other=0),)
            if weights is not None:
                factors += (tl.load(weights + (first + ahead) * heads + head, mask=first + ahead < end, other=0),)
            if winners is None:
                numbers += ((first + ahead - origin).to(tl.int32),)
            else:
                numbers += (tl.load(winners + offset, mask=mask, other=-1),)
        for ahead in tl.static_range(AHEAD):
            live = first + ahead < end
            value = values[ahead].to(best.dtype)
            if weights is not None:
                value = value * factors[ahead].to(best.dtype)
            if term is not None:
                value += term_of(value, term, weight, first + ahead, width, num_features, columns, live, inside)
            is_better = (winner < 0) | (value > best) | ((value != value) & (best == best))
            wins = is_better & live
            best = tl.where(wins, value, best)
            winner = tl.where(wins, numbers[ahead], winner)
    return best, winner


@triton.jit(do_not_specialize=SIZES)
def max_short(
    indptr, rows, x, weights, term, weight, out, winners, num_lists, window, heads, num_features, share_units,
    stride_units, UNIT: tl.constexpr, SUM: tl.constexpr, LISTS: tl.constexpr, COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Write the maxima of every list no longer than a window to `out`, and the entries that have them to `winners`."""
    share, stride = share_units * UNIT, stride_units * UNIT
    width = share * heads
    lists, is_short, begin, end = short_lists(indptr, num_lists, window, LISTS)
    head, columns, inside = columns_of(share, COLUMNS)
    best = tl.zeros([LISTS, COLUMNS], SUM)
    winner = tl.full([LISTS, COLUMNS], -1, tl.int32)
    best, winner = take_entries(
        best, winner, begin, end, begin, rows, x, stride, None, weights, term, weight, heads, head, num_features,
        width, columns, inside, AHEAD,
    )  # fmt: skip
    mask = is_short & inside
    offset = lists * width + columns
    tl.store(out + offset, best, mask=mask)
    tl.store(winners + offset, winner, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def max_windows(
    indptr, rows, x, weights, term, weight, pieces, winners, num_lists, steps, window, heads, num_features,
    share_units, stride_units, UNIT: tl.constexpr, SUM: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Write a long list's maxima in a window to `pieces`, their entries to `winners`, placed as by `sum_windows`."""
    share, stride = share_units * UNIT, stride_units * UNIT
    width = share * heads
    begins_here = tl.program_id(2)
    _, is_there, origin, _, begin, end = long_list(indptr, num_lists, steps, window, begins_here == 1)
    if is_there:
        head, columns, inside = columns_of(share, COLUMNS)
        best = tl.zeros([1, COLUMNS], SUM)
        winner = tl.full([1, COLUMNS], -1, tl.int32)
        first = begin + tl.arange(0, 1)[:, None]
        best, winner = take_entries(
            best, winner, first, end, origin, rows, x, stride, None, weights, term, weight, heads, head, num_features,
            width, columns, inside, AHEAD,
        )  # fmt: skip
        piece = begins_here.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        offset = piece * width + columns
        tl.store(pieces + offset, best, mask=inside)
        tl.store(winners + offset, winner, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def max_pieces(
    indptr, pieces, piece_winners, out, winners, num_lists, steps, window, heads, share_units,
    UNIT: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Write the maxima of the long list that begins in this program's window, and the entries that have them."""
    share = share_units * UNIT
    width = share * heads
    row, is_there, _, end, _, _ = long_list(indptr, num_lists, steps, window, True)
    if is_there:
        head, columns, inside = columns_of(share, COLUMNS)
        own = tl.program_id(0).to(tl.int64)
        begins = (own + tl.num_programs(0)) * width + columns
        best = tl.load(pieces + begins, mask=inside, other=0)
        winner = tl.load(piece_winners + begins, mask=inside, other=-1)
        first = own + 1 + tl.arange(0, 1)[:, None]
        last = (end - 1) // window + 1
        best, winner = take_entries(
            best, winner, first, last, own, None, pieces, width, piece_winners, None, None, None, heads, head, 0,
            width, columns, inside, AHEAD,
        )  # fmt: skip
        offset = row * width + columns
        tl.store(out + offset, best, mask=inside)
        tl.store(winners + offset, winner, mask=inside)


# --- dot products: edges are independent, so many programs share a long list ----------------------


@triton.jit(do_not_specialize=SIZES)
def dot_edges(
    indptr, sources, destinations, x, y, winners, out, num_lists, num_edges, heads, share_units, x_units, y_units,
    UNIT: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write out[edge, head]: the dot product of both ends' rows over the head's columns; 0 after the last edge.

    With `winners`, the product is over the columns that the edge has won.
    """
    share, x_stride, y_stride = share_units * UNIT, x_units * UNIT, y_units * UNIT
    edge = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    head = tl.program_id(1)
    live = edge < tl.load(indptr + num_lists)
    source = tl.load(sources + edge, mask=live, other=0).to(tl.int64)
    destination = tl.load(destinations + edge, mask=live, other=0)
    total = tl.zeros([EDGES, COLUMNS], out.dtype.element_ty)
    for first in range(0, share, COLUMNS):
        offset = first + tl.arange(0, COLUMNS)
        column = (head * share + offset)[None, :]
        mask = live[:, None] & (offset < share)[None, :]
        if winners is not None:
            won = tl.load(winners + (destination * share * heads)[:, None] + column, mask=mask, other=-1)
            mask &= won == (edge - tl.load(indptr + destination, mask=live, other=0))[:, None]
        left = tl.load(x + (source * x_stride)[:, None] + column, mask=mask, other=0).to(total.dtype)
        right = tl.load(y + (destination * y_stride)[:, None] + column, mask=mask, other=0).to(total.dtype)
        total += left * right
    tl.store(out + edge * heads + head, tl.sum(total, 1), mask=edge < num_edges)


# --- softmax within each list: three passes over the scores, the first of which loads them into the cache


@triton.jit
def _tile(begin, end, step, heads, ENTRIES: tl.constexpr, HEADS: tl.constexpr):
    """Return indices and mask of the values of ENTRIES entries per list, from `step` on: [lists, ENTRIES, HEADS]."""
    entry = begin + step + tl.arange(0, ENTRIES)[None, :]
    head = tl.arange(0, HEADS)[None, None, :]
    return (entry * heads)[:, :, None] + head, (entry < end)[:, :, None] & (head < heads)


@triton.jit(do_not_specialize=SIZES)
def soften(
    indptr, scores, out, num_lists, heads, longest,
    SUM: tl.constexpr, LISTS: tl.constexpr, ENTRIES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write the softmax of every list's scores: exp(score - the list's maximum), divided by the list's sum of these."""
    _, _, begin, end = short_lists(indptr, num_lists, longest, LISTS)
    most = most_of(end - begin)
    greatest = tl.full([LISTS, HEADS], -float("inf"), SUM)
    for step in range(0, most, ENTRIES):
        at, mask = _tile(begin, end, step, heads, ENTRIES, HEADS)
        greatest = tl.maximum(greatest, tl.max(tl.load(scores + at, mask=mask, other=-float("inf")).to(SUM), 1))
    total = tl.zeros([LISTS, HEADS], SUM)
    for step in range(0, most, ENTRIES):
        at, mask = _tile(begin, end, step, heads, ENTRIES, HEADS)
        score = tl.load(scores + at, mask=mask, other=0).to(SUM)
        total += tl.sum(tl.where(mask, tl.exp(score - greatest[:, None, :]), 0), 1)
    for step in range(0, most, ENTRIES):
        at, mask = _tile(begin, end, step, heads, ENTRIES, HEADS)
        score = tl.load(scores + at, mask=mask, other=0).to(SUM)
        tl.store(out + at, tl.exp(score - greatest[:, None, :]) / total[:, None, :], mask=mask)


@triton.jit(do_not_specialize=SIZES)
def soften_backward(
    indptr, weights, grad, out, num_lists, heads, longest,
    SUM: tl.constexpr, LISTS: tl.constexpr, ENTRIES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the scores: weight * (grad - the list's sum of weight * grad)."""
    _, _, begin, end = short_lists(indptr, num_lists, longest, LISTS)
    most = most_of(end - begin)
    total = tl.zeros([LISTS, HEADS], SUM)
    for step in range(0, most, ENTRIES):
        at, mask = _tile(begin, end, step, heads, ENTRIES, HEADS)
        weight = tl.load(weights + at, mask=mask, other=0).to(SUM)
        total += tl.sum(weight * tl.load(grad + at, mask=mask, other=0).to(SUM), 1)
    for step in range(0, most, ENTRIES):
        at, mask = _tile(begin, end, step, heads, ENTRIES, HEADS)
        weight = tl.load(weights + at, mask=mask, other=0).to(SUM)
        value = tl.load(grad + at, mask=mask, other=0).to(SUM)
        tl.store(out + at, weight * (value - total[:, None, :]), mask=mask)
