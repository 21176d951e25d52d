"""A store cut into parts by Spark's executors. The driver plans, and holds sums and the graph of a few clusters."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.ingest.spark import write_shared
from hoploom.ingest.spark.session import spark_session
from hoploom.ingest.spark.target import StoreTarget, opened_target
from hoploom.ingest.spark.watch_jobs import watching
from hoploom.ingest.stream import Progress, StoreOptions
from hoploom.ops import PartitionRule
from hoploom.partition.assign import KEY, METHODS, USUAL, named_seeds
from hoploom.partition.report import FANOUTS, Cut, PartCost, PartitionReport
from hoploom.partition.spark.exchange import BucketMessage, Columns, OnSpark
from hoploom.partition.spark.hotness import ExpectedVisits, expect_visits
from hoploom.partition.spark.numbers import BY_ID, AssignById, NewNumbers, number_nodes
from hoploom.partition.spark.read import CHUNK_EDGES, Buckets, StoreOnPlace
from hoploom.partition.spark.refine import PASSES
from hoploom.partition.spark.rewrite import edge_streams, node_streams
from hoploom.partition.spark.stages import total
from hoploom.partition.spark.state import State
from hoploom.partition.spark.stream import SeedSplit, assign_stream
from hoploom.sample.hops import Fanouts, resolve_fanouts
from hoploom.schema import Schema
from hoploom.store.fetch import manifest_at
from hoploom.store.format import PartRange
from hoploom.store.storage_path import StoragePath

MOST_PARTS = 512  # by the edges: the driver holds sums for every pair of parts
IMBALANCE = 0.05
NODE_BYTES = 1500  # of a task, for a node of its bucket, at most
PROCESS_BYTES = 450 << 20  # of a task that has done nothing yet: what imports take
MOST_NODES, LEAST_NODES = 1 << 22, 1 << 16  # of a bucket
HERE = "hash, range and stream"


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """Where a store is cut, and in which memory. None of it changes the parts."""

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
    """Cut a store into parts where all executors reach both, and report what was counted.

    `method` is "hash", "range" or "stream", `seeds` the name of a split, or (node type, name). Within a part, the nodes
    come first that training from these seeds with `fanouts` is expected to visit most; with seeds=None or fanouts=None,
    nodes keep their order.

    >>> print(partition_on_spark("s3://graphs/papers", "s3://graphs/papers.parts", 64, SparkOptions(master="yarn")))
    """
    opened = _opened(StoragePath(str(store)))
    split = _split_of(opened.schema, named_seeds(opened.schema, seeds))
    _check(opened.schema, num_parts, method)
    hops = None if fanouts is None else resolve_fanouts(opened.schema, fanouts)
    said = _Said(progress or (lambda what: None))
    say = said.begin
    with opened_target(out) as opened_out:
        target = _NotedTarget(opened_out)
        say("starting Spark")
        local = target.local_scratch("spark")
        with spark_session(local, options.memory, options.master, options.conf) as session, ExitStack() as stack:
            exchange = OnSpark(session)
            stack.enter_context(watching(session, said.detail))
            say(f"assigning nodes by {method}")
            wanted = max(1, session.sparkContext.defaultParallelism)
            buckets = buckets_of(opened.bounds[-1], options.memory, wanted)
            state = State(target.staging, "cut")
            if method in BY_ID:
                exchange.run(buckets.count, [AssignById(opened, buckets, state, method, num_parts)])
            else:
                rule = PartitionRule(num_parts, PASSES, IMBALANCE, 1, KEY)
                assign_stream(exchange, opened, buckets, state, split, rule)
            visits = None if split is None or hops is None else ExpectedVisits(opened, buckets, state, split, hops)
            if visits is not None:
                say("finding the most used nodes")
                expect_visits(exchange, visits)
            numbers = NewNumbers(opened, buckets, state, num_parts, visits)
            bounds, changed = number_nodes(exchange, numbers)
            exchange.close()
            _write(session, target, numbers, bounds, changed, options, said)
            say("counting cut edges")
            assert target.described is not None
            written = StoreOnPlace(target.place, *target.described)
            return _report(OnSpark(session), written, buckets, split)


class _Said:
    """Stages, and how far they are, in one line each."""

    def __init__(self, say: Progress) -> None:
        self._say, self._stage = say, ""

    def begin(self, stage: str) -> None:
        self._stage = stage
        self._say(stage)

    def detail(self, text: str) -> None:
        self._say(f"{self._stage}: {text}")


class _NotedTarget:
    """A target that remembers what was written to it."""

    def __init__(self, inner: StoreTarget) -> None:
        self._inner, self.staging, self.place = inner, inner.staging, inner.place
        self.local_scratch, self.add = inner.local_scratch, inner.add
        self.described: tuple[Schema, tuple[PartRange, ...]] | None = None

    def describe(self, schema: Schema, parts: Sequence[PartRange]) -> None:
        self.described = schema, tuple(parts)
        self._inner.describe(schema, parts)


def _opened(place: StoragePath) -> StoreOnPlace:
    _, manifest = manifest_at(place)
    return StoreOnPlace(place, manifest.schema, manifest.parts)


def _check(schema: Schema, num_parts: int, method: str) -> None:
    if method in METHODS and method not in (*BY_ID, "stream"):
        raise ConfigError(f"method {method!r} needs one process; Spark has {HERE}, so give one of these")
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}; Spark has {HERE}")
    num_nodes = sum(t.num_nodes for t in schema.node_types)
    most = min(num_nodes, MOST_PARTS if method == "stream" else 2**15 - 1)
    as_int("num_parts", num_parts, 1, f"give 1 to {most}")
    if num_parts > most:
        raise ConfigError(f"num_parts is {num_parts} for {num_nodes} nodes and method {method!r}; give 1 to {most}")


def _split_of(schema: Schema, seeds: Any) -> SeedSplit | None:
    """The split that `seeds` names."""
    if seeds is None:
        return None
    node_type, split = (schema.node_types[0].name, seeds) if isinstance(seeds, str) else seeds
    if not isinstance(split, str) or split not in schema.node_type(node_type).splits:
        raise ConfigError(f"seeds are {seeds!r}; with Spark, give the name of a split, or (node type, name)")
    return SeedSplit(schema.type_index[node_type], split)


def buckets_of(num_nodes: int, memory: int, tasks: int) -> Buckets:
    """Buckets that fit the memory of a task, and one for every task if they are not too small."""
    left = max(memory - PROCESS_BYTES, memory // 8)
    size = min(MOST_NODES, max(1, left // NODE_BYTES), max(LEAST_NODES, -(-num_nodes // tasks)))
    return Buckets(num_nodes, size)


def _write(
    session: Any,
    target: StoreTarget,
    numbers: NewNumbers,
    bounds: Sequence[Sequence[int]],
    changed: set[int],
    options: SparkOptions,
    said: "_Said",
) -> None:
    schema = numbers.store.schema
    written = StoreOptions(
        weight=schema.weight, time=schema.time, homogeneous=schema.homogeneous, memory=options.memory
    )
    nodes, edges = node_streams(session, numbers, bounds, changed), edge_streams(session, numbers)
    write_shared(session, target, nodes, edges, written, lambda rows: rows, progress=said)


# --- report --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountInside:
    """EdgeFile of each relation whose source is in the part of their destination."""

    store: StoreOnPlace
    buckets: Buckets

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        inside = np.zeros(len(self.store.schema.relations), np.int64)
        for lists in self.store.in_lists(*self.buckets.span(bucket)):
            part, source = self.store.parts[lists.part], self.store.schema.sources[lists.relation]
            first, end = part.first_nodes[source], part.first_nodes[source] + part.num_nodes[source]
            for at in range(0, int(lists.indptr[-1]), CHUNK_EDGES):
                sources = lists.edges.read(at, min(int(lists.indptr[-1]), at + CHUNK_EDGES))
                inside[lists.relation] += ((sources >= first) & (sources < end)).sum()
        yield BucketMessage(0, {"sum": inside})


def _report(exchange: OnSpark, written: StoreOnPlace, buckets: Buckets, seeds: SeedSplit | None) -> PartitionReport:
    """What parts hold, and the edges between them: counted, not sampled."""
    inside = total(exchange, buckets.count, CountInside(written, buckets))
    schema = written.schema
    cuts = tuple(
        Cut(" ".join(relation.key), relation.num_edges, relation.num_edges - int(count))
        for relation, count in zip(schema.relations, inside, strict=True)
    )
    parts = []
    for part in written.parts:
        num_seeds = 0 if seeds is None else part.splits[schema.node_types[seeds.type].name][seeds.split]
        nodes = dict(zip(schema.type_index, part.num_nodes, strict=True))
        parts.append(PartCost(nodes, sum(part.num_edges), num_seeds))
    return PartitionReport(cuts, tuple(parts))
