"""The kernels of messages and scores reduce as the core does, forward and backward, and write no message to memory.

Windows and tiles are short, arrays have fences, and all that stands behind the lists is NaN or ids of nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.kernel_forms import fenced
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hoploom import ops
from hoploom.ops import EdgeTerm, InEdges
from hoploom.ops.kernels import aggregate
from hoploom.ops.kernels import messages as kernels

SOURCES, LENGTHS, SPARE = 7, (3, 0, 19, 1, 8), 3
EDGES = sum(LENGTHS)
Compute = Callable[..., Tensor]


def edges_of(lengths: Sequence[int] = LENGTHS, spare: int = 0, wide: bool = False) -> InEdges:
    """Half of the edges have source 0, so that there are long lists both ways."""
    random = torch.Generator().manual_seed(1)
    sources = torch.randint(-SOURCES, SOURCES, (sum(lengths),), generator=random).clamp(min=0)
    sources = F.pad(sources, (0, spare), value=2**31 - 1)
    return InEdges(torch.tensor([0, *lengths]).cumsum(0), sources if wide else sources.int(), SOURCES)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def term_of(num_edges: int, width: int, k: int | None) -> list[Tensor]:
    return [drawn(num_edges, k or width, seed=7), *([] if k is None else [drawn(width, k, seed=8)])]


def results(compute: Compute, leaves: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The outcome and the gradients of all leaves."""
    own = [leaf.to(device, dtype).requires_grad_() for leaf in leaves]
    out = compute(*own)
    grads = torch.autograd.grad(out, own, torch.cos(torch.arange(out.numel())).view_as(out).to(out))
    return [one.detach().cpu() for one in (out, *grads)]


