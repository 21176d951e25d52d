"""One hop of one relation: a frontier's picks, the same as the core's, with no word to the host.

Three steps: how many picks each row has, where they go (a running sum), and the picks.
"""

from typing import Any, Literal

import torch
import triton
from torch import Tensor

from hoploom.ops.kernels.forms import DeviceFrontier, DeviceLists, DevicePicks, DeviceRule
from hoploom.ops.kernels.launch import Grid, blocks_of, launch
from hoploom.ops.kernels.pick_counts import count_weighing, locate, settle
from hoploom.ops.kernels.scored import invert_sums, keep_lowest
from hoploom.ops.kernels.uniform import copy_lists, draw_few, draw_many

ROWS = 256  # of a frontier, where each asks for a few words
TILE = 512  # rows x fanout
FEW = 64  # above this fanout a row's picks are shared out between programs
LANES, DRAWS = 128, 16
CHUNK = 512  # of a list
UNROLL = 4  # edges whose weights are asked for together

Way = Literal["whole", "uniform", "weighted", "labor"]


def sample(lists: DeviceLists, frontier: DeviceFrontier, rule: DeviceRule, picks: DevicePicks, faults: Tensor) -> None:
    """Write the picks of a frontier, in its order, and where they end; a faulty node or list has none.

    picks.span.begin and picks.span.end are two numbers, not one. A place of picks.indptr is written for each node of
    the frontier and for the one after the last.
    """
    way, rows = _way_of(rule, frontier), max(1, frontier.span.most)
    starts, populations, counts = torch.empty([3, rows + 1], dtype=torch.int64, device=lists.device)
    _count(lists, frontier, rule, (starts, populations, counts), faults)
    bounds = torch.cumsum(counts, 0)
    _settle(frontier, picks, bounds)
    if rule.fanout == 0:
        return
    kernel, grid, constants = _draws(way, rows, rule, picks.sources.numel())
    launch(
        kernel,
        grid,
        frontier.nodes,
        None if way == "labor" else frontier.trees,
        frontier.span.begin,
        rows,
        starts,
        populations,
        bounds,
        rule.key,
        rule.stream,
        rule.fanout,
        lists.indices,
        lists.weight if way == "weighted" else None,
        picks.span.begin,
        picks.sources,
        picks.edges,
        picks.destinations,
        picks.sources.numel(),
        device=lists.device,
        **constants,
    )


def _takes_last(rule: DeviceRule, frontier: DeviceFrontier) -> bool:
    return rule.last and frontier.times is not None and rule.fanout >= 0


def _way_of(rule: DeviceRule, frontier: DeviceFrontier) -> Way:
    if _takes_last(rule, frontier):
        return "whole"
    if rule.weighted:
        return "weighted"
    if rule.fanout < 0:
        return "whole"
    return "labor" if rule.labor else "uniform"


def _count(
    lists: DeviceLists, frontier: DeviceFrontier, rule: DeviceRule, rows: tuple[Tensor, Tensor, Tensor], faults: Tensor
) -> None:
    """Fill starts, populations and counts."""
    starts, populations, counts = rows
    num_rows, way = counts.numel() - 1, _way_of(rule, frontier)
    source_time = None if lists.edge_time is not None else lists.source_time
    launch(
        locate,
        blocks_of(num_rows, ROWS),
        frontier.nodes,
        frontier.trees,
        frontier.times,
        frontier.first_tree,
        frontier.nodes.numel(),
        frontier.span.begin,
        frontier.span.end,
        num_rows,
        lists.indptr,
        lists.indptr.numel() - 1,
        lists.indices,
        lists.indices.numel(),
        lists.edge_time,
        source_time,
        0 if source_time is None else source_time.numel(),
        rule.fanout,
        starts,
        populations,
        counts,
        faults,
        device=lists.device,
        REPLACE=rule.replace and way == "uniform",
        LAST=_takes_last(rule, frontier),
        ROWS=ROWS,
    )
    if way == "weighted":
        constants = {"REPLACE": rule.replace, "CHUNK": CHUNK}
        columns = starts, populations, lists.weight, rule.fanout, counts
        launch(count_weighing, (num_rows,), *columns, device=lists.device, **constants)


def _settle(frontier: DeviceFrontier, picks: DevicePicks, bounds: Tensor) -> None:
    span, grid = frontier.span, blocks_of(bounds.numel(), ROWS)
    places = bounds.numel() - 1, span.begin, span.end, frontier.nodes.numel()
    ends = picks.span.begin, picks.span.end, picks.indptr
    launch(settle, grid, bounds, *places, *ends, device=bounds.device, ROWS=ROWS)


def _draws(way: Way, rows: int, rule: DeviceRule, capacity: int) -> tuple[Any, Grid, dict[str, int]]:
    """The kernel that makes the picks, its programs and its constants."""
    if way == "whole":
        return copy_lists, blocks_of(capacity, TILE), {"PLACES": TILE}
    if way == "labor" or (way == "weighted" and (rule.fanout < 0 or not rule.replace)):
        return keep_lowest, (rows,), {"CHUNK": CHUNK}
    fanout = triton.next_power_of_2(min(rule.fanout, FEW))
    tile = {"ROWS": TILE // fanout, "FANOUT": fanout}
    if way == "weighted":
        grid = (triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(rule.fanout, fanout),)
        return invert_sums, grid, {**tile, "UNROLL": UNROLL}
    if rule.fanout <= FEW:
        return draw_few, blocks_of(rows, tile["ROWS"]), {**tile, "REPLACE": rule.replace}
    constants = {"LANES": LANES, "DRAWS": DRAWS, "REPLACE": rule.replace}
    return draw_many, (rows * triton.cdiv(rule.fanout, LANES),), constants
