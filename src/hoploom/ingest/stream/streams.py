"""What a store is built from when it is too large for memory: rows of nodes and edges, in chunks, in any order.

Ids are store ids: who makes a stream has numbered the nodes. A stream gives up random access for bounded memory.
"""

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
SOURCE_TIME = "\0source_time"  # among the fields of rows of edges: the times of their source nodes, where that counts
TIME_COLUMN = "source_time"  # and what a frame calls them
T = TypeVar("T")
Progress = Callable[[str], None]  # called with what is done now


class Rows(NamedTuple):
    """Some fields of some nodes of a type."""

    ids: Tensor  # [n] int64
    fields: Mapping[str, Tensor]  # [n, ...] each


class EdgeRows(NamedTuple):
    """Some edges of a relation."""

    sources: Tensor  # [n] int64
    destinations: Tensor  # [n] int64
    fields: Mapping[str, Tensor]  # [n, ...] each


@dataclass(frozen=True)
class IdRows(Generic[T]):
    """Rows that follow from their store ids, 0 to num_nodes - 1."""

    num_nodes: int
    made: Callable[[Tensor], T]  # of ids [n] int64

    def __call__(self) -> Iterator[T]:
        return self.within(0, self.num_nodes)

    def within(self, first: int, end: int) -> Iterator[T]:
        """Those of some consecutive ids."""
        for begin in range(first, end, ID_CHUNK):
            yield self.made(torch.arange(begin, min(begin + ID_CHUNK, end)))

    def then(self, further: Callable[[T], Any]) -> "IdRows[Any]":
        """The same rows, turned into something else."""
        return replace(self, made=partial(in_turn, self.made, further))


def in_turn(one: Callable[[Any], Any], other: Callable[[Any], Any], given: Any) -> Any:
    """The one function, then the other; a function that can be sent to another process, as its parts can."""
    return other(one(given))


Chunk = Mapping[str, Tensor]  # fields of consecutive nodes, in the order of their ids
Measures = Mapping[str, Sequence[Sequence[float]]]  # by field: some numbers for each of its columns


@dataclass(frozen=True)
class Finish:
    """A last step over rows that stand in order already, such as a division by a mean over the column.

    All chunks of the type are measured; what follows from the measures, in their order, is then applied to each chunk.
    Chunks are cut alike whatever the memory, so sums over them come out the same to the last bit.
    """

    fields: Mapping[str, Field]  # what is stored
    measure: Callable[[Chunk], Measures]
    prepare: Callable[[Iterator[Measures]], Callable[[Chunk], Chunk]]


@dataclass(frozen=True)
class NodeFields:
    """Fields of a node type that come together."""

    fields: Mapping[str, Field]  # what arrives
    rows: Callable[[], Iterator[Rows]]  # every node once, in any order
    finish: Finish | None = None

    @property
    def stored(self) -> Mapping[str, Field]:
        """The fields as they are stored."""
        return self.fields if self.finish is None else self.finish.fields


@dataclass(frozen=True)
class NodeStream:
    """A node type: where its parts begin, its fields, and the members of its splits."""

    name: str
    bounds: Sequence[int]  # part p holds the ids bounds[p] to bounds[p + 1] - 1
    blocks: Sequence[NodeFields] = ()
    splits: Mapping[str, Callable[[], Iterator[Tensor]]] = field(default_factory=dict)  # [n] int64 ids, each once
    first_part: int = 0  # what the bounds begin with
    times: Callable[[], Iterator[Rows]] | None = None  # the field with the times alone, if that is cheaper to read

    @property
    def num_nodes(self) -> int:
        return self.bounds[-1]

    @property
    def part_sizes(self) -> list[int]:
        return [end - begin for begin, end in pairwise(self.bounds)]


@dataclass(frozen=True)
class EdgeRule:
    """What becomes of a relation's edges. Lists are put in an order that does not depend on how the edges arrived."""

    reverse: str | None = None  # also written as (destination, reverse, source)
    undirected: bool = False  # every edge counts for both directions; a loop for one
    deduplicate: bool = False  # of edges with the same ends the first of the list is kept
    drop_loops: bool = False  # edges from a node to itself are left out
    in_order: bool = False  # lists keep the order in which the edges arrive (by time, where there is one)


@dataclass(frozen=True)
class EdgeStream:
    """A relation: its fields, its edges, and what becomes of them."""

    key: RelationName
    fields: Mapping[str, Field]
    rows: Callable[[], Iterator[EdgeRows]]  # every edge once; called once
    rule: EdgeRule = EdgeRule()

    @property
    def keys(self) -> list[RelationName]:
        """The relation, and its reverse where there is one."""
        source, _, destination = self.key
        turned = [] if self.rule.reverse is None else [(destination, self.rule.reverse, source)]
        return [self.key, *turned]

    @property
    def reverses(self) -> list[str | None]:
        """The name of the reverse of each of these keys; None if it has none."""
        if self.rule.undirected:
            return [self.key[1]]
        return [None] if self.rule.reverse is None else [self.rule.reverse, self.key[1]]


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """What a store is prepared for, and the memory that writing it may take."""

    weight: str | None = None
    time: str | None = None
    homogeneous: bool = False
    memory: int = 4 << 30  # bytes that the process may hold
    least_memory: int = LEAST_MEMORY  # bytes that a step has, however much the process holds already
    chunk_rows: int = 1 << 16  # nodes that a Finish gets at once: the last bits of its sums follow from it
