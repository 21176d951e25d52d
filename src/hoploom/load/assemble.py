"""Sampled ids join their features: PyG's own Data or HeteroData, field by field as PyG fills them."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch_geometric.data import Data, HeteroData

from hoploom.batch import Block, Sampled
from hoploom.schema import EDGE_ID, Owner, Schema
from hoploom.store import Store, Wanted

Batch = Data | HeteroData


@dataclass(frozen=True)
class Assembler:
    """Turns what was sampled from a store into batches that look like the user's own data."""

    store: Store
    template: Batch  # what every batch carries unchanged
    field_order: Mapping[Owner, tuple[str, ...]]  # the order in which the user's data lists its fields
    pinned: bool = False

    def assemble(self, sampled: Sampled) -> Batch:
        """A batch with edges, features and ids."""
        batch = copy.copy(self.template)
        rows = self._gather(sampled)
        self._fill_nodes(batch, sampled, rows)
        if sampled.blocks:
            batch.blocks = [
                _presented(block, self.store.schema, rows, i) for i, block in enumerate(sampled.blocks)
            ]
        else:
            self._fill_edges(batch, sampled, rows)
        for owner, names in self.field_order.items():
            _reorder(self._storage(batch, owner), names)
        return batch

    def _storage(self, batch: Batch, owner: Owner) -> Any:
        return batch._store if self.store.schema.homogeneous else batch[owner]

    def _gather(self, sampled: Sampled) -> dict[tuple[Owner, str], Tensor]:
        """All rows of the batch in one request."""
        wanted = []
        for node_type, nodes in zip(self.store.schema.node_types, sampled.nodes, strict=True):
            wanted += [Wanted(node_type.name, field, nodes) for field in node_type.fields]
        for relation, edges in zip(self.store.schema.relations, sampled.edges, strict=False):
            if edges is not None:
                wanted += [Wanted(relation.key, field, edges) for field in relation.fields]
        named: list[tuple[Owner, str]] = [(want.owner, want.field) for want in wanted]
        for index, block in enumerate(sampled.blocks):
            for relation in self.store.schema.relations:
                known = EDGE_ID in relation.fields and isinstance(block.e_id, Mapping)
                if known:
                    wanted.append(Wanted(relation.key, EDGE_ID, block.e_id[relation.key]))  # type: ignore[index]
                    named.append((relation.key, f"{EDGE_ID}/{index}"))
        return dict(zip(named, self.store.features.gather(wanted, pinned=self.pinned), strict=True))

    def _fill_nodes(self, batch: Batch, sampled: Sampled, rows: Mapping[tuple[Owner, str], Tensor]) -> None:
        for index, node_type in enumerate(self.store.schema.node_types):
            storage = self._storage(batch, node_type.name)
            for field in node_type.fields:
                storage[field] = rows[node_type.name, field]
            if not node_type.fields or "num_nodes" in storage:
                storage["num_nodes"] = sampled.nodes[index].numel()
            storage["n_id"] = sampled.nodes[index]
            if sampled.trees is not None:
                storage["batch"] = sampled.trees[index]
            if sampled.num_nodes is not None:
                storage["num_sampled_nodes"] = sampled.num_nodes[index]

    def _fill_edges(self, batch: Batch, sampled: Sampled, rows: Mapping[tuple[Owner, str], Tensor]) -> None:
        for index, relation in enumerate(self.store.schema.relations):
            storage, edges = self._storage(batch, relation.key), sampled.edges[index]
            storage["edge_index"] = sampled.edge_index[index]
            if edges is not None:
                for field in relation.fields:
                    if field != EDGE_ID:
                        storage[field] = rows[relation.key, field]
                storage["e_id"] = rows.get((relation.key, EDGE_ID), edges)
            if sampled.num_edges is not None:
                storage["num_sampled_edges"] = sampled.num_edges[index]


def _reorder(storage: Any, names: tuple[str, ...]) -> None:
    mapping = storage._mapping
    ordered = {name: mapping[name] for name in names if name in mapping}
    ordered.update(mapping)
    storage._mapping = ordered


def _presented(block: Block, schema: Schema, rows: Mapping[tuple[Owner, str], Tensor], index: int) -> Block:
    """A block as the user sees it: his own edge ids; plain tensors for a homogeneous graph."""
    e_id = {
        key: rows.get((key, f"{EDGE_ID}/{index}"), positions)
        for key, positions in block.e_id.items()  # type: ignore[union-attr]
    }
    if not schema.homogeneous:
        return Block(block.edge_index, e_id, block.num_sources, block.num_destinations)
    parts = (block.edge_index, e_id, block.num_sources, block.num_destinations)
    return Block(*(next(iter(part.values())) for part in parts))  # type: ignore[union-attr, arg-type]
