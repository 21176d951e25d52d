"""A TOML file read and parsed; what is wrong is named with its file and line."""

import re
import tomllib
from pathlib import Path
from typing import Any

from hoploom.errors import ConfigError

LINE = re.compile(r"at line (\d+)")


def read_text(file: Path, absent: str, *, example: str) -> str:
    """What a file says. `absent`: the way out where there is none."""
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{file} does not exist; {absent}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; give a file such as {example}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: byte {content[error.start]:#04x} is not UTF-8; save it as UTF-8") from error


def parse(text: str, name: str) -> dict[str, Any]:
    """The tables of a text; `name` is what messages call it."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{name}: brackets are nested too deep; close them") from error
    except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
        found = LINE.search(str(error))
        line = int(found[1]) if found else _last_line(text)
        reason = re.sub(r" \(at .*\)$", "", str(error))
        raise ConfigError(f"{name}:{line}: not TOML: {reason}; strings need quotes, tables a [header]") from error


def _last_line(text: str) -> int:
    return text.rstrip().count("\n") + 1
