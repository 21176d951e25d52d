"""Batches made by whoever holds the graph: what a loader asks for, as plain JSON and a few tensors.

A batch's own seeds, its place in the epoch's randomness and the loader's options are all that any server needs to
make it. Functions do not travel: a transform runs where the loader is, frontier hooks are refused.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NegativeSampling

from hoploom.errors import ConfigError
from hoploom.load.assemble import Batch
from hoploom.load.loader import MakeBatch
from hoploom.load.maker import LinkMaker, NodeMaker
from hoploom.ops import Reduce
from hoploom.sample.options import Sampling
from hoploom.schema import DTYPE_NAMES, Owner


@dataclass(frozen=True)
class Negatives:
    """Which negatives go with links. Weights, one number per node, are named by their hash."""

    mode: str  # binary or triplet
    amount: float
    strict: bool = False
    src_weight: str | None = None
    dst_weight: str | None = None

    @property
    def weights(self) -> list[str]:
        return [name for name in (self.src_weight, self.dst_weight) if name is not None]


@dataclass(frozen=True)
class Description:
    """What all batches of a loader have in common."""

    owner: Owner  # the seeds' node type, or the links' relation
    sampling: Sampling
    aggregate: Reduce | None = None
    degrees: bool = False
    negatives: Negatives | None = None

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return asdict(self)


class Asked(NamedTuple):
    """One batch: everything that decides it, besides the store."""

    description: Description
    seeds: Mapping[str, Tensor]  # "nodes", or "sources" and "destinations"; beside them "times" and "labels", if any
    first: int  # the place of the first seed in its step
    key: int
    weights: Mapping[str, Tensor] = {}  # of negatives, by hash

    def header(self, attached: list[str]) -> dict[str, Any]:
        """The request but its tensors: the seeds, and the weights attached."""
        names = {"seeds": list(self.seeds), "weights": attached}
        return {"description": self.description.plain, **names, "first": self.first, "key": self.key}

    def tensors(self, attached: list[str]) -> list[Tensor]:
        return [*self.seeds.values(), *(self.weights[name] for name in attached)]


class Elsewhere(Protocol):
    """Who makes batches for a store that has no graph at hand."""

    @property
    def num_servers(self) -> int: ...

    def make(self, asked: Asked, *, pinned: bool) -> Batch: ...


def placed(maker: NodeMaker | LinkMaker) -> MakeBatch:
    """How a maker's batches are made: by itself, or by the servers of its store."""
    elsewhere = maker.assembler.store.elsewhere
    return maker.make if elsewhere is None else _asking(maker, elsewhere).make


@dataclass(frozen=True)
class AskingMaker:
    """Batches of servers, with what stays here put in place."""

    elsewhere: Elsewhere
    description: Description
    columns: Mapping[str, Tensor]  # one entry per seed of the loader
    input_id: Tensor | None
    transform: Callable[[Batch], Any] | None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    pinned: bool = False

    def make(self, indices: Tensor, first: int, key: int) -> Batch:
        """The batch of these seeds; `first` is the place of the first one in its step."""
        seeds = {name: column[indices] for name, column in self.columns.items()}
        batch = self.elsewhere.make(Asked(self.description, seeds, first, key, self.weights), pinned=self.pinned)
        storage = batch._store if isinstance(batch, Data) else batch[self.description.owner]
        storage._mapping["input_id"] = indices if self.input_id is None else self.input_id[indices]
        return batch if self.transform is None else self.transform(batch)


def _asking(maker: NodeMaker | LinkMaker, elsewhere: Elsewhere) -> AskingMaker:
    if maker.sampler.sample_frontier is not None:
        raise ConfigError(
            "sample_frontier is a function, which cannot go to the servers; use connect(..., made='here'), "
            "which makes batches in this process"
        )
    weights: dict[str, Tensor] = {}
    negatives = None
    if isinstance(maker, NodeMaker):
        seeds = maker.seeds
        owner: Owner = seeds.node_type
        columns, input_id = {"nodes": seeds.nodes, "times": seeds.times}, seeds.input_id
    else:
        links = maker.links
        owner, input_id = links.key, links.input_id
        sources, destinations = links.ends
        columns = {"sources": sources, "destinations": destinations, "labels": links.labels, "times": links.times}
        negatives = _named(links.task.negatives, links.task.strict, weights)
    added = maker.assembler
    description = Description(owner, maker.sampler.sampling, added.reduce, added.degrees, negatives)
    given = {name: column for name, column in columns.items() if column is not None}
    return AskingMaker(elsewhere, description, given, input_id, maker.transform, weights, added.pinned)


def _named(negatives: NegativeSampling | None, strict: bool, weights: dict[str, Tensor]) -> Negatives | None:
    """Negatives with their weights by name; the weights go into `weights`."""
    if negatives is None:
        return None
    names: list[str | None] = []
    for weight in (negatives.src_weight, negatives.dst_weight):
        names.append(None if weight is None else weight_hash(weight))
        if weight is not None:
            weights[names[-1] or ""] = weight
    return Negatives(negatives.mode.value, negatives.amount, strict, *names)


def weight_hash(weight: Tensor) -> str:
    """The name of weights: a digest of what they are."""
    digest = hashlib.sha256(f"{DTYPE_NAMES[weight.dtype]} {tuple(weight.shape)} ".encode())
    digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
