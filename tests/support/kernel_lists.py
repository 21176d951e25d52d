"""Small lists of rows as kernels get them, drawn by hypothesis: what is no part of them is NaN, or ids of nothing."""

import math
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch
from hypothesis import strategies as st
from torch import Tensor

from hoploom.ops import InEdges

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
