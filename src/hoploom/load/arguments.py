"""The arguments of a loader, as users write them, and their checks: a store, seeds, fanouts, fields, counts."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Concatenate, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling, NumNeighbors
from torch_geometric.sampler.base import SubgraphType

from hoploom.config.values import as_int, as_number, nearest
from hoploom.errors import ConfigError, StoreError
from hoploom.load.assemble import Assembler, Batch, Fields
from hoploom.load.pipeline import DEADLINE
from hoploom.ops import Reduce
from hoploom.sample import SampleFrontier
from hoploom.sample.exclusions import (
    LOOKUP_BYTES,
    MATCH_BYTES,
    Exclude,
    ExcludedEdges,
    Exclusion,
    find_edges,
    has_few_links,
    match_edges,
    opposite_relations,
)
from hoploom.sample.hops import Fanouts, Mode, NumSamples, Sampling, Subgraph, Temporal
from hoploom.schema import (
    DTYPES,
    EDGE_ID,
    FEATURES,
    ID_DTYPES,
    RelationName,
    Schema,
    TypeKey,
    read_ids,
    read_members,
    read_permutation,
)
from hoploom.store import Store, open_store
from hoploom.store.base import NODES, Tier, sampled_edges, scan_edges, scan_rows
from hoploom.store.from_pyg import PygGraph, read_pyg
from hoploom.store.views import is_text
from hoploom.system import require_memory

AnyGraph: TypeAlias = Data | HeteroData | Store | str | Path
Parameters = ParamSpec("Parameters")
Given = TypeVar("Given")

COUNTS = {  # arguments that are counts: the least value, and the hint in the error
    "batch_size": (1, "give at least 1"),
    "num_workers": (0, "give a count of threads, 0 for none"),
    "prefetch_factor": (1, "give at least 1"),
    "least_tail": (1, "give a count of seeds, 1 for none to join"),
    "look_ahead": (1, "give a count of steps, 1 for none ahead"),
}
MICROSECONDS = {"s": 10**6, "m": 60 * 10**6, "h": 3600 * 10**6, "d": 86400 * 10**6}  # as dates are kept in stores
MOST_TIME = (1 << 63) - 1
MAY_BE_NONE = ("prefetch_factor", "look_ahead")
SEED_BYTES, ORDER_BYTES = 16, 32  # bytes per edge as a seed, and to put it in the user's own order
UNSUPPORTED = {  # arguments of PyG, of torch's DataLoader, then of other libraries; their default values are accepted
    "neighbor_sampler": "give its options to the loader; loaders of one store, hoploom.from_pyg(data), share its edges",
    "transform_sampler_output": "use transform= on the batch instead",
    "custom_cls": "use transform= on the batch instead",
    "collate_fn": "a batch is made whole, there is nothing to collate; give transform=, a function of the batch",
    "dataset": "leave it out, and say with input_nodes= or edge_label_index= what the seeds are",
    "prefetch_bytes": "give num_workers= and prefetch_factor=, whose product is the number of batches that wait",
    "batch_sampler": "give sampler=, batch_size= and drop_last=, so that ranks share a step; a DynamicBatchSampler "
    "measures whole graphs, while num_neighbors= and batch_size= bound a batch here",
    "multiprocessing_context": "workers are threads of this process",
    "in_order": "leave it out: batches come in order, so that a run repeats",
    "pin_memory_device": "give device=",
    "collect_features": "give fields=[] for False, and leave it out for True",
    "channel_size": "give num_workers= and prefetch_factor=, whose product is the number of batches that wait",
    "to_device": "give device=",
    "worker_options": "give num_workers=, threads of this process; where the graph lives is up to the store",
    "use_ddp": "leave it out: a loader takes its rank's share of the seeds by itself",
    "ddp_seed": "give seed=, the same on every rank",
    "prob": "give weight_attr=, the name of an edge field",
}
DEFAULTS = {"pin_memory_device": "", "in_order": True, "use_ddp": False}  # of the other arguments: None


@dataclass(kw_only=True)
class LoaderArguments:
    """The arguments that all loaders have. The constructor makes those checks that need no graph."""

    loader: ClassVar[str]  # the name in error messages
    data: Any = field(init=False)

    transform: Callable[[Batch], Any] | None = None
    is_sorted: bool = False
    filter_per_worker: bool | None = None
    input_id: Tensor | None = None
    device: torch.device | str | None = None
    seed: int | None = None
    rank: int | None = None
    world_size: int | None = None
    batch_size: int = 1
    shuffle: bool | None = False
    sampler: Any = None
    num_workers: int = 0
    pin_memory: bool = False
    drop_last: bool = False
    timeout: float = 0
    worker_init_fn: Callable[[int], object] | None = None
    generator: torch.Generator | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    least_tail: int = 1
    locality: Any = False
    look_ahead: int | None = None
    fields: Any = None

    def __post_init__(self) -> None:
        for name, (least, hint) in COUNTS.items():
            value = getattr(self, name)
            if value is not None or name not in MAY_BE_NONE:
                setattr(self, name, as_int(name, value, least, hint))
        self.random_seed()
        self.timeout = as_number("timeout", self.timeout, f"give seconds, or 0 for {DEADLINE:.0f}")
        for name in ("sample_frontier", "transform", "worker_init_fn"):
            value = getattr(self, name, None)
            if value is not None and not callable(value):
                raise ConfigError(f"{name} is of type {type(value).__name__}; give a function")

    def random_seed(self) -> int:
        """Return `seed`, else the initial seed of `generator`, else 0. Raise ConfigError if both are given."""
        if self.generator is None:
            return as_int("seed", 0 if self.seed is None else self.seed, None, "give an integer")
        if not isinstance(self.generator, torch.Generator):
            raise ConfigError(f"generator is a {type(self.generator).__name__}; give a torch.Generator, or seed=")
        if self.seed is not None:
            given = f"seed={self.seed!r:.80}"
            raise ConfigError(f"generator= stands for its seed, and {given} is given too; leave one of them out")
        return self.generator.initial_seed()


@dataclass(kw_only=True)
class NeighborArguments(LoaderArguments):
    """The arguments that loaders of sampled neighbourhoods have in common."""

    replace: bool = False
    subgraph_type: Subgraph | SubgraphType = "directional"
    directed: bool = True
    disjoint: bool = False
    temporal_strategy: Temporal = "uniform"
    time_attr: str | None = None
    weight_attr: str | None = None
    time_window: int | str | None = None
    strictly_before: bool = False
    labor: bool = False
    mode: Mode = "subgraph"
    sample_frontier: SampleFrontier | None = None
    aggregate: Literal["sum", "mean"] | None = None
    degrees: bool = False


@dataclass
class NodeArguments(NeighborArguments):
    """The arguments of NeighborLoader."""

    loader = "NeighborLoader"

    data: AnyGraph
    num_neighbors: Fanouts | NumNeighbors
    input_nodes: Any = None
    input_time: Tensor | None = None


@dataclass
class LinkArguments(NeighborArguments):
    """The arguments of LinkNeighborLoader."""

    loader = "LinkNeighborLoader"

    data: AnyGraph
    num_neighbors: Fanouts | NumNeighbors
    edge_label_index: Any = None
    edge_label: Tensor | None = None
    edge_label_time: Tensor | None = None
    _: KW_ONLY
    neg_sampling: NegativeSampling | Literal["binary", "triplet"] | None = None
    neg_sampling_ratio: float | None = None
    strict_negatives: bool = False
    candidates: Any = "uniform"
    known_links: Any = None
    exclude: Exclude | None = None
    exclude_below: int | None = None


@dataclass
class HGTArguments(LoaderArguments):
    """The arguments of HGTLoader."""

    loader = "HGTLoader"

    data: AnyGraph
    num_samples: NumSamples
    input_nodes: Any


def taking(
    arguments: Callable[Parameters, Given],
) -> Callable[[Callable[[Any, Given], None]], Callable[Concatenate[Any, Parameters], None]]:
    """Return a decorator for __init__, which then gets the caller's arguments as one object of class `arguments`.

    An argument that only other libraries know raises ConfigError unless it has their default.
    """
    signature, loader = inspect.signature(arguments), arguments.loader  # type: ignore[attr-defined]

    def decorate(init: Callable[[Any, Given], None]) -> Callable[Concatenate[Any, Parameters], None]:
        @functools.wraps(init)
        def made(self: Any, /, *args: Parameters.args, **given: Parameters.kwargs) -> None:
            for name in sorted(set(given) - set(signature.parameters)):
                value = given.pop(name)
                if name not in UNSUPPORTED:
                    near = nearest(name, list(signature.parameters))
                    hint = f"; did you mean {near!r}?" if near else ""
                    raise TypeError(f"{loader}() got an unexpected argument {name!r}{hint}")
                if value is not None and not (isinstance(value, bool | str) and value == DEFAULTS.get(name)):
                    raise ConfigError(f"{loader} does not support {name}=; {UNSUPPORTED[name]}")
            try:
                signature.bind(*args, **given)
            except TypeError as error:
                way_out = "; name the arguments after seeds and times, e.g. replace=True" * ("positional" in str(error))
                raise TypeError(f"{loader}(): {error}{way_out}") from error
            init(self, arguments(*args, **given))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        made.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()], return_annotation=None)  # type: ignore[attr-defined]
        return made

    return decorate


# --- the graph, and what is sampled of it ------------------------------------------------------


def read_input(data: AnyGraph, *, weight_attr: str | None, time_attr: str | None) -> PygGraph:
    """Return the PygGraph of the `data` argument: PyG's Data or HeteroData, a store, or the path of a store."""
    if isinstance(data, str | Path):
        data = open_store(data)
    if isinstance(data, Store):  # learned rows are added when a batch is delivered: earlier, they would be outdated
        store = data.unlearned or data
        return PygGraph(store, empty_batch(store), {}, {}, set())
    return read_pyg(data, weight_attr=weight_attr, time_attr=time_attr)


