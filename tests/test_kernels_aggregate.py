"""The kernels over lists of rows against the core: the same bits where both add in one order, ties and NaN included."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hoploom import ops
from hoploom.ops import InEdges, choice
from hoploom.ops import rows as core
from hoploom.ops.aggregate import add_ends
from hoploom.ops.kernels import aggregate as kernels
from hoploom.ops.kernels import softmax as softmax_kernels

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(1, 0), (3, 1), (8, 4), (47, 0), (100, 2), (256, 0), (602, 1)]  # width, heads
CASES = [("sum", 0), ("sum", 2), ("mean", 0), ("mean", 1), ("max", 0), ("softmax", 2)]


def graph(num_edges: int = 40, num_sources: int = 9, num_destinations: int = 7, seed: int = 0) -> InEdges:
    """Some lists are empty, one source has no edges."""
    generator = torch.Generator().manual_seed(seed)
    ends = [torch.randint(n, (num_edges,), generator=generator) for n in (num_sources - 1, num_destinations - 2)]
    return InEdges.of(torch.stack(ends), num_sources, num_destinations)


def on(device: torch.device, edges: InEdges, dtype: torch.dtype = torch.int64, spare: int = 5) -> InEdges:
    """The same lists on a device, with sources behind them that are none."""
    sources = torch.cat([edges.sources.to(dtype), torch.full((spare,), 2**31 - 1, dtype=dtype)])
    return InEdges(edges.indptr.to(device), sources.to(device), edges.num_sources)


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Few distinct ones, so that there are ties."""
    return torch.randint(-20, 20, shape, generator=torch.Generator().manual_seed(seed)).to(dtype) / 7


def widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def assert_bits(found: Tensor, expected: Tensor) -> None:
    """Equal, NaN too. The interpreter cuts bfloat16 off where devices round it: there the last bit may differ."""
    assert found.dtype == expected.dtype
    found, is_cut = found.cpu(), found.dtype == torch.bfloat16 and not found.is_cuda
    rtol = 2**-7 if is_cut else 0
    torch.testing.assert_close(found, expected, atol=0, rtol=rtol, equal_nan=True)


# --- each against the core ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "heads"), SHAPES)
def test_sums_have_the_cores_bits(width: int, heads: int, dtype: torch.dtype, device: torch.device) -> None:
    edges, x = graph(), values((9, width), dtype)
    weights = widened(values((45, heads), dtype, 1)) if heads else None
    mean = dtype in (torch.float32, torch.bfloat16)
    expected = core.sum_rows(edges.indptr, edges.sources, None, widened(x), weights, mean)
    ours = on(device, edges, torch.int32 if heads else torch.int64)
    given = None if weights is None else weights.to(device)
    found = kernels.sum_rows(ours.indptr, ours.sources, None, x.to(device), given, mean)
    assert_bits(found, expected.to(dtype))


@pytest.mark.parametrize(("width", "heads"), [(3, 0), (24, 2)])
def test_sums_over_transposed_lists_have_the_cores_bits(width: int, heads: int, device: torch.device) -> None:
    edges, grad = graph(), values((7, width))
    indptr, destinations, places = edges.transposed
    weights = values((40, heads), seed=1) if heads else None
    expected = core.sum_rows(indptr, destinations, places, grad, weights, False)
    given = None if weights is None else weights.to(device)
    lists = [array.to(device) for array in (indptr, destinations, places)]
    assert torch.equal(kernels.sum_rows(*lists, grad.to(device), given, False).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 47, 100, 256])
def test_maxima_and_their_gradients_have_the_cores_bits(width: int, dtype: torch.dtype, device: torch.device) -> None:
    edges, x, grad = graph(), values((9, width), dtype), values((7, width), dtype, 1)
    x[3] = math.nan
    expected, winners = core.max_rows(edges.indptr, edges.sources, widened(x))
    ours = on(device, edges)
    found, won = kernels.max_rows(ours.indptr, ours.sources, x.to(device))
    assert torch.equal(won.cpu(), winners)
    assert_bits(found, expected.to(dtype))
    backward = core.max_rows_backward(*edges.transposed, edges.indptr, widened(grad), winners)
    lists = [array.to(device) for array in (*edges.transposed, edges.indptr)]
    spread = kernels.max_rows_backward(*lists, grad.to(device), won)
    assert_bits(spread, backward.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "heads"), [(1, 1), (8, 4), (100, 2), (602, 1)])
