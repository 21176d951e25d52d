"""The page of one run, with what it cost, or of several runs with their curves in the same charts."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hoploom.config.values import as_bytes, as_count, as_seconds, as_share
from hoploom.report.page import (
    Card,
    Curve,
    Figure,
    Page,
    State,
    bars,
    charts,
    key_figures,
    listing,
    notices,
    table_markup,
)
from hoploom.report.reading import Labelled, Line, RunReader, totals
from hoploom.train.journal import WAITS, DiskUse, disk_use

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
MOST_RELATIONS = 10  # that are shown as the worst


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
    """Return rows for `bars`, seconds per step by activity: of each rank if `alone` and few, else of their mean."""
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


def disk_use_of(run: RunReader, lines: Sequence[Line] | None = None) -> DiskUse | None:
    """Return the disk use that `lines` of times files record; by default, all lines. None if nothing was read."""
    if lines is None:
        lines = [line for of_rank in run.measured.values() for line in of_rank]
    steps = sum(line.get("steps", 0) for line in lines)
    threads = int(run.starts[-1].get("threads", 1)) if run.starts else 1
    seconds, reads, made, sent = (totals(lines, kind) for kind in ("seconds", "reads", "loader", "traffic"))
    return disk_use(steps, seconds, reads, made, sent.get("wait_seconds", 0.0), threads=threads)


def disk_card(runs: Labelled) -> list[Card]:
    """Return a list of one card with a table of disk reads. The list is empty if no run has read from its disk."""
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
    """Return a machine's row in the table of machines: host, processor, cores, memory and device."""
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


STATES: Mapping[str, tuple[str, State]] = {
    "done": ("finished", "good"),
    "early": ("stopped early", "good"),
    "asked": ("interrupted", "bad"),
    "failed": ("failed", "bad"),
    "running": ("running", "busy"),
}
MOST = 600  # points of a curve: about one per two pixels
Values: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = Sequence[float] | Values
BAND = "A line is the mean of neighbouring steps, the band around it reaches from their least to their largest."
SETTLED = 100  # steps; in a shorter run, most steps wait for the first batches of an epoch


def run_page(runs: Sequence[RunReader]) -> Page:
    """Return the page of one run with all details, or a page that compares several runs."""
    names = _names(runs)
    labelled = list(zip(names, runs, strict=True))
    drawn = run_charts(labelled)
    warnings = [text if len(runs) == 1 else f"{name}: {text}" for name, run in labelled for text in _warnings(run)]
    cards = [Card("Results", _results(labelled))]
    cards += [Card("Warnings", notices(warnings))] if warnings else []
    cards += _test_card(labelled) + _ranks_card(labelled) + _worst_card(labelled)
    if drawn:
        text = "Drag over a chart to zoom in, double-click to go back. Choose a name to hide its curve."
        cards.append(Card("Curves", charts(drawn), text))
    cards += [
        *time_cards(labelled),
        *disk_card(labelled),
        *memory_card(labelled),
        *machine_card(labelled),
        *_recipe_card(labelled),
    ]
    states = [_state(run) for run in runs] if len(runs) == 1 else []
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    return Page(title, _subtitle(labelled), cards, drawn, states, [run.steps_per_epoch for run in runs])


def _names(runs: Sequence[RunReader]) -> list[str]:
    """Return a distinct name for each run: the last parts of its folder's path, as many as are needed."""
    paths = [run.folder.absolute().parts for run in runs]
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{run.folder.absolute().name} ({number})" for number, run in enumerate(runs, 1)]


def _state(run: RunReader) -> tuple[str, State]:
    if run.state == "silent":
        return f"nothing new for {as_seconds(run.silence)}", "bad"
    return STATES.get(run.state, (run.state, "bad"))


def _subtitle(runs: Labelled) -> str:
    """Return the line under the title: task, model and store if all runs agree on them, duration, and start."""
    words = []
    for key, way in (("task.kind", "{}"), ("model.name", "with {}"), ("store", "on {}")):
        values = {str(run.settings.get(key, "")) for _, run in runs}
        value = values.pop() if len(values) == 1 else ""
        words += [way.format(value.rstrip("/").rpartition("/")[2] if key == "store" else value)] if value else []
    seconds = sum(run.seconds for _, run in runs)
    starts = [float(run.starts[0].get("at", 0)) for _, run in runs if run.starts]
    began = [time.strftime("begun %Y-%m-%d %H:%M UTC", time.gmtime(min(starts)))] if starts else []
    return " · ".join([*([" ".join(words)] if words else []), as_seconds(seconds), *began])


# --- results -------------------------------------------------------------------------------------