def empty_batch(store: Store) -> Batch:
    """Return an empty Data or HeteroData, the template of a store's batches."""
    return Data() if store.schema.homogeneous else HeteroData()


def read_fanouts(schema: Schema, num_neighbors: Fanouts | NumNeighbors) -> Fanouts:
    """Return the fanouts; take them out of PyG's NumNeighbors if necessary."""
    if not isinstance(num_neighbors, NumNeighbors):
        return num_neighbors
    values: Fanouts = num_neighbors.values
    if not schema.homogeneous:
        values = num_neighbors.get_values([relation.key for relation in schema.relations])
    return values


def shown_counts(schema: Schema, sampling: Sampling) -> dict[str, str]:
    """Return {"fanouts": text}, by relation if they differ; for HGT, {"num_samples": text}, by node type."""
    counts, owners = sampling.fanouts, [" ".join(relation.key) for relation in schema.relations]
    if sampling.num_samples:
        counts, owners = sampling.num_samples, list(schema.type_index)
    by_owner = list(zip(*counts, strict=True))
    alike = str([hop[0] for hop in counts]) if len(set(by_owner)) <= 1 else ""
    named = zip(owners, by_owner, strict=True)
    shown = alike or "; ".join(f"{owner} {list(hops)}" for owner, hops in named)
    return {"num_samples" if sampling.num_samples else "fanouts": shown}


