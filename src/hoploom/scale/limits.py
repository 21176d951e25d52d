"""Where a plan breaks or crawls, and the ways out: one finding per limit, worst first."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from hoploom.config.values import as_bytes, as_count, as_seconds, as_share
from hoploom.errors import ConfigError
from hoploom.ops.partition import MOST_NODES
from hoploom.scale.constants import Constants
from hoploom.scale.plan import ScalePlan, plan, total_seconds
from hoploom.scale.sizes import id_bytes, is_hashed
from hoploom.scale.spec import Question
from hoploom.store.format import ID_LIMIT

Level = Literal["breaks", "slow", "note"]
LOCAL_IDS = 2**31  # of the nodes of one batch
PARTITION_BYTES = 20  # per node, by any method: its part, how often it was sampled, its new id
STREAM_BYTES = 70  # per node, of the stream partitioner, before any of that; 68 were measured
METIS_BYTES = 32  # per edge: both directions as 64-bit ids, and as much again to work in
ID_MAP_BYTES = 32  # per node, of the hash table that ids are looked up in
LONG = 24 * 3600.0  # seconds of a build that are worth a word
WIDE = ("float32", "float64")
MOST_HOSTS = 1 << 16


@dataclass(frozen=True)
class Finding:
    """One limit."""

    level: Level
    what: str
    way_out: str


def findings(answer: ScalePlan) -> list[Finding]:
    """All limits that a plan meets."""
    found = [*_memory(answer), *_preparing(answer), *_speed(answer), *_notes(answer)]
    return sorted(found, key=lambda finding: ("breaks", "slow", "note").index(finding.level))


def _memory(answer: ScalePlan) -> Iterator[Finding]:
    question, has = answer.question, as_bytes(answer.question.memory_per_host)
    if answer.private > question.memory_per_host:
        what = f"trainers and cache take {as_bytes(answer.private)} of a host's {has}"
        yield Finding("breaks", what, ", ".join(_less_private(answer)))
    elif answer.wanted > question.memory_per_host:
        missing = as_bytes((1 - answer.resident) * answer.mapped)
        what = f"{missing} of what batches touch do not fit the {has} of a host and are read from its disk"
        yield Finding("slow", what, ", ".join(_less_mapped(answer)))
    if max(answer.batch.nodes, *(hop.picks for hop in answer.batch.hops)) >= LOCAL_IDS:
        what = f"a batch of {as_count(answer.batch.picks)} picks is beyond the 2^31 that ids within it count"
        yield Finding("breaks", what, "smaller fanouts or batches")
    if question.num_seeds < question.ranks:
        what = f"{as_count(question.num_seeds)} training seeds cannot feed {question.ranks} ranks"
        yield Finding("breaks", what, "fewer ranks, or more seeds")


def _less_private(answer: ScalePlan) -> Iterator[str]:
    question = answer.question
    yield from _enough_hosts(answer)
    if answer.cached:
        rest = question.memory_per_host - (answer.private - answer.cached)
        share = max(0, int(100 * question.cache * rest / answer.cached)) / 100  # a whole percent, rounded down
        yield f"a cache of at most {as_share(share)}" if share else "no cache"
    yield from ("a smaller batch or fanouts", "fewer workers or ranks per host")


def _less_mapped(answer: ScalePlan) -> Iterator[str]:
    yield from _enough_hosts(answer)
    yield f"{as_bytes(answer.wanted)} per host"
    for narrow in _narrow(answer.question):
        yield f"float16 features ({as_bytes(plan(narrow, answer.constants).wanted)} per host)"
    if answer.cached:
        yield f"no cache ({as_bytes(answer.wanted - answer.cached)} per host)"
    if answer.everywhere and answer.question.hosts > 1:
        yield "topology in parts"


def _enough_hosts(answer: ScalePlan) -> Iterator[str]:
    enough = hosts_needed(answer.question, answer.constants)
    if enough:
        yield f"{enough} hosts"


def hosts_needed(question: Question, constants: Constants) -> int | None:
    """The fewest hosts that hold everything in memory; None if no number does."""
    if question.topology == "auto":
        question = replace(question, topology="parts")

    def fits(hosts: int) -> bool:
        try:
            answer = plan(replace(question, hosts=hosts), constants)
        except ConfigError:  # more parts than a store takes, or than there are nodes
            return False
        return answer.wanted <= question.memory_per_host

    powers = (1 << power for power in range(MOST_HOSTS.bit_length()))
    enough = next((hosts for hosts in powers if fits(hosts)), None)
    if enough is None:
        return None
    between = range(enough // 2 + 1, enough)
    return between.start + bisect_left(between, True, key=fits)


def _narrow(question: Question) -> Iterator[Question]:
    """With float16 features, where they are wider."""
    if question.features is not None and question.features.dtype in WIDE:
        yield replace(question, features=replace(question.features, dtype="float16"))


def _preparing(answer: ScalePlan) -> Iterator[Finding]:
    """Of `hoploom partition` and `hoploom build`, on one machine like the hosts."""
    question, memory = answer.question, answer.question.memory_per_host
    method = question.edge_cut if isinstance(question.edge_cut, str) else ""
    needed = _partition_bytes(question, method)
    if question.hosts > 1 and needed > memory:
        ways = [way for way in ("stream", "hash") if memory >= _partition_bytes(question, way)]
        ways = ["a larger machine for this step", *ways, "`hoploom build --parts`, which assigns by a hash and streams"]
        what = f"partitioning{f' by {method}' if method else ''} takes {as_bytes(needed)} of {as_bytes(memory)}"
        yield Finding("breaks", what, ", or ".join(ways))
    if question.hosts > 1 and method in ("stream", "metis") and question.nodes > MOST_NODES:
        most, nodes = as_count(MOST_NODES), as_count(question.nodes)
        what = f"the {method} partitioner counts nodes up to {most}, there are {nodes}"
        yield Finding("breaks", what, "hash or range, which look at ids alone")
    id_map = question.nodes * (ID_MAP_BYTES + question.original_id_bytes)
    if question.original_id_bytes and id_map > memory:
        what = f"looking up ids takes a table of {as_bytes(id_map)}, more than {as_bytes(memory)}: it spills to disk"
        yield Finding("slow", what, "ids 0 to N - 1, which need no look-up, or --engine spark")
    seconds = total_seconds(answer.build)
    if seconds > LONG:
        what = f"building the store takes one machine like the one measured {as_seconds(seconds)}"
        yield Finding("slow", what, "--engine spark for the joins, a machine of more cores and faster disks")


def _partition_bytes(question: Question, method: str) -> int:
    """At its peak: nodes are assigned first, and all else comes after."""
    assigning = {"stream": question.nodes * STREAM_BYTES, "metis": question.edges * METIS_BYTES}.get(method, 0)
    return max(assigning, question.nodes * PARTITION_BYTES)


def _speed(answer: ScalePlan) -> Iterator[Finding]:
    times = answer.times
    if times.bottleneck == "model":
        what = f"the model bounds the step: {as_seconds(times.total)}"
        if answer.question.step_seconds is None:
            yield Finding("note", f"{what} on the cores measured", "measure it where it will run: --step-seconds")
        else:
            yield Finding("note", what, "a faster device")
        return
    idle = as_share(1 - times.model / times.total) if times.total else "0 %"
    workers = int(times.loading * times.workers / max(times.model, times.network, 1e-9)) + 1
    way_out = f"{min(workers, 1024)} workers per rank, if the host has cores for them"
    if times.bottleneck == "disk":
        way_out = "more memory or hosts, as above"
    elif times.bottleneck == "network":
        way_out = ", ".join(_less_traffic(answer))
    what = f"{times.bottleneck} bounds the step: {as_seconds(times.total)}, the model waits {idle} of the time"
    yield Finding("slow", what, way_out)


def _less_traffic(answer: ScalePlan) -> Iterator[str]:
    question = answer.question
    better = [("float16 features", narrow) for narrow in _narrow(question)]
    if question.cache < 0.05:
        better.append(("a cache of 5 %", replace(question, cache=0.05, hit_rate=None)))
    if not question.local_seeds and question.cut < 1 - 1 / question.hosts:
        better.append(("seeds of a rank's own host", replace(question, local_seeds=True)))
    for name, changed in better:
        moved = replace(answer, question=changed).traffic.total
        yield f"{name} ({as_share(1 - moved / answer.traffic.total)} less)"
    yield "a faster network"


def _notes(answer: ScalePlan) -> Iterator[Finding]:
    question = answer.question
    if id_bytes(question) == 8:
        what = f"{as_count(question.largest_type or question.nodes)} nodes of a type are beyond int32: ids take 8 bytes"
        way_out = f"types of fewer than {ID_LIMIT:,} nodes halve the {as_bytes(answer.store[0].disk)} of topology"
        yield Finding("note", what, way_out)
    if is_hashed(question):
        what = "a batch's nodes are found by hashing, a direct map would be larger than its budget"
        yield Finding("note", what, f"counted as {answer.constants.hashed_slowdown:.2g} times the sampling")
    if not question.local_seeds and question.cut < 0.9 * (1 - 1 / question.hosts):
        local = replace(answer, question=replace(question, local_seeds=True))
        what = "a rank's seeds come from all parts, as loaders deal them: a low edge cut saves nothing"
        way_out = f"with seeds of its own host a step moves {as_bytes(local.traffic.total)}"
        yield Finding("note", what, way_out)
    if isinstance(question.edge_cut, str) and question.edge_cut != "hash" and question.hosts > 1:
        what = f"the edge cut of {question.edge_cut}, {as_share(question.cut)}, is assumed"
        yield Finding("note", what, "`hoploom partition` reports your graph's own")
