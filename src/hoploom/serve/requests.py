"""What may stand in a request: every value is read by one of these, before anything is allocated for it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hoploom.errors import ConfigError
from hoploom.ops import EdgeLists, Frontier
from hoploom.schema import Owner, Schema
from hoploom.serve.wire import Message
from hoploom.store import Part
from hoploom.store.base import Draw, Wanted

ROUGH = 1 << 20  # picks, up to which the most there could be is near enough
MAX_FANOUT = 1 << 31
MAX_WANTED = 1024
MAX_NAME = 1000  # characters


def read_text(holder: Mapping[str, Any], key: str) -> str:
    """A name."""
    value = holder.get(key)
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise ConfigError(f"{key} of a request is {value!r:.80}, not a name")
    return value


def read_integer(holder: Mapping[str, Any], key: str, least: int, limit: int) -> int:
    """A whole number."""
    value = holder.get(key)
    if type(value) is not int or not least <= value < limit:
        raise ConfigError(f"{key} of a request is {value!r:.80}, not a whole number from {least} to below {limit}")
    return value


def read_flag(holder: Mapping[str, Any], key: str) -> bool:
    """true or false."""
    value = holder.get(key)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} of a request is {value!r:.80}, neither true nor false; give one of them")
    return value


def read_draw(header: Mapping[str, Any], num_relations: int) -> Draw:
    """How a hop is drawn."""
    fanouts = header.get("fanouts")
    if not isinstance(fanouts, list) or len(fanouts) != num_relations:
        raise ConfigError(f"fanouts of a request are {fanouts!r:.80}; one per relation is needed, {num_relations}")
    read = [read_integer({"fanout": fanout}, "fanout", -1, MAX_FANOUT) for fanout in fanouts]
    flags = [read_flag(header, name) for name in ("replace", "last", "labor", "weighted")]
    return Draw(read_integer(header, "key", 0, 1 << 64), read_integer(header, "hop", 0, 1 << 16), read, *flags)


def read_ids(tensor: Tensor, what: str, first: int, count: int) -> Tensor:
    """Ids that a part owns."""
    if tensor.dtype is not torch.int64 or tensor.dim() != 1:
        raise ConfigError(
            f"ids of {what} have dtype {tensor.dtype} and shape {list(tensor.shape)}; int64 [n] is needed"
        )
    if tensor.numel():
        array = tensor.numpy()
        lowest, highest = int(array.min()), int(array.max())
        if lowest < first or highest >= first + count:
            wrong = lowest if lowest < first else highest
            raise ConfigError(
                f"id {wrong} of {what} is not in [{first}, {first + count}), what the part holds; is it another store?"
            )
    return tensor


def read_frontiers(request: Message, part: Part) -> list[Frontier | None]:
    """The frontier of each node type. The header lists which types have one, and what comes with its nodes."""
    schema, listed = part.schema, request.header.get("frontiers")
    if not isinstance(listed, list) or len(listed) > len(schema.node_types):
        raise ConfigError(f"frontiers of a request are {listed!r:.80}; list [type, trees, times]")
    found: list[Frontier | None] = [None] * len(schema.node_types)
    columns = iter(_tensors(request))
    try:
        for one in listed:
            index, has_trees, has_times = one
            number = read_integer({"type": index}, "type", 0, len(schema.node_types))
            name = schema.node_types[number].name
            nodes = read_ids(next(columns), repr(name), part.first_nodes[number], part.num_nodes[number])
            trees, times = [_column_of(next(columns), nodes) if given else None for given in (has_trees, has_times)]
            found[number] = Frontier(nodes, trees, times)
    except (TypeError, ValueError, StopIteration) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"frontiers of a request are {listed!r:.80}, which its tensors do not fit") from error
    return found


def _column_of(column: Tensor, nodes: Tensor) -> Tensor:
    if column.dtype is not torch.int64 or column.shape != nodes.shape:
        raise ConfigError(f"a column of {column.dtype} {list(column.shape)} for {nodes.numel()} nodes; int64, one each")
    return column


def _tensors(request: Message) -> list[Tensor]:
    return [tensor for tensor in request.tensors if isinstance(tensor, Tensor)]


def most_picks(part: Part, given: Sequence[Frontier | None], how: Draw, limit: int) -> int:
    """No more picks than this will be made, over all relations; ConfigError if there are more than `limit`."""
    asked = [
        (lists, frontier.nodes, fanout)
        for lists, destination, fanout in zip(part.lists, part.schema.destinations, how.fanouts, strict=True)
        if (frontier := given[destination]) is not None and fanout != 0
    ]
    if all(fanout > 0 for _, _, fanout in asked):
        most = sum(fanout * nodes.numel() for _, nodes, fanout in asked)
        if most <= ROUGH:
            return most
    count = sum(_num_picks(lists, nodes, fanout, replace=how.replace) for lists, nodes, fanout in asked)
    if count > limit:
        raise ConfigError(f"a request would pick {count} edges; at most {limit}: lower the fanout or the batch")
    return count


def _num_picks(lists: EdgeLists, nodes: Tensor, fanout: int, *, replace: bool) -> int:
    """By the nodes' degrees; with replacement every node with an edge has as many picks as the fanout says."""
    indptr, rows = lists.indptr.numpy(), nodes.numpy() - lists.first_node
    degrees = indptr[rows + 1] - indptr[rows]
    if fanout < 0:
        return int(degrees.sum())
    return fanout * int((degrees > 0).sum()) if replace else int(np.minimum(degrees, fanout).sum())


def read_wanted(request: Message, part: Part) -> list[Wanted]:
    """Rows that are asked for. The header lists [owner, field, which tensor has the ids]."""
    listed, columns = request.header.get("wanted"), _tensors(request)
    if not isinstance(listed, list) or len(listed) > MAX_WANTED:
        raise ConfigError(f"wanted of a request is {listed!r:.80}; list [owner, field, ids], at most {MAX_WANTED}")
    found = []
    for one in listed:
        if not isinstance(one, list) or len(one) != 3:
            raise ConfigError(f"wanted of a request holds {one!r:.80}; give [owner, field, ids]")
        owner = read_owner(part.schema, one[0])
        name = read_text({"field": one[1]}, "field")
        if (owner, name) not in part.tables:
            raise ConfigError(f"a request is for {name!r:.80} of {owner!r}, which the part has not")
        first, count = _range(part, owner)
        column = columns[read_integer({"ids": one[2]}, "ids", 0, len(columns))]
        found.append(Wanted(owner, name, read_ids(column, f"{owner!r}", first, count)))
    return found


def read_owner(schema: Schema, given: Any) -> Owner:
    """A node type's name, or a relation's three."""
    if isinstance(given, str):
        return schema.node_type(given).name
    if isinstance(given, list) and len(given) == 3 and all(isinstance(name, str) for name in given):
        return schema.relation((given[0], given[1], given[2])).key
    raise ConfigError(
        f"owner of a request is {given!r:.80}, neither a node type nor a relation; give a name, or a relation's three"
    )


def _range(part: Part, owner: Owner) -> tuple[int, int]:
    if isinstance(owner, str):
        index = part.schema.type_index[owner]
        return part.first_nodes[index], part.num_nodes[index]
    lists = part.lists[part.schema.relation_index[owner]]
    return lists.first_edge, lists.num_edges
