"""What a loader asks of a server that makes its batches, as plain JSON and a few tensors, and how that is read.

A batch's own seeds, its place in the epoch's randomness and the loader's options are all that any server needs to
make it. Functions do not travel: a transform runs where the loader is, frontier hooks are refused. Reading is strict:
every count and id is checked before anything is made of it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoploom.config.values import as_int, as_number
from hoploom.errors import ConfigError
from hoploom.load.arguments import read_added, read_weight
from hoploom.ops import Reduce
from hoploom.sample.options import Sampling, make_sampling
from hoploom.schema import DTYPE_NAMES, Owner, Schema, read_ids
from hoploom.serve.requests import read_flag, read_owner

MAX_HOPS = 64
MAX_SEEDS = 1 << 22  # of one batch, negatives included
MAX_FIRST = 1 << 40  # places of a step: negatives are numbered below it
HASH_LENGTH = 64

NODE_COLUMNS = (("nodes",), ("times",))  # those there must be, those there may be
LINK_COLUMNS = (("sources", "destinations"), ("labels", "times"))


@dataclass(frozen=True)
class Negatives:
    """Which negatives go with links. Weights, one number per node, are named by their hash."""

    mode: str  # binary or triplet
    amount: float
    strict: bool = False
    src_weight: str | None = None
    dst_weight: str | None = None

    @property
    def weights(self) -> list[str]:
        return [name for name in (self.src_weight, self.dst_weight) if name is not None]


@dataclass(frozen=True)
class Description:
    """What all batches of a loader have in common."""

    owner: Owner  # the seeds' node type, or the links' relation
    sampling: Sampling
    aggregate: Reduce | None = None
    degrees: bool = False
    negatives: Negatives | None = None

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return asdict(self)


class BatchRequest(NamedTuple):
    """One batch: everything that decides it, besides the store."""

    description: Description
    seeds: Mapping[str, Tensor]  # "nodes", or "sources" and "destinations"; beside them "times" and "labels", if any
    first: int  # the place of the first seed in its step
    key: int
    weights: Mapping[str, Tensor] = {}  # of negatives, by hash

    def header(self, attached: list[str]) -> dict[str, Any]:
        """The request but its tensors: the seeds, and the weights attached."""
        names = {"seeds": list(self.seeds), "weights": attached}
        return {"description": self.description.plain, **names, "first": self.first, "key": self.key}

    def tensors(self, attached: list[str]) -> list[Tensor]:
        return [*self.seeds.values(), *(self.weights[name] for name in attached)]


def weight_hash(weight: Tensor) -> str:
    """The name of weights: a digest of what they are."""
    digest = hashlib.sha256(f"{DTYPE_NAMES[weight.dtype]} {tuple(weight.shape)} ".encode())
    digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- reading a description -----------------------------------------------------------------------


def read_description(given: Any, schema: Schema) -> Description:
    """A loader's options from plain JSON; ConfigError for all that the store cannot do."""
    values = _values(given, "a description", Description)
    owner = read_owner(schema, values["owner"])
    sampling = _sampling(_values(values["sampling"], "sampling", Sampling), schema)
    reduce = read_added(schema, sampling, values["aggregate"], read_flag(values, "degrees"))
    negatives = values["negatives"]
    if negatives is not None and isinstance(owner, str):
        raise ConfigError(f"negatives are asked for around nodes of {owner!r}; give them for links")
    read = None if negatives is None else _negatives(_values(negatives, "negatives", Negatives))
    return Description(owner, sampling, reduce, values["degrees"], read)


def _values(given: Any, what: str, described: type) -> Mapping[str, Any]:
    """The fields of a dataclass, all of them and no other."""
    names = sorted(field.name for field in fields(described))
    if not isinstance(given, dict) or sorted(map(str, given)) != names:
        shown = sorted(map(str, given)) if isinstance(given, dict) else given
        raise ConfigError(f"{what} holds {shown!r:.200}; it needs {names}: use the same Hoploom on both sides")
    return given


def _sampling(values: Mapping[str, Any], schema: Schema) -> Sampling:
    hops, width = values["fanouts"], len(schema.relations)
    if not isinstance(hops, list | tuple) or not 0 < len(hops) <= MAX_HOPS:
        raise ConfigError(f"fanouts are {hops!r:.80}; give 1 to {MAX_HOPS} hops")
    if any(not isinstance(hop, list | tuple) or len(hop) != width for hop in hops):
        raise ConfigError(f"fanouts are {hops!r:.80}; give every hop one per relation, {width}")
    if any(type(fanout) is not int or fanout >= 1 << 31 for hop in hops for fanout in hop):
        raise ConfigError(f"fanouts are {hops!r:.80}; give whole numbers below {1 << 31}")
    flags = {name: read_flag(values, name) for name in ("replace", "weighted", "labor", "disjoint")}
    if flags.pop("weighted") and schema.weight is None:
        raise ConfigError("weighted picks are asked for, but the store has no weights; build it with weight_attr")
    temporal = values["temporal"]
    if temporal is not None and schema.time is None:
        raise ConfigError("temporal picks are asked for, but the store has no times; build it with time_attr")
    by_relation = {relation.key: [hop[index] for hop in hops] for index, relation in enumerate(schema.relations)}
    return make_sampling(
        schema,
        by_relation,
        **flags,
        temporal_strategy="uniform" if temporal is None else temporal,
        time_attr=None if temporal is None else schema.time,
        weight_attr=schema.weight if values["weighted"] else None,
        subgraph_type=values["subgraph"],
        mode=values["mode"],
    )


