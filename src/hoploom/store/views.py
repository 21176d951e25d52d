"""The views of a store: types and counts, rows of a field, neighbours of a node, your own ids, PyG's data.

Rows are read when they are accessed, by the store's own `gather`: they are the same if the store has parts, servers or
a GPU. Each access is a separate request, so train with a loader. No index of your own ids is kept: a lookup reads the
whole id column of the type, so look up many ids at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hoploom.config.values import as_int, printable
from hoploom.errors import ConfigError, DataError
from hoploom.schema import (
    DTYPES,
    EDGE_ID,
    ORIGINAL_ID,
    Field,
    NodeType,
    Relation,
    RelationName,
    Schema,
    TypeKey,
    holds_text,
    read_ids,
    read_members,
)
from hoploom.store.base import NODES, FeatureStore, GraphStore, Part, Wanted, in_edges, scan_rows
from hoploom.system import require_memory

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

CHUNK = 1 << 12  # rows that an iteration fetches together
TAKES = "to read the graph takes"
LESS = "take a part of it with store.subgraph(ids), or batches from hoploom.NeighborLoader(store, ...)"


class Uncopied:
    """Base of immutable objects: a copy is the object itself, and pickling raises ConfigError."""

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
    """Raised for an attribute that this store cannot have; an AttributeError, so that `hasattr` returns False."""


@dataclass(frozen=True, repr=False, eq=False)
class FieldRows(Uncopied):
    """The rows of one field, read when you index them: with an id, a slice, a list, a tensor, an array or a mask.

    >>> store.x[0], store.x[:10], store.x[[3, 5]], store.x[mask]
    """

    features: FeatureStore
    owner: TypeKey
    name: str

    @property
    def field(self) -> Field:
        return self.features.schema.described(self.owner).fields[self.name]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), *self.field.shape))

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.field.dtype]

    def __len__(self) -> int:
        return self.features.schema.described(self.owner).count

    def __iter__(self) -> Iterator[Tensor]:
        for rows in scan_rows(self.features, self.owner, self.name, len(self), CHUNK):
            yield from rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self.dtype == torch.bfloat16:
            raise ConfigError(f"NumPy has no bfloat16; read {self.name!r} as a tensor: store.{self.name}[:].float()")
        return np.asarray(self[:].numpy(), dtype=dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """Return all rows as a DLPack capsule. Without this method, torch.as_tensor would read the rows one by one."""
        return self[:].__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0).__dlpack_device__()

    def __eq__(self, other: object) -> bool:
        hint = self._read_first(f"[:] == {other!r:.20}")
        raise ConfigError(f"{self!r} is not read yet, so it compares with nothing; {hint}")

    __hash__ = object.__hash__

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, tuple):  # x[ids, columns]
            raise ConfigError(f"index of {self.name!r} is {index!r:.80}; {self._read_first('[ids][..., 0]')}")
        ids = self._ids([index] if _is_one(index) else index)
        (rows,) = self.features.gather([(self.owner, self.name, ids)])
        return rows[0] if _is_one(index) else rows

    def _read_first(self, then: str) -> str:
        return f"read the rows first: store.{self.name}{then}"

    def _ids(self, index: Any) -> Tensor:
        """Return the ids that an index selects; negative ids count from the end."""
        if isinstance(index, FieldRows):
            index = index[:]
        if index is Ellipsis:
            index = slice(None)
        if isinstance(index, slice):
            found = range(len(self))[index]
            return torch.arange(len(found)) * found.step + found.start
        what = f"index of {self.name!r}"
        if isinstance(index, bool | np.bool_):  # the result of comparing FieldRows
            raise ConfigError(f"{what} is {index}; to select rows by value, {self._read_first('[:] == 3')}")
        try:
            ids = torch.as_tensor(index).cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{what} is {index!r:.80}; give an id, a slice, a list of ids or a mask") from error
        if ids.dtype == torch.bool:
            return read_members(what, ids, len(self), ConfigError)
        if ids.is_floating_point():
            return ids
        wide = ids.to(torch.int64)
        from_end = (wide < 0) & (wide >= -len(self)) & ids.dtype.is_signed
        return torch.where(from_end, wide + len(self), wide)

    def __repr__(self) -> str:
        shape = ", ".join(f"{extent:,}" for extent in self.shape)
        return printable(f"FieldRows({_shown(self.owner)}.{self.name}: {self.field.dtype} [{shape}])")


def _is_one(index: Any) -> bool:
    """Return whether `index` selects one row: it must be an integer of any type, but not a bool."""
    return not isinstance(index, bool | np.bool_) and (
        isinstance(index, int | np.integer)
        or (isinstance(index, Tensor | np.ndarray) and index.ndim == 0 and "bool" not in str(index.dtype))
    )


@dataclass(frozen=True, repr=False, eq=False)
class TypeView(Uncopied):
    """One node type or relation of a store; fields are attributes: `store["paper"].x`."""

    graph: GraphStore
    features: FeatureStore
    owner: TypeKey

    @property
    def described(self) -> NodeType | Relation:
        return self.features.schema.described(self.owner)

    def keys(self) -> list[str]:
        """Return the names of the fields."""
        return [name for name in self.described.fields if name != EDGE_ID]

    def neighbors(self, node: int) -> Any:
        """Return the sources of a node's in-edges, [n] int64, in the store's order; for a node type, by relation."""
        schema = self.features.schema
        if isinstance(self.owner, str):
            keys = [relation.key for relation in schema.relations if relation.destination == self.owner]
            return {key: TypeView(self.graph, self.features, key).neighbors(node) for key in keys}
        destination = self.owner[2]
        limit = schema.node_type(destination).num_nodes
        hint = f"give one id of {destination!r}, below {limit}"
        node = as_int("node", node, 0, hint)
        if node >= limit:
            raise ConfigError(f"node is {node}; {hint}")
        picks = in_edges(self.graph, schema.relation_index[self.owner], torch.tensor([node]))
        return picks.sources.to(torch.int64)

    def __getitem__(self, name: str) -> FieldRows:
        if name not in self.described.fields:
            raise ConfigError(f"{self.owner!r} has no field {name!r}; it has {sorted(self.keys())}")
        return FieldRows(self.features, self.owner, name)

    def __getattr__(self, name: str) -> Any:
        count = "num_nodes" if isinstance(self.owner, str) else "num_edges"
        if name == count:
            return self.described.count
        if name.startswith("__") or name not in self.described.fields:
            raise AttributeError(f"{self.owner!r} has no {name!r}; it has {count} and the fields {self.keys()}")
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), "num_nodes" if isinstance(self.owner, str) else "num_edges", *self.keys()]

    def __repr__(self) -> str:
        what = "nodes" if isinstance(self.owner, str) else "edges"
        fields = ", ".join(self.keys()) or "no fields"
        return printable(f"TypeView({_shown(self.owner)}: {self.described.count:,} {what}, {fields})")


# --- your own ids ---------------------------------------------------------------------------

Ids = NDArray[Any]  # int64, or text


def is_text(given: Any) -> bool:
    """Return whether `given` are ids as text: strings in a list, a tuple or an array."""
    if isinstance(given, np.ndarray):
        return given.dtype.kind == "U" or (given.dtype.kind == "O" and all(isinstance(one, str) for one in given.flat))
    return isinstance(given, list | tuple) and len(given) > 0 and isinstance(given[0], str)


@dataclass(frozen=True, eq=False)
class OriginalIds:
    """A translator between your ids of one node type (`original`) and those of the store (`stored`).

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
        """Return your ids of the nodes that have these ids in the store: [n] int64 or text."""
        name = self.node_type.name
        nodes = read_ids(f"ids of {name!r}", torch.as_tensor(ids), self.node_type.num_nodes, ConfigError)
        if ORIGINAL_ID not in self.node_type.fields:
            return nodes.numpy()
        found = _values(self.features.gather([Wanted(name, ORIGINAL_ID, nodes)])[0])
        return np.char.decode(found, "utf-8") if self.are_text else found

    def stored(self, originals: Any, what: str = "ids") -> Tensor:
        """Return the store's ids, [n] int64, of nodes given by your ids; raise DataError for an id that no node has.

        `what` names the ids in error messages.
        """
        asked = self._read(originals, what)
        found = self._find(asked)
        if len(found) and found.min() < 0:
            unknown = asked[found < 0]
            first = unknown[0].decode() if self.are_text else int(unknown[0])
            more = f" ({len(unknown):,} of {len(asked):,} are unknown)" if len(unknown) > 1 else ""
            raise DataError(f"{self.node_type.name!r} has no node with the id {first!r}{more}; {self._hint()}")
        return torch.from_numpy(found)

    def find(self, originals: Any, what: str = "ids") -> Tensor:
        """Return the store's ids as `stored` does, with -1 for an id that no node has."""
        return torch.from_numpy(self._find(self._read(originals, what)))

    def _find(self, asked: Ids) -> Ids:
        if ORIGINAL_ID not in self.node_type.fields:
            return np.where((asked >= 0) & (asked < self.node_type.num_nodes), asked, -1)
        if len(asked) == 0:
            return np.empty(0, np.int64)
        wanted, inverse = np.unique(asked, return_inverse=True)
        by_id, first = np.full(len(wanted), -1, np.int64), 0
        name, num_nodes = self.node_type.name, self.node_type.num_nodes
        for ids in map(_values, scan_rows(self.features, name, ORIGINAL_ID, num_nodes)):
            at = np.searchsorted(wanted, ids).clip(max=len(wanted) - 1)
            hit = wanted[at] == ids
            by_id[at[hit]] = first + np.flatnonzero(hit)
            first += len(ids)
        found: Ids = by_id[inverse]
        return found

    def _read(self, originals: Any, what: str) -> Ids:
        """Return the given ids in a dtype that compares with the store's id column: int64, or UTF-8 bytes."""
        try:
            given = np.asarray(originals)
            if given.ndim != 1:
                raise ConfigError(f"{what} of {self.node_type.name!r} have shape {given.shape}; give a list of ids")
            if given.size == 0:
                return given.astype(np.int64)
            if self.are_text:
                if given.dtype.kind == "U" or all(isinstance(one, str) for one in given):
                    return np.char.encode(given.astype(str), "utf-8")
            elif given.dtype.kind in "iuU" or not any(
                isinstance(one, bool) or not isinstance(one, int | np.integer | str) for one in given
            ):
                return np.array(given.tolist(), np.int64) if given.dtype == np.uint64 else given.astype(np.int64)
        except (ValueError, TypeError, OverflowError) as error:
            if isinstance(error, ConfigError):
                raise
        shown = repr(list(originals)[:3])
        raise ConfigError(f"{what} of {self.node_type.name!r} are {shown:.80}...; {self._hint()}")

    def _hint(self) -> str:
        if not self.node_type.num_nodes:
            return "the type has no nodes"
        return f"give ids such as {self.original([0]).tolist()[0]!r}, which is node 0 of the store"


