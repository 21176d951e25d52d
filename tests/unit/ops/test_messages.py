"""Messages and scores of edges equal plain torch formulas, forward and backward, whatever the threads and shapes."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch_geometric.utils import scatter
from torch_geometric.utils import softmax as pyg_softmax

from hoploom import ConfigError, ops
from hoploom.ops import EdgeTerm, InEdges

Compute = Callable[..., Tensor]
SOURCES, DESTINATIONS, EDGES, HEADS, WIDTH = 30, 20, 150, 2, 24
REDUCES = [
    ("sum", None), ("sum", "relu"), ("sum", "square"), ("mean", None), ("mean", "relu"), ("mean", "square"),
    ("max", None), ("max", "relu"),
]  # fmt: skip


def edge_index_of(num_sources: int, num_destinations: int, num_edges: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randint(n, (num_edges,), generator=generator) for n in (num_sources, num_destinations)])


def edges_of(sizes: tuple[int, int, int] = (SOURCES, DESTINATIONS, EDGES)) -> InEdges:
    return InEdges.of(edge_index_of(*sizes), *sizes[:2])


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def term_of(edges: InEdges, width: int, k: int | None) -> list[Tensor]:
    """The edges' rows, and the weight, if they are narrower than a message."""
    rows = leaf(edges.num_edges, k or width, seed=7)
    return [rows] if k is None else [rows, leaf(width, k, seed=8)]


def assert_same_results(ours: Compute, theirs: Compute, *leaves: Tensor) -> None:
    """The same outputs and gradients of all leaves, in float64 and, less exactly, in float32."""
    expected, wanted = theirs(*leaves), None
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-4)):
        own = [one.detach().to(dtype).requires_grad_() for one in leaves]
        found = ours(*own)
        seed = torch.cos(torch.arange(float(expected.numel()), dtype=torch.float64)).view_as(expected)
        wanted = wanted or torch.autograd.grad(expected, leaves, seed, allow_unused=True)
        grads = torch.autograd.grad(found, own, seed.to(found.dtype))
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
        for grad, of_formula in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad.double(), of_formula, atol=tolerance, rtol=tolerance)


def messages_of(x: Tensor, edges: InEdges, act: str | None, rows: Tensor, weight: Tensor | None = None) -> Tensor:
    made = x[edges.sources.long()] + (rows if weight is None else rows @ weight.t())
    return made if act is None else made.relu() if act == "relu" else made.square()


@pytest.mark.parametrize("k", [None, 1, 5, 16, 70])
@pytest.mark.parametrize(("reduce", "act"), REDUCES)
@pytest.mark.parametrize("sizes", [(SOURCES, DESTINATIONS, EDGES), (5, 3, 0), (3, 1, 90)])
def test_messages_are_aggregated(sizes: tuple[int, int, int], reduce: str, act: str | None, k: int | None) -> None:
    edges = edges_of(sizes)
    assert_same_results(
        lambda x, *term: ops.aggregate_messages(x, edges, reduce, EdgeTerm(*term), act),
        lambda x, *term: scatter(messages_of(x, edges, act, *term), edges.destinations, 0, sizes[1], reduce),
        leaf(sizes[0], WIDTH), *term_of(edges, WIDTH, k),
    )  # fmt: skip


def scores_of(edges: InEdges, left: Tensor, right: Tensor, att: Tensor, *term: Tensor) -> Tensor:
    total = left[edges.sources.long()] + right[edges.destinations]
    if term:
        total = total + (term[0] if len(term) == 1 else term[0] @ term[1].t())
    return (F.leaky_relu(total, 0.2).view(edges.num_edges, *att.shape) * att).sum(2)


