"""Is this checkout as fast as another one? Both take turns in one run, each in processes of its own.

python benchmarks/against.py ../other-checkout/.venv/bin/python
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from measure import Spread, take_turns

QUESTIONS = {  # what each of them times; all but the last two with a store on this disk
    "import hoploom.NeighborLoader": "imports",
    "sampling, no rows": "sampling",
    "loader, no threads": "alone",
    "loader, 2 threads": "threads",
    "loader of blocks, 2 threads": "blocks",
    "16 seeds, [2, 2]": "small",
    "training step": "steps",
    "batches of a server": "served",
    "batches here, parts on two servers": "remote",
}


class Side:
    """A process of one checkout that measures what it is told to."""

    def __init__(self, python: str, folder: str) -> None:
        command = [python, str(Path(__file__).with_name("against_side.py")), folder]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def seconds(python: str) -> float:
    begin = time.perf_counter()
    subprocess.run([python, "-c", "import hoploom; hoploom.NeighborLoader"], check=True, timeout=60)
    return time.perf_counter() - begin


def answered(what: str, side: Side, python: str, repetition: int) -> float:
    return seconds(python) if what == "imports" else float(side.ask(what))


def row(question: str, ours: Spread, theirs: Spread) -> str:
    shown = [f"{1e3 * one.median:.4g} ({1e3 * one.low:.4g} to {1e3 * one.high:.4g})" for one in (ours, theirs)]
    return f"| {question} | {shown[0]} | {shown[1]} | {ours.median / theirs.median:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", help="the other checkout's Python")
    parser.add_argument("--repetitions", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides = {"ours": Side(sys.executable, folder), "theirs": Side(given.other, folder)}
        pythons = {"ours": sys.executable, "theirs": given.other}
        print(*(sides[name].ask("commit") for name in sides), sep=" against ")
        print("| question | ours, ms | other, ms | ratio |\n| --- | --- | --- | --- |")
        for question, what in QUESTIONS.items():
            turns = {name: partial(answered, what, sides[name], pythons[name]) for name in sides}
            found = take_turns(turns, repetitions=given.repetitions)
            print(row(question, found["ours"], found["theirs"]), flush=True)
        for side in sides.values():
            side.close()


if __name__ == "__main__":
    main()