def _values(rows: Tensor) -> Ids:
    if rows.dim() == 1:
        return rows.to(torch.int64).numpy()
    return rows.contiguous().numpy().view(f"S{rows.shape[1]}").reshape(-1)


# --- the store itself -----------------------------------------------------------------------


class Explored(Uncopied, ABC):
    """Base of Store: the attributes that show its graph, under PyG's names if PyG has the same attribute."""

    schema: Schema
    graph: GraphStore
    features: FeatureStore
    parts: tuple[Part, ...]
    path: Path | None
    __iter__ = None  # without it, Python would iterate by __getitem__

    @abstractmethod
    def split(self, name: str, node_type: str | None = None) -> Tensor:
        """Return the node ids of a split."""

    @property
    def num_nodes(self) -> int:
        """The number of nodes of all types together; that of one type is `store["paper"].num_nodes`."""
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
        """Return node types and edge types, as PyG's `to_hetero` takes them."""
        return self.node_types, self.edge_types

    @property
    def num_features(self) -> Any:
        """The number of columns of x, as in PyG; in a heterogeneous graph, a dict by node type."""
        fields = {t.name: t.fields.get("x") for t in self.schema.node_types}
        widths = {name: 0 if x is None else x.shape[-1] if x.shape else 1 for name, x in fields.items()}
        return next(iter(widths.values())) if self.schema.homogeneous else widths

    @cached_property
    def num_classes(self) -> int:
        """The number of classes, as in PyG: the largest label y plus one. The first access reads every label."""
        labelled = [node_type for node_type in self.schema.node_types if "y" in node_type.fields]
        if len(labelled) != 1:
            raise AttributeError  # __getattr__ then raises an AttributeError with a message
        (node_type,) = labelled
        field = node_type.fields["y"]
        if len(field.shape) == 1 and field.shape[0] > 1:
            return field.shape[0]  # one column per class
        labels = scan_rows(self.features, node_type.name, "y", node_type.num_nodes)
        if DTYPES[field.dtype].is_floating_point:
            return len({value for part in labels for value in torch.unique(part).tolist()})
        return max((int(part.max()) for part in labels if part.numel()), default=-1) + 1

    def ids(self, node_type: str | None = None) -> OriginalIds:
        """Return the translator between your ids and the store's: `store.ids("user").stored(["ann", "bob"])`."""
        if node_type is None and len(self.schema.node_types) > 1:
            raise ConfigError(f"the store has several node types; name one of {self.node_types}")
        return OriginalIds(self.features, self.schema.node_type(node_type or self.schema.node_types[0].name))

    @property
    def splits(self) -> Mapping[str, Any]:
        """The number of nodes of every split, by name; in a heterogeneous graph, by node type and name."""
        counts = {t.name: dict(t.splits) for t in self.schema.node_types}
        return next(iter(counts.values())) if self.schema.homogeneous else counts

    def __getitem__(self, key: Any) -> Any:
        """Return the view of a node type or relation, or a homogeneous store's field. Two types may name a relation."""
        schema = self.schema
        if isinstance(key, str) and schema.homogeneous and key not in schema.type_index:
            return self._with_field(key)[key]
        if isinstance(key, tuple) and len(key) == 2:
            found = [r.key for r in schema.relations if (r.source, r.destination) == key]
            key = found[0] if len(found) == 1 else key
        if not isinstance(key, str | tuple) or (key not in schema.type_index and key not in schema.relation_index):
            raise ConfigError(f"the store has no {key!r:.80}; it has {[*self.node_types, *self.edge_types]}")
        return TypeView(self.graph, self.features, key)

    def __contains__(self, key: object) -> bool:
        try:
            return self[key] is not None
        except ConfigError:
            return False

    def _with_field(self, name: str) -> TypeView:
        """Return a view of the nodes or of the edges of a homogeneous store, whichever have the field `name`."""
        relation, node_type = self.schema.relations[0], self.schema.node_types[0]
        is_edges = name in relation.fields and name not in node_type.fields
        return TypeView(self.graph, self.features, relation.key if is_edges else node_type.name)

    def __getattr__(self, name: str) -> FieldRows:
        """Return a field of a homogeneous store: `store.x[:10]`."""
        if not name.startswith("_") and self.schema.homogeneous and name in self._field_names():
            return self._with_field(name)[name]
        if name == "num_classes":  # after the property's own AttributeError
            have = [node_type.name for node_type in self.schema.node_types if "y" in node_type.fields]
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
        """Return the sources of a node's in-edges, which sampling draws from: [n] int64.

        With several types, `of` is a relation, ("author", "writes", "paper"), or a node type, for a dict by relation.
        """
        if of is None and self.schema.homogeneous:
            of = self.schema.relations[0].key
        if of is None:
            raise ConfigError(f"the graph has several types; give of=, one of {[*self.node_types, *self.edge_types]}")
        return self[of].neighbors(node)

    def subgraph(self, subset: Any) -> "Data | HeteroData":
        """Return the nodes of `subset`, the edges between them and all fields, in memory; `n_id` has the store's ids.

        `subset` is a list of ids, a tensor, a mask or a split's name; with several node types, these by node type.

        >>> data = store.subgraph([0, 1, 2])
        >>> data = store.subgraph({"paper": "train", "author": authors})
        """
        schema = self.schema
        if schema.homogeneous:
            subset = {schema.node_types[0].name: subset}
        if not isinstance(subset, Mapping):
            way_out = f"give the nodes by node type, {{type: ids}}; the graph has {self.node_types}"
            raise ConfigError(f"subset is {subset!r:.80}; {way_out}")
        for name in subset:
            schema.node_type(name)
        nodes = {t.name: _members(self, t, subset.get(t.name, [])) for t in schema.node_types}
        require_memory(_node_bytes(self, nodes), TAKES, LESS)
        data = _data(self, nodes)
        for name, ids in nodes.items():
            (data if schema.homogeneous else data[name]).n_id = ids
        return data

    def to_pyg(self) -> "Data | HeteroData":
        """Return the whole graph as PyG's own Data or HeteroData, in memory; raise ConfigError if it would not fit."""
        edges = [relation.num_edges * _edge_bytes(relation) for relation in self.schema.relations]
        nodes = {t.name: torch.arange(t.num_nodes) for t in self.schema.node_types}
        require_memory(_node_bytes(self, nodes) + sum(edges), TAKES, LESS)
        return _data(self, nodes)


