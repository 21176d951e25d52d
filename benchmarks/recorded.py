"""What was measured, kept: a JSON file per group in results/; RESULTS.md and the chart are made from these files.

>>> python benchmarks/recorded.py   # write RESULTS.md and the chart again
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import chart
import report
from report import ROOT, Report

FOLDER = ROOT / "benchmarks" / "results"
DEVICES = FOLDER / "devices"  # what gpu_check.py found, a file for each GPU
FIRST = ("libraries", "core", "training", "building", "cluster")  # the others follow by name
INTRO = """# Results

Made from the files in `benchmarks/results/`, which `make bench` writes (all but `layout` and `together`: those compare
two checkouts, and were measured once), and `scripts/gpu_check.sh` on a GPU. Medians (least to greatest) of repetitions
in which ours and its baseline took turns; ratios are of medians. Machines are shared with others: compare figures
within a table, not between tables.
"""


@dataclass(frozen=True)
class Section:
    """What one group of benchmarks found, and where."""

    group: str
    header: Sequence[str]  # machine, commit, versions, date
    found: Report
    about: str = ""

    def to_markdown(self) -> str:
        """Its part of RESULTS.md."""
        lines = [f"## {self.group}", "", *([self.about, ""] if self.about else [])]
        lines += [*(f"- {line}" for line in self.header), "", report.table(self.found.rows), ""]
        return "\n".join([*lines, *(f"- {line}" for line in report.notes_of(self.found)), ""])


def keep(section: Section) -> None:
    """Write a group's file, in place of the one that is there; what that one says of itself stays."""
    path = FOLDER / f"{section.group}.json"
    about = section.about or (json.loads(path.read_text())["about"] if path.exists() else "")
    described = {"about": about, "header": list(section.header), **asdict(section.found)}
    FOLDER.mkdir(exist_ok=True)
    path.write_text(json.dumps(described, indent=1) + "\n")


def sections() -> dict[str, Section]:
    """Every group that has a file, in the order of RESULTS.md."""
    names = sorted((path.stem for path in FOLDER.glob("*.json")), key=lambda name: (name not in FIRST, name))
    names.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    devices = {path.stem: _of_device(path) for path in sorted(DEVICES.glob("*.json"))}
    return {name: _read(name) for name in names} | devices


def _read(name: str) -> Section:
    text = (FOLDER / f"{name}.json").read_text()
    described = json.loads(text)
    return Section(name, described["header"], report.from_json(text), described["about"])


def _of_device(path: Path) -> Section:
    """The benchmarks of a GPU, and what its tests came to."""
    found = json.loads(path.read_text())
    reports = list(found["benchmarks"].values())
    counts = {name: sum(file[name] for file in found["tests"].values()) for name in ("passed", "failed", "skipped")}
    tests = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    broken = [name for part in ("tests", "benchmarks") for name, one in found[part].items() if "unfinished" in one]
    tests += f"; not finished: {', '.join(broken)}" if broken else ""
    tools = ", ".join(f"{name} {_verdict(one)}" for name, one in found["sanitizer"].items())
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        f"machine: {found['machine']}, {found['gpu']}, driver {(found['driver'] or '-').split(',')[0]}",
        f"commit: {found['commit']}",
    ]
    lines += [f"versions: {versions}", f"date: {found['date'][:10]}"]
    lines += [f"tests on the device: {tests}", f"compute-sanitizer: {tools}"]
    rows = [{**row, "target": _target(row["target"])} for one in reports for row in one.get("rows", [])]
    for row in rows:
        del row["met"]
    notes = [
        note
        for one in reports
        for note in one.get("notes", [])
        if not note.startswith(("|", "GPU: ", "where a step's"))
    ]
    return Section(path.stem, lines, report.from_json(json.dumps({"rows": rows, "notes": notes, "absent": []})))


def _verdict(one: dict[str, Any]) -> str:
    """What compute-sanitizer found with one of its tools."""
    if "clean" not in one:
        return "not run" if "said" in one else "not finished"
    verdict = "clean" if one["clean"] else "not clean"
    return f"{verdict}, launches that it could not follow: {one['not followed']}" if "not followed" in one else verdict


def _target(said: str | None) -> dict[str, str | float] | None:
    if said is None:
        return None
    of, sign, limit = said.split()
    return {"of": of, "sign": sign, "limit": float(limit)}


def pages() -> dict[Path, str]:
    """The files that are made from what was measured."""
    found = sections()
    results = "\n".join([INTRO, *(section.to_markdown() for section in found.values())])
    return {
        report.RESULTS: results.rstrip() + "\n",
        **chart.drawn(*(found[group].found for group in ("libraries", "training", "disk"))),
    }


def publish() -> None:
    """Write them."""
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    publish()