def _results(runs: Labelled) -> str:
    if len(runs) == 1:
        return key_figures(_numbers(runs[0][1]))
    columns = list(dict.fromkeys(what for _, run in runs for what, _, _ in _numbers(run)))
    rows: list[list[str]] = []
    for name, run in runs:
        found = {what: value for what, value, _ in _numbers(run)}
        rows.append([name, _state(run)[0], *(found.get(column, "-") for column in columns)])
    return table_markup(["run", "", *columns], rows, num_text=2)


def _numbers(run: RunReader) -> list[tuple[str, str, str]]:
    shown = []
    result, columns = run.result, run.columns
    monitor, best = str(result.get("monitor", "")), result.get("best")
    watched, mode = (run.starts[-1].get("monitor") if run.starts else None) or ("", "")
    known = [(line[watched], line.get("epoch")) for line in run.epochs if isinstance(line.get(watched), int | float)]
    if isinstance(best, int | float):
        epoch = result.get("best_epoch")
        shown.append((f"best {monitor}", f"{best:.4f}", "" if epoch is None else f"validation, epoch {epoch:.0f}"))
    elif known:
        value, epoch = min(known) if mode == "min" else max(known, key=lambda found: found[0])
        shown.append((f"best {watched} so far", _figure(value), f"validation, epoch {epoch}"))
    elif run.epochs:
        names = [name for name in run.epochs[-1] if name not in ("step", "epoch", "train_loss")]
        if names:
            shown.append((f"last {names[0]}", _figure(run.epochs[-1][names[0]]), "validation"))
    test = run.tested.get(monitor)
    if isinstance(test, int | float):
        shown.append((f"test {monitor}", f"{test:.4f}", "with the best checkpoint" if best is not None else ""))
    finite = [value for value in columns["loss"][-100:] if math.isfinite(value)]
    if finite:
        shown.append(("training loss", _figure(finite[-1]), "last step"))
    last = int(columns["step"][-1]) if run.num_steps else 0
    shown.append(("steps", f"{last:,}", f"{len(run.epochs)} epochs" if run.epochs else ""))
    spent, seeds = (float(np.nansum(columns[name])) for name in ("seconds", "seeds"))
    if spent:
        shown.append(("seeds a second", as_count(seeds / spent), "while training"))
    if "num_parameters" in result:
        shown.append(("parameters", as_count(result["num_parameters"]), ""))
    if (use := disk_use_of(run)) is not None:
        shown.append(("bound by", use.bound, use.short.split(",")[0]))
    return [*shown, ("duration", as_seconds(run.seconds), "")]


def _figure(value: Any) -> str:
    return f"{value:#.4g}" if isinstance(value, int | float) else "not a number"


def _test_card(runs: Labelled) -> list[Card]:
    """Return a card with all test metrics; for a single run, also the validation metrics of its best epoch."""
    columns = {name: run.tested for name, run in runs}
    if len(runs) == 1:
        validated = [line | {"loss": line.get("val_loss")} for line in _best_epoch(runs[0][1])]
        columns = dict(zip(["test", "validation"], [runs[0][1].tested, *validated], strict=False))
    names = dict.fromkeys(name for _, run in runs for name in run.tested if "/" not in name)
    rows = [
        [name, *(_figure(values[name]) if name in values else "-" for values in columns.values())] for name in names
    ]
    text = "The test split is evaluated once, with the weights of the best checkpoint if there was a validation."
    return [Card("Metrics of the test split", table_markup(["", *columns], rows), text)] if rows else []


def _best_epoch(run: RunReader) -> list[Line]:
    """Return the metrics of the best epoch, or of the last so far; an empty list if there are none."""
    best = run.result.get("best_epoch")
    return [line for line in run.epochs if best in (None, line.get("epoch"))][-1:]


def _ranks_card(runs: Labelled) -> list[Card]:
    """Return a card with the number of links by rank, a bar each; empty unless the links of a single run have ranks."""
    run = runs[0][1]
    split, metrics = ("test", run.tested) if run.tested else ("validation", run.epochs[-1] if run.epochs else {})
    counts = {int(name[6:]): int(links) for name, links in metrics.items() if name.startswith("ranks/")}
    if len(runs) > 1 or not counts:
        return []
    firsts, rows = [1, *(1 + (1 << power) for power in range(16)), 1 << 16], []
    for first, after in zip(firsts, [*firsts[1:], 0], strict=True):
        label = f"{first:,}" if after == first + 1 else f"{first:,} to {after - 1:,}" if after else f"{first:,} or more"
        if first <= max(counts):
            links = counts.get(first, 0)
            rows.append((f"rank {label}", {"links": float(links)}, f"{links:,}"))
    text = f"Each link of the {split} split is ranked among its candidates; rank 1 is best."
    return [Card("Ranks of links", bars(rows, ["links"]), text)]


