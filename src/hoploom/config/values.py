"""Numbers and words that a program was given, checked where they arrive."""

import math
import numbers
import operator
from collections.abc import Sequence
from difflib import get_close_matches

from hoploom.errors import ConfigError


def as_int(what: str, value: object, least: int | None, way_out: str) -> int:
    """The value as an int if it is of any integer type; ConfigError for all else, and below `least`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise ConfigError(f"{what} is {value!r:.80}; {way_out}")
    return number


def as_number(what: str, value: object, way_out: str) -> float:
    """The value as a finite float of at least 0; ConfigError for all else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
        raise ConfigError(f"{what} is {value!r:.80}; {way_out}")
    return float(value)


def nearest(name: str, known: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The known word most like this one."""
    lowered = {word.lower(): word for word in known}
    found = get_close_matches(name.lower(), list(lowered), n=1, cutoff=cutoff)
    return lowered[found[0]] if found else None
