"""No program and no thread of a kernel depends on another one's turn, in whatever order and however stale loads are."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from support.batches import assert_same_batches
from support.device_loaders import nodes, placed
from support.graphs import random_graph
from support.kernel_calls import started
from support.kernel_forms import frontier_of, lists_of, no_faults, number, picks_of, rule_of
from support.kernel_maps import Hop, is_empty, kinds, make, wanted
from support.races import ALIKE, ATOMICS, PROGRAMS, THREADS, Conflict, Watch, Way, backwards, shuffled, watched
from torch import Tensor

import hoploom
from hoploom import ops
from hoploom.ops import InEdges, rows
from hoploom.ops.kernels import aggregate, relabel
from hoploom.ops.kernels import gather as gathering
from hoploom.ops.kernels import sample as sampling
from hoploom.ops.kernels.gather import Segments, gather
from hoploom.ops.kernels.launch import launch
from hoploom.ops.kernels.relabel import DeviceNodeMap

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="watches Triton's interpreter")

HERE = torch.device("cpu")
IN_ORDER, REVERSED, MIXED = Way(), Way(backwards), Way(shuffled, under_way=4, is_stale=True)

# Accesses that meet, and why that is well.
BENIGN = {
    Conflict("relabel.claim_hashed", "slots", ATOMICS): "an old EMPTY is corrected by the compare that follows it; an "
    "old claim is of the same node as the one that has replaced it",
    Conflict("relabel.forget", "slots", ALIKE): "seeds given twice note one slot twice, and both empty it",
    Conflict("relabel.assign", "used", THREADS): "one number, of one program: the thread that stores it has loaded it",
}

# Small programs, so that a little work is many of them; long lists and full tables come early.
SMALL: list[tuple[Any, dict[str, Any]]] = [
    (sampling, {"ROWS": 4, "TILE": 32, "LANES": 8, "DRAWS": 16, "CHUNK": 16, "FEW": 8}),
    (relabel, {"BLOCK": 8, "HASHED_BLOCK": 4, "FIRST_TABLE": 16, "MOST_PROGRAMS": 3}),
    (relabel, {"MOST_PROBES": tl.constexpr(32)}),
    (aggregate, {"WINDOW": 8, "THREADS": 2, "MOST_LISTS": 2, "ROW_BYTES": 8, "AHEAD": 4}),
    (aggregate, {"TILE_BYTES": 128, "FEW": 4, "MANY": 8}),
    (gathering, {"TILE": 16, "WIDEST": 8}),
]


def drawn(bound: int, size: int, seed: int = 0) -> list[int]:
    return torch.randint(0, bound, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


def samples() -> list[Tensor]:
    """All rules over empty, short and long lists, with a node that there is not, and too little room for some picks."""
    indptr, sources, weight = torch.tensor([0, 0, 20, 23, 29]), torch.tensor(drawn(9, 29)), torch.arange(29) % 4
    made = []
    for at, rule in enumerate(rules()):
        is_timed = at % 2 == 0
        columns = {"edge_time": torch.zeros(29, dtype=torch.int64)} if is_timed else {}
        lists = lists_of(indptr, sources, HERE, weight.float(), **columns)
        frontier = frontier_of([1, 3, 0, 1, 4], HERE, *(([0, 1, 0, 2, 1], [5, 9, 30]) if is_timed else ()), spare=1)
        picks, faults = picks_of(18 if at % 3 == 0 else 90, HERE, 6, begin=2), no_faults(HERE)
        sampling.sample(lists, frontier, rule_of(rule, HERE), picks, faults)
        assert picks.indptr is not None
        made += [picks.sources, picks.edges, picks.destinations, picks.indptr, picks.span.end, faults]
    return made


def rules() -> list[ops.Rule]:
    made = [{"fanout": fanout, "replace": replace} for fanout in (3, 11) for replace in (False, True)]
    made += [{**rule, "weighted": True} for rule in made[:2]] + [
        {"fanout": 3, "labor": True},
        {"fanout": 2, "last": True},
    ]
    return [ops.Rule(7, 1 << 16, **rule) for rule in [*made, {"fanout": -1}, {"fanout": -1, "weighted": True}]]


def maps() -> list[Any]:
    """Batch after batch, the same nodes asked for again and again; half of the slots of a table fill up."""
    made: list[Any] = []
    for node_map in kinds(100, HERE):
        for batch in range(2):
            seeds, hops = drawn(100, 5 + 4 * batch, batch), [Hop(drawn(70, 24, 10 + batch)), Hop(drawn(30, 8, batch))]
            made.append(make(node_map, [*seeds, *seeds], hops, 64))
            assert made[-1] == wanted([*seeds, *seeds], hops, 100)
    trees = Hop(drawn(6, 30), drawn(8, 30, 1), drawn(3, 8))
    made += [make(DeviceNodeMap(10, HERE), [1, 2, 2], [trees, trees], 40, range(3)) for _ in range(2)]
    return made


def overflows() -> list[Any]:
    """Batches larger than their capacity, in tables that fill up, with sources that are no nodes; then sound ones."""
    made: list[Any] = []
    for node_map in kinds(200, HERE):
        batch = make(node_map, [0, 1, 1], [Hop([*drawn(200, 24), -1, 200]), Hop(drawn(200, 4, 1))], 10)
        made.append((batch.size > 10, batch.fault))
        assert is_empty(node_map)
        made.append(make(node_map, [3, 3], [Hop([5, 3, 7, 5])], 10))
    return made


def batches() -> None:
    """The loader on the device, beside the host's."""
    store = hoploom.from_pyg(random_graph(30, 120, seed=1))
    host, there = (nodes(one, disjoint=True, mode="blocks") for one in (store, placed(store, HERE)))
    assert_same_batches(host.steps(range(1)), there.steps(range(1)))


