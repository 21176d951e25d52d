"""Streams of node rows and edges, by store id, to write a store larger than memory from: chunks in any order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from hoploom.schema import Field, RelationName

LEAST_MEMORY = 64 << 20
ID_CHUNK = 1 << 17
SOURCE_TIME = "\0source_time"  # the field of edges with the times of their source nodes
TIME_COLUMN = "source_time"  # its column in a frame
T = TypeVar("T")
Progress = Callable[[str], None]  # called with the name of the step that begins


class Rows(NamedTuple):
    """A chunk of rows: the ids of some nodes of a type, and their fields."""

    ids: Tensor  # [n] int64
    fields: Mapping[str, Tensor]  # [n, ...] each


class EdgeRows(NamedTuple):
    """A chunk of a relation's edges, with their fields."""

    sources: Tensor  # [n] int64
    destinations: Tensor  # [n] int64
    fields: Mapping[str, Tensor]  # [n, ...] each

    def where(self, mask: Tensor) -> "EdgeRows":
        """Return the edges for which the mask is true."""
        if bool(mask.all()):
            return self
        fields = {name: values[mask] for name, values in self.fields.items()}
        return EdgeRows(self.sources[mask], self.destinations[mask], fields)


@dataclass(frozen=True)
class IdRows(Generic[T]):
    """A stream of rows that are computed, not read: `make` gets the store ids 0 to num_nodes - 1, in chunks."""

    num_nodes: int
    make: Callable[[Tensor], T]  # takes ids [n] int64

    def __call__(self) -> Iterator[T]:
        return self.within(0, self.num_nodes)

    def within(self, first: int, end: int) -> Iterator[T]:
        """Yield the rows of the ids [first, end), in chunks of ID_CHUNK."""
        for begin in range(first, end, ID_CHUNK):
            yield self.make(torch.arange(begin, min(begin + ID_CHUNK, end)))

    def then(self, further: Callable[[T], Any]) -> "IdRows[Any]":
        """Return a stream that applies `further` to each chunk of rows."""
        return replace(self, make=partial(in_turn, self.make, further))


def in_turn(one: Callable[[Any], Any], other: Callable[[Any], Any], given: Any) -> Any:
    """Return other(one(given)). Unlike a lambda, a `partial` of this function can be sent to another process."""
    return other(one(given))


Chunk = Mapping[str, Tensor]  # fields of consecutive nodes, in the order of their ids


@dataclass(frozen=True)
class NodeFields:
    """A block of fields: fields of one node type whose values arrive together, in the same rows."""

    fields: Mapping[str, Field]
    rows: Callable[[], Iterator[Rows]]  # every node once, in any order


@dataclass(frozen=True)
class NodeStream:
    """A node type to write: the bounds of its parts, its blocks of fields, and the members of its splits."""

    name: str
    bounds: Sequence[int]  # part p holds the ids bounds[p] to bounds[p + 1] - 1
    blocks: Sequence[NodeFields] = ()
    splits: Mapping[str, Callable[[], Iterator[Tensor]]] = field(default_factory=dict)  # [n] int64 ids, each once
    first_part: int = 0  # the number of the part that begins at bounds[0]
    times: Callable[[], Iterator[Rows]] | None = None  # the field with the times alone, if that is cheaper to read

    @property
    def num_nodes(self) -> int:
        return self.bounds[-1]

    @property
    def part_sizes(self) -> list[int]:
        return [end - begin for begin, end in pairwise(self.bounds)]


@dataclass(frozen=True)
class EdgeRule:
    """Changes to a relation's edges. Unless `in_order`, in-edge lists do not depend on the order of arrival."""

    reverse: str | None = None  # also write (destination, reverse, source)
    undirected: bool = False  # write every edge in both directions, a loop once
    deduplicate: bool = False  # keep the first of the edges with the same ends
    drop_loops: bool = False  # leave out edges from a node to itself
    in_order: bool = False  # keep the order of arrival in lists (within equal times, if there are times)


@dataclass(frozen=True)
class EdgeStream:
    """A relation to write: its fields, its edges, and the rule that changes the edges."""

    key: RelationName
    fields: Mapping[str, Field]
    rows: Callable[[], Iterator[EdgeRows]]  # every edge once; called once
    rule: EdgeRule = EdgeRule()

    @property
    def keys(self) -> list[RelationName]:
        """The relation, and its reverse if it has one."""
        source, _, destination = self.key
        turned = [] if self.rule.reverse is None else [(destination, self.rule.reverse, source)]
        return [self.key, *turned]

    @property
    def reverses(self) -> list[str | None]:
        """For each of `keys`, the name of the reverse relation, or None. An undirected relation is its own reverse."""
        if self.rule.undirected:
            return [self.key[1]]
        return [None] if self.rule.reverse is None else [self.rule.reverse, self.key[1]]


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Options of a store to write: the names of the weight and time fields, and the memory for writing."""

    weight: str | None = None
    time: str | None = None
    homogeneous: bool = False
    memory: int = 4 << 30  # bytes that the process may hold
    least_memory: int = LEAST_MEMORY  # bytes that a step has, however much the process holds already
