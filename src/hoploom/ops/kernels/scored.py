"""Weighted and LABOR sampling. A node's edges are read several times, so that no scores need to be stored.

Without replacement, each edge has a 64-bit score, and the `fanout` edges with the lowest scores are picked; ties go to
the first edges. The highest score to pick is found eight bits at a time by counting, usually in three passes.
"""

import triton
import triton.language as tl

from hoploom.ops.kernels.launch import kernel
from hoploom.ops.kernels.philox import wide
from hoploom.ops.kernels.picks import edge_at, key_of, put, row_at, weight_at


@triton.jit
def exact_log(x):
    """Return ln(x) of float64 for 0 < x < 1, from +, -, *, / only, so that every device rounds equally."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1022
    m = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    is_small = m < tl.full([], 0.70710678118654752, tl.float64)
    m = tl.where(is_small, m * 2.0, m)
    exponent = tl.where(is_small, exponent - 1, exponent).to(tl.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = z * 0.0
    for i in tl.static_range(11):
        series = series * z + tl.full([], 1.0 / (21 - 2 * i), tl.float64)
    return exponent * tl.full([], 0.69314718055994531, tl.float64) + 2.0 * s * series


@triton.jit
def unit(key, ids, stream, draw):
    """Return a random float64 per id, strictly inside (0, 1): the middle of one of 2^52 equal intervals."""
    return ((wide(key, ids, stream, draw) >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def scores(
    key, node, stream, start, population, begin, indices, weight, excluded, num_excluded, reach,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the uint64 scores of a list's CHUNK edges from `begin` on, and the mask of edges that can be picked."""
    offset = begin + tl.arange(0, CHUNK)
    is_edge = offset < population
    if weight is None:
        position = edge_at(start + offset, excluded, num_excluded, reach)
        source = tl.load(indices + position, mask=is_edge, other=0).to(tl.int64)
        score = wide(key, source, tl.full([], 0xFFFFFFFF, tl.uint32), offset * 0)
    else:
        heavy = weight_at(start + offset, is_edge, weight, excluded, num_excluded, reach)
        is_edge &= heavy > 0
        race = -exact_log(unit(key, node + (offset * 0), stream, offset))
        score = (race / tl.where(is_edge, heavy, 1.0).to(tl.float64)).to(tl.uint64, bitcast=True)
    return score, is_edge


