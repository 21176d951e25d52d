"""Plan training on a cluster: memory, size, traffic and time of a batch, time of the build, and what does not fit.

All figures are expected values from a few measured rates; nothing is simulated. docs/scale.md explains the formulas and
compares them with measurements.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from hoploom.config.values import aligned, as_bytes, as_count, as_seconds, as_share
from hoploom.scale import sizes
from hoploom.scale.inputs import SHORT_ROW, Constants, Question, default_constants
from hoploom.scale.sizes import BatchSize, Item

ID_BYTES = 8
EDGE_BYTES = 16  # of an edge in a table and in a temporary file
LIBRARIES = 250e6  # private bytes of a process that has imported torch and Hoploom (benchmarks/RESULTS.md)
HASH_ENTRY = 48  # bytes of a node of the batch in a hash table, half of whose slots are free
PREFETCH = 2  # batches ahead per loader thread
STATES = 4  # weights, gradients and Adam's two

Line = Sequence[str]


@dataclass(frozen=True)
class Finding:
    """A limit of the plan, such as too little memory or a slow network, and how to avoid it."""

    level: str  # "breaks" or "slow"
    what: str
    way_out: str


@dataclass(frozen=True)
class ScalePlan:
    """The figures that answer a `question`, calculated on access from the rates in `constants`."""

    question: Question
    constants: Constants
    everywhere: bool  # every host maps the whole topology

    @cached_property
    def store(self) -> list[Item]:
        """The data of one host: an Item with disk and memory use for each kind of data, such as the topology."""
        return sizes.host_items(self.question, everywhere=self.everywhere)

    @cached_property
    def process(self) -> dict[str, float]:
        """Bytes of memory that one trainer process needs for itself, by purpose."""
        question, size = self.question, self.batch
        one_map = size.nodes * HASH_ENTRY if sizes.is_hashed(question) else question.nodes * sizes.SLOT
        batches = question.workers * PREFETCH + 1  # and the one that the model trains on
        kept = 0.0  # for the backward pass, as float32: input of both matrices, output, its gradient
        for hop, (into, out) in zip(reversed(size.hops), sizes.widths(question), strict=True):
            kept += hop.frontier * 4 * (2 * into + 2 * out)
        return {
            "libraries": LIBRARIES,
            "node maps": question.workers * one_map,
            f"{batches} batches": batches * size.bytes,
            "model and activations": kept + STATES * 4 * sizes.num_parameters(question),
        }

    @cached_property
    def batch(self) -> BatchSize:
        return sizes.batch_size(self.question, everywhere=self.everywhere)

    @cached_property
    def traffic(self) -> dict[str, float]:
        """Bytes that one rank receives over the network in a step, by purpose."""
        return sizes.traffic(self.question, self.batch)

    @cached_property
    def times(self) -> dict[str, float]:
        """Seconds that a rank's step spends on each activity. Sampling and gathering run beside network and model."""
        question, constants, moved = self.question, self.constants, sum(self.traffic.values())
        slower = constants.hashed_slowdown if sizes.is_hashed(question) else 1.0
        return {
            "sampling": self.batch.picks / constants.sample_picks * slower / question.workers,
            "gathering": self.batch.nodes * gather_seconds(question, constants) / question.workers,
            "network": moved * question.ranks_per_host / question.network,  # of the host's link
            "model": question.step_seconds,  # 0 if it was not measured
        }

    @property
    def step(self) -> float:
        """Seconds of a step: the longest of loading (sampling and gathering), network and model."""
        return max(self.times["sampling"] + self.times["gathering"], self.times["network"], self.times["model"])

    @property
    def bottleneck(self) -> str:
        longest = ("network", "model") if self.step in self.times.values() else ("sampling", "gathering")
        return max(longest, key=self.times.__getitem__)

    @property
    def build(self) -> dict[str, float]:
        """Seconds of each stage of building the store from tables, on one machine with the measured rates."""
        question, constants = self.question, self.constants
        return {
            "read the tables": _table_bytes(question) / constants.disk_read,
            "look up the ids": question.edges / constants.join_edges,
            **_ordering(question, constants),
            "write the store": _store_bytes(question) / constants.disk_write,
        }

    @property
    def partition(self) -> dict[str, float]:
        """Seconds of each stage of cutting the store into parts, on one machine with the measured rates."""
        question, constants = self.question, self.constants
        edges = question.edges if question.edge_cut == "stream" else 0
        return {
            "assign the nodes": edges / (constants.partition_edges * constants.cores),
            "read the store": _store_bytes(question) / constants.disk_read,
            **_ordering(question, constants),
            "write the parts": _store_bytes(question) / constants.disk_write,
        }

    @property
    def disk(self) -> float:
        """Bytes that the data of a host takes on its disk."""
        return sum(item.disk for item in self.store)

    @property
    def mapped(self) -> float:
        """Bytes of a host's files that batches touch."""
        return sum(item.memory for item in self.store) - self.cached

    @property
    def cached(self) -> float:
        return sizes.cache_bytes(self.question)

    @property
    def private(self) -> float:
        """Bytes of memory for a host's trainers and its cache. They must fit in memory, because no file backs them."""
        return self.cached + self.question.ranks_per_host * sum(self.process.values())

    @property
    def wanted(self) -> float:
        """Bytes of memory with which a host never waits for its disk."""
        return self.mapped + self.private

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.question.num_seeds // (self.question.batch_size * self.question.ranks))


