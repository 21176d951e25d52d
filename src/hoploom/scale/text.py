"""A plan for people, and for programs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from hoploom.config.values import as_bytes, as_count, as_rate, as_seconds, as_share
from hoploom.scale.constants import Constants, figures
from hoploom.scale.limits import findings
from hoploom.scale.plan import BuildStage, ScalePlan, total_seconds
from hoploom.scale.spec import Question

Line = Sequence[str]


def as_text(answer: ScalePlan) -> str:
    """All of a plan, a section each."""
    sections: dict[str, Sequence[Line]] = {
        "Memory and disk of a host": _store(answer),
        "A trainer process adds": [(item.name, as_bytes(item.memory), "") for item in answer.process],
        "A batch": _batch(answer),
        "Network, per step of a rank": _network(answer),
        "Time of a step": _times(answer),
        "Preparing, on one machine": _preparing(answer),
    }
    tables = [f"{title}\n{columns(lines)}" for title, lines in sections.items()]
    return "\n\n".join([_headline(answer.question), _constants(answer), *tables, _findings(answer)])


def _headline(question: Question) -> str:
    features = question.features
    width = "no features" if features is None else f"{features.shape[0]} x {features.dtype} features"
    hosts, parts, ranks = (
        f"{count} {what}{'s' * (count > 1)}"
        for count, what in ((question.hosts, "host"), (question.parts, "part"), (question.ranks_per_host, "rank"))
    )
    return (
        f"{as_count(question.nodes)} nodes, {as_count(question.edges)} edges, {width}, "
        f"on {hosts} of {as_bytes(question.memory_per_host)} ({parts}),\n"
        f"{ranks} per host, batches of {question.batch_size:,} seeds, "
        f"fanouts {','.join(map(str, question.fanouts))}, mode {question.mode}"
    )


def _machine(constants: Constants) -> str:
    return f"{constants.machine}, {constants.cores} cores, {constants.date}, Hoploom {constants.hoploom}"


def _constants(answer: ScalePlan) -> str:
    where = _machine(answer.constants)
    if answer.uses_defaults:
        return (
            f"Constants: the built-in ones, measured on {where}.\n"
            "Not your machine: `hoploom bench --out bench.json` measures it, --constants bench.json uses that."
        )
    return f"Constants: measured{' quickly' if answer.constants.quick else ''} on {where}."


def columns(lines: Sequence[Line]) -> str:
    """Names to the left, figures below each other, remarks behind."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = []
    for name, *cells, remark in lines:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:-1], strict=True)]
        rows.append("  ".join(["", name.ljust(widths[0]), *padded, remark]).rstrip())
    return "\n".join(rows)


def _store(answer: ScalePlan) -> list[Line]:
    question, ranks = answer.question, answer.question.ranks_per_host
    where = "the whole on every host" if answer.everywhere and question.hosts > 1 else ""
    items = [
        (item.name, as_bytes(item.disk), as_bytes(item.memory), where if item.name == "topology" else "")
        for item in answer.store
    ]
    verdict = f"of {as_bytes(question.memory_per_host)}"
    if answer.wanted > question.memory_per_host:
        verdict += ", too much" if answer.resident == 0 else f"; {as_share(answer.resident)} of the files fit"
    return [
        ("", "disk", "memory", ""),
        *items,
        ("trainers", "", as_bytes(answer.private - answer.cached), f"{ranks} process{'es' * (ranks > 1)}"),
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
        ("share of the graph", "", "", as_share(batch.nodes / answer.question.nodes), ""),
    ]


def _network(answer: ScalePlan) -> list[Line]:
    question, batch, moved = answer.question, answer.batch, answer.traffic
    if question.hosts == 1:
        return [("one host", "nothing", "")]
    hits = f", the cache holds {as_share(batch.hits)} of them" if answer.cached else ""
    per_host = moved.total * question.ranks_per_host
    link = "one loopback connection" if question.network is None else as_rate(question.network)
    picks = f"{as_count(batch.remote_picks)} of {as_count(batch.picks)} picks are remote"
    rows = f"{as_count(batch.remote_rows)} of {as_count(batch.nodes)} nodes are remote{hits}"
    return [
        ("hops", as_bytes(moved.hops), picks),
        ("rows", as_bytes(moved.rows), rows),
        ("gradients", as_bytes(moved.gradients), "all-reduce, shared by the ranks of a host"),
        ("together", as_bytes(moved.total), f"{as_bytes(per_host)} per host and step"),
        ("per second", as_rate(per_host / answer.times.total), f"per host and direction, of {link}"),
    ]


