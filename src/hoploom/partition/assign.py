"""Assign every node to a part: by hash, by range, or by a streaming partitioner in the C++ core.

All types are partitioned together. `hash` and `range` look at ids alone and balance nodes exactly. `stream` reads the
edges several times, from memory or from files, and balances nodes of every type, in-edges and seeds; it cuts a few more
edges than METIS.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hoploom import keys, ops
from hoploom.config.values import as_int, as_number, nearest
from hoploom.errors import ConfigError
from hoploom.load.presample import read_seeds
from hoploom.ops import assign_parts as core
from hoploom.ops.assign_parts import FIXED_BYTES, MOST_NODES, MOST_PARTS, NODE_BYTES
from hoploom.partition.bounded_store import opened_parts
from hoploom.partition.store_files import READERS, StoreFiles, bounds_of
from hoploom.schema import RelationName, Schema
from hoploom.store import Store, open_store
from hoploom.store.storage_path import StoragePath
from hoploom.system import num_cores, resident_bytes

METHODS = ("hash", "range", "stream")
KEY = 0x7061727473  # seed of all random draws: fixed, so that every call returns the same parts
MEMORY = 4 << 30
PASSES = 5  # most passes of refinement
USUAL_SPLIT = "train"
CHUNK_SEEDS = 1 << 20


def assign(
    store: Store | str | Path,
    num_parts: int,
    method: str = "stream",
    *,
    seeds: Any = None,
    passes: int = PASSES,
    imbalance: float = 0.05,
    threads: int | None = None,
    memory: int = MEMORY,
) -> Mapping[str, Tensor]:
    """Return the part of every node, by type: [num_nodes] int16.

    `store` is an opened store, a path, or an s3:// or gs:// URL. Only "stream" uses `seeds` (as for NeighborLoader, or
    ids by type), `passes` and `imbalance`. A part has at most `1 + imbalance` times the mean of each type's nodes, of
    in-edges and of seeds, as far as single nodes allow. If `store` is a path or URL, edges that do not fit `memory`
    bytes are read from its files several times. Besides the edges, assigning takes at most 24 bytes of memory a node.

    >>> parts = assign(store, 4, seeds="train")
    >>> sum(edge_cut(store, parts).values())
    """
    source = store if isinstance(store, Store) else StoreFiles.at(StoragePath(str(store)))
    schema = source.schema
    check_method(schema, num_parts, method)
    as_int("passes", passes, 1, f"give 1 or more, e.g. {PASSES}")
    as_number("imbalance", imbalance, "give a share, e.g. 0.05 for 5 % above the mean")
    if method in ("hash", "range"):
        by_id = _parts_by_hash if method == "hash" else _parts_by_range
        return {t.name: by_id(schema, index, num_parts) for index, t in enumerate(schema.node_types)}
    bits = None
    if seeds is not None:  # a bit per node of all types
        bounds = bounds_of(schema)
        bits = torch.zeros(bounds[-1] // 8 + 1, dtype=torch.uint8)
        for node_type, ids in _seed_ids(source, seeds):
            for some in torch.split(ids, CHUNK_SEEDS):
                nodes = some + bounds[schema.type_index[node_type]]
                bits.index_add_(0, nodes >> 3, (1 << (nodes & 7)).to(torch.uint8))
    with topology_of(source, memory) as topology:
        rule = core.PartitionRule(num_parts, passes, imbalance, _threads(topology, threads), KEY)
        if num_parts == 1:
            parts = torch.zeros(topology.bounds[-1], dtype=torch.int16)
        else:
            parts = core.assign_parts(topology, bits, rule)
    return dict(zip(schema.type_index, parts.tensor_split(topology.bounds[1:-1]), strict=True))


def edge_cut(
    store: Store | str | Path, parts: Mapping[str, Tensor], *, threads: int | None = None, memory: int = MEMORY
) -> Mapping[RelationName, int]:
    """Return, by relation, the number of edges that lead from one part to another under the assignment `parts`."""
    source = store if isinstance(store, Store) else StoreFiles.at(StoragePath(str(store)))
    node_types = source.schema.node_types
    for node_type in node_types:
        if node_type.name not in parts or parts[node_type.name].shape != (node_type.num_nodes,):
            raise ConfigError(f"parts of {node_type.name!r}: give one number for each of {node_type.num_nodes} nodes")
    of_all_types = torch.cat([parts[node_type.name].to(torch.int16) for node_type in node_types])
    with topology_of(source, memory) as topology:
        cut = core.count_cut(topology, of_all_types, _threads(topology, threads))
    return {relation.key: int(count) for relation, count in zip(source.schema.relations, cut, strict=True)}


@contextmanager
def topology_of(source: Store | StoreFiles, memory: int = MEMORY) -> Iterator[core.Topology]:
    """Yield all edges of a store. Edges are read into memory if this leaves enough of `memory` to assign the nodes."""
    if isinstance(source, StoreFiles):
        taken = resident_bytes() + FIXED_BYTES + source.bounds[-1] * NODE_BYTES
        with source.topology(memory - taken) as topology:
            yield topology
        return
    schema, parts = source.schema, opened_parts(source)
    relations = [
        core.RelationLists(
            " ".join(relation.key), schema.sources[i], schema.destinations[i], [part.lists[i] for part in parts]
        )
        for i, relation in enumerate(schema.relations)
    ]
    yield core.Topology(bounds_of(schema), relations)


def check_method(schema: Schema, num_parts: int, method: str) -> None:
    """Raise ConfigError for an unknown `method`, for more parts than nodes, or for too many nodes or parts."""
    if method not in METHODS:
        near = nearest(str(method), METHODS)
        hint = f"did you mean {near!r}? " if near else ""
        raise ConfigError(f"unknown method {method!r}; {hint}There are {', '.join(METHODS)}")
    num_nodes, num_parts = bounds_of(schema)[-1], as_int("num_parts", num_parts, 1, f"give 1 to {MOST_PARTS}")
    if num_parts > min(MOST_PARTS, num_nodes):
        raise ConfigError(f"num_parts is {num_parts} for {num_nodes} nodes; give 1 to {min(MOST_PARTS, num_nodes)}")
    if num_nodes > MOST_NODES and method == "stream":
        raise ConfigError(f"{num_nodes} nodes are too many for method {method!r}; use 'hash' or 'range'")


def _threads(topology: core.Topology, threads: int | None) -> int:
    """Return the number of threads: `threads`, else one per core, or more if the threads wait for files."""
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}; give 1 or more")
    return min(threads or max(num_cores(), 1 if topology.read is None else READERS), 64)


def _parts_by_hash(schema: Schema, index: int, num_parts: int) -> Tensor:
    """Return the part of each node of type `index`. Nodes are assigned to the parts in turn, in random order."""
    first = sum(t.num_nodes for t in schema.node_types[:index])
    num_nodes = schema.node_types[index].num_nodes
    order = ops.permute(keys.mix(KEY, index), num_nodes, 0, num_nodes)
    return order.add_(first % num_parts).remainder_(num_parts).to(torch.int16)


def _parts_by_range(schema: Schema, index: int, num_parts: int) -> Tensor:
    """Return the part of each node of type `index`: equal ranges of ids. Types of fewer nodes than parts are joined."""
    small = [t.num_nodes if t.num_nodes < num_parts else 0 for t in schema.node_types]
    num_nodes = schema.node_types[index].num_nodes
    before, total = (sum(small[:index]), sum(small)) if small[index] else (0, num_nodes)
    ids = torch.arange(num_nodes) + before
    return ids.mul_(num_parts).div_(max(1, total), rounding_mode="floor").to(torch.int16)


# --- seeds ---------------------------------------------------------------------------------------


class Usual:
    """Class of USUAL, the default value of `seeds`. Its repr explains in signatures which seeds USUAL means."""

    def __repr__(self) -> str:
        return f"<{USUAL_SPLIT!r}, where exactly one node type has members of it; else none>"


USUAL: Final = Usual()


def named_seeds(schema: Schema, seeds: Any) -> Any:
    """Return `seeds` as samplers take them; USUAL becomes "train" if exactly one node type has it, else None."""
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


def split_of(schema: Schema, seeds: Any) -> tuple[str, str]:
    """Return the node type and the split that `seeds` name; raise ConfigError if `seeds` are not a split."""
    node_type, split = (schema.node_types[0].name, seeds) if isinstance(seeds, str) else seeds
    if not isinstance(split, str) or split not in schema.node_type(node_type).splits:
        raise ConfigError(
            f"seeds are {seeds!r}; with Spark or an object store, give the name of a split, or (node type, name)"
        )
    return node_type, split


def _seed_ids(source: Store | StoreFiles, seeds: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield pairs of a node type and seed ids. No id is repeated, and the ids of a type ascend."""
    for given in seeds.items() if isinstance(seeds, Mapping) else [seeds]:
        named = named_seeds(source.schema, given)
        if named is None:
            continue
        if isinstance(source, StoreFiles) and source.place.path is None:
            yield from source.members(*split_of(source.schema, named))
        else:
            opened = source if isinstance(source, Store) else open_store(str(source.place))
            yield read_seeds(opened, named)
