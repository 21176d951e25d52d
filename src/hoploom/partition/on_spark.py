"""A store cut into parts where Spark's executors write them: this process assigns and numbers the nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pyspark.sql import SparkSession

from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.ingest.spark import write_shared
from hoploom.ingest.spark.frames import one_row_each, run_tasks
from hoploom.ingest.spark.session import check_java, check_master, spark_session, watching
from hoploom.ingest.spark.target import StoreTarget, opened_target
from hoploom.ingest.stream import Progress, StoreOptions
from hoploom.ops.assign_parts import MOST_PARTS, NODE_BYTES
from hoploom.partition.assign import METHODS, USUAL, assign, named_seeds, split_of
from hoploom.partition.hotness import expected_visits, visit_classes
from hoploom.partition.renumber import NewOrder, order_nodes
from hoploom.partition.report import FANOUTS, Cut, PartCost, PartitionReport
from hoploom.partition.spark_rewrite import Buckets, NewIds, count_inside, spark_edge_streams, spark_node_streams
from hoploom.partition.store_files import StoreFiles
from hoploom.sample.hops import Fanouts, resolve_fanouts
from hoploom.schema import Schema
from hoploom.store.format import PartRange
from hoploom.store.storage_path import StoragePath

ON_SPARK = ("hash", "range", "stream")
ROW_BYTES = 100  # of a task, for a node of its bucket, at most
PROCESS_BYTES = 450 << 20  # of a task that has done nothing yet: what imports take
MOST_NODES, LEAST_NODES, TASKS = 1 << 22, 1 << 16, 256  # of a bucket; buckets, if that makes them no smaller


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """The cluster that writes the parts, and its memory. The parts do not depend on it."""

    master: str = "local[*]"
    conf: Mapping[str, str] = field(default_factory=dict)  # more of Spark's settings
    memory: int = 4 << 30  # bytes of each task's process


def partition_on_spark(
    store: str | Path,
    out: str | Path,
    num_parts: int,
    options: SparkOptions,
    *,
    method: str = "stream",
    seeds: Any = USUAL,
    fanouts: Fanouts | None = FANOUTS,
    progress: Progress | None = None,
) -> PartitionReport:
    """Cut a store that all executors reach into parts that they reach, and report the counts.

    `method` is "hash", "range" or "stream", `seeds` the name of a split, or (node type, name). This process assigns the
    nodes, in at most 24 bytes of memory a node; the executors write the parts. Within a part, the nodes come first that
    training from these seeds with `fanouts` is expected to visit most; with seeds=None or fanouts=None, nodes keep
    their order.

    >>> partition_on_spark("s3://graphs/papers", "s3://graphs/papers.parts", 64, SparkOptions(master="yarn"))
    """
    files = StoreFiles.at(StoragePath(str(store)))
    named = named_seeds(files.schema, seeds)
    split = None if named is None else split_of(files.schema, named)
    _check(files.schema, num_parts, method)
    hops = None if fanouts is None else resolve_fanouts(files.schema, fanouts)
    show = _Progress(progress or (lambda stage: None))
    if SparkSession.getActiveSession() is None:  # before the work of this process
        check_java()
        check_master(options.master)
    with opened_target(out) as opened_out:
        target, renumbering = (
            _DescribedTarget(opened_out),
            NewIds(files, _buckets(files, options), opened_out.staging),
        )
        gigabytes = files.bounds[-1] * NODE_BYTES / 1e9
        show.begin(f"assigning nodes by {method} in this process, in about {gigabytes:.1f} GB")
        parts = assign(str(store), num_parts, method, seeds=split, memory=options.memory)
        visits = None
        if split is not None and hops is not None:
            show.begin("finding the most used nodes")
            visits = _by_type(files, visit_classes(expected_visits(files, *split, hops, options.memory)))
        orders = list(order_nodes(parts, num_parts, visits).values())
        del parts, visits
        for bucket in range(renumbering.buckets.count):
            renumbering.save(bucket, _new_ids(files, orders, *renumbering.buckets.span(bucket)).numpy())
        bounds, changed = [order.bounds for order in orders], [not order.moves_nothing for order in orders]
        del orders
        show.begin("starting Spark")
        scratch = target.local_scratch("spark")
        with spark_session(scratch, options.memory, options.master, options.conf) as session:
            schema = files.schema
            nodes, edges = (
                spark_node_streams(session, renumbering, bounds, changed),
                spark_edge_streams(session, renumbering),
            )
            written = StoreOptions(
                weight=schema.weight, time=schema.time, homogeneous=schema.homogeneous, memory=options.memory
            )
            write_shared(session, target, nodes, edges, written, lambda rows: rows, progress=show)
            show.begin("counting cut edges")
            assert target.described is not None
            result = StoreFiles(target.place, *target.described)
            counting = NewIds(result, renumbering.buckets, target.staging)
            with watching(session, show.detail):
                count = counting.buckets.count
                counts = run_tasks(one_row_each(session, count), count, partial(count_inside, counting), target.staging)
            return _report(result, [sum(of_relation) for of_relation in zip(*counts, strict=True)], split)


class _Progress:
    """The stage, and how far it is, as one line each."""

    def __init__(self, show: Progress) -> None:
        self._show, self._stage = show, ""

    def begin(self, stage: str) -> None:
        self._stage = stage
        self._show(stage)

    def detail(self, text: str) -> None:
        self._show(f"{self._stage}: {text}")


class _DescribedTarget:
    """A target that keeps the description of the store written to it."""

    def __init__(self, inner: StoreTarget) -> None:
        self._inner, self.staging, self.place = inner, inner.staging, inner.place
        self.local_scratch, self.add = inner.local_scratch, inner.add
        self.described: tuple[Schema, tuple[PartRange, ...]] | None = None

    def describe(self, schema: Schema, parts: Sequence[PartRange]) -> None:
        self.described = schema, tuple(parts)
        self._inner.describe(schema, parts)


def _check(schema: Schema, num_parts: int, method: str) -> None:
    names = "hash, range and stream"
    if method in METHODS and method not in ON_SPARK:
        raise ConfigError(f"method {method!r} needs one process; Spark has {names}, so give one of these")
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}; Spark has {names}")
    num_nodes = sum(t.num_nodes for t in schema.node_types)
    most = min(num_nodes, MOST_PARTS)
    as_int("num_parts", num_parts, 1, f"give 1 to {most}")
    if num_parts > most:
        raise ConfigError(f"num_parts is {num_parts} for {num_nodes} nodes; give 1 to {most}")


def _buckets(files: StoreFiles, options: SparkOptions) -> Buckets:
    """Return buckets that fit the memory of a task, and that are many where nodes are many."""
    free = max(options.memory - PROCESS_BYTES, options.memory // 8)
    num_nodes = files.bounds[-1]
    return Buckets(num_nodes, max(1, min(MOST_NODES, free // ROW_BYTES, max(LEAST_NODES, num_nodes // TASKS))))


def _by_type(files: StoreFiles, values: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip(files.schema.type_index, values.tensor_split(files.bounds[1:-1]), strict=True))


def _new_ids(files: StoreFiles, orders: Sequence[NewOrder], begin: int, end: int) -> torch.Tensor:
    """Return the new ids of the nodes [begin, end) of all types: int64."""
    found = [
        order.new_of_old[max(begin, first) - first : max(begin, first, min(end, last)) - first]
        for order, (first, last) in zip(orders, pairwise(files.bounds), strict=True)
    ]
    return torch.cat(found)


def _report(written: StoreFiles, inside: Sequence[int], split: tuple[str, str] | None) -> PartitionReport:
    """Return the report of the counts: nothing is sampled. `inside` are by relation the edges within one part."""
    schema = written.schema
    cuts = tuple(
        Cut(" ".join(relation.key), relation.num_edges, relation.num_edges - count)
        for relation, count in zip(schema.relations, inside, strict=True)
    )
    parts = []
    for part in written.parts:
        num_seeds = 0 if split is None else part.splits[split[0]][split[1]]
        nodes = dict(zip(schema.type_index, part.num_nodes, strict=True))
        parts.append(PartCost(nodes, sum(part.num_edges), num_seeds))
    return PartitionReport(cuts, tuple(parts))
