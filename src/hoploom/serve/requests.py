"""Functions that read and check every value of a request, before memory is allocated for the response."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hoploom.errors import ConfigError
from hoploom.ops import Frontier
from hoploom.schema import Schema, TypeKey
from hoploom.serve.wire import Message
from hoploom.store import Part
from hoploom.store.base import Draw, GraphStore, Wanted
from hoploom.store.sharded import IdRange

MAX_FANOUT = 1 << 31
MAX_WANTED = 1024
MAX_NAME = 1000  # characters


def require(fits: bool, what: str, value: object, needed: str) -> None:
    """Raise ConfigError unless `fits` is true. Its message names the value, `what` it is, and what is `needed`."""
    if not fits:
        raise ConfigError(f"{what} of a request is {value!r:.200}; it needs {needed}")


def read_text(holder: Mapping[str, Any], key: str) -> str:
    """Return the text `holder[key]`; raise ConfigError if it is missing, no text, or too long."""
    value = holder.get(key)
    require(isinstance(value, str) and len(value) <= MAX_NAME, key, value, "a name")
    return str(value)


def read_integer(what: str, value: Any, least: int, limit: int) -> int:
    """Return `value` if it is an integer in [least, limit); else raise ConfigError, whose message calls it `what`."""
    fits = type(value) is int and least <= value < limit
    require(fits, what, value, f"a whole number from {least} to below {limit}")
    return int(value)


def read_flag(holder: Mapping[str, Any], key: str) -> bool:
    """Return the boolean `holder[key]`; raise ConfigError if it is missing or no boolean."""
    value = holder.get(key)
    require(isinstance(value, bool), key, value, "true or false")
    return bool(value)


def read_hop_fanouts(given: Any, num_relations: int) -> list[int]:
    """Return the fanouts of a hop, one for each relation; raise ConfigError if `given` is anything else."""
    fits = isinstance(given, list) and len(given) == num_relations
    require(fits, "fanouts", given, f"one per relation, {num_relations}")
    return [read_integer("fanout", fanout, -1, MAX_FANOUT) for fanout in given]


def read_draw(request: Message, part: Part) -> Draw:
    """Return the sampling options of a hop, from the header and the last tensors of a request."""
    header, relations = {"counts_only": False, "window": -1} | request.header, part.schema.relations
    fanouts = read_hop_fanouts(header.get("fanouts"), len(relations))
    key, hop = read_integer("key", header.get("key"), 0, 1 << 64), read_integer("hop", header.get("hop"), 0, 1 << 16)
    flags = {name: read_flag(header, name) for name in ("replace", "last", "labor", "weighted", "counts_only")}
    _, of_relation = read_excluded(header, request.whole_tensors, part.schema)
    excluded = [
        None if edges is None else read_owned(f"excluded edges of {of.key}", edges, lists.first_edge, lists.num_edges)
        for edges, of, lists in zip(of_relation, relations, part.lists, strict=True)
    ]
    return Draw(
        key, hop, fanouts, **flags, window=read_integer("window", header["window"], -1, 1 << 63), excluded=excluded
    )


def read_excluded(
    header: Mapping[str, Any], tensors: Sequence[Tensor], schema: Schema
) -> tuple[Sequence[Tensor], list[Tensor | None]]:
    """Return the request's other tensors, and the excluded edges of each relation, or None.

    Raise ConfigError unless they ascend.
    """
    listed = header.get("excluded", [])
    fits = isinstance(listed, list) and len(listed) <= min(len(tensors), len(schema.relations))
    require(fits, "excluded", listed, "a list of relations, with a tensor for each at the end of the message")
    found: list[Tensor | None] = [None] * len(schema.relations)
    count = len(tensors) - len(listed)
    for number, edges in zip(listed, tensors[count:], strict=True):
        relation = read_integer("excluded", number, 0, len(found))
        fits = edges.dtype in (torch.int32, torch.int64) and edges.dim() == 1 and bool((edges[1:] > edges[:-1]).all())
        require(fits, "excluded", (edges.dtype, tuple(edges.shape)), "int32 or int64 [n], ascending")
        found[relation] = edges
    return tensors[:count], found


def read_owned(what: str, ids: Tensor, first: int, count: int) -> Tensor:
    """Return ids of a request as [n] int64; `first` is added to int32 ids. Raise ConfigError for ids out of range."""
    shown = (ids.dtype, tuple(ids.shape))
    fits = ids.dtype in (torch.int32, torch.int64) and ids.dim() == 1
    require(fits, f"ids of {what}", shown, "int32 or int64 [n]")
    try:
        return IdRange(first, count).decode(ids)
    except IndexError as error:
        raise ConfigError(f"ids of {what}: {error}, what the part holds; is it another store?") from error


def read_frontiers(request: Message, part: Part) -> list[Frontier | None]:
    """Return a frontier or None for each node type, from the list in the header and the tensors of the request."""
    schema, listed = part.schema, request.header.get("frontiers")
    fits = isinstance(listed, list) and len(listed) <= len(schema.node_types)
    require(fits, "frontiers", listed, "a list of [type, trees, times], each type once")
    found: list[Frontier | None] = [None] * len(schema.node_types)
    columns = iter(request.whole_tensors)
    try:
        for index, has_trees, has_times in listed or ():
            number = read_integer("type", index, 0, len(schema.node_types))
            require(found[number] is None, "frontiers", listed, "each type once")
            what = repr(schema.node_types[number].name)
            nodes = read_owned(what, next(columns), part.first_nodes[number], part.num_nodes[number])
            trees, times = [next(columns) if given else None for given in (has_trees, has_times)]
            for column in (trees, times):
                fits = column is None or (column.dtype is torch.int64 and column.shape == nodes.shape)
                shown = None if column is None else (column.dtype, tuple(column.shape))
                require(fits, "a column", shown, f"int64, one for each of {nodes.numel()} nodes")
            found[number] = Frontier(nodes, trees, times)
    except (TypeError, ValueError, StopIteration) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"frontiers of a request are {listed!r:.80}; list [type, trees, times] as tensors") from error
    return found


def most_picks(graph: GraphStore, frontiers: Sequence[Frontier | None], draw: Draw, enough: int) -> int:
    """Return an upper bound on a hop's picks. Count in-edges only if the fanouts alone allow more than `enough`."""
    if draw.counts_only:
        return 0
    sizes = [0 if (frontier := frontiers[end]) is None else len(frontier.nodes) for end in graph.schema.destinations]
    if all(fanout >= 0 or size == 0 for size, fanout in zip(sizes, draw.fanouts, strict=True)):
        most = sum(size * fanout for size, fanout in zip(sizes, draw.fanouts, strict=True))
        if most <= enough:
            return most
    total = 0
    counted = graph.sample(frontiers, draw._replace(counts_only=True))
    for found, fanout in zip(counted, draw.fanouts, strict=True):
        if found is None or fanout == 0:
            continue
        if fanout > 0 and draw.replace:  # every node with an in-edge has `fanout` picks
            total += fanout * int((found.counts > 0).sum())
        else:
            total += int((found.counts if fanout < 0 else found.counts.clamp(max=fanout)).sum())
    return total


