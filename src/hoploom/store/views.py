"""What you see of a store: types and counts, rows of a field, neighbours of a node. Nothing is read until you ask.

FieldRows come through the store's own `gather`, so they are the same in parts, from servers and beside a GPU, and each
access is a request of its own: training goes through a loader.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hoploom import html
from hoploom.config.values import as_count, as_int, printable
from hoploom.errors import ConfigError, DataError
from hoploom.schema import (
    DTYPES,
    EDGE_ID,
    ORIGINAL_ID,
    Field,
    NodeType,
    Owner,
    Relation,
    RelationName,
    Schema,
    holds_text,
    read_ids,
    read_members,
)
from hoploom.store.base import FeatureStore, GraphStore, Part, Wanted
from hoploom.store.scan import in_edges, scan_rows

CHUNK = 1 << 12  # rows that an iteration fetches together


class Uncopied:
    """What is shared instead of copied, because nothing of it changes, and is never sent to another process."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError(
            "a store is never pickled; give the other process its path and hoploom.open it there, which shares its "
            "pages; save one that is in memory first"
        )


class _NotThereError(ConfigError, AttributeError):
    """An attribute that this store cannot have: `hasattr` says False."""


@dataclass(frozen=True, repr=False, eq=False)
class FieldRows(Uncopied):
    """The rows of one field, read when you index them: with an id, a slice, a list, a tensor, an array or a mask.

    >>> store.x[0], store.x[:10], store.x[[3, 5]], store.x[mask]
    """

    features: FeatureStore
    owner: Owner
    name: str
    count: int
    field: Field

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.count, *self.field.shape))

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.field.dtype]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        for rows in scan_rows(self.features, self.owner, self.name, self.count, CHUNK):
            yield from rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self.dtype == torch.bfloat16:
            raise ConfigError(f"NumPy has no bfloat16; read {self.name!r} as a tensor: store.{self.name}[:].float()")
        return np.asarray(self[:].numpy(), dtype=dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """What torch.as_tensor asks for: all rows at once, not one by one."""
        return self[:].__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0).__dlpack_device__()

    def __eq__(self, other: object) -> bool:
        raise ConfigError(
            f"{self!r} is not read yet, so it compares with nothing; {self._first(f'[:] == {other!r:.20}')}"
        )

    __hash__ = object.__hash__

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, tuple):
            return self._part_of_rows(index)
        ids = self._ids([index] if _is_one(index) else index)
        (rows,) = self.features.gather([(self.owner, self.name, ids)])
        return rows[0] if _is_one(index) else rows

    def _part_of_rows(self, index: tuple[Any, ...]) -> Tensor:
        """x[ids, columns]: the rows of the first index, of which torch takes the rest."""
        first, rest = index[0] if index else None, index[1:]
        if first is None or first is Ellipsis:
            raise ConfigError(f"index of {self.name!r} is {index!r:.80}; {self._first('[ids][..., 0]')}")
        rows = self[first]
        return (
            rows[rest]
            if _is_one(first)
            else rows[(slice(None) if isinstance(first, slice) else torch.arange(len(rows)), *rest)]
        )

    def _first(self, then: str) -> str:
        return f"read the rows first: store.{self.name}{then}"

    def _ids(self, index: Any) -> Tensor:
        """The ids that an index means; those below zero count from the end."""
        if isinstance(index, FieldRows):
            index = index[:]
        if index is Ellipsis:
            index = slice(None)
        if isinstance(index, slice):
            found = range(self.count)[index]
            return torch.arange(len(found)) * found.step + found.start
        what = f"index of {self.name!r}"
        if isinstance(index, bool | np.bool_):  # of a comparison that went wrong
            raise ConfigError(f"{what} is {index}; to select rows by value, {self._first('[:] == 3')}")
        try:
            ids = torch.as_tensor(index).cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{what} is {index!r:.80}; give an id, a slice, a list of ids or a mask") from error
        if ids.dtype == torch.bool:
            return read_members(what, ids, self.count, ConfigError)
        if ids.is_floating_point():
            return ids
        wide = ids.to(torch.int64)
        from_end = (wide < 0) & (wide >= -self.count) & ids.dtype.is_signed
        return torch.where(from_end, wide + self.count, wide)

    def __repr__(self) -> str:
        shape = ", ".join(f"{extent:,}" for extent in self.shape)
        return printable(f"FieldRows({_named(self.owner)}.{self.name}: {self.field.dtype} [{shape}])")