@triton.jit
def divide(
    key, node, stream, start, population, wanted, indices, weight, excluded, num_excluded, reach,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Find the threshold of the `wanted` lowest scores by radix select; return (prefix, shift, missing).

    Picks are all edges with score >> shift < prefix, and the first `missing` edges with score >> shift == prefix.
    """
    prefix = (wanted * 0).to(tl.uint64)
    shift = prefix + 64
    missing = wanted
    size = wanted + 1  # number of edges whose score begins with the prefix
    bins = tl.arange(0, 256)
    while (shift > 0) & (size != missing):
        shift -= 8
        counts = tl.zeros([256], tl.int32)
        begin = wanted * 0
        while begin < population:
            score, is_edge = scores(
                key, node, stream, start, population, begin, indices, weight, excluded, num_excluded, reach, CHUNK
            )
            head = score >> shift
            counts += tl.histogram((head & 255).to(tl.int32), 256, mask=is_edge & ((head >> 8) == prefix))
            begin += CHUNK
        digit = tl.sum((tl.cumsum(counts, 0) < missing).to(tl.int32), 0)
        size = tl.sum(tl.where(bins == digit, counts, 0), 0).to(tl.int64)
        missing -= tl.sum(tl.where(bins < digit, counts, 0), 0)
        prefix = (prefix << 8) + digit.to(tl.uint64)
    return prefix, shift, missing


@kernel
def keep_lowest(
    nodes, trees, begin_at, rows, starts, populations, bounds, key_at, stream, fanout, indices, weight,
    excluded, num_excluded, reach, picks_begin, sources, edges, destinations, capacity,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Pick the edges of one frontier node that have the lowest scores, and write them in list order."""
    row = tl.program_id(0).to(tl.int64)
    first, count, place, node, start, population = row_at(row, rows, bounds, begin_at, nodes, starts, populations)
    if count == 0:
        return
    key = key_of(key_at, trees, place, place >= 0)
    first += tl.load(picks_begin)
    stream = stream.to(tl.uint32)
    prefix, shift, missing = (count * 0).to(tl.uint64), (count * 0).to(tl.uint64), count
    is_whole = count != fanout
    if count == fanout:
        prefix, shift, missing = divide(
            key, node, stream, start, population, count, indices, weight, excluded, num_excluded, reach, CHUNK
        )
    num_ties, num_kept = count * 0, count * 0
    begin = count * 0
    while (num_kept < count) & (begin < population):
        score, is_edge = scores(
            key, node, stream, start, population, begin, indices, weight, excluded, num_excluded, reach, CHUNK
        )
        head = score >> shift
        is_tie = is_edge & (is_whole | (head == prefix))
        ties = is_tie.to(tl.int64)
        is_kept = is_tie & (num_ties + tl.cumsum(ties, 0) <= missing)
        is_kept |= is_edge & (head < prefix)
        kept = is_kept.to(tl.int64)
        offset = begin + tl.arange(0, CHUNK)
        out = first + num_kept + tl.cumsum(kept, 0) - 1
        position = start + offset
        if weight is None:
            position = edge_at(position, excluded, num_excluded, reach)
        put(out, position, place + (offset * 0), is_kept, indices, sources, edges, destinations, capacity)
        num_ties += tl.sum(ties, 0)
        num_kept += tl.sum(kept, 0)
        begin += CHUNK


@triton.jit
def weigh(weight, start, population, offset, excluded, num_excluded, reach):
    """Return the weight of each row's edge at `offset`, float64; 0 for weights below 0 and offsets beyond the list."""
    heavy = weight_at(start + offset, offset < population, weight, excluded, num_excluded, reach)
    return tl.where(heavy > 0, heavy, 0.0).to(tl.float64)


@kernel
def invert_sums(
    nodes, trees, begin_at, rows, starts, populations, bounds, key_at, stream, fanout, indices, weight,
    excluded, num_excluded, reach, picks_begin, sources, edges, destinations, capacity,
    ROWS: tl.constexpr, FANOUT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sample by weight with replacement: pick the edge at which the running weight sum exceeds a random target."""
    turns = tl.cdiv(fanout, FANOUT)
    program = tl.program_id(0)
    row = (program // turns).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    turn = (program % turns).to(tl.int64) * FANOUT + tl.arange(0, FANOUT)
    first, count, place, node, start, population = row_at(row, rows, bounds, begin_at, nodes, starts, populations)
    if tl.max(count, 0) == 0:
        return
    longest = tl.max(population, 0)
    total = tl.zeros([ROWS], tl.float64)
    at = longest * 0
    while at < longest:
        for step in tl.static_range(UNROLL):
            total += weigh(weight, start, population, at + step, excluded, num_excluded, reach)
        at += UNROLL
    turn = tl.broadcast_to(turn[None, :], [ROWS, FANOUT])
    none = turn * 0
    key = key_of(key_at, trees, place, count > 0)[:, None] + none.to(tl.uint64)
    target = unit(key, node[:, None] + none, stream.to(tl.uint32), turn) * total[:, None]
    found = find_sum(weight, start, population, longest, target, total, excluded, num_excluded, reach, UNROLL)
    out = tl.load(picks_begin) + first[:, None] + turn
    is_pick = turn < count[:, None]
    places = place[:, None] + none
    put(out, start[:, None] + found, places, is_pick, indices, sources, edges, destinations, capacity)


@triton.jit
def find_sum(
    weight, start, population, longest, target, total, excluded, num_excluded, reach,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Return the first offset at which the running sum of weights exceeds `target`, or reaches `total`."""
    found = (target < 0).to(tl.int64)
    final = (total < 0).to(tl.int64)
    reached = tl.zeros_like(total)
    at = longest * 0
    while at < longest:
        for step in tl.static_range(UNROLL):
            reached += weigh(weight, start, population, at + step, excluded, num_excluded, reach)
            found += (reached[:, None] <= target).to(tl.int64)
            final += (reached < total).to(tl.int64)
        at += UNROLL
    return tl.minimum(found, final[:, None])