def gathers() -> list[Tensor]:
    """Rows from three pieces of memory, with ids that there are not and fewer rows than there is room."""
    wanted_ids, made = torch.tensor([*drawn(50, 20), 50, -1, *drawn(50, 10, 1)]), []
    for width in (1, 10):
        rows = torch.randn(50, width, generator=torch.Generator().manual_seed(width))
        for kept in (rows, rows.half(), rows.to(torch.int8)):
            made += gathered(Segments.of(pieces(kept), HERE), wanted_ids)
    return made


def pieces(rows: Tensor) -> list[tuple[int, Tensor]]:
    return [(begin, rows[begin:end].clone()) for begin, end in ((0, 7), (7, 30), (30, 50))]


def gathered(segments: Segments, wanted_ids: Tensor) -> list[Tensor]:
    out, faults = torch.zeros(len(wanted_ids), *segments.shape, dtype=segments.dtype), no_faults(HERE)
    return [gather(segments, wanted_ids, out, faults=faults, size=number(29, HERE)), faults]


def reductions() -> list[Tensor]:
    """All aggregates and gradients over lists of every length, in both directions; the longest have several windows."""
    lengths, made = [17, 0, 5], []
    destinations = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    edges = InEdges.of(torch.stack([torch.tensor(drawn(2, 22)), destinations]), 2, 3)
    for reduce, heads in (("mean", 2), ("max", 0), ("softmax", 1)):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(heads), requires_grad=True)
        weights = torch.linspace(-1, 1, 22 * heads).view(22, heads).requires_grad_() if heads else None
        out = ops.aggregate(x, edges, reduce, weights)
        out.backward(torch.linspace(1, 2, 12).view(3, 4))
        made += [one for one in (out.detach(), x.grad, None if weights is None else weights.grad) if one is not None]
    return made