def _is_one(index: Any) -> bool:
    """Whether an index means one row: an integer of any type, no truth value."""
    return not isinstance(index, bool | np.bool_) and (
        isinstance(index, int | np.integer)
        or (isinstance(index, Tensor | np.ndarray) and index.ndim == 0 and "bool" not in str(index.dtype))
    )


@dataclass(frozen=True, repr=False, eq=False)
class TypeView(Uncopied):
    """What a store has of one node type or relation; fields are attributes: `store["paper"].x`."""

    schema: Schema
    graph: GraphStore
    features: FeatureStore
    owner: Owner

    @property
    def described(self) -> NodeType | Relation:
        return self.schema.node_type(self.owner) if isinstance(self.owner, str) else self.schema.relation(self.owner)

    @property
    def num_nodes(self) -> int:
        if isinstance(self.owner, tuple):
            raise AttributeError
        return self.schema.node_type(self.owner).num_nodes

    @property
    def num_edges(self) -> int:
        if isinstance(self.owner, str):
            raise AttributeError
        return self.schema.relation(self.owner).num_edges

    @property
    def _count(self) -> int:
        return self.num_nodes if isinstance(self.owner, str) else self.num_edges

    def keys(self) -> list[str]:
        """The names of the fields."""
        return [name for name in self.described.fields if name != EDGE_ID]

    def neighbors(self, node: int) -> Any:
        """The sources of a node's in-edges, which sampling draws from; by relation for a node type."""
        if isinstance(self.owner, tuple):
            return neighbors_of(self.schema, self.graph, self.owner, node)
        relations = [r.key for r in self.schema.relations if r.destination == self.owner]
        return {key: neighbors_of(self.schema, self.graph, key, node) for key in relations}

    def __getitem__(self, name: str) -> FieldRows:
        fields = self.described.fields
        if name not in fields:
            raise ConfigError(f"{self.owner!r} has no field {name!r}; it has {sorted(self.keys())}")
        return FieldRows(self.features, self.owner, name, self._count, fields[name])

    def __getattr__(self, name: str) -> FieldRows:
        if name.startswith("__") or name not in self.described.fields:
            only = "num_edges" if isinstance(self.owner, tuple) else "num_nodes"
            raise AttributeError(f"{self.owner!r} has no {name!r}; it has {only} and the fields {self.keys()}")
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __dir__(self) -> list[str]:
        other = "num_nodes" if isinstance(self.owner, tuple) else "num_edges"
        return [*(name for name in super().__dir__() if name != other), *self.keys()]

    def __repr__(self) -> str:
        what = "nodes" if isinstance(self.owner, str) else "edges"
        fields = ", ".join(self.keys()) or "no fields"
        return printable(f"TypeView({_named(self.owner)}: {self._count:,} {what}, {fields})")


def neighbors_of(schema: Schema, graph: GraphStore, key: RelationName, node: int) -> Tensor:
    """The sources of a node's in-edges of one relation, in the order of the store: [n] int64."""
    relation = schema.relation(key)
    limit = schema.node_type(relation.destination).num_nodes
    node = as_int("node", node, 0, f"give one id of {relation.destination!r}, below {limit}")
    if node >= limit:
        raise ConfigError(f"node is {node}; give one id of {relation.destination!r}, below {limit}")
    return in_edges(graph, schema.relation_index[key], torch.tensor([node])).sources.to(torch.int64)