def test_dot_products_are_the_cores(width: int, heads: int, dtype: torch.dtype, device: torch.device) -> None:
    edges, x, y = graph(), values((9, width), dtype), values((7, width), dtype, 1)
    found = kernels.dot_rows(on(device, edges), x.to(device), y.to(device), heads).cpu()
    torch.testing.assert_close(found[:40], core.dot_rows(edges, widened(x), widened(y), heads), atol=1e-4, rtol=1e-5)
    assert not found[40:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_edges", "heads"), [(40, 1), (40, 3), (600, 2)])
def test_softmax_and_its_gradient_are_the_cores(
    num_edges: int, heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    edges, scores = graph(num_edges), values((num_edges + 5, heads), dtype)
    scores[0], scores[1] = 1e4, -math.inf
    scores[num_edges:] = math.nan
    grad = widened(values((num_edges + 5, heads), dtype, 1))
    expected = core.softmax_lists(edges.indptr, widened(scores)[:num_edges].contiguous(), None)
    indptr = edges.indptr.to(device)
    found = kernels.softmax_lists(indptr, scores.to(device), None)
    torch.testing.assert_close(found[:num_edges].cpu(), expected)
    backward = kernels.softmax_lists(indptr, found, grad.to(device)).cpu()
    torch.testing.assert_close(backward[:num_edges], core.softmax_lists(edges.indptr, expected, grad[:num_edges]))
    assert not found[num_edges:].any()
    assert not backward[num_edges:].any()


# --- lists longer than a window -----------------------------------------------------------------


# Windows of 8: lists that begin and end at their ends and within them, over two, three and four of them.
LENGTHS = [[30], [8, 9, 8], [0, 17, 1, 0, 9, 0], [3, 5, 24, 7], [10, 10, 10]]


@pytest.mark.parametrize(("heads", "mean"), [(0, True), (2, False)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_long_lists_are_summed_window_by_window(
    lengths: list[int], heads: int, mean: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "WINDOW", 8)
    indptr, sources = torch.tensor([0, *lengths]).cumsum(0), torch.arange(sum(lengths) + 3) * 5 % 6
    x, weights = values((6, 4), torch.float64), values((len(sources), 2), torch.float64, 1) if heads else None
    expected = core.sum_rows(indptr, sources, None, x, weights, mean)
    given = None if weights is None else weights.to(device)
    found = kernels.sum_rows(indptr.to(device), sources.to(device), None, x.to(device), given, mean)
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_maxima_of_long_lists_have_the_cores_bits(
    lengths: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "WINDOW", 8)
    indptr, sources = torch.tensor([0, *lengths]).cumsum(0), torch.arange(sum(lengths) + 3) * 5 % 6
    x = values((6, 3)).round()
    x[0, 0] = math.nan
    expected, winners = core.max_rows(indptr, sources, x)
    found, won = kernels.max_rows(indptr.to(device), sources.to(device), x.to(device))
    assert torch.equal(won.cpu(), winners)
    assert_bits(found, expected)


def test_gradients_reach_a_source_of_many_edges(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WINDOW", 8)
    edges = InEdges.of(torch.stack([torch.tensor([0, 1, 0]).repeat(12), torch.arange(36) % 9]), 2, 9)
    x, grad = values((2, 3)), values((9, 3), seed=1)
    _, winners = core.max_rows(edges.indptr, edges.sources, x)
    lists = [array.to(device) for array in (*edges.transposed, edges.indptr)]
    found = kernels.max_rows_backward(*lists, grad.to(device), winners.to(device)).cpu()
    torch.testing.assert_close(found, core.max_rows_backward(*edges.transposed, edges.indptr, grad, winners))


def test_a_list_of_five_thousand_is_summed_in_many_windows(device: torch.device) -> None:
    indptr = torch.tensor([0, 2, 5002, 5002, 5005])
    sources = torch.arange(5005) % 11
    x = values((11, 3))
    found = kernels.sum_rows(indptr.to(device), sources.to(device), None, x.to(device), None, True).cpu()
    torch.testing.assert_close(found, core.sum_rows(indptr, sources, None, x, None, True))


# --- what shapes there can be --------------------------------------------------------------------


def test_no_lists_no_entries_and_no_columns_give_nothing_or_zeros(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    empty, two = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    x = torch.ones(4, 5, device=device)
    for indptr, width in ((empty, 5), (two, 5), (two, 0)):
        shape = (indptr.numel() - 1, width)
        assert torch.equal(kernels.sum_rows(indptr, none, None, x[:, :width], None, True), x.new_zeros(shape))
        greatest, winners = kernels.max_rows(indptr, none, x[:, :width])
        assert torch.equal(greatest, x.new_zeros(shape))
        assert torch.equal(winners, torch.full(shape, -1, dtype=torch.int32, device=device))
    assert kernels.dot_rows(InEdges(two, none, 4), x, x[:2], 1).shape == (0, 1)
    assert kernels.softmax_lists(two, torch.ones(0, 2, device=device), None).shape == (0, 2)


def test_rows_may_lie_apart_or_be_one_row_or_have_columns_apart(device: torch.device) -> None:
    edges = on(device, graph())
    wide = values((9, 40)).to(device)
    for x in (wide[:, 3:19], wide[:, ::3], wide[:1].expand(9, 40), wide[:, :1].expand(9, 6), wide.t()[:9, :9]):
        expected = kernels.sum_rows(edges.indptr, edges.sources, None, x.contiguous(), None, False)
        assert torch.equal(kernels.sum_rows(edges.indptr, edges.sources, None, x, None, False), expected)


# --- the whole of ops.aggregate ------------------------------------------------------------------


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU go to the kernels too."""
    monkeypatch.setattr(choice, "runs_in_core", lambda tensor: False)


def run(reduce: Any, heads: int, edges: InEdges, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The aggregate and all gradients."""
    x = torch.randn(9, 8, dtype=dtype, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    weights = None
    if heads:
        weights = torch.linspace(-1, 1, 40 * heads, dtype=dtype).view(40, heads).to(device).requires_grad_()
    out = ops.aggregate(x, edges, reduce, weights)
    (out * torch.arange(out.numel(), device=device).view_as(out).cos()).sum().backward()
    return [tensor.cpu() for tensor in (out, x.grad, *([] if weights is None else [weights.grad]))]


@pytest.mark.parametrize(("reduce", "heads"), CASES)
def test_aggregates_and_gradients_are_the_cores(
    reduce: str, heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    expected = {dtype: run(reduce, heads, graph(), dtype, cpu) for dtype in (torch.float32, torch.bfloat16)}
    monkeypatch.setattr(choice, "runs_in_core", lambda tensor: False)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        found = run(reduce, heads, on(device, graph(), spare=0), dtype, device)
        for ours, theirs in zip(found, expected[dtype], strict=True):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("by_kernels")
def test_rows_of_half_precision_are_nowhere_widened_in_memory(device: torch.device) -> None:
    edges = on(device, graph(), spare=0)
    for reduce, heads in CASES:
        x = torch.randn(9, 64, device=device).bfloat16().requires_grad_()
        weights = torch.ones(40, heads, device=device).bfloat16().requires_grad_() if heads else None
        grad = torch.ones(7, 64, device=device).bfloat16()
        with Watched() as watched:
            ops.aggregate(x, edges, reduce, weights).backward(grad)
        assert not [made for made in watched.made if made[1] == 64 and made[2] == torch.float32], reduce


# --- waiting for the device ----------------------------------------------------------------------

WAITING = ("_local_scalar_dense", "nonzero", "unique", "bincount", "masked_select", "is_nonzero", "equal", "item")


class Watched(TorchDispatchMode):
    """Notes which operations wait for a device, and the tensors of two dimensions that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[str] = []
        self.made: list[tuple[int, int, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        waits = any(name.startswith(one) for one in WAITING) or (
            name == "repeat_interleave" and "self_int" not in str(func)
        )
        if name.startswith("index") and isinstance(args[1], list | tuple):
            waits |= any(index is not None and index.dtype == torch.bool for index in args[1])
        if waits:
            self.waiting.append(str(func))
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() == 2:
            self.made.append((*out.shape, out.dtype))  # type: ignore[arg-type]
        return out


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are not run: the interpreter's own operations are not the device's."""
    for module in (kernels, softmax_kernels):
        monkeypatch.setattr(module, "launch", lambda *arguments, **constants: None)


def work(device: torch.device) -> None:
    """All that layers do with edges, forward and backward."""
    edges = InEdges.of(torch.randint(7, (2, 40), device=device), 9, 7)
    head = edges.head(4, 9)
    assert edges.with_loops.num_edges == 47
    assert edges.in_degrees_of_sources.shape == (9,)
    for one in (edges, head, edges.with_loops):
        for reduce, heads in CASES:
            x = torch.randn(9, 8, device=device, requires_grad=True)
            weights = torch.randn(one.num_edges, heads, device=device, requires_grad=True) if heads else None
            ops.aggregate(x, one, reduce, weights).sum().backward()
        ends = [torch.randn(n, 2, device=device, requires_grad=True) for n in (9, one.num_destinations)]
        add_ends(*ends, one).sum().backward()


@pytest.mark.usefixtures("by_kernels", "unlaunched")
def test_nothing_waits_for_the_device() -> None:
    with Watched() as watched:
        work(torch.device("cpu"))
    assert watched.waiting == []


def test_what_waits_is_noticed() -> None:
    edges = graph()
    with Watched() as watched:
        edges.head(4, 9)
        edges.sources[edges.are_loops].unique()
    assert len(watched.waiting) >= 3


@pytest.mark.gpu
def test_cuda_does_not_wait_either() -> None:
    device = torch.device("cuda")
    work(device)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work(device)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cuda_gives_the_same_bits_every_time() -> None:
    device = torch.device("cuda")
    edge_index = torch.randint(2000, (2, 200_000), device=device)
    edge_index[:, :5000] = 7  # a long list both ways
    found = []
    for _ in range(3):
        edges = InEdges.of(edge_index, 2000, 2000)
        x = torch.linspace(-1, 1, 2000 * 64, device=device).view(2000, 64).requires_grad_()
        scores = torch.linspace(-1, 1, 200_000 * 4, device=device).view(-1, 4).requires_grad_()
        ops.aggregate(x, edges, "softmax", scores).square().sum().backward()
        found.append(torch.cat([x.grad.flatten(), scores.grad.flatten()]))
    assert all(torch.equal(found[0], other) for other in found[1:])
