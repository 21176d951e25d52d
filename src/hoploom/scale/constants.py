"""What a machine does per second: measured by `hoploom bench`, kept as JSON, read by `hoploom plan`.

The defaults (defaults.json, written by `hoploom bench`) are one measurement of one small machine: good for orders of
magnitude. Whoever plans in earnest measures the machines that will be used.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

from hoploom.errors import ConfigError

FORMAT, VERSION = "hoploom-bench", 1
SHORT_ROW = 64  # bytes
Curve = tuple[tuple[float, float], ...]  # (bytes of what is read at random, a rate), ascending
REMEDY = "run `hoploom bench --out bench.json` again"


class Figure(NamedTuple):
    """How `hoploom bench` prints a constant."""

    what: str
    unit: str
    where: str = ""  # of a point of a curve


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Rates per second. `None`: not measured, for lack of the library."""

    machine: str
    cores: int  # that were in use; torch had as many threads
    hoploom: str  # its version
    date: str
    quick: bool = False
    random_reads: Annotated[float, Figure("random 4-byte reads, 1 thread", "/s")]  # far apart
    copy_bytes: Annotated[float, Figure("copying, 1 thread", "B")]
    # picks sampled and relabelled
    sample_picks: Annotated[Curve, Figure("sampling, 1 thread", "picks/s", "lists of {}")]
    # where node ids are hashed, beyond the direct map's budget
    hashed_slowdown: Annotated[float, Figure("sampling beyond a direct map", "times as long")]
    gather_rows: Annotated[Curve, Figure("gathering, 1 thread", "rows/s", f"of {SHORT_ROW} B, a table of {{}}")]
    # bytes of rows beyond their first SHORT_ROW
    gather_bytes: Annotated[float, Figure("gathering, what is longer, 1 thread", "B")]
    batch_seconds: Annotated[float, Figure("fixed cost of a batch", "s")]
    open_seconds: Annotated[float, Figure("opening a store of one part", "s")]
    open_file_seconds: Annotated[float, Figure("opening each further file", "s")]
    csc_edges: Annotated[Curve, Figure("edge list to CSC", "edges/s", "lists of {}")]  # all cores
    join_edges: Annotated[float | None, Figure("looking up both ends of edges, DuckDB", "edges/s")]  # all cores
    # edges of the graph, from first to last
    partition_edges: Annotated[float, Figure("assigning nodes by stream, 1 thread", "edges/s")]
    disk_write: Annotated[float, Figure("writing to disk", "B")]  # flushed
    disk_read: Annotated[float, Figure("reading from disk in order", "B")]
    disk_reads: Annotated[float, Figure("pages of 4 KiB at random, one at a time", "/s")]
    loopback_bytes: Annotated[float, Figure("one connection over loopback", "B")]
    round_trip_seconds: Annotated[float, Figure("a round trip over loopback", "s")]
    # edges times width, all cores
    aggregate_values: Annotated[float, Figure("aggregating, forward and backward", "values/s")]
    linear_flops: Annotated[float, Figure("linear layers, forward and backward", "flop/s")]  # all cores


def figures() -> dict[str, Figure]:
    """What is printed of each constant that was measured."""
    hints = get_type_hints(Constants, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


@cache
def default_constants() -> Constants:
    """What `hoploom bench` found on the machine that Hoploom is developed on."""
    return read_constants(Path(__file__).with_name("defaults.json"))


def rate_at(curve: Curve, size: float) -> float:
    """The rate for this many bytes: linear in the logarithm between two points, the nearest point's beyond them."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (low, slow), (high, fast) in pairwise(curve):
        if size < high:
            return slow + (fast - slow) * math.log(size / low) / math.log(high / low)
    return curve[-1][1]


def to_json(constants: Constants) -> str:
    """The text of bench.json."""
    return json.dumps({"format": FORMAT, "version": VERSION} | asdict(constants), indent=1)


def read_constants(path: str | Path) -> Constants:
    """Read and check bench.json. Figures may be edited, for a machine that is not there yet."""
    try:
        contents = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; `hoploom bench --out {path}` writes one"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}; {REMEDY}") from error
    if not isinstance(contents, dict) or contents.get("format") != FORMAT or contents.get("version") != VERSION:
        raise ConfigError(f"{path} is not what `hoploom bench` writes, version {VERSION}; {REMEDY}")
    names = [field.name for field in fields(Constants)]
    missing = [name for name in names if name not in contents and name != "quick"]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}, it is older or was cut down; {REMEDY}")
    return Constants(**{name: _checked(path, name, contents[name]) for name in names if name in contents})


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_curve(value: object) -> bool:
    if not (isinstance(value, list) and value and all(isinstance(pair, list) and len(pair) == 2 for pair in value)):
        return False
    sizes = [size for size, _ in value]
    return all(_is_rate(figure) for pair in value for figure in pair) and sizes == sorted(set(sizes))


KINDS: dict[object, tuple[Callable[[object], bool], str]] = {  # by the type of a constant
    str: (lambda value: isinstance(value, str), "text"),
    bool: (lambda value: isinstance(value, bool), "a number above 0"),
    Curve: (_is_curve, "[bytes, rate] pairs"),
    float | None: (lambda value: value is None or _is_rate(value), "a number above 0"),
    float: (_is_rate, "a number above 0"),
    int: (_is_rate, "a number above 0"),
}


def _checked(path: str | Path, name: str, value: Any) -> Any:
    is_right, what = KINDS[get_type_hints(Constants)[name]]
    if not is_right(value):
        raise ConfigError(f"{path}: {name} is {value!r:.80}; it must be {what}")
    return tuple((float(size), float(rate)) for size, rate in value) if isinstance(value, list) else value
