"""Benchmarks by group or by name: a table, and a group's file in benchmarks/results/ where all of it ran.

>>> python benchmarks/run.py                    # every group; gpu and Java where they are, disk and lines as root
>>> python benchmarks/run.py training           # one group: writes its file, RESULTS.md and the charts
>>> python benchmarks/run.py stepping opening   # prints the table, writes nothing
"""

import argparse
import datetime
import os
import shutil
import subprocess
import sys
from pathlib import Path

import recorded
import report
import torch
from report import Report

GROUPS = {
    "libraries": ("libraries",),
    "core": ("sampling", "gathering", "loading", "small_batches", "scaling", "opening"),
    "training": ("stepping", "aggregating"),
    "layers": ("edge_layers", "relation_layers"),
    "links": ("links",),
    "typed": ("typed",),
    "learned": ("learned",),
    "building": ("csc_building", "tables_to_store", "partitioning"),
    "scale": ("scale_model",),
    "checkpoints": ("checkpoints",),
    "cluster": ("serving", "worker_mode", "server_client", "glt"),
    "lines": ("lines",),
    "disk": ("disk",),
    "spark": ("spark_building",),
    "gpu": ("gpu_sampling", "gpu_gathering", "gpu_epochs", "gpu_profile"),
}
NAMES = tuple(name for names in GROUPS.values() for name in names)
DEADLINE = 7200.0  # seconds for one script, making its graph included


def run_script(name: str, tiny: bool, deadline: float = DEADLINE) -> Report | None:
    """One script in a process of its own; None if it failed. Its own message stands on stderr."""
    script = Path(__file__).with_name(f"{name}.py")
    command = [sys.executable, str(script), "--json", *(["--tiny"] if tiny else [])]
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=deadline)
    except subprocess.SubprocessError as error:
        print(f"{name} failed: {error}", file=sys.stderr)
        return None
    return report.from_json(done.stdout)


def merged(reports: list[Report]) -> Report:
    """One report; notes and absent peers once each."""
    rows = [row for one in reports for row in one.rows]
    notes = dict.fromkeys(note for one in reports for note in one.notes)
    absent = dict.fromkeys(name for one in reports for name in one.absent)
    return Report(rows, list(notes), list(absent))


def run_group(names: list[str], tiny: bool) -> tuple[Report, list[str], bool]:
    """What the scripts found, where, and whether all of them did."""
    header = [*report.surroundings(), f"date: {datetime.date.today().isoformat()}"]
    commit = report.commit()
    reports = {name: run_script(name, tiny) for name in names}
    failed = [name for name, found in reports.items() if found is None]
    if report.commit() != commit:
        header.append(f"the working tree changed on the way: now at {report.commit()}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return merged([found for found in reports.values() if found is not None]), header, not failed


def main() -> int:
    """Exit status 1 if a script failed; a missed target is a result like any other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join([*GROUPS, *NAMES]))
    parser.add_argument("--tiny", action="store_true", help="a hundredth of the graphs, to try the scripts out")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {*GROUPS, *NAMES}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join([*GROUPS, *NAMES])}")
    cores, has_java = os.sched_getaffinity(0), shutil.which("java") is not None
    succeeded = True
    for group, names in GROUPS.items():
        os.sched_setaffinity(0, cores)
        if group != "gpu":
            report.use_two_cores()
        is_root = os.geteuid() == 0
        needs = {
            "gpu": torch.cuda.is_available(),
            "disk": is_root,
            "lines": is_root,
            "spark": has_java,
        }
        runs_by_itself = needs.get(group, True)
        whole = (not arguments.names and runs_by_itself) or group in arguments.names
        chosen = [name for name in names if whole or name in arguments.names]
        if chosen:
            found, header, complete = run_group(chosen, arguments.tiny)
            section = recorded.Section(group, header, found)
            print(section.to_markdown())
            if whole and complete and found.rows and not arguments.tiny:
                recorded.keep(section)
                recorded.publish()
            succeeded &= complete
    return 0 if succeeded else 1


if __name__ == "__main__":
    raise SystemExit(main())