# Where no atomics meet anything, what is found in one order holds for all: there a second one checks the watch.
WORK = [
    *(pytest.param(work, REVERSED, marks=pytest.mark.slow) for work in (samples, reductions)),
    *((work, MIXED) for work in (maps, overflows, batches, gathers)),
]


def bits(made: Any) -> Any:
    """What compares by bits."""
    tensors = [one.contiguous().view(-1).view(torch.uint8).tolist() for one in made or () if isinstance(one, Tensor)]
    return tensors or made


@cache
def seen(work: Callable[[], Any], way: Way) -> tuple[Watch, Any]:
    """The launches of some work in small programs, and its outcome."""
    with pytest.MonkeyPatch.context() as patched, watched(way) as watch:
        patched.setattr(rows, "runs_in_core", lambda tensor: False)
        for module, sizes in SMALL:
            for name, size in sizes.items():
                patched.setattr(module, name, size)
        return watch, bits(work())


def unknown(watch: Watch) -> dict[Conflict, str]:
    """Conflicts beyond those that are well."""
    return {conflict: text for conflict, text in watch.conflicts.items() if conflict not in BENIGN}


@pytest.mark.parametrize(("work", "way"), WORK)
def test_the_turns_of_programs_change_nothing_and_collide_nowhere(work: Callable[[], Any], way: Way) -> None:
    in_order, wanted_bits = seen(work, IN_ORDER)
    watch, made = seen(work, way)
    assert (unknown(in_order), unknown(watch)) == ({}, {})
    assert made == wanted_bits


def test_every_kernel_is_watched_and_every_excuse_is_needed() -> None:
    watches = [seen(work, IN_ORDER)[0] for work in (samples, reductions, maps, overflows, batches, gathers)]
    assert set().union(*(watch.kernels for watch in watches)) >= started() != set()
    assert set().union(*(watch.conflicts for watch in watches)) == set(BENIGN)


@triton.jit
def move_on(x, out, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at + 1))


@triton.jit
def count_up(x, out, BLOCK: tl.constexpr):  # noqa: N803
    tl.atomic_add(out + tl.arange(0, BLOCK), tl.full([BLOCK], 1, tl.int64))


@triton.jit
def count_without_atomics(x, out, BLOCK: tl.constexpr):  # noqa: N803
    tl.store(out, tl.load(out) + 1)


def started_by(kernel: Any, way: Way = IN_ORDER, *, in_place: bool = False, **constants: bool) -> tuple[Any, list[int]]:
    """What was found in three programs of four threads, and what they wrote."""
    x, out = torch.arange(20, 40), torch.zeros(20, dtype=torch.int64)
    out = x if in_place else out
    with watched(way) as watch:
        launch(kernel, (3,), x, out, device=HERE, BLOCK=4, **constants)
    assert watch.kernels == {f"test_kernels_races.{kernel.__name__}"}
    return {(conflict.argument, conflict.what) for conflict in watch.conflicts}, out.tolist()


def test_a_program_that_reads_what_the_next_one_writes_is_found() -> None:
    """The collisions of other kinds are in BENIGN: there they are found in our own kernels."""
    assert started_by(move_on, in_place=True)[0] == {("x", PROGRAMS), ("x", THREADS)}
    assert started_by(count_without_atomics)[0] == {("out", PROGRAMS), ("out", THREADS)}
    assert started_by(move_on)[0] == started_by(count_up)[0] == set()


def test_other_turns_bring_races_to_light() -> None:
    in_order = started_by(move_on, in_place=True)[1]
    assert in_order[:12] == list(range(21, 33))
    assert started_by(move_on, REVERSED, in_place=True)[1] != in_order
    assert started_by(count_without_atomics)[1][0] == 3
    assert started_by(count_without_atomics, MIXED)[1][0] < 3
    assert started_by(count_without_atomics, Way(under_way=3))[1][0] < 3
    for way in (REVERSED, MIXED):
        assert started_by(count_up, way) == started_by(count_up)
        assert started_by(move_on, way) == started_by(move_on)
