"""A plan for people, and for programs."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from hoploom.config.values import as_bytes, as_count, as_rate, as_seconds, as_share
from hoploom.scale.constants import Constants, figures
from hoploom.scale.limits import findings
from hoploom.scale.plan import ScalePlan, total_seconds
from hoploom.scale.spec import Question

Line = Sequence[str]


def as_text(answer: ScalePlan) -> str:
    """All of a plan, a section each."""
    sections = [
        _headline(answer.question),
        _constants(answer),
        _section("Memory and disk of a host", _store(answer)),
        _section("A trainer process adds", _process(answer)),
        _section("A batch", _batch(answer)),
        _section("Network, per step of a rank", _network(answer)),
        _section("Time of a step", _times(answer)),
        _section("Preparing, on one machine", _preparing(answer)),
        _findings(answer),
    ]
    return "\n\n".join(sections)


def _headline(question: Question) -> str:
    features = question.features
    width = "no features" if features is None else f"{features.shape[0]} x {features.dtype} features"
    nodes, edges = as_count(question.nodes), as_count(question.edges)
    hosts = f"{question.hosts} host" + "s" * (question.hosts > 1)
    parts = f"{question.parts} part" + "s" * (question.parts > 1)
    return (
        f"{nodes} nodes, {edges} edges, {width}, on {hosts} of {as_bytes(question.memory_per_host)} ({parts}),\n"
        f"{question.ranks_per_host} rank{'s' * (question.ranks_per_host > 1)} per host, "
        f"batches of {question.batch_size:,} seeds, "
        f"fanouts {','.join(map(str, question.fanouts))}, mode {question.mode}"
    )


def _constants(answer: ScalePlan) -> str:
    known = answer.constants
    where = f"{known.machine}, {known.cores} cores, {known.date}, Hoploom {known.hoploom}"
    if answer.uses_defaults:
        return (
            f"Constants: the built-in ones, measured on {where}.\n"
            "Not your machine: `hoploom bench --out bench.json` measures it, --constants bench.json uses that."
        )
    return f"Constants: measured{' quickly' if known.quick else ''} on {where}."


def _section(title: str, lines: Iterable[Line]) -> str:
    return f"{title}\n{columns(lines)}"


def columns(lines: Iterable[Line]) -> str:
    """Names to the left, figures below each other, remarks behind."""
    rows = [tuple(line) for line in lines]
    count = max(map(len, rows))
    rows = [row + ("",) * (count - len(row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if place in (0, count - 1) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _store(answer: ScalePlan) -> list[Line]:
    where = "the whole on every host" if answer.everywhere and answer.question.hosts > 1 else ""
    lines: list[Line] = [("", "disk", "memory", "")]
    for item in answer.store:
        remark = where if item.name == "topology" else ""
        lines.append((item.name, as_bytes(item.disk), as_bytes(item.memory), remark))
    ranks = answer.question.ranks_per_host
    trainers = answer.private - answer.cached
    lines.append(("trainers", "", as_bytes(trainers), f"{ranks} processes" if ranks > 1 else "1 process"))
    verdict = f"of {as_bytes(answer.question.memory_per_host)}"
    if answer.wanted > answer.question.memory_per_host:
        verdict += ", too much" if answer.resident == 0 else f"; {as_share(answer.resident)} of the files fit"
    lines.append(("together", as_bytes(answer.disk), as_bytes(answer.wanted), verdict))
    return lines


def _process(answer: ScalePlan) -> list[Line]:
    return [(item.name, as_bytes(item.memory), "") for item in answer.process]


def _batch(answer: ScalePlan) -> list[Line]:
    lines: list[Line] = [("", "expanded", "picks", "distinct nodes", "")]
    for number, hop in enumerate(answer.batch.hops, 1):
        lines.append((f"hop {number}", *map(as_count, (hop.frontier, hop.picks, hop.nodes)), ""))
    share = answer.batch.nodes / answer.question.nodes
    lines.append(
        ("together", "", as_count(answer.batch.picks), as_count(answer.batch.nodes), as_bytes(answer.batch.bytes))
    )
    return [*lines, ("share of the graph", "", "", as_share(share), "")]


def _network(answer: ScalePlan) -> list[Line]:
    question, batch, moved = answer.question, answer.batch, answer.traffic
    if question.hosts == 1:
        return [("one host", "nothing", "")]
    hits = f", the cache holds {as_share(batch.hits)} of them" if answer.cached else ""
    per_host = moved.total * question.ranks_per_host
    link = "one loopback connection" if question.network is None else as_rate(question.network)
    return [
        ("hops", as_bytes(moved.hops), f"{as_count(batch.remote_picks)} of {as_count(batch.picks)} picks are remote"),
        (
            "rows",
            as_bytes(moved.rows),
            f"{as_count(batch.remote_rows)} of {as_count(batch.nodes)} nodes are remote{hits}",
        ),
        ("gradients", as_bytes(moved.gradients), "all-reduce, shared by the ranks of a host"),
        ("together", as_bytes(moved.total), f"{as_bytes(per_host)} per host and step"),
        ("per second", as_rate(per_host / answer.times.total), f"per host and direction, of {link}"),
    ]


def _times(answer: ScalePlan) -> list[Line]:
    times = answer.times
    remarks = {"sampling": f"{times.workers} loader threads", "model": "forward and backward, on the cores measured"}
    if answer.question.step_seconds is not None:
        remarks["model"] = "as given"
    lines: list[Line] = [
        (name, as_seconds(seconds), remarks.get(name, "")) for name, seconds in times.shares.items() if seconds
    ]
    lines.append(("step", as_seconds(times.total), f"bound by {times.bottleneck}: loading, network and model overlap"))
    steps, seconds = answer.steps_per_epoch, answer.steps_per_epoch * times.total
    lines.append(("epoch", as_seconds(seconds), f"{steps:,} steps for {as_count(answer.question.num_seeds)} seeds"))
    return lines


def _preparing(answer: ScalePlan) -> list[Line]:
    lines: list[Line] = [(stage.name, as_seconds(stage.seconds), "") for stage in answer.build if stage.seconds]
    lines.append(("tables to store", as_seconds(total_seconds(answer.build)), ""))
    if answer.question.hosts > 1:
        how = answer.question.edge_cut if isinstance(answer.question.edge_cut, str) else "a given edge cut"
        how += ", without the time of METIS itself" * (how == "metis")
        lines += [(stage.name, as_seconds(stage.seconds), "") for stage in answer.partition[:1] if stage.seconds]
        lines.append(("store to parts", as_seconds(total_seconds(answer.partition)), f"by {how}"))
    lines.append(("opening it all", as_seconds(answer.opening), ""))
    return lines


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
    where = f"{constants.machine}, {constants.cores} cores, {constants.date}, Hoploom {constants.hoploom}{quick}"
    return f"{where}\n{columns(lines)}"


def _shown(value: float, unit: str) -> str:
    if unit == "B":
        return as_rate(value)
    if unit == "s":
        return as_seconds(value)
    if unit == "times as long":
        return f"{value:.2f} {unit}"
    if unit == "flop/s":
        return f"{value / 1e9:,.1f} G{unit}"
    return f"{as_count(value)}{'' if unit.startswith('/') else ' '}{unit}"
