"""The Store: a graph with its features, labels and splits, in memory, on disk or on servers; functions that open it.

Files are mapped: opening a store copies nothing, and its cost does not depend on the graph's size.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hoploom import ops
from hoploom.config.values import as_int, nearest, printable
from hoploom.errors import ConfigError, StoreError
from hoploom.ops import EdgeLists, InEdges, MappedFile, Reads
from hoploom.schema import DTYPES, EDGE_ID, Field, NodeType, Relation, RelationName, Schema, TypeKey, check_schema
from hoploom.store import format as layout
from hoploom.store.base import (
    NOWHERE,
    Absent,
    Deployment,
    FeatureStore,
    GraphStore,
    Loops,
    Part,
    Shard,
    Table,
    Wanted,
    covers,
    in_degrees_of,
    loops_of,
    range_of,
)
from hoploom.store.budget import Budget, measure_disk, open_on_disk, plan_budget, read_memory, read_scratch, warm_up
from hoploom.store.format import Manifest, PartRange, id_dtype
from hoploom.store.learned_fields import LearnedRows
from hoploom.store.sharded import LocalEdgeFields, Sharded
from hoploom.store.views import Explored
from hoploom.store.write import write_parts
from hoploom.system import Closing, memory_limit

NODES_AT_ONCE = 1 << 22  # whose degrees are in memory together


@dataclass(frozen=True, repr=False, eq=False)  # == compares identity, so that it reads nothing
class Store(Explored, Closing):
    """A graph with its features, labels and splits, in memory, on disk or on servers.

    >>> store = hoploom.open("papers.store")
    >>> loader = hoploom.NeighborLoader(store, [15, 10, 5], input_nodes="train", batch_size=1024)
    """

    schema: Schema
    graph: GraphStore
    features: FeatureStore
    parts: tuple[Part, ...] = ()  # in this process
    identity: str = ""  # SHA-256 of store.json in hex, if the store is on disk
    ranges: tuple[PartRange, ...] = ()  # of all parts
    shards: tuple[Shard, ...] = ()  # of all parts, in order, for their fields and splits
    topology: tuple[Part, ...] = ()  # parts whose topology is in this process: `parts`, or more of them
    deployment: Deployment = NOWHERE
    path: Path | None = None  # of the directory, if the store is on disk
    budget: Budget | None = None  # of memory, if the store was opened with one
    reads: Reads | None = None  # counts of disk reads, if the store does not fit the budget
    scratch: Path | None = None  # a folder where loaders may pack the rows of coming batches
    learned: tuple[LearnedRows, ...] = ()  # which loaders add to their batches, as features
    unlearned: "Store | None" = None  # the store without the learned rows; None if there are none
    _loops: dict[RelationName, Loops] = field(default_factory=dict)  # those computed so far

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", self.shards or self.parts)
        object.__setattr__(self, "topology", self.topology or self.parts)

    def __repr__(self) -> str:
        where = "" if self.path is None else f"{self.path}: "
        nodes = ", ".join(f"{t.name} {t.num_nodes:,}" for t in self.schema.node_types)
        edges = ", ".join(f"{r.name} {r.num_edges:,}" for r in self.schema.relations)
        parts = len(self.shards)
        in_parts = f"; {parts} parts" if parts > 1 else ""
        placed = "" if self.placed is None else f"; placed on {self.placed.device}"
        within = "" if self.budget is None else f"; {self.budget}"
        return printable(f"Store({where}nodes: {nodes}; edges: {edges}{in_parts}{placed}{within})")

    @property
    def learned_types(self) -> list[str]:
        """The node types whose features are learned rows, or have these beside them."""
        return [learned.node_type for learned in self.learned]

    def close(self) -> None:
        """Close the connections to servers, and free memory that `place` shares with other processes.

        Tensors that you still use stay valid.
        """
        self.deployment.close()

    def traffic(self) -> dict[str, float]:
        """Return the traffic to servers so far: requests, bytes_sent, bytes_received, wait_seconds of all threads."""
        return self.deployment.traffic()

    def reading(self) -> dict[str, float]:
        """Return counts of the disk reads so far; {} without a budget, or if everything is in memory.

        `requests` and `bytes` count the reads, `wanted_bytes` the bytes that batches needed. `seconds` is the sum over
        all threads, `busy_seconds` the time with a read in flight. For tables and edge lists that are partly on disk,
        `asked` counts the rows and edges that batches needed, `found` those of them that were in memory.
        """
        return {} if self.reads is None else self.reads.so_far()

    @property
    def placed(self) -> Any:
        """The copy that `hoploom.place` made for a GPU (a PlacedStore; print it), or None."""
        return self.deployment.placed

    def require_whole(self) -> None:
        """Raise StoreError if a mapped file can no longer be read: tensors that Python reads might then show zeros."""
        if ops.any_damaged():  # one check per batch: a store may have thousands of parts
            for part in (*self.parts, *self.topology):
                part.require_whole()

    def split(self, name: str, node_type: str | None = None) -> Tensor:
        """Return the node ids of a split, in ascending order within each part: `store.split("train")`."""
        type_name = node_type or self._type_with_split(name)
        if name not in self.schema.node_type(type_name).splits:
            have = sorted(self.schema.node_type(type_name).splits)
            others = [t.name for t in self.schema.node_types if name in t.splits]
            elsewhere = f"; {others} have one of this name" if others else ""
            no_mask = self._no_mask(name, self.schema.node_type(type_name))
            raise ConfigError(f"unknown split {name!r} of {type_name!r}; it has {have}{elsewhere}{no_mask}")
        pieces = [members for shard in self.shards if (members := shard.split(type_name, name)).numel()]
        if not pieces:
            return torch.empty(0, dtype=torch.int64)
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def aggregate(self, want: Wanted, edges: InEdges, reduce: Literal["sum", "mean"]) -> Tensor:
        """Return the sum or mean of the sources' rows at each destination of `edges`: [destinations, width].

        `want` requests one row per source. If all rows are in memory, they are not copied.
        """
        tables = [part.tables.get((want.owner, want.field)) for part in self.parts]
        found = [(table.rows, table.first) for table in tables if table is not None and table.rows.shape[0]]
        is_here = self.reads is None and covers(self.schema, self.parts, str(want.owner)) and found
        if not is_here or found[0][0].dtype not in ops.ELEMENTS:
            return ops.aggregate(self.features.gather([want])[0].to(torch.float32), edges, reduce)
        ids = ops.select(want.ids, edges.sources.to(torch.int64))
        return ops.aggregate_tables(found, ids, edges.indptr, reduce)

    def in_degrees(self, key: RelationName, nodes: Tensor) -> Tensor:
        """Return each node's number of in-edges without self-loops: [n] int64. The first call may read all edges."""
        parts = self._lists_of(key)
        bounds = torch.tensor([lists.first_node for lists in parts[1:]], dtype=torch.int64)
        owners = torch.bucketize(nodes, bounds, right=True) if len(parts) > 1 else None
        degrees = ops.empty((nodes.numel(),), torch.int64)
        for number, lists in enumerate(parts):
            own = slice(None) if owners is None else torch.nonzero(owners == number).view(-1)
            degrees[own] = in_degrees_of(lists, nodes[own])
        if key not in self._loops:
            self._loops[key] = loops_of(self.topology, key)
        loops = self._loops[key]
        if loops.nodes.numel():
            found = torch.bucketize(nodes, loops.nodes).clamp_(max=loops.nodes.numel() - 1)
            degrees -= torch.where(loops.nodes[found] == nodes, loops.counts[found], 0)
        return degrees

    def degree_histogram(self, key: RelationName) -> Tensor:
        """Return the number of nodes with 0, 1, 2, ... in-edges in a relation, self-loops included: int64.

        The edge lists must be on this host; their edges are not read.

        >>> PNAConv(100, 64, ["mean", "max"], ["identity", "attenuation"], store.degree_histogram(key))
        """
        counts = torch.zeros(1, dtype=torch.int64)
        for lists in self._lists_of(key):
            for first in range(0, lists.indptr.numel() - 1, NODES_AT_ONCE):
                found = torch.bincount(lists.indptr[first : first + NODES_AT_ONCE + 1].diff(), minlength=counts.numel())
                found[: counts.numel()] += counts
                counts = found
        return counts

    def _lists_of(self, key: RelationName) -> list[EdgeLists]:
        """Return the in-edges of all nodes by part; raise ConfigError if this host does not have them."""
        index = self.schema.relation_index[self.schema.relation(key).key]
        if not covers(self.schema, self.topology, key[2]):
            way_out = "give it the edges of all parts, or leave degrees out"
            raise ConfigError(f"the in-degrees of {key[2]!r} are not in reach of this process; {way_out}")
        return [part.lists[index] for part in self.topology]

    def _type_with_split(self, name: str) -> str:
        having = [t.name for t in self.schema.node_types if name in t.splits]
        if len(having) != 1:
            known = {t.name: sorted(t.splits) for t in self.schema.node_types}
            near = None if having else nearest(name, [*known, *chain(*known.values())])
            found = f"split {name!r} is in {having or 'no node type'}; the node types and their splits are {known}"
            found += f"; did you mean {near!r}?" if near else ""
            raise ConfigError(found + (self._no_mask(name, *self.schema.node_types) if not having else ""))
        return having[0]

    def _no_mask(self, split: str, *node_types: NodeType) -> str:
        """Return a hint why the field SPLIT_mask cannot be used as a split; "" if there is no such field."""
        found = [t.fields[f"{split}_mask"] for t in node_types if f"{split}_mask" in t.fields]
        if not found:
            return ""
        way_out = "give one column of it" if found[0].shape else "give it as .bool()"
        return f"; {split}_mask is {found[0].dtype} {list(found[0].shape)} per node, a split takes one bool: {way_out}"

    def refuse_learned(self, doing: str) -> None:
        """Raise ConfigError if the store has learned rows, which are in no part."""
        if self.learned:
            raise ConfigError(
                f"{doing} does not take learned rows, here of {self.learned_types}; export() them, and build or "
                "from_pyg with them as x, or take the store that the Embedding was made of"
            )

    def save(self, path: str | Path) -> "Store":
        """Save the store in a new directory, and return it opened from there."""
        self.refuse_learned("save")
        owners: list[tuple[TypeKey, NodeType | Relation]] = [(t.name, t) for t in self.schema.node_types]
        owners += [(r.key, r) for r in self.schema.relations]
        has_fields = all((key, name) in part.tables for part in self.parts for key, of in owners for name in of.fields)
        if not has_fields or not covers(self.schema, self.parts):
            raise ConfigError("the store cannot be saved, not all of it lies in this process; save the one it is from")
        write_parts(path, self.schema, self.parts)
        return open_store(path)


