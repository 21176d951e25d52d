"""A store cut into parts: nodes are assigned, ordered by what training will ask for, and everything is written anew.

Works from a store alone, of one part or of many, never from the tables it was built from. Memory is a few numbers per
node and chunks of the rest.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hoploom.config.values import as_int
from hoploom.errors import ConfigError, StoreError
from hoploom.ingest.stream import StoreOptions, write_store
from hoploom.ingest.stream.streams import LEAST_MEMORY
from hoploom.load.arguments import read_tensor
from hoploom.load.presample import distinct_seeds
from hoploom.ops import give_back_freed_memory
from hoploom.partition.assign import assign
from hoploom.partition.bounded_graph import BoundedStore
from hoploom.partition.renumber import NewOrder, edge_streams, node_streams, order_nodes
from hoploom.partition.report import FANOUTS, PartitionReport, report
from hoploom.partition.store_reading import CHUNK_BYTES, StoreReader, read_store
from hoploom.partition.trial import USUAL, Trial, named_seeds
from hoploom.sample.options import NumNeighbors, resolve_fanouts
from hoploom.schema import Schema, read_members
from hoploom.store import Store
from hoploom.store.system_memory import resident_bytes
from hoploom.store.write import StoreWriter

MEMORY = 4 << 30
ASIDE = 96 << 20  # for what nothing counts: batches on their way, allocators of several threads
CHUNKS = 16  # that reading has under way while the writer fills its memory
NODE_BYTES = {"hash": 32, "range": 32}  # per node, at most; of the other methods:
MOST_NODE_BYTES = 80
MB = 1 << 20
WORKING = 64 << 20  # batches under way, and what libraries load when they are first used
SPARE_MB = 8  # that a process may hold more next time
Progress = Callable[[str], None]  # told what is done now


def partition(
    store: Store | str | Path,
    out: str | Path,
    num_parts: int,
    *,
    method: str = "stream",
    seeds: Any = USUAL,
    fanouts: NumNeighbors | None = FANOUTS,
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> PartitionReport:
    """Write a store in parts, and say what training on it will cost.

    `method` is "hash", "range", "stream" or "metis". `seeds` are what training starts from, as for NeighborLoader: a
    split's name, ids, or (node type, either); left out, the split "train" where exactly one node type has members of
    it, else none; None: none. They are spread evenly over the parts, and sampled with `fanouts` to find the hottest
    nodes, which come first in their part; fanouts=None samples nothing. Without seeds or fanouts nodes keep the order
    they had within a part. The ids that nodes had before become the field `original_id`, unless they have one, or all
    nodes of their type keep their ids. `memory` is kept by all methods but "metis".

    >>> print(partition("papers.store", "papers.parts", 4))
    """
    num_parts = as_int("num_parts", num_parts, 1, "give at least 1")
    if os.path.lexists(out):
        raise StoreError(f"{out} exists; give another path, or remove it first")
    reader = read_store(store)
    num_nodes = sum(node_type.num_nodes for node_type in reader.schema.node_types)
    if num_parts > num_nodes:
        raise ConfigError(f"num_parts is {num_parts} for {num_nodes} nodes; give each part a node at least")
    _check_memory(memory, num_nodes, method)
    if fanouts is not None:
        resolve_fanouts(reader.schema, fanouts)
    seeds = named_seeds(reader.schema, seeds)
    memory -= ASIDE
    plan = PartitionPlan(num_parts, method, seeds, fanouts, memory)
    orders = _new_orders(store, plan, progress or (lambda what: None))
    _write(reader, orders, out, memory, progress)
    seeds = _renumbered(seeds, reader.schema, orders)
    del orders, reader  # a number per node
    return report(out, fanouts, seeds, memory=memory)


def _check_memory(memory: int, num_nodes: int, method: str) -> None:
    memory = as_int("memory", memory, 1, "give bytes, e.g. 4 << 30")
    give_back_freed_memory()
    least = (
        resident_bytes()
        + LEAST_MEMORY
        + WORKING
        + CHUNKS * CHUNK_BYTES
        + ASIDE
        + num_nodes * NODE_BYTES.get(method, MOST_NODE_BYTES)
    )
    if memory < least:
        mb = -(-least // MB) + SPARE_MB
        raise ConfigError(
            f"memory is {memory} bytes, too little for {num_nodes} nodes and what the process holds already; "
            f"give at least {mb * MB} ({mb} MB)"
        )


@dataclass(frozen=True)
class PartitionPlan:
    """How nodes find their place."""

    num_parts: int
    method: str
    seeds: Any
    fanouts: NumNeighbors | None
    memory: int


def _new_orders(store: Store | str | Path, plan: PartitionPlan, say: Progress) -> dict[str, NewOrder]:
    opened = BoundedStore(store, plan.memory)
    seeds = None if plan.seeds is None else dict([distinct_seeds(opened.store, plan.seeds)])
    say(f"assigning nodes by {plan.method}")
    parts = assign(store, plan.num_parts, plan.method, seeds=seeds)
    visits = None
    if plan.seeds is not None and plan.fanouts is not None:
        say("sampling for the hottest nodes")
        visits = Trial(opened, plan.fanouts, plan.seeds).hotness()
    return order_nodes(parts, plan.num_parts, visits)


def _write(
    reader: StoreReader, orders: Mapping[str, NewOrder], out: str | Path, memory: int, progress: Progress | None
) -> None:
    schema = reader.schema
    left = memory - CHUNKS * CHUNK_BYTES
    options = StoreOptions(weight=schema.weight, time=schema.time, homogeneous=schema.homogeneous, memory=left)
    with StoreWriter(out) as writer:
        write_store(writer, node_streams(reader, orders), edge_streams(reader, orders), options, progress=progress)


def _renumbered(seeds: Any, schema: Schema, orders: Mapping[str, NewOrder]) -> Any:
    """Seeds in the new ids: what has a name keeps it."""
    if schema.homogeneous:
        node_type, given = schema.node_types[0].name, seeds
    elif isinstance(seeds, tuple | list) and len(seeds) == 2:
        node_type, given = seeds
    else:
        return seeds
    if given is None or isinstance(given, str):
        return seeds
    ids = read_members("seeds", read_tensor("seeds", given), schema.node_type(node_type).num_nodes, ConfigError)
    new = orders[node_type].new_of_old[ids]
    return new if schema.homogeneous else (node_type, new)
