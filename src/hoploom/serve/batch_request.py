"""A request for a whole batch, as JSON and a few tensors: how it is written, read and checked.

Functions are not sent: a transform runs where the loader is, and frontier hooks are refused. Every count and id is
checked before it is used.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoploom.errors import ConfigError
from hoploom.load.arguments import read_added, read_fields, read_weight
from hoploom.ops import Reduce
from hoploom.sample.hops import Sampling, make_hgt_sampling, make_sampling
from hoploom.schema import DTYPE_NAMES, Owner, Schema, read_ids
from hoploom.serve.requests import read_fanouts, read_flag, read_integer, read_owner, require

MAX_HOPS = 64
MAX_SEEDS = 1 << 22  # of one batch, negatives included
MAX_FIRST = 1 << 40  # places of a step: negatives are numbered below it
HASH_LENGTH = 64

NODE_COLUMNS = (["nodes"], ["times"])  # required, optional
LINK_COLUMNS = (["sources", "destinations"], ["labels", "times"])


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
    fields: tuple[tuple[Owner, tuple[str, ...]], ...] | None = None  # those that batches have; None: all

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The same, ready for JSON."""
        return asdict(self)


class BatchRequest(NamedTuple):
    """One batch: all that it depends on, besides the store."""

    description: Description
    seeds: Mapping[str, Tensor]  # "nodes", or "sources" and "destinations"; beside them "times" and "labels", if any
    first: int  # the place of the first seed in its step
    key: int
    weights: Mapping[str, Tensor] = {}  # of negatives, by hash

    def header(self, attached: list[str]) -> dict[str, Any]:
        """The header of the request; `attached` are the names of the weights that go with it."""
        names = {"seeds": list(self.seeds), "weights": attached}
        return {"description": self.description.plain, **names, "first": self.first, "key": self.key}

    def tensors(self, attached: list[str]) -> list[Tensor]:
        return [*self.seeds.values(), *(self.weights[name] for name in attached)]


def weight_hash(weight: Tensor) -> str:
    """The name of weights: a digest of their dtype, shape and bytes."""
    digest = hashlib.sha256(f"{DTYPE_NAMES[weight.dtype]} {tuple(weight.shape)} ".encode())
    digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- reading a description -----------------------------------------------------------------------


def read_description(given: Any, schema: Schema) -> Description:
    """Read a loader's options from JSON; ConfigError for what the store cannot do."""
    values = _values(given, "description", Description)
    owner, degrees = read_owner(schema, values["owner"], known=False), read_flag(values, "degrees")
    sampling = _sampling(_values(values["sampling"], "sampling", Sampling), schema)
    reduce = read_added(schema, sampling, values["aggregate"], degrees)
    negatives = values["negatives"]
    if negatives is not None:
        require(not isinstance(owner, str), "negatives", negatives, f"links, not nodes of {owner!r}")
        negatives = _negatives(_values(negatives, "negatives", Negatives))
    return Description(owner, sampling, reduce, degrees, negatives, _fields(values["fields"], schema))


def _fields(given: Any, schema: Schema) -> tuple[tuple[Owner, tuple[str, ...]], ...] | None:
    if given is None:
        return None
    pairs = given if isinstance(given, list) else [given]
    for pair in pairs:
        require(isinstance(pair, list) and len(pair) == 2, "fields", pair, "pairs of a node type or relation and names")
    read = read_fields(schema, {read_owner(schema, owner): names for owner, names in pairs})
    return None if read is None else tuple((owner, tuple(names)) for owner, names in read.items())


def _values(given: Any, what: str, described: type) -> Mapping[str, Any]:
    """The values of a JSON object that has exactly the fields of a dataclass."""
    names = {field.name for field in fields(described)}
    shown = sorted(given) if isinstance(given, dict) else given
    require(
        isinstance(given, dict) and set(given) == names,
        what,
        shown,
        f"{sorted(names)}: use the same Hoploom on both sides",
    )
    return dict(given)


def _sampling(values: Mapping[str, Any], schema: Schema) -> Sampling:
    hops, temporal = values["fanouts"], values["temporal"]
    fits = isinstance(hops, list | tuple) and len(hops) <= MAX_HOPS
    require(fits, "fanouts", hops, f"up to {MAX_HOPS} hops")
    drawn, width = values["num_samples"], len(schema.node_types)
    fits = isinstance(drawn, list | tuple) and len(drawn) <= MAX_HOPS
    fits = fits and all(isinstance(layer, list | tuple) and len(layer) == width for layer in drawn)
    require(fits, "num_samples", drawn, f"up to {MAX_HOPS} layers of {width} counts, one per node type")
    if drawn:
        return make_hgt_sampling(schema, dict(zip(schema.type_index, zip(*drawn, strict=True), strict=True)))
    read = [read_fanouts(hop, len(schema.relations)) for hop in hops]
    weighted = read_flag(values, "weighted")
    return make_sampling(
        schema,
        {relation.key: [hop[index] for hop in read] for index, relation in enumerate(schema.relations)},
        **{name: read_flag(values, name) for name in ("replace", "labor", "disjoint")},
        temporal_strategy="uniform" if temporal is None else temporal,
        time_attr=None if temporal is None else schema.time or "time",
        weight_attr=schema.weight or "weight" if weighted else None,
        subgraph_type=values["subgraph"],
        mode=values["mode"],
    )