def assert_near(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for ours, cores in zip(found, expected, strict=True):
        assert ours.isfinite().all()
        atol = tolerance * max(1.0, float(cores.abs().max()))  # sums of values of about 1
        torch.testing.assert_close(ours.to(cores.dtype), cores, atol=atol, rtol=0)


def assert_same(
    compute: Callable[..., Tensor], leaves: Sequence[Tensor], term: Sequence[Tensor], monkeypatch: pytest.MonkeyPatch,
    by_kernels: Callable[[], None], device: torch.device, behind: float = torch.nan,
) -> None:  # fmt: skip
    """The kernels' results with spare places behind the lists are the core's without; of half precision, nearly."""
    plain, longer = edges_of(), InEdges(*_on(device, edges_of(spare=SPARE, wide=len(term) == 1)), SOURCES)
    padded = [F.pad(term[0], (0, 0, 0, SPARE), value=behind), *term[1:]] if term else []
    cases, here = [(torch.float32, 1e-6), (torch.bfloat16, 0.02)], torch.device("cpu")
    if len(term) == 1:
        cases.append((torch.float64, 1e-13))
    wanted = []
    for dtype, _ in cases:
        rounded = [leaf.to(dtype).to(torch.promote_types(dtype, torch.float32)) for leaf in (*leaves, *term)]
        wanted.append(results(lambda *given: compute(plain, *given), rounded, rounded[0].dtype, here))
    by_kernels()
    monkeypatch.setattr(aggregate, "WINDOW", 8)
    monkeypatch.setattr(kernels, "MOST_EDGES", 4)
    monkeypatch.setattr(kernels, "SPREAD", 500)  # the gradients of weights take several rounds
    for (dtype, tolerance), expected in zip(cases, wanted, strict=True):
        with fenced(kernels):
            found = results(lambda *given: compute(longer, *given), [*leaves, *padded], dtype, device)
        for one, cores in zip(found, expected, strict=True):
            assert not one[cores.shape[0] :].any()
        assert_near([one[: cores.shape[0]] for one, cores in zip(found, expected, strict=True)], expected, tolerance)


def _on(device: torch.device, edges: InEdges) -> tuple[Tensor, Tensor]:
    return edges.indptr.to(device), edges.sources.to(device)


@pytest.mark.parametrize(
    ("reduce", "act", "width", "k"),
    [
        ("sum", "relu", 24, None), ("sum", "relu", 140, 2), ("mean", "relu", 1, 1), ("mean", "relu", 33, 6),
        ("sum", "square", 24, 3), ("mean", "square", 7, None), ("sum", "relu", 8, 70), ("max", "relu", 8, 3),
        ("max", None, 24, None), ("max", None, 33, 6), ("max", "relu", 140, 1),
    ],
)  # fmt: skip
def test_messages_and_their_gradients_are_the_cores(
    reduce: Any, act: Any, width: int, k: int | None, device: torch.device, by_kernels: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def compute(edges: InEdges, x: Tensor, *term: Tensor) -> Tensor:
        return ops.aggregate_messages(x, edges, reduce, EdgeTerm(*term), act)

    leaves, term = [drawn(SOURCES, width, seed=0)], term_of(EDGES, width, k)
    behind = 7.0 if k == 70 else torch.nan  # torch projects all rows there
    assert_same(compute, leaves, term, monkeypatch, by_kernels, device, behind)


@pytest.mark.parametrize(
    ("heads", "share", "k", "slope"), [(1, 24, None, 0.2), (4, 8, 5, 0.1), (2, 70, 1, 0.0), (3, 7, 0, 0.2)]
)
def test_scores_and_their_gradients_are_the_cores(
    heads: int, share: int, k: int | None, slope: float, device: torch.device, by_kernels: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With k = 0, there is no term."""

    def compute(edges: InEdges, left: Tensor, right: Tensor, att: Tensor, *term: Tensor) -> Tensor:
        return ops.pair_scores(left, right, edges, att, slope, EdgeTerm(*term) if term else None)

    width = heads * share
    leaves = [drawn(SOURCES, width, seed=0), drawn(len(LENGTHS), width, seed=1), drawn(heads, share, seed=2)]
    term = [] if k == 0 else term_of(EDGES, width, k)
    assert_same(compute, leaves, term, monkeypatch, by_kernels, device)


def test_no_edges_and_no_columns_give_zeros(device: torch.device, by_kernels: Callable[[], None]) -> None:
    by_kernels()
    for lengths, width in (((0, 0), 6), ((), 6), ((2, 3), 0)):
        edges = InEdges(*_on(device, edges_of(lengths)), SOURCES)
        ends = [torch.ones(n, width, device=device).requires_grad_() for n in (SOURCES, len(lengths))]
        term = [torch.ones(shape, device=device).requires_grad_() for shape in ((sum(lengths), 2), (width, 2))]
        out = ops.aggregate_messages(ends[0], edges, "mean", EdgeTerm(*term), "relu")
        assert (out.shape, out.count_nonzero()) == ((len(lengths), width), 0)
        if width:
            att = torch.ones(2, 3, device=device).requires_grad_()
            scores = ops.pair_scores(*ends, edges, att, 0.2, EdgeTerm(*term))
            assert scores.shape == (0, 2)
            out = out.sum() + scores.sum()
        for grad in torch.autograd.grad(out.sum(), [ends[0], *term]):
            assert not grad.any()


def test_values_that_are_no_numbers_stay_what_they_are(device: torch.device, by_kernels: Callable[[], None]) -> None:
    by_kernels()
    edges = InEdges(torch.tensor([0, 1, 2, 3], device=device), torch.arange(3, device=device), 3)
    x = torch.tensor([[torch.nan], [torch.inf], [-torch.inf]], device=device)
    found = ops.aggregate_messages(x, edges, "sum", EdgeTerm(torch.ones_like(x)), "relu").cpu()
    torch.testing.assert_close(found, torch.tensor([[torch.nan], [torch.inf], [0.0]]), equal_nan=True)


class Largest(TorchDispatchMode):
    """Notes the number of values of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.size = max(self.size, out.numel())
        return out


@pytest.mark.parametrize("in_core", [False, True])
def test_a_node_with_many_neighbours_takes_no_row_of_full_width_per_edge(
    in_core: bool, device: torch.device, by_kernels: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_core:
        device = torch.device("cpu")
    else:
        by_kernels()
    monkeypatch.setattr(kernels, "SPREAD", 64 * 100)
    if device.type != "cuda":  # what the interpreter makes is not in a device's memory
        for module in (aggregate, kernels):
            monkeypatch.setattr(module, "launch", lambda *arguments, **constants: None)
    num_edges = 100_000
    edges = InEdges(*_on(device, edges_of((num_edges,))), SOURCES)
    leaves = [torch.ones(shape, device=device).requires_grad_() for shape in ((SOURCES, 64), (1, 64), (2, 32))]
    term = [torch.ones(shape, device=device).requires_grad_() for shape in ((num_edges, 3), (64, 3))]
    with Largest() as largest:
        for reduce in ("sum", "max"):
            ops.aggregate_messages(leaves[0], edges, reduce, EdgeTerm(*term), "relu").sum().backward()
        ops.aggregate(leaves[0], edges, "max", term[0][:, :2]).sum().backward()
        ops.pair_scores(*leaves[:2], edges, leaves[2], 0.2, EdgeTerm(*term)).sum().backward()
    assert largest.size <= 3 * (num_edges + 1)
