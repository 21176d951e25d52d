"""The inputs of `hoploom plan`: a graph with its cluster and training, and the rates of a machine.

`hoploom bench` measures the rates on tables larger than the CPU's caches, so small graphs are faster than planned. The
built-in rates were measured once, on a small machine: they are good for orders of magnitude.
"""

# ruff: noqa: RUF009  (option() is dataclasses.field)

import json
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

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
CUT_METHODS = {"hash": 1.0, "range": 1.0, "stream": 0.5}


def parse_features(what: str, text: str) -> Field | None:
    """Return the field that `text` describes by width and dtype, e.g. 256xfp16 or 100xfloat32; None for "none"."""
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
    """Return the share of cut edges that `text` gives, or `text` itself if it names a method of CUT_METHODS."""
    return text if text in CUT_METHODS else parse_number(what, text)


def option(read: Callable[[str, str], Any], rule: KeyRule, default: str | None, help: str) -> Any:
    """Return a dataclass field, required if `default` is None. `read` parses `default`, but "" means None."""
    value = MISSING if default is None else read(help, default) if default else None
    shown = f"{help} (default: {default})" if default else help
    return field(default=value, metadata={"read": read, "rule": rule, "help": shown})


def count(default: str | None, help: str, least: int = 1) -> Any:
    return option(parse_count, rules.whole(least, LIMIT), default, help)


