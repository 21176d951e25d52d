"""The kernels over lists of rows: nothing at all, what they make in memory, and that nothing waits for them.

That they reduce as the core does: test_kernels_reduce.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.waiting import NoWaiting
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hoploom import ops
from hoploom.ops import InEdges
from hoploom.ops.kernels import aggregate as kernels
from hoploom.ops.kernels import messages
from hoploom.ops.reductions import add_ends

CASES = [("sum", 0), ("sum", 2), ("mean", 0), ("mean", 1), ("max", 0), ("max", 2), ("softmax", 2)]


def test_no_lists_no_entries_and_no_columns_give_nothing_or_zeros(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    empty, two = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    x = torch.ones(4, 5, device=device)
    for indptr, width in ((empty, 5), (two, 5), (two, 0)):
        shape = (indptr.numel() - 1, width)
        assert torch.equal(kernels.sum_rows(indptr, none, None, x[:, :width], None, True), x.new_zeros(shape))
        greatest, winners = kernels.max_rows(indptr, none, x[:, :width], None)
        assert torch.equal(greatest, x.new_zeros(shape))
        assert torch.equal(winners, torch.full(shape, -1, dtype=torch.int32, device=device))
    assert kernels.dot_rows((two, none, none), x, x[:2], 1, None).shape == (0, 1)
    assert kernels.softmax_lists(two, torch.ones(0, 2, device=device), None).shape == (0, 2)


class Wide(TorchDispatchMode):
    """Notes the matrices of float32 that are made: their widths."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() == 2 and out.dtype == torch.float32:
            self.widths.add(out.shape[1])
        return out


def test_half_precision_rows_are_never_widened_in_memory(device: torch.device, by_kernels: Callable[[], None]) -> None:
    by_kernels()
    edges = InEdges.of(torch.randint(7, (2, 40), device=device), 9, 7)
    for reduce, heads in CASES:
        x = torch.randn(9, 64, device=device).bfloat16().requires_grad_()
        weights = torch.ones(40, heads, device=device).bfloat16().requires_grad_() if heads else None
        grad = torch.ones(7, 64, device=device).bfloat16()
        with Wide() as wide:
            ops.aggregate(x, edges, reduce, weights).backward(grad)
        assert 64 not in wide.widths, reduce


def work(device: torch.device) -> None:
    """All that layers do with edges, forward and backward."""
    edges = InEdges.of(torch.randint(7, (2, 40), device=device), 9, 7)
    head = edges.head(4, 9)
    assert (edges.with_loops.num_edges, edges.in_degrees_of_sources.shape) == (47, (9,))
    for one in (edges, head, edges.with_loops):
        for reduce, heads in CASES:
            x = torch.randn(9, 8, device=device, requires_grad=True)
            weights = torch.randn(one.num_edges, heads, device=device, requires_grad=True) if heads else None
            ops.aggregate(x, one, reduce, weights).sum().backward()
        ends = [torch.randn(n, 2, device=device, requires_grad=True) for n in (9, one.num_destinations)]
        add_ends(*ends, one).sum().backward()
        rows, weight, att = (torch.randn(shape, device=device) for shape in ((one.num_edges, 3), (2, 3), (1, 2)))
        term = ops.EdgeTerm(rows.requires_grad_(), weight.requires_grad_())
        ops.pair_scores(*ends, one, att.requires_grad_(), 0.2, term).sum().backward()
        for reduce, act in (("mean", "relu"), ("sum", "square"), ("max", None)):
            ops.aggregate_messages(ends[0], one, reduce, term, act).sum().backward()


def test_nothing_waits_for_the_device(
    device: torch.device, by_kernels: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_kernels()
    if device.type == "cuda":
        work(device)  # compiles
    else:  # the interpreter's own operations are not the device's
        for module in (kernels, messages):
            monkeypatch.setattr(module, "launch", lambda *arguments, **constants: None)
    with NoWaiting():  # type: ignore[no-untyped-call]
        work(device)


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
        term = ops.EdgeTerm(scores, torch.linspace(-1, 1, 64 * 4, device=device).view(64, 4).requires_grad_())
        sent = ops.aggregate(x, edges, "softmax", ops.pair_scores(x, x, edges, x[:4, :16], 0.2, term) + scores)
        (sent + ops.aggregate_messages(x, edges, "sum", term, "relu")).square().sum().backward()
        found.append(torch.cat([one.grad.flatten() for one in (x, *term)]))
    assert all(torch.equal(found[0], other) for other in found[1:])