def plan(question: Question, constants: Constants | None = None) -> ScalePlan:
    """Return the plan for a question. Topology "auto" puts the whole topology on every host if memory allows."""
    constants = constants or default_constants()
    choices = {"auto": (True, False), "everywhere": (True,), "parts": (False,)}[question.topology]
    drafts = [ScalePlan(question, constants, everywhere or question.hosts == 1) for everywhere in choices]
    return next((draft for draft in drafts if draft.wanted <= question.memory_per_host), drafts[-1])


def findings(answer: ScalePlan) -> list[Finding]:
    """Return a plan's limits, worst first: too little memory, then loading or a network slower than the model."""
    question, times, found = answer.question, answer.times, []
    has, waiting = as_bytes(question.memory_per_host), 1 - times["model"] / answer.step
    enough = hosts_needed(question, answer.constants) if answer.wanted > question.memory_per_host else None
    ways = (f"{enough} hosts, " if enough else "") + ("a smaller cache, " if answer.cached else "")
    if answer.private > question.memory_per_host:
        what = f"trainers and cache take {as_bytes(answer.private)} of a host's {has}"
        ways += "a smaller batch or fanouts, fewer workers or ranks per host"
        found.append(Finding("breaks", what, ways))
    elif answer.wanted > question.memory_per_host:
        missing = as_bytes(answer.wanted - question.memory_per_host)
        what = f"{missing} of what batches touch do not fit the {has} of a host and are read from its disk"
        ways += f"{as_bytes(answer.wanted)} per host, features of fewer bytes, "
        ways += "a budget for the store (`memory` in run.toml): then rows are read ahead, many at once"
        found.append(Finding("slow", what, ways))
    if answer.bottleneck == "network" or (times["model"] and answer.bottleneck != "model"):
        made = (times["sampling"] + times["gathering"]) * question.workers  # seconds of one worker
        workers = min(1024, int(made / (max(times["model"], times["network"]) or made)) + 1)
        ways = f"{workers} workers per rank, if the host has cores for them"
        if answer.bottleneck == "network":
            ways = "a cache of remote rows, seeds of a rank's own host, features of fewer bytes, a faster network"
        idle = f", the model waits {as_share(waiting)} of the time" if times["model"] else ""
        found.append(Finding("slow", f"{answer.bottleneck} bounds the step: {as_seconds(answer.step)}{idle}", ways))
    return found


