"""Graphs whose every value is known from arithmetic, and a store cut into parts."""

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import hoploom
from hoploom.ops import EdgeLists
from hoploom.schema import EDGE_ID, Schema, TypeKey
from hoploom.store import Part, Store, Table, assemble
from hoploom.store.write import write_parts


def ring(num_nodes: int) -> Data:
    """Node v has in-edges from v + 1 (edge v) and v + 2 (edge num_nodes + v); its feature row is v.

    The edges are not in CSC order: position p of the store is edge p // 2 + p % 2 * num_nodes.
    """
    nodes = torch.arange(num_nodes)
    sources = torch.cat([(nodes + 1) % num_nodes, (nodes + 2) % num_nodes])
    return Data(
        x=nodes.float().view(-1, 1).repeat(1, 4),
        edge_index=torch.stack([sources, nodes.repeat(2)]),
        edge_attr=torch.arange(2 * num_nodes).float().view(-1, 1),
        y=nodes.clone(),
        train_mask=nodes < num_nodes // 2,
        val_mask=(nodes >= num_nodes // 2) & (nodes < 3 * num_nodes // 4),
        test_mask=nodes >= 3 * num_nodes // 4,
    )


def library() -> HeteroData:
    """7 authors, 10 papers, 3 venues without fields. Row v of a feature is v, entry e of an edge field is e.

    Authors write and review papers (the same ends twice). Author 6 and paper 9 have no edge at all.
    """
    data = HeteroData()
    data["author"].x = torch.arange(7.0).view(-1, 1).repeat(1, 3)
    data["paper"].x = torch.arange(10.0).view(-1, 1).repeat(1, 4)
    data["paper"].y = torch.arange(10)
    data["paper"].year = 2000 + torch.arange(10)
    data["paper"].train_mask = torch.arange(10) < 6
    data["venue"].num_nodes = 3
    add_relation(data, ("author", "writes", "paper"), [(a, p) for a in range(6) for p in range(9) if (a + p) % 2 == 0])
    add_relation(data, ("author", "reviews", "paper"), [(a, p) for a in range(6) for p in range(9) if (a + p) % 3 == 0])
    add_relation(data, ("paper", "cites", "paper"), [(p, q) for p in range(9) for q in range(p)])
    add_relation(data, ("paper", "appears_in", "venue"), [(p, p % 3) for p in range(9)])
    add_relation(data, ("venue", "prints", "paper"), [(p % 3, p) for p in range(9)])
    data["author", "writes", "paper"].weight = torch.arange(27.0)
    data["paper", "cites", "paper"].weight = torch.arange(36.0)
    return data


def dated_library() -> HeteroData:
    """The library whose authors and papers have times."""
    data = library()
    data["author"].time, data["paper"].time = torch.arange(7), torch.arange(10)
    return data


def add_relation(data: HeteroData, key: tuple[str, str, str], edges: list[tuple[int, int]]) -> None:
    """Edges in the order given, each with its number as `edge_attr`."""
    data[key].edge_index = torch.tensor(edges).t().contiguous()
    data[key].edge_attr = torch.arange(float(len(edges)))


def marked(num: int) -> Data:
    """Each of `num` nodes has in-edges from two nodes of either sign, one marked: its sign is the node's class."""
    generator = torch.Generator().manual_seed(1)
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(num)
    sources = torch.randint(num, (4 * num,), generator=generator) + torch.where(signs > 0, 0, num)
    chosen = torch.randint(4, (num,), generator=generator)
    x = torch.cat([torch.ones(num), -torch.ones(num), torch.zeros(num)]).view(-1, 1).repeat(1, 4)
    y = torch.cat([torch.zeros(2 * num), (chosen < 2).float()]).long()
    edge_index = torch.stack([sources, torch.arange(2 * num, 3 * num).repeat_interleave(4)])
    attr = torch.nn.functional.one_hot(chosen, 4).float().view(-1)
    return Data(x=x, y=y, edge_index=edge_index, edge_attr=attr, kind=attr.long(), weight=attr)


def random_graph(num_nodes: int, num_edges: int, seed: int) -> Data:
    """Random ends (loops and repeats among them), with a weight and a time for every edge and a time for every node."""
    generator = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.randn(num_nodes, 5, generator=generator),
        edge_index=torch.randint(num_nodes, (2, num_edges), generator=generator),
        weight=torch.rand(num_edges, generator=generator),
        edge_time=torch.randint(100, (num_edges,), generator=generator),
        node_time=torch.randint(100, (num_nodes,), generator=generator),
        train_mask=torch.rand(num_nodes, generator=generator) < 0.5,
    )


def save_in_parts(store: Store, path: Path, num_parts: int) -> Store:
    """The same store as a directory of several parts; types with few nodes have none in some of them."""
    write_parts(path, store.schema, cut(store, num_parts))
    return hoploom.open(path)


def in_parts(store: Store, num_parts: int) -> Store:
    """The same store in memory, of several parts."""
    return store if num_parts == 1 else assemble(store.schema, cut(store, num_parts))


def cut(store: Store, num_parts: int) -> list[Part]:
    """A store of one part as several parts of (nearly) equal ranges."""
    (whole,) = store.parts
    totals = [node_type.num_nodes for node_type in store.schema.node_types]
    bounds = [[total * number // num_parts for total in totals] for number in range(num_parts + 1)]
    return [_slice(whole, tuple(first), tuple(end)) for first, end in pairwise(bounds)]


def _slice(whole: Part, first: tuple[int, ...], end: tuple[int, ...]) -> Part:
    schema = whole.schema
    names = [node_type.name for node_type in schema.node_types]
    lists = tuple(
        _slice_lists(whole.lists[index], first[destination], end[destination])
        for index, destination in enumerate(schema.destinations)
    )
    tables: dict[tuple[TypeKey, str], Table] = {}
    for index, node_type in enumerate(schema.node_types):
        for field in node_type.fields:
            rows = whole.tables[node_type.name, field].rows[first[index] : end[index]]
            tables[node_type.name, field] = Table(rows, first[index])
    for relation, held in zip(schema.relations, lists, strict=True):
        span = slice(held.first_edge, held.first_edge + held.num_edges)
        for field in relation.fields:
            tables[relation.key, field] = Table(rows_in_csc_order(whole, relation.key, field)[span], held.first_edge)
    splits = {}
    for (name, split), ids in whole.splits.items():
        index = names.index(name)
        splits[name, split] = ids[(ids >= first[index]) & (ids < end[index])]
    counts = tuple(last - begin for begin, last in zip(first, end, strict=True))
    return Part(schema, first, counts, lists, tables, splits)


def _slice_lists(lists: EdgeLists, first: int, end: int) -> EdgeLists:
    indptr = lists.indptr[first : end + 1]
    span = slice(int(indptr[0]), int(indptr[-1]))

    def sliced(column: Tensor | None) -> Tensor | None:
        return None if column is None else column[span]

    return EdgeLists(
        indptr - indptr[0],
        lists.indices[span],
        first,
        span.start,
        sliced(lists.weight),
        sliced(lists.edge_time),
        lists.source_time,
    )


def rows_in_csc_order(part: Part, owner: TypeKey, field: str) -> Tensor:
    table = part.tables[owner, field]
    return table.rows[part.tables[owner, EDGE_ID].rows] if table.by_edge_id else table.rows


def num_rows(schema: Schema, owner: TypeKey) -> int:
    return schema.node_type(owner).num_nodes if isinstance(owner, str) else schema.relation(owner).num_edges