def _worst_card(runs: Labelled) -> list[Card]:
    """Return a card with the relations of lowest MRR; empty unless the links of a single run have relations."""
    found: dict[int, Line] = {}
    for name, value in (item for line in _best_epoch(runs[0][1]) for item in line.items() if len(runs) == 1):
        if name.startswith("relations/"):
            number, metric = name.split("/")[1:]
            found.setdefault(int(number), {})[metric] = value
    worst = sorted(found.items(), key=lambda of_relation: of_relation[1]["mrr"])[:MOST_RELATIONS]
    rows = [[str(number), f"{own['links']:,.0f}", _figure(own["mrr"])] for number, own in worst]
    text = f"The lowest MRR of {len(found):,} relations, on the validation split, in the best epoch."
    return [Card("Worst relations", table_markup(["relation", "links", "MRR"], rows), text)] if rows else []


def _warnings(run: RunReader) -> Iterator[str]:
    for event in run.events:
        if "error" in event:
            yield f"It ended at step {event.get('step', 0):,} with {event['error']}"
    for start in run.starts[1:]:
        yield f"It was resumed at step {start.get('step', 0):,}."
    if run.state == "silent":
        yield (
            f"It has written nothing for {as_seconds(run.silence)}. A validation or a checkpoint may take so long. If "
            "its processes are gone, it was killed, and `hoploom train ... --resume` continues it."
        )
    if run.state == "asked":
        yield "It was interrupted. Continue it with `hoploom train ... --resume`."
    goes_on = run.state in ("running", "silent")
    if not run.num_steps:
        yield "No step is written down yet." if goes_on else "It ended before its first step."
    bad = np.asarray(run.columns["step"])[np.isnan(run.columns["loss"])]
    if len(bad):
        yield f"The loss of {len(bad):,} steps is not a number, first at step {bad[0]:,.0f}: see the gaps."
    if goes_on and run.num_steps and not any(set(line) - {"step", "epoch", "train_loss"} for line in run.epochs):
        yield (
            "There is no validation yet: wait for the end of an epoch, or give task.val "
            "(in a loop of your own: validate=)."
        )
    if run.num_broken:
        lines = "1 line" if run.num_broken == 1 else f"{run.num_broken} lines"
        yield f"Left out: {lines} of its files that a crash cut short or damaged."
    if run.num_steps and not run.starts:
        yield "Its folder has no events.jsonl that says when and where it began: some of this page is missing."
    counts = [len(start.get("machines", ())) for start in run.starts] or [0]
    for before, after, start in zip(counts, counts[1:], run.starts[1:], strict=False):
        if before != after:
            yield (
                f"The number of processes changed from {before} to {after} at step {start.get('step', 0):,}. Times and "
                "memory are those of the newest number."
            )
    if run.measured and len(run.measured) < counts[-1]:
        shown = f"{len(run.measured)} of {counts[-1]} ranks"
        yield f"Times and memory are those of {shown}: the others wrote into the same folder on their own hosts."
    seconds = totals([line for lines in run.measured.values() for line in lines], "seconds")
    share = seconds.get("wait", 0.0) / (seconds.get("step") or 1.0)
    if share <= WAITS or run.num_steps < SETTLED:
        return
    waits, use = f"Steps wait for their batch {100 * share:.0f} % of the time", disk_use_of(run)
    if use is not None and use.bound == "disk":
        yield (
            f"{waits}, and for the disk, which is busy {100 * use.busy:.0f} % of it: give the store more memory "
            "(memory in run.toml), order it with `hoploom partition --parts 1`, keep features as float16, or lower the "
            "fanouts."
        )
    elif use is None or use.bound == "sampling":
        yield f"{waits}: raise loader.threads, or lower the fanouts."


def _recipe_card(runs: Labelled) -> list[Card]:
    body = ""
    settings = [run.settings for _, run in runs]
    if len(runs) > 1:
        keys = [key for key in dict.fromkeys(key for each in settings for key in each) if key != "output.folder"]
        differing = [key for key in keys if len({str(each.get(key)) for each in settings}) > 1]
        rows = [[key, *(str(each.get(key, "-")) for each in settings)] for key in differing]
        body += table_markup(["key", *(name for name, _ in runs)], rows, num_text=len(runs) + 1) if rows else ""
    body += "".join(listing(f"run.toml of {name}", run.recipe) for name, run in runs if run.recipe)
    return [Card("Recipe", body)] if body else []


# --- curves --------------------------------------------------------------------------------------
# A curve of a million steps becomes some hundred points: steps are cut into equal spans, and a span keeps its mean, its
# least and its largest value. So no spike is lost, only its position within the span.