def hosts_needed(question: Question, constants: Constants) -> int | None:
    """Return the fewest hosts whose memory holds everything that batches touch; None if no number of hosts does."""
    if question.topology == "auto":
        question = replace(question, topology="parts")

    def fits(hosts: int) -> bool:
        return plan(replace(question, hosts=hosts), constants).wanted <= question.memory_per_host

    most = min(question.nodes, 1 << 16)
    enough = 1 + bisect_left(range(1, most + 1), True, key=fits)
    return enough if enough <= most else None


def gather_seconds(question: Question, constants: Constants) -> float:
    """Return the seconds to gather one node's rows, one row from the table of each field."""
    rows = sizes.node_fields(question).values()
    return sum(1 / constants.gather_rows + max(0, row - SHORT_ROW) / constants.gather_bytes for row in rows)


def _ordering(question: Question, constants: Constants) -> dict[str, float]:
    """Return the seconds of sorting the edges, by stage. Tables larger than a quarter of memory go through files."""
    waiting = _table_bytes(question)
    spilled = waiting if waiting > question.memory_per_host / 4 else 0.0
    return {
        "spill and read again": spilled / constants.disk_write + spilled / constants.disk_read,
        "sort into lists": question.edges / constants.sort_edges,
    }


def _table_bytes(question: Question) -> int:
    return question.nodes * (ID_BYTES + sizes.node_bytes(question)) + question.edges * EDGE_BYTES


def _store_bytes(question: Question) -> float:
    """Return the bytes of the whole store on disk."""
    return sum(item.disk for item in sizes.host_items(question, everywhere=False)) * question.hosts


# --- text ----------------------------------------------------------------------------------------


def as_json(answer: ScalePlan) -> str:
    """Return a plan as one JSON object: bytes, seconds and counts."""
    contents = {
        "question": asdict(answer.question),
        "constants": asdict(answer.constants),
        "topology_everywhere": answer.everywhere,
        "host": {"store": [asdict(item) for item in answer.store]}
        | {name: getattr(answer, name) for name in ("disk", "mapped", "private", "wanted")},
        "process": answer.process,
        "batch": asdict(answer.batch) | {"nodes": answer.batch.nodes, "picks": answer.batch.picks},
        "traffic": answer.traffic,
        "times": answer.times | {"step": answer.step, "bottleneck": answer.bottleneck},
        "epoch": {"steps": answer.steps_per_epoch, "seconds": answer.steps_per_epoch * answer.step},
        "build": answer.build,
        "partition": answer.partition,
        "findings": [asdict(finding) for finding in findings(answer)],
    }
    return json.dumps(contents, indent=1, allow_nan=False)


def as_text(answer: ScalePlan) -> str:
    """Return a plan as text: the question, one table per subject, then the limits."""
    question = answer.question
    constants = f"Constants: measured on {answer.constants}."
    if answer.constants == default_constants():
        constants = (
            f"Constants: the built-in ones, measured on {answer.constants}.\n"
            "Not your machine: `hoploom bench --out bench.json` measures it, --constants bench.json uses that."
        )
    headline = (
        f"{as_count(question.nodes)} nodes, {as_count(question.edges)} edges, hosts: {question.hosts}, "
        f"ranks: {question.ranks}, batches of {question.batch_size:,} seeds, "
        f"fanouts {','.join(map(str, question.fanouts))}\n{constants}"
    )
    batch = answer.batch
    hops = [
        (f"hop {number}", as_count(hop.frontier), as_count(hop.picks), as_count(hop.nodes), "")
        for number, hop in enumerate(batch.hops, 1)
    ]
    whole = ("together", "", as_count(batch.picks), as_count(batch.nodes), as_bytes(batch.bytes))
    sections: dict[str, Sequence[Line]] = {
        "Memory and disk of a host": _store(answer),
        "A trainer process adds": [(name, as_bytes(size), "") for name, size in answer.process.items()],
        "A batch": [("", "expanded", "picks", "distinct nodes", ""), *hops, whole],
        "Network, per step of a rank": _network(answer),
        "Time of a step": _times(answer),
        "Preparing, on one machine": _preparing(answer),
    }
    tables = [f"{title}\n{_columns(lines)}" for title, lines in sections.items()]
    found = [f"  {limit.level}: {limit.what}\n    way out: {limit.way_out}" for limit in findings(answer)]
    last = "\n".join(["Where it breaks" if found else "Nothing breaks.", *found])
    return "\n\n".join([headline, *tables, last])


