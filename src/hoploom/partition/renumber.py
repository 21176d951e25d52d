"""Nodes numbered anew, part after part and the hottest first, and a store streamed under these numbers.

Every cache is then a prefix. Memory is one number per node, what one part needs, and a few chunks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hoploom.errors import DataError
from hoploom.ingest.stream.streams import EdgeRows, EdgeRule, EdgeStream, NodeFields, NodeStream, Rows
from hoploom.partition.store_reading import StoreReader, edge_spans, pieces, row_bytes
from hoploom.schema import ORIGINAL_ID, Field

PIECE = 1 << 20  # nodes that are looked at together


@dataclass(frozen=True)
class NewOrder:
    """The new numbers of a type's nodes."""

    new_of_old: Tensor  # [num_nodes] int64
    bounds: tuple[int, ...]  # part p holds the new ids bounds[p] to bounds[p + 1] - 1

    @property
    def moves_nothing(self) -> bool:
        spans = ((begin, min(begin + PIECE, self.bounds[-1])) for begin in range(0, self.bounds[-1], PIECE))
        return all(torch.equal(self.new_of_old[begin:end], torch.arange(begin, end)) for begin, end in spans)


def order_nodes(
    parts: Mapping[str, Tensor], num_parts: int, visits: Mapping[str, Tensor] | None = None
) -> dict[str, NewOrder]:
    """New ids by node type: by part, then by visits (most first), then by old id.

    `parts` [num_nodes] gives each node its part, `visits` [num_nodes] what it was asked for in pre-sampling.
    """
    return {name: _order_type(of, num_parts, None if visits is None else visits[name]) for name, of in parts.items()}


def _order_type(parts: Tensor, num_parts: int, visits: Tensor | None) -> NewOrder:
    places = Places(parts, num_parts)
    if visits is not None:
        hottest = torch.nonzero(visits).view(-1)
        hottest = hottest[torch.sort(visits[hottest], descending=True, stable=True).indices]
        for begin in range(0, hottest.numel(), PIECE):
            places.give(hottest[begin : begin + PIECE])
    for begin in range(0, parts.numel(), PIECE):
        ids = torch.arange(begin, min(parts.numel(), begin + PIECE))
        places.give(ids if visits is None else ids[visits[ids] == 0])
    return NewOrder(places.new_of_old, places.bounds)


class Places:
    """The places of parts, handed out from the first on."""

    def __init__(self, parts: Tensor, num_parts: int) -> None:
        sizes = torch.zeros(num_parts, dtype=torch.int64)
        for begin in range(0, parts.numel(), PIECE):
            sizes += torch.bincount(parts[begin : begin + PIECE], minlength=num_parts)  # fails where a node has no part
        self.bounds = (0, *sizes.cumsum(0).tolist())
        self.new_of_old = torch.empty(parts.numel(), dtype=torch.int64)
        self._parts, self._next = parts, torch.tensor(self.bounds[:-1])

    def give(self, nodes: Tensor) -> None:
        """The next places of their parts to these nodes, in their order."""
        owners, order = torch.sort(self._parts[nodes], stable=True)
        counts = torch.bincount(owners, minlength=self._next.numel())
        shift = self._next - (counts.cumsum(0) - counts)  # from the place among these nodes to that among all
        self.new_of_old[nodes[order]] = torch.arange(nodes.numel()) + shift[owners.long()]
        self._next += counts


KEPT = EdgeRule(in_order=True)


def node_streams(reader: StoreReader, orders: Mapping[str, NewOrder]) -> list[NodeStream]:
    """Every node type under its new numbers; the original ids become a field, where there is none yet."""
    streams = []
    for node_type in reader.schema.node_types:
        order = orders[node_type.name]
        fields = dict(node_type.fields)
        if ORIGINAL_ID not in fields and not order.moves_nothing:
            fields[ORIGINAL_ID] = Field("int64")
        blocks = [NodeFields(fields, partial(_rows, reader, node_type.name, order))] if fields else []
        splits = {split: partial(_members, reader, node_type.name, split, order) for split in node_type.splits}
        streams.append(NodeStream(node_type.name, order.bounds, blocks, splits))
    return streams


def _rows(reader: StoreReader, node_type: str, order: NewOrder) -> Iterator[Rows]:
    schema = reader.schema
    described, index = schema.node_type(node_type), schema.type_index[node_type]
    adds_ids = ORIGINAL_ID not in described.fields and not order.moves_nothing
    for number, part in enumerate(reader.parts):
        first = part.first_nodes[index]
        for begin, end in pieces(part.num_nodes[index], row_bytes(described) + 16):
            rows = {name: reader.rows(number, node_type, name, begin, end) for name in described.fields}
            if adds_ids:
                rows[ORIGINAL_ID] = torch.arange(first + begin, first + end)
            yield Rows(order.new_of_old[first + begin : first + end], rows)


def _members(reader: StoreReader, node_type: str, split: str, order: NewOrder) -> Iterator[Tensor]:
    for number in range(len(reader.parts)):
        ids = reader.split(number, node_type, split)
        if ids.numel():
            yield _renamed(ids, order, f"split {split!r} of {node_type!r}")


def edge_streams(reader: StoreReader, orders: Mapping[str, NewOrder]) -> list[EdgeStream]:
    """Every relation under new numbers, its fields and the user's edge ids with it."""
    return [
        EdgeStream(relation.key, relation.fields, partial(_edges, reader, index, orders), KEPT)
        for index, relation in enumerate(reader.schema.relations)
    ]


def _edges(reader: StoreReader, index: int, orders: Mapping[str, NewOrder]) -> Iterator[EdgeRows]:
    relation = reader.schema.relations[index]
    sources, destinations = orders[relation.source], orders[relation.destination]
    for part in range(len(reader.parts)):
        for begin, end, owners in edge_spans(reader, part, index, row_bytes(relation)):
            ids = reader.topology(part, index, "indices", begin, end).to(torch.int64)
            rows = {name: reader.rows(part, relation.key, name, begin, end) for name in relation.fields}
            new_sources = _renamed(ids, sources, f"the indices of {relation.key}")
            yield EdgeRows(new_sources, destinations.new_of_old[owners], rows)


def _renamed(ids: Tensor, order: NewOrder, what: str) -> Tensor:
    limit = order.new_of_old.numel()
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= limit):
        bad = ids[(ids < 0) | (ids >= limit)]
        raise DataError(f"{what} hold {int(bad[0])}, out of range [0, {limit}); run hoploom check on the store")
    return order.new_of_old[ids]
