"""Assembly of batches, PyG's Data or HeteroData, from sampled ids and their features, with the fields that PyG sets.

A finished batch is copied to its device from pinned memory, on a side stream, so that copies overlap computation.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import BaseData
from torch_geometric.typing import TensorFrame

from hoploom import ops
from hoploom.batch import EDGE_WEIGHT, Block, Sampled
from hoploom.errors import ConfigError
from hoploom.ops import InEdges, Reduce
from hoploom.ops.edges import note_grouped, noted
from hoploom.schema import EDGE_ID, FEATURES, HOMOGENEOUS_TYPE, NodeType, Relation, Schema, TypeKey
from hoploom.store import Store, Wanted

Batch: TypeAlias = Data | HeteroData
Fields: TypeAlias = Mapping[TypeKey, Sequence[str]]  # names by node type and relation
NUM_NODES = "num_nodes"
AGGREGATED, IN_DEGREE = "aggregated", "in_degree"
# The fields that a batch has besides the user's own, in the order in which PyG adds them.
ADDED = (
    *("n_id", "e_id", "batch", "num_sampled_nodes", "num_sampled_edges", "input_id"),
    *("edge_label_index", "edge_label", "edge_label_time", "src_index", "dst_pos_index", "dst_neg_index"),
    *("dst_neg_shared", "seed_time", "batch_size"),
)


@dataclass(frozen=True)
class Assembler:
    """Makes batches in the form of the user's data: gathers the rows of a sampled subgraph, and sets all fields."""

    store: Store
    template: Batch  # the attributes that every batch gets unchanged
    field_order: Mapping[TypeKey, tuple[str, ...]]  # the order in which the user's data lists its fields
    pinned: bool = False
    reduce: Reduce | None = None  # if given, layer one's neighbours arrive aggregated so
    degrees: bool = False  # whether batches have every node's in-degree in the graph
    fields: Fields | None = None  # names of fields in batches; None: all. Edge ids always are
    frames: Mapping[TypeKey, Mapping[str, TensorFrame | Tensor]] = field(default_factory=dict)  # not in store
    deleted: Collection[tuple[TypeKey, str]] = ()  # fields that the user has deleted from the data

    def assemble(self, sampled: Sampled) -> Batch:
        """Return a batch with edges, features, ids and the fields of the seeds; fields that are None are left out."""
        schema = self.store.schema
        wanted = self._wanted(sampled)
        rows = dict(zip(wanted, self.gather(list(wanted.values())), strict=True))
        if self.reduce is not None:
            rows |= self._aggregated(sampled)
        fields: dict[TypeKey, dict[str, Any]] = {}
        if self.pinned:
            note_edges(sampled, schema)
        for index, node_type in enumerate(schema.node_types):
            fields[node_type.name] = self._node_fields(sampled, rows, index)
        for index, relation in enumerate(schema.relations):
            fields[relation.key] = self._edge_fields(sampled, rows, relation, index)
        for owner, more in sampled.fields.items():
            fields.setdefault(owner, {}).update(more)
        batch = copy.copy(self.template)
        if sampled.blocks:
            batch.blocks = [self._presented(block, rows, i) for i, block in enumerate(sampled.blocks)]
            batch = of_blocks(batch)
        if schema.homogeneous:  # fields of nodes and edges are in one storage
            fields = {HOMOGENEOUS_TYPE: {name: value for values in fields.values() for name, value in values.items()}}
        for owner, values in fields.items():
            _install(batch._store if schema.homogeneous else batch[owner], values, self.field_order.get(owner, ()))
        self.store.require_whole()
        return batch

    def gather(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """Return one tensor of rows per entry of `wanted`, by one request. Subclasses for a GPU override this."""
        return self.store.features.gather(wanted, empty=ops.empty_pinned if self.pinned else ops.empty)

    def wanted(self, sampled: Sampled) -> list[Wanted]:
        """Return the requests for all rows that `assemble` gathers."""
        wanted = list(self._wanted(sampled).values())
        if self.reduce is not None:
            wanted += [
                Wanted(relation.source, FEATURES, sampled.nodes[self.store.schema.sources[index]])
                for index, relation in enumerate(self.store.schema.relations)
            ]
        return wanted

    def _wanted(self, sampled: Sampled) -> dict[tuple[TypeKey, str], Wanted]:
        wanted = []
        for index, (node_type, nodes) in enumerate(zip(self.store.schema.node_types, sampled.nodes, strict=True)):
            inner = nodes if self.reduce is None else nodes[: _num_inner(sampled, index, node_type.name)]
            wanted += [
                Wanted(node_type.name, field, inner if field == FEATURES else nodes)
                for field in self._chosen(node_type)
            ]
        for relation, edges in zip(self.store.schema.relations, sampled.edges, strict=False):
            if edges is not None:
                wanted += [Wanted(relation.key, field, edges) for field in self._chosen(relation)]
        named: dict[tuple[TypeKey, str], Wanted] = {(want.owner, want.field): want for want in wanted}
        for index, block in enumerate(sampled.blocks):
            for relation in self.store.schema.relations:
                positions = block.e_id[relation.key]  # type: ignore[index]
                for name in self._chosen_of_blocks(relation):
                    if positions is not None:
                        named[relation.key, f"{name}/{index}"] = Wanted(relation.key, name, positions)
                    elif name != EDGE_ID:
                        raise ConfigError(
                            f"fields names {name!r} of {relation.key}, and sample_frontier returned such edges without "
                            "their positions; return these too, or leave the field out"
                        )
        return named

    def _chosen(self, owner: NodeType | Relation) -> Sequence[str]:
        """Return the names of those fields of a node type or relation that batches have."""
        if self.fields is None and not self.deleted:
            return tuple(owner.fields)
        key = owner.name if isinstance(owner, NodeType) else owner.key
        chosen = owner.fields if self.fields is None else self.fields[key]
        return tuple(n for n in owner.fields if n == EDGE_ID or (n in chosen and (key, n) not in self.deleted))

    def _chosen_of_blocks(self, relation: Relation) -> Sequence[str]:
        """Return the names of those fields of a relation that blocks have: those that `fields` names, and edge ids."""
        return [name for name in self._chosen(relation) if self.fields is not None or name == EDGE_ID]

    def _aggregated(self, sampled: Sampled) -> dict[tuple[TypeKey, str], Tensor]:
        """Return, by relation, the features of layer one's source nodes, aggregated at each destination node."""
        schema = self.store.schema
        if any(EDGE_WEIGHT in data for block in sampled.blocks[:1] for data in block.data.values()):
            raise ConfigError("aggregate= adds rows up without the weights that sample_frontier gives; leave it out")
        out: dict[tuple[TypeKey, str], Tensor] = {}
        for index, relation in enumerate(schema.relations):
            nodes = sampled.nodes[schema.sources[index]]
            edge_index = sampled.blocks[0].edge_index if sampled.blocks else sampled.edge_index
            own = edge_index[relation.key if sampled.blocks else index]  # type: ignore[index]
            num_inner = _num_inner(sampled, schema.destinations[index], relation.destination)
            edges = InEdges.of(own, nodes.numel(), num_inner)
            wanted = Wanted(relation.source, FEATURES, nodes)
            out[relation.key, AGGREGATED] = self.aggregate(wanted, edges)
        return out

    def aggregate(self, wanted: Wanted, edges: InEdges) -> Tensor:
        """Return the wanted rows, one per source, aggregated at each destination of `edges`: [destinations, width]."""
        return self.store.aggregate(wanted, edges, self.reduce)  # type: ignore[arg-type]

    def in_degrees(self, relation: Relation, nodes: Tensor) -> Tensor:
        return self.store.in_degrees(relation.key, nodes)

    def _node_fields(self, sampled: Sampled, rows: Mapping[tuple[TypeKey, str], Tensor], index: int) -> dict[str, Any]:
        node_type, nodes = self.store.schema.node_types[index], sampled.nodes[index]
        fields: dict[str, Any] = {name: rows[node_type.name, name] for name in self._chosen(node_type)}
        own = self.field_order.get(node_type.name)
        has_none = not fields and (own is None or bool(node_type.fields))
        if has_none or (own is not None and NUM_NODES in own):
            fields[NUM_NODES] = nodes.numel()
        fields |= self._framed(node_type.name, nodes)
        fields.setdefault("n_id", nodes)  # a field of the user's own goes first, as in PyG
        trees = None if sampled.trees is None else sampled.trees[index]
        num_nodes = None if sampled.num_nodes is None else sampled.num_nodes[index]
        if self.degrees:
            (relation,) = self.store.schema.relations
            fields[IN_DEGREE] = self.in_degrees(relation, nodes)
        return fields | self._set({"batch": trees, "num_sampled_nodes": num_nodes})

    def _edge_fields(
        self, sampled: Sampled, rows: Mapping[tuple[TypeKey, str], Tensor], relation: Relation, index: int
    ) -> dict[str, Any]:
        added = {name: rows[relation.key, name] for name in (AGGREGATED,) if (relation.key, name) in rows}
        if sampled.blocks:
            return added
        edges = sampled.edges[index]
        fields: dict[str, Any] = {"edge_index": sampled.edge_index[index], **added}
        if edges is not None:
            fields.update({name: rows[relation.key, name] for name in self._chosen(relation) if name != EDGE_ID})
            own_ids = rows.get((relation.key, EDGE_ID), edges)
            fields |= self._framed(relation.key, own_ids)
            fields.setdefault("e_id", own_ids)
        num_edges = None if sampled.num_edges is None else sampled.num_edges[index]
        return fields | self._set({"num_sampled_edges": num_edges})

    def _presented(self, block: Block, rows: Mapping[tuple[TypeKey, str], Tensor], index: int) -> Block:
        """Return a block with fields of its edges and the user's own edge ids; without dicts if homogeneous."""
        e_id, data = dict(block.e_id), dict(block.data)  # type: ignore[arg-type]
        weighted = [key for key, given in block.data.items() if EDGE_WEIGHT in given]
        for relation in self.store.schema.relations:
            key, names = relation.key, self._chosen_of_blocks(relation)
            found = {name: rows[key, f"{name}/{index}"] for name in names if (key, f"{name}/{index}") in rows}
            e_id[key] = found.pop(EDGE_ID, e_id[key])
            if found:
                data[key] = found | data.get(key, {})  # data of a hook come first
        if not self.store.schema.homogeneous:
            return replace(block, e_id=e_id, data=data, weighted=weighted)
        columns = (block.edge_index, e_id, block.num_sources, block.num_destinations, data or {"": {}})
        return Block(*(next(iter(own.values())) for own in columns), weighted)  # type: ignore[union-attr, call-arg, arg-type]

    def _framed(self, owner: TypeKey, ids: Tensor) -> dict[str, TensorFrame | Tensor]:
        """Return the rows of `ids` in those fields of `owner` that are not in the store, such as TensorFrames."""
        if owner not in self.frames:
            return {}
        named = {n: frame for n, frame in self.frames[owner].items() if (owner, n) not in self.deleted}
        return {name: frame[ids] for name, frame in named.items() if self.fields is None or name in self.fields[owner]}

    def _set(self, added: dict[str, Any]) -> dict[str, Any]:
        """Return `added`. If the graph is heterogeneous, leave out None values; otherwise None removes a field."""
        keep_none = self.store.schema.homogeneous
        return {name: value for name, value in added.items() if keep_none or value is not None}


def note_edges(sampled: Sampled, schema: Schema) -> None:
    """Record in `ops` which edge indices sampling has grouped by destination, so that layers need not sort them."""
    for block in sampled.blocks:
        for edge_index in block.edge_index.values():
            note_grouped(edge_index, {})
    if sampled.num_nodes is None or sampled.num_edges is None:
        return
    for index, edge_index in enumerate(sampled.edge_index):
        _note_hops(edge_index, sampled.num_nodes[schema.destinations[index]], sampled.num_edges[index])


def note_served_edges(batch: Batch) -> None:
    """Do as `note_edges`, for a batch that a server has sent: the counts by hop say whether its edges are grouped."""
    for edge_index in tensors_in([block.edge_index for block in batch.blocks] if "blocks" in batch else ()):
        note_grouped(edge_index, {})
    for edges in batch.edge_stores:
        nodes = edges if edges._key is None else batch[edges._key[-1]]
        if "edge_index" in edges and "num_sampled_edges" in edges and "num_sampled_nodes" in nodes:
            _note_hops(edges["edge_index"], nodes["num_sampled_nodes"], edges["num_sampled_edges"])


def _note_hops(edge_index: Tensor, num_nodes: Sequence[int], num_edges: Sequence[int]) -> None:
    """Note edges by destination. By hop, there are so many new destinations, and edges to those of the hop before."""
    note_grouped(edge_index, dict(zip(accumulate(num_nodes), accumulate(num_edges), strict=False)))


def _num_inner(sampled: Sampled, index: int, name: str) -> int:
    """Return the number of nodes of a type whose output the first layer computes; these have the lowest local ids."""
    if sampled.blocks:
        return sampled.blocks[0].num_destinations[name]  # type: ignore[index]
    assert sampled.num_nodes is not None
    return sum(sampled.num_nodes[index][:-1])


def _install(storage: Any, values: Mapping[str, Any], order: Sequence[str]) -> None:
    """Set `values` as fields of a PyG storage, in `order`. Change its mapping directly: PyG's setter is slow."""
    mapping = storage._mapping
    found = {**mapping, **values}
    early = [name for name in found if name not in ADDED]
    ordered = {name: found[name] for name in (*order, *early, *ADDED) if name in found}
    mapping.clear()
    mapping.update((name, value) for name, value in ordered.items() if value is not None)


NO_EDGES = (
    "the batch has mode='blocks', so it has no edge_index; give layer i the edges of its block, "
    "conv((x, x[: block.num_destinations]), block.edge_index) for block = batch.blocks[i], or give the loader "
    "mode='subgraph'"
)


class BlockData(Data):  # type: ignore[misc]
    """A batch of blocks of one node type; its `edge_index` raises an error that says what to use."""

    @property
    def edge_index(self) -> Any:
        if "edge_index" in self._store:
            return self._store["edge_index"]
        raise ConfigError(NO_EDGES)


class BlockHeteroData(HeteroData):  # type: ignore[misc]
    """A batch of blocks of several node types; its `edge_index_dict` raises an error that says what to use."""

    def collect(self, key: str, allow_empty: bool = False) -> Mapping[Any, Any]:
        if key == "edge_index" and not any(key in storage for storage in self.edge_stores):
            raise ConfigError(NO_EDGES)
        found: Mapping[Any, Any] = super().collect(key, allow_empty)
        return found


def of_blocks(batch: Batch) -> Batch:
    """Return the batch with its class changed, so that reading its missing edge_index raises an error about blocks."""
    kinds = {Data: BlockData, HeteroData: BlockHeteroData}
    object.__setattr__(batch, "__class__", kinds.get(type(batch), type(batch)))
    return batch


def spread_shared(batch: Batch) -> None:
    """Set `dst_neg_index` of links that share `dst_neg_shared`: a view, which copies and messages would make large."""
    for storage in batch.node_stores:
        if "dst_neg_shared" in storage:
            rows = storage["dst_neg_shared"].expand(storage["dst_pos_index"].numel(), -1)
            storage._mapping["dst_neg_index"] = rows.squeeze(-1)


# --- onto a device --------------------------------------------------------------------------


class Arriving(NamedTuple):
    """A batch that a side stream is still making. `receive` makes the current stream wait, and returns the batch."""

    receive: Callable[[], Any]
    batch: Any  # kept until then, as the side stream uses its memory


def is_there(device: torch.device | None, placed: torch.device) -> bool:
    """Return whether `device` is the GPU `placed`, on which the batches are made; None stands for that GPU."""
    if device is None or device == placed:
        return True
    return device.type == placed.type == "cuda" and device.index is None and torch.cuda.current_device() == placed.index


def moved_to(device: torch.device | None, batch: Batch) -> Batch:
    """Start to copy a batch to a device; return it. Edges that sampling has grouped are not sorted there again."""
    known = [noted(tensor) for tensor in tensors_in(batch)]
    moved: Batch = batch.to(device, non_blocking=True)
    for tensor, note in zip(tensors_in(moved), known, strict=True):
        if note is not None:
            note_grouped(tensor, note)
    return moved


class Mover:
    """Copies batches to a device, on one side stream."""

    def __init__(self, device: torch.device | str | None) -> None:
        try:
            self.device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"device is {device!r:.80}; give 'cpu', 'cuda', or 'cuda:0' and so on") from error
        if self.device is not None and self.device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device is {self.device}; batches go to the CPU or to a CUDA device")
        self.is_cuda = self.device is not None and self.device.type == "cuda"
        if self.is_cuda and not torch.cuda.is_available():
            raise ConfigError(f"device is {self.device}, but torch sees no CUDA device; leave device out")
        self._stream = torch.cuda.Stream(self.device) if self.is_cuda else None  # type: ignore[no-untyped-call]

    def send(self, batch: Batch | Arriving) -> Batch | Arriving:
        """Start to copy a batch to the device, and return it as Arriving; return it unchanged if no copy is needed."""
        if self._stream is None or isinstance(batch, Arriving):
            return batch
        with torch.cuda.stream(self._stream):
            moved = moved_to(self.device, batch)  # torch's cache keeps pinned memory until it is copied
            return Arriving(partial(self._receive, moved, self._stream.record_event()), moved)

    def _receive(self, batch: Batch, copied: Any) -> Batch:
        """Make the current stream wait until `batch` is copied; return `batch`."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(copied)

        for tensor in tensors_in(batch):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        return batch


def received(sent: Batch | Arriving) -> Batch:
    """Return the batch in the result of `send`, for use on the calling thread's current stream."""
    return sent.receive() if isinstance(sent, Arriving) else sent


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor of a value, such as a batch."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)
    elif type(value).__module__.startswith("torch_frame.") or (is_dataclass(value) and not isinstance(value, type)):
        yield from tensors_in(vars(value))
    elif isinstance(value, BaseData):
        for storage in value.stores:
            yield from tensors_in(storage._mapping)
