"""Sample one hop of one relation on the device: the same picks as the core's, without host synchronization.

Three steps: count the picks of each row (frontier node), compute their offsets (a running sum), and draw the picks.
"""

from typing import Any, Literal

import torch
import triton
from torch import Tensor

from hoploom.ops.kernels.launch import DeviceFrontier, DeviceLists, DevicePicks, Grid, blocks_of, launch
from hoploom.ops.kernels.picks import count_weighing, locate, settle
from hoploom.ops.kernels.scored import invert_sums, keep_lowest
from hoploom.ops.kernels.uniform import copy_lists, draw_few, draw_many
from hoploom.ops.sample import Rule

ROWS = 256  # per program, in kernels that read a few words per row
TILE = 512  # picks per program: rows x fanout
FEW = 64  # above this fanout, several programs share the picks of a row
LANES, DRAWS = 128, 16  # of draw_many: picks per program, and earlier draws that are compared at once
CHUNK = 512  # edges of a list that are read at once
UNROLL = 4  # edges whose weights are loaded together

Way = Literal["whole", "uniform", "weighted", "labor"]


def sample(lists: DeviceLists, frontier: DeviceFrontier, rule: Rule, picks: DevicePicks, faults: Tensor) -> None:
    """Sample edges of every frontier node into `picks`, in the frontier's order, and write picks.span.end.

    A bad node or list sets `faults` and has no picks. span.begin and span.end must be different tensors. `indptr`, if
    given, gets the offset of each frontier node's picks, and the end of the last node's.
    """
    way, num_rows = _way_of(lists, frontier, rule), max(1, frontier.span.most)
    rows = torch.empty([3, num_rows + 1], dtype=torch.int64, device=lists.device)
    _count(lists, frontier, rule, way, rows, faults)
    starts, populations, counts = rows
    bounds = torch.cumsum(counts, 0)
    places = num_rows, frontier.span.begin, frontier.span.end, frontier.nodes.numel()
    ends = picks.span.begin, picks.span.end, picks.indptr
    launch(settle, blocks_of(num_rows + 1, ROWS), bounds, *places, *ends, device=bounds.device, ROWS=ROWS)
    if rule.fanout == 0:
        return
    kernel, grid, constants = _draws(way, num_rows, rule, picks.sources.numel())
    nodes = frontier.nodes, None if way == "labor" else frontier.trees, frontier.span.begin, num_rows
    weight = lists.weight if way == "weighted" else None
    rule_and_lists = rule.key, rule.stream, rule.fanout, lists.indices, weight, *_excluded(rule)
    written = picks.span.begin, picks.sources, picks.edges, picks.destinations, picks.sources.numel()
    arguments = *nodes, starts, populations, bounds, *rule_and_lists, *written
    launch(kernel, grid, *arguments, device=lists.device, **constants)


def _excluded(rule: Rule) -> tuple[Tensor | None, int, int]:
    """Return the excluded positions, their number, and the highest power of two that is at most this number."""
    num_excluded = 0 if rule.excluded is None else rule.excluded.numel()
    return rule.excluded if num_excluded else None, num_excluded, 1 << num_excluded.bit_length() >> 1


def _takes_last(frontier: DeviceFrontier, rule: Rule) -> bool:
    return rule.last and frontier.times is not None and rule.fanout >= 0


def _way_of(lists: DeviceLists, frontier: DeviceFrontier, rule: Rule) -> Way:
    if _takes_last(frontier, rule):
        return "whole"
    if rule.weighted and lists.weight is not None:
        return "weighted"
    if rule.fanout < 0:
        return "whole"
    return "labor" if rule.labor else "uniform"


def _count(lists: DeviceLists, frontier: DeviceFrontier, rule: Rule, way: Way, rows: Tensor, faults: Tensor) -> None:
    """Write each frontier node's list offset, list length and number of picks to the three rows of `rows`."""
    num_rows, span = rows.shape[1] - 1, frontier.span
    times = frontier.trees, frontier.times, frontier.first_tree
    source_time = None if lists.edge_time is not None else lists.source_time
    num_sources = 0 if source_time is None else source_time.numel()
    edges = lists.indptr, lists.first_node, lists.indptr.numel() - 1, lists.indices, lists.indices.numel()
    where = frontier.nodes, *times, frontier.nodes.numel(), span.begin, span.end, num_rows
    arguments = *where, *edges, lists.edge_time, source_time, num_sources
    arguments = *arguments, rule.window, rule.fanout, *_excluded(rule), *rows, faults
    constants = {"REPLACE": rule.replace and way == "uniform", "LAST": _takes_last(frontier, rule), "ROWS": ROWS}
    constants |= {"WINDOW": rule.window >= 0, "BY_RANK": way != "weighted"}
    launch(locate, blocks_of(num_rows, ROWS), *arguments, device=lists.device, **constants)
    if way == "weighted":
        starts, populations, counts = rows
        columns = starts, populations, lists.weight, *_excluded(rule), rule.fanout, counts
        launch(count_weighing, (num_rows,), *columns, device=lists.device, REPLACE=rule.replace, CHUNK=CHUNK)


def _draws(way: Way, rows: int, rule: Rule, capacity: int) -> tuple[Any, Grid, dict[str, int]]:
    """Return the kernel that draws the picks, its grid of programs and its constants."""
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
