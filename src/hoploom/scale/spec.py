"""What `hoploom plan` is asked: a graph, its cluster, and the training; checked when it is made."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from hoploom.config.values import LIMIT, NUMBER, as_fanouts, as_int, as_number, nearest, parse_count
from hoploom.errors import ConfigError
from hoploom.schema import DTYPES, Field

DEFAULT_FEATURES = Field("float32", (128,))
Mode = Literal["blocks", "subgraph"]  # what a batch is
Topology = Literal["auto", "everywhere", "parts"]
SHORT_DTYPES = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}
COUNTS = "nodes edges hosts parts_per_host memory_per_host batch_size ranks_per_host workers hidden classes"
MOST_LAYERS = 32
MAX_PARTS = 100_000  # a part's folder has five digits

# Edges between hosts as a share of what assigning by hash cuts. Only hash's is arithmetic; stream and metis are what
# graphs with communities allow, and `hoploom partition` reports your graph's own.
CUT_METHODS = {"hash": 1.0, "range": 1.0, "stream": 0.5, "metis": 1 / 3}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A graph, the hosts that hold it, and how it is trained on.

    >>> Question(nodes=10**10, edges=10**12, features=Field("float16", (256,)), hosts=64)
    """

    nodes: int
    edges: int
    features: Field | None = DEFAULT_FEATURES
    largest_type: int | None = None  # nodes of the largest node type, which decides the width of ids; None: all
    labels: bool = True  # y, int64
    original_id_bytes: int = 8  # 8 for integers, W for strings of W bytes, 0 where they are the store's own
    edge_features: Field | None = None
    weights: bool = False
    times: bool = False
    train_share: float = 0.1  # of the nodes
    hosts: int = 1
    parts_per_host: int = 1
    memory_per_host: int = 512 * 10**9
    network: float | None = None  # bytes/s of a host; None: what one connection carries over loopback
    topology: Topology = "auto"  # everywhere: every host maps the whole of it
    edge_cut: float | str = "hash"  # share of the edges between hosts, or one of CUT_METHODS
    local_seeds: bool = False  # a rank's seeds are nodes of its own host
    fanouts: tuple[int, ...] = (15, 10, 5)
    batch_size: int = 1024  # of one rank
    mode: Mode = "blocks"
    ranks_per_host: int = 1
    workers: int = 2  # loader threads of a rank
    hidden: int = 256
    classes: int = 64
    step_seconds: float | None = None  # of the model alone, where it was measured
    cache: float = 0.0  # share of the other hosts' rows that a host keeps
    hit_rate: float | None = None  # of that cache; None: from the skew
    skew: float = 0.5

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_choices(self)

    @property
    def mean_degree(self) -> float:
        return self.edges / self.nodes

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def parts(self) -> int:
        return self.hosts * self.parts_per_host

    @property
    def row_bytes(self) -> int:
        """Of one node's features."""
        return 0 if self.features is None else self.features.row_bytes

    @property
    def cut(self) -> float:
        """The share of the edges between hosts."""
        if not isinstance(self.edge_cut, str):
            return self.edge_cut if self.hosts > 1 else 0.0
        return CUT_METHODS[self.edge_cut] * (self.hosts - 1) / self.hosts

    @property
    def num_seeds(self) -> int:
        return max(1, round(self.nodes * self.train_share))


def parse_features(what: str, text: str) -> Field | None:
    """Numbers per row and their dtype: 256xfp16, 100xfloat32, or none.

    >>> parse_features("--features", "256xfp16")
    """
    if text.strip() in ("none", "0"):
        return None
    match = re.fullmatch(NUMBER + r"[x*]\s*([A-Za-z]\w*)\s*", text)
    if match is None:
        raise ConfigError(f"{what} is {text!r:.80}; give a width and a dtype such as 256xfp16, or none")
    width = parse_count(what, match[1])
    if width < 1:
        raise ConfigError(f"{what} is {text!r:.80}; give a width of at least 1, or none")
    return Field(parse_dtype(what, match[2]), (width,))


def parse_dtype(what: str, text: str) -> str:
    """The store's name of a dtype, from its own or a short one."""
    name = SHORT_DTYPES.get(text.lower(), text.lower())
    known = [*SHORT_DTYPES, *DTYPES]
    if name not in DTYPES:
        hint = _hint(text, known, f"choose one of {', '.join(known)}")
        raise ConfigError(f"{what} has dtype {text!r:.80}; {hint}")
    return name


def parse_cut(what: str, text: str) -> float | str:
    """A share, or the name of a method."""
    try:
        return float(text)
    except ValueError:
        return _method(what, text)


def _method(what: str, name: str) -> str:
    if name not in CUT_METHODS:
        hint = _hint(name, list(CUT_METHODS), f"give a share from 0 to 1, or one of {', '.join(CUT_METHODS)}")
        raise ConfigError(f"{what} is {name!r:.80}; {hint}")
    return name


def _hint(name: str, known: list[str], way_out: str) -> str:
    close = nearest(name, known)
    return f"did you mean {close}?" if close else way_out


def _check_counts(question: Question) -> None:
    for name in COUNTS.split():
        what = name.replace("_", " ")
        if as_int(what, getattr(question, name), 1, "give a whole number of at least 1") > LIMIT:
            raise ConfigError(f"{what} is {getattr(question, name)}; give at most 1e18")
    as_int("original id bytes", question.original_id_bytes, 0, "give 8 for integers, the longest string's length, or 0")
    nodes, largest = question.nodes, question.largest_type
    if largest is not None and not 1 <= largest <= nodes:
        raise ConfigError(f"largest type is {largest} of {nodes} nodes; give 1 to {nodes}, or nothing")
    if question.hosts > nodes:
        raise ConfigError(f"hosts is {question.hosts} for {nodes} nodes; give each host a node at least")
    if question.parts > MAX_PARTS:
        raise ConfigError(f"{question.parts} parts are more than a store takes; give at most {MAX_PARTS} in all")


def _check_choices(question: Question) -> None:
    for field in (question.features, question.edge_features):
        if field is not None:
            parse_dtype("features", field.dtype)
            for extent in field.shape:
                as_int("the width of features", extent, 1, "give at least 1")
    if isinstance(question.edge_cut, str):
        _method("edge cut", question.edge_cut)
    for name in ("edge_cut", "cache", "train_share", "hit_rate"):
        share = getattr(question, name)
        if isinstance(share, int | float) and not 0 <= share <= 1:  # NaN fails too
            raise ConfigError(f"{name.replace('_', ' ')} is {share:g}; it is a share, give 0 to 1")
    if not 0 <= question.skew < 1:
        raise ConfigError(f"skew is {question.skew:g}; give 0 (all nodes alike) to below 1, 0.5 if unsure")
    for what, rate in (("network", question.network), ("step seconds", question.step_seconds)):
        if rate is not None and as_number(what, rate, "give a number above 0") == 0:
            raise ConfigError(f"{what} is 0; give a number above 0")
    for what, value, choices in (("topology", question.topology, Topology), ("mode", question.mode, Mode)):
        if value not in get_args(choices):
            raise ConfigError(f"{what} is {value!r}; choose one of {', '.join(get_args(choices))}")
    if not question.fanouts:
        raise ConfigError("fanouts are empty; give one per layer, e.g. 15,10,5")
    if len(question.fanouts) > MOST_LAYERS:
        raise ConfigError(f"fanouts are {len(question.fanouts)}; give one per layer, at most {MOST_LAYERS}")
    as_fanouts(question.fanouts)