def _negatives(values: Mapping[str, Any]) -> Negatives:
    if values["mode"] not in ("binary", "triplet"):
        raise ConfigError(f"mode of negatives is {values['mode']!r:.80}; choose 'binary' or 'triplet'")
    amount = values["amount"]
    if not 0 < as_number("amount", amount, "give negatives per link") <= MAX_SEEDS:
        raise ConfigError(f"amount is {amount!r:.80}; give negatives per link, at most {MAX_SEEDS}")
    if values["mode"] == "triplet" and amount != int(amount):
        raise ConfigError(f"amount is {amount}; give whole negatives per link for triplets")
    for name in ("src_weight", "dst_weight"):
        if values[name] is not None and not _is_hash(values[name]):
            raise ConfigError(f"{name} is {values[name]!r:.80}; give the hash of weights")
    return Negatives(values["mode"], amount, read_flag(values, "strict"), values["src_weight"], values["dst_weight"])


def _is_hash(name: Any) -> bool:
    return isinstance(name, str) and len(name) == HASH_LENGTH


# --- reading one batch ---------------------------------------------------------------------------


def read_batch_request(header: Mapping[str, Any], tensors: Sequence[Tensor], schema: Schema) -> BatchRequest:
    """One batch that was asked for, its seeds checked against the schema."""
    description = read_description(header.get("description"), schema)
    names = [_names(header, key) for key in ("seeds", "weights")]
    if len(names[0]) + len(names[1]) != len(tensors):
        raise ConfigError(f"a batch is asked for with {len(tensors)} tensors; give one for each of {names!r:.200}")
    seeds = _seeds(dict(zip(names[0], tensors, strict=False)), description, schema)
    weights = dict(zip(names[1], tensors[len(names[0]) :], strict=True))
    _check_weights(weights, description, schema)
    first = as_int("first", header.get("first"), 0, "give the place of the first seed in its step")
    key = as_int("key", header.get("key"), 0, "give 64 bits")
    if first >= MAX_FIRST or key >= 1 << 64:
        raise ConfigError(f"first is {first} and key {key}; give numbers below {MAX_FIRST} and 2^64")
    return BatchRequest(description, seeds, first, key, weights)


def _names(header: Mapping[str, Any], key: str) -> list[str]:
    names = header.get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{key} are {names!r:.80}; give a list of the names of tensors")
    if len(set(names)) != len(names):
        raise ConfigError(f"{key} are {names!r:.80}; name each once")
    return names


def _seeds(columns: dict[str, Tensor], description: Description, schema: Schema) -> dict[str, Tensor]:
    owner = description.owner
    needed, optional = NODE_COLUMNS if isinstance(owner, str) else LINK_COLUMNS
    if not set(needed) <= set(columns) <= {*needed, *optional}:
        raise ConfigError(f"seeds have columns {sorted(columns)}; give {list(needed)}, and maybe {list(optional)}")
    count = columns[needed[0]].shape[0] if columns[needed[0]].dim() else 0
    times = description.negatives.amount if description.negatives is not None else 0
    if count * (1 + times) * len(needed) > MAX_SEEDS:
        raise ConfigError(
            f"a batch of {count} seeds with {times} negatives each is too large; give at most {MAX_SEEDS} ends"
        )
    types = [owner] if isinstance(owner, str) else [owner[0], owner[2]]
    for name, node_type in zip(needed, types, strict=True):
        columns[name] = read_ids(name, columns[name], schema.node_type(node_type).num_nodes, ConfigError)
    _check_beside(columns, count, description, schema)
    return columns


def _check_beside(columns: Mapping[str, Tensor], count: int, description: Description, schema: Schema) -> None:
    """What comes with the seeds: one each, and only where it means something."""
    for name, column in columns.items():
        if column.shape[:1] != (count,):
            raise ConfigError(f"{name} has shape {tuple(column.shape)} for {count} seeds; give one each")
    times, owner = columns.get("times"), description.owner
    if times is not None and (times.dtype != torch.int64 or times.dim() != 1):
        raise ConfigError(f"times have dtype {times.dtype} and shape {tuple(times.shape)}; give {count} integers")
    if times is not None and description.sampling.temporal is None:
        raise ConfigError("seeds have times, but the sampling is not temporal; leave them out")
    dated = isinstance(owner, str) and schema.time in schema.node_type(owner).fields
    if times is None and description.sampling.temporal is not None and not dated:
        raise ConfigError(f"{owner!r} has no {schema.time!r} to date its seeds; give times")
    negatives = description.negatives
    if "labels" in columns and negatives is not None and negatives.mode == "triplet":
        raise ConfigError("labels have no place in triplet negative sampling; leave them out")


def _check_weights(weights: Mapping[str, Tensor], description: Description, schema: Schema) -> None:
    negatives = description.negatives
    strangers = set(weights) - set(negatives.weights if negatives is not None else ())
    if strangers:
        raise ConfigError(f"weights {sorted(strangers)!r:.80} are attached, which no negatives name; leave them out")
    for name, weight in weights.items():
        if weight_hash(weight) != name:
            raise ConfigError(f"weights are attached as {name:.16}..., which is not their hash; send them again")
    if negatives is None or isinstance(description.owner, str):
        return
    ends = (("src_weight", description.owner[0]), ("dst_weight", description.owner[2]))
    for end, node_type in ends:
        name = getattr(negatives, end)
        if name in weights:
            read_weight(end, weights[name], schema.node_type(node_type).num_nodes)