def assemble(schema: Schema, parts: Sequence[Part]) -> Store:
    """Return a store over parts that together have every node."""
    parts, ranges = tuple(parts), tuple(map(range_of, parts))
    if len(parts) == 1:
        return Store(schema, parts[0], parts[0], parts, ranges=ranges)
    sharded = Sharded(schema, parts, ranges)
    return Store(schema, sharded, sharded, parts, ranges=ranges)


def open_store(
    path: str | Path,
    *,
    parts: Sequence[int] | None = None,
    topology: Literal["own", "all"] = "own",
    memory: int | str | None = None,
    scratch: str | Path | None = None,
) -> Store:
    """Open a store from a directory in this process; `hoploom.open` explains the arguments."""
    folder = Path(path)
    manifest = layout.read_manifest(folder)
    check_manifest(folder, manifest)
    if topology not in ("own", "all"):
        raise ConfigError(f"topology is {topology!r:.80}; choose 'own' or 'all'")
    schema, everything = manifest.schema, range(len(manifest.parts))
    way_out = f"give numbers below {len(everything)}"
    if parts is not None and not isinstance(parts, Iterable):
        raise ConfigError(f"parts are {parts!r:.80}, not a list; {way_out}")
    numbers = tuple(sorted({as_int("part", part, 0, way_out) for part in (everything if parts is None else parts)}))
    if not numbers:
        raise ConfigError(
            f"parts is empty, so there is nothing to open; give some of the {len(everything)} parts by number"
        )
    if numbers[-1] >= len(everything):
        raise ConfigError(f"parts are {list(numbers)}, the store has {len(everything)}; {way_out}")
    all_lists = topology == "all"
    scattered = exceeds_memory(manifest, numbers, whole_topology=all_lists)
    own = {number: open_part(folder, manifest, number, scattered=scattered) for number in numbers}
    if len(own) == len(everything):
        store = replace(assemble(schema, list(own.values())), identity=manifest.identity, path=folder)
    else:
        shards = tuple(own.get(number) or Absent(schema, number, numbers) for number in everything)
        lists = tuple(own.values())
        if all_lists:
            lists = tuple(own.get(n) or open_topology(folder, manifest, n, scattered=scattered) for n in everything)
        features = Sharded(schema, shards, manifest.parts)
        graph = features.over(lists) if all_lists else features
        store = Store(schema, graph, features, tuple(own.values()), manifest.identity, manifest.parts, shards, lists)
        store = replace(store, path=folder)
    if memory is None:
        if scratch is not None:
            raise ConfigError("scratch is for a store with a budget of memory; give memory too, or leave scratch out")
        return store
    return replace(_within(store, manifest, memory), scratch=None if scratch is None else read_scratch(scratch))


