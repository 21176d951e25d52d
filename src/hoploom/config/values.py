"""Parse and format single values: numbers, words, amounts (512GB, 20%, 100Gb), addresses.

Sizes use powers of 1000 (GB) or 1024 (GiB). Formatted amounts have three digits.
"""

import ipaddress
import json
import math
import numbers
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hoploom.errors import ConfigError

COUNT_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
PREFIXES = {"": 1} | {f"{p}{i}": (1024 if i else 1000) ** n for n, p in enumerate("kmgtp", 1) for i in ("", "i")}
NUMBER = r"\s*([0-9][0-9_,]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*"
BARE = re.compile(r"[A-Za-z0-9_-]+")
LIMIT = 10**18  # of counts and sizes: more than any graph needs, and int64 holds it


def as_int(what: str, value: object, least: int | None, way_out: str) -> int:
    """Return a value of any integer type as int; raise ConfigError for other types, and for values below `least`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise ConfigError(f"{what} is {value!r:.80}; {way_out}")
    return number


def as_number(what: str, value: object, way_out: str) -> float:
    """Return a number as a finite float of at least 0; raise ConfigError for any other value."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
        raise ConfigError(f"{what} is {value!r:.80}; {way_out}")
    return float(value)


def nearest(name: str, known: Sequence[str], cutoff: float = 0.6) -> str | None:
    """Return the word in `known` that is most similar to `name`; None if none is similar enough."""
    lowered = {word.lower(): word for word in known}
    found = get_close_matches(name.lower(), list(lowered), n=1, cutoff=cutoff)
    return lowered[found[0]] if found else None


# --- amounts from text ---------------------------------------------------------------------------


def parse_count(what: str, text: str, least: int = 0) -> int:
    """Return a whole number of at least `least`, from text such as 1e10, 10_000, 2.5M or 1B."""
    way_out = f"give a whole number of at least {least}, such as 10000, 1e10 or 2.5M"
    match = re.fullmatch(NUMBER + r"([kKmMbBgGtT]?)\s*", text)
    if match is None:
        raise ConfigError(f"{what} is {text!r:.80}; {way_out}")
    value = _decimal(match[1]) * COUNT_SUFFIXES[match[2].lower()]
    if value != value.to_integral_value() or not least <= value <= LIMIT:
        raise ConfigError(f"{what} is {text!r:.80}; {way_out}{', and at most 1e18' * (value > LIMIT)}")
    return int(value)


def parse_number(what: str, text: str) -> float:
    """Return a float, from text such as 0.1 or 2e-3."""
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{what} is {text!r:.80}; give a number such as 0.1") from error


def parse_bytes(what: str, text: str) -> int:
    """Return a size in bytes, from text such as 512GB, 64GiB or 4e9 B."""
    match = re.fullmatch(NUMBER + r"([kmgtp]?i?)(B|b|)\s*", text, re.IGNORECASE)
    if match is None or match[2].lower() not in PREFIXES or (match[3] == "b" and match[2]):
        raise ConfigError(f"{what} is {text!r:.80}; give a size such as 512GB or 64GiB")
    value = _decimal(match[1]) * PREFIXES[match[2].lower()]
    if not 0 < value <= LIMIT:
        raise ConfigError(f"{what} is {text!r:.80}; give a size above 0 and at most 1e18 bytes")
    return int(value)


def parse_bandwidth(what: str, text: str) -> float:
    """Return bytes per second, from bits (100Gb) or bytes (12.5GB), with or without a final /s or ps."""
    match = re.fullmatch(NUMBER + r"([kKmMgGtT]?i?)(?:(B|b)|([bB]it))(?:/s|ps)?\s*", text)
    if match is None or match[2].lower() not in PREFIXES:
        raise ConfigError(f"{what} is {text!r:.80}; give bits such as 100Gb, or bytes such as 12.5GB, per second")
    value: float = float(_decimal(match[1])) * PREFIXES[match[2].lower()] / (1 if match[3] == "B" else 8)
    if not 0 < value <= LIMIT:
        raise ConfigError(f"{what} is {text!r:.80}; give a rate above 0, such as 100Gb")
    return value


def parse_share_or_bytes(what: str, value: object, way_out: str) -> float | int:
    """Return a share as a float, from 0.2 or "20%"; or bytes as an int, from 4_000_000_000 or "4GB"."""
    refusal = ConfigError(f"{what} is {value!r:.80}; {way_out}")
    if isinstance(value, str):
        text = value.strip()
        percent = re.fullmatch(NUMBER + "%", text)
        if percent is None and (not text[:1].isdigit() or text.endswith("%")):
            raise refusal
        if percent is None and not text[-1].isalpha():  # "0.5" may mean a share, or GB
            raise ConfigError(f"{what} is {value!r:.80}; give '50%' for a share or '4GB' for bytes")
        if percent is None:
            return parse_bytes(what, value)
        share = float(_decimal(percent[1])) / 100
    elif isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        share = as_number(what, value, way_out)
    else:
        return as_int(what, value, 0, way_out)
    if not 0 <= share <= 1:
        raise refusal
    return share