def assembler_of(given: LoaderArguments, graph: PygGraph, sampling: Sampling) -> Assembler:
    """Return the Assembler of the batches that a loader's arguments describe."""
    schema, reduce, degrees = graph.store.schema, None, False
    if isinstance(given, NeighborArguments):
        reduce, degrees = read_added(schema, sampling, given.aggregate, given.degrees), given.degrees
    store = given.data if isinstance(given.data, Store) else graph.store
    fields = read_fields(store.schema, given.fields, graph.frames)
    if fields is not None:
        bare = {learned.node_type for learned in store.learned if learned.join is None}  # the loader adds their x
        fields = {of: [name for name in names if name != FEATURES or of not in bare] for of, names in fields.items()}
    order, frames, deleted = graph.field_order, graph.frames, graph.deleted
    for key, named in frames.items():
        if fields is not None and sampling.mode == "blocks" and isinstance(key, tuple):
            for name in set(named) & set(fields[key]):
                raise ConfigError(f"fields names {name!r} of {key}, which is no tensor, and blocks have tensors only")
    return Assembler(graph.store, graph.template, order, False, reduce, degrees, fields, frames, deleted)


def read_added(schema: Schema, sampling: Sampling, aggregate: str | None, degrees: bool) -> Reduce | None:
    """Check the arguments `aggregate` and `degrees` against the graph and the sampling. Return `aggregate`."""
    if degrees and len(schema.relations) != 1:
        raise ConfigError("degrees=True is for graphs of one node type and relation; leave it out")
    if aggregate is None:
        return None
    if aggregate not in ("sum", "mean"):
        raise ConfigError(f"aggregate is {aggregate!r:.80}; choose 'sum' or 'mean', or leave it out")
    if not sampling.num_hops:
        raise ConfigError("aggregate needs a layer, but num_neighbors is empty; leave one of them out")
    if sampling.subgraph != "directional":
        raise ConfigError(f"aggregate does not go with subgraph_type={sampling.subgraph!r}; leave one of them out")
    for relation in schema.relations:
        field = schema.node_type(relation.source).fields.get(FEATURES)
        if field is None or len(field.shape) != 1 or not DTYPES[field.dtype].is_floating_point:
            raise ConfigError(f"aggregate needs rows of floats, x, on {relation.source!r}; leave it out")
    return aggregate  # type: ignore[return-value]


