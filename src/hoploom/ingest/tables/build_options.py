"""What a build from tables can be told."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.ingest.tables.ids import MOST_PARTS

ENGINES = ("duckdb", "spark")


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How a store is built from tables. None of it but `parts` and `drop_dangling` changes what is built."""

    parts: int = 1
    memory: int = 4 << 30  # bytes of this process; with Spark, of each task's process
    threads: int | None = None  # of the engine; None: all cores
    engine: str = "duckdb"
    master: str = "local[*]"  # Spark's
    conf: Mapping[str, str] = field(default_factory=dict)  # more of Spark's settings
    drop_dangling: bool = False  # edges of unknown nodes are left out and counted
    largest_group: int | None = None  # bytes: Parquet in larger row groups is rewritten; None: by memory and threads

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"engine is {self.engine!r}; give one of {', '.join(ENGINES)}")
        if self.threads is not None:
            as_int("threads", self.threads, 1, "give at least 1")
        if as_int("parts", self.parts, 1, f"give 1 to {MOST_PARTS}") > MOST_PARTS:
            raise ConfigError(f"parts is {self.parts}; give 1 to {MOST_PARTS}")
