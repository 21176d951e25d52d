"""Aggregation by kernels on drawn lists: the messages written out in float64, and autograd through them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_lists import Drawn, drawn_lists
from torch import Tensor

from hoploom import ops
from hoploom.ops import InEdges, rows
from hoploom.ops.edges import add_ends
from hoploom.ops.kernels import aggregate as kernels

CASES = [("sum", 0), ("sum", 2), ("mean", 0), ("mean", 1), ("max", 0), ("softmax", 2)]
WINDOW = 8

few = settings(max_examples=2, deadline=None, derandomize=True)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@contextmanager
def by_kernels() -> Iterator[None]:
    """Tensors on the CPU go to the kernels too, and longer lists than a short window through all of them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rows, "runs_in_core", lambda tensor: False)
        patched.setattr(kernels, "WINDOW", WINDOW)
        yield


def on(device: torch.device, edges: InEdges) -> InEdges:
    return InEdges(edges.indptr.to(device), edges.sources.to(device), edges.num_sources, first=edges.first)


def messages(reduce: str, x: Tensor, edges: InEdges, weights: Tensor | None) -> Tensor:
    """The aggregate list by list; the first of equals is the greatest."""
    out = []
    for begin, end in zip(edges.indptr[:-1].tolist(), edges.indptr[1:].tolist(), strict=True):
        rows = x[edges.sources[begin:end].long()]
        if weights is not None:
            own = weights[begin:end].softmax(0) if reduce == "softmax" else weights[begin:end]
            rows = rows * own.repeat_interleave(x.shape[1] // own.shape[1], 1)
        if reduce == "max" and begin < end:
            out.append(rows.gather(0, rows.argmax(0)[None])[0])
        else:
            out.append(rows.sum(0) / (max(1, end - begin) if reduce == "mean" else 1))
    return torch.stack(out) if out else x[:0]


def gradients(function: Callable[..., Tensor], grad: Tensor, *leaves: Tensor) -> list[Tensor]:
    """What comes out, and the gradient of every leaf."""
    given = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = function(*given)
    out.backward(grad)
    return [out.detach(), *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in given)]


def assert_close(found: list[Tensor], exact: list[Tensor], dtype: torch.dtype, terms: int) -> None:
    """Up to one rounding to the type, and as many as there are terms in what they are added up in."""
    wide = torch.finfo(torch.promote_types(dtype, torch.float32))
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        greatest = float(theirs.abs().max()) if theirs.numel() else 0.0
        room = {"atol": 8 * terms * wide.eps * (1 + greatest), "rtol": torch.finfo(dtype).eps}
        torch.testing.assert_close(ours.cpu().double(), theirs, **room)


@pytest.mark.parametrize(
    ("reduce", "heads", "dtype"),
    [*((*case, torch.float32) for case in CASES), ("mean", 1, torch.bfloat16), ("softmax", 2, torch.bfloat16)],
)
@few
@given(drawn=drawn_lists(windows=(WINDOW,)), loops=st.booleans())
def test_aggregates_and_their_gradients_are_autograds(
    device: torch.device, reduce: str, heads: int, dtype: torch.dtype, drawn: Drawn, loops: bool
) -> None:
    drawn = replace(drawn, heads=heads, is_special=False)
    edges = drawn.edges.with_loops if loops else drawn.edges
    with by_kernels():
        ours = on(device, drawn.edges)
        ours = ours.with_loops if loops else ours
    length = int(edges.indptr[-1])
    x = drawn.rows(edges.num_sources, edges.sources[:length].long(), dtype, torch.device("cpu"))
    weights = torch.full((ours.num_edges, heads), torch.nan, dtype=dtype)
    weights[:length] = drawn.values((length, heads), dtype, 1)
    leaves, grad = [x, *([weights] if heads else [])], drawn.values((edges.num_destinations, drawn.width), dtype, 2)
    with by_kernels():
        found = gradients(
            lambda x, w=None: ops.aggregate(x, ours, reduce, w), grad.to(device), *(leaf.to(device) for leaf in leaves)
        )
    exact = gradients(
        lambda x, w=None: messages(reduce, x, edges, w), grad.double(), *(leaf.double() for leaf in leaves)
    )
    assert_close(found, exact, dtype, length + drawn.share)
    if heads:
        assert not found[2][length:].any()


@by_dtype
@few
@given(drawn=drawn_lists(windows=(WINDOW,)))
def test_ends_are_added_and_their_gradients_are_autograds(
    device: torch.device, dtype: torch.dtype, drawn: Drawn
) -> None:
    drawn = replace(drawn, is_special=False)
    edges, ours = drawn.edges, on(device, drawn.edges)
    ends = [drawn.values((number, 3), dtype, number) for number in (edges.num_sources, edges.num_destinations)]
    grad = drawn.values((len(drawn.sources), 3), dtype, 2)
    with by_kernels():
        given = torch.full((edges.num_edges, 3), torch.nan, dtype=dtype)
        given[: len(grad)] = grad
        found = gradients(lambda x, y: add_ends(x, y, ours), given.to(device), *(end.to(device) for end in ends))
    found[0] = found[0][: len(grad)]
    exact = gradients(
        lambda x, y: x[drawn.sources] + y[drawn.destinations], grad.double(), *(end.double() for end in ends)
    )
    assert_close(found, exact, dtype, len(grad) + 1)