def _negatives(values: Mapping[str, Any]) -> Negatives:
    mode, amount = values["mode"], values["amount"]
    require(mode in ("binary", "triplet"), "mode of negatives", mode, "'binary' or 'triplet'")
    fits = type(amount) in (int, float) and 0 < amount <= MAX_SEEDS and (mode == "binary" or amount == int(amount))
    require(fits, "amount", amount, f"negatives per link, at most {MAX_SEEDS}, whole ones for triplets")
    for name in ("src_weight", "dst_weight"):
        is_hash = isinstance(values[name], str) and len(values[name]) == HASH_LENGTH
        require(is_hash or values[name] is None, name, values[name], "the hash of weights")
    return Negatives(mode, amount, read_flag(values, "strict"), values["src_weight"], values["dst_weight"])


# --- reading one batch ---------------------------------------------------------------------------


def read_batch_request(header: Mapping[str, Any], tensors: Sequence[Tensor], schema: Schema) -> BatchRequest:
    """Read the request for one batch, and check it against the schema."""
    description = read_description(header.get("description"), schema)
    seeds, weights = (_names(header, key) for key in ("seeds", "weights"))
    require(
        len(seeds) + len(weights) == len(tensors), "names", seeds + weights, f"one for each of {len(tensors)} tensors"
    )
    columns = dict(zip(seeds, tensors, strict=False))
    attached = dict(zip(weights, tensors[len(seeds) :], strict=True))
    _check_weights(attached, description, schema)
    first = read_integer("first", header.get("first"), 0, MAX_FIRST)
    key = read_integer("key", header.get("key"), 0, 1 << 64)
    return BatchRequest(description, _seeds(columns, description, schema), first, key, attached)


def _names(header: Mapping[str, Any], key: str) -> list[str]:
    names = header.get(key)
    fits = isinstance(names, list) and all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    require(fits, key, names, "a list of the names of tensors, each once")
    return list(names or ())


def _seeds(columns: dict[str, Tensor], description: Description, schema: Schema) -> dict[str, Tensor]:
    """The columns of the seeds, checked: one entry for each seed, and no column without effect."""
    owner, negatives = description.owner, description.negatives
    needed, optional = NODE_COLUMNS if isinstance(owner, str) else LINK_COLUMNS
    fits = set(needed) <= set(columns) <= {*needed, *optional}
    require(fits, "seeds", sorted(columns), f"columns {needed}, and maybe {optional}")
    count = columns[needed[0]].shape[0] if columns[needed[0]].dim() else 0
    amount = negatives.amount if negatives is not None else 0
    if count * (1 + amount) * len(needed) > MAX_SEEDS:
        raise ConfigError(
            f"a batch of {count} seeds with {amount} negatives each is too large; give at most {MAX_SEEDS} ends"
        )
    types = [owner] if isinstance(owner, str) else [owner[0], owner[2]]
    for name, node_type in zip(needed, types, strict=True):
        columns[name] = read_ids(name, columns[name], schema.node_type(node_type).num_nodes, ConfigError)
    for name, column in columns.items():
        require(column.shape[:1] == (count,), name, tuple(column.shape), f"one for each of {count} seeds")
    _check_times(columns.get("times"), description, schema)
    is_triplet = negatives is not None and negatives.mode == "triplet"
    require("labels" not in columns or not is_triplet, "seeds", sorted(columns), "no labels with triplets")
    return columns


def _check_times(times: Tensor | None, description: Description, schema: Schema) -> None:
    owner, temporal = description.owner, description.sampling.temporal is not None
    if times is None:
        dated = isinstance(owner, str) and schema.time in schema.node_type(owner).fields
        require(dated or not temporal, "times", None, f"one per seed: {owner!r} has no {schema.time!r}")
    else:
        fits = temporal and times.dtype == torch.int64 and times.dim() == 1
        require(fits, "times", (times.dtype, tuple(times.shape)), "int64 [n], and sampling that is temporal")


def _check_weights(weights: Mapping[str, Tensor], description: Description, schema: Schema) -> None:
    """Check that the weights are those that the negatives name, with one number for each node of the right type."""
    owner, negatives = description.owner, description.negatives
    named = negatives.weights if negatives is not None else []
    require(set(weights) <= set(named), "weights", sorted(weights), "those that negatives name")
    for name, weight in weights.items():
        require(weight_hash(weight) == name, "weights", name, "their hash as their name; send them again")
    if negatives is None or isinstance(owner, str):
        return
    for end, hashed, node_type in (
        ("src_weight", negatives.src_weight, owner[0]),
        ("dst_weight", negatives.dst_weight, owner[2]),
    ):
        if hashed is not None and hashed in weights:
            read_weight(end, weights[hashed], schema.node_type(node_type).num_nodes)