def _within(store: Store, manifest: Manifest, memory: int | str) -> Store:
    """Return the store with a budget of `memory`: rows and edge lists that do not fit are read from the disk."""
    assert store.path is not None
    budget = plan_budget(store.topology, read_memory(memory))
    if budget.holds_all:
        columns = [column for part in store.topology for lists in part.lists for column in lists.columns]
        warm_up(columns + [table.rows for part in store.parts for table in part.tables.values()])
        return replace(store, budget=budget)
    files = [file for name in manifest.files if (file := layout.inside(store.path, name)).exists()]
    figures = measure_disk(max(files, key=lambda file: file.stat().st_size))
    reads = Reads(figures.gap, figures.bytes_per_second)
    all_lists = len(store.topology) > len(store.parts)
    on_disk = {
        id(part): open_on_disk(store.path, manifest, number, part, budget, reads)
        for number, part in enumerate(store.topology if all_lists else store.shards)
        if isinstance(part, Part)
    }
    shards = tuple(on_disk.get(id(shard), shard) for shard in store.shards)
    features = graph = Sharded(store.schema, shards, store.ranges)
    if all_lists:
        graph = features.over([on_disk[id(part)] for part in store.topology])
    warm_up([tensor for shard in on_disk.values() for tensor in shard.mapped_tensors()])
    return replace(store, graph=graph, features=features, shards=shards, budget=budget, reads=reads)