@pytest.mark.parametrize(("k", "has_term"), [(None, False), (None, True), (1, True), (5, True), (16, True), (70, True)])
@pytest.mark.parametrize("sizes", [(SOURCES, DESTINATIONS, EDGES), (5, 3, 0), (3, 1, 90)])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_scores_are_gatv2s(sizes: tuple[int, int, int], heads: int, k: int | None, has_term: bool) -> None:
    edges = edges_of(sizes)
    assert_same_results(
        lambda left, right, att, *term: ops.pair_scores(
            left, right, edges, att, 0.2, EdgeTerm(*term) if term else None
        ),
        lambda left, right, att, *term: scores_of(edges, left, right, att, *term),
        leaf(sizes[0], WIDTH), leaf(sizes[1], WIDTH, seed=1), leaf(heads, WIDTH // heads, seed=2),
        *(term_of(edges, WIDTH, k) if has_term else ()),
    )  # fmt: skip


def test_dots_are_those_of_both_ends() -> None:
    edges = edges_of()
    assert_same_results(
        lambda left, right: ops.dot_ends(left, right, edges, HEADS),
        lambda left, right: (left[edges.sources.long()] * right[edges.destinations]).view(EDGES, HEADS, -1).sum(2),
        leaf(SOURCES, WIDTH), leaf(DESTINATIONS, WIDTH, seed=1),
    )  # fmt: skip


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("sizes", [(SOURCES, DESTINATIONS, EDGES), (5, 3, 0), (3, 1, 90)])
def test_each_head_sums_up_whole_rows(sizes: tuple[int, int, int], heads: int) -> None:
    edges = edges_of(sizes)
    assert_same_results(
        lambda x, weights: ops.sum_per_head(x, edges, weights),
        lambda x, weights: scatter(
            (x[edges.sources.long()].unsqueeze(1) * weights.unsqueeze(2)).flatten(1), edges.destinations, 0, sizes[1]
        ),
        leaf(sizes[0], 7), leaf(edges.num_edges, heads, seed=1),
    )  # fmt: skip


def attended(x: Tensor, edges: InEdges, scores: Tensor) -> Tensor:
    weights = pyg_softmax(scores, edges.destinations, num_nodes=edges.num_destinations)
    messages = x[edges.sources.long()] * weights.repeat_interleave(WIDTH // HEADS, 1)
    return scatter(messages, edges.destinations, 0, edges.num_destinations)


def test_attention_returns_the_logarithms_of_its_totals() -> None:
    edges = edges_of((SOURCES, 5, EDGES))
    assert_same_results(
        lambda x, scores: torch.cat(ops.attend(x, edges, scores), 1),
        lambda x, scores: torch.cat(
            [attended(x, edges, scores), scatter(scores.exp(), edges.destinations, 0, 5).log()], 1
        ),
        leaf(SOURCES, WIDTH), leaf(EDGES, HEADS, seed=1),
    )  # fmt: skip


def test_two_relations_attention_is_joined_to_that_of_all_edges() -> None:
    index, x, scores = edge_index_of(SOURCES, 3, 40), leaf(SOURCES, WIDTH), leaf(40, HEADS, seed=1)
    whole = InEdges.of(index, SOURCES, 3).with_features(scores)
    halves = [InEdges.of(index[:, half], SOURCES, 3).with_features(scores[half]) for half in (slice(25), slice(25, 40))]

    def joined(x: Tensor) -> Tensor:
        outs, totals = zip(*(ops.attend(x, half, half.features) for half in halves), strict=True)
        shares = torch.stack(totals).softmax(0).repeat_interleave(WIDTH // HEADS, 2)
        return (torch.stack(outs) * shares).sum(0)

    for leaves in ([x], [scores]):
        wanted = ops.attend(x, whole, whole.features)[0]
        torch.testing.assert_close(joined(x), wanted)
        found = torch.autograd.grad(joined(x).cos().sum(), leaves, retain_graph=True)
        torch.testing.assert_close(found, torch.autograd.grad(wanted.cos().sum(), leaves, retain_graph=True))


def test_a_destination_without_edges_has_no_total_and_great_scores_do_not_overflow() -> None:
    edges = InEdges.of(torch.tensor([[0, 1], [0, 0]]), 2, 2)
    scores = torch.tensor([[1e30], [-1e30]], requires_grad=True)
    out, totals = ops.attend(torch.tensor([[3.0], [5.0]]), edges, scores)
    assert (out.tolist(), totals.tolist()) == ([[3], [0]], [[torch.tensor(1e30).item()], [-torch.inf]])
    totals[0].sum().backward()
    assert scores.grad.tolist() == [[1], [0]]


SMALL = (6, 4, 14)


@pytest.mark.parametrize("k", [None, 3])
def test_gradients_are_those_of_finite_differences(k: int | None) -> None:
    edges = edges_of(SMALL)
    term, x, right = term_of(edges, 4, k), leaf(6, 4), leaf(4, 4, seed=1)
    for reduce, act in REDUCES:
        compute = lambda x, *term: ops.aggregate_messages(x, edges, reduce, EdgeTerm(*term), act)  # noqa: B023, E731
        assert torch.autograd.gradcheck(compute, (x, *term))
    att = leaf(2, 2, seed=2)
    scores = lambda left, right, att, *term: ops.pair_scores(left, right, edges, att, 0.2, EdgeTerm(*term))  # noqa: E731
    assert torch.autograd.gradcheck(scores, (x, right, att, *term))
    assert torch.autograd.gradcheck(lambda left, right: ops.dot_ends(left, right, edges, 2), (x, right))
    assert torch.autograd.gradcheck(lambda x, scores: ops.sum_per_head(x, edges, scores), (x, leaf(14, 2, seed=3)))
    assert torch.autograd.gradcheck(lambda x, scores: ops.attend(x, edges, scores), (x, leaf(14, 2, seed=3)))


def results(
    edges: InEdges, k: int | None = 6, dtype: torch.dtype = torch.float32, rounded: torch.dtype = torch.float32
) -> list[Tensor]:
    """All outputs and gradients of each function, for leaves that depend on the sizes and seeds only."""
    sizes = edges.num_sources, edges.num_destinations, int(edges.indptr[-1])
    pad = lambda rows: F.pad(rows, (0, 0, 0, edges.num_edges - sizes[2]))  # noqa: E731
    found: list[Tensor] = []

    def add(out: Tensor, *leaves: Tensor) -> None:
        found.extend([out[: sizes[2]] if out.shape[0] == edges.num_edges else out])
        found.extend(torch.autograd.grad(out[: sizes[2]].float().square().sum(), leaves))

    def own(*shape: int, seed: int) -> Tensor:
        return (leaf(*shape, seed=seed).detach() / 4).to(rounded).to(dtype).requires_grad_()

    x, right, att = own(sizes[0], 64, seed=0), own(sizes[1], 64, seed=1), own(4, 16, seed=2)
    scores, rows = own(sizes[2], 4, seed=3), own(sizes[2], k or 64, seed=4)
    term = [rows] if k is None else [rows, own(64, k, seed=5)]
    for reduce, act in REDUCES:
        add(ops.aggregate_messages(x, edges, reduce, EdgeTerm(pad(rows), *term[1:]), act), x, *term)
    add(ops.pair_scores(x, right, edges, att, 0.1, EdgeTerm(pad(rows), *term[1:])), x, right, att, *term)
    add(ops.pair_scores(x, right, edges, att, 0.1), x, right, att)
    add(ops.dot_ends(x, right, edges, 4), x, right)
    add(torch.cat(ops.attend(x, edges, pad(scores)), 1), x, scores)
    add(ops.sum_per_head(x, edges, pad(scores)), x, scores)
    return found


@pytest.mark.parametrize("k", [None, 6])
def test_one_thread_and_three_give_the_same_bits(k: int | None) -> None:
    edges, found = edges_of((3000, 2000, 20_000)), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(results(edges, k))
    for one, other in itertools.chain(zip(*found[:2], strict=True), zip(*found[1:], strict=True)):
        assert torch.equal(one, other)


def test_ids_may_be_wide_and_entries_behind_the_lists_change_nothing() -> None:
    edges = edges_of()
    wide = InEdges(edges.indptr, edges.sources.long(), edges.num_sources)
    longer = InEdges(edges.indptr, F.pad(edges.sources, (0, 5), value=2**31 - 1), edges.num_sources)
    for other in (wide, longer):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(results(edges), results(other), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_converted(dtype: torch.dtype) -> None:
    edges = edges_of()
    for ours, exact in zip(results(edges, dtype=dtype), results(edges, rounded=dtype), strict=True):
        torch.testing.assert_close(ours.float(), exact, atol=0.01 * float(exact.detach().abs().max()), rtol=0.02)


def test_features_follow_the_edges_like_weights() -> None:
    index = torch.tensor([[3, 1, 2, 0, 1], [2, 0, 1, 0, 2]])
    edges = InEdges.of(index, 4, 4).with_features(torch.arange(10.0).view(5, 2)).weighted(torch.arange(5.0))
    assert (edges.sources.tolist(), edges.features[:, 0].tolist()) == ([1, 0, 2, 3, 1], [2, 6, 4, 0, 8])
    head = edges.head(2, 4)
    assert (head.features.tolist(), head.weights.tolist()) == ([[2, 3], [6, 7], [4, 5]], [1, 3, 2])
    for features in (torch.ones(5), torch.ones(4, 2)):
        with pytest.raises(ConfigError, match="give"):
            edges.with_features(features)


X, TERM = torch.ones(3, 4), EdgeTerm(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: ops.aggregate_messages(X, e, "median", TERM), "choose one of"),
        (lambda e: ops.aggregate_messages(X, e, "sum", TERM, "tanh"), "choose one of"),
        (lambda e: ops.aggregate_messages(X, e, "max", TERM, "square"), "takes act=None"),
        (lambda e: ops.aggregate_messages(X[:2], e, "sum", TERM), "each of 3 sources"),
        (lambda e: ops.aggregate_messages(X, e, "sum", EdgeTerm(torch.ones(3, 4))), r"give \[2, 4\]"),
        (lambda e: ops.aggregate_messages(X, e, "sum", EdgeTerm(torch.ones(2, 3))), r"give \[2, 4\]"),
        (lambda e: ops.aggregate_messages(X, e, "sum", EdgeTerm(torch.ones(2, 3), torch.ones(3, 4))), r"give \[4, 3\]"),
        (lambda e: ops.pair_scores(X, X, e, torch.ones(2, 2), 0.2), "each of 2 destinations"),
        (lambda e: ops.pair_scores(X, X[:2], e, torch.ones(2, 3), 0.2), r"heads \* width"),
        (lambda e: ops.pair_scores(X, X[:2], e, torch.ones(4), 0.2), r"heads \* width"),
        (lambda e: ops.pair_scores(X, X[:2], e, torch.ones(2, 2), 0.2, EdgeTerm(torch.ones(2))), r"give \[2, 4\]"),
        (lambda e: ops.dot_ends(X, X[:2], e, 3), r"heads \* width"),
        (lambda e: ops.dot_ends(X, X[:2, :2], e, 2), r"heads \* width"),
        (lambda e: ops.attend(X, e, torch.ones(3, 2)), "each of 2 edges"),
        (lambda e: ops.attend([[1.0]], e, torch.ones(2, 2)), "x is a list; give floats"),
        (lambda e: ops.attend(X, e, [[1.0], [2.0]]), "weights are a list; give one for each of 2 edges"),
        (lambda e: ops.aggregate([[1.0]], e), "x is a list; give floats"),
        (lambda e: ops.aggregate(X, e, "sum", [1.0, 2.0]), "weights are a list; give one for each of 2 edges"),
        (lambda e: ops.sum_per_head([1.0], e, torch.ones(2, 2)), "x is a list; give floats"),
        (lambda e: ops.sum_per_head(X, e, torch.ones(2)), r"weights is torch.float32 of .*each of 2 edges"),
        (lambda e: ops.sum_per_head(X, e, torch.ones(2, 0)), "weights have no columns; give one for each head"),
        (lambda e: ops.sum_per_head(X, e, [[1.0], [2.0]]), "weights is a list; give floats"),
        (lambda e: ops.sum_per_head(X, e, torch.ones(2, 1).long()), "weights is torch.int64 .*give floats"),
        (lambda e: ops.sum_per_head(X, e, torch.ones(2, 1) * 1j), "weights is torch.complex64 .*give floats"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(call: Callable[[InEdges], Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(InEdges.of(torch.tensor([[0, 2], [0, 1]]), 3, 2))