# --- a graph as PyG's data ------------------------------------------------------------------
# Edges are in your order if the store has your edge ids, else in the store's. Everything is copied.


def _node_bytes(store: Explored, nodes: Mapping[str, Tensor]) -> int:
    """Return the bytes of the fields, masks and ids of these nodes."""
    per_node = {
        t.name: 8 + len(t.splits) + sum(f.row_bytes for f in t.fields.values()) for t in store.schema.node_types
    }
    return sum(ids.numel() * per_node[name] for name, ids in nodes.items())


def _edge_bytes(relation: Relation) -> int:
    """Return the peak bytes per edge in `subgraph`, which has three copies of both ends and position, two of fields."""
    return 24 + 24 + 24 + 2 * sum(field.row_bytes for field in relation.fields.values())


def _members(store: Explored, node_type: NodeType, given: Any) -> Tensor:
    """Return the node ids that a split's name, a list, a tensor or a mask selects; raise ConfigError for duplicates."""
    if isinstance(given, str):
        return store.split(given, node_type.name)
    what = f"ids of {node_type.name!r}"
    try:
        ids = torch.as_tensor(given[:] if isinstance(given, FieldRows) else given).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{what} are {given!r:.80}; give a list of ids, a mask or a split's name") from error
    ids = read_members(what, ids if ids.numel() else ids.long(), node_type.num_nodes, ConfigError)
    if torch.unique(ids).numel() != ids.numel():
        raise ConfigError(f"{what} name a node twice; give every node once: ids.unique()")
    return ids


