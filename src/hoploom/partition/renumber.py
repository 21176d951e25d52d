"""Renumber nodes by part, most visited first, and stream a store with the new ids.

Memory holds a few numbers per node, and chunks of rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hoploom.errors import DataError
from hoploom.ingest.stream import EdgeRows, EdgeRule, EdgeStream, NodeFields, NodeStream, Rows
from hoploom.partition.bounded_store import BoundedStore, pieces, row_bytes
from hoploom.schema import ORIGINAL_ID, Field

ID_BYTES = 8


@dataclass(frozen=True)
class NewOrder:
    """The new ids of one type's nodes, and the range of new ids that each part holds."""

    new_of_old: Tensor  # [num_nodes] int64
    bounds: tuple[int, ...]  # part p holds the new ids bounds[p] to bounds[p + 1] - 1

    @property
    def moves_nothing(self) -> bool:
        spans = pieces(self.bounds[-1], ID_BYTES)
        return all(torch.equal(self.new_of_old[begin:end], torch.arange(begin, end)) for begin, end in spans)


def order_nodes(
    parts: Mapping[str, Tensor], num_parts: int, visits: Mapping[str, Tensor] | None = None
) -> dict[str, NewOrder]:
    """Return new ids by node type: ordered by part, then by visits or visit class (most first), then by old id."""
    return {name: _order_type(of, num_parts, None if visits is None else visits[name]) for name, of in parts.items()}


def _order_type(parts: Tensor, num_parts: int, visits: Tensor | None) -> NewOrder:
    """Return the new ids of one type's nodes: a counting sort by part, then by visits, one chunk of nodes at a time."""
    num_classes = 1 if visits is None else int(visits.max()) + 1 if visits.numel() else 1
    next_ids = torch.zeros(num_parts * num_classes, dtype=torch.int64)

    def keys_of(begin: int, end: int) -> Tensor:
        keys = parts[begin:end].long() * num_classes
        return keys if visits is None else keys.add_(num_classes - 1 - visits[begin:end])

    for begin, end in pieces(parts.numel(), ID_BYTES):
        keys, counts = torch.unique(keys_of(begin, end), return_counts=True)
        next_ids[keys] += counts  # fails where a node has no part
    sizes = next_ids.view(num_parts, num_classes).sum(1)
    next_ids = next_ids.cumsum(0) - next_ids
    new_of_old = torch.empty(parts.numel(), dtype=torch.int64)
    for begin, end in pieces(parts.numel(), ID_BYTES):
        ordered, order = torch.sort(keys_of(begin, end), stable=True)
        keys, counts = torch.unique_consecutive(ordered, return_counts=True)
        shift = next_ids[keys] - (counts.cumsum(0) - counts)  # from the rank in this chunk to the new id
        new_of_old[begin + order] = torch.arange(end - begin) + shift.repeat_interleave(counts)
        next_ids[keys] += counts
    return NewOrder(new_of_old, (0, *sizes.cumsum(0).tolist()))


def node_streams(opened: BoundedStore, orders: Mapping[str, NewOrder]) -> list[NodeStream]:
    """Return a stream of rows per node type, with new ids. If ids change, `original_id` is added unless it exists."""
    streams = []
    for node_type in opened.schema.node_types:
        order = orders[node_type.name]
        fields = dict(node_type.fields)
        if ORIGINAL_ID not in fields and not order.moves_nothing:
            fields[ORIGINAL_ID] = Field("int64")
        blocks = [NodeFields(fields, partial(_rows, opened, node_type.name, fields, order))] if fields else []
        splits = {split: partial(_members, opened, node_type.name, split, order) for split in node_type.splits}
        streams.append(NodeStream(node_type.name, order.bounds, blocks, splits))
    return streams


def _rows(opened: BoundedStore, node_type: str, fields: Mapping[str, Field], order: NewOrder) -> Iterator[Rows]:
    described, index = opened.schema.node_type(node_type), opened.schema.type_index[node_type]
    for number, part in enumerate(opened.parts):
        first = part.first_nodes[index]
        for begin, end in pieces(part.num_nodes[index], row_bytes(described) + 2 * ID_BYTES):
            rows = {name: opened.rows(number, node_type, name, begin, end) for name in described.fields}
            if fields.keys() != rows.keys():
                rows[ORIGINAL_ID] = torch.arange(first + begin, first + end)
            yield Rows(order.new_of_old[first + begin : first + end], rows)


def _members(opened: BoundedStore, node_type: str, split: str, order: NewOrder) -> Iterator[Tensor]:
    for part in opened.parts:
        yield _renumbered(part.split(node_type, split), order, f"split {split!r} of {node_type!r}")
        part.require_whole()


def edge_streams(opened: BoundedStore, orders: Mapping[str, NewOrder]) -> list[EdgeStream]:
    """Return, for each relation, a stream of its edges with new node ids and all fields, in stored order."""
    return [
        EdgeStream(relation.key, relation.fields, partial(_edges, opened, index, orders), EdgeRule(in_order=True))
        for index, relation in enumerate(opened.schema.relations)
    ]


def _edges(opened: BoundedStore, index: int, orders: Mapping[str, NewOrder]) -> Iterator[EdgeRows]:
    relation = opened.schema.relations[index]
    for part in range(len(opened.parts)):
        for begin, end, sources, destinations in opened.edge_spans(part, index, row_bytes(relation)):
            rows = {name: opened.rows(part, relation.key, name, begin, end) for name in relation.fields}
            sources = _renumbered(sources.to(torch.int64), orders[relation.source], f"the indices of {relation.key}")
            yield EdgeRows(sources, orders[relation.destination].new_of_old[destinations], rows)


def _renumbered(ids: Tensor, order: NewOrder, what: str) -> Tensor:
    limit = order.new_of_old.numel()
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= limit):
        bad = ids[(ids < 0) | (ids >= limit)]
        raise DataError(f"{what} hold {int(bad[0])}, out of range [0, {limit}); run hoploom check on the store")
    return order.new_of_old[ids]
