"""Rows gathered by one kernel from several pieces of memory: those that torch indexes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.kernel_forms import fenced, ids, no_faults
from torch import Tensor

from hoploom.errors import ConfigError
from hoploom.ops.kernels import gather as kernels
from hoploom.ops.kernels.gather import Segments, columns_of, gather
from hoploom.ops.kernels.launch import SOURCE_OUT_OF_RANGE


def cut(rows: Tensor, bounds: Sequence[int], device: torch.device) -> list[tuple[int, Tensor]]:
    """The rows in pieces that begin at these ids, each in memory of its own."""
    ends = [*bounds[1:], len(rows)]
    return [(begin, rows[begin:end].clone().to(device)) for begin, end in zip(bounds, ends, strict=True)]


def untouched(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Bytes of 1, which no type takes for zero."""
    return torch.ones(math.prod(shape) * dtype.itemsize, dtype=torch.uint8).view(dtype).view(*shape)


def gathered(segments: Segments, wanted: Tensor, device: torch.device) -> tuple[Tensor, int]:
    """What the kernel writes over what is `untouched`, and the fault."""
    out, faults = untouched((len(wanted), *segments.shape), segments.dtype).to(device), no_faults(device)
    with fenced(kernels):
        gather(segments, wanted.to(device), out, faults=faults)
    return out.cpu(), int(faults)


def bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(-1).view(torch.uint8)


def random_rows(num_rows: int, *shape: int) -> Tensor:
    return torch.randn(num_rows, *shape, generator=torch.Generator().manual_seed(num_rows))


def random_ids(bound: int, size: int) -> Tensor:
    return torch.randint(0, bound, (size,), generator=torch.Generator().manual_seed(size))


COPIED = [torch.bool, torch.int16, torch.int32, torch.bfloat16, torch.float64]  # of every width
SHAPES = [(), (1,), (3,), (2, 5), (128,), (523,), (2049,)]  # of a row: 1 byte to 16 KB


@dataclass(frozen=True)
class Wanted:
    """Pieces of a field, and ids of rows in them or not."""

    lengths: list[int]
    first: int
    shape: tuple[int, ...]
    ids: Tensor
    seed: int

    def bytes(self, dtype: torch.dtype) -> Tensor:
        """A row of any bits for each id."""
        random = torch.Generator().manual_seed(self.seed)
        most = 2 if dtype == torch.bool else 256
        size = sum(self.lengths) * math.prod(self.shape) * dtype.itemsize
        held = torch.randint(most, (size,), generator=random).to(torch.uint8)
        return held.view(dtype).view(-1, *self.shape)


@st.composite
def wanted_rows(draw: st.DrawFn) -> Wanted:
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    first = draw(st.sampled_from([0, 3, 2**31 - 2, 2**40]))
    end = first + sum(lengths)
    near, far = st.integers(first - 1, end), st.sampled_from([-1, 2**62, -(2**63)])
    chosen = draw(st.lists(st.one_of(near, near, near, far), min_size=1, max_size=20))
    dtype = torch.int64
    if all(-(2**31) <= id < 2**31 for id in chosen):
        dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    shape = draw(st.sampled_from(SHAPES))
    return Wanted(lengths, first, shape, torch.tensor(chosen, dtype=dtype), draw(st.integers(0, 99)))


