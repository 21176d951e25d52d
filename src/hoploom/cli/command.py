"""What a subcommand is, how its options are read, and what several of them print with."""

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
    run: Callable[[Arguments], int]
    doing: Callable[[Arguments], str] | None = None  # what to say at once, before anything slow is imported
    # The module with what is slow to import, which comes before anything is open: until then, Ctrl-C ends at once.
    imports: Callable[[Arguments], str | None] | str | None = None


class _Reading(argparse.Action):
    """Reads a text when it is met. argparse's own `type` would hide what a ConfigError says."""

    def __init__(self, *, read: Read, appends: bool = False, **described: Any) -> None:
        super().__init__(**described)
        self._read, self._appends = read, appends

    def __call__(self, parser: object, found: Arguments, text: Any, flag: str | None = None) -> None:
        value = self._read(self.option_strings[0], text)
        setattr(found, self.dest, [*(getattr(found, self.dest) or ()), value] if self._appends else value)


def add_option(
    parser: argparse.ArgumentParser, flag: str, read: Read, *, default: str | None = None, **described: Any
) -> None:
    """An option whose text is read and checked with the command line; so is that of its default."""
    value = default if default in (None, argparse.SUPPRESS) else read(flag, str(default))
    parser.add_argument(flag, action=_Reading, read=read, default=value, **described)


def read_positive(flag: str, text: str) -> int:
    """A count of at least 1: 3, 10k, 1.5M or 1e6."""
    return parse_count(flag, text, 1)


def read_up_to(most: int) -> Read:
    """Reads a count of at least 1, and at most this."""

    def read(flag: str, text: str) -> int:
        with suppress(ConfigError):
            if (count := parse_count(flag, text, 1)) <= most:
                return count
        raise ConfigError(f"{flag} is {text!r:.80}; give a whole number from 1 to {most}")

    return read


def read_seconds(flag: str, text: str) -> float:
    """A time of at least 0."""
    return as_number(flag, parse_number(flag, text), "give a number of seconds, 0 or more")


def read_address(flag: str, text: str) -> str:
    """HOST:PORT, checked."""
    with suppress(ConfigError):
        split_address(text)
        return text
    raise ConfigError(f"{flag} is {text!r:.100}; give HOST:PORT, e.g. 127.0.0.1:7000")


def fanouts_of(flag: str, text: str) -> list[int] | None:
    """Picks per hop; None: nothing is sampled."""
    return None if text == NONE else list(parse_fanouts(flag, text))


def seeds_of(schema: "Schema", text: str | None) -> str | tuple[str, str] | None:
    """A split as loaders take it, from SPLIT, TYPE:SPLIT or none; left out: train, where just one type has members."""
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
    """Refuse a file that could not be written, before the work whose results it is for."""
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
    """The option of commands that programs read."""
    parser.add_argument("--json", action="store_true", help="print one JSON object; text for people goes to stderr")


def for_people(arguments: Arguments) -> TextIO:
    """Where text for people goes: stdout, unless a program reads that."""
    return sys.stderr if arguments.json else sys.stdout


def say(text: str) -> None:
    """What is being done, for a person who watches: a line on stderr where that is a terminal."""
    if sys.stderr.isatty():
        print(paint(text, "dim", sys.stderr), file=sys.stderr, flush=True)


def complaint(text: str) -> str:
    """A message for stderr. A terminal too narrow for it gets lines that end where a part of the message does."""
    lines, width = ["hoploom:"], width_of(sys.stderr)
    for part in re.split(r"(?<=;) ", printable(text, "\n")):
        fits = len(lines[-1]) + 1 + len(part) <= width
        lines = [*lines[:-1], f"{lines[-1]} {part}"] if fits or lines == ["hoploom:"] else [*lines, f"  {part}"]
    lines = [piece for line in lines for piece in wrapped(line, width, 2)]
    return "\n".join([paint("hoploom:", "red", sys.stderr) + lines[0].removeprefix("hoploom:"), *lines[1:]])


def width_of(stream: TextIO) -> int:
    """The columns of a terminal; of a file or a pipe, more than any line has."""
    return shutil.get_terminal_size().columns if stream.isatty() else sys.maxsize


def wrapped(line: str, width: int, indent: int) -> list[str]:
    """Lines that are no wider than this, where no word is; those behind the first begin with spaces."""
    if len(line) <= width:
        return [line]
    return textwrap.wrap(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False, tabsize=1
    )


def paint(text: str, style: str, stream: TextIO) -> str:
    """The text in a style of STYLES, where the stream shows colours."""
    return f"\033[{STYLES[style]}m{text}\033[0m" if wants_colour(stream.isatty()) else text


def table(header: Sequence[str], rows: Sequence[Sequence[str | int]]) -> str:
    """Columns as wide as they need to be, counts to the right."""
    right = [isinstance(cell, int) for cell in rows[0]] if rows else [False] * len(header)
    written = [header, *([f"{cell:,}" if isinstance(cell, int) else printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*written, strict=True)]
    lines = (
        "  ".join(f"{cell:{'>' if r else '<'}{w}}" for cell, r, w in zip(line, right, widths, strict=True))
        for line in written
    )
    return "\n".join(line.rstrip() for line in lines)


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """Nodes done of how many, drawn on stderr where that is a terminal."""
    from tqdm import tqdm

    with tqdm(unit=" nodes", unit_scale=True, disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


@contextmanager
def stage_line() -> Iterator[Callable[[str], None]]:
    """What is done now, and for how long it has been, on one line of stderr where that is a terminal."""
    from tqdm import tqdm

    with tqdm(bar_format="{elapsed}  {desc}", disable=None, leave=False) as line:
        yield lambda text: line.set_description_str(printable(text))
