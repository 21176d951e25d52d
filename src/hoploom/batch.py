"""Results of sampling before features are added: subgraphs and blocks, by node type and relation."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hoploom.schema import RelationName, TypeKey

EDGE_WEIGHT = "weight"  # the name of the data of a frontier hook that layers take as weights


@dataclass(frozen=True)
class Seeds:
    """The seeds of a batch, by node type. In disjoint sampling, every seed has its own subgraph, a "tree"."""

    nodes: tuple[Tensor | None, ...]  # per type: [n] int64
    trees: tuple[Tensor | None, ...]  # per type: [n] int64 tree numbers, disjoint sampling only
    times: Tensor | None = None  # [num_trees] int64: the time of each tree's seed
    first_tree: int = 0  # the lowest tree number
    link_of: Tensor | None = None  # [num_trees] int64: the index of each tree's link in the batch; None: its own index
    fields: Mapping[TypeKey, Mapping[str, Any]] = field(default_factory=dict)  # copied to the batch
    excluded: tuple[Tensor | None, ...] = ()  # per relation: [n] int64 ascending positions, never sampled; (): none


@dataclass
class Sampled:
    """A sampled subgraph in local ids."""

    nodes: list[Tensor]  # per type: [n] int64 node ids, seeds first
    trees: list[Tensor] | None  # per type: [n] int64 tree numbers from 0, disjoint sampling only
    edge_index: list[Tensor]  # per relation: [2, e] int64 local ids
    edges: list[Tensor | None]  # per relation: [e] int64 positions in the store; None if unknown
    num_nodes: list[list[int]] | None  # per type and hop
    num_edges: list[list[int]] | None  # per relation and hop
    blocks: list["Block"] = field(default_factory=list)
    fields: Mapping[TypeKey, Mapping[str, Any]] = field(default_factory=dict)  # copied to the batch


@dataclass(frozen=True)
class Block:
    """One layer of a message-flow graph. Its sources begin with its destinations.

    The fields are tensors and ints in a homogeneous graph, and dictionaries by relation or node type in a
    heterogeneous one.
    """

    edge_index: Tensor | Mapping[RelationName, Tensor]  # [2, e]: local source, local destination
    e_id: Tensor | Mapping[RelationName, Tensor | None] | None  # None if a frontier hook returned no positions
    num_sources: int | Mapping[str, int]
    num_destinations: int | Mapping[str, int]
    data: Mapping[Any, Any] = field(default_factory=dict)  # by name: [e, ...], fields of edges and a hook's tensors
    weighted: Collection[RelationName] = ()  # those whose data of the name EDGE_WEIGHT are a hook's

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Block":
        """Return the block on another device."""
        return self.apply(lambda value: value.to(device, non_blocking=non_blocking))

    def apply(self, function: Callable[[Tensor], Tensor]) -> "Block":
        """Return the block with a function applied to every tensor."""

        def applied(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: applied(entry) for key, entry in value.items()}
            return None if value is None else function(value)

        columns = {name: applied(getattr(self, name)) for name in ("edge_index", "e_id", "data")}
        return replace(self, **columns)