def read_fields(schema: Schema, given: Any, frames: Mapping[TypeKey, Iterable[str]] | None = None) -> Fields | None:
    """Return, by node type and relation, the names of the fields that `given` chooses for batches; None: all fields."""
    if given is None:
        return None
    owners: dict[TypeKey, list[str]] = {t.name: list(t.fields) for t in schema.node_types}
    owners |= {r.key: [name for name in r.fields if name != EDGE_ID] for r in schema.relations}
    for owner, names in (frames or {}).items():
        owners[owner] += names
    if isinstance(given, Mapping):
        by_owner = {key if isinstance(key, str) else canonical(schema, key): names for key, names in given.items()}
        for owner, names in by_owner.items():
            schema.node_type(owner) if isinstance(owner, str) else schema.relation(owner)
            _check_fields(f"fields of {owner!r}", f" of {owner!r}", names, set(owners[owner]))
        return {owner: tuple(by_owner.get(owner, ())) for owner in owners}
    _check_fields("fields", "", given, {name for of_owner in owners.values() for name in of_owner})
    return {owner: tuple(name for name in of_owner if name in given) for owner, of_owner in owners.items()}


def _check_fields(what: str, of: str, names: Any, known: set[str]) -> None:
    if not isinstance(names, list | tuple | set) or not all(isinstance(name, str) for name in names):
        way_out = "give a list of names, such as ['x', 'y'], or a list by node type and relation"
        raise ConfigError(f"{what} is {names!r:.80}; {way_out}")
    for name in names:
        if name not in known:
            raise ConfigError(f"fields names {name!r}{of}; there are {sorted(known)}")


# --- seeds ----------------------------------------------------------------------------------


def read_tensor(what: str, values: Any) -> Tensor:
    """Return a tensor on the CPU from a tensor, an array or a list."""
    try:
        return torch.as_tensor(values).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(
            f"{what} is {' '.join(repr(values).split())[:80]}; give numbers in a list, an array or a tensor"
        ) from error


