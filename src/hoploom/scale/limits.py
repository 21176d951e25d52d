"""Where a plan breaks or crawls, and the ways out: one finding per limit, worst first."""

from dataclasses import dataclass, replace
from typing import Literal

from hoploom.config.values import as_bytes, as_count, as_seconds, as_share
from hoploom.errors import ConfigError
from hoploom.ops.partition import MOST_NODES
from hoploom.scale.constants import Constants
from hoploom.scale.plan import ScalePlan, plan
from hoploom.scale.sizes import batch_size, id_bytes, is_hashed, traffic
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
    found = [
        *_memory(answer),
        *_batches(answer),
        *_preparing(answer),
        *_speed(answer),
        *_notes(answer),
    ]
    return sorted(found, key=lambda finding: ("breaks", "slow", "note").index(finding.level))


def _memory(answer: ScalePlan) -> list[Finding]:
    question = answer.question
    has = as_bytes(question.memory_per_host)
    if answer.private > question.memory_per_host:
        out = ["a smaller batch or fanouts", "fewer workers or ranks per host"]
        enough = hosts_needed(question, answer.constants)
        if answer.cached:
            smaller = _largest_cache(answer)
            out.insert(0, f"a cache of at most {as_share(smaller)}" if smaller else "no cache")
        if enough:
            out.insert(0, f"{enough} hosts")
        what = f"trainers and cache take {as_bytes(answer.private)} of a host's {has}"
        return [Finding("breaks", what, ", ".join(out))]
    if answer.wanted <= question.memory_per_host:
        return []
    missing = (1 - answer.resident) * answer.mapped
    what = f"{as_bytes(missing)} of what batches touch do not fit the {has} of a host and are read from its disk"
    return [Finding("slow", what, ", ".join(_room(answer)))]


def _room(answer: ScalePlan) -> list[str]:
    question = answer.question
    enough = hosts_needed(question, answer.constants)
    out = [f"{enough} hosts"] if enough else []
    out.append(f"{as_bytes(answer.wanted)} per host")
    if question.features is not None and question.features.dtype in WIDE:
        narrow = plan(replace(question, features=replace(question.features, dtype="float16")), answer.constants)
        out.append(f"float16 features ({as_bytes(narrow.wanted)} per host)")
    if answer.cached:
        out.append(f"no cache ({as_bytes(answer.wanted - answer.cached)} per host)")
    if answer.everywhere and question.hosts > 1:
        out.append("topology in parts")
    return out


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

    high = 1
    while not fits(high):
        high *= 2
        if high > MOST_HOSTS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _largest_cache(answer: ScalePlan) -> float:
    """Rounded down to a whole percent."""
    room = answer.question.memory_per_host - (answer.private - answer.cached)
    return max(0, int(100 * answer.question.cache * room / answer.cached)) / 100


def _batches(answer: ScalePlan) -> list[Finding]:
    question = answer.question
    found = []
    if answer.batch.nodes >= LOCAL_IDS or max(hop.picks for hop in answer.batch.hops) >= LOCAL_IDS:
        what = f"a batch of {as_count(answer.batch.picks)} picks is beyond the 2^31 that ids within it count"
        found.append(Finding("breaks", what, "smaller fanouts or batches"))
    if question.num_seeds < question.ranks:
        what = f"{as_count(question.num_seeds)} training seeds cannot feed {question.ranks} ranks"
        found.append(Finding("breaks", what, "fewer ranks, or more seeds"))
    return found


def _preparing(answer: ScalePlan) -> list[Finding]:
    question = answer.question
    has, found = question.memory_per_host, _partitioning(question) if question.hosts > 1 else []
    if question.original_id_bytes:
        id_map = question.nodes * (ID_MAP_BYTES + question.original_id_bytes)
        if id_map > has:
            what = f"looking up ids takes a table of {as_bytes(id_map)}, more than {as_bytes(has)}: it spills to disk"
            found.append(Finding("slow", what, "ids 0 to N - 1, which need no look-up, or --engine spark"))
    seconds = sum(stage.seconds for stage in answer.build)
    if seconds > LONG:
        what = f"building the store takes one machine like the one measured {as_seconds(seconds)}"
        found.append(Finding("slow", what, "--engine spark for the joins, a machine of more cores and faster disks"))
    return found


