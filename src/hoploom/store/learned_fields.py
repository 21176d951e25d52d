"""Learned rows as the features of a node type: loaders and `store[name].x` read them as any other field."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch
from torch import Tensor

from hoploom import ops
from hoploom.ops import Empty
from hoploom.schema import FEATURES, Schema
from hoploom.store.base import FeatureStore, Triple, read_wanted

Join = Literal["cat", "add"]  # how learned rows join features: after them, or added


class LearnedRows(Protocol):
    """The protocol of hoploom.Embedding, which has the learned rows of a node type."""

    @property
    def node_type(self) -> str: ...
    @property
    def rows(self) -> Tensor: ...  # of all nodes
    @property
    def join(self) -> Join | None: ...  # None: the type has no other features
    def read_alone(self, ids: Tensor) -> Tensor: ...
    def attach(self, batch: object) -> None: ...
    def attach_nothing(self) -> None: ...  # for the other ranks, if they attach rows to one more batch
    def all_rows(
        self, share: Callable[[int, Tensor, int], Tensor], world_size: int
    ) -> AbstractContextManager[None]: ...


def joined_rows(features: Tensor, rows: Tensor, join: Join) -> Tensor:
    """Return learned rows joined to features of the same nodes, as float32."""
    return torch.cat([features, rows], dim=1) if join == "cat" else features + rows


class LearnedFeatures:
    """A FeatureStore whose field `x` of one node type has learned rows; it asks `features` for everything else."""

    def __init__(self, schema: Schema, features: FeatureStore, learned: LearnedRows) -> None:
        self.schema, self._features, self._learned = schema, features, learned

    def gather(self, wanted: Sequence[Triple], *, empty: Empty = ops.empty) -> list[Tensor]:
        wanted, join = read_wanted(self.schema, wanted), self._learned.join
        are_learned = [(want.owner, want.field) == (self._learned.node_type, FEATURES) for want in wanted]
        asked = [want for want, own in zip(wanted, are_learned, strict=True) if join is not None or not own]
        found, outs = iter(self._features.gather(asked, empty=empty) if asked else ()), []
        for want, own in zip(wanted, are_learned, strict=True):
            rows = self._learned.read_alone(want.ids) if own else next(found)
            outs.append(joined_rows(next(found).float(), rows, join) if own and join is not None else rows)
        return outs