Ids = NDArray[Any]  # int64, or text


def is_text(given: Any) -> bool:
    """Return whether these are ids of tables with text ids: strings in a list or an array."""
    if isinstance(given, np.ndarray):
        return given.dtype.kind == "U" or (given.dtype.kind == "O" and all(isinstance(one, str) for one in given.flat))
    return isinstance(given, list | tuple) and len(given) > 0 and isinstance(given[0], str)


@dataclass(frozen=True, eq=False)
class OriginalIds:
    """The ids of one node type: yours (`original`) and those of the store (`stored`).

    >>> ids = store.ids("user")
    >>> ids.stored(["ann", "bob"])
    tensor([17, 4])
    >>> ids.original([17, 4])
    array(['ann', 'bob'], dtype='<U3')
    """

    features: FeatureStore
    node_type: NodeType

    @property
    def are_text(self) -> bool:
        field = self.node_type.fields.get(ORIGINAL_ID)
        return field is not None and holds_text(field)

    def original(self, ids: Any) -> Ids:
        """Return your ids of these nodes of the store: [n] int64 or text."""
        name = self.node_type.name
        nodes = read_ids(f"ids of {name!r}", torch.as_tensor(ids), self.node_type.num_nodes, ConfigError)
        if ORIGINAL_ID not in self.node_type.fields:
            return nodes.numpy()
        found = _values(self.features.gather([Wanted(name, ORIGINAL_ID, nodes)])[0])
        return np.char.decode(found, "utf-8") if self.are_text else found

    def stored(self, originals: Any, what: str = "ids") -> Tensor:
        """Return the store's ids of these ids of yours: [n] int64. Raise DataError for one that no node has.

        `what` names the ids in errors.
        """
        asked = self._read(originals, what)
        if ORIGINAL_ID not in self.node_type.fields:
            found = np.where((asked >= 0) & (asked < self.node_type.num_nodes), asked, -1)
        elif len(asked) == 0:
            found = np.empty(0, np.int64)
        else:
            found = self._sought(asked)
        if len(found) and found.min() < 0:
            unknown = asked[found < 0]
            first = unknown[0].decode() if self.are_text else int(unknown[0])
            more = f" ({len(unknown):,} of {len(asked):,} are unknown)" if len(unknown) > 1 else ""
            raise DataError(f"{self.node_type.name!r} has no node with the id {first!r}{more}; {self._hint()}")
        return torch.from_numpy(found)

    def _sought(self, asked: Ids) -> NDArray[np.int64]:
        """Return the position in the column of each id, or -1."""
        wanted, inverse = np.unique(asked, return_inverse=True)
        found, first = np.full(len(wanted), -1, np.int64), 0
        for ids in self._column():
            at = np.searchsorted(wanted, ids).clip(max=len(wanted) - 1)
            hit = wanted[at] == ids
            found[at[hit]] = first + np.flatnonzero(hit)
            first += len(ids)
        return found[inverse]

    def _column(self) -> Iterator[Ids]:
        return map(_values, scan_rows(self.features, self.node_type.name, ORIGINAL_ID, self.node_type.num_nodes))

    def _read(self, originals: Any, what: str) -> Ids:
        """Return your ids as they are in the column: int64, or UTF-8 without its padding."""
        try:
            given = np.asarray(originals)
            if given.ndim != 1:
                raise ConfigError(f"{what} of {self.node_type.name!r} have shape {given.shape}; give a list of ids")
            if given.size == 0:
                return given.astype(np.int64)
            if not self.are_text and (given.dtype.kind in "iuU" or all(map(_may_be_integer, given))):
                return np.array(given.tolist(), np.int64) if given.dtype == np.uint64 else given.astype(np.int64)
            if self.are_text and (given.dtype.kind == "U" or all(isinstance(one, str) for one in given)):
                return np.char.encode(given.astype(str), "utf-8")
        except (ValueError, TypeError, OverflowError) as error:
            if isinstance(error, ConfigError):
                raise
        shown = repr(list(originals)[:3])
        raise ConfigError(f"{what} of {self.node_type.name!r} are {shown:.80}...; {self._hint()}")

    def _hint(self) -> str:
        if not self.node_type.num_nodes:
            return "the type has no nodes"
        return f"give ids such as {self.original([0]).tolist()[0]!r}, which is node 0 of the store"


