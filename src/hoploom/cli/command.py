"""What a subcommand is, and what several of them print with."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hoploom.errors import ConfigError

Arguments = argparse.Namespace
BAR_WIDTH = 40


@dataclass(frozen=True)
class Command:
    """One subcommand."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Arguments], int]


def check_writable(flag: str, path: Path | None) -> None:
    """Refuse a file that could not be written, before the work that it is to tell of."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"{flag} is {path}, which is a directory; give a file, e.g. {path / f'{flag[2:]}.out'}")
    if not folder.is_dir():
        raise ConfigError(f"{flag} is {path}, but there is no folder {path.parent}; make it first")
    held = path if path.exists() else folder
    if not (os.access(held, os.W_OK) and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(f"{flag} is {path}, but {held} may not be written; give another path, or change its mode")


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def table(header: Sequence[str], rows: Sequence[Sequence[str | int]]) -> str:
    """Columns as wide as they need to be, counts to the right."""
    right = [isinstance(cell, int) for cell in rows[0]] if rows else [False] * len(header)
    written = [header, *([f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*written, strict=True)]
    lines = (
        "  ".join(f"{cell:{'>' if r else '<'}{w}}" for cell, r, w in zip(line, right, widths, strict=True))
        for line in written
    )
    return "\n".join(line.rstrip() for line in lines)


class ProgressBar:
    """A bar on stderr, drawn only where that is a terminal."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, done: int, total: int) -> None:
        filled = BAR_WIDTH * done // total
        line = f"[{'#' * filled:.<{BAR_WIDTH}}] {100 * done // total:3d} % of {megabytes(total)}"
        if line != self._shown and sys.stderr.isatty():
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
            self._shown = line

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print(file=sys.stderr)
