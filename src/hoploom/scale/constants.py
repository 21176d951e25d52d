"""What a machine does per second: measured by `hoploom bench`, kept as JSON, read by `hoploom plan`.

The defaults (defaults.json, written by `hoploom bench`) are one measurement of one small machine: good for orders of
magnitude. Whoever plans in earnest measures the machines that will be used.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from itertools import pairwise
from pathlib import Path

from hoploom.errors import ConfigError

FORMAT, VERSION = "hoploom-bench", 1
SHORT_ROW = 64  # bytes
Curve = tuple[tuple[float, float], ...]  # (bytes of what is read at random, a rate), ascending
REMEDY = "run `hoploom bench --out bench.json` again"


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Rates per second. `None`: not measured, for lack of the library."""

    machine: str
    cores: int  # that were in use; torch had as many threads
    hoploom: str  # its version
    date: str
    quick: bool = False
    random_reads: float  # 4-byte entries, 1 thread, far apart
    copy_bytes: float  # 1 thread
    sample_picks: Curve  # picks, sampled and relabelled, 1 thread; by bytes of topology
    hashed_slowdown: float  # times as long where node ids are hashed, beyond the direct map's budget
    gather_rows: Curve  # rows of SHORT_ROW bytes, 1 thread; by bytes of the table
    gather_bytes: float  # bytes of rows beyond their first SHORT_ROW, 1 thread
    batch_seconds: float  # of a batch's fixed cost
    open_seconds: float  # of opening a store of one part
    open_file_seconds: float  # of each further file
    csc_edges: Curve  # edges sorted into lists, all cores; by bytes of the lists
    join_edges: float | None  # edges whose both ends are looked up in the node table, by DuckDB, all cores
    partition_edges: float  # edges of the graph, by the stream partitioner from first to last, 1 thread
    disk_write: float  # bytes, flushed
    disk_read: float  # bytes, in order
    disk_reads: float  # pages of 4096 bytes, one at a time
    loopback_bytes: float  # of one TCP connection
    round_trip_seconds: float
    aggregate_values: float  # edges times width, forward and backward, all cores
    linear_flops: float  # forward and backward, all cores


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
    given = {field.name: _checked(path, field.name, contents) for field in fields(Constants) if field.name in contents}
    missing = [field.name for field in fields(Constants) if field.name not in given and field.name != "quick"]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}, it is older or was cut down; {REMEDY}")
    return Constants(**given)  # type: ignore[arg-type]


TEXTS = ("machine", "hoploom", "date")
CURVES = ("sample_picks", "gather_rows", "csc_edges")


def _checked(path: str | Path, name: str, contents: dict[str, object]) -> object:
    value = contents[name]
    if name in TEXTS:
        right = isinstance(value, str)
    elif name == "quick":
        right = isinstance(value, bool)
    elif name == "join_edges" and value is None:
        right = True
    elif name in CURVES:
        value = _curve(value)
        right = value is not None
    else:
        right = _is_rate(value)
    if not right:
        what = "text" if name in TEXTS else "[bytes, rate] pairs" if name in CURVES else "a number above 0"
        raise ConfigError(f"{path}: {name} is {contents[name]!r:.80}; it must be {what}")
    return value


def _curve(value: object) -> Curve | None:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return None
    if not all(isinstance(pair, Sequence) and len(pair) == 2 and all(map(_is_rate, pair)) for pair in value):
        return None
    points = tuple((float(size), float(rate)) for size, rate in value)
    sizes = [size for size, _ in points]
    return points if sizes == sorted(set(sizes)) else None


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
