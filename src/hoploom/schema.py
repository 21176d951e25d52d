"""The schema of a graph: node types, relations and their named fields. Also checks of ids."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from hoploom.errors import ConfigError, DataError, HoploomError
from hoploom.fields import ITEM_BYTES
from hoploom.fields import Field as Field

RelationName = tuple[str, str, str]  # (source type, name, destination type)
TypeKey = str | RelationName  # the name of a node type, or the key of a relation

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)

REVERSE = "rev_"  # how PyG names the reverse of a relation
FEATURES = "x"  # the field that models read
EDGE_ID = "edge_id"  # the field with the user's own edge ids, if they differ from the positions
ORIGINAL_ID = "original_id"  # the field with the user's own node ids, if they differ from the store's: int64, or UTF-8


def holds_text(field: Field) -> bool:
    """Return whether ids of this field are UTF-8, padded with zero bytes."""
    return field.dtype == "uint8" and len(field.shape) == 1


@dataclass(frozen=True)
class NodeType:
    """A node type: its number of nodes, fields and splits."""

    name: str
    num_nodes: int
    fields: Mapping[str, Field] = field(default_factory=dict)
    splits: Mapping[str, int] = field(default_factory=dict)  # name -> number of nodes

    @property
    def count(self) -> int:
        return self.num_nodes


@dataclass(frozen=True)
class Relation:
    """A relation: edges of one kind between two node types."""

    source: str
    name: str
    destination: str
    num_edges: int
    fields: Mapping[str, Field] = field(default_factory=dict)
    reverse: str | None = None  # name of the relation with all edges reversed; its own if it has both directions

    @property
    def key(self) -> RelationName:
        return (self.source, self.name, self.destination)

    @property
    def count(self) -> int:
        return self.num_edges

    @property
    def reverse_key(self) -> RelationName | None:
        return None if self.reverse is None else (self.destination, self.reverse, self.source)


@dataclass(frozen=True)
class Schema:
    """The node types and relations of a graph. Lists with one entry per node type or relation follow their order here.

    `weight` and `time` name the fields that weighted and temporal sampling read; if `time` is set, the edge list of
    every node is sorted by time.
    """

    node_types: tuple[NodeType, ...]
    relations: tuple[Relation, ...]
    homogeneous: bool
    weight: str | None = None
    time: str | None = None

    @cached_property
    def type_index(self) -> dict[str, int]:
        return {t.name: i for i, t in enumerate(self.node_types)}

    @cached_property
    def relation_index(self) -> dict[RelationName, int]:
        return {r.key: i for i, r in enumerate(self.relations)}

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The index of the source type, per relation."""
        return tuple(self.type_index[r.source] for r in self.relations)

    @cached_property
    def destinations(self) -> tuple[int, ...]:
        """The index of the destination type, per relation."""
        return tuple(self.type_index[r.destination] for r in self.relations)

    @cached_property
    def edge_time(self) -> bool:
        """Whether times belong to edges, not to nodes."""
        return self.time is not None and any(self.time in r.fields for r in self.relations)

    def described(self, owner: TypeKey) -> NodeType | Relation:
        """Return the node type or relation that `owner` names; raise ConfigError if the graph has none of this name."""
        return self.node_type(owner) if isinstance(owner, str) else self.relation(owner)

    def node_type(self, name: str) -> NodeType:
        if name not in self.type_index:
            raise ConfigError(f"unknown node type {name!r}; the graph has {list(self.type_index)}")
        return self.node_types[self.type_index[name]]

    def relation(self, key: RelationName) -> Relation:
        if key not in self.relation_index:
            raise ConfigError(f"unknown relation {key!r}; the graph has {list(self.relation_index)}")
        return self.relations[self.relation_index[key]]


HOMOGENEOUS_TYPE = "node"
HOMOGENEOUS_RELATION: RelationName = ("node", "to", "node")


