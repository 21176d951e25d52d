"""The part of every node: by hash, by range, by a streaming partitioner in the core, by frequency, or by METIS.

All types are partitioned together. `hash` and `range` look at ids alone and balance nodes exactly. `stream` reads the
edges from where they lie, a few times, with some tens of bytes per node in memory, and balances nodes of every type,
in-edges and seeds; it gives up a little of METIS's cut. `metis` holds every edge in memory, and both directions.
`frequency` samples as training will, see frequency.py.
"""

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hoploom import keys, ops
from hoploom.config.values import as_int, as_number, nearest
from hoploom.errors import ConfigError
from hoploom.load.presample import read_seeds
from hoploom.ops import PartitionRule, RelationLists, Topology
from hoploom.ops.partition import MOST_NODES, MOST_PARTS
from hoploom.partition.bounded_store import BoundedStore, opened_parts
from hoploom.partition.frequency import frequency_parts
from hoploom.partition.metis import metis_parts
from hoploom.partition.store_files import StoreFiles
from hoploom.sample.hops import Fanouts
from hoploom.schema import RelationName, Schema
from hoploom.store import Store, open_store
from hoploom.system import num_cores

METHODS = ("hash", "range", "stream", "frequency", "metis")
KEY = 0x7061727473  # what draws derive from: the same parts every time
MEMORY = 4 << 30
PASSES = 5  # of refinement, at most
USUAL_SPLIT = "train"


def assign(
    store: Store | StoreFiles | str | Path,
    num_parts: int,
    method: str = "stream",
    *,
    seeds: Any = None,
    passes: int = PASSES,
    imbalance: float = 0.05,
    threads: int | None = None,
    fanouts: Fanouts | None = None,
    memory: int = MEMORY,
) -> Mapping[str, Tensor]:
    """The part of every node, by type: [num_nodes] int16.

    `seeds` (as for NeighborLoader, or ids by type; None: none), `passes` and `imbalance` are for `stream` and `metis`:
    a part holds no more than `1 + imbalance` times the mean of each type's nodes, of in-edges and of seeds, as far as
    single nodes allow. `frequency` needs `seeds` and `fanouts`, and samples within `memory` bytes. Give a path where
    memory is short: pages of the store's files are let go once they were read.

    >>> parts = assign(store, 4, seeds="train")
    >>> sum(edge_cut(store, parts).values())
    """
    path, mapped = store, not isinstance(store, Store)
    store = store if isinstance(store, Store | StoreFiles) else open_store(store)
    _check(store.schema, num_parts, method, passes, imbalance)
    if method in ("hash", "range"):
        by_id = parts_by_hash if method == "hash" else parts_by_range
        return {t.name: by_id(store.schema, i, num_parts) for i, t in enumerate(store.schema.node_types)}
    if method == "frequency":
        assert not isinstance(store, StoreFiles)
        assert not isinstance(path, StoreFiles)
        if seeds is None or fanouts is None:
            raise ConfigError(
                "method 'frequency' samples batches of the seeds, and there are no seeds or no fanouts; give both"
            )
        return frequency_parts(BoundedStore(path, memory), num_parts, _seeds_by_type(store, seeds), fanouts)
    rule = PartitionRule(num_parts, passes, imbalance, _threads(threads), KEY)
    is_seed = _marks(store, seeds)
    topology = store.topology() if isinstance(store, StoreFiles) else topology_of(store, mapped=mapped)
    if num_parts == 1:
        parts = torch.zeros(topology.bounds[-1], dtype=torch.int16)
    elif method == "stream":
        parts = ops.assign_parts(topology, is_seed, rule)
    else:
        parts = metis_parts(topology, is_seed, rule)
    return dict(zip(store.schema.type_index, parts.tensor_split(topology.bounds[1:-1]), strict=True))


def edge_cut(store: Store, parts: Mapping[str, Tensor], *, threads: int | None = None) -> Mapping[RelationName, int]:
    """How many edges of each relation lead from one part to another; reads the edges once, where they lie."""
    for node_type in store.schema.node_types:
        if node_type.name not in parts or parts[node_type.name].shape != (node_type.num_nodes,):
            raise ConfigError(f"parts of {node_type.name!r}: give one number for each of {node_type.num_nodes} nodes")
    together = torch.cat([parts[node_type.name].to(torch.int16) for node_type in store.schema.node_types])
    cut = ops.count_cut(topology_of(store), together, _threads(threads))
    return {relation.key: int(count) for relation, count in zip(store.schema.relations, cut, strict=True)}


