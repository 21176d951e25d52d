"""Which accesses of a launch collide: a GPU may make them in either order, or at once."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
