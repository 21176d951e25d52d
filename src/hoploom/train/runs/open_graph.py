"""A run's graph: opened as [cluster] and the deployment define it, with a cache of the remote rows that are visited
most, or placed as [placement] defines it.

Which rows are kept is found by sampling some batches first, without their features. What is kept changes how long a
batch takes, never what is in it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hoploom.deploy.open import CONNECT
from hoploom.errors import ConfigError
from hoploom.gpu.place import request as placement
from hoploom.load.presample import Presampling, count_visits, no_visits, read_seeds
from hoploom.ranks.context import Context
from hoploom.store import Store
from hoploom.store.base import Part
from hoploom.store.row_cache import CacheReport, cached, report
from hoploom.train.runs.factories import per_relation
from hoploom.train.runs.problem import Goal
from hoploom.train.runs.read_run_file import NO_CACHE
from hoploom.train.runs.run_file import LINKS, RunFile

NUM_BATCHES = 64  # that are sampled to know what is visited
OPTIONS = tuple(name for name in CONNECT if name != "made")  # where batches are made, follows from who holds what
NO_LOCALITY = "cluster.locality has no effect where servers make the batches: no process holds a part; leave it out"


def open_graph(run_file: RunFile, context: Context) -> Store:
    """The store of a run; its context closes it."""
    section = run_file.cluster
    options = {name: getattr(section, name) for name in OPTIONS}
    store = context.open(run_file.store, parts=section.parts, servers=section.servers, **options)
    if store.deployment.makes_batches and section.cache is not None:
        raise run_file.problem("cluster.cache", NO_CACHE)
    if store.deployment.makes_batches and section.locality:
        raise run_file.problem("cluster.locality", NO_LOCALITY)
    return store


def with_placement(run_file: RunFile, goal: Goal, context: Context) -> Goal:
    """The goal, with its store placed where the run's device reads it. All ranks call."""
    section = run_file.placement
    if section.topology is None and section.features is None:
        return goal
    name = "placement.features" if section.topology is None else "placement.topology"
    _check_device(run_file, name, context.device)
    try:
        store = goal.store.place(
            section.topology, section.features, dtype=section.dtype, device=context.device, among=context
        )
    except ConfigError as error:
        raise run_file.problem(name, f"the store cannot be placed: {error}; or leave [placement] out") from error
    return replace(goal, store=store)


def _check_device(run_file: RunFile, name: str, device: torch.device) -> None:
    """Raise ConfigError where the run is on a CPU, unless kernels are interpreted there and no GPU is named."""
    if device.type != "cpu":
        return
    section = run_file.placement
    named = {word for word in (section.topology, section.features) if str(word).startswith("cuda")}
    if not named and _kernels_are_interpreted():
        return
    if run_file.train.device == "cpu":
        why = 'train.device is "cpu"'
    else:
        why = "its context was made so" if torch.cuda.is_available() else "there is no GPU here"
    raise run_file.problem(name, f"{name} has no effect: this run is on cpu ({why}); leave [placement] out")


def _kernels_are_interpreted() -> bool:
    try:
        return placement.kernels_are_interpreted()
    except ConfigError:  # there is no Triton
        return False


def with_cache(run_file: RunFile, goal: Goal, context: Context) -> Goal:
    """The goal, with a cache of the remote rows that this rank will need most."""
    size, store = run_file.cluster.cache, goal.store
    if size is None or all(isinstance(shard, Part) for shard in store.shards):
        return goal
    return replace(goal, store=cached(store, size, _counts(run_file, goal, context)))


def _counts(run_file: RunFile, goal: Goal, context: Context) -> dict[str, Tensor]:
    """In how many of some batches each node is, by type."""
    section, schema = run_file.loader, goal.store.schema
    plan = Presampling(
        batch_size=section.batch_size // context.world_size,
        batches=range(NUM_BATCHES),
        seed=run_file.seed,
        num_threads=section.threads,
        options={
            "replace": section.replace,
            "labor": section.labor,
            "weight_attr": schema.weight if section.weighted else None,
        },
    )
    counts = no_visits(goal.store)
    for node_type, ids in _seeds(run_file, goal):
        near = _own(goal.store, node_type, ids) if run_file.cluster.locality else ids
        seeds = near if schema.homogeneous else (node_type, near)
        for name, found in count_visits(goal.store, per_relation(run_file, goal), seeds, plan).items():
            counts[name] += found
    return counts


def _seeds(run_file: RunFile, goal: Goal) -> Iterator[tuple[str, Tensor]]:
    """The nodes that batches are made around, by type; of links both ends."""
    schema, given = goal.store.schema, goal.seeds["train"]
    if run_file.task.kind != LINKS:
        yield read_seeds(goal.store, given)
        return
    (source, _, destination), ends = (schema.relations[0].key, given) if schema.homogeneous else given
    for node_type in dict.fromkeys((source, destination)):
        rows = [row for name, row in zip((source, destination), ends, strict=True) if name == node_type]
        yield node_type, torch.unique(torch.cat(rows))


def _own(store: Store, node_type: str, ids: Tensor) -> Tensor:
    """Those in the parts that this process maps; all, where none is."""
    index, own = store.schema.type_index[node_type], torch.zeros(ids.numel(), dtype=torch.bool)
    for part in store.parts:
        first = part.first_nodes[index]
        own |= (ids >= first) & (ids < first + part.num_nodes[index])
    return ids[own] if bool(own.any()) else ids


def cache_report(run_file: RunFile, goal: Goal, context: Context) -> CacheReport | None:
    """How the caches of all ranks did. All ranks call."""
    if run_file.cluster.cache is None:
        return None
    own = report(goal.store) or CacheReport(0, 0, 0, 0)
    found = context.sum(torch.tensor([own.num_rows, own.num_bytes, own.hits, own.misses]))
    return CacheReport(*found.tolist()) if bool(found.any()) else None


def as_plain(kept: CacheReport) -> dict[str, Any]:
    """For result.json."""
    return {
        "rows": kept.num_rows,
        "bytes": kept.num_bytes,
        "hits": kept.hits,
        "misses": kept.misses,
        "hit_rate": round(kept.hit_rate, 6),
    }
