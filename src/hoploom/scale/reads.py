"""What a store larger than its budget reads from disk: requests, bytes and their time, by the reader's own rules.

Rows are taken to lie at random. The reader reads whole blocks, and two rows as one where the blocks between them take
less time than another request. Many reads are under way, so the disk is as slow as its requests or its bytes, not both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hoploom.scale.constants import Constants
from hoploom.scale.sizes import BatchSize, Crowd, Item, node_fields, topology_bytes
from hoploom.scale.spec import Question

if TYPE_CHECKING:
    from hoploom.store.budget import Budget

BLOCK, LONGEST = 4096, 256 << 10  # bytes: what is read at least, and at most, in one request
PHASES = 32  # of a row's end within its block, over which the mean is taken
MOST_STEPS = 128  # that are read together
GROUPS = 3  # of steps whose rows share the window: two under way, and the one before


@dataclass(frozen=True)
class DiskReads:
    """Of one step of one rank."""

    steps: int  # whose rows are read together
    near_edges: float  # share of the edges that is in memory
    near_rows: float  # share of the rows that is, of fields that are partly on disk
    rows: float  # that are read; one that several steps share counts once
    wanted: float  # bytes of these rows and of the edges that are read
    requests: float
    bytes: float
    seconds: float


def budget_of(question: Question) -> "Budget | None":
    """How a host spends its memory for the store; None where none is given, or it holds everything."""
    from hoploom.store.budget import SMALL, spend  # brings torch, which the help of `plan` does without

    if question.store_memory is None:
        return None
    begins, rows = 8 * question.nodes, node_fields(question).values()
    lists = int(topology_bytes(question, question.hosts)) - begins
    small = question.nodes * sum(row for row in rows if row <= SMALL)
    wide = question.nodes * sum(rows) - small
    begins, lists, small, wide = (size // question.hosts for size in (begins, lists, small, wide))
    budget = spend(question.store_memory, begins, lists, small, wide)
    return None if budget.holds_all else budget


def within_budget(question: Question, items: Sequence[Item]) -> list[Item]:
    """The files of a host with what a budget leaves of them in memory, and the rows that are read ahead."""
    budget, fields = budget_of(question), node_fields(question)
    if budget is None:
        return list(items)
    found = []
    for item in items:
        share = budget.lists
        if item.name in fields:
            share = 1.0 if fields[item.name] in _small(question, budget) else budget.rows
        begins = 8 * question.nodes / question.hosts if item is items[0] else 0.0
        found.append(replace(item, memory=begins + share * (item.memory - begins)))
    return [*found, Item("rows of steps ahead", 0.0, budget.window * question.ranks_per_host)]


def _small(question: Question, budget: "Budget") -> list[int]:
    """The rows, in bytes, of fields that are in memory as a whole."""
    from hoploom.store.budget import SMALL

    rows = node_fields(question).values()
    return [row for row in rows if budget.rows == 1 or (row <= SMALL and budget.small_fields)]


def disk_reads(question: Question, constants: Constants, batch: BatchSize) -> DiskReads | None:
    """What a step reads where the store has a budget that does not hold all of it."""
    budget = budget_of(question)
    if budget is None:
        return None
    lists = topology_bytes(question, question.hosts) - 8 * question.nodes
    far = [row for row in node_fields(question).values() if row not in _small(question, budget)]
    steps, num_rows = _rows_ahead(question, batch, budget.rows, sum(far), budget.window)
    requests_per_second = question.disk_requests or constants.disk_requests
    bytes_per_second = question.disk_bandwidth or constants.disk_sweep
    gap = bytes_per_second / requests_per_second
    requests = num_bytes = 0.0
    for row in far:
        reads = expected_reads(num_rows * steps, question.nodes * (1 - budget.rows), row, gap)
        requests, num_bytes = requests + reads[0] / steps, num_bytes + reads[1] / steps
    wanted, list_bytes = num_rows * sum(far), lists / question.nodes
    if budget.lists < 1:  # a node's picks lie together, in its list
        for hop in batch.hops:
            reads = expected_reads(
                hop.frontier * (1 - budget.lists), question.nodes * (1 - budget.lists), list_bytes, gap
            )
            requests, num_bytes = requests + reads[0], num_bytes + reads[1]
        wanted += batch.picks * (1 - budget.lists) * lists / question.edges
    seconds = max(requests / requests_per_second, num_bytes / bytes_per_second)
    return DiskReads(steps, budget.lists, budget.rows, num_rows * len(far), wanted, requests, num_bytes, seconds)


def _rows_ahead(question: Question, batch: BatchSize, near: float, row_bytes: float, window: int) -> tuple[int, float]:
    """How many steps are read together, and how many rows each of them adds; as look-ahead chooses it."""
    crowd, hops = Crowd(question.nodes, question.skew), batch.hops

    def cold(steps: int) -> float:
        """Distinct rows of so many steps that are not in memory."""
        seeds, drawn = min(question.nodes, steps * hops[0].frontier), steps * hops[-1].drawn
        everything = crowd.distinct(seeds, drawn)
        held = crowd.distinct(seeds, drawn, near) if question.ordered and near else near * everything
        return everything - held

    steps = int(window // max(1.0, GROUPS * cold(1) * row_bytes)) if row_bytes else 1
    steps = max(1, min(MOST_STEPS, steps))
    return steps, cold(1) if steps == 1 else (cold(2 * steps) - cold(steps)) / steps


def expected_reads(num_wanted: float, num_rows: float, row_bytes: float, gap: float) -> tuple[float, float]:
    """Requests and bytes for distinct rows at random places of a table.

    >>> expected_reads(1000, 1_000_000, 512, 4096)
    """
    if num_wanted <= 0 or num_rows <= 0:
        return 0.0, 0.0
    share = min(1.0, num_wanted / num_rows)  # of the rows that follow, which one is next: geometric
    skipped = math.floor(min(gap, LONGEST - BLOCK) / BLOCK) * BLOCK  # bytes between two blocks that are read
    new = longer = 0.0  # per row: the chance of another request; bytes by which one grows
    for phase in range(PHASES):
        left = (phase + 0.5) / PHASES * BLOCK  # of the block, behind a row's end
        reach = math.ceil((skipped + BLOCK + left) / row_bytes)  # rows until another request
        new += (1 - share) ** reach if share < 1 else 0.0
        longer += _growth(share, row_bytes, left, reach)
    requests = max(1.0, num_wanted * new / PHASES)
    first = (math.ceil(row_bytes / BLOCK) + (row_bytes - 1) % BLOCK / BLOCK) * BLOCK  # bytes of a row that begins one
    num_bytes = requests * first + num_wanted * longer / PHASES
    cuts = requests / math.expm1(LONGEST * requests / num_bytes)  # of requests that became too long
    unread = cuts * max(0.0, longer / PHASES / max(1e-9, 1 - new / PHASES) - row_bytes)  # a gap at each
    return requests + cuts, num_bytes - unread


def _growth(share: float, row_bytes: float, left: float, reach: int) -> float:
    """Expected bytes that the next row adds to a request which ends `left` bytes behind this one."""
    import torch  # imported when it is used: the help of `plan` does without

    next_rows = torch.arange(1, reach + 1, dtype=torch.float64)
    chances = share * (1 - share) ** (next_rows - 1)
    added = ((next_rows * row_bytes - left) / BLOCK).ceil().clamp(min=0) * BLOCK
    return float((chances * added).sum())
