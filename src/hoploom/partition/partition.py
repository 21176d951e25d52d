"""Cut a store into parts: assign the nodes, order them by expected use, and write a new store.

The input is a store of one or many parts; the tables that it was built from are not needed. Memory holds a few numbers
per node, and chunks of edges and features.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoploom.config.values import as_int
from hoploom.errors import ConfigError, StoreError
from hoploom.ingest.stream import LEAST_MEMORY, Progress, StoreOptions, write_store
from hoploom.load.presample import AS_TRAINED, add_visits, distinct_seeds
from hoploom.ops import give_back_freed_memory
from hoploom.ops.assign_parts import NODE_BYTES
from hoploom.partition.assign import MEMORY, USUAL, assign, named_seeds
from hoploom.partition.bounded_store import CHUNK_BYTES, BoundedStore
from hoploom.partition.renumber import NewOrder, edge_streams, node_streams, order_nodes
from hoploom.partition.report import FANOUTS, PartitionReport, report
from hoploom.sample.hops import Fanouts, resolve_fanouts
from hoploom.schema import Schema
from hoploom.store import Store
from hoploom.store.write import StoreWriter
from hoploom.system import resident_bytes

ASIDE = 96 << 20  # bytes that no budget counts: batches in flight, allocators of several threads
READING = 16 * CHUNK_BYTES  # chunks in flight while the writer fills its memory
SAMPLING = 64 << 20  # batches in flight, and what libraries load when they are first used
LEAST_BATCHES, MOST_BATCHES = 32, 256  # limits of the batches sampled to find the hottest nodes: else one epoch
MB = 1 << 20


def partition(
    store: Store | str | Path,
    out: str | Path,
    num_parts: int,
    *,
    method: str = "stream",
    seeds: Any = USUAL,
    fanouts: Fanouts | None = FANOUTS,
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> PartitionReport:
    """Cut a store into parts, and report what training on them will cost.

    `method` is "hash", "range" or "stream". `seeds` are the training seeds, as for NeighborLoader: the name of a split,
    ids, or a pair (node type, name or ids). The default is the split "train" if exactly one node type has members in
    it, else no seeds. Seeds are spread evenly over the parts. Batches of seeds are sampled with `fanouts` to find the
    most visited nodes, which come first in their part. With seeds=None or fanouts=None, nodes keep their order within a
    part. The field `original_id` keeps the old ids, unless the store already has this field or all nodes of a type keep
    their ids. The process stays within `memory` bytes.

    >>> print(partition("papers.store", "papers.parts", 4))
    """
    memory = as_int("memory", memory, 1, "give bytes, e.g. 4 << 30")
    if os.path.lexists(out):
        raise StoreError(f"{out} exists; give another path, or remove it first")
    opened = BoundedStore(store, memory - ASIDE)
    schema, say = opened.schema, progress or (lambda what: None)
    num_nodes = sum(node_type.num_nodes for node_type in schema.node_types)
    give_back_freed_memory()
    least = resident_bytes() + LEAST_MEMORY + SAMPLING + READING + ASIDE + num_nodes * NODE_BYTES
    if memory < least:
        mb = -(-least // MB) + 8  # the next process may take a little more memory
        held = f"{num_nodes} nodes and what the process holds already"
        raise ConfigError(f"memory is {memory} bytes, too little for {held}; give at least {mb * MB} ({mb} MB)")
    if fanouts is not None:
        resolve_fanouts(schema, fanouts)
    seeds = named_seeds(schema, seeds)
    marked = None if seeds is None else dict([distinct_seeds(opened.store, seeds)])
    say(f"assigning nodes by {method}")
    parts = assign(store, num_parts, method, seeds=marked, memory=memory - ASIDE)
    visits = None
    if marked is not None and fanouts is not None:
        say("sampling for the hottest nodes")
        (ids,) = marked.values()
        epoch = -(-ids.numel() // AS_TRAINED.batch_size)
        plan = replace(AS_TRAINED, batches=range(max(LEAST_BATCHES, min(MOST_BATCHES, epoch))))
        visits = {t.name: torch.zeros(t.num_nodes, dtype=torch.int16) for t in schema.node_types}
        for nodes in opened.batches(fanouts, seeds, plan):
            add_visits(visits, nodes)
    orders = order_nodes(parts, num_parts, visits)
    seeds = None if marked is None else _renumbered(seeds, marked, orders, schema)
    del parts, visits, marked  # numbers per node
    options = StoreOptions(
        weight=schema.weight, time=schema.time, homogeneous=schema.homogeneous, memory=opened.memory - READING
    )
    with StoreWriter(out) as writer:
        write_store(writer, node_streams(opened, orders), edge_streams(opened, orders), options, progress=progress)
    del opened, orders
    return report(out, fanouts, seeds, memory=memory - ASIDE)


def _renumbered(seeds: Any, marked: Mapping[str, Tensor], orders: Mapping[str, NewOrder], schema: Schema) -> Any:
    """Return `seeds` with new ids, or unchanged if they name a split. `marked` has their old ids by node type."""
    given = seeds[1] if isinstance(seeds, tuple | list) and len(seeds) == 2 else seeds
    if isinstance(given, str):
        return seeds
    ((node_type, ids),) = marked.items()
    new = orders[node_type].new_of_old[ids]
    return new if schema.homogeneous else (node_type, new)
