"""What a build did: how many rows of each table, what was left out, and how long each stage took."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hoploom.ingest.stream import Progress
from hoploom.ingest.tables.graph_file import NodeTable, rule_of
from hoploom.ingest.tables.sources import TableSource


@dataclass(frozen=True)
class Unlabelled:
    """Nodes of a type that have no label."""

    source: TableSource
    count: int
    null: float | int | None  # what the store holds as their label
    splits: Mapping[str, int]  # how many of them the split column names, by split

    def __str__(self) -> str:
        """What happens with them, in a line."""
        table = self.source.table
        assert isinstance(table, NodeTable)
        null = "null or NaN" if isinstance(self.null, float) else f"null or {self.null}"
        null = "null" if rule_of(table, str(table.label)).categories else null
        what = f"{table.owner}: {self.count:,} of {self.source.num_rows:,} nodes have no label (column {table.label!r}"
        ending = "training refuses them as seeds"
        if self.splits:
            named = ", ".join(f"{count:,} to {name!r}" for name, count in sorted(self.splits.items()))
            ending = f"column {table.split!r} assigns {named}, and training refuses a split that holds such nodes"
        elif table.split is not None:
            ending = "they are in no split"
        return f"{what} is {null}); {ending}"


@dataclass(frozen=True)
class Report:
    """What a build did."""

    nodes: dict[str, int] = field(default_factory=dict)  # by type
    edges: dict[str, int] = field(default_factory=dict)  # rows read, by relation
    dropped: dict[str, int] = field(default_factory=dict)  # of them with an unknown end, by relation
    unlabelled: dict[str, Unlabelled] = field(default_factory=dict)  # by type, where there are some
    seconds: dict[str, float] = field(default_factory=dict)  # by stage


class StageTimes:
    """Takes the time of stages as each begins: adds up their seconds by name."""

    def __init__(self, seconds: dict[str, float], progress: Progress | None) -> None:
        self._seconds, self._progress = seconds, progress
        self._now: tuple[str, float] | None = None

    def __enter__(self) -> "StageTimes":
        return self

    def __exit__(self, *failure: Any) -> None:
        self._end()

    def begin(self, stage: str) -> None:
        """The next stage begins."""
        self._end()
        self._now = stage, time.monotonic()
        if self._progress is not None:
            self._progress(stage)

    def detail(self, text: str) -> None:
        """How far the stage is."""
        if self._progress is not None and self._now is not None:
            self._progress(f"{self._now[0]}: {text}")

    def _end(self) -> None:
        if self._now is not None:
            stage, start = self._now
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.monotonic() - start
            self._now = None