def _may_be_integer(one: Any) -> bool:
    return isinstance(one, int | np.integer | str) and not isinstance(one, bool)


def _values(rows: Tensor) -> Ids:
    if rows.dim() == 1:
        return rows.to(torch.int64).numpy()
    return rows.contiguous().numpy().view(f"S{rows.shape[1]}").reshape(-1)


class Explored(Uncopied, ABC):
    """What a store shows of itself, with PyG's names where PyG has one."""

    schema: Schema
    graph: GraphStore
    features: FeatureStore
    parts: tuple[Part, ...]
    path: Path | None
    __iter__ = None  # as `in` would need it, were there no __contains__

    @abstractmethod
    def split(self, name: str, node_type: str | None = None) -> Tensor:
        """The node ids of a split."""

    @property
    def num_nodes(self) -> int:
        """Of all types together; `store["paper"].num_nodes` is of one."""
        return sum(node_type.num_nodes for node_type in self.schema.node_types)

    @property
    def num_edges(self) -> int:
        return sum(relation.num_edges for relation in self.schema.relations)

    @property
    def node_types(self) -> list[str]:
        return [node_type.name for node_type in self.schema.node_types]

    @property
    def edge_types(self) -> list[RelationName]:
        return [relation.key for relation in self.schema.relations]

    def metadata(self) -> tuple[list[str], list[RelationName]]:
        """Node types and edge types, as PyG's `to_hetero` takes them."""
        return self.node_types, self.edge_types

    @property
    def num_features(self) -> Any:
        """The width of x: a number for one node type, else by node type, as in PyG."""
        widths = {t.name: _width(t) for t in self.schema.node_types}
        return next(iter(widths.values())) if self.schema.homogeneous else widths

    @cached_property
    def num_classes(self) -> int:
        """One more than the largest label y, as in PyG; every label is read, once."""
        labelled = self._labelled()
        if len(labelled) != 1:
            raise AttributeError  # __getattr__ says which
        (owner,) = labelled
        field = owner.fields["y"]
        if len(field.shape) == 1 and field.shape[0] > 1:
            return field.shape[0]  # one column per class
        if DTYPES[field.dtype].is_floating_point:
            return len({value for part in self._labels(owner) for value in torch.unique(part).tolist()})
        return max((int(part.max()) for part in self._labels(owner) if part.numel()), default=-1) + 1

    def _labelled(self) -> list[NodeType]:
        return [node_type for node_type in self.schema.node_types if "y" in node_type.fields]

    def _labels(self, owner: NodeType) -> Iterator[Tensor]:
        return scan_rows(self.features, owner.name, "y", owner.num_nodes)

    def ids(self, node_type: str | None = None) -> OriginalIds:
        """The ids of a node type in your tables and in the store: `store.ids("user").stored(["ann", "bob"])`."""
        if node_type is None and len(self.schema.node_types) > 1:
            raise ConfigError(f"the store has several node types; name one of {self.node_types}")
        return OriginalIds(self.features, self.schema.node_type(node_type or self.schema.node_types[0].name))

    @property
    def splits(self) -> Mapping[str, Any]:
        """The number of nodes of every split; by node type where there are several."""
        counts = {t.name: dict(t.splits) for t in self.schema.node_types}
        return next(iter(counts.values())) if self.schema.homogeneous else counts

    def __getitem__(self, key: Any) -> Any:
        """A node type, a relation (or its two ends), or for one node type a field."""
        schema = self.schema
        if isinstance(key, str) and key in schema.type_index:
            return TypeView(schema, self.graph, self.features, key)
        if isinstance(key, str) and schema.homogeneous:
            return self._only(key)[key]
        if isinstance(key, tuple) and len(key) == 2:
            found = [r.key for r in schema.relations if (r.source, r.destination) == key]
            key = found[0] if len(found) == 1 else key
        if not isinstance(key, tuple) or key not in schema.relation_index:
            raise ConfigError(f"the store has no {key!r:.80}; it has {[*self.node_types, *self.edge_types]}")
        return TypeView(schema, self.graph, self.features, key)

    def __contains__(self, key: object) -> bool:
        try:
            return self[key] is not None
        except ConfigError:
            return False

    def _only(self, name: str) -> TypeView:
        """Of one node type and relation: that which has a field."""
        relation, node_type = self.schema.relations[0], self.schema.node_types[0]
        owner: Owner = relation.key if name in relation.fields and name not in node_type.fields else node_type.name
        return TypeView(self.schema, self.graph, self.features, owner)

    def __getattr__(self, name: str) -> FieldRows:
        """For one node type: a field, `store.x[:10]`."""
        if not name.startswith("_") and self.schema.homogeneous and name in self._field_names():
            return self._only(name)[name]
        if name == "num_classes":  # the property has none to give
            have = [node_type.name for node_type in self._labelled()]
            raise _NotThereError(f"num_classes needs labels y of one node type; {have or 'none'} have them")
        way_out = f"it has the fields {self._field_names()}" if self.schema.homogeneous else "name a type: store[type]"
        raise AttributeError(f"the store has no attribute {name!r}; {way_out}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(self._field_names() if self.schema.homogeneous else ())]

    def _field_names(self) -> list[str]:
        described: list[NodeType | Relation] = [*self.schema.node_types, *self.schema.relations]
        return [name for of in described for name in of.fields if name != EDGE_ID]

    def _ipython_key_completions_(self) -> list[Any]:
        return [*self.node_types, *self.edge_types]

    def neighbors(self, node: int, of: str | RelationName | None = None) -> Any:
        """The sources of a node's in-edges, which sampling draws from: [n] int64.

        With several types name the relation, `of=("author", "writes", "paper")`, or a node type for all its relations.
        """
        if of is None and self.schema.homogeneous:
            of = self.schema.relations[0].key
        if of is None:
            raise ConfigError(f"the graph has several types; give of=, one of {[*self.node_types, *self.edge_types]}")
        return self[of].neighbors(node)

    def _repr_html_(self) -> str:
        """The table that a notebook shows."""
        rows = [(t.name, f"{t.num_nodes:,}", _fields(t), _splits(t)) for t in self.schema.node_types]
        rows += [(" ".join(r.key), f"{r.num_edges:,}", _fields(r), "") for r in self.schema.relations]
        where = self.path or ("in memory" if self.parts else "on servers")
        title = f"Store {where}: {as_count(self.num_nodes)} nodes, {as_count(self.num_edges)} edges"
        return html.table(title, ["type", "count", "fields", "splits"], rows)


def _named(owner: Owner) -> str:
    return owner if isinstance(owner, str) else "(" + ", ".join(owner) + ")"


def _width(node_type: NodeType) -> int:
    field = node_type.fields.get("x")
    return 0 if field is None else field.shape[-1] if field.shape else 1


def _fields(of: NodeType | Relation) -> str:
    shown = {name: f"[{', '.join(map(str, f.shape))}]" if f.shape else "" for name, f in of.fields.items()}
    return ", ".join(f"{name} {of.fields[name].dtype}{shape}" for name, shape in shown.items() if name != EDGE_ID)


def _splits(node_type: NodeType) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in node_type.splits.items())
