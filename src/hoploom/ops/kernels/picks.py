"""Common parts of the sampling kernels, and the kernels that find each frontier node's edge list and count its picks.

Row r is entry begin + r of the frontier's nodes, and has the picks bounds[r] to bounds[r + 1] - 1. Counting checks all
list offsets, too, so that a damaged file cannot cause reads out of bounds: rows with a bad node or list have no picks.
"""

import triton
import triton.language as tl

from hoploom.ops.kernels import launch as forms
from hoploom.ops.kernels.launch import kernel
from hoploom.ops.kernels.philox import mix

NODE_OUT_OF_RANGE = tl.constexpr(forms.NODE_OUT_OF_RANGE)
LIST_DAMAGED = tl.constexpr(forms.LIST_DAMAGED)
SOURCE_OUT_OF_RANGE = tl.constexpr(forms.SOURCE_OUT_OF_RANGE)


@triton.jit
def rows_of(rows_at_once: tl.constexpr):
    """Return the indices of the frontier nodes (rows) that this program handles: [rows_at_once] int64."""
    return tl.program_id(0).to(tl.int64) * rows_at_once + tl.arange(0, rows_at_once)


@triton.jit
def row_at(row, rows, bounds, begin_at, nodes, starts, populations):
    """Return, per frontier node (row): first pick, number of picks, frontier index, node, list offset, list length."""
    first = tl.load(bounds + row, mask=row < rows, other=0)
    count = tl.load(bounds + row + 1, mask=row < rows, other=0) - first
    place = tl.load(begin_at) + row
    node = tl.load(nodes + place, mask=count > 0, other=0)
    start = tl.load(starts + row, mask=count > 0, other=0)
    return first, count, place, node, start, tl.load(populations + row, mask=count > 0, other=0)


@triton.jit
def key_of(key_at, trees, place, is_row):
    """Return the random key of each row (frontier node); in disjoint sampling, it depends on the node's seed, too."""
    key = tl.load(key_at).to(tl.uint64, bitcast=True) + (place * 0).to(tl.uint64)
    if trees is not None:
        key = mix(key, tl.load(trees + place, mask=is_row, other=0).to(tl.uint64))
    return key


@triton.jit
def put(out, position, place, is_pick, indices, sources, edges, destinations, capacity):
    """Write the edges at `position` in the edge lists to the picks with index `out`; skip picks beyond `capacity`."""
    fits = is_pick & (out < capacity)
    source = tl.load(indices + position, mask=fits, other=0).to(tl.int64)
    tl.store(sources + out, source, mask=fits)
    tl.store(edges + out, position, mask=fits)
    tl.store(destinations + out, place, mask=fits)


@triton.jit
def count_excluded(bound, excluded, num_excluded, reach, BY_RANK: tl.constexpr):
    """Return how many excluded positions are below `bound`; if BY_RANK, how many precede the edge with this rank.

    An edge's rank is its position less the number of excluded positions below it. `reach` is the highest power of two
    that is at most `num_excluded`.
    """
    found = bound * 0
    step = reach
    while step > 0:
        after = found + step
        is_there = after <= num_excluded
        position = tl.load(excluded + after - 1, mask=is_there, other=0)
        if BY_RANK:
            is_there &= position - (after - 1) <= bound
        else:
            is_there &= position < bound
        found = tl.where(is_there, after, found)
        step = step >> 1
    return found


@triton.jit
def edge_at(rank, excluded, num_excluded, reach):
    """Return the position of the edge with this rank among the edges that are not excluded."""
    if excluded is None:
        return rank
    else:
        return rank + count_excluded(rank, excluded, num_excluded, reach, True)


@triton.jit
def weight_at(position, is_edge, weight, excluded, num_excluded, reach):
    """Return the weights of edges; 0 for excluded ones, and where `is_edge` is false."""
    if excluded is not None:
        below = count_excluded(position, excluded, num_excluded, reach, False)
        is_there = is_edge & (below < num_excluded)
        is_edge &= ~(is_there & (tl.load(excluded + below, mask=is_there, other=0) == position))
    return tl.load(weight + position, mask=is_edge, other=0.0)


