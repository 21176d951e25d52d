"""Messages of whole batches: a loader's options and seeds as a request, PyG's Data or HeteroData as a response.

Functions are not sent: a transform runs in the loader's process, and frontier hooks are refused. Every count and id of
a request is checked before it is used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from hoploom import ops
from hoploom.batch import Block
from hoploom.errors import ConfigError, PeerError
from hoploom.load.arguments import read_added, read_fields
from hoploom.load.assemble import Batch, of_blocks
from hoploom.ops import Reduce
from hoploom.sample.hops import Sampling, make_hgt_sampling, make_sampling
from hoploom.sample.negatives import KINDS, Kind
from hoploom.schema import ID_DTYPES, Schema, TypeKey, read_ids
from hoploom.serve.requests import read_excluded, read_flag, read_hop_fanouts, read_integer, read_owner, require
from hoploom.serve.wire import Message

MAX_HOPS = 64
MAX_SEEDS = 1 << 22  # of one batch, negatives included
MAX_FIRST = 1 << 40  # positions of a step: the numbers of negatives hold a position in 40 bits
NARROW_FROM = 1 << 12  # elements: in tensors of this size on, it pays to check whether all fit into 32 bits
NEVER = 1 << 62  # elements: no tensor is that large
NODE_COLUMNS = (["nodes"], ["times"])  # required, optional
LINK_COLUMNS = (["sources", "destinations"], ["labels", "times", "candidates"])
KNOWN = "known"  # a tensor of true links beside the graph's edges


@dataclass(frozen=True)
class Negatives:
    """Options for negative links. Servers accept no weights per node."""

    mode: str  # binary or triplet
    amount: float
    strict: bool = False
    candidates: Kind = "uniform"


@dataclass(frozen=True)
class Description:
    """The options that all batches of a loader share."""

    owner: TypeKey  # the seeds' node type, or the links' relation
    sampling: Sampling
    aggregate: Reduce | None = None
    degrees: bool = False
    negatives: Negatives | None = None
    fields: tuple[tuple[TypeKey, tuple[str, ...]], ...] | None = None  # that batches have; None: all

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The options as a dict of JSON values."""
        return asdict(self)


class BatchRequest(NamedTuple):
    """The options, seeds and random key of one batch. Together with the store, they determine the batch."""

    description: Description
    seeds: Mapping[str, Tensor]  # "nodes", or "sources" and "destinations"; if any, "times", "labels", "candidates"
    first: int  # the position of the first seed in its step
    key: int
    excluded: Sequence[Tensor | None] = ()  # per relation: ascending positions of edges that are not sampled; (): none
    known: Tensor | None = None  # [n] int64: true links, source * num_destinations + destination, that are no negatives

    def message(self, identity: str) -> Message:
        """Return the request as a message to servers of the store with this `identity`."""
        header: dict[str, Any] = {"ask": "batch", "identity": identity, "description": self.description.plain}
        seeds = dict(self.seeds) | ({} if self.known is None else {KNOWN: self.known})
        header |= {"seeds": list(seeds), "first": self.first, "key": self.key}
        excluded = {relation: found for relation, found in enumerate(self.excluded) if found is not None}
        return Message(header | {"excluded": list(excluded)}, [*seeds.values(), *excluded.values()])


def read_description(given: Any, schema: Schema) -> Description:
    """Read a loader's options from the JSON values `given`; raise ConfigError for options that do not fit `schema`."""
    values = _read_object(given, "description", Description)
    owner, degrees = read_owner(schema, values["owner"], known=False), read_flag(values, "degrees")
    sampling = _read_sampling(_read_object(values["sampling"], "sampling", Sampling), schema)
    reduce = read_added(schema, sampling, values["aggregate"], degrees)
    negatives = values["negatives"]
    if negatives is not None:
        require(not isinstance(owner, str), "negatives", negatives, f"links, not nodes of {owner!r}")
        negatives = _read_negatives(_read_object(negatives, "negatives", Negatives))
    if (pairs := values["fields"]) is None:
        return Description(owner, sampling, reduce, degrees, negatives)
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        require(isinstance(pair, list) and len(pair) == 2, "fields", pair, "pairs of a node type or relation and names")
    read = read_fields(schema, {read_owner(schema, of): names for of, names in pairs})
    named = None if read is None else tuple((of, tuple(names)) for of, names in read.items())
    return Description(owner, sampling, reduce, degrees, negatives, named)


