"""Read the files in a run's folder, during the run or after: each `refresh` reads only what they have gained."""

import json
import os
import time
import tomllib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hoploom.errors import ConfigError
from hoploom.train.journal import EVENTS, no_run, times_file

EPOCHS, RESULT, RECIPE = "metrics.jsonl", "result.json", "run.toml"
STEPS = "steps-rank{}.jsonl"
COLUMNS = ("step", "loss", "seeds", "seconds", "wait_seconds", "learning_rate")
ALIVE = 120.0  # seconds without a new line, from which the page says so
NOT_FINITE = float("nan")
Line = dict[str, Any]


class JsonLines:
    """A reader of a growing file with one JSON object per line. Each object must have a "step" if `has_steps`."""

    def __init__(self, path: Path, *, has_steps: bool = True) -> None:
        self.path, self._has_steps, self._offset, self._last = path, has_steps, 0, b""
        self.num_broken, self.is_torn = 0, False

    def new(self) -> Iterator[Line]:
        """Yield the lines added since the last call; an incomplete last line is left for the next call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    self.is_torn = not line.endswith(b"\n")
                    if self.is_torn:
                        return
                    self._offset, self._last = self._offset + len(line), line
                    try:
                        content = json.loads(line)
                    except ValueError:
                        content = None
                    if isinstance(content, dict) and (not self._has_steps or isinstance(content.get("step"), int)):
                        yield content
                    else:
                        self.num_broken += 1
        except FileNotFoundError:
            return

    @property
    def is_rewritten(self) -> bool:
        """Whether the last line read is no longer in its place. A resumed run rewrites the lines of repeated steps."""
        if not self._offset:
            return False
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset - len(self._last))
                return file.read(len(self._last)) != self._last
        except FileNotFoundError:
            return True


class RunReader:
    """The contents of a run's files so far. `refresh` reads what the run has added."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not any((self.folder / name).exists() for name in (STEPS.format(0), EPOCHS, EVENTS)):
            what = f"it has no {STEPS.format(0)}, {EPOCHS} or {EVENTS}"
            if (self.folder / RECIPE).exists():
                raise ConfigError(
                    f"no run has begun in {folder}: {what}; start it, or give the folder that output.folder names"
                )
            raise no_run(self.folder, what)
        self._begin()
        self.refresh()

    def _begin(self) -> None:
        self._steps, self._epochs = (JsonLines(self.folder / name) for name in (STEPS.format(0), EPOCHS))
        self._events = JsonLines(self.folder / EVENTS, has_steps=False)
        self._times: dict[int, JsonLines] = {}
        self.columns = {name: array("d") for name in COLUMNS}
        self.epochs: list[Line] = []
        self.events: list[Line] = []
        self.times: dict[int, list[Line]] = {}
        self.result: Line = {}
        self.recipe = ""

    def refresh(self) -> None:
        """Read what was added since the last call, or all files again if a resumed run has shortened one."""
        if any(tail.is_rewritten for tail in self._tails()):
            self._begin()
        for line in self._steps.new():
            for name, column in self.columns.items():
                value = line.get(name)
                column.append(value if isinstance(value, int | float) else NOT_FINITE)
        self.epochs += self._epochs.new()
        self.events += self._events.new()
        for path in self.folder.glob(times_file("*")):
            rank = path.stem.removeprefix("times-rank")
            if rank.isdecimal():
                tail = self._times.setdefault(int(rank), JsonLines(path))
                self.times.setdefault(int(rank), []).extend(tail.new())
        self.recipe, content = _text(self.folder / RECIPE), None
        with suppress(ValueError):
            content = json.loads(_text(self.folder / RESULT))
        self.result = content if isinstance(content, dict) else {}

    def _tails(self) -> list[JsonLines]:
        return [self._steps, self._epochs, self._events, *self._times.values()]

    @property
    def num_steps(self) -> int:
        return len(self.columns["step"])

    @property
    def num_broken(self) -> int:
        """The number of lines that are cut short or damaged."""
        return sum(tail.num_broken + tail.is_torn for tail in self._tails())

    @property
    def starts(self) -> list[Line]:
        return [event for event in self.events if event.get("event") == "start"]

    @property
    def written_at(self) -> float:
        """The time of the last write to the run's files, in seconds since 1970."""
        return max((found.st_mtime for tail in self._tails() for found in _stats(tail.path)), default=0.0)

    @property
    def num_bytes(self) -> int:
        """The total bytes of the run's files; a change of this number means that there is something new to read."""
        written = (path for path in self.folder.iterdir() if path.suffix in (".jsonl", ".json", ".toml"))
        return sum(found.st_size for path in written for found in _stats(path))

    @property
    def state(self) -> str:
        """The state: running, done, early (stopped early), asked (to stop), failed, or silent (no new lines)."""
        if self.result:
            return str(self.result.get("stopped", "done"))
        last = self.events[-1] if self.events else {}
        if last.get("event") == "end":
            return "failed" if "error" in last else str(last.get("stopped"))
        return "running" if self.silence < ALIVE else "silent"

    @property
    def silence(self) -> float:
        """Seconds since the last write to the run's files."""
        return max(0.0, time.time() - self.written_at)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings in run.toml by full name, such as loader.fanouts; empty if the file is not valid TOML."""
        with suppress(tomllib.TOMLDecodeError):
            return _flat(tomllib.loads(self.recipe))
        return {}

    @property
    def seconds(self) -> float:
        """Total seconds of the run's sessions, also a running one. A start or a resumption begins a session."""
        spans, began = 0.0, None
        for event in self.events:
            if event.get("event") == "start":
                at = _number(event.get("at"))
                spans += 0.0 if began is None else self._last_line(began, at) - began  # a session that was killed
                began = at
            elif event.get("event") == "end" and began is not None:
                spans, began = spans + max(0.0, _number(event.get("at")) - began), None
        if began is not None:
            spans += max(0.0, self.written_at - began)
        return spans or float(self.result.get("seconds") or 0) or float(np.nansum(self.columns["seconds"]))

    def _last_line(self, since: float, before: float) -> float:
        """Return the time of the last line between the times `since` and `before`; `since` if there is none."""
        lines = [*self.events, *(line for lines in self.times.values() for line in lines)]
        return max((at for line in lines if since <= (at := _number(line.get("at"))) < before), default=since)

    @property
    def steps_per_epoch(self) -> float:
        """The number of steps in an epoch; 0 until a start of the run or a validation has recorded it."""
        known = [_number(start.get("steps_per_epoch")) for start in self.starts]
        known += [line["step"] / _number(line.get("epoch")) for line in self.epochs[-1:] if _number(line.get("epoch"))]
        return next(filter(None, known), 0.0)

    @property
    def tested(self) -> Line:
        """The metrics of the test split; empty until the run has ended."""
        found = self.result.get("test")
        return found if isinstance(found, dict) else {}

    @property
    def machines(self) -> list[Line]:
        """A description of each rank's machine, from the latest start of the run."""
        return list(self.starts[-1].get("machines", ())) if self.starts else []

    @property
    def measured(self) -> dict[int, list[Line]]:
        """The lines of the times files by rank, without those from before the number of processes last changed."""
        if not self.starts:
            return self.times
        counts = [len(start.get("machines", ())) for start in self.starts]
        changes = [place for place in range(1, len(counts)) if counts[place] != counts[place - 1]]
        if not changes:
            return self.times
        first = self.starts[changes[-1]].get("step", 0)
        kept = {rank: [line for line in lines if line.get("step", 0) > first] for rank, lines in self.times.items()}
        return {rank: lines for rank, lines in kept.items() if lines and rank < counts[-1]}


Labelled: TypeAlias = Sequence[tuple[str, RunReader]]  # runs with the names they are shown by


def totals(lines: Iterable[Line], kind: str) -> dict[str, float]:
    """Add up the numbers in one field of all lines, by name. `kind` is the field, such as "seconds" or "disk"."""
    found: dict[str, float] = {}
    for line in lines:
        for name, value in line.get(kind, {}).items():
            found[name] = found.get(name, 0.0) + value
    return found


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _stats(path: Path) -> Iterator[os.stat_result]:
    """Yield the status of a file, or nothing if it no longer exists."""
    with suppress(FileNotFoundError):
        yield path.stat()


def _flat(content: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


def _text(path: Path) -> str:
    with suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