Topology = Literal["auto", "local", "parted"]


def check_topology(topology: object) -> None:
    """Raise ConfigError unless `topology` is 'auto', 'local' or 'parted'."""
    if topology not in ("auto", "local", "parted"):
        raise ConfigError(f"topology is {topology!r}; choose 'auto', 'local' or 'parted'")


def open_own(
    folder: Path, parts: Sequence[int] | None, topology: Topology, memory: int | str | None
) -> tuple[Store, list[int]]:
    """Open `parts` (default: those on this host); return the store and the part ids.

    Also open all edges if `topology` is 'local', or 'auto' and they fit in memory.
    """
    budget = None if memory is None else read_memory(memory)
    given = held_parts(folder) if parts is None else parts
    all_lists = topology == "local" or (topology == "auto" and topology_fits(folder, budget))
    mapped = open_store(folder, parts=given, topology="all" if all_lists else "own", memory=budget)
    return mapped, sorted(set(map(int, given)))  # open_store has checked them


def join_parts(local: Store, own: Sequence[int], remote: Callable[[int], Shard]) -> Store:
    """Return a store of all parts: the parts `own` of the store `local`, and remote(number) for every other part."""
    all_lists = len(local.topology) == len(local.ranges)
    shards: list[Shard] = []
    for number, shard in enumerate(local.shards):
        if number in own:
            shards.append(shard)
        elif all_lists:
            assert isinstance(local.graph, Sharded)
            fields = local.topology[number].tables.keys()
            shards.append(LocalEdgeFields(remote(number), local.graph.shards[number], fields))
        else:
            shards.append(remote(number))
    sharded = Sharded(local.schema, shards, local.ranges)
    return replace(local, graph=local.graph if all_lists else sharded, features=sharded, shards=tuple(shards))


def held_parts(path: str | Path) -> list[int]:
    """Return the numbers of the parts that have all files in a folder. A host of a cluster may have some parts only."""
    folder = Path(path)
    manifest = layout.read_manifest(folder)
    lacking = {name.partition("/")[0] for name in manifest.files if not os.path.exists(layout.inside(folder, name))}
    return [part for part in range(len(manifest.parts)) if layout.part_folder(part) not in lacking]


