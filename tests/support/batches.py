"""Comparing batches to the last bit, and the reference sampler behind the store's own seam."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hoploom.batch import Block
from hoploom.ops import Frontier, Picks
from hoploom.store import Draw, Part, Store
from support import reference


def contents(batch: Any) -> dict[Any, Any]:
    """Everything a batch holds, by (storage, field)."""
    return {(storage._key, name): value for storage in batch.stores for name, value in storage.items()}


def assert_same(left: Any, right: Any) -> None:
    """Two batches are equal in every field, dtype, order and value."""
    ours, theirs = contents(left), contents(right)
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert same_value(value, theirs[name]), f"{name} differs"


def same_value(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Block):
        return same_value(vars(left), vars(right))
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(same_value(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same_value, left, right))
    return bool(left == right)


def assert_same_batches(left: Iterable[Any], right: Iterable[Any]) -> None:
    left, right = list(left), list(right)
    assert len(left) == len(right) > 0
    for ours, theirs in zip(left, right, strict=True):
        assert_same(ours, theirs)


class ReferenceGraph:
    """A GraphStore that samples with the slow, readable reference."""

    def __init__(self, part: Part) -> None:
        self.schema, self._part = part.schema, part

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        found: list[Picks | None] = []
        for index, lists in enumerate(self._part.lists):
            frontier = frontiers[self.schema.destinations[index]]
            if frontier is None or draw.fanouts[index] == 0:
                found.append(None)
                continue
            if draw.counts_only:
                counts = lists.indptr.diff()[frontier.nodes - lists.first_node]
                found.append(Picks(counts, frontier.nodes[:0], frontier.nodes[:0]))
                continue
            weight = lists.weight if draw.weighted else None
            rule = draw.rule(index)._replace(weighted=weight is not None)
            picks = reference.sample(
                lists.indptr.tolist(),
                lists.indices.tolist(),
                reference.Frontier(*map(_listed, frontier)),
                reference.Rule(*rule),
                reference.Columns(_listed(weight), _listed(lists.edge_time), _listed(lists.source_time)),
                (lists.first_node, lists.first_edge),
            )
            found.append(Picks(*(torch.tensor(column, dtype=torch.int64) for column in picks)))
        return found


def _listed(column: Tensor | None) -> Any:
    return None if column is None else column.tolist()


def with_reference(store: Store) -> Store:
    """The same store, sampled by the reference."""
    return replace(store, graph=ReferenceGraph(store.parts[0]))
