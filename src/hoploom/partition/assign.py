"""The part of every node: by hash, by range, by a streaming partitioner in the core, or by METIS.

All types are partitioned together. `hash` and `range` look at ids alone and balance nodes exactly. `stream` reads the
edges from where they lie, a few times, with some tens of bytes per node in memory, and balances nodes of every type,
in-edges and seeds; it gives up a little of METIS's cut. `metis` holds every edge in memory, and both directions.
"""

import os
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoploom import keys, ops
from hoploom.config.values import nearest
from hoploom.errors import ConfigError
from hoploom.load.presample import read_seeds
from hoploom.ops import PartitionRule, RelationLists, Topology
from hoploom.ops.partition import MOST_NODES, MOST_PARTS
from hoploom.partition.metis import metis_parts
from hoploom.partition.trial import named_seeds
from hoploom.schema import RelationName
from hoploom.store import Store, open_store
from hoploom.store.edges import covers

METHODS = ("hash", "range", "stream", "metis")
KEY = 0x7061727473  # what draws derive from: the same parts every time
PASSES = 5  # of refinement, at most


def assign(
    store: Store | str | Path,
    num_parts: int,
    method: str = "stream",
    *,
    seeds: Any = None,
    passes: int = PASSES,
    imbalance: float = 0.05,
    threads: int | None = None,
) -> Mapping[str, Tensor]:
    """The part of every node, by type: [num_nodes] int16.

    `seeds` (as for NeighborLoader, or ids by type; None: none), `passes` and `imbalance` are for `stream` and `metis`:
    a part holds no more than `1 + imbalance` times the mean of each type's nodes, of in-edges and of seeds, as far as
    single nodes allow. Give a path where memory is short: pages of the store's files are let go once they were read.

    >>> parts = assign(store, 4, seeds="train")
    >>> sum(edge_cut(store, parts).values())
    """
    mapped = not isinstance(store, Store)
    store = store if isinstance(store, Store) else open_store(store)
    _check(store, num_parts, method, passes, imbalance)
    if method == "hash":
        return _by_hash(store, num_parts)
    if method == "range":
        return _by_range(store, num_parts)
    rule = PartitionRule(num_parts, passes, imbalance, _threads(threads), KEY)
    topology, is_seed = _topology(store, mapped=mapped), _marks(store, seeds)
    if num_parts == 1:
        parts = torch.zeros(topology.bounds[-1], dtype=torch.int16)
    elif method == "stream":
        parts = ops.assign_parts(topology, is_seed, rule)
    else:
        parts = metis_parts(topology, is_seed, rule)
    return _by_type(store, parts)


def edge_cut(store: Store, parts: Mapping[str, Tensor], *, threads: int | None = None) -> Mapping[RelationName, int]:
    """How many edges of each relation lead from one part to another; reads the edges once, where they lie."""
    for node_type in store.schema.node_types:
        if node_type.name not in parts or parts[node_type.name].shape != (node_type.num_nodes,):
            raise ConfigError(
                f"parts of {node_type.name!r}: one number for each of {node_type.num_nodes} nodes is needed"
            )
    together = torch.cat([parts[node_type.name].to(torch.int16) for node_type in store.schema.node_types])
    cut = ops.count_cut(_topology(store), together, _threads(threads))
    return {relation.key: int(count) for relation, count in zip(store.schema.relations, cut, strict=True)}


def _check(store: Store, num_parts: int, method: str, passes: int, imbalance: float) -> None:
    if method not in METHODS:
        alike = nearest(str(method), METHODS)
        hint = f"did you mean {alike!r}? " if alike else ""
        raise ConfigError(f"unknown method {method!r}; {hint}There are {', '.join(METHODS)}")
    num_nodes = _bounds(store)[-1]
    if not 1 <= num_parts <= MOST_PARTS:
        raise ConfigError(f"num_parts is {num_parts}; give 1 to {MOST_PARTS}")
    if num_parts > num_nodes:
        raise ConfigError(
            f"num_parts is {num_parts} for {num_nodes} nodes of all types; give each part a node at least"
        )
    if passes < 0:
        raise ConfigError(f"passes is {passes}; give 0 or more, e.g. {PASSES}")
    if not 0 <= imbalance < float("inf"):
        raise ConfigError(f"imbalance is {imbalance}; give a share, e.g. 0.05 for 5 % above the mean")
    if num_nodes > MOST_NODES and method in ("stream", "metis"):
        raise ConfigError(f"{num_nodes} nodes are too many for method {method!r}; use 'hash' or 'range'")


def _threads(threads: int | None) -> int:
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}; give 1 or more")
    return min(threads or len(os.sched_getaffinity(0)), 64)


def _bounds(store: Store) -> list[int]:
    """The first id of every type where ids count through all of them, and the end."""
    return list(accumulate((t.num_nodes for t in store.schema.node_types), initial=0))


# --- by id alone ---------------------------------------------------------------------------------


def _by_hash(store: Store, num_parts: int) -> Mapping[str, Tensor]:
    """A keyed permutation dealt out like cards, on from type to type: nodes differ by one at most."""
    parts = {}
    for number, (node_type, first) in enumerate(zip(store.schema.node_types, _bounds(store), strict=False)):
        order = ops.permute(keys.mix(KEY, number), node_type.num_nodes, 0, node_type.num_nodes)
        parts[node_type.name] = order.add_(first % num_parts).remainder_(num_parts).to(torch.int16)
    return parts


def _by_range(store: Store, num_parts: int) -> Mapping[str, Tensor]:
    """Equal ranges of every type. Types with fewer nodes than parts are cut as if they were one type."""
    small = sum(t.num_nodes for t in store.schema.node_types if t.num_nodes < num_parts)
    parts, before = {}, 0
    for node_type in store.schema.node_types:
        is_small = node_type.num_nodes < num_parts
        ids = torch.arange(node_type.num_nodes) + (before if is_small else 0)
        total = small if is_small else node_type.num_nodes
        parts[node_type.name] = ids.mul_(num_parts).div_(max(1, total), rounding_mode="floor").to(torch.int16)
        before += node_type.num_nodes if is_small else 0
    return parts


# --- by the edges --------------------------------------------------------------------------------


def _topology(store: Store, *, mapped: bool = False) -> Topology:
    schema = store.schema
    if not store.parts or not covers(schema, store.parts):
        raise ConfigError("not all edges are in reach of this process; open the whole store")
    relations = [
        RelationLists(
            " ".join(relation.key), schema.sources[i], schema.destinations[i], [part.lists[i] for part in store.parts]
        )
        for i, relation in enumerate(schema.relations)
    ]
    return Topology(_bounds(store), relations, mapped)


def _marks(store: Store, seeds: Any) -> Tensor | None:
    """[nodes of all types] bool: which are seeds; None if none are given."""
    if seeds is None:
        return None
    bounds = _bounds(store)
    marks = torch.zeros(bounds[-1], dtype=torch.bool)
    by_type = list(seeds.items()) if isinstance(seeds, Mapping) else [seeds]
    for given in by_type:
        name, ids = read_seeds(store, named_seeds(store.schema, given))
        marks[ids + bounds[store.schema.type_index[name]]] = True
    return marks


def _by_type(store: Store, parts: Tensor) -> Mapping[str, Tensor]:
    spans = zip(store.schema.node_types, pairwise(_bounds(store)), strict=True)
    return {node_type.name: parts[begin:end] for node_type, (begin, end) in spans}
