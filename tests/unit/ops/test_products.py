"""Linear layers on the core's matrix products: as torch's, also on processors where torch's are taken."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from hoploom import ops
from hoploom.ops import products


@pytest.fixture(autouse=True)
def _on_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "FAST", True)
    monkeypatch.setattr(products, "LEAST_ROWS", 0)


def _with_gradients(function: object, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    leaves = [one.detach().requires_grad_() for one in (x, weight, bias) if one is not None]
    out = function(*leaves)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize(("rows", "depth", "width"), [(0, 3, 4), (1, 1, 1), (7, 30, 70), (2500, 64, 68)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("layout", ["whole", "columns of more", "transposed", "one row for all"])
def test_a_linear_layer_is_torchs(rows: int, depth: int, width: int, has_bias: bool, layout: str) -> None:
    torch.manual_seed(rows)
    x, weight, grad = torch.randn(rows, depth), torch.randn(width, depth), torch.randn(rows, width)
    if layout == "columns of more":
        x, weight = torch.randn(rows, depth + 5)[:, 2 : 2 + depth], torch.randn(width, depth + 1)[:, 1:]
    elif layout == "transposed":
        x, weight, grad = torch.randn(depth, rows).t(), torch.randn(depth, width).t(), torch.randn(width, rows).t()
    elif layout == "one row for all":
        x, grad = torch.randn(1, depth).expand(rows, -1), torch.randn(()).expand(rows, width)
    given = x, weight, torch.randn(width) if has_bias else None, grad
    for found, expected in zip(_with_gradients(ops.linear, *given), _with_gradients(F.linear, *given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_gradients_have_the_same_bits_with_any_number_of_threads() -> None:
    given = torch.randn(30_000, 40), torch.randn(70, 40), torch.randn(70), torch.randn(30_000, 70)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        results.append(_with_gradients(ops.linear, *given))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_numbers_are_multiplied_by_torch(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 4, dtype=dtype), torch.randn(5, 4, dtype=dtype)
    assert torch.equal(ops.linear(x, weight), F.linear(x, weight))
    with torch.autocast("cpu"):
        assert ops.linear(x.float(), weight.float()).dtype is torch.bfloat16


def test_a_weight_that_is_not_trained_gets_no_gradient() -> None:
    x, bias = torch.randn(3, 4, requires_grad=True), torch.zeros(5, requires_grad=True)
    weight = torch.randn(5, 4)
    ops.linear(x, weight, bias).sum().backward()
    assert weight.grad is None
    assert x.grad is not None
    assert bias.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1))
    assert torch.equal(bias.grad, torch.full((5,), 3.0))


def test_few_rows_and_rows_of_another_width_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_ROWS", 3)
    weight = torch.randn(5, 4)
    assert [ops.has_fast_product(torch.randn(n, 4), weight) for n in (0, 2, 3)] == [False, False, True]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ops.linear(torch.randn(9, 6), weight)
