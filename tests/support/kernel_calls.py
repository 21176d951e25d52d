"""One call or a few of every kernel, through the functions that start them. What they compute does not matter here."""

import re

import torch

from hoploom import ops
from hoploom.ops import InEdges
from hoploom.ops.kernels import aggregate, messages
from hoploom.ops.kernels.gather import Segments, gather
from hoploom.ops.kernels.relabel import DeviceNodeMap
from hoploom.ops.kernels.sample import sample
from support import TESTS
from support.kernel_forms import frontier_of, lists_of, no_faults, picks_of, rule_of
from support.kernel_maps import begin_batch

HERE = torch.device("cpu")
KERNELS = TESTS.parent / "src" / "hoploom" / "ops" / "kernels"
JITTED = re.compile(r"^@(?:triton\.jit|kernel)\b.*\n(?:(?!def ).*\n)*def (\w+)\(", re.MULTILINE)


def make_all() -> None:
    """Every kernel at least once; the first call of each is the one that unit tests compile."""
    make_samples()
    make_maps()
    make_gathers()
    make_reductions()
    make_messages()


def make_samples() -> None:
    """All rules, with and without trees, of both widths of ids."""
    indptr, nodes = [0, 3, 6], [0, 1]
    for dtype in (torch.int32, torch.int64):
        columns = torch.zeros(6, dtype=dtype), HERE, torch.ones(6), torch.zeros(6, dtype=torch.int64)
        lists = lists_of(indptr, *columns)
        for rule in _rules():
            for trees in ([0, 1], None):
                times = None if trees is None else [5, 6]
                frontier = frontier_of(nodes, HERE, trees, times)
                sample(lists, frontier, rule_of(rule, HERE), picks_of(64, HERE, 2), no_faults(HERE))
    by_node = lists_of(indptr, torch.zeros(6, dtype=torch.int32), HERE, source_time=torch.zeros(2, dtype=torch.int64))
    timed = frontier_of(nodes, HERE, [0, 1], [5, 6])
    sample(by_node, timed, rule_of(ops.Rule(7, 1 << 16, 15), HERE), picks_of(64, HERE, 2), no_faults(HERE))


def _rules() -> list[ops.Rule]:
    key, stream = 7, 1 << 16
    return [
        ops.Rule(key, stream, fanout, replace=replace, **more)
        for more in ({"weighted": True}, {"labor": True}, {}, {"last": True})
        for replace in (False, True)
        for fanout in (15, 100, -1)
        if not (replace and (fanout < 0 or "labor" in more))
    ]


def make_maps() -> None:
    """The direct map, and the table with and without trees."""
    for with_trees, budget in ((True, 1 << 20), (False, 1 << 20), (False, 0)):
        node_map = DeviceNodeMap(100, HERE, budget)
        for _ in range(2):  # the second batch forgets the first
            begin_batch(node_map, 64, with_trees=with_trees)
            trees = torch.arange(2) if with_trees else None
            sizes = torch.zeros([3, 2], dtype=torch.int64)
            node_map.add_seeds(torch.arange(2), trees, sizes[0, 0], no_faults(HERE))
            frontier = frontier_of([0, 1], HERE, [0, 1] if with_trees else None)
            local = torch.zeros(64, dtype=torch.int64)
            node_map.add(picks_of(64, HERE), frontier, local, sizes[0, 0], sizes[1, 0], no_faults(HERE))


def make_gathers() -> None:
    """Rows of 100 bytes to 800 from two places, copied in words of all widths."""
    for dtype in (torch.float32, torch.uint8, torch.float16, torch.int64):  # the first has rows of 16-byte words
        pieces = [(0, torch.zeros([4, 100], dtype=dtype)), (4, torch.zeros([4, 100], dtype=dtype))]
        rows = torch.empty([8, 100], dtype=dtype)
        gather(Segments.of(pieces, HERE), torch.arange(8), rows, faults=no_faults(HERE))


def make_reductions() -> None:
    """Sums, means, maxima, softmax and dot products of 256 columns, in 4 heads; a list is longer than a window."""
    num_edges = 5000
    indptr, sources = torch.tensor([0, 4000, num_edges]), torch.zeros(num_edges, dtype=torch.int64)
    edges = InEdges(indptr, sources, 3)
    places = torch.arange(num_edges)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x, scores = torch.zeros([3, 256], dtype=dtype), torch.zeros([num_edges, 4], dtype=dtype)
        for weights in (scores.float(), None):
            for mean in (True, False):
                aggregate.sum_rows(indptr, sources, places, x, weights, mean)
        for weights in (scores.float(), None):
            _, winners = aggregate.max_rows(indptr, sources, x, weights)
            aggregate.max_rows_backward((indptr, sources, places), indptr, x, weights, winners)
            aggregate.dot_rows(edges.lists, x, x, 4, None if weights is None else winners)
        aggregate.softmax_lists(indptr, scores, None)
        aggregate.softmax_lists(indptr, scores, scores)


def make_messages() -> None:
    """Messages and scores of 256 columns with 5 features, and with none, in 4 heads; a list is longer than a window."""
    num_edges = 1000
    edges = InEdges(torch.tensor([0, 900, num_edges]), torch.zeros(num_edges, dtype=torch.int64), 3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x, right, att = (torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in ((3, 256), (2, 256), (4, 64)))
        narrow, weight, wide = torch.zeros(num_edges, 5), torch.zeros(256, 5), torch.zeros(num_edges, 256)
        for rows, projection in ((narrow, weight), (wide, None)):
            term = rows.to(dtype).requires_grad_(), None if projection is None else projection.to(dtype)
            for act, mean in (("relu", True), ("square", False), ("max", False)):
                messages.Messages.apply(x, *term, edges, act, mean).sum().backward()
            messages.Scores.apply(x, right, att, *term, edges, 0.2).sum().backward()


def started() -> set[str]:
    """The kernels among all functions in Triton's language: those that no other one calls."""
    texts = {path.stem: path.read_text() for path in KERNELS.glob("*.py")}
    whole = "\n".join(texts.values())
    functions = [(module, name) for module, text in texts.items() for name in JITTED.findall(text)]
    return {f"{module}.{name}" for module, name in functions if not re.search(rf"(?<!def )\b{name}\(", whole)}
