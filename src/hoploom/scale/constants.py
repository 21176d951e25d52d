"""Rates of a machine: measured by `hoploom bench`, kept as JSON, read by `hoploom plan`.

Each rate is measured on tables larger than the CPU's caches, so small graphs are faster than planned. The built-in
rates are one measurement of a small machine: good for orders of magnitude.
"""

import json
import math
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, get_type_hints

from hoploom.config.values import as_count, as_rate, as_seconds
from hoploom.errors import ConfigError

HEADER = {"format": "hoploom-bench", "version": 6}
SHORT_ROW = 64  # bytes
REMEDY = "run `hoploom bench --out bench.json` again"

BytesPerSecond = Annotated[float, as_rate]
PerSecond = Annotated[float, lambda value: f"{as_count(value)}/s"]
Factor = Annotated[float, lambda value: f"{value:.2f} times"]
Seconds = Annotated[float, as_seconds]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Rates of one thread, unless the comment says all cores."""

    machine: str
    cores: int  # in use; torch had as many threads
    hoploom: str  # version
    date: str
    sample_picks: PerSecond  # sampled and relabelled
    hashed_slowdown: Factor  # of sampling, if node ids are hashed
    gather_rows: PerSecond  # rows of SHORT_ROW bytes, by random ids
    gather_bytes: BytesPerSecond  # bytes of rows beyond their first SHORT_ROW
    sort_edges: PerSecond  # into lists, all cores
    join_edges: PerSecond  # both ends looked up by DuckDB, all cores
    partition_edges: PerSecond  # the stream partitioner with all its passes
    disk_write: BytesPerSecond  # flushed
    disk_read: BytesPerSecond  # in order
    # Spark, per core of the executors. `hoploom bench` starts no cluster: it keeps the built-in rates.
    spark_start: Seconds  # fixed time of every run
    spark_nodes: PerSecond  # numbered
    spark_joins: PerSecond  # edges: both ends looked up, and moved to the ranges of their destinations
    spark_writes: BytesPerSecond  # rows written as the store's files
    spark_rewrites: PerSecond  # edges of a store, moved to the ranges of their new destinations

    def __str__(self) -> str:
        return f"{self.machine}, {self.cores} cores, {self.date}, Hoploom {self.hoploom}"


OF_SPARK = ("spark_start", "spark_nodes", "spark_joins", "spark_writes", "spark_rewrites")


@cache
def default_constants() -> Constants:
    """Return the rates that `hoploom bench` measured on the machine that Hoploom is developed on."""
    return read_constants(Path(__file__).with_name("defaults.json"))


def to_json(constants: Constants) -> str:
    """Return the text of bench.json."""
    return json.dumps(HEADER | asdict(constants), indent=1)


def read_constants(path: str | Path) -> Constants:
    """Read and check bench.json. Users may edit its figures, for a machine that they do not have yet."""
    try:
        contents = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; `hoploom bench --out {path}` writes one"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}; {REMEDY}") from error
    if not isinstance(contents, dict) or contents | HEADER != contents:
        raise ConfigError(f"{path} is not what `hoploom bench` writes, version {HEADER['version']}; {REMEDY}")
    missing = [field.name for field in fields(Constants) if field.name not in contents]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}, it was cut down; {REMEDY}")
    for field in fields(Constants):
        value = contents[field.name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        if not (isinstance(value, str) if field.type is str else is_number):
            must = "text" if field.type is str else "a number above 0"
            raise ConfigError(f"{path}: {field.name} is {value!r:.80}; it must be {must}")
    return Constants(**{field.name: contents[field.name] for field in fields(Constants)})


def constants_as_text(constants: Constants) -> str:
    """Return the rates as text, one a line."""
    hints = get_type_hints(Constants, include_extras=True)
    shown = {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}
    lines = [f"  {name:<18}{write(getattr(constants, name)):>16}" for name, write in shown.items()]
    return "\n".join([str(constants), *lines])