def read_input_nodes(store: Store, input_nodes: Any, what: str = "input_nodes") -> tuple[str, Tensor, Tensor | None]:
    """Return the seeds' node type, their ids [n] int64, and the batch's `input_id`: the ids for a mask, else None.

    `input_nodes` is None, a split, ids or a mask; with several types, a split, a type, or a pair (type, one of these).
    """
    schema = store.schema
    if schema.homogeneous:
        node_type, given = schema.node_types[0].name, input_nodes
    elif isinstance(input_nodes, str):
        known = input_nodes in schema.type_index
        node_type = input_nodes if known else store._type_with_split(input_nodes)
        given = None if known else input_nodes
    elif isinstance(input_nodes, tuple | list) and len(input_nodes) == 2 and isinstance(input_nodes[0], str):
        node_type, given = input_nodes
        schema.node_type(node_type)
    else:
        raise ConfigError(f"{what} is {input_nodes!r:.80}; name the node type too: ('paper', ids)")
    limit = schema.node_type(node_type).num_nodes
    if given is None:
        return node_type, torch.arange(limit), None
    if isinstance(given, str):
        return node_type, store.split(given, node_type), None
    members = read_tensor(what, store.ids(node_type).stored(given, what) if is_text(given) else given)
    ids = read_members(what, members, limit, ConfigError)
    return node_type, ids, ids if members.dtype == torch.bool else None


def read_time_window(time_window: int | str | None) -> int:
    """Return the greatest age of an edge at its seed's time, in the unit of the times; -1 for any."""
    if time_window is None:
        return -1
    if not isinstance(time_window, str):
        way_out = "give a whole number in the unit of the times, or e.g. '90d'"
        return min(as_int("time_window", time_window, 0, way_out), MOST_TIME)
    count, unit = time_window[:-1], time_window[-1:]
    if unit not in MICROSECONDS or not count.isdecimal():
        raise ConfigError(f"time_window is {time_window!r:.80}; give a number and a unit: {', '.join(MICROSECONDS)}")
    return min(int(count) * MICROSECONDS[unit], MOST_TIME)


class SeedLinks(NamedTuple):
    """The links that a loader was given."""

    key: RelationName
    ends: Tensor  # [2, n] int64: node ids of sources and destinations
    are_edges: bool  # they are all edges of the relation, in the user's own order


def read_edge_label_index(store: Store, edge_label_index: Any) -> SeedLinks:
    """Return the links that `edge_label_index` names or lists."""
    schema = store.schema
    given = edge_label_index
    if schema.homogeneous:
        key = schema.relations[0].key
        if isinstance(given, tuple) and len(given) == 2 and given[0] is None:
            given = given[1]  # PyG's way to say that there is but one relation
    elif isinstance(given, tuple | list) and given and isinstance(given[0], str):
        key, given = canonical(schema, given), None
    elif isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], tuple | list):
        key, given = canonical(schema, given[0], known=given[1] is None), given[1]
    else:
        raise ConfigError("edge_label_index needs the relation too: (('user', 'rates', 'item'), edge_label_index)")
    if given is None:
        return SeedLinks(key, all_edges(store, key), True)
    if isinstance(given, np.ndarray | list | tuple) and len(given) == 2 and all(map(is_text, given)):
        ends = zip((key[0], key[2]), given, strict=True)
        given = torch.stack([store.ids(end).stored(row, "edge_label_index") for end, row in ends])
    return SeedLinks(key, read_ends("edge_label_index", given, schema, key), False)


def read_ends(what: str, given: Any, schema: Schema, key: RelationName) -> Tensor:
    """Return the ends of links, [2, n] int64."""
    links = read_tensor(what, given)
    if links.dim() != 2 or links.shape[0] != 2:
        raise ConfigError(f"{what} has shape {tuple(links.shape)}; give [2, n]")
    named = [("source", key[0]), ("destination", key[2])]
    rows = [
        read_ids(f"{what} ({end} row)", row, schema.node_type(name).num_nodes, ConfigError)
        for (end, name), row in zip(named, links, strict=True)
    ]
    return torch.stack(rows)


