"""The class of subcommands, readers of their options, and functions that several of them print with."""

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hoploom.config.values import as_number, nearest, parse_count, parse_fanouts, parse_number, printable, split_address
from hoploom.errors import ConfigError
from hoploom.ranks.environment import wants_colour

if TYPE_CHECKING:
    from hoploom.schema import Schema  # brings torch, which many commands do without

Arguments = argparse.Namespace
NONE = "none"
STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}
Read = Callable[[str, str], Any]  # (flag, text) -> value; ConfigError names the flag


@dataclass(frozen=True)
class Command:
    """One subcommand."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Arguments], int] | str  # "module:function" in cli, if the module is slow to import
    doing: Callable[[Arguments], str] | None = None  # the line to show before a slow import
    # Another module to import before anything is open: until then, Ctrl-C ends the process at once.
    imports: Callable[[Arguments], str | None] | str | None = None


class _Reading(argparse.Action):
    """An action that reads an option's text. argparse's own `type` would hide the message of a ConfigError."""

    def __init__(self, *, read: Read, appends: bool = False, **described: Any) -> None:
        super().__init__(**described)
        self._read, self._appends = read, appends

    def __call__(self, parser: object, found: Arguments, text: Any, flag: str | None = None) -> None:
        value = self._read(self.option_strings[0], text)
        setattr(found, self.dest, [*(getattr(found, self.dest) or ()), value] if self._appends else value)


def add_option(
    parser: argparse.ArgumentParser, flag: str, read: Read, *, default: str | None = None, **described: Any
) -> None:
    """Add an option whose text, and that of its default, is read and checked with the command line."""
    value = default if default in (None, argparse.SUPPRESS) else read(flag, str(default))
    parser.add_argument(flag, action=_Reading, read=read, default=value, **described)


def read_positive(flag: str, text: str) -> int:
    """Read a count of at least 1: 3, 10k, 1.5M or 1e6."""
    return parse_count(flag, text, 1)


def read_up_to(most: int) -> Read:
    """Return a reader of counts from 1 to `most`."""

    def read(flag: str, text: str) -> int:
        with suppress(ConfigError):
            if (count := parse_count(flag, text, 1)) <= most:
                return count
        raise ConfigError(f"{flag} is {text!r:.80}; give a whole number from 1 to {most}")

    return read


def read_seconds(flag: str, text: str) -> float:
    """Read a time of at least 0."""
    return as_number(flag, parse_number(flag, text), "give a number of seconds, 0 or more")


def read_address(flag: str, text: str) -> str:
    """Read HOST:PORT."""
    with suppress(ConfigError):
        split_address(text)
        return text
    raise ConfigError(f"{flag} is {text!r:.100}; give HOST:PORT, e.g. 127.0.0.1:7000")


def fanouts_or_none(flag: str, text: str) -> list[int] | None:
    """Read picks per hop; None if nothing is sampled."""
    return None if text == NONE else list(parse_fanouts(flag, text))


def seeds_of(schema: "Schema", text: str | None) -> str | tuple[str, str] | None:
    """Read SPLIT, TYPE:SPLIT or none as loaders take it. The default is train, if one type alone has members."""
    if text == NONE:
        return None
    known = {
        f"{t.name}:{split}": (t.name, split) for t in schema.node_types for split, count in t.splits.items() if count
    }
    found = [pair for name, pair in known.items() if (text or "train") in (name, pair[1])]
    if len(found) == 1:
        return found[0][1] if schema.homogeneous else found[0]
    if text is None:
        return None
    if found:
        types = " and ".join(node_type for node_type, _ in found)
        raise ConfigError(f"--seeds is {text!r}, a split of {types}; give one, e.g. {found[0][0]}:{text}")
    close = nearest(text, [*known, *(split for _, split in known.values())])
    hint = f"did you mean {close}?" if close else f"give one of {', '.join(known)}, or none" if known else "give none"
    raise ConfigError(f"--seeds is {text!r}, but there is no such split with members; {hint}")


def check_writable(flag: str, path: Path | None, *suffixes: str) -> None:
    """Raise ConfigError if a file cannot be written, before the work for it begins."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        file = path / f"{flag[2:]}{suffixes[0] if suffixes else '.out'}"
        raise ConfigError(f"{flag} is {path}, which is a directory; give a file, e.g. {file}")
    if not folder.is_dir():
        raise ConfigError(f"{flag} is {path}, but there is no folder {path.parent}; make it first")
    held = path if path.exists() else folder
    if not (os.access(held, os.W_OK) and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(f"{flag} is {path}, but {held} may not be written; give another path, or change its mode")
    if suffixes and path.suffix not in suffixes:
        raise ConfigError(f"{flag} is {path}; give a file that ends in {' or '.join(suffixes)}")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json, for commands whose output programs read."""
    parser.add_argument("--json", action="store_true", help="print one JSON object; text for people goes to stderr")


def for_people(arguments: Arguments) -> TextIO:
    """Return the stream of text for people: stdout, unless --json is given."""
    return sys.stderr if arguments.json else sys.stdout


def say(text: str) -> None:
    """Show what the command is doing, on stderr if that is a terminal."""
    if sys.stderr.isatty():
        print(paint(text, "dim", sys.stderr), file=sys.stderr, flush=True)


def complaint(text: str) -> str:
    """Return an error message for stderr. On a narrow terminal, its lines end between the message's parts."""
    lines, width = ["hoploom:"], shutil.get_terminal_size().columns if sys.stderr.isatty() else sys.maxsize
    for part in re.split(r"(?<=;) ", printable(text, "\n")):
        fits = len(lines[-1]) + 1 + len(part) <= width
        lines = [*lines[:-1], f"{lines[-1]} {part}"] if fits or lines == ["hoploom:"] else [*lines, f"  {part}"]
    options: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    pieces = [textwrap.wrap(line, width, tabsize=1, **options) if len(line) > width else [line] for line in lines]
    first, *others = chain.from_iterable(pieces)
    return "\n".join([paint("hoploom:", "red", sys.stderr) + first.removeprefix("hoploom:"), *others])


def paint(text: str, style: str, stream: TextIO) -> str:
    """Return the text in a style of STYLES, if the stream shows colours."""
    return f"\033[{STYLES[style]}m{text}\033[0m" if wants_colour(stream.isatty()) else text


def text_table(header: Sequence[str], rows: Sequence[Sequence[str | int]]) -> str:
    """Return a table as text, with counts aligned to the right."""
    right = [isinstance(cell, int) for cell in rows[0]] if rows else [False] * len(header)
    written = [header, *([f"{cell:,}" if isinstance(cell, int) else printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*written, strict=True)]
    lines = (
        "  ".join(f"{cell:{'>' if r else '<'}{w}}" for cell, r, w in zip(line, right, widths, strict=True))
        for line in written
    )
    return "\n".join(line.rstrip() for line in lines)


@contextmanager
def node_progress() -> Iterator[Callable[[int, int], None]]:
    """Show the number of nodes that are done and of all, on stderr if that is a terminal."""
    from tqdm import tqdm

    with tqdm(unit=" nodes", unit_scale=True, disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


@contextmanager
def stage_line() -> Iterator[Callable[[str], None]]:
    """Show the current stage and the elapsed time in one line, on stderr if that is a terminal."""
    from tqdm import tqdm

    with tqdm(bar_format="{elapsed}  {desc}", disable=None, leave=False) as line:
        yield lambda text: line.set_description_str(printable(text))
