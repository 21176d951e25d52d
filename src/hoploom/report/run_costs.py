"""The costs of a run: how the time of a step is divided, and the use of disk, memory and machines."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from hoploom.config.values import as_bytes, as_seconds, as_share
from hoploom.report.page import Card, bars, notices, table_markup
from hoploom.report.reading import Labelled, Line, RunReader, totals
from hoploom.train.journal import DiskUse, disk_use

PARTS = {  # activities of a step, in the order of a bar: the name in the times file, and the name on the page
    "wait": "wait for the batch",
    "forward": "forward",
    "ranks": "wait for other ranks",
    "backward": "backward",
    "all-reduce": "all-reduce",
    "optimizer": "optimizer",
    "rest": "everything else",
}
BETWEEN = {"validation": "validation", "checkpoint": "checkpoints"}
STAGES = {"sample": "sample", "fetch": "fetch rows ahead", "gather": "gather rows", "transform": "transform"}
MOST_ROWS = 16  # ranks that are shown one by one


def time_cards(runs: Labelled) -> list[Card]:
    rows = [row for name, run in runs for row in _time_rows(name, run, alone=len(runs) == 1)]
    if not rows:
        return []
    names = [name for name in PARTS.values() if any(amounts.get(name, 0) > 0 for _, amounts, _ in rows)]
    cells = [[name, *(_milliseconds(amounts.get(name)) for _, amounts, _ in rows)] for name in names]
    cells.append(["a step", *(remark for _, _, remark in rows)])
    body = bars(rows, list(PARTS.values())) + table_markup(["", *(label or "mean" for label, _, _ in rows)], cells)
    found = [Card("Where the time of a step goes", body, _what_is_not_known(runs))]
    beside = [row for name, run in runs for row in _beside(name, run, alone=len(runs) == 1)]
    if beside:
        columns = list(dict.fromkeys(name for _, shown in beside for name in shown))
        text = "Per step, all threads of a rank together. Batches are made while the model computes: a step loses time "
        text += "only where it waits for its batch." + _ranks_left_out(runs)
        rows_beside = [[label, *(shown.get(name, "-") for name in columns)] for label, shown in beside]
        found.append(Card("Beside the steps", table_markup(["", *columns], rows_beside), text))
    return found


def _time_rows(name: str, run: RunReader, *, alone: bool) -> list[tuple[str, dict[str, float], str]]:
    """Return bars (label, seconds per step by activity, text): one per rank if `alone`, else the mean of all ranks."""
    found: list[dict[str, float]] = []
    for _, lines in sorted(run.measured.items()):
        seconds, steps = totals(lines, "seconds"), sum(line.get("steps", 0) for line in lines)
        if steps and seconds.get("step"):
            parts = {part: seconds[part] / steps for part in PARTS if part in seconds}
            found.append(parts | {"rest": max(0.0, seconds["step"] / steps - sum(parts.values()))})
    if not found and run.num_steps:
        spent, waited = (float(np.nansum(run.columns[name])) / run.num_steps for name in ("seconds", "wait_seconds"))
        if spent:
            found.append({"wait": waited, "rest": spent - waited})
    mean = name if not alone else ""
    if len(found) > 1 and not (alone and len(found) <= MOST_ROWS):
        mean = mean or f"mean of {len(found)} ranks"
        found = [{part: sum(row.get(part, 0) for row in found) / len(found) for part in PARTS if part in found[0]}]
    labels = [f"rank {rank}" for rank in sorted(run.measured)] if alone and len(found) > 1 else [mean]
    shown = [{PARTS[part]: value for part, value in row.items()} for row in found]
    return [(label, row, _milliseconds(sum(row.values()))) for label, row in zip(labels, shown, strict=False)]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.2f} ms"


def _what_is_not_known(runs: Labelled) -> str:
    if any(not run.measured for _, run in runs):
        return "What was recorded is only how long a step took and how long it waited for its batch."
    on_gpu = any(machine.get("device") != "cpu" for _, run in runs for machine in run.machines)
    if on_gpu:
        return (
            "A GPU computes beside the process, whose clock therefore cannot tell forward, backward and optimizer "
            "apart: they are together in “everything else”."
        )
    return "The mean over the steps measured, on each rank's own clock."


def _beside(name: str, run: RunReader, *, alone: bool) -> list[tuple[str, dict[str, str]]]:
    found = []
    ranks = sorted(run.measured.items())
    if len(ranks) > MOST_ROWS:
        ranks = sorted(ranks, key=lambda found: totals(found[1], "seconds").get("wait", 0.0), reverse=True)[:MOST_ROWS]
    for rank, lines in ranks:
        steps = sum(line.get("steps", 0) for line in lines) or 1
        seconds, made, sent, read = (totals(lines, kind) for kind in ("seconds", "loader", "traffic", "disk"))
        shown = {what: _milliseconds(made[stage] / steps) for stage, what in STAGES.items() if stage in made}
        if sent:
            shown["requests"] = f"{sent.get('requests', 0) / steps:,.1f}"
            shown["received"] = as_bytes(sent.get("bytes_received", 0) / steps)
        if sent.get("wait_seconds"):
            shown["wait for servers"] = _milliseconds(sent["wait_seconds"] / steps)
        if any(totals(each, "disk").get("read_bytes") for _, each in ranks):
            shown["read from disk"] = as_bytes(read.get("read_bytes", 0) / steps)
            shown["faults that read"] = f"{read.get('faults', 0) / steps:,.1f}"
        shown |= {f"{what}, in all": as_seconds(seconds[part]) for part, what in BETWEEN.items() if part in seconds}
        found.append((f"rank {rank}" if alone else f"{name} rank {rank}", shown))
    return found if alone else found[:1]


def _ranks_left_out(runs: Labelled) -> str:
    most = max(len(run.measured) for _, run in runs)
    return f" {MOST_ROWS} of {most} ranks are shown: those that take most." if most > MOST_ROWS else ""


# --- the disk -------------------------------------------------------------------------------------


def disk_use_of(run: RunReader, lines: Sequence[Line] | None = None) -> DiskUse | None:
    """Return the disk use that `lines` of times files record (default: all ranks' lines); None if nothing was read."""
    if lines is None:
        lines = [line for of_rank in run.measured.values() for line in of_rank]
    steps = sum(line.get("steps", 0) for line in lines)
    threads = int(run.starts[-1].get("threads", 1)) if run.starts else 1
    seconds, reads, made, sent = (totals(lines, kind) for kind in ("seconds", "reads", "loader", "traffic"))
    return disk_use(steps, seconds, reads, made, sent.get("wait_seconds", 0.0), threads=threads)


def disk_card(runs: Labelled) -> list[Card]:
    """Return one card, with a table of disk reads, if a store is larger than its memory budget; else an empty list."""
    rows = []
    for name, run in runs:
        uses = [(rank, disk_use_of(run, lines)) for rank, lines in sorted(run.measured.items())]
        uses = sorted(uses, key=lambda found: -found[1].busy if found[1] else 0.0)[:MOST_ROWS]
        for rank, use in sorted(uses):
            if use is not None:
                shares = [as_share(share) for share in (use.wanted, use.found, use.busy)]
                label = f"rank {rank}" if len(runs) == 1 else f"{name} rank {rank}"
                rows.append([label, as_bytes(use.bytes_per_step), *shares, use.bound])
    if not rows:
        return []
    text = (
        "The store is larger than its budget. Wanted is the share of the bytes read that batches asked for: the rest "
        "lay between two rows, or in the same block. Found in memory is the share of the rows and edges, of tables "
        "that are partly on disk, for which nothing was read. Busy is the share of the time in which this rank had a "
        "read under way; ranks of one host share its disk."
    )
    header = ["", "read per batch", "wanted", "found in memory", "busy", "bound by"]
    return [Card("The disk", table_markup(header, rows), text + _ranks_left_out(runs))]


# --- memory, machines -----------------------------------------------------------------------------


def memory_card(runs: Labelled) -> list[Card]:
    kinds = {"private": "private", "shared": "shared", "mapped": "mapped files", "gpu": "GPU"}
    rows = []
    for name, run in runs:
        peaks = []
        for rank, lines in sorted(run.measured.items()):
            peak = {kind: max((line.get("memory", {}).get(kind, 0) for line in lines), default=0) for kind in kinds}
            peaks.append((f"rank {rank}" if len(runs) == 1 else f"{name} rank {rank}", peak))
        if len(peaks) > MOST_ROWS:
            peaks = sorted(peaks, key=lambda row: row[1]["private"], reverse=True)[:MOST_ROWS]
        rows += peaks
    shown = [kind for kind in kinds if any(peak[kind] for _, peak in rows)]
    if not shown:
        return []
    cells = [[label, *(as_bytes(peak[kind]) for kind in shown)] for label, peak in rows]
    text = "The most that was seen of each. Mapped files are mostly the graph, which all processes of a host share."
    text += _ranks_left_out(runs)
    return [Card("Memory", table_markup(["", *(kinds[kind] for kind in shown)], cells), text)]


def _described(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells that describe a machine in the table of machines."""
    host, cpu, cores, of, device = (
        str(found.get(key, "-")) for key in ("host", "cpu", "cores", "host_cores", "device")
    )
    return host, cpu, f"{cores} of {of}", as_bytes(found["memory"]) if "memory" in found else "-", device


def machine_card(runs: Labelled) -> list[Card]:
    rows = []
    for name, run in runs:
        for described, group in groupby(run.machines, _described):
            ranks = [int(found.get("rank", 0)) for found in group]
            shown = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
            rows.append([*([name] if len(runs) > 1 else []), described[0], shown, *described[1:]])
    if not rows:
        return []
    header = [*(["run"] if len(runs) > 1 else []), "host", "ranks", "CPU", "cores each", "memory", "device"]
    found = dict.fromkeys(
        " · ".join(f"{k} {v}" for k, v in run.starts[-1].get("versions", {}).items()) for _, run in runs if run.starts
    )
    systems = dict.fromkeys(
        str(machine["system"]) for _, run in runs for machine in run.machines if "system" in machine
    )
    body = table_markup(header, rows, num_text=len(header)) + notices([*found, *systems])
    return [Card("Machines and versions", body)]
