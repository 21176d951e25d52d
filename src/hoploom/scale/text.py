"""A plan as text, as tables and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from hoploom.config.values import as_bytes, as_count, as_rate, as_seconds, as_share
from hoploom.scale.constants import default_constants
from hoploom.scale.plan import ScalePlan, findings

Line = Sequence[str]


def as_json(answer: ScalePlan) -> str:
    """Return a plan as one JSON object: bytes, seconds and counts."""
    return json.dumps(answer.as_dict(), indent=1, allow_nan=False)


def as_text(answer: ScalePlan) -> str:
    """Return a plan as text: one section per subject, then the limits."""
    tables = [f"{title}\n{columns(lines)}" for title, lines in sections(answer).items()]
    found = [f"  {limit.level}: {limit.what}\n    way out: {limit.way_out}" for limit in findings(answer)]
    last = "\n".join(["Where it breaks" if found else "Nothing breaks.", *found])
    return "\n\n".join([headline(answer), *tables, last])


def sections(answer: ScalePlan) -> dict[str, Sequence[Line]]:
    """Return the tables by title. A line is a name, figures and a remark; a first line without a name is a header."""
    return {
        "Memory and disk of a host": _store(answer),
        "A trainer process adds": [(name, as_bytes(size), "") for name, size in answer.process.items()],
        "A batch": _batch(answer),
        "Network, per step of a rank": _network(answer),
        "Time of a step": _times(answer),
        "Preparing, on one machine": _preparing(answer),
        **({"On Spark": _spark(answer)} if answer.spark else {}),
    }


def headline(answer: ScalePlan) -> str:
    """Return the question in a line, and the source of the rates."""
    question = answer.question
    constants = f"Constants: measured on {answer.constants}."
    if answer.constants == default_constants():
        constants = (
            f"Constants: the built-in ones, measured on {answer.constants}.\n"
            "Not your machine: `hoploom bench --out bench.json` measures it, --constants bench.json uses that."
        )
    return (
        f"{as_count(question.nodes)} nodes, {as_count(question.edges)} edges, hosts: {question.hosts}, "
        f"ranks: {question.ranks}, batches of {question.batch_size:,} seeds, "
        f"fanouts {','.join(map(str, question.fanouts))}\n{constants}"
    )


def columns(lines: Sequence[Line]) -> str:
    """Return a table as text: names left, figures right-aligned, then remarks."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = []
    for name, *cells, remark in lines:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:-1], strict=True)]
        rows.append("  ".join(["", name.ljust(widths[0]), *padded, remark]).rstrip())
    return "\n".join(rows)


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


def _batch(answer: ScalePlan) -> list[Line]:
    batch = answer.batch
    hops = [
        (f"hop {number}", as_count(hop.frontier), as_count(hop.picks), as_count(hop.nodes), "")
        for number, hop in enumerate(batch.hops, 1)
    ]
    return [
        ("", "expanded", "picks", "distinct nodes", ""),
        *hops,
        ("together", "", as_count(batch.picks), as_count(batch.nodes), as_bytes(batch.bytes)),
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
    return [
        *((name, as_bytes(size), remarks[name]) for name, size in answer.traffic.items()),
        ("together", as_bytes(total), f"{as_bytes(per_host)} per host and step"),
        (
            "per second",
            as_rate(per_host / answer.times.total),
            f"per host and direction, of {as_rate(question.network)}",
        ),
    ]


def _times(answer: ScalePlan) -> list[Line]:
    times, steps = answer.times, answer.steps_per_epoch
    remarks = {"sampling": f"loader threads: {answer.question.workers}", "model": "as given"}
    shares = [(name, as_seconds(value), remarks.get(name, "")) for name, value in asdict(times).items() if value]
    if not times.model:
        shares.append(("model", "", "not measured; if it is slower than this, it sets the time of a step"))
    return [
        *shares,
        ("step", as_seconds(times.total), f"limited by {times.bottleneck} (loading, network and model run at once)"),
        ("epoch", as_seconds(steps * times.total), f"{steps:,} steps for {as_count(answer.question.num_seeds)} seeds"),
    ]


def _preparing(answer: ScalePlan) -> list[Line]:
    lines: list[Line] = [(name, as_seconds(seconds), "") for name, seconds in answer.build.items() if seconds]
    lines.append(("tables to store", as_seconds(sum(answer.build.values())), ""))
    if answer.question.hosts > 1:
        how = f"edge cut: {answer.question.edge_cut}"
        how += ", without the time of METIS itself" * (answer.question.edge_cut == "metis")
        lines.append(("store to parts", as_seconds(sum(answer.partition.values())), how))
    return lines


def _spark(answer: ScalePlan) -> list[Line]:
    question = answer.question
    cores = (question.executors or 0) * question.executor_cores
    return [
        (name, as_seconds(seconds), f"cores: {cores}, core-hours: {seconds * cores / 3600:,.2f}")
        for name, seconds in answer.spark.items()
    ]