SHARE = rules.number(0, 1)
TOPOLOGY = rules.choice("auto", "everywhere", "parts")
ROW = rules.accepted(
    "a dtype and a width of at least 1",
    lambda row: row.dtype in ITEM_BYTES and min(row.shape, default=1) > 0,
    kinds=Field,
)
FANOUTS = rules.accepted(
    f"one count per layer, e.g. (15, 10, 5), for at most {MOST_LAYERS} layers",
    lambda fanouts: 0 < len(as_fanouts(fanouts)) <= MOST_LAYERS,
    kinds=tuple | list,
)
CUT = rules.accepted(
    f"a share from 0 to 1, or one of {', '.join(CUT_METHODS)}",
    lambda cut: cut in CUT_METHODS if isinstance(cut, str) else 0 <= cut <= 1,
    kinds=float | str,
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The graph, the hosts and the training that a plan is made for. The constructor checks all values."""

    nodes: int = count(None, "nodes of all types: 1e10, 2.5M")
    edges: int = count(None, "edges of all relations")
    features: Field | None = option(parse_features, ROW, "128xfp32", "width and dtype of a node's features, or none")
    original_id_bytes: int = count(
        "8", "bytes of an original id: 8 for integers, the longest text id, or 0 if the store keeps none", least=0
    )
    edge_features: Field | None = option(parse_features, ROW, "", "width and dtype of an edge's features")
    train_share: float = option(parse_number, SHARE, "0.1", "share of the nodes that are training seeds")
    hosts: int = count("1", "hosts that hold the graph and train")
    memory_per_host: int = option(parse_bytes, rules.whole(1, LIMIT), "512GB", "memory of a host")
    network: float = option(
        parse_bandwidth, rules.number(open_ends=True), "10Gb", "bandwidth of a host: 100Gb (bits) or 12.5GB (bytes)"
    )
    topology: str = option(lambda _, text: text, TOPOLOGY, "auto", "auto, everywhere (on every host) or parts")
    edge_cut: float | str = option(parse_cut, CUT, "hash", "share of the edges between hosts, or hash, range, stream")
    local_seeds: bool = field(
        default=False, metadata={"rule": rules.FLAG, "help": "a rank's seeds are nodes of its own host"}
    )
    fanouts: tuple[int, ...] = option(
        parse_fanouts, FANOUTS, "15,10,5", "picks per node, one per layer, -1 for all neighbours"
    )
    batch_size: int = count("1024", "seeds of a rank's step")
    ranks_per_host: int = count("1", "training processes of a host")
    workers: int = count("2", "loader threads of a rank")
    hidden: int = count("256", "hidden width of the model; the number of layers is the number of fanouts")
    classes: int = count("64", "number of outputs of the model")
    step_seconds: float = option(
        parse_number, rules.number(), "0.0", "measured seconds of one training step without loading, 0 if unknown"
    )
    cache: float = option(parse_number, SHARE, "0.0", "share of the other hosts' rows that a host keeps")
    skew: float = option(
        parse_number, rules.SHARE, "0.5", "how uneven node popularity is: 0 is equal, 0.5 a power law of degrees"
    )

    def __post_init__(self) -> None:
        for described in fields(self):
            value, rule = getattr(self, described.name), described.metadata["rule"]
            if value is not None and rule.read(value) is None:
                raise ConfigError(f"{described.name.replace('_', ' ')} is {value!r:.80}; give {rule.expects}")
        if self.hosts > self.nodes:
            raise ConfigError(f"hosts is {self.hosts} for {self.nodes} nodes; give each host a node at least")

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def cut(self) -> float:
        """Share of the edges whose two ends are on different hosts."""
        if not isinstance(self.edge_cut, str):
            return self.edge_cut if self.hosts > 1 else 0.0
        return CUT_METHODS[self.edge_cut] * (self.hosts - 1) / self.hosts

    @property
    def num_seeds(self) -> int:
        return max(1, round(self.nodes * self.train_share))


# --- rates ----------------------------------------------------------------------------------------

HEADER = {"format": "hoploom-bench", "version": 7}
SHORT_ROW = 64  # bytes
TEXTS = ("machine", "hoploom", "date")
REMEDY = "run `hoploom bench --out bench.json` again"


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Measured rates of a machine, per second. A rate is that of one thread, unless its comment says "all cores"."""

    machine: str
    cores: int  # in use; torch had as many threads
    hoploom: str  # version
    date: str
    sample_picks: float  # sampled neighbours, with relabelling
    hashed_slowdown: float  # factor: how much slower sampling is if a hash table relabels the nodes
    gather_rows: float  # rows of SHORT_ROW bytes, by random ids
    gather_bytes: float  # bytes of rows beyond their first SHORT_ROW
    sort_edges: float  # edges sorted into adjacency lists, all cores
    join_edges: float  # edges whose two ids DuckDB looks up, all cores; not measured: the built-in rate for `cores`
    partition_edges: float  # edges that the stream partitioner assigns, with all its passes
    disk_write: float  # bytes written and flushed
    disk_read: float  # bytes read sequentially

    def __str__(self) -> str:
        return f"{self.machine}, {self.cores} cores, {self.date}, Hoploom {self.hoploom}"


@cache
def default_constants() -> Constants:
    """Return the rates that `hoploom bench` measured on the machine that Hoploom is developed on."""
    return read_constants(Path(__file__).with_name("defaults.json"))


def to_json(constants: Constants) -> str:
    """Return the constants as the text of a bench.json file."""
    return json.dumps(HEADER | asdict(constants), indent=1)


def read_constants(path: str | Path) -> Constants:
    """Read and check bench.json. Users may edit the file's figures to plan for a machine that they do not have yet."""
    try:
        contents = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        way_out = f"`hoploom bench --out {path}` writes one"
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {way_out}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}; {REMEDY}") from error
    if not isinstance(contents, dict) or contents | HEADER != contents:
        raise ConfigError(f"{path} is not what `hoploom bench` writes, version {HEADER['version']}; {REMEDY}")
    known: dict[str, Any] = {rate.name: contents.get(rate.name) for rate in fields(Constants)}
    for name, value in known.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        if not (isinstance(value, str) if name in TEXTS else is_number):
            must = "text" if name in TEXTS else "a number above 0"
            raise ConfigError(f"{path}: {name} is {value!r:.80}; it must be {must}; {REMEDY}")
    return Constants(**known)