def _read_object(given: Any, what: str, described: type) -> Mapping[str, Any]:
    """Return `given` as a dict; raise ConfigError unless its keys are the field names of the dataclass `described`."""
    names = {field.name for field in fields(described)}
    fits, shown = isinstance(given, dict) and set(given) == names, sorted(given) if isinstance(given, dict) else given
    require(fits, what, shown, f"{sorted(names)}: use the same Hoploom on both sides")
    return dict(given)


def _read_sampling(values: Mapping[str, Any], schema: Schema) -> Sampling:
    hops, temporal = values["fanouts"], values["temporal"]
    fits = isinstance(hops, list | tuple) and len(hops) <= MAX_HOPS
    require(fits, "fanouts", hops, f"up to {MAX_HOPS} hops")
    drawn, width = values["num_samples"], len(schema.node_types)
    fits = isinstance(drawn, list | tuple) and len(drawn) <= MAX_HOPS
    fits = fits and all(isinstance(layer, list | tuple) and len(layer) == width for layer in drawn)
    require(fits, "num_samples", drawn, f"up to {MAX_HOPS} layers of {width} counts, one per node type")
    if drawn:
        return make_hgt_sampling(schema, dict(zip(schema.type_index, zip(*drawn, strict=True), strict=True)))
    read = [read_hop_fanouts(hop, len(schema.relations)) for hop in hops]
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
        window=read_integer("window", values["window"], -1, 1 << 63),
        strictly_before=read_flag(values, "strictly_before"),
    )


def _read_negatives(values: Mapping[str, Any]) -> Negatives:
    mode, amount = values["mode"], values["amount"]
    require(mode in ("binary", "triplet"), "mode of negatives", mode, "'binary' or 'triplet'")
    fits = type(amount) in (int, float) and 0 < amount <= MAX_SEEDS and (mode == "binary" or amount == int(amount))
    require(fits, "amount", amount, f"negatives per link, at most {MAX_SEEDS}, whole ones for triplets")
    kind = values["candidates"]
    require(kind in KINDS, "candidates", kind, f"one of {list(KINDS)}")
    return Negatives(mode, amount, read_flag(values, "strict"), kind)


def read_batch_request(header: Mapping[str, Any], tensors: Sequence[Tensor], schema: Schema) -> BatchRequest:
    """Read a request for one batch, and check it against the schema."""
    description = read_description(header.get("description"), schema)
    seeds: Any = header.get("seeds")
    fits = isinstance(seeds, list) and all(isinstance(one, str) for one in seeds) and len(set(seeds)) == len(seeds)
    require(fits, "seeds", seeds, "a list of the names of tensors, each once")
    tensors, excluded = read_excluded(header, tensors, schema)
    for relation, edges in zip(schema.relations, excluded, strict=True):
        if edges is not None:
            require(not isinstance(description.owner, str), "excluded", relation.key, "links as seeds")
            read_ids(f"excluded edges of {relation.key}", edges, relation.num_edges, ConfigError)
    require(len(seeds) == len(tensors), "seeds", seeds, f"one name for each of {len(tensors)} tensors")
    columns = dict(zip(seeds, tensors, strict=True))
    known = columns.pop(KNOWN, None)
    if known is not None:
        require(description.negatives is not None and known.numel() <= MAX_SEEDS, KNOWN, known.numel(), "fewer links")
        num_nodes = [schema.node_type(description.owner[end]).num_nodes for end in (0, 2)]
        known = torch.sort(read_ids(KNOWN, known, num_nodes[0] * num_nodes[1], ConfigError)).values
    first = read_integer("first", header.get("first"), 0, MAX_FIRST)
    key = read_integer("key", header.get("key"), 0, 1 << 64)
    return BatchRequest(description, _check_seeds(columns, description, schema), first, key, excluded, known)


def _check_seeds(columns: dict[str, Tensor], description: Description, schema: Schema) -> dict[str, Tensor]:
    """Check and return the seed columns; raise ConfigError if one is missing, has no effect, or has wrong values."""
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
    times, temporal = columns.get("times"), description.sampling.temporal is not None
    if times is None:
        dated = isinstance(owner, str) and schema.time in schema.node_type(owner).fields
        require(dated or not temporal, "times", None, f"one per seed: {owner!r} has no {schema.time!r}")
    else:
        fits = temporal and times.dtype == torch.int64 and times.dim() == 1
        require(fits, "times", (times.dtype, tuple(times.shape)), "int64 [n], and sampling that is temporal")
    listed, kind = columns.get("candidates"), None if negatives is None else negatives.candidates
    num_nodes = schema.node_type(owner if isinstance(owner, str) else owner[2]).num_nodes
    require((kind == "listed") is (listed is not None), "candidates", kind, '"listed", and a tensor of them')
    if listed is not None:
        fits = listed.dtype in ID_DTYPES and listed.dim() == 2 and max(1, amount) <= listed.shape[1]
        fits = fits and 0 < listed.numel() <= MAX_SEEDS and -1 <= int(listed.min()) <= int(listed.max()) < num_nodes
        require(
            fits, "candidates", tuple(listed.shape), f"integer ids [{count}, at least {amount}], {MAX_SEEDS} at most"
        )
        columns["candidates"] = listed.to(torch.int64)
    require(kind != "all" or amount == num_nodes - 1, "amount", amount, f"{num_nodes - 1}, all other nodes")
    return columns