def _columns(lines: Sequence[Line]) -> str:
    """Return lines of (name, figures, remark) as a text table, with the figures right-aligned."""
    figures = len(lines[0]) - 2
    return "\n".join(f"  {line}" for line in aligned(lines, [False, *[True] * figures, False]))


def _store(answer: ScalePlan) -> list[Line]:
    question, (topology, *items) = answer.question, answer.store
    where = "the whole on every host" if answer.everywhere and question.hosts > 1 else ""
    verdict = f"of {as_bytes(question.memory_per_host)}"
    if answer.wanted > question.memory_per_host:
        verdict += ", too much"
    return [
        ("", "disk", "memory", ""),
        (topology.name, as_bytes(topology.disk), as_bytes(topology.memory), where),
        *((item.name, as_bytes(item.disk), as_bytes(item.memory), "") for item in items),
        ("trainers", "", as_bytes(answer.private - answer.cached), f"processes: {question.ranks_per_host}"),
        ("together", as_bytes(answer.disk), as_bytes(answer.wanted), verdict),
    ]


def _network(answer: ScalePlan) -> list[Line]:
    question, batch = answer.question, answer.batch
    if question.hosts == 1:
        return [("one host", "nothing", "")]
    hits = f", the cache holds {as_share(batch.hits)} of them" if answer.cached else ""
    total = sum(answer.traffic.values())
    per_host = total * question.ranks_per_host
    remarks = {
        "hops": f"{as_count(batch.remote_picks)} picks are remote",
        "rows": f"{as_count(batch.remote_rows)} nodes are remote{hits}",
        "gradients": "all-reduce, shared by the ranks of a host",
    }
    network = as_bytes(question.network)
    return [
        *((name, as_bytes(size), remarks[name]) for name, size in answer.traffic.items()),
        ("together", as_bytes(total), f"{as_bytes(per_host)} per host and step"),
        ("per second", f"{as_bytes(per_host / answer.step)}/s", f"per host and direction, of {network}/s"),
    ]


def _times(answer: ScalePlan) -> list[Line]:
    steps, seeds = answer.steps_per_epoch, as_count(answer.question.num_seeds)
    remarks = {"sampling": f"loader threads: {answer.question.workers}", "model": "as given"}
    lines = [(name, as_seconds(value), remarks.get(name, "")) for name, value in answer.times.items() if value]
    if not answer.times["model"]:
        lines.append(("model", "", "not measured; if it is slower than this, it sets the time of a step"))
    return [
        *lines,
        ("step", as_seconds(answer.step), f"limited by {answer.bottleneck} (loading, network and model run at once)"),
        ("epoch", as_seconds(steps * answer.step), f"{steps:,} steps for {seeds} seeds"),
    ]


def _preparing(answer: ScalePlan) -> list[Line]:
    lines: list[Line] = [(name, as_seconds(seconds), "") for name, seconds in answer.build.items() if seconds]
    lines.append(("tables to store", as_seconds(sum(answer.build.values())), ""))
    if answer.question.hosts > 1:
        how = f"edge cut: {answer.question.edge_cut}"
        lines.append(("store to parts", as_seconds(sum(answer.partition.values())), how))
    return lines