def topology_fits(path: str | Path, budget: int | None = None) -> bool:
    """Return whether the topology of all parts is in the folder and takes at most half of `budget`, or of memory."""
    folder = Path(path)
    manifest = layout.read_manifest(folder)
    columns = [name for name in manifest.files if Path(name).name.startswith("csc.")]
    size = sum(manifest.files[name].bytes for name in columns)
    return (
        all(os.path.exists(layout.inside(folder, name)) for name in columns) and size <= (budget or memory_limit()) // 2
    )


def check_manifest(folder: Path, manifest: Manifest) -> None:
    """Raise StoreError unless the parts cover every node and edge once, in order."""
    schema, parts = manifest.schema, manifest.parts
    try:
        check_schema(schema)
    except ConfigError as error:
        raise StoreError(f"{folder}: {error}; store.json is damaged") from error
    if not parts:
        raise StoreError(f"{folder} has no parts")
    widths = {len(part.first_nodes) for part in parts} | {len(part.num_nodes) for part in parts}
    edge_widths = {len(part.first_edges) for part in parts} | {len(part.num_edges) for part in parts}
    if widths != {len(schema.node_types)} or edge_widths != {len(schema.relations)}:
        raise StoreError(f"{folder}: a part does not list every type and relation; store.json is damaged")
    for node_type in schema.node_types:
        splits: Counter[str] = Counter()
        for part in parts:
            splits.update(part.splits.get(node_type.name, {}))
        if dict(splits) != dict(node_type.splits):
            what = f"the parts hold splits {dict(splits)} of {node_type.name!r}, not {dict(node_type.splits)}"
            raise StoreError(f"{folder}: {what}")
    spans = [
        (f"nodes of {t.name}", t.num_nodes, [(part.first_nodes[i], part.num_nodes[i]) for part in parts])
        for i, t in enumerate(schema.node_types)
    ]
    spans += [
        (f"edges of {r.key}", r.num_edges, [(part.first_edges[i], part.num_edges[i]) for part in parts])
        for i, r in enumerate(schema.relations)
    ]
    for what, total, held in spans:
        *firsts, end = accumulate((count for _, count in held), initial=0)
        if [first for first, _ in held] != firsts:
            raise StoreError(f"{folder}: the parts do not cover the {what} once and in order; store.json is damaged")
        if end != total:
            raise StoreError(f"{folder}: the parts hold {end} {what}, not {total}; store.json is damaged")


def exceeds_memory(manifest: Manifest, parts: Sequence[int], *, whole_topology: bool = False) -> bool:
    """Return whether these parts take more than all memory; `whole_topology` adds the edges of all other parts."""
    folders = {layout.part_folder(part) for part in parts}
    opened = (
        entry.bytes
        for name, entry in manifest.files.items()
        if name.partition("/")[0] in folders or (whole_topology and Path(name).name.startswith("csc."))
    )
    return sum(opened) > memory_limit()


def open_part(folder: Path, manifest: Manifest, part: int, *, scattered: bool = False) -> Part:
    """Map the files of one part. With `scattered`, the kernel does not read ahead."""
    schema, held = manifest.schema, manifest.parts[part]
    tables: dict[tuple[TypeKey, str], Table] = {}
    splits: dict[tuple[str, str], Tensor] = {}
    for index, node_type in enumerate(schema.node_types):
        for name, stored in node_type.fields.items():
            shape = (held.num_nodes[index], *stored.shape)
            file = layout.node_file(part, node_type.name, name)
            rows = map_array(folder, manifest, file, stored.dtype, shape, scattered=scattered)
            tables[node_type.name, name] = Table(rows, held.first_nodes[index])
        for split, size in held.splits.get(node_type.name, {}).items():
            file = layout.split_file(part, node_type.name, split)
            splits[node_type.name, split] = map_array(folder, manifest, file, "int64", (size,))
    opened = _open_edges(folder, manifest, part, needs_fields=True, scattered=scattered)
    return replace(opened, tables=tables | dict(opened.tables), splits=splits)


def open_topology(folder: Path, manifest: Manifest, part: int, *, scattered: bool = False) -> Part:
    """Map the topology of one part, and the edge fields whose files are in the folder, but no node fields or splits."""
    try:
        return _open_edges(folder, manifest, part, needs_fields=False, scattered=scattered)
    except StoreError as error:
        files = f"{layout.part_folder(part)}/relations/*/csc.*.npy"
        raise StoreError(f"topology='all' needs {files}: {error}, or open the store with topology='own'") from error


