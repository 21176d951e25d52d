"""Count the batches of a training run that need each node, by sampling these batches without features.

Costs as much as sampling. A node counts once per batch, however often it is picked, as its row is fetched once.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hoploom.config.values import as_int
from hoploom.errors import ConfigError, StoreError
from hoploom.load.arguments import read_input_nodes
from hoploom.load.maker import Sampler, one_type_seeds
from hoploom.load.order import Order
from hoploom.load.pipeline import Pipeline, Stages
from hoploom.sample.hops import Fanouts, make_sampling, resolve_fanouts
from hoploom.store import Store
from hoploom.store.row_cache import Visits

BATCH_SIZE = 1024


@dataclass(frozen=True, kw_only=True)
class Presampling:
    """Options for counting. The batches are those that a shuffled NeighborLoader with the same seed would sample."""

    batch_size: int = BATCH_SIZE  # of each rank
    rank: int = 0
    world_size: int = 1
    batches: range | None = None  # their numbers, counted over epochs; None: the first epoch
    seed: int = 0
    num_threads: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)  # replace, labor, weight_attr


AS_TRAINED = Presampling()


def visited(store: Store, fanouts: Fanouts, seeds: Any, plan: Presampling = AS_TRAINED) -> Iterator[list[Tensor]]:
    """Yield each batch's distinct nodes: a list of [n] int64 by node type. `seeds` are as for NeighborLoader."""
    node_type, nodes = distinct_seeds(store, seeds)
    resolve_fanouts(store.schema, fanouts)  # seeds alone would tell nothing
    sampler = Sampler(store.graph, make_sampling(store.schema, fanouts, **plan.options))
    size = as_int("batch_size", plan.batch_size, 1, "give at least 1")
    order = Order(nodes.numel(), size, shuffle=True, seed=plan.seed, rank=plan.rank, world_size=plan.world_size)
    order.check()
    threads = as_int("num_threads", plan.num_threads, 0, "give a count of threads, 0 for none")

    def sampled(number: int, begun: None, fetched: None) -> list[Tensor]:
        epoch, step = divmod(number, order.num_steps)
        share = order.at_epoch(epoch).step(step)
        return sampler.sample(one_type_seeds(sampler, node_type, nodes[share.indices], None, 0), share.key).nodes

    batches = range(order.num_steps) if plan.batches is None else plan.batches
    pipeline = Pipeline(threads, per_thread=1)
    with closing(pipeline.run(Stages(sampled, pipeline.num_ahead, pipeline.num_ahead), batches)) as made:
        yield from made


def count_visits(store: Store, fanouts: Fanouts, seeds: Any, plan: Presampling = AS_TRAINED) -> Visits:
    """Return, by node type, how many of the sampled batches have each node: [num_nodes] int64.

    >>> counts = count_visits(store, [15, 10, 5], "train")
    >>> hottest = counts["paper"].argsort(descending=True)[:1000]
    """
    counts = no_visits(store)
    for nodes in visited(store, fanouts, seeds, plan):
        add_visits(counts, nodes)
        counts.num_batches += 1
    return counts


def no_visits(store: Store) -> Visits:
    return Visits((t.name, torch.zeros(t.num_nodes, dtype=torch.int64)) for t in store.schema.node_types)


def add_visits(counts: Mapping[str, Tensor], nodes: list[Tensor]) -> None:
    for of_type, ids in zip(counts.values(), nodes, strict=True):
        of_type[ids] += 1  # each node is once in a batch


def read_seeds(store: Store, seeds: Any) -> tuple[str, Tensor]:
    """Return the seeds' node type, and their distinct ids in ascending order: [n] int64."""
    node_type, nodes, _ = read_input_nodes(store, seeds)
    nodes = nodes if bool((nodes.diff() > 0).all()) else torch.unique(nodes)
    limit = store.schema.node_type(node_type).num_nodes
    if nodes.numel() and not 0 <= int(nodes[0]) <= int(nodes[-1]) < limit:  # of ids given this is known already
        wrong = int(nodes[0] if nodes[0] < 0 else nodes[-1])
        raise StoreError(f"a split of {node_type!r} holds {wrong}, out of range [0, {limit}); run hoploom check")
    return node_type, nodes


def distinct_seeds(store: Store, seeds: Any) -> tuple[str, Tensor]:
    """Return the seeds' node type and distinct ids, ascending; raise ConfigError if there are no seeds."""
    node_type, nodes = read_seeds(store, seeds)
    if nodes.numel() == 0:
        raise ConfigError(f"there are no seeds in {seeds!r:.60}; give a split, or ids")
    return node_type, nodes