def parse_fanouts(what: str, text: str) -> tuple[int, ...]:
    """Return the fanouts, one per hop, from text such as 15,10,5; -1 means all neighbours."""
    words = [word.strip() for word in text.strip().strip("[]").split(",")]
    if not all(re.fullmatch(r"-1|[0-9]+", word) for word in words):
        raise ConfigError(f"{what} is {text!r:.80}; give one count per layer, e.g. 15,10,5, or -1 for all neighbours")
    return as_fanouts(map(int, words))


def as_fanouts(value: object) -> tuple[int, ...]:
    """Return the fanouts as a tuple; raise ConfigError unless they are a list of integers of at least -1."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"fanouts are {value!r:.80}; give one per layer in a list, e.g. [15, 10, 5]")
    return tuple(as_int("fanout", fanout, -1, "give a count, or -1 for all neighbours") for fanout in value)


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text.replace(",", "").replace("_", ""))
    except InvalidOperation as error:  # an exponent beyond what Decimal takes
        raise ConfigError(f"{text!r:.80} is no number; give one such as 1e10") from error


# --- addresses -----------------------------------------------------------------------------------


def split_address(address: str) -> tuple[str, int]:
    """Return the host and port of HOST:PORT, or of [HOST]:PORT for IPv6."""
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"the address is {address!r:.100}; give HOST:PORT, e.g. 127.0.0.1:7000")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT: the inverse of split_address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_addresses(servers: str | Iterable[str]) -> list[str]:
    """Return the distinct addresses in a list, or in text such as HOST:PORT,HOST:PORT; raise ConfigError if wrong."""
    listed = servers.split(",") if isinstance(servers, str) else list(servers or ())
    found = [join_address(*split_address(one.strip())) for one in listed if isinstance(one, str) and one.strip()]
    if not found or len(found) != len([one for one in listed if one != ""]):
        raise ConfigError(f"servers are {servers!r:.200}; give addresses, e.g. 10.0.0.1:7000,10.0.0.2:7000")
    return list(dict.fromkeys(found))


def is_loopback(host: str) -> bool:
    """Return whether an address is loopback. Names are not looked up: only localhost counts."""
    bare = host.strip("[]").partition("%")[0].lower().rstrip(".")
    if bare == "localhost":
        return True
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return False
    inner = getattr(address, "ipv4_mapped", None)
    return bool((inner or address).is_loopback)


# --- formatting ----------------------------------------------------------------------------------


def as_bytes(value: float) -> str:
    """Format a number of bytes in the best unit: 80.0 GB."""
    return _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))


def as_count(value: float) -> str:
    """Format a count: all digits below a million, else as 1.50 M or 10.0 B."""
    return f"{value:,.0f}" if value < 1e6 else _scaled(value, ("", "k", "M", "B", "T", "Q"))


def as_seconds(value: float) -> str:
    """Format a number of seconds in the best unit, from microseconds to days: 0.002 gives 2.00 ms."""
    for limit, unit, per in ((1e-3, "us", 1e-6), (1.0, "ms", 1e-3), (120.0, "s", 1.0), (7200.0, "min", 60.0)):
        if value < limit:
            return f"{_figure(value / per)} {unit}"
    return f"{_figure(value / 3600)} h" if value < 48 * 3600 else f"{value / 86400:,.1f} days"


def as_share(value: float) -> str:
    """Format a share in percent: 0.2 gives 20.0 %."""
    return f"{_figure(100 * value)} %"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    place = 0 if value < 1 else min(int(math.log10(value) / 3 + 1e-12), len(units) - 1)
    return f"{_figure(value / 1000**place)} {units[place]}".strip()


def _figure(value: float) -> str:
    """Format a number with three digits, or without decimals if it has more."""
    if value == 0 or value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str | int]]) -> str:
    """Return a table as text, with counts aligned to the right."""
    right = [isinstance(cell, int) for cell in rows[0]] if rows else [False] * len(header)
    written = [header, *([f"{cell:,}" if isinstance(cell, int) else printable(cell) for cell in row] for row in rows)]
    return "\n".join(aligned(written, right))


def aligned(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Return the rows of a table as lines with columns of one width, aligned to the right where `right` is True."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


# --- into TOML -----------------------------------------------------------------------------------


def as_toml(value: Any) -> str:
    """Format a value as TOML, to be written after `key = `."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return quoted(str(value))
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Mapping):
        inside = ", ".join(f"{as_key(key)} = {as_toml(entry)}" for key, entry in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return f"[{', '.join(map(as_toml, value))}]"


def as_key(name: str) -> str:
    """Return a TOML key, quoted if necessary."""
    return name if BARE.fullmatch(name) else quoted(name)


def printable(text: str, keep: str = "") -> str:
    """Return the text with escapes for characters that terminals cannot show, except those in `keep`."""
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def quoted(text: str) -> str:
    """Return text as a TOML string in double quotes."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")  # TOML requires this escape