def thinned(x: Numbers, y: Numbers, weights: Numbers | None = None, most: int = MOST) -> Mapping[str, list[Any]]:
    """Return a curve with at most `most` points as a dict: x, y and, if steps were merged, their range (low, high).

    Each y is the mean of the finite values of the merged steps, weighted by `weights`; None if there are none.

    >>> thinned(range(6), [1, 9, 2, 3, 4, 5], most=2)["high"]
    [9.0, 5.0]
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    ys = np.where(np.isfinite(ys), ys, np.nan)
    if len(xs) <= most:
        return {"x": _listed(xs), "y": _listed(ys)}
    ends = np.linspace(0, len(xs), most + 1).astype(np.int64)
    begins, middles = ends[:-1], (ends[:-1] + ends[1:] - 1) // 2
    share = np.ones_like(ys) if weights is None else np.asarray(weights, dtype=np.float64)
    share = np.where(np.isfinite(ys) & np.isfinite(share), share, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.nan_to_num(ys) * share, begins) / np.add.reduceat(share, begins)
        low, high = np.fmin.reduceat(ys, begins), np.fmax.reduceat(ys, begins)
    found = {"x": xs[middles], "y": mean, "low": low, "high": high}
    return {name: _listed(values) for name, values in found.items()}


def _listed(values: Values) -> list[float | None]:
    """Return values rounded to six digits, as more would not be visible; None for values that are not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def run_charts(runs: Labelled) -> list[Figure]:
    losses = [_column("training", number, runs, "loss") for number in range(len(runs))]
    losses += _validations("val_loss", "validation", runs)
    found = [Figure("loss", "Loss", losses, note=BAND if any(curve.low for curve in losses) else "")]
    names = [name for _, run in runs for line in run.epochs for name in line if "/" not in name]
    monitors = [str(run.result.get("monitor")) for _, run in runs]
    metrics = dict.fromkeys([name for name in monitors if name in names] + names)
    for name in metrics:
        if name not in ("step", "epoch", "train_loss", "val_loss"):
            found.append(Figure(f"metric {name}", f"Validation {name}", _validations(name, "", runs)))
    found.append(Figure("speed", "Seeds a second", [_speed(number, runs) for number in range(len(runs))]))
    rates = [_column("", number, runs, "learning_rate") for number in range(len(runs))]
    if any(len({value for value in curve.y if value is not None}) > 1 for curve in rates):
        found.append(Figure("rate", "Learning rate", rates))
    memory = [curve for number in range(len(runs)) for curve in _memory_curves(number, runs)]
    found.append(Figure("memory", "Private memory of a process", memory, "bytes"))
    found = [chart for chart in found if any(value is not None for curve in chart.curves for value in curve.y)]
    return [chart for at, chart in enumerate(found) if all(chart.curves != other.curves for other in found[:at])]


def _column(what: str, number: int, runs: Labelled, column: str) -> Curve:
    run = runs[number][1]
    return _curve(what, number, runs, run.columns["step"], run.columns[column])


def _curve(what: str, number: int, runs: Labelled, x: Numbers, y: Numbers, weights: Numbers | None = None) -> Curve:
    points = thinned(x, y, weights)
    low, high = points.get("low", ()), points.get("high", ())
    words = [what] if len(runs) == 1 else [runs[number][0], what]
    return Curve(" ".join(filter(None, words)), number, points["x"], points["y"], low, high)


def _speed(number: int, runs: Labelled) -> Curve:
    """Return the curve of seeds per second of run `number`. Steps merged into a point are weighted by their seconds."""
    columns = runs[number][1].columns
    seconds = np.asarray(columns["seconds"])
    rates = np.asarray(columns["seeds"]) / np.where(seconds > 0, seconds, math.nan)
    return _curve("", number, runs, columns["step"], rates, seconds)


def _validations(name: str, what: str, runs: Labelled) -> list[Curve]:
    curves = []
    for number, (_, run) in enumerate(runs):
        values = [(line["step"], _number(line[name])) for line in run.epochs if name in line]
        if values:
            curves.append(replace(_curve(what, number, runs, *zip(*values, strict=True)), is_dotted=True))
    return curves


def _memory_curves(number: int, runs: Labelled) -> Iterator[Curve]:
    """Yield a curve for each kind of memory; its value at a step is that of the rank that used most."""
    names = {"private": "private"} | ({"gpu": "GPU"} if len(runs) == 1 else {})
    for kind, what in names.items():
        most: dict[float, float] = {}
        for line in (line for lines in runs[number][1].times.values() for line in lines):
            if kind in line.get("memory", {}):
                most[line["step"]] = max(most.get(line["step"], 0), line["memory"][kind])
        if most:
            yield _curve(what if len(names) > 1 else "", number, runs, *zip(*sorted(most.items()), strict=True))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