def _data(store: Explored, nodes: Mapping[str, Tensor]) -> "Data | HeteroData":
    from torch_geometric.data import Data, HeteroData  # takes a second to import

    data: Any = Data() if store.schema.homogeneous else HeteroData()
    for node_type in store.schema.node_types:
        fields = _node_fields(store, node_type, nodes[node_type.name])
        holder = data if store.schema.homogeneous else data[node_type.name]
        if not fields:
            holder.num_nodes = nodes[node_type.name].numel()
        for name, rows in fields.items():
            holder[name] = rows
    for relation in store.schema.relations:
        holder = data if store.schema.homogeneous else data[relation.key]
        for name, rows in _edge_fields(store, relation, nodes).items():
            holder[name] = rows
    return data


def _node_fields(store: Explored, node_type: NodeType, ids: Tensor) -> dict[str, Tensor]:
    """Return the fields of these nodes, and a mask for every split."""
    names = list(node_type.fields)
    fields = dict(zip(names, store.features.gather([Wanted(node_type.name, name, ids) for name in names]), strict=True))
    for split in node_type.splits:
        if f"{split}_mask" not in fields:
            fields[f"{split}_mask"] = torch.isin(ids, store.split(split, node_type.name))
    return fields


def _edge_fields(store: Explored, relation: Relation, nodes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the edges between these nodes in local ids, and their fields."""
    ends, sources = nodes[relation.destination], nodes[relation.source]
    index, order = store.schema.relation_index[relation.key], sources.argsort()
    found: list[tuple[Tensor, Tensor]] = [(torch.empty(2, 0, dtype=torch.int64), ends[:0])]
    num_found = 0
    for first in range(0, ends.numel() if sources.numel() else 0, NODES):
        picks = in_edges(store.graph, index, ends[first : first + NODES])
        places = order[torch.searchsorted(sources[order], picks.sources).clamp_(max=sources.numel() - 1)]
        inside = sources[places] == picks.sources
        local = torch.repeat_interleave(torch.arange(first, first + picks.counts.numel()), picks.counts)
        found.append((torch.stack([places[inside], local[inside]]), picks.edges[inside]))
        num_found += found[-1][1].numel()
        require_memory(num_found * (_edge_bytes(relation) - 24), TAKES, LESS)  # the edges found are in memory already
    edges, positions = torch.cat([pair[0] for pair in found], dim=1), torch.cat([pair[1] for pair in found])
    rows = store.features.gather([Wanted(relation.key, name, positions) for name in relation.fields])
    fields = {"edge_index": edges, **dict(zip(relation.fields, rows, strict=True))}
    if EDGE_ID not in fields:
        return fields
    own = fields.pop(EDGE_ID).argsort()
    return {name: values[:, own] if name == "edge_index" else values[own] for name, values in fields.items()}


def _shown(owner: TypeKey) -> str:
    return owner if isinstance(owner, str) else "(" + ", ".join(owner) + ")"
