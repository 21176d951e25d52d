"""Kernels that sample uniformly or take whole lists. Work is O(fanout) up to a fanout of 64, else O(fanout^2)."""

import triton
import triton.language as tl

from hoploom.ops.kernels.launch import kernel
from hoploom.ops.kernels.philox import bounded
from hoploom.ops.kernels.picks import edge_at, key_of, put, row_at, rows_of


@kernel
def draw_few(
    nodes, trees, begin_at, rows, starts, populations, bounds, key_at, stream, fanout, indices, weight,
    excluded, num_excluded, reach, picks_begin, sources, edges, destinations, capacity,
    REPLACE: tl.constexpr, ROWS: tl.constexpr, FANOUT: tl.constexpr,
):  # fmt: skip
    """Draw all picks of ROWS frontier nodes (Floyd's algorithm, unless REPLACE). Nodes with few edges take them all."""
    row = rows_of(ROWS)
    first, count, place, node, start, population = row_at(row, rows, bounds, begin_at, nodes, starts, populations)
    if tl.max(count, 0) == 0:
        return
    key = key_of(key_at, trees, place, count > 0)
    turn = tl.broadcast_to(tl.arange(0, FANOUT)[None, :], [ROWS, FANOUT]).to(tl.int64)
    some = tl.broadcast_to(population[:, None], [ROWS, FANOUT])
    ids = tl.broadcast_to(node[:, None], [ROWS, FANOUT])
    key = tl.broadcast_to(key[:, None], [ROWS, FANOUT])
    if REPLACE:
        offset = bounded(key, ids, stream.to(tl.uint32), turn, some, some)
    else:
        newest = some - fanout + turn
        drawn = bounded(key, ids, stream.to(tl.uint32), turn, newest + 1, some)
        for i in range(1, fanout):
            now = tl.sum(tl.where(turn == i, drawn, 0), 1)
            seen = tl.max(((turn < i) & (drawn == now[:, None])).to(tl.int32), 1)
            drawn = tl.where((turn == i) & (seen[:, None] > 0), newest, drawn)
        offset = tl.where(some <= fanout, turn, drawn)
    out = tl.load(picks_begin) + first[:, None] + turn
    places = tl.broadcast_to(place[:, None], [ROWS, FANOUT])
    is_pick = turn < count[:, None]
    position = edge_at(start[:, None] + offset, excluded, num_excluded, reach)
    put(out, position, places, is_pick, indices, sources, edges, destinations, capacity)


@kernel
def draw_many(
    nodes, trees, begin_at, rows, starts, populations, bounds, key_at, stream, fanout, indices, weight,
    excluded, num_excluded, reach, picks_begin, sources, edges, destinations, capacity,
    REPLACE: tl.constexpr, LANES: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """Draw LANES picks of one frontier node, for any fanout. Each lane checks if its draw repeats an earlier one."""
    chunks = tl.cdiv(fanout, LANES)
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    first, count, place, node, start, population = row_at(row, rows, bounds, begin_at, nodes, starts, populations)
    turn = (program % chunks).to(tl.int64) * LANES + tl.arange(0, LANES)
    if tl.min(turn, 0) >= count:
        return
    key = key_of(key_at, trees, place, place >= 0)
    offset = turn
    if REPLACE:
        some = population + (turn * 0)
        offset = bounded(key, node + (turn * 0), stream.to(tl.uint32), turn, some, some)
    elif population > fanout:
        offset = floyd(key, node, stream.to(tl.uint32), population, fanout, turn, count, DRAWS)
    out = tl.load(picks_begin) + first + turn
    position = edge_at(start + offset, excluded, num_excluded, reach)
    put(out, position, place + (turn * 0), turn < count, indices, sources, edges, destinations, capacity)


@triton.jit
def floyd(key, node, stream, population, fanout, turn, count, DRAWS: tl.constexpr):
    """Return the list offsets that Floyd's algorithm picks in the given turns.

    Turn t draws an offset from [0, oldest + t], where oldest is population - fanout. If an earlier turn has picked this
    offset, turn t picks oldest + t instead. As the earlier turn may have picked so too, a program looks back from turn
    to turn, in about log(fanout) steps.
    """
    oldest = population - fanout
    drawn = draw_at(key, node, stream, population, oldest, turn)
    at, value = turn, drawn
    is_repeat, is_open = turn < 0, turn < count
    while tl.max(is_open.to(tl.int32), 0) > 0:
        is_same = turn < 0
        until = tl.max(tl.where(is_open, at, 0), 0)
        begin = until * 0
        while begin < until:
            earlier = begin + tl.arange(0, DRAWS)
            values = draw_at(key, node, stream, population, oldest, earlier)
            equal = (values[None, :] == value[:, None]) & (earlier[None, :] < at[:, None])
            is_same |= tl.max(equal.to(tl.int32), 1) > 0
            begin += DRAWS
        is_repeat |= is_open & is_same
        is_open &= ~is_same & (value >= oldest) & (value - oldest < at)
        at = tl.where(is_open, value - oldest, at)
        value = tl.where(is_open, draw_at(key, node, stream, population, oldest, at), value)
    return tl.where(is_repeat, oldest + turn, drawn)


@triton.jit
def draw_at(key, node, stream, population, oldest, turn):
    """Return the random offset of each turn, before repeated offsets are replaced."""
    none = turn * 0
    return bounded(key, node + none, stream, turn, oldest + turn + 1, population + none)


@kernel
def copy_lists(
    nodes, trees, begin_at, rows, starts, populations, bounds, key_at, stream, fanout, indices, weight,
    excluded, num_excluded, reach, picks_begin, sources, edges, destinations, capacity,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Write PLACES picks of frontier nodes that take whole lists. Several programs may share a long list."""
    pick = rows_of(PLACES)
    total = tl.load(bounds + rows)
    if tl.min(pick, 0) >= total:
        return
    is_pick = pick < total
    row = pick * 0
    beyond = tl.where(is_pick, rows, 1).to(tl.int64)
    while tl.max(beyond - row, 0) > 1:  # bounds[row] <= pick < bounds[beyond]
        middle = (row + beyond) >> 1
        is_past = tl.load(bounds + middle, mask=is_pick, other=0) <= pick
        row = tl.where(is_past & is_pick, middle, row)
        beyond = tl.where(is_past | ~is_pick, beyond, middle)
    rank = tl.load(starts + row, mask=is_pick, other=0) + pick - tl.load(bounds + row, mask=is_pick, other=0)
    position = edge_at(rank, excluded, num_excluded, reach)
    place = tl.load(begin_at) + row
    put(tl.load(picks_begin) + pick, position, place, is_pick, indices, sources, edges, destinations, capacity)