def check_schema(schema: Schema) -> None:
    """Raise ConfigError if types, relations, weight and time do not fit together, or a name is not UTF-8."""
    names = [name for t in schema.node_types for name in (t.name, *t.fields, *t.splits)]
    for name in (*names, *(name for r in schema.relations for name in (*r.key, *r.fields))):
        try:
            name.encode()
        except UnicodeEncodeError as error:  # half of a pair of surrogates
            raise ConfigError(f"the name {name!r} cannot be written in UTF-8; rename it") from error
    if len(schema.type_index) != len(schema.node_types):
        raise ConfigError(f"a node type is named twice: {[t.name for t in schema.node_types]}")
    if len(schema.relation_index) != len(schema.relations):
        raise ConfigError(f"a relation is named twice: {[r.key for r in schema.relations]}")
    for relation in schema.relations:
        schema.node_type(relation.source)
        schema.node_type(relation.destination)
        if relation.reverse_key is not None and relation.reverse_key not in schema.relation_index:
            raise ConfigError(f"the reverse of {relation.key} is {relation.reverse_key}, which is no relation")
    if schema.homogeneous and (len(schema.node_types), len(schema.relations)) != (1, 1):
        raise ConfigError("homogeneous is true, but there is more than one node type or relation")
    _check_attrs(schema)


def _check_attrs(schema: Schema) -> None:
    weight, time = schema.weight, schema.time
    node_fields = sorted({name for t in schema.node_types for name in t.fields})
    edge_fields = sorted({name for r in schema.relations for name in r.fields} - {EDGE_ID})
    if weight is not None and weight not in edge_fields:
        raise ConfigError(f"weight_attr {weight!r} is no edge field; the edge fields are {edge_fields}")
    if time is not None and time in node_fields and time in edge_fields:
        raise ConfigError(f"time_attr {time!r} is both a node field and an edge field; rename one of them")
    if time is not None and time not in node_fields and time not in edge_fields:
        raise ConfigError(f"time_attr {time!r} is no field; nodes have {node_fields}, edges have {edge_fields}")


# --- ids ------------------------------------------------------------------------------------


def read_ids(what: str, ids: Tensor, limit: int, error: type[HoploomError] = DataError) -> Tensor:
    """Return ids [n] int64; raise an error unless they are integers in [0, limit)."""
    check_ids(what, ids, limit, error)
    return ids.to(torch.int64).contiguous()


def check_ids(what: str, ids: Tensor, limit: int, error: type[HoploomError] = DataError) -> None:
    """Raise an error unless these are integers [n], each in [0, limit)."""
    if ids.dim() != 1 or (ids.dtype not in ID_DTYPES and ids.numel()):
        raise error(f"{what} has dtype {ids.dtype} and shape {tuple(ids.shape)}; give a list of integer ids")
    if not ids.numel():
        return
    least, most = (int(bound) for bound in ids.aminmax())
    if least < 0 or most >= limit:
        raise error(f"{what} holds id {least if least < 0 else most}, out of range [0, {limit})")


def read_members(what: str, members: Tensor, limit: int, error: type[HoploomError] = DataError) -> Tensor:
    """Return the ids [n] int64 that `members` gives as ids or as a bool mask [limit]; raise `error` if invalid."""
    if members.dtype != torch.bool:
        ids = read_ids(what, members, limit, error)
        if ids.numel() == limit > 2 and int(ids.max()) <= 1:  # as ids, they would be nodes 0 and 1 over and over
            raise error(
                f"{what} holds only 0 and 1, one value for each of the {limit} nodes, so it looks like a mask, but its "
                f"dtype is {members.dtype}; convert it with .bool()"
            )
        return ids
    if members.shape != (limit,):
        raise error(f"{what} is a mask of shape {tuple(members.shape)} for {limit} nodes; give one entry per node")
    return torch.nonzero(members).view(-1)


def read_permutation(what: str, ids: Tensor, count: int) -> Tensor:
    """Return ids [count] int64; raise DataError unless each number in [0, count) is there once."""
    ids = read_ids(what, ids, count)
    if ids.numel() != count:
        raise DataError(f"{what} has {ids.numel()} entries for {count} edges; give one per edge")
    times = torch.bincount(ids, minlength=count)
    if (times > 1).any():
        raise DataError(f"{what} holds id {int(times.argmax())} twice; give every edge an id of its own")
    return ids