def _check(schema: Schema, num_parts: int, method: str, passes: int, imbalance: float) -> None:
    if method not in METHODS:
        near = nearest(str(method), METHODS)
        hint = f"did you mean {near!r}? " if near else ""
        raise ConfigError(f"unknown method {method!r}; {hint}There are {', '.join(METHODS)}")
    num_nodes, num_parts = bounds_of(schema)[-1], as_int("num_parts", num_parts, 1, f"give 1 to {MOST_PARTS}")
    if num_parts > min(MOST_PARTS, num_nodes):
        raise ConfigError(f"num_parts is {num_parts} for {num_nodes} nodes; give 1 to {min(MOST_PARTS, num_nodes)}")
    as_int("passes", passes, 1, f"give 1 or more, e.g. {PASSES}")
    as_number("imbalance", imbalance, "give a share, e.g. 0.05 for 5 % above the mean")
    if num_nodes > MOST_NODES and method in ("stream", "metis"):
        raise ConfigError(f"{num_nodes} nodes are too many for method {method!r}; use 'hash' or 'range'")


def _threads(threads: int | None) -> int:
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}; give 1 or more")
    return min(threads or num_cores(), 64)


def bounds_of(schema: Schema) -> list[int]:
    """Return the first id of every type where ids count through all types, and the end."""
    return list(accumulate((t.num_nodes for t in schema.node_types), initial=0))


# --- by id alone ---------------------------------------------------------------------------------


def parts_by_hash(schema: Schema, index: int, num_parts: int) -> Tensor:
    """A keyed permutation dealt out like cards, on from type to type: nodes differ by one at most."""
    first = sum(t.num_nodes for t in schema.node_types[:index])
    num_nodes = schema.node_types[index].num_nodes
    order = ops.permute(keys.mix(KEY, index), num_nodes, 0, num_nodes)
    return order.add_(first % num_parts).remainder_(num_parts).to(torch.int16)


def parts_by_range(schema: Schema, index: int, num_parts: int) -> Tensor:
    """Equal ranges of every type. Types with fewer nodes than parts are cut as if they were one type."""
    small = [t.num_nodes if t.num_nodes < num_parts else 0 for t in schema.node_types]
    num_nodes = schema.node_types[index].num_nodes
    before, total = (sum(small[:index]), sum(small)) if small[index] else (0, num_nodes)
    ids = torch.arange(num_nodes) + before
    return ids.mul_(num_parts).div_(max(1, total), rounding_mode="floor").to(torch.int16)


# --- by the edges --------------------------------------------------------------------------------


def topology_of(store: Store, *, mapped: bool = False) -> Topology:
    schema, parts = store.schema, opened_parts(store)
    relations = [
        RelationLists(
            " ".join(relation.key), schema.sources[i], schema.destinations[i], [part.lists[i] for part in parts]
        )
        for i, relation in enumerate(schema.relations)
    ]
    return Topology(bounds_of(schema), relations, mapped)


def _marks(store: Store | StoreFiles, seeds: Any) -> Tensor | None:
    """Return which nodes are seeds: [nodes of all types] bool; None if no seeds are given.

    If the store is not opened, `seeds` is (node type, split).
    """
    if seeds is None:
        return None
    bounds = bounds_of(store.schema)
    marks = torch.zeros(bounds[-1], dtype=torch.bool)
    if isinstance(store, StoreFiles):
        node_type, split = seeds
        marks[torch.from_numpy(store.members(node_type, split, 0, bounds[-1]))] = True
        return marks
    for name, ids in _seeds_by_type(store, seeds):
        marks[ids + bounds[store.schema.type_index[name]]] = True
    return marks


def _seeds_by_type(store: Store, seeds: Any) -> list[tuple[str, Tensor]]:
    """Types and ids, in ascending order."""
    each = seeds.items() if isinstance(seeds, Mapping) else [seeds]
    return [read_seeds(store, named_seeds(store.schema, given)) for given in each]


class Usual:
    """The default of `seeds`."""

    def __repr__(self) -> str:
        return f"<{USUAL_SPLIT!r}, where exactly one node type has members of it; else none>"


USUAL: Final = Usual()


def named_seeds(schema: Schema, seeds: Any) -> Any:
    """What `seeds` stands for: the same, but for USUAL; without the type where there is but one."""
    if isinstance(seeds, Usual):
        having = [node_type.name for node_type in schema.node_types if node_type.splits.get(USUAL_SPLIT)]
        if len(having) != 1:
            return None
        return USUAL_SPLIT if schema.homogeneous else (having[0], USUAL_SPLIT)
    is_pair = isinstance(seeds, tuple | list) and len(seeds) == 2 and isinstance(seeds[0], str)
    if schema.homogeneous and is_pair:
        schema.node_type(seeds[0])
        return seeds[1]
    return seeds
