"""No program and no thread of a kernel depends on another one's turn, in whatever order and however stale loads are."""

import ctypes
import inspect
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from support.batches import assert_same_batches
from support.device_loaders import nodes, placed
from support.graphs import random_graph
from support.kernel_calls import started
from support.kernel_forms import frontier_of, lists_of, no_faults, picks_of, rule_of
from support.kernel_maps import Hop, is_empty, kinds, make, wanted
from torch import Tensor
from triton.runtime import interpreter

import hoploom
from hoploom import ops
from hoploom.ops import InEdges, rows
from hoploom.ops.kernels import aggregate, messages, relabel
from hoploom.ops.kernels import gather as gathering
from hoploom.ops.kernels import sample as sampling
from hoploom.ops.kernels.gather import Segments, gather
from hoploom.ops.kernels.launch import launch
from hoploom.ops.kernels.relabel import DeviceNodeMap

Array = NDArray[Any]
LOAD, STORE, ATOMIC = range(3)
VERBS = "loads", "stores", "is atomic"
COLUMNS = [("address", "u8"), ("value", "u8"), *((name, "i8") for name in ("kind", "program", "stage", "step"))]

# What can be wrong with a place in memory.
PROGRAMS = "a program stores what another one loads or stores"
ALIKE = "programs store the same value"
ATOMICS = "an atomic access meets a plain one"
THREADS = "a program's accesses have no barrier between them"


class Access(NamedTuple):
    kind: int
    program: int
    stage: int  # of one program; a barrier begins another
    addresses: Array  # [threads] uint64
    values: Array  # [threads] what is stored; of a load only the type counts


def table_of(accesses: Sequence[Access]) -> Array:
    """A row for each part of memory that an access touches, of those that are changed; parts are of one length."""
    changes = np.unique(np.concatenate([one.addresses for one in accesses if one.kind != LOAD] or [np.zeros(0, "u8")]))
    parts = []
    if changes.size:
        low, high = changes[0] - 8, changes[-1] + 8
        unit = math.gcd(*(one.values.itemsize for one in accesses))
        unit = int(np.gcd.reduce(np.concatenate([one.addresses for one in accesses]), initial=unit))
    for step, one in enumerate(accesses if changes.size else ()):
        near = (one.addresses > low) & (one.addresses < high)
        size = one.values.itemsize // unit
        part = np.empty([np.count_nonzero(near), size], COLUMNS)
        part["address"] = one.addresses[near, None] + np.arange(0, one.values.itemsize, unit, dtype=np.uint64)
        part["value"] = np.ascontiguousarray(one.values[near]).view(f"u{unit}").reshape(part.shape)
        for name, held in (("kind", one.kind), ("program", one.program), ("stage", one.stage), ("step", step)):
            part[name] = held
        parts.append(part.ravel())
    table = np.concatenate([np.empty(0, COLUMNS), *parts])
    return table[np.isin(table["address"], table["address"][table["kind"] != LOAD])]


def collisions(table: Array) -> Iterator[tuple[str, int]]:
    """What is wrong at which address.

    Which thread holds an element is the compiler's choice at each access, so two accesses of one program collide
    whatever element it was.
    """
    if not table.size:
        return
    place, program, stage, step, value = (
        np.unique(table[name], return_inverse=True)[1] for name in ("address", "program", "stage", "step", "value")
    )
    stay, act = _pairs(place, stage), _pairs(place, step)
    loads, stores, atomic = (table["kind"] == kind for kind in (LOAD, STORE, ATOMIC))
    is_shared = _has(place, stores) & _several(place, program, ~atomic)
    is_alike = ~_has(place, loads) & ~_several(place, value, stores)
    is_mixed = _has(place, atomic) & _has(place, ~atomic) & _several(place, program, place >= 0)
    found = {
        PROGRAMS: is_shared & ~is_alike,
        ALIKE: is_shared & is_alike,
        ATOMICS: is_mixed | (_has(stay, atomic) & _has(stay, ~atomic)),
        THREADS: (_has(stay, stores) & _several(stay, step, ~atomic)) | _several(act, value, stores),
    }
    for what, wrong in found.items():
        for address in np.unique(table["address"][wrong]):
            yield what, int(address)


def _pairs(left: Array, right: Array) -> Array:
    """Numbers from 0 for what differs in either."""
    numbers: Array = np.unique(left * (right.max() + 1) + right, return_inverse=True)[1]
    return numbers