@pytest.mark.parametrize("dtype", COPIED)
@settings(max_examples=6, derandomize=True)
@example(Wanted([3, 0, 4], 0, (3,), torch.tensor([6, 0, 7, 3, -1, 2, 2, 1], dtype=torch.int32), 1))
@given(wanted=wanted_rows())
def test_rows_are_those_that_torch_indexes(device: torch.device, dtype: torch.dtype, wanted: Wanted) -> None:
    rows = wanted.bytes(dtype).view(sum(wanted.lengths), *wanted.shape)
    bounds = [sum(wanted.lengths[:at]) for at in range(len(wanted.lengths))]
    pieces = [(wanted.first + begin, piece) for begin, piece in cut(rows, bounds, device)]
    segments = Segments.of(pieces, device)
    found, fault = gathered(segments, wanted.ids, device)
    places = wanted.ids.long() - wanted.first
    has_row = (places >= 0) & (places < len(rows))
    own, expected = rows[places[has_row]], untouched(found.shape, dtype)
    expected[has_row] = own
    assert torch.equal(bits(found), bits(expected))
    assert fault == (0 if has_row.all() else SOURCE_OUT_OF_RANGE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_copy_keeps_every_bit_of_what_is_not_a_number(device: torch.device, dtype: torch.dtype) -> None:
    size = dtype.itemsize
    rows = torch.full([8, 6], float("nan"), dtype=dtype).view(torch.uint8).reshape(8, 6, size)
    rows[:, :, 0] = torch.arange(0x81, 0x81 + 48).view(8, 6)  # payloads
    rows = rows.reshape(8, 6 * size).view(dtype)
    assert rows.isnan().all()
    out, _ = gathered(Segments.of(cut(rows, [0, 3], device), device), torch.arange(7, -1, -1), device)
    assert torch.equal(bits(out), bits(rows.flip(0)))


def test_thousands_of_pieces_are_searched(device: torch.device) -> None:
    labels = torch.arange(3000, device=device)
    segments = Segments.of([(at, labels[at : at + 1]) for at in range(3000)], device)
    wanted = random_ids(3000, 500)
    assert torch.equal(gathered(segments, wanted, device)[0], wanted)


def test_no_rows_and_rows_of_nothing_are_gathered(device: torch.device) -> None:
    nothing = Segments.of([(0, torch.empty(5, 0, device=device))], device)
    assert gathered(nothing, torch.tensor([1, 2]), device)[0].shape == (2, 0)
    none = Segments.of([(0, torch.empty(0, 3, device=device))], device)
    assert gathered(none, torch.tensor([], dtype=torch.int64), device)[0].shape == (0, 3)
    assert gathered(none, torch.tensor([0]), device)[1] == SOURCE_OUT_OF_RANGE


@pytest.mark.parametrize(("offset", "align"), [(0, 16), (1, 4), (2, 8), (3, 4)])
def test_words_are_as_wide_as_all_addresses_allow(device: torch.device, offset: int, align: int) -> None:
    memory = random_rows(1, 404)[0].to(device)
    rows = memory[offset : offset + 400].view(4, 100)
    segments = Segments.of([(0, rows)], device)
    assert segments.align == align
    assert torch.equal(gathered(segments, torch.tensor([3, 1]), device)[0], rows.cpu()[[3, 1]])
    out = torch.zeros(401, device=device)[1:].view(4, 100)  # where rows go has a say too
    gather(segments, ids([0, 1, 2, 3], device), out, faults=no_faults(device))
    assert torch.equal(out, rows)


def test_tiles_are_as_wide_as_rows_unless_that_wastes_more() -> None:
    assert [columns_of(width) for width in (1, 3, 50, 64, 301, 512, 4096)] == [1, 4, 64, 64, 64, 512, 512]


@pytest.mark.gpu
def test_hot_rows_on_the_device_and_the_rest_in_pinned_memory_are_one_gather() -> None:
    device = torch.device("cuda")
    rows, wanted = random_rows(1000, 100), random_ids(1000, 5000)
    segments = Segments.of([(0, rows[:200].to(device)), (200, rows[200:].pin_memory())], device)
    assert torch.equal(gathered(segments, wanted, device)[0], rows[wanted])


def test_rows_that_addresses_do_not_lead_to_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rows of shape \[4, 4\] are in host memory that cuda cannot read; pin them"):
        Segments.of([(0, torch.zeros(4, 4))], torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"rows of shape \[3, 4\] are not contiguous; make them so"):
        Segments.of([(0, torch.zeros(4, 3).t())], torch.device("cpu"))