def _open_edges(folder: Path, manifest: Manifest, part: int, *, needs_fields: bool, scattered: bool) -> Part:
    schema, held = manifest.schema, manifest.parts[part]
    lists = tuple(_open_lists(folder, manifest, part, index, scattered) for index in range(len(schema.relations)))
    tables: dict[tuple[TypeKey, str], Table] = {}
    for index, relation in enumerate(schema.relations):
        for name, stored in relation.fields.items():
            file = layout.edge_file(part, relation, name)
            if needs_fields or (file in manifest.files and os.path.exists(layout.inside(folder, file))):
                shape = (held.num_edges[index], *stored.shape)
                rows = map_array(folder, manifest, file, stored.dtype, shape, scattered=scattered)
                tables[relation.key, name] = Table(rows, held.first_edges[index])
    return Part(schema, held.first_nodes, held.num_nodes, lists, tables, {})


def _open_lists(folder: Path, manifest: Manifest, part: int, index: int, scattered: bool) -> EdgeLists:
    schema, held = manifest.schema, manifest.parts[part]
    relation = schema.relations[index]
    destination = schema.destinations[index]
    num_nodes, num_edges = held.num_nodes[destination], held.num_edges[index]
    source = schema.node_types[schema.sources[index]]
    timed = schema.time in relation.fields or schema.time in source.fields
    for name in (schema.weight, schema.time, EDGE_ID):
        field = relation.fields.get(name or "") or (source.fields.get(name or "") if name == schema.time else None)
        if field is not None and math.prod(field.shape) != 1:
            raise StoreError(
                f"{name!r} of {relation.key} has shape {field.shape}, not one number; store.json is damaged"
            )

    def column(name: str, dtype: str, count: int) -> Tensor:
        file = layout.topology_file(part, relation, name)
        return map_array(folder, manifest, file, dtype, (count,), scattered=scattered and name != "indptr")

    indptr = column("indptr", "int64", num_nodes + 1)
    if int(indptr[0]) != 0 or int(indptr[-1]) != num_edges:
        file = layout.topology_file(part, relation, "indptr")
        raise StoreError(f"{file} runs from {int(indptr[0])} to {int(indptr[-1])}, not from 0 to {num_edges}")
    return EdgeLists(
        indptr,
        column("indices", id_dtype(source.num_nodes), num_edges),
        held.first_nodes[destination],
        held.first_edges[index],
        column("weight", "float32", num_edges) if schema.weight in relation.fields else None,
        column("time", "int64", num_edges) if timed else None,
    )


def map_array(
    folder: Path, manifest: Manifest, name: str, dtype: str, shape: tuple[int, ...], *, scattered: bool = False
) -> Tensor:
    """Map one .npy file as a tensor. Writes to the tensor stay in this process."""
    entry = manifest.files.get(name)
    if entry is None:
        raise StoreError(f"{name} is not listed in store.json; copy the store again")
    path, count = layout.inside(folder, name), math.prod(shape)
    try:
        with layout.regular(path).open("rb") as file:
            size = file.seek(0, 2)
            if size != entry.bytes:
                what = f"{name} has {size} bytes, store.json says {entry.bytes}"
                raise StoreError(f"{what}: truncated or changed; copy it again")
            file.seek(0)
            offset = layout.read_npy_header(file, name, dtype, shape)
            needed = count * DTYPES[dtype].itemsize
            if size - offset != needed:
                raise StoreError(f"{name} has {size - offset} bytes of values, {needed} are needed; copy it again")
            pages = MappedFile(file.fileno(), size, os.fsencode(path).decode("utf-8", "replace"))
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise StoreError(f"{name} is missing from {folder}; copy the store again") from error
    except OSError as error:
        raise StoreError(f"{name} of {folder} cannot be read: {error}") from error
    if scattered:
        pages.read_scattered()
    if count == 0:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(pages, dtype=DTYPES[dtype], count=count, offset=offset).view(*shape)


def read_array(path: Path, field: Field) -> Tensor:
    """Read the .npy file `path` into memory, and return its rows as a tensor. Used for files that were just written."""
    return torch.from_numpy(np.load(path, allow_pickle=False)).view(DTYPES[field.dtype])