@kernel
def locate(
    nodes, trees, times, first_tree, num_places, begin_at, end_at, rows,
    indptr, first_node, num_nodes, indices, num_edges, edge_time, source_time, num_sources, window,
    fanout, excluded, num_excluded, reach, starts, populations, counts, faults,
    REPLACE: tl.constexpr, LAST: tl.constexpr, WINDOW: tl.constexpr, BY_RANK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write each frontier node's list offset, list length and number of picks.

    If BY_RANK, offsets are ranks and lengths count edges that are not excluded.
    """
    row = rows_of(ROWS)
    place = tl.load(begin_at) + row
    is_row = (row < rows) & (place < tl.minimum(tl.load(end_at), num_places))
    node = tl.load(nodes + place, mask=is_row, other=0) - first_node
    is_known = is_row & (node >= 0) & (node < num_nodes)
    start = tl.load(indptr + node, mask=is_known, other=0)
    end = tl.load(indptr + node + 1, mask=is_known, other=0)
    is_sound = is_known & (start >= 0) & (end >= start) & (end <= num_edges)
    population = tl.where(is_sound, end - start, 0)
    code = tl.where(is_row & ~is_known, NODE_OUT_OF_RANGE, tl.where(is_known & ~is_sound, LIST_DAMAGED, 0))
    if times is not None:
        tree = tl.load(trees + place, mask=is_row, other=first_tree)
        time = tl.load(times + tree - first_tree, mask=is_row, other=0)
        population, is_stray = count_until(start, population, time, indices, edge_time, source_time, num_sources)
        code = tl.where(is_stray, SOURCE_OUT_OF_RANGE, code)
        if WINDOW and (edge_time is not None or source_time is not None):
            too_old = time - window - 1
            expired, _ = count_until(start, population, too_old, indices, edge_time, source_time, num_sources)
            expired = tl.where(too_old < time, expired, 0)  # else it has wrapped around
            start += expired
            population -= expired
    if BY_RANK and excluded is not None:
        below = count_excluded(start, excluded, num_excluded, reach, False)
        population -= count_excluded(start + population, excluded, num_excluded, reach, False) - below
        start -= below
    count = count_picks(population, fanout, REPLACE)
    if LAST:
        start += population - count
        population = count
    inside = row < rows
    tl.store(starts + row, start, mask=inside)
    tl.store(populations + row, population, mask=inside)
    tl.store(counts + row + 1, count, mask=inside)
    tl.store(counts + row, count * 0, mask=row == 0)
    worst = tl.max(code, 0)
    if worst > 0:
        tl.atomic_max(faults, worst.to(tl.int64))


@triton.jit
def count_picks(population, fanout, REPLACE: tl.constexpr):
    """Return the number of picks from `population` edges, all of which can be picked."""
    some = tl.where(population > 0, fanout, 0).to(tl.int64) if REPLACE else tl.minimum(population, fanout)
    return tl.where(fanout < 0, population, some)


@triton.jit
def count_until(start, population, time, indices, edge_time, source_time, num_sources):
    """Return how many edges of each time-sorted list are not after `time`, and a mask of lists with a bad source id."""
    low, high = population * 0, population
    is_stray = population < 0
    if edge_time is None and source_time is None:
        low = population
    while tl.max(high - low, 0) > 0:
        is_open = low < high
        middle = low + ((high - low) >> 1)
        if edge_time is not None:
            then = tl.load(edge_time + start + middle, mask=is_open, other=0)
        else:
            source = tl.load(indices + start + middle, mask=is_open, other=0).to(tl.int64)
            is_stray |= is_open & ((source < 0) | (source >= num_sources))
            then = tl.load(source_time + source, mask=is_open & ~is_stray, other=0)
        is_seen = is_open & (then <= time)
        low = tl.where(is_seen, middle + 1, low)
        high = tl.where(is_open & ~is_seen, middle, high)
    return tl.where(is_stray, 0, low), is_stray


@kernel
def count_weighing(
    starts, populations, weight, excluded, num_excluded, reach, fanout, counts,
    REPLACE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Correct the number of picks of one frontier node: weighted sampling picks only edges of positive weight."""
    row = tl.program_id(0).to(tl.int64)
    start, population = tl.load(starts + row), tl.load(populations + row)
    enough = tl.where(fanout < 0, population, 1 if REPLACE else fanout)
    found = population * 0
    at = population * 0
    while (at < population) & (found < enough):
        offset = at + tl.arange(0, CHUNK)
        weighs = weight_at(start + offset, offset < population, weight, excluded, num_excluded, reach) > 0
        found += tl.sum(weighs.to(tl.int64), 0)
        at += CHUNK
    tl.store(counts + row + 1, count_picks(found, fanout, REPLACE))


@kernel
def settle(
    bounds, rows, begin_at, end_at, num_places, picks_begin, picks_end, indptr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write the index after the last pick to `picks_end`, and each frontier node's first pick to `indptr`, if given."""
    row = rows_of(ROWS)
    first = tl.load(picks_begin)
    if tl.program_id(0) == 0:
        tl.store(picks_end, first + tl.load(bounds + rows))
    if indptr is not None:
        place = tl.load(begin_at) + row
        is_place = (row <= rows) & (place <= tl.minimum(tl.load(end_at), num_places))
        tl.store(indptr + place, first + tl.load(bounds + row, mask=is_place, other=0), mask=is_place)
