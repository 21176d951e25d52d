"""A watch on Triton's interpreter, which runs one program after the other and so shows no races.

Every access of a launch is noted, and pairs are told that a GPU may make in either order. And programs can run in any
order, take turns at every access, and load what was there when the launch began: results must not change.
"""

import ctypes
import inspect
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime import interpreter

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
        for name, number in (("kind", one.kind), ("program", one.program), ("stage", one.stage), ("step", step)):
            part[name] = number
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
    for what, rows in found.items():
        for address in np.unique(table["address"][rows]):
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


def backwards(size: int) -> list[int]:
    return list(reversed(range(size)))


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
        given = inspect.getcallargs(
            kernel, *args, **{name: named[name] for name in named if name in executor.arg_names}
        )
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
