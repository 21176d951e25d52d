"""The question of `hoploom plan`: a graph, its cluster, and the training. Each field is a flag of the command, too."""

# ruff: noqa: RUF009  (option() is dataclasses.field)

import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple

from hoploom.config import rules
from hoploom.config.rules import KeyRule
from hoploom.config.values import (
    LIMIT,
    NUMBER,
    as_fanouts,
    nearest,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_fanouts,
    parse_number,
)
from hoploom.errors import ConfigError
from hoploom.fields import ITEM_BYTES, Field

SHORT_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
MOST_LAYERS = 32

# Edges between hosts, relative to assigning by hash. Cautious values for graphs with communities; `hoploom partition`
# reports the cut of a graph.
CUT_METHODS = {"hash": 1.0, "range": 1.0, "stream": 0.5, "metis": 1 / 3}


def parse_features(what: str, text: str) -> Field | None:
    """Return the field for a width and a dtype: 256xfp16, 100xfloat32, or none.

    >>> parse_features("--features", "256xfp16")
    """
    if text == "none":
        return None
    match = re.fullmatch(NUMBER + r"x\s*([A-Za-z]\w*)\s*", text)
    if match is None:
        raise ConfigError(f"{what} is {text!r:.80}; give a width and a dtype such as 256xfp16, or none")
    name = SHORT_DTYPES.get(match[2], match[2])
    if name not in ITEM_BYTES:
        known = [*SHORT_DTYPES, *ITEM_BYTES]
        close = nearest(name, known)
        hint = f"did you mean {close}?" if close else f"choose one of {', '.join(known)}"
        raise ConfigError(f"{what} has dtype {name!r:.80}; {hint}")
    return Field(name, (parse_count(what, match[1]),))


def parse_cut(what: str, text: str) -> float | str:
    """Return a share, or the name of a method."""
    return text if text in CUT_METHODS else parse_number(what, text)


class Option(NamedTuple):
    """The parser of a field's text, the rule for its value, and its help."""

    read: Callable[[str, str], Any]
    rule: KeyRule
    help: str = ""


def _words(*words: str) -> Option:
    return Option(lambda what, text: text, rules.choice(*words))


def _is_cut(cut: float | str) -> bool:
    return cut in CUT_METHODS if isinstance(cut, str) else 0 <= cut <= 1


COUNT = Option(parse_count, rules.whole(1, LIMIT))
COUNT_OR_0 = Option(parse_count, rules.whole(0, LIMIT))
SIZE = Option(parse_bytes, rules.whole(1, LIMIT))
SHARE = Option(parse_number, rules.number(0, 1))
BELOW_1 = Option(parse_number, rules.SHARE)
BANDWIDTH = Option(parse_bandwidth, rules.number(open_ends=True))
SECONDS = Option(parse_number, rules.number())
SWITCH = Option(lambda what, text: True, rules.FLAG)
FEATURES = Option(
    parse_features,
    rules.accepted(
        "a dtype and a width of at least 1",
        lambda row: row.dtype in ITEM_BYTES and min(row.shape, default=1) > 0,
        kinds=Field,
    ),
)
FANOUTS = Option(
    parse_fanouts,
    rules.accepted(
        f"one count per layer, e.g. (15, 10, 5), for at most {MOST_LAYERS} layers",
        lambda fanouts: 0 < len(as_fanouts(fanouts)) <= MOST_LAYERS,
        kinds=tuple | list,
    ),
)
CUT = Option(
    parse_cut, rules.accepted(f"a share from 0 to 1, or one of {', '.join(CUT_METHODS)}", _is_cut, kinds=float | str)
)


def option(option: Option, default: str | None, help: str) -> Any:
    """Return a dataclass field with its default as text: "" for None, and None for a required field."""
    value = MISSING if default is None else option.read(help, default) if default else None
    shown = f"{help} (default: {default})" if default else help
    return field(default=value, metadata={"option": option._replace(help=shown)})


