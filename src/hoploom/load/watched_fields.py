"""Follows fields of the user's PyG data that are replaced after a loader was made.

As in PyG, the next loop over the loader has the new rows. Edges, weights and times were sorted when the loader was made
and cannot follow: a new tensor of other values raises an error, and a write into the old one is not seen.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.typing import TensorFrame

from hoploom.errors import ConfigError
from hoploom.schema import DTYPE_NAMES, HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, Owner
from hoploom.store.base import Table
from hoploom.store.from_pyg import PygGraph


@dataclass
class _Held:
    """A field of the user's data, as the loader last read it."""

    storage: Any  # the user's
    carried: Any  # its twin in what every batch carries unchanged
    owner: Owner | None  # None: of the graph as a whole
    name: str
    rows: Tensor
    version: int  # of the rows, where the loader had to copy them


class WatchedFields:
    """The watched fields of one loader's data; a store has none."""

    def __init__(self, data: Any, graph: PygGraph) -> None:
        self._store, self._held, self._deleted = graph.store, list[_Held](), graph.deleted
        self._framed: list[
            tuple[Owner, Any, dict[str, TensorFrame]]
        ] = []  # the user's storages, with what batches have
        self._frames = graph.frames
        self._nodes: list[tuple[str, Any, set[str], set[str]]] = []  # storages of nodes, names they had, names added
        of_nodes = [(HOMOGENEOUS_TYPE, data._store)] if isinstance(data, Data) else data.node_items()
        self._nodes = [(name, storage, set(storage.keys()), set()) for name, storage in of_nodes]
        is_one_type = isinstance(data, Data)
        owners = [None] if is_one_type else [None, *data.node_types, *data.edge_types]
        tables = self._tables()
        for owner, storage, carried in zip(owners, data.stores, graph.template.stores, strict=True):
            of = (HOMOGENEOUS_TYPE, HOMOGENEOUS_RELATION) if is_one_type else (owner,)
            self._framed += [(key, storage, graph.frames[key]) for key in of if key in graph.frames]
            for name, rows in storage.items():
                if is_one_type:
                    owner = next((o for o in (HOMOGENEOUS_TYPE, HOMOGENEOUS_RELATION) if (o, name) in tables), None)
                if _is_dense(rows):
                    self._held.append(_Held(storage, carried, owner, name, rows, _version(rows)))

    def renew(self) -> None:
        """Take the fields that were replaced or added to nodes; raise ConfigError for one that cannot be."""
        for name, storage, known, added in self._nodes:
            rows_of = self._frames.setdefault(name, {}) if added or set(storage.keys()) - known else {}
            count = self._store.schema.node_type(name).num_nodes
            for field in added - set(storage.keys()):
                added.discard(field)
                del rows_of[field]
            for field, rows in storage.items():
                if field not in known and _is_dense(rows) and rows.shape[:1] == (count,):
                    added.add(field)
                    rows_of[field] = rows
                elif field in added:
                    raise ConfigError(
                        f"{field} of the data was replaced by another size or type; make the loader again"
                    )
        for owner, storage, frames in self._framed:
            for name, old in frames.items():
                self._note(owner, name, storage)
                frames[name] = now = storage.get(name, old)
                if not isinstance(now, TensorFrame) or len(now) != len(old):
                    raise ConfigError(f"{name} of the data was replaced by another size or type; make the loader again")
        for held in self._held:
            now = held.storage.get(held.name)
            if held.owner is not None:
                self._note(held.owner, held.name, held.storage)
            if isinstance(now, Tensor) and not _is_dense(now) and held.owner is not None:
                raise ConfigError(
                    f"{held.name} of the data was replaced by a {now.layout} tensor after the loader was made; give "
                    f"it dense rows: data.{held.name} = rows.to_dense()"
                )
            if not _is_dense(now) or now.device != held.rows.device:  # deleted, or moved elsewhere
                continue
            if now is held.rows and _version(now) == held.version:
                continue
            if not self._is_sorted(held):
                self._take(held, now)
            elif now is not held.rows and not _are_same(now, held.rows):
                raise ConfigError(
                    f"{held.name} of the data was replaced after the loader was made, which has sorted the old one; "
                    "make the loader again"
                )
            held.rows, held.version = now, _version(now)

    def _note(self, owner: Owner, name: str, storage: Any) -> None:
        """Note whether the data still has a field: batches have it no more if it was deleted."""
        (self._deleted.discard if name in storage else self._deleted.add)((owner, name))

    def _tables(self) -> dict[tuple[Owner, str], Table]:
        (part,) = self._store.parts
        assert isinstance(part.tables, dict)  # of this loader's own store
        return part.tables

    def _is_sorted(self, held: _Held) -> bool:
        schema = self._store.schema
        of_edges = isinstance(held.owner, tuple)
        return held.name in ("edge_index", schema.time) or (of_edges and held.name == schema.weight)

    def _take(self, held: _Held, now: Tensor) -> None:
        tables = self._tables()
        old = None if held.owner is None else tables.get((held.owner, held.name))
        if held.owner is None or old is None:
            held.carried[held.name] = now
            return
        if now.shape[:1] != old.rows.shape[:1] or now.dtype not in DTYPE_NAMES:
            raise ConfigError(
                f"{held.name} of the data was replaced by {now.dtype} {tuple(now.shape)} after the loader was made, "
                f"which had {old.rows.shape[0]} rows; make the loader again"
            )
        tables[held.owner, held.name] = Table(now.detach().contiguous(), by_edge_id=old.by_edge_id)


def _is_dense(rows: Any) -> bool:
    return isinstance(rows, Tensor) and rows.layout == torch.strided


def _version(rows: Tensor) -> int:
    """Return how often rows were written, if the loader had to copy them; else 0."""
    return 0 if rows.is_contiguous() or rows.is_inference() else rows._version


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Compare value by value; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool((one.eq(other) | (one.ne(one) & other.ne(other))).all())