# _encode and _decode are no closures: a closure that calls itself is a reference cycle, and would keep its batch until
# the garbage collector runs, which may be many batches later.


def encode_batch(batch: Batch, narrow_from: int = NARROW_FROM) -> Message:
    """Return a batch as a message; large int64 tensors are sent as int32 if they fit, which pays even on loopback."""
    tensors: list[Tensor] = []
    fields = [
        [storage._key, [[name, _encode(value, tensors, narrow_from)] for name, value in storage.items()]]
        for storage in batch.stores
    ]
    return Message({"homogeneous": isinstance(batch, Data), "fields": fields}, tensors)


def _encode(value: Any, tensors: list[Tensor], narrow_from: int) -> Any:
    """Return a field's value as JSON values; append its tensors to `tensors`, which the JSON refers to by index."""
    if isinstance(value, Tensor):
        narrow = _narrowed(value) if value.numel() >= narrow_from else None
        tensors.append(value if narrow is None else narrow)
        return {"tensor": len(tensors) - 1, "wide": narrow is not None}
    if isinstance(value, Block):
        parts = (value.edge_index, value.e_id, value.num_sources, value.num_destinations, value.data)
        return {"block": [_encode(part, tensors, narrow_from) for part in parts]}
    if isinstance(value, Mapping):
        return {"keys": list(value), "values": [_encode(entry, tensors, narrow_from) for entry in value.values()]}
    if isinstance(value, list):
        return [_encode(entry, tensors, narrow_from) for entry in value]
    if value is None or isinstance(value, int):
        return value
    raise TypeError(f"a batch holds a {type(value).__name__}, which cannot be sent")


def decode_batch(message: Message, *, pinned: bool = False) -> Batch:
    """Return the batch in a message. Tensors are not copied, except int64 tensors that were sent as int32."""
    try:
        batch = Data() if message.header["homogeneous"] else HeteroData()
        for key, fields in message.header["fields"]:
            storage: Any
            if isinstance(batch, Data):
                storage = batch._store
            else:
                storage = batch._global_store if key is None else batch[tuple(key) if isinstance(key, list) else key]
            storage._mapping.update((name, _decode(plain, message.tensors, pinned=pinned)) for name, plain in fields)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise PeerError(
            f"a server's batch cannot be read ({error!r:.200}); use the same Hoploom on both sides"
        ) from error
    return of_blocks(batch) if "blocks" in batch else batch


def _decode(plain: Any, tensors: Sequence[Any], *, pinned: bool) -> Any:
    """Undo `_encode`: return a field's value from its JSON values `plain` and the tensors of the message."""
    if isinstance(plain, list):
        return [_decode(entry, tensors, pinned=pinned) for entry in plain]
    if not isinstance(plain, dict):
        return plain
    if "tensor" in plain:
        tensor = tensors[plain["tensor"]]
        if not plain["wide"]:
            return tensor
        wide = ops.empty(tuple(tensor.shape), torch.int64, pinned=pinned)
        np.copyto(wide.numpy(), tensor.numpy())
        return wide
    if "block" in plain:
        return Block(*(_decode(part, tensors, pinned=pinned) for part in plain["block"]))
    keys = [tuple(key) if isinstance(key, list) else key for key in plain["keys"]]
    return dict(zip(keys, _decode(plain["values"], tensors, pinned=pinned), strict=True))


def _narrowed(tensor: Tensor) -> Tensor | None:
    """Return an int32 copy of a contiguous int64 tensor; None for other tensors, or if a value is not in [0, 2^31)."""
    if tensor.dtype != torch.int64 or not tensor.is_contiguous():
        return None
    values = tensor.numpy()
    if np.bitwise_or.reduce(values, axis=None) >> 31:  # some value has a higher bit, or is negative
        return None
    narrow = ops.empty(tuple(tensor.shape), torch.int32)
    np.copyto(narrow.numpy(), values, casting="unsafe")  # torch would start a team of threads
    return narrow
