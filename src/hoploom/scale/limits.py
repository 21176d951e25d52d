"""Where a plan breaks or crawls, and the ways out: one finding per limit, worst first."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from hoploom.config.values import as_bytes, as_seconds, as_share
from hoploom.scale.constants import Constants
from hoploom.scale.plan import ScalePlan, plan
from hoploom.scale.spec import Question

PARTITION_BYTES = 20  # per node, by any method: its part, how often it was sampled, its new id
STREAM_BYTES = 70  # per node, of the stream partitioner, before any of that; 68 were measured
METIS_BYTES = 32  # per edge: both directions as 64-bit ids, and as much again to work in
MOST_HOSTS = 1 << 16


@dataclass(frozen=True)
class Finding:
    """One limit."""

    level: Literal["breaks", "slow"]
    what: str
    way_out: str


def findings(answer: ScalePlan) -> list[Finding]:
    """All limits that a plan meets."""
    found = [*_memory(answer), *_partitioning(answer.question), *_speed(answer)]
    return sorted(found, key=lambda finding: finding.level)


def _memory(answer: ScalePlan) -> Iterator[Finding]:
    question, has = answer.question, as_bytes(answer.question.memory_per_host)
    enough = hosts_needed(question, answer.constants) if answer.wanted > question.memory_per_host else None
    ways = [f"{enough} hosts"] if enough else []
    if answer.cached:
        ways.append("a smaller cache")
    if answer.private > question.memory_per_host:
        what = f"trainers and cache take {as_bytes(answer.private)} of a host's {has}"
        ways += ["a smaller batch or fanouts", "fewer workers or ranks per host"]
        yield Finding("breaks", what, ", ".join(ways))
    elif answer.wanted > question.memory_per_host:
        missing = as_bytes(answer.wanted - question.memory_per_host)
        what = f"{missing} of what batches touch do not fit the {has} of a host and are read from its disk"
        ways += [f"{as_bytes(answer.wanted)} per host", "features of fewer bytes"]
        if question.store_memory is None:
            ways.append("a budget for the store (--store-memory): then rows are read ahead, many at once")
        yield Finding("slow", what, ", ".join(ways))


def hosts_needed(question: Question, constants: Constants) -> int | None:
    """The fewest hosts that hold everything in memory; None if no number does."""
    if question.topology == "auto":
        question = replace(question, topology="parts")
    question = replace(question, store_memory=None)

    def fits(hosts: int) -> bool:
        return plan(replace(question, hosts=hosts), constants).wanted <= question.memory_per_host

    most = min(question.nodes, MOST_HOSTS)
    enough = 1 + bisect_left(range(1, most + 1), True, key=fits)
    return enough if enough <= most else None


def _partitioning(question: Question) -> Iterator[Finding]:
    """Of `hoploom partition`, on one machine like the hosts. At its peak: nodes are assigned before all else."""
    from hoploom.ops.partition import MOST_NODES  # brings torch, which the help of `plan` does without

    if question.hosts == 1:
        return
    method, memory = str(question.edge_cut), question.memory_per_host
    assigning = {"stream": question.nodes * STREAM_BYTES, "metis": question.edges * METIS_BYTES}.get(method, 0)
    needed = max(assigning, question.nodes * PARTITION_BYTES)
    way_out = "a larger machine for this step, or `hoploom build --parts`, which assigns by a hash and streams"
    if needed > memory:
        what = f"partitioning takes {as_bytes(needed)} of {as_bytes(memory)}"
        yield Finding("breaks", what, way_out)
    if assigning and question.nodes > MOST_NODES:
        what = f"the {method} partitioner counts nodes up to {MOST_NODES:,}, there are {question.nodes:,}"
        yield Finding("breaks", what, "hash or range, which look at ids alone")


def _speed(answer: ScalePlan) -> Iterator[Finding]:
    """What makes the model wait; where its time is not known, the network is what may."""
    times, question = answer.times, answer.question
    if times.bottleneck == "model" or not (times.model or times.bottleneck in ("network", "disk")):
        return
    if times.bottleneck == "disk":
        ordering = "" if question.ordered else "the most used nodes first (`hoploom partition --parts 1`), "
        way_out = f"more memory for the store, {ordering}features of fewer bytes, smaller fanouts, a faster disk"
    elif times.bottleneck == "network":
        way_out = "a cache of remote rows, seeds of a rank's own host, features of fewer bytes, a faster network"
    else:
        workers = int(times.loading * question.workers / max(times.model, times.network)) + 1
        way_out = f"{min(workers, 1024)} workers per rank, if the host has cores for them"
    idle = f", the model waits {as_share(1 - times.model / times.total)} of the time" if times.model else ""
    yield Finding("slow", f"{times.bottleneck} bounds the step: {as_seconds(times.total)}{idle}", way_out)