def read_exclude(store: Store, links: SeedLinks, given: LinkArguments) -> Exclusion | None:
    """Return the edges that the links keep out of message passing; None if there are none."""
    key, ends, are_edges = links
    index = store.schema.relation_index.get(key)
    reverses = [] if index is None else opposite_relations(store.schema, index)
    chosen: str | None = given.exclude
    if chosen is None:
        chosen = "none" if not are_edges else "both" if reverses else "self"
    if chosen not in Exclude.__args__:  # type: ignore[attr-defined]
        raise ConfigError(f"exclude is {chosen!r:.80}; choose one of {list(Exclude.__args__)}")  # type: ignore[attr-defined]
    if chosen == "none":
        if given.exclude_below is not None:
            raise ConfigError("exclude_below has no effect without exclude; give exclude='both', or leave it out")
        return None
    if index is None:
        raise ConfigError(f"exclude={chosen!r} leaves out edges of {key}, which the graph does not have; leave it out")
    if not reverses and chosen != "self":
        raise ConfigError(f"exclude={chosen!r} needs the relation with the reverse edges of {key}; give 'self'")
    if given.subgraph_type == "bidirectional" and reverses and chosen != "both":
        raise ConfigError(f"exclude={chosen!r} leaves edges that subgraph_type='bidirectional' reverses; give 'both'")
    if not are_edges or chosen != "self":
        number, way_out = ends.shape[1], "give fewer links, or exclude='none'"
        num_bytes = number * (MATCH_BYTES if are_edges else LOOKUP_BYTES)
        require_memory(num_bytes, f"looking up the edges of {number:,} links takes", way_out)
    places = edge_places(store, key) if are_edges else None  # None: links are in the order of the store
    edges = []
    if chosen in ("self", "both"):
        own = None if places is None else torch.empty_like(places).index_copy_(0, places, torch.arange(len(places)))
        edges.append(ExcludedEdges(index, own) if are_edges else find_edges(store.graph, index, ends))
    for reverse in reverses if chosen in ("reverse", "both") else ():
        if not are_edges:
            edges.append(find_edges(store.graph, reverse, ends.flip(0)))
            continue
        sources, destinations = (ends[1], ends[0]) if places is None else (ends[1][places], ends[0][places])
        found = match_edges(store.graph, reverse, sources, destinations)
        found = found if places is None else torch.empty_like(found).index_copy_(0, places, found)
        edges.append(ExcludedEdges(reverse, found))
    below = given.exclude_below
    few = None if below is None else has_few_links(ends, as_int("exclude_below", below, 1, "give a number of links"))
    shown = chosen if below is None else f"{chosen}, below {below}"
    return Exclusion(len(store.schema.relations), tuple(edges), few, shown)


def canonical(schema: Schema, name: Sequence[str], *, known: bool = True) -> RelationName:
    """Return a relation's three words. `name` has these, or two node types; unless `known`, the relation may be new."""
    key = tuple(name)
    if not known and len(key) == 3 and key not in schema.relation_index:  # perhaps a misspelt relation of the graph
        between = {r.name: r.key for r in schema.relations if {r.source, r.destination} == {key[0], key[2]}}
        others = [name for name in between if not (name.endswith(key[1]) or key[1].endswith(name))]  # unlike rev_rates
        near = between.get(key[1]) or between.get(nearest(key[1], others, cutoff=0.8) or "")
        if near is not None:
            raise ConfigError(
                f"the graph has no relation {key}; did you mean {near}? If the links are a relation of their own, give "
                f"it another name, or add it without edges: data[{key}].edge_index = "
                "torch.empty(2, 0, dtype=torch.long)"
            )
    if len(key) == 2:
        found = [r.key for r in schema.relations if (r.source, r.destination) == key]
        if len(found) == 1:
            return found[0]
        if not found and not known:
            key = key[0], "to", key[1]
    if known or len(key) != 3:
        schema.relation(key)  # type: ignore[arg-type]
    for end in (key[0], key[-1]):
        schema.node_type(end)
    return key  # type: ignore[return-value]


