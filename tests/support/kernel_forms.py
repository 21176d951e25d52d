"""What kernels take, made from small tensors and lists; and what they wrote, as lists."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hoploom import ops
from hoploom.ops.kernels.launch import DeviceFrontier, DeviceLists, DevicePicks, DeviceSpan, Grid, launch

UNWRITTEN = -7  # what every place holds before a kernel runs
FENCE = 256  # bytes on both sides of an array
POISON = 0xFF  # each of them: NaN as a float, -1 as an id


def ids(values: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int64).to(device)


def number(value: int, device: torch.device) -> Tensor:
    return torch.tensor(value - 2**64 if value >= 2**63 else value, device=device)


def span_of(begin: int, end: int, device: torch.device, most: int | None = None) -> DeviceSpan:
    return DeviceSpan(number(begin, device), number(end, device), end - begin if most is None else most)


def lists_of(
    indptr: Sequence[int] | Tensor,
    indices: Tensor,
    device: torch.device,
    weight: Tensor | None = None,
    edge_time: Tensor | None = None,
    source_time: Tensor | None = None,
) -> DeviceLists:
    columns = [None if column is None else column.to(device) for column in (weight, edge_time, source_time)]
    return DeviceLists(ids(indptr, device), indices.to(device), device, *columns)


def frontier_of(
    nodes: Sequence[int],
    device: torch.device,
    trees: Sequence[int] | None = None,
    times: Sequence[int] | None = None,
    first_tree: int = 0,
    begin: int = 0,
    spare: int = 0,
) -> DeviceFrontier:
    """The nodes at places `begin` on, with `spare` programs' worth of rows that are not there; `times` is by tree."""
    before, after = [UNWRITTEN] * begin, [UNWRITTEN] * spare
    return DeviceFrontier(
        ids([*before, *nodes, *after], device),
        span_of(begin, begin + len(nodes), device, len(nodes) + spare),
        None if trees is None else ids([*before, *trees, *after], device),
        None if times is None else ids(times, device),
        first_tree,
    )


def rule_of(rule: ops.Rule, device: torch.device) -> ops.Rule:
    excluded = None if rule.excluded is None else rule.excluded.to(device)
    return rule._replace(key=number(rule.key, device), excluded=excluded)


def picks_of(capacity: int, device: torch.device, num_places: int | None = None, begin: int = 0) -> DevicePicks:
    """Room for picks from place `begin` on; with `num_places` of the frontier's nodes, their indptr too."""
    sources, edges, destinations = (torch.full([capacity], UNWRITTEN, device=device) for _ in range(3))
    indptr = None if num_places is None else torch.full([num_places + 1], UNWRITTEN, device=device)
    return DevicePicks(sources, edges, destinations, span_of(begin, UNWRITTEN, device, capacity), indptr)


def written(picks: DevicePicks) -> tuple[list[int], list[int], list[int]]:
    begin, end = int(picks.span.begin), int(picks.span.end)
    sources, edges, destinations = (one[begin:end].tolist() for one in (picks.sources, picks.edges, picks.destinations))
    return sources, edges, destinations


def no_faults(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


@contextmanager
def fenced(*modules: ModuleType) -> Iterator[None]:
    """Kernels that these modules start get arrays between fences, which must stand; what is new holds NaN at first."""
    getattr(torch._dynamo, "disable")  # noqa: B009 (before its parts, which the next lines import: see sitecustomize.py)
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty makes
    try:
        with pytest.MonkeyPatch.context() as patched:
            for module in modules:
                patched.setattr(module, "launch", _launch_fenced)
            yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns)


def _launch_fenced(kernel: Any, grid: Grid, *arguments: Any, device: torch.device, **constants: Any) -> None:
    yards = {at: Yard(given) for at, given in enumerate(arguments) if isinstance(given, Tensor)}
    inside = [yards[at].inside if at in yards else given for at, given in enumerate(arguments)]
    launch(kernel, grid, *inside, device=device, **constants)
    for at, yard in yards.items():
        yard.take_back(f"argument {at} of {kernel.__name__}")


class Yard:
    """A copy of an array, with what lies between its rows, between two fences."""

    def __init__(self, given: Tensor) -> None:
        length = 1 + sum((n - 1) * stride for n, stride in zip(given.shape, given.stride(), strict=True))
        self.given = given.as_strided((length if given.numel() else 0,), (1,))
        size = self.given.numel() * given.element_size()
        self.held = torch.full((size + 2 * FENCE,), POISON, dtype=torch.uint8, device=given.device)
        self.copy = self.held[FENCE : FENCE + size].view(given.dtype)
        self.copy.copy_(self.given)
        self.before = self.copy.clone()
        start = FENCE // given.element_size()
        self.inside = self.held.view(given.dtype).as_strided(given.shape, given.stride(), start)

    def take_back(self, name: str) -> None:
        fences = torch.cat([self.held[:FENCE], self.held[self.held.numel() - FENCE :]])
        assert bool((fences == POISON).all()), f"{name}: written outside the array"
        if not torch.equal(self.copy.view(torch.uint8), self.before.view(torch.uint8)):
            self.given.copy_(self.copy)
