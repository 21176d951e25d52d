"""What a run writes down: a JSON line per step and rank, one per validation, TensorBoard where it is installed.

Lines reach the kernel one by one; a power cut may lose the newest.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hoploom.errors import StoreError
from hoploom.ranks.context import Context
from hoploom.train.step import StepReport

EPOCHS = "metrics.jsonl"


class Journal:
    """The journal of one rank: steps-rank0.jsonl and so on; rank 0 also writes metrics.jsonl and for TensorBoard.

    >>> with Journal("runs/papers", context) as journal:
    ...     fit(learner, training, context, journal=journal)
    """

    def __init__(self, folder: str | Path, context: Context, *, tensorboard: bool = True) -> None:
        self._folder, self._context = Path(folder), context
        self._wants_board = tensorboard and context.is_main
        self._files: dict[str, TextIO] = {}
        self._board: Any = None

    @property
    def steps_file(self) -> Path:
        return self._folder / _steps_name(self._context.rank)

    @property
    def epochs_file(self) -> Path:
        return self._folder / EPOCHS

    def rewind(self, steps: int, epochs: int) -> None:
        """Forget what was written after this many steps and whole epochs: they will be taken again."""
        self.close()
        _cut(self.steps_file, "step", steps)
        if self._context.is_main:
            present = {self._folder / _steps_name(rank) for rank in range(self._context.world_size)}
            for path in set(self._folder.glob("steps-rank*.jsonl")) - present:
                _cut(path, "step", steps)
            _cut(self.epochs_file, "epoch", epochs - 1)
        if self._wants_board:
            self._board = _open_board(self._folder / "tensorboard", steps)

    def step(self, report: StepReport) -> None:
        """Write a step down."""
        line = asdict(report)
        line.pop("asked")
        self._append(self.steps_file, line)
        if self._board is not None:
            for name in ("loss", "learning_rate", "seconds", "wait_seconds"):
                self._board.add_scalar(f"step/{name}", line[name], report.step)

    def epoch(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write an epoch's metrics down; rank 0's are enough."""
        if not self._context.is_main:
            return
        self._append(self.epochs_file, {"step": step, **metrics})
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(f"epoch/{name}", value, step)
            self._board.flush()

    def _append(self, path: Path, line: Mapping[str, Any]) -> None:
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in line.items()}
        try:
            if path.name not in self._files:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files[path.name] = path.open("a", encoding="utf-8", buffering=1)
            self._files[path.name].write(json.dumps(finite, allow_nan=False) + "\n")
        except OSError as error:
            raise StoreError(f"cannot write the journal {path}: {error}; free some space, or leave it out") from error

    def close(self) -> None:
        """Close the files; the next line opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _steps_name(rank: int) -> str:
    return f"steps-rank{rank}.jsonl"


def _open_board(folder: Path, steps: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=steps + 1)


def _cut(path: Path, counted: str, last: int) -> None:
    """Keep the whole lines up to this step or epoch; a line that a crash cut short goes too."""
    try:
        with path.open("rb+") as file:
            kept = 0
            for line in file:
                if not _is_kept(line, counted, last):
                    break
                kept += len(line)
            file.truncate(kept)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"cannot shorten the journal {path}: {error}; move it away") from error


def _is_kept(line: bytes, counted: str, last: int) -> bool:
    try:
        return line.endswith(b"\n") and int(json.loads(line)[counted]) <= last
    except (ValueError, KeyError, TypeError):
        return False