def all_edges(store: Store, key: RelationName, at_once: int = NODES) -> Tensor:
    """Return every edge of a relation [2, e], in the user's own order if the store keeps one."""
    index = store.schema.relation_index[key]
    relation = store.schema.relations[index]
    all_here = all(shard.tier is Tier.MEMORY for shard in store.shards)
    mapped = sum(part.lists[index].num_edges for part in store.topology) == relation.num_edges
    parts = [scan_edges(part.lists[index], key) for part in store.topology]
    pieces = chain.from_iterable(parts if all_here or mapped else [sampled_edges(store.graph, index, at_once)])
    num_edges, per_edge = relation.num_edges, SEED_BYTES + (ORDER_BYTES if EDGE_ID in relation.fields else 0)
    require_memory(
        num_edges * per_edge,
        f"all {num_edges:,} edges of {key} as seeds take",
        "give some of them: edge_label_index=edges, [2, n]",
    )
    places = edge_places(store, key)
    edges, begin = torch.empty(2, num_edges, dtype=torch.int64), 0
    for sources, ends in pieces:
        if (end := begin + ends.numel()) > num_edges:
            break
        at = slice(begin, end) if places is None else places[begin:end]
        edges[0, at], edges[1, at] = sources.to(torch.int64), ends
        begin = end
    if begin != num_edges:
        raise StoreError(f"not {num_edges} edges of {key} are found; run hoploom check, and copy the store again")
    return edges


def edge_places(store: Store, key: RelationName) -> Tensor | None:
    """Return the index of each edge in the user's own order, [e] int64 in CSC order; None if the store keeps none."""
    relation = store.schema.relation(key)
    if EDGE_ID not in relation.fields:
        return None
    order = torch.cat(list(scan_rows(store.features, key, EDGE_ID, relation.num_edges)))
    return read_permutation(f"{EDGE_ID} of {key}", order, relation.num_edges)


def read_negatives(neg_sampling: Any, ratio: float | None) -> NegativeSampling | None:
    """Return the options of negative sampling from PyG's two arguments for it; None if there are no negatives."""
    amount = 0.0 if ratio is None else as_number("neg_sampling_ratio", ratio, "give negatives per link")
    if amount > 0:
        return NegativeSampling("binary", amount)
    try:
        return None if neg_sampling is None else NegativeSampling.cast(neg_sampling)
    except (TypeError, ValueError) as error:
        way_out = "give 'binary', 'triplet' or a NegativeSampling"
        raise ConfigError(f"neg_sampling is {neg_sampling!r:.80} ({error}); {way_out}") from error


def seeds_name(given: LoaderArguments) -> str:
    """Return the name of the split, node type or relation that `given` has as seeds; "" for ids and masks."""
    named = getattr(given, "input_nodes", getattr(given, "edge_label_index", None))
    words = named if isinstance(named, tuple | list) else [named]
    words = words[0] if words and isinstance(words[0], tuple | list) else words
    return " ".join(word for word in words if isinstance(word, str))


def read_column(what: str, values: Any, of: str, count: int) -> Tensor:
    """Return `values` as a tensor [count]; raise ConfigError unless there are `count` numbers."""
    column = read_tensor(what, values)
    if column.shape != (count,):
        raise ConfigError(f"{what} has shape {tuple(column.shape)} for {count} {of}; give one each")
    return column


def as_times(what: str, times: Any, count: int) -> Tensor | None:
    """Return the times of the seeds, [count] int64; None if `times` is None."""
    if times is None:
        return None
    given = read_column(what, times, "seeds", count)
    if given.dtype not in ID_DTYPES:
        raise ConfigError(f"{what} has dtype {given.dtype}; give {count} integers")
    return given.to(torch.int64).contiguous()


def read_weight(name: str, given: Any, num_nodes: int) -> Tensor:
    """Return the weights with which nodes are drawn as negatives, [num_nodes]; raise ConfigError if one is invalid."""
    weight = read_column(name, given, "nodes", num_nodes)
    bad = ~(torch.isfinite(weight) & (weight >= 0))
    if bad.any():
        raise ConfigError(f"{name} holds {float(weight[bad][0])}; give finite weights, none negative")
    if not weight.any():
        raise ConfigError(f"{name} is all zero; give some node a weight")
    return weight
