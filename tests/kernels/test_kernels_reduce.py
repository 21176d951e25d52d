"""The kernels over lists of rows, on drawn lists: as the core reduces them, and as they are reduced by hand.

Rows that no entry names, columns between rows and all that stands behind the lists are NaN or ids of nothing.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_forms import fenced
from torch import Tensor
from triton.runtime import interpreter

from hoploom.ops import InEdges
from hoploom.ops import rows as core
from hoploom.ops.kernels import aggregate as kernels

NARROW = [(0, 3), (1, 1), (2, 3), (0, 1)]  # heads, columns of each
SHAPES = [*NARROW, (0, 100), (3, 1), (4, 8), (1, 140), (2, 65)]
GARBAGE = {torch.int32: [2**31 - 1, -1, -(2**31)], torch.int64: [2**62, -1, 2**31, -(2**63)]}
SPECIAL = [math.nan, math.inf, -math.inf]


@dataclass(frozen=True)
class Drawn:
    """In-edges with `spare` places behind the lists, and what rows they are reduced over."""

    edges: InEdges
    spare: int
    window: int  # how long a list is when it is no longer short
    heads: int  # 0: without weights
    share: int  # columns of a head
    layout: str  # of rows: beside each other, apart, columns apart, or one row for all
    is_special: bool  # some values are not finite
    seed: int

    @property
    def width(self) -> int:
        return self.share * max(1, self.heads)

    @property
    def sources(self) -> Tensor:
        return self.edges.sources[: int(self.edges.indptr[-1])].long()

    @property
    def destinations(self) -> Tensor:
        return self.edges.destinations[: int(self.edges.indptr[-1])]

    def transposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Lists by source, with places: indptr, destinations, places."""
        order = self.sources.argsort(stable=True)
        counts = torch.bincount(self.sources, minlength=self.edges.num_sources)
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return indptr, self.behind(self.destinations[order]), self.behind(order)

    def values(self, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> Tensor:
        """Few distinct ones, so that there are ties."""
        random = torch.Generator().manual_seed(self.seed + salt)
        values = torch.randint(-20, 20, shape, generator=random).to(dtype) / 7
        if self.is_special:
            special = torch.tensor(SPECIAL).to(dtype)[torch.randint(3, shape, generator=random)]
            values = torch.where(torch.rand(shape, generator=random) < 0.03, special, values)
        return values

    def rows(self, num_rows: int, live: Tensor, dtype: torch.dtype, device: torch.device, salt: int = 0) -> Tensor:
        """A matrix for kernels to read: rows that are not `live` and columns between rows are NaN."""
        values = self.values((num_rows, self.width), dtype, salt)
        if self.layout == "one" and num_rows:
            return values[:1].to(device).expand(num_rows, -1)
        values[~torch.isin(torch.arange(num_rows), live)] = math.nan
        if self.layout == "beside":
            return values.to(device)
        held = torch.full((num_rows, 2 * self.width + 3), math.nan, dtype=dtype, device=device)
        place = slice(3, 3 + self.width) if self.layout == "apart" else slice(1, 1 + 2 * self.width, 2)
        held[:, place] = values.to(device)
        return held[:, place]

    def behind(self, values: Tensor) -> Tensor:
        """Values of entries, and of the places behind them."""
        added = GARBAGE.get(values.dtype, [math.nan])
        filler = torch.tensor(list(islice(cycle(added), self.spare)), dtype=values.dtype)
        return torch.cat([values, filler.view(-1, *[1] * (values.dim() - 1)).expand(-1, *values.shape[1:])])


@st.composite
def drawn_lists(draw: st.DrawFn, windows: tuple[int, ...] = (8, 8, 8, 256)) -> Drawn:
    """Empty lists, short ones, one of about a window; few sources or one that has most of the edges.

    The simplest, which hypothesis draws first of all, has a short list and one just longer than a window.
    """
    window = draw(st.sampled_from(windows))
    lengths = draw(st.lists(st.sampled_from([2, 0, 1, 5, 8, 13]), min_size=1, max_size=3))
    longest = draw(st.sampled_from([window + 1, None, window, 5 * window // 2]))
    if longest:
        lengths.insert(draw(st.integers(0, len(lengths))), longest)
    seed, first, spare = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2)), draw(st.integers(0, 5))
    random = torch.Generator().manual_seed(seed)
    num_sources = first + len(lengths) + draw(st.integers(0, 2))
    sources = torch.randint(max(1, num_sources - 1), (sum(lengths),), generator=random)
    if draw(st.booleans()):
        sources[torch.rand(len(sources), generator=random) < 0.7] = 0
    sources = sources.to(draw(st.sampled_from([torch.int32, torch.int64])))
    heads, share = draw(st.sampled_from(SHAPES if window == 8 else NARROW))
    layout, is_special = draw(st.sampled_from(["beside", "apart", "across", "one"])), draw(st.booleans())
    indptr = torch.tensor([0, *lengths]).cumsum(0)
    drawn = Drawn(
        InEdges(indptr, sources, num_sources, first=first), spare, window, heads, share, layout, is_special, seed
    )
    return replace(drawn, edges=replace(drawn.edges, sources=drawn.behind(sources)))


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

every_dtype = pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=pytest.mark.slow) if dtype == torch.float16 else dtype for dtype in DTYPES]
)
few = settings(max_examples=3, derandomize=True)


