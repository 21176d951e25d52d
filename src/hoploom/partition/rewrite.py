"""A store under new numbers, as streams: every file is read once from its beginning, in chunks.

Lists keep their order, so what was in time order stays so. Memory is the new number of every node and a few chunks.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from hoploom.errors import DataError
from hoploom.ingest.stream.streams import EdgeRows, EdgeRule, EdgeStream, NodeFields, NodeStream, Rows
from hoploom.partition.numbering import NewOrder
from hoploom.partition.store_reading import Reader, edge_spans, pieces, row_bytes
from hoploom.schema import ORIGINAL_ID, Field

KEPT = EdgeRule(in_order=True)


def node_streams(reader: Reader, orders: Mapping[str, NewOrder]) -> list[NodeStream]:
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


def _rows(reader: Reader, node_type: str, order: NewOrder) -> Iterator[Rows]:
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


def _members(reader: Reader, node_type: str, split: str, order: NewOrder) -> Iterator[Tensor]:
    for number in range(len(reader.parts)):
        ids = reader.split(number, node_type, split)
        if ids.numel():
            yield _renamed(ids, order, f"split {split!r} of {node_type!r}")


def edge_streams(reader: Reader, orders: Mapping[str, NewOrder]) -> list[EdgeStream]:
    """Every relation under new numbers, its fields and the user's edge ids with it."""
    return [
        EdgeStream(relation.key, relation.fields, partial(_edges, reader, index, orders), KEPT)
        for index, relation in enumerate(reader.schema.relations)
    ]


def _edges(reader: Reader, index: int, orders: Mapping[str, NewOrder]) -> Iterator[EdgeRows]:
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