def switch(help: str) -> Any:
    return field(default=False, metadata={"option": SWITCH._replace(help=help)})


@dataclass(frozen=True, kw_only=True)
class Question:
    """A graph, the hosts that hold it, and the training; checked when it is made.

    >>> Question(nodes=10**10, edges=10**12, features=Field("float16", (256,)), hosts=64)
    """

    nodes: int = option(COUNT, None, "nodes of all types: 1e10, 2.5M")
    edges: int = option(COUNT, None, "edges of all relations")
    features: Field | None = option(FEATURES, "128xfp32", "width and dtype of a node's features, or none")
    original_id_bytes: int = option(
        COUNT_OR_0, "8", "bytes of an original id: 8 for integers, the longest text id, or 0 if the store keeps none"
    )
    edge_features: Field | None = option(FEATURES, "", "width and dtype of an edge's features")
    weights: bool = switch("edges have weights")
    times: bool = switch("edges have times")
    train_share: float = option(SHARE, "0.1", "share of the nodes that are training seeds")
    hosts: int = option(COUNT, "1", "hosts that hold the graph and train")
    memory_per_host: int = option(SIZE, "512GB", "memory of a host")
    network: float = option(BANDWIDTH, "10Gb", "network bandwidth of a host per second: 100Gb (bits) or 12.5GB (bytes)")
    topology: str = option(_words("auto", "everywhere", "parts"), "auto", "auto, everywhere (on every host) or parts")
    edge_cut: float | str = option(CUT, "hash", "share of the edges between hosts, or hash, range, stream, metis")
    local_seeds: bool = switch("a rank's seeds are nodes of its own host")
    executors: int | None = option(
        COUNT, "", "executors of Spark that build and partition the store, each on its own host (default: no Spark)"
    )
    executor_cores: int = option(COUNT, "8", "cores of an executor")
    fanouts: tuple[int, ...] = option(FANOUTS, "15,10,5", "picks per node, one per layer, -1 for all neighbours")
    batch_size: int = option(COUNT, "1024", "seeds of a rank's step")
    ranks_per_host: int = option(COUNT, "1", "training processes of a host")
    workers: int = option(COUNT, "2", "loader threads of a rank")
    hidden: int = option(COUNT, "256", "hidden width of the model; the number of layers is the number of fanouts")
    classes: int = option(COUNT, "64", "number of outputs of the model")
    step_seconds: float = option(
        SECONDS, "0.0", "seconds of one training step without loading, 0 if unknown; measure it on your machine"
    )
    cache: float = option(SHARE, "0.0", "share of the other hosts' rows that a host keeps")
    hit_rate: float | None = option(SHARE, "", "hit rate of the cache, if you have measured it (default: calculated)")
    skew: float = option(
        BELOW_1,
        "0.5",
        "how uneven node popularity is: 0 means all nodes are equally popular, 0.5 is a power law (the share of nodes "
        "with a degree above d falls as 1/d^2)",
    )

    def __post_init__(self) -> None:
        for described in fields(self):
            value, rule = getattr(self, described.name), described.metadata["option"].rule
            if value is not None and rule.read(value) is None:
                raise ConfigError(f"{described.name.replace('_', ' ')} is {value!r:.80}; give {rule.expects}")
        if self.hosts > self.nodes:
            raise ConfigError(f"hosts is {self.hosts} for {self.nodes} nodes; give each host a node at least")

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def row_bytes(self) -> int:
        """Bytes of one node's features."""
        return 0 if self.features is None else self.features.row_bytes

    @property
    def cut(self) -> float:
        """Share of the edges between hosts."""
        if not isinstance(self.edge_cut, str):
            return self.edge_cut if self.hosts > 1 else 0.0
        return CUT_METHODS[self.edge_cut] * (self.hosts - 1) / self.hosts

    @property
    def num_seeds(self) -> int:
        return max(1, round(self.nodes * self.train_share))