@contextmanager
def fenced_off(window: int) -> Iterator[None]:
    """Windows of a length, fences around all that kernels read and write, and the last program first."""
    builder = interpreter.interpreter_builder
    run = builder.set_grid_idx

    def last_first(x: int, y: int, z: int) -> None:
        run(*(size - 1 - at for size, at in zip(builder.grid_dim, (x, y, z), strict=True)))

    with pytest.MonkeyPatch.context() as patched, fenced(kernels):
        patched.setattr(kernels, "WINDOW", window)
        patched.setattr(builder, "set_grid_idx", last_first)
        yield


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def assert_bits(found: Tensor, expected: Tensor) -> None:
    """Equal, NaN too. The interpreter cuts bfloat16 off where devices round it: there the last bit may differ."""
    assert found.dtype == expected.dtype
    is_cut = found.dtype == torch.bfloat16 and not found.is_cuda
    torch.testing.assert_close(found.cpu(), expected, atol=0, rtol=2**-7 if is_cut else 0, equal_nan=True)


def assert_near(found: Tensor, exact: Tensor, roundings: Tensor | float, magnitude: Tensor) -> None:
    """Off by so many roundings of what was added up, and by one of the result."""
    held, finite = found.cpu().double(), exact.isfinite()
    torch.testing.assert_close(held[~finite], exact[~finite], atol=0, rtol=0, equal_nan=True)
    own = torch.finfo(found.dtype)
    room = torch.finfo(wide(found.dtype)).eps * roundings * magnitude + own.eps * (exact.abs() + own.smallest_normal)
    assert ((held - exact).abs() <= room)[finite].all()


def summed(indptr: Tensor, terms: Tensor) -> Tensor:
    """Each list's sum of terms [entries, columns]."""
    out = terms.new_zeros(indptr.numel() - 1, terms.shape[1])
    for row, own in enumerate(terms.split(indptr.diff().tolist())):
        out[row] = own.sum(0)
    return out


def lists_on(device: torch.device, edges: InEdges) -> tuple[Tensor, Tensor]:
    return edges.indptr.to(device), edges.sources.to(device)


