"""All benchmarks, or those named: one table, and benchmarks/RESULTS.md where all of them ran on the full graphs.

>>> python benchmarks/run.py                    # everything
>>> python benchmarks/run.py sampling opening   # prints the table, leaves RESULTS.md alone
"""

import argparse
import datetime
import subprocess
import sys
from pathlib import Path

import report
from measure import REPETITIONS
from report import Report

NAMES = ("sampling", "gathering", "loading", "small_batches", "scaling", "opening")
DEADLINE = 7200.0  # seconds for one script, making its graph included


def run_script(name: str, tiny: bool) -> Report | None:
    """One script in a process of its own; None if it failed. Its own message stands on stderr."""
    script = Path(__file__).with_name(f"{name}.py")
    command = [sys.executable, str(script), "--json", *(["--tiny"] if tiny else [])]
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=DEADLINE)
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


def page(whole: Report, header: list[str]) -> str:
    """What RESULTS.md says."""
    return "\n".join(
        [
            "# Results",
            "",
            "Written by `make bench`. Medians (least to greatest) of "
            f"{REPETITIONS} repetitions in which ours and its baseline took turns; ratios are of medians.",
            "",
            *(f"- {line}" for line in header),
            "",
            report.table(whole.rows),
            "",
            *(f"- {line}" for line in report.notes_of(whole)),
            "",
        ]
    )


def main() -> int:
    """Exit status 1 if a script failed; a missed target is a result like any other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(NAMES))
    parser.add_argument("--tiny", action="store_true", help="a hundredth of the graphs, to try the scripts out")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(NAMES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    report.use_two_cores()
    header = [*report.surroundings(), f"date: {datetime.date.today().isoformat()}"]
    commit = report.commit()
    chosen = arguments.names or list(NAMES)
    reports = {name: run_script(name, arguments.tiny) for name in chosen}
    failed = [name for name, found in reports.items() if found is None]
    if report.commit() != commit:
        header.append(f"the working tree changed on the way: now at {report.commit()}")
    text = page(merged([found for found in reports.values() if found is not None]), header)
    print(text)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    elif set(chosen) == set(NAMES) and not arguments.tiny:
        report.RESULTS.write_text(text)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
