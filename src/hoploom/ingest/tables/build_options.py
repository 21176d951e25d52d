"""The options of a build from tables, and its report."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.ingest.tables.ids import MOST_PARTS

ENGINES = ("duckdb", "spark")


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of a build from tables. Only `parts` and `drop_dangling` change the store."""

    parts: int = 1
    memory: int = 4 << 30  # bytes of this process; with Spark, of each task's process
    threads: int | None = None  # of the engine; None: all cores
    engine: str = "duckdb"
    master: str = "local[*]"  # of Spark
    conf: Mapping[str, str] = field(default_factory=dict)  # more settings of Spark
    drop_dangling: bool = False  # leave out edges of unknown nodes, and count them

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"engine is {self.engine!r}; give one of {', '.join(ENGINES)}")
        if self.threads is not None:
            as_int("threads", self.threads, 1, "give at least 1")
        if as_int("parts", self.parts, 1, f"give 1 to {MOST_PARTS}") > MOST_PARTS:
            raise ConfigError(f"parts is {self.parts}; give 1 to {MOST_PARTS}")


@dataclass(frozen=True)
class Report:
    """Counts and times of a build."""

    nodes: dict[str, int] = field(default_factory=dict)  # by type
    edges: dict[str, int] = field(default_factory=dict)  # rows read, by relation
    dropped: dict[str, int] = field(default_factory=dict)  # of them with an unknown end, by relation
    unlabelled: dict[str, int] = field(default_factory=dict)  # nodes without a label by type, if there are some
    notes: list[str] = field(default_factory=list)  # what happens to them
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
