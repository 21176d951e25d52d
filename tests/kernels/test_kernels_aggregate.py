"""The kernels over lists of rows: many windows, nothing at all, what they make in memory, and for what they wait.

That they reduce as the core does: test_kernels_reduce.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hoploom import ops
from hoploom.ops import InEdges
from hoploom.ops import rows as core
from hoploom.ops.edges import add_ends
from hoploom.ops.kernels import aggregate as kernels

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


def test_a_list_of_five_thousand_is_summed_in_many_windows(device: torch.device) -> None:
    indptr = torch.tensor([0, 2, 5002, 5002, 5005])
    sources = torch.arange(5005) % 11
    x = values((11, 3))
    found = kernels.sum_rows(indptr.to(device), sources.to(device), None, x.to(device), None, True).cpu()
    torch.testing.assert_close(found, core.sum_rows(indptr, sources, None, x, None, True))


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
    assert kernels.dot_rows(two, none, none, x, x[:2], 1).shape == (0, 1)
    assert kernels.softmax_lists(two, torch.ones(0, 2, device=device), None).shape == (0, 2)


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU go to the kernels too."""
    monkeypatch.setattr(core, "runs_in_core", lambda tensor: False)


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
    monkeypatch.setattr(kernels, "launch", lambda *arguments, **constants: None)


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