def ends(edges: InEdges, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """What dot_rows takes of edges."""
    return edges.indptr.to(device), edges.sources.to(device), edges.destinations.to(device)


def on(device: torch.device, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


SUMS = [("rows", False, torch.float32), ("places", True, torch.float32), ("themselves", False, torch.float32)]
SUMS += [("places", False, torch.bfloat16), ("themselves", True, torch.float16), ("rows", True, torch.float64)]


@pytest.mark.parametrize(("entries", "mean", "dtype"), SUMS)
@settings(few, max_examples=2)
@given(drawn=drawn_lists())
def test_sums_are_the_cores_and_those_by_hand(
    device: torch.device, entries: str, mean: bool, dtype: torch.dtype, drawn: Drawn
) -> None:
    indptr, picked, num_rows = drawn.edges.indptr, drawn.sources, drawn.edges.num_sources
    every = torch.arange(len(picked))
    rows, places = drawn.behind(drawn.edges.sources[: len(picked)]), None
    if entries == "places":
        places = drawn.behind(every.flip(0))
    elif entries == "themselves":
        rows, picked, num_rows = None, every, len(picked) + drawn.spare
    x = drawn.rows(num_rows, picked, dtype, device)
    weights = drawn.behind(drawn.values((len(picked), drawn.heads), wide(dtype), 1)) if drawn.heads else None
    with fenced_off(drawn.window):
        found = kernels.sum_rows(indptr.to(device), *on(device, rows, places), x, *on(device, weights), mean)
    short = indptr.diff() <= drawn.window
    expected = core.sum_rows(indptr, rows, places, x.cpu().to(wide(dtype)), weights, mean)
    assert_bits(found[short.to(device)], expected[short].to(dtype))

    terms = x.cpu().double()[picked]
    if weights is not None:
        stands = every if places is None else places[: len(picked)]
        terms = terms * weights.double()[stands].repeat_interleave(drawn.share, 1)
    counts = indptr.diff()[:, None]
    over = counts.clamp(min=1) if mean else 1
    assert_near(found, summed(indptr, terms) / over, counts + 3, summed(indptr, terms.abs()) / over)


def greatest(indptr: Tensor, terms: Tensor) -> tuple[Tensor, Tensor]:
    """Each list's greatest and which it was, the first of equals and the first NaN before all."""
    shape = terms.shape[1], indptr.numel() - 1
    columns = [
        [_first_greatest(column[begin:end]) for begin, end in pairwise(indptr.tolist())]
        for column in terms.t().tolist()
    ]
    best, winners = torch.tensor(columns, dtype=torch.float64).view(*shape, 2).unbind(2)
    return best.t().to(terms.dtype), winners.t().to(torch.int32)


def _first_greatest(values: list[float]) -> tuple[float, int]:
    best, winner = 0.0, -1
    for at, value in enumerate(values):
        if winner < 0 or value > best or (math.isnan(value) and not math.isnan(best)):
            best, winner = value, at
    return best, winner


@every_dtype
@few
@given(drawn=drawn_lists(windows=(8,)))
def test_maxima_and_their_gradients_are_the_cores_and_those_by_hand(
    device: torch.device, dtype: torch.dtype, drawn: Drawn
) -> None:
    edges = drawn.edges
    x = drawn.rows(edges.num_sources, drawn.sources, dtype, device)
    weights = drawn.behind(drawn.values((len(drawn.sources), drawn.heads), wide(dtype), 2)) if drawn.heads else None
    with fenced_off(drawn.window):
        found, won = kernels.max_rows(*lists_on(device, edges), x, *on(device, weights))
    expected, winners = core.max_rows(edges.indptr, edges.sources, x.cpu().to(wide(dtype)), weights)
    assert torch.equal(won.cpu(), winners)
    assert_bits(found, expected.to(dtype))
    factors = None if weights is None else weights[: len(drawn.sources)].repeat_interleave(drawn.share, 1)
    rows = x.cpu().to(wide(dtype))[drawn.sources] * (1 if factors is None else factors)
    by_hand, first = greatest(edges.indptr, rows[:, :5])
    assert_bits(found[:, :5], by_hand.to(dtype))
    assert torch.equal(won[:, :5].cpu(), first)

    lists = drawn.transposed()
    grad = drawn.rows(edges.num_destinations, drawn.destinations, dtype, device, 1)
    with fenced_off(drawn.window):
        spread = kernels.max_rows_backward(on(device, *lists), edges.indptr.to(device), grad, *on(device, weights), won)
        dots = kernels.dot_rows(ends(edges, device), x, grad, max(1, drawn.heads), won)
    short = lists[0].diff() <= drawn.window
    backward = core.max_rows_backward(lists, edges.indptr, grad.cpu().to(wide(dtype)), weights, winners)
    assert_bits(spread[short.to(device)], backward[short].to(dtype))
    numbers = torch.arange(len(drawn.sources)) - edges.indptr[drawn.destinations]
    has_won = winners[drawn.destinations] == numbers[:, None]
    sent = grad.cpu().double()[drawn.destinations]
    terms = torch.where(has_won, sent if factors is None else sent * factors, 0)[lists[2][: len(drawn.sources)]]
    assert_near(spread, summed(lists[0], terms), lists[0].diff()[:, None] + 2, summed(lists[0], terms.abs()))
    products = torch.where(has_won, sent * x.cpu().double()[drawn.sources], 0).view(len(sent), max(1, drawn.heads), -1)
    assert_near(dots.cpu()[: len(sent)], products.sum(2), drawn.share + 1, products.abs().sum(2))


WIDE = InEdges(torch.tensor([0, 3, 3, 8, 9]), torch.tensor([0, 4, 2, 1, 1, 3, 0, 2, 4]), 5)


def wide_rows(num_rows: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(-3, 5, num_rows * 602).view(num_rows, 602).to(dtype)


def test_reductions_of_wide_rows_are_the_cores(device: torch.device) -> None:
    dtype = torch.float16
    x, y = wide_rows(5, dtype), wide_rows(4, dtype).flip(1)
    with fenced_off(8):
        mean = kernels.sum_rows(*lists_on(device, WIDE), None, x.to(device), None, True)
        found, won = kernels.max_rows(*lists_on(device, WIDE), x.to(device), None)
        dots = kernels.dot_rows(ends(WIDE, device), x.to(device), y.to(device), 2, None)
    assert_bits(mean, core.sum_rows(WIDE.indptr, WIDE.sources, None, x.to(wide(dtype)), None, True).to(dtype))
    expected, winners = core.max_rows(WIDE.indptr, WIDE.sources, x.to(wide(dtype)), None)
    assert_bits(found, expected.to(dtype))
    assert torch.equal(won.cpu(), winners)
    terms = (x.double()[WIDE.sources] * y.double()[WIDE.destinations]).view(9, 2, 301)
    assert_near(
        dots, core.dot_rows(ends(WIDE), x.to(wide(dtype)), y.to(wide(dtype)), 2, None).double(), 602, terms.abs().sum(2)
    )


@every_dtype
@few
@given(drawn=drawn_lists())
def test_dot_products_are_the_cores_and_those_by_hand(device: torch.device, dtype: torch.dtype, drawn: Drawn) -> None:
    edges, heads = drawn.edges, max(1, drawn.heads)
    x = drawn.rows(edges.num_sources, drawn.sources, dtype, device)
    y = drawn.rows(edges.num_destinations, drawn.destinations, dtype, device, 1)
    with fenced_off(drawn.window):
        found = kernels.dot_rows(ends(edges, device), x, y, heads, None).cpu()
    length = len(drawn.sources)
    assert not found[length:].any()
    terms = x.cpu().double()[drawn.sources] * y.cpu().double()[drawn.destinations]
    terms = terms.view(length, heads, drawn.share)
    expected = core.dot_rows(ends(edges), x.cpu().to(wide(dtype)), y.cpu().to(wide(dtype)), heads, None)
    for exact, roundings in ((terms.sum(2), drawn.share), (expected.double(), 2 * drawn.share)):
        assert_near(found[:length], exact[:length], roundings, terms.abs().sum(2))


@every_dtype
@few
@given(drawn=drawn_lists())
def test_softmax_and_its_gradient_are_the_cores_and_those_by_hand(
    device: torch.device, dtype: torch.dtype, drawn: Drawn
) -> None:
    indptr, shape = drawn.edges.indptr, (len(drawn.sources), max(1, drawn.heads))
    scores, grad = (drawn.behind(drawn.values(shape, dtype, salt) * 10) for salt in (0, 1))
    with fenced_off(drawn.window):
        found = kernels.softmax_lists(indptr.to(device), scores.to(device), None)
        backward = kernels.softmax_lists(indptr.to(device), found, grad.to(device)).cpu()
    found = found.cpu()
    assert not found[shape[0] :].any()
    assert not backward[shape[0] :].any()
    expected = core.softmax_lists(indptr, scores.to(wide(dtype)), None)
    expected_backward = core.softmax_lists(indptr, found, grad.to(wide(dtype)))
    for begin, end in pairwise(indptr.tolist()):
        own = slice(begin, end)
        exact = scores[own].double().softmax(0)
        roundings = (end - begin) + 120  # scores are 60 apart: that many roundings of their difference
        assert_near(found[own], exact, roundings, exact)
        assert_near(found[own], expected[own].double(), 2 * roundings, exact)
        weighed = found[own].double() * grad[own].double()
        exact = weighed - found[own].double() * weighed.sum(0)
        magnitude = weighed.abs() + found[own].double() * weighed.abs().sum(0)
        assert_near(backward[own], exact, (end - begin) + 3, magnitude)
        assert_near(backward[own], expected_backward[own].double(), 2 * (end - begin) + 6, magnitude)