def _partitioning(question: Question) -> list[Finding]:
    """Of `hoploom partition`, on one machine like the hosts."""
    method = question.edge_cut if isinstance(question.edge_cut, str) else ""
    has, found = question.memory_per_host, []
    needed = _partition_bytes(question, method)
    if needed > has:
        ways = ["a larger machine for this step"]
        ways += [other for other in ("stream", "hash") if needed > has >= _partition_bytes(question, other)]
        ways.append("`hoploom build --parts`, which assigns by a hash and streams")
        what = f"partitioning{f' by {method}' if method else ''} takes {as_bytes(needed)} of {as_bytes(has)}"
        found.append(Finding("breaks", what, ", or ".join(ways)))
    if method in ("stream", "metis") and question.nodes > MOST_NODES:
        what = (
            f"the {method} partitioner counts nodes up to {as_count(MOST_NODES)}, there are {as_count(question.nodes)}"
        )
        found.append(Finding("breaks", what, "hash or range, which look at ids alone"))
    return found


def _partition_bytes(question: Question, method: str) -> int:
    """At its peak: nodes are assigned first, and all else comes after."""
    assigning = {"stream": question.nodes * STREAM_BYTES, "metis": question.edges * METIS_BYTES}.get(method, 0)
    return max(assigning, question.nodes * PARTITION_BYTES)


def _speed(answer: ScalePlan) -> list[Finding]:
    times = answer.times
    what = f"{times.bottleneck} bounds the step: {as_seconds(times.total)}"
    idle = as_share(1 - times.model / times.total) if times.total else "0 %"
    if times.bottleneck == "model":
        given = answer.question.step_seconds is not None
        what = f"the model bounds the step: {as_seconds(times.total)}{'' if given else ' on the cores measured'}"
        return [Finding("note", what, "a faster device" if given else "measure it where it will run: --step-seconds")]
    if times.bottleneck in ("sampling", "gathering", "waiting"):
        workers = -(-int(times.loading * times.workers / max(times.model, times.network, 1e-9)) // 1) + 1
        out = f"{min(workers, 1024)} workers per rank, if the host has cores for them"
        return [Finding("slow", f"{what}, the model waits {idle} of the time", out)]
    if times.bottleneck == "disk":
        return [Finding("slow", f"{what}, the model waits {idle} of the time", "more memory or hosts, as above")]
    out = ", ".join(_less_traffic(answer))
    return [Finding("slow", f"{what}, the model waits {idle} of the time", out)]


def _less_traffic(answer: ScalePlan) -> list[str]:
    question, now = answer.question, answer.traffic.total
    better: list[tuple[str, Question]] = []
    if question.features is not None and question.features.dtype in WIDE:
        better.append(("float16 features", replace(question, features=replace(question.features, dtype="float16"))))
    if question.cache < 0.05:
        better.append(("a cache of 5 %", replace(question, cache=0.05, hit_rate=None)))
    if not question.local_seeds and question.cut < 1 - 1 / question.hosts:
        better.append(("seeds of a rank's own host", replace(question, local_seeds=True)))
    out = []
    for name, changed in better:
        moved = traffic(changed, batch_size(changed, everywhere=answer.everywhere)).total
        out.append(f"{name} ({as_share(1 - moved / now)} less)")
    return [*out, "a faster network"]


def _notes(answer: ScalePlan) -> list[Finding]:
    question, found = answer.question, []
    if id_bytes(question) == 8:
        what = f"{as_count(question.largest_type or question.nodes)} nodes of a type are beyond int32: ids take 8 bytes"
        way_out = f"types of fewer than {ID_LIMIT:,} nodes halve the {as_bytes(answer.store[0].disk)} of topology"
        found.append(Finding("note", what, way_out))
    if is_hashed(question):
        what = "a batch's nodes are found by hashing, a direct map would be larger than its budget"
        found.append(Finding("note", what, f"counted as {answer.constants.hashed_slowdown:.2g} times the sampling"))
    if not question.local_seeds and question.cut < 0.9 * (1 - 1 / question.hosts):
        local = replace(question, local_seeds=True)
        moved = traffic(local, batch_size(local, everywhere=answer.everywhere)).total
        what = "a rank's seeds come from all parts, as loaders deal them: a low edge cut saves nothing"
        found.append(Finding("note", what, f"with seeds of its own host a step moves {as_bytes(moved)}"))
    if isinstance(question.edge_cut, str) and question.edge_cut != "hash" and question.hosts > 1:
        what = f"the edge cut of {question.edge_cut}, {as_share(question.cut)}, is assumed"
        found.append(Finding("note", what, "`hoploom partition` reports your graph's own"))
    return found