def _has(groups: Array, rows: Array) -> Array:
    return np.bincount(groups[rows], minlength=groups.max() + 1)[groups] > 0


def _several(groups: Array, values: Array, rows: Array) -> Array:
    bound = values.max() + 1
    found = np.unique(groups[rows] * bound + values[rows]) // bound
    return np.bincount(found, minlength=groups.max() + 1)[groups] > 1


def told(table: Array, address: int) -> str:
    rows = table[table["address"] == address][:8]
    return ", ".join(f"program {row['program']} {VERBS[row['kind']]}" for row in rows)


class Conflict(NamedTuple):
    kernel: str
    argument: str
    what: str


class Way(NamedTuple):
    order: Callable[[int], Sequence[int]] = range
    under_way: int = 1  # so many take turns, at random, at every access
    is_stale: bool = False  # a plain load shows, at random, what was there when the launch began


def shuffled(size: int) -> list[int]:
    return random.Random(size).sample(range(size), size)


@contextmanager
def watched(way: Way | None = None) -> "Iterator[Watch]":
    """All launches until the end, of any thread."""
    watch = Watch(way or Way())
    with pytest.MonkeyPatch.context() as patched:
        watch.patch(patched)
        yield watch


class Watch:
    def __init__(self, way: Way) -> None:
        self.conflicts: dict[Conflict, str] = {}  # each with an example
        self.kernels: set[str] = set()
        self._way = way
        self._turns = Turns(way.under_way)
        self._builder: Any = interpreter.interpreter_builder
        self._patch_language = interpreter._patch_lang
        self._is_old = np.random.default_rng(0)

    def patch(self, patched: pytest.MonkeyPatch) -> None:
        builder = self._builder
        load, store = builder.create_masked_load, builder.create_masked_store
        change, swap = builder.create_atomic_rmw, builder.create_atomic_cas

        def loads(pointers: Any, mask: Any, *more: Any) -> Any:
            size = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
            self._note(LOAD, pointers, mask.data, np.zeros(1, f"u{size}"))
            return load(self._stale(pointers) if self._way.is_stale else pointers, mask, *more)

        def stores(pointers: Any, values: Any, mask: Any, *more: Any) -> Any:
            self._note(STORE, pointers, mask.data, values.data)
            return store(pointers, values, mask, *more)

        def changes(operation: Any, pointers: Any, values: Any, mask: Any, *more: Any) -> Any:
            self._note(ATOMIC, pointers, mask.data, values.data)
            return change(operation, pointers, values, mask, *more)

        def swaps(pointers: Any, expected: Any, values: Any, *more: Any) -> Any:
            self._note(ATOMIC, pointers, np.True_, values.data)
            return swap(pointers, expected, values, *more)

        def ends_stage() -> None:
            self._stages[self._program] = next(self._stage)

        hooks = {"masked_load": loads, "masked_store": stores, "atomic_rmw": changes, "atomic_cas": swaps}
        for name, hook in {**hooks, "barrier": ends_stage}.items():
            patched.setattr(builder, f"create_{name}", hook)
        patched.setattr(interpreter, "_patch_lang", self._patch_once)
        patched.setattr(interpreter.GridExecutor, "__call__", lambda *args, **named: self._launch(*args, **named))

    def _launch(self, executor: Any, *args: Any, **named: Any) -> None:
        kernel = executor.fn
        given = inspect.getcallargs(kernel, *args, **{one: named[one] for one in named if one in executor.arg_names})
        label = f"{kernel.__module__.split('.')[-1]}.{kernel.__name__}"
        self.kernels.add(label)
        ranges = {name: _range_of(value) for name, value in given.items() if isinstance(value, Tensor)}
        self._before = [(range_, _copy(range_)) for range_ in ranges.values()] if self._way.is_stale else []
        self._accesses: list[Access] = []
        self._stage, self._stages = count(), dict[int, int]()
        self._modules = {kernel.__module__}
        scope = self._patch_language(kernel)
        try:
            fixed = executor.constexprs
            given = {name: arg if name in fixed else interpreter._implicit_cvt(arg) for name, arg in given.items()}
            self._run(partial(kernel, **given), executor.grid)
        finally:
            scope.restore()
        table = table_of(self._accesses)
        for what, address in collisions(table):
            argument = next((name for name, held in ranges.items() if address in held), "")
            conflict = Conflict(label, argument, what)
            if conflict not in self.conflicts:
                self.conflicts[conflict] = told(table, address)

    def _patch_once(self, function: Any) -> None:
        """For a module once a launch; the interpreter does it at every call, for a fifth of its time."""
        if function.__module__ not in self._modules:
            self._modules.add(function.__module__)
            self._patch_language(function)

    def _run(self, kernel: Callable[[], None], grid: tuple[int, ...]) -> None:
        self._builder.set_grid_dim(*grid, *[1] * (3 - len(grid)))

        def run(program: int) -> None:
            self._stages[program] = next(self._stage)
            self._enter(program)
            kernel()

        self._turns.run([partial(run, program) for program in self._way.order(math.prod(grid))])

    def _enter(self, program: int) -> None:
        self._program = program
        self._builder.set_grid_idx(*map(int, np.unravel_index(program, self._builder.grid_dim)))

    def _note(self, kind: int, pointers: Any, mask: Any, values: Array) -> None:
        program = self._program
        if self._turns.next():
            self._enter(program)
        addresses, live, values = np.broadcast_arrays(pointers.data, mask.astype(bool), values)
        self._accesses.append(Access(kind, program, self._stages[program], addresses[live], values[live]))

    def _stale(self, pointers: Any) -> Any:
        addresses = pointers.data.copy()
        for held, copied in self._before:
            moved = (addresses >= held.start) & (addresses < held.stop) & (self._is_old.random(addresses.shape) < 0.5)
            addresses[moved] += np.uint64((copied.ctypes.data - held.start) % 2**64)
        return interpreter.TensorHandle(addresses, pointers.dtype)