def _times(answer: ScalePlan) -> list[Line]:
    times, steps = answer.times, answer.steps_per_epoch
    as_measured = "forward and backward, on the cores measured"
    remarks = {
        "sampling": f"{times.workers} loader threads",
        "model": as_measured if answer.question.step_seconds is None else "as given",
    }
    shares = [(name, as_seconds(seconds), remarks.get(name, "")) for name, seconds in times.shares.items() if seconds]
    seeds = as_count(answer.question.num_seeds)
    return [
        *shares,
        ("step", as_seconds(times.total), f"bound by {times.bottleneck}: loading, network and model overlap"),
        ("epoch", as_seconds(steps * times.total), f"{steps:,} steps for {seeds} seeds"),
    ]


def _preparing(answer: ScalePlan) -> list[Line]:
    stages = [*answer.build, BuildStage("tables to store", total_seconds(answer.build))]
    lines = [(stage.name, as_seconds(stage.seconds), "") for stage in stages if stage.seconds]
    if answer.question.hosts > 1:
        how = answer.question.edge_cut if isinstance(answer.question.edge_cut, str) else "a given edge cut"
        how += ", without the time of METIS itself" * (how == "metis")
        assigning = answer.partition[0]
        if assigning.seconds:
            lines.append((assigning.name, as_seconds(assigning.seconds), ""))
        lines.append(("store to parts", as_seconds(total_seconds(answer.partition)), f"by {how}"))
    return [*lines, ("opening it all", as_seconds(answer.opening), "")]


def _findings(answer: ScalePlan) -> str:
    found = findings(answer)
    harmless = all(finding.level == "note" for finding in found)
    title = "Nothing breaks." if harmless else "Where it breaks"
    return "\n".join([title, *(f"  {f.level}: {f.what}\n    way out: {f.way_out}" for f in found)])


def as_json(answer: ScalePlan) -> str:
    """The same as one JSON object: bytes, seconds and counts."""
    contents = {
        "question": asdict(answer.question),
        "constants": asdict(answer.constants) | {"built_in": answer.uses_defaults},
        "topology_everywhere": answer.everywhere,
        "host": {
            "store": [asdict(item) for item in answer.store],
            "disk": answer.disk,
            "memory_wanted": answer.wanted,
            "memory_private": answer.private,
            "resident_share": answer.resident,
        },
        "process": [asdict(item) for item in answer.process],
        "batch": asdict(answer.batch) | {"nodes": answer.batch.nodes, "picks": answer.batch.picks},
        "traffic": asdict(answer.traffic) | {"total": answer.traffic.total},
        "times": asdict(answer.times) | {"step": answer.times.total, "bottleneck": answer.times.bottleneck},
        "epoch": {"steps": answer.steps_per_epoch, "seconds": answer.steps_per_epoch * answer.times.total},
        "opening": answer.opening,
        "build": [asdict(stage) for stage in answer.build],
        "partition": [asdict(stage) for stage in answer.partition],
        "findings": [asdict(finding) for finding in findings(answer)],
    }
    return json.dumps(contents, indent=1, allow_nan=False)


UNITS: dict[str, Callable[[float], str]] = {
    "B": as_rate,
    "s": as_seconds,
    "times as long": lambda value: f"{value:.2f} times as long",
    "flop/s": lambda value: f"{value / 1e9:,.1f} Gflop/s",
}


def constants_as_text(constants: Constants) -> str:
    """What `hoploom bench` prints: first what depends on a size."""
    lines: list[Line] = []
    for name, figure in sorted(figures().items(), key=lambda item: not item[1].where):
        value = getattr(constants, name)
        if value is None:
            lines.append((figure.what, "not measured", ""))
            continue
        for size, rate in value if figure.where else [(0.0, value)]:
            lines.append((figure.what, _shown(rate, figure.unit), figure.where.format(as_bytes(size))))
    quick = ", quickly" if constants.quick else ""
    return f"{_machine(constants)}{quick}\n{columns(lines)}"


def _shown(value: float, unit: str) -> str:
    if unit in UNITS:
        return UNITS[unit](value)
    return f"{as_count(value)}{'' if unit.startswith('/') else ' '}{unit}"