def read_row_requests(request: Message, part: Part) -> list[Wanted]:
    """Return the fields and ids to gather. The header lists [type or relation, field, index of the tensor of ids]."""
    listed, columns = request.header.get("wanted"), request.whole_tensors
    needed = f"[owner, field, ids], at most {MAX_WANTED}"
    require(isinstance(listed, list) and len(listed) <= MAX_WANTED, "wanted", listed, needed)
    found = []
    owned: dict[tuple[TypeKey, int], Tensor] = {}  # fields of one owner share their ids
    for one in listed or ():
        require(isinstance(one, list) and len(one) == 3, "wanted", one, needed)
        owner, name = read_owner(part.schema, one[0]), read_text({"field": one[1]}, "field")
        require((owner, name) in part.tables, "field", name, f"one that the part holds of {owner!r}")
        number = read_integer("ids", one[2], 0, len(columns))
        if (owner, number) not in owned:
            if isinstance(owner, str):
                index = part.schema.type_index[owner]
                first, count = part.first_nodes[index], part.num_nodes[index]
            else:
                lists = part.lists[part.schema.relation_index[owner]]
                first, count = lists.first_edge, lists.num_edges
            owned[owner, number] = read_owned(repr(owner), columns[number], first, count)
        found.append(Wanted(owner, name, owned[owner, number]))
    return found


def read_owner(schema: Schema, given: Any, *, known: bool = True) -> TypeKey:
    """Check and return `given`, a node type or relation of the schema. If not `known`, the relation may be new."""
    if isinstance(given, str):
        return schema.node_type(given).name
    names = isinstance(given, list) and len(given) == 3 and all(isinstance(name, str) for name in given)
    require(names, "owner", given, "a node type, or the three names of a relation")
    key = (given[0], given[1], given[2])
    if known:
        return schema.relation(key).key
    return schema.node_type(key[0]).name, key[1], schema.node_type(key[2]).name
