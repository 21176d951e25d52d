"""The folder of a run, read as far as it is written: while the run goes on, after it ended, or was killed.

A file is read on from where the last reading stopped. What an older version did not write, or a crash cut short, is
missing here and said on the page; it is no error.
"""

import json
import time
import tomllib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from hoploom.errors import ConfigError
from hoploom.train.records import EVENTS, times_file

EPOCHS, RESULT, RECIPE = "metrics.jsonl", "result.json", "run.toml"
STEPS = "steps-rank{}.jsonl"
COLUMNS = ("step", "loss", "seeds", "seconds", "wait_seconds", "learning_rate")
ALIVE = 120.0  # seconds since a run last wrote a line, after which it counts as gone
NOT_FINITE = float("nan")
RENAMED = {"loss": "val_loss"}  # in metrics.jsonl, since older versions
Line = dict[str, Any]


class JsonLines:
    """The lines of a file that may grow: those that are whole, and JSON objects."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset, self._last = path, 0, b""
        self.num_broken, self.is_torn = 0, False

    def new(self) -> Iterator[Line]:
        """What was added since; a last line without its end waits for the next call."""
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
                    if isinstance(content, dict):
                        yield content
                    else:
                        self.num_broken += 1
        except FileNotFoundError:
            return

    @property
    def is_rewritten(self) -> bool:
        """Whether what was read last is no longer there: a resumed run takes some steps again."""
        if not self._offset:
            return False
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset - len(self._last))
                return file.read(len(self._last)) != self._last
        except FileNotFoundError:
            return True


class RunReader:
    """What a run has written so far. `refresh` reads on.

    >>> run = RunReader("runs/papers")
    >>> run.columns["loss"][-1]
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            what = "is a file" if self.folder.exists() else "does not exist"
            raise ConfigError(f"{folder} {what}; give the output folder of `hoploom train`, e.g. run")
        if not any((self.folder / name).exists() for name in (RECIPE, STEPS.format(0), EPOCHS, EVENTS)):
            raise ConfigError(
                f"{folder} is not the folder of a run: it has neither {RECIPE} nor {STEPS.format(0)}; give the output "
                "folder of `hoploom train`, e.g. run"
            )
        self._begin()
        self.refresh()

    def _begin(self) -> None:
        self._steps, self._epochs, self._events = (
            JsonLines(self.folder / name) for name in (STEPS.format(0), EPOCHS, EVENTS)
        )
        self._times: dict[int, JsonLines] = {}
        self.columns = {name: array("d") for name in COLUMNS}
        self.epochs: list[Line] = []
        self.events: list[Line] = []
        self.times: dict[int, list[Line]] = {}
        self.result: Line = {}
        self.recipe = ""

    def refresh(self) -> None:
        """Read what was added since the last time; all anew where a resumed run cut something off."""
        if any(tail.is_rewritten for tail in self._tails()):
            self._begin()
        self._read_steps()
        self.epochs += self._epochs.new()
        self.events += self._events.new()
        for path in self.folder.glob(times_file("*")):
            rank = path.stem.removeprefix("times-rank")
            if rank.isdecimal():
                tail = self._times.setdefault(int(rank), JsonLines(path))
                self.times.setdefault(int(rank), []).extend(tail.new())
        self.result, self.recipe = _json_object(self.folder / RESULT), _text(self.folder / RECIPE)

    def _read_steps(self) -> None:
        columns = [(name, self.columns[name]) for name in COLUMNS]
        for line in self._steps.new():
            for name, column in columns:
                value = line.get(name)
                column.append(value if isinstance(value, int | float) else NOT_FINITE)

    def _tails(self) -> list[JsonLines]:
        return [self._steps, self._epochs, self._events, *self._times.values()]

    @property
    def num_steps(self) -> int:
        return len(self.columns["step"])

    @property
    def num_broken(self) -> int:
        """Lines that are cut short or damaged."""
        return sum(tail.num_broken + tail.is_torn for tail in self._tails())

    @property
    def starts(self) -> list[Line]:
        return [event for event in self.events if event.get("event") == "start"]

    @property
    def written_at(self) -> float:
        """When it last wrote anything, in seconds since 1970."""
        return max((tail.path.stat().st_mtime for tail in self._tails() if tail.path.exists()), default=0.0)

    @property
    def num_bytes(self) -> int:
        """Of what it has written: another number means that there is something new."""
        return sum(path.stat().st_size for path in self.folder.iterdir() if path.suffix in (".jsonl", ".json", ".toml"))

    @property
    def state(self) -> str:
        """done, early, asked, failed, running, or lost: it wrote nothing of its end."""
        if self.result:
            return str(self.result.get("stopped", "done"))
        last = self.events[-1] if self.events else {}
        if last.get("event") == "end":
            return "failed" if "error" in last else str(last.get("stopped"))
        return "running" if time.time() - self.written_at < ALIVE else "lost"

    @property
    def settings(self) -> Mapping[str, Any]:
        """run.toml by full names: loader.fanouts."""
        with suppress(tomllib.TOMLDecodeError):
            return _flat(tomllib.loads(self.recipe))
        return {}

    @property
    def seconds(self) -> float:
        """How long it took, over all its parts; while it goes on, so far."""
        if self.result and len(self.starts) < 2:
            return float(self.result.get("seconds", 0.0))
        spans, began = 0.0, None
        for event in self.events:
            if event.get("event") == "start":
                began = float(event["at"])
            elif event.get("event") == "end" and began is not None:
                spans, began = spans + float(event["at"]) - began, None
        if began is not None:  # a part that was killed ended with what it wrote last
            spans += max(0.0, self.written_at - began)
        return spans or sum(value for value in self.columns["seconds"] if value == value)

    @property
    def machines(self) -> list[Line]:
        """Where the ranks of the newest part run."""
        return list(self.starts[-1].get("machines", ())) if self.starts else []

    def numbered_epochs(self) -> Iterator[tuple[int, Line]]:
        """Epochs counted from 1, with the loss of the validation by its present name."""
        first = self.epochs[0].get("epoch", 1) if self.epochs else 1
        for line in self.epochs:
            yield line.get("epoch", 0) + (first == 0), {RENAMED.get(name, name): value for name, value in line.items()}


Labelled: TypeAlias = Sequence[tuple[str, RunReader]]  # runs with the names they are shown by


def totals(lines: Iterable[Line], kind: str) -> dict[str, float]:
    """The sums of what lines of times have, of one kind: seconds, loader, traffic."""
    found: dict[str, float] = {}
    for line in lines:
        for name, value in line.get(kind, {}).items():
            found[name] = found.get(name, 0.0) + value
    return found


def _flat(content: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


def _text(path: Path) -> str:
    with suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _json_object(path: Path) -> Line:
    with suppress(ValueError):
        content = json.loads(_text(path))
        return content if isinstance(content, dict) else {}
    return {}