def _range_of(tensor: Tensor) -> range:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return range(tensor.data_ptr(), tensor.data_ptr() + end)


def _copy(held: range) -> Array:
    return np.frombuffer(ctypes.string_at(held.start, len(held)), np.uint8) if held else np.zeros(1, np.uint8)


class Turns:
    """Jobs in threads of which one runs at a time; which one, chance decides at every turn."""

    def __init__(self, width: int) -> None:
        self._width, self._random = width, random.Random(width)
        self._gates: dict[int, threading.Semaphore] = {}
        self._here = threading.local()

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        if self._width == 1:
            for job in jobs:
                job()
            return
        left, done, errors = deque(jobs), threading.Semaphore(0), list[BaseException]()
        self._gates = {number: threading.Semaphore(0) for number in range(self._width)}

        def work(number: int) -> None:
            self._here.number = number
            gate = self._gates[number]
            gate.acquire()
            try:
                while left:
                    left.popleft()()
            except BaseException as error:  # raised again below
                errors.append(error)
                left.clear()
            del self._gates[number]
            (self._random.choice(list(self._gates.values())) if self._gates else done).release()

        threads = [threading.Thread(target=work, args=(number,)) for number in self._gates]
        for thread in threads:
            thread.start()
        self._gates[0].release()
        done.acquire()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def next(self) -> bool:
        """Whether others ran before this one went on."""
        if not self._gates:
            return False
        own, chosen = self._here.number, self._random.choice(list(self._gates))
        if chosen == own:
            return False
        gate = self._gates[own]
        self._gates[chosen].release()
        gate.acquire()
        return True


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="watches Triton's interpreter")

HERE = torch.device("cpu")
IN_ORDER, REVERSED, MIXED = Way(), Way(lambda size: range(size)[::-1]), Way(shuffled, under_way=4, is_stale=True)

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
    (messages, {"MOST_EDGES": 2, "SPREAD": 40}),
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
    """Rows from three pieces of memory, with ids that there are not."""
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
    return [gather(segments, wanted_ids, out, faults=faults), faults]


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
    leaves = [torch.linspace(-1, 1, n).view(-1, 4).requires_grad_() for n in (8, 12, 8, 4 * 22, 16)]
    left, right, att, *term = leaves
    out = ops.aggregate_messages(left, edges, "sum", ops.EdgeTerm(*term), "relu")
    scores = ops.pair_scores(left, right, edges, att[:, :2], 0.2, ops.EdgeTerm(*term))
    (out.square().sum() + scores.square().sum()).backward()
    return [*made, out.detach(), scores.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


# Where no atomics meet anything, what is found in one order holds for all: there a second one checks the watch.
WORK = [
    *(pytest.param(work, REVERSED, marks=pytest.mark.slow) for work in (samples, reductions)),
    *((work, MIXED) for work in (maps, overflows, batches, gathers)),
]


def bits(made: Any) -> Any:
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
