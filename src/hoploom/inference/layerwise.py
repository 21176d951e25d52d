"""Models that run one layer at a time over a whole graph: the plan of their layers, and the passes over all nodes.

A plan is made by running the model once on one row per node type, before anything is read or written. If a layer
projects or normalises its source rows, an extra pass does so, once per source, and writes a file. The nodes of each
type are divided into slices that fit in memory. If not all nodes of a type are mapped, the in-edges of a slice are
sampled from the store, and the size of a slice is estimated from the average degree.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import ConfigError, StoreError
from hoploom.inference.files import Gather, RowFile, SharedFolder
from hoploom.nn.layers import ReadEdges, weighted_degrees, with_fields
from hoploom.nn.models import GNN
from hoploom.nn.relational import Rows
from hoploom.ops import Frontier, InEdges
from hoploom.schema import DTYPES, FEATURES, RelationName, Schema, TypeKey
from hoploom.store import Draw, Part, Sharded, Store, Wanted
from hoploom.store.base import covers


@dataclass(frozen=True)
class Slice:
    """Nodes of one type with consecutive ids. If the parts are memory-mapped, all these nodes are in one part."""

    node_type: str
    first: int
    end: int
    part: Part | None  # the mapped part with its edges; None: edges are sampled from the store

    @property
    def span(self) -> slice:
        return slice(self.first, self.end)

    @property
    def ids(self) -> Tensor:
        return torch.arange(self.first, self.end)

    def __len__(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Slices:
    """The division of all nodes into slices; each node is in one slice, and each slice belongs to one rank."""

    store: Store
    relations: Sequence[RelationName]  # those whose in-edges a slice needs
    memory: int  # most bytes of a slice's rows and in-edges
    row_bytes: Mapping[str, int]  # by node type
    edge_bytes: int

    def borders(self, node_type: str, world_size: int) -> Tensor:
        """Divide a type's nodes among ranks in shares of equal bytes; return the bounds: [world_size + 1] int64."""
        index = self.store.schema.type_index[node_type]
        nodes, cost = range(self.store.schema.node_types[index].num_nodes), partial(self._cost, index)
        total = cost(len(nodes))
        return torch.tensor([bisect_left(nodes, total * n // world_size, key=cost) for n in range(world_size + 1)])

    def of(self, node_type: str, first: int, end: int) -> Iterator[Slice]:
        """Yield the slices of the nodes `first` to `end` of a type, in order."""
        index = self.store.schema.type_index[node_type]
        count, cost = self.store.schema.node_types[index].num_nodes, partial(self._cost, index)
        pieces: list[tuple[int, int, Part | None]] = [(0, count, None)]
        if self._is_mapped[index]:
            pieces = [(part.first_nodes[index], part.num_nodes[index], part) for part in self.store.parts]
        for begin, size, part in pieces:
            at, last = max(first, begin), min(end, begin + size)
            while at < last:
                fits = bisect_right(range(last + 1), cost(at) + self.memory, lo=at + 1, key=cost) - 1
                some = Slice(node_type, at, max(fits, at + 1), part)
                yield some
                at = some.end

    def _cost(self, index: int, node: int) -> int:
        """Return the bytes of the rows and in-edges of all nodes before `node`; `index` is that of the node type."""
        schema, relations = self.store.schema, [self.store.schema.relation_index[key] for key in self.relations]
        num_edges = sum(self._edges_before(one, node) for one in relations if schema.destinations[one] == index)
        return num_edges * self.edge_bytes + node * self.row_bytes[schema.node_types[index].name]

    def _edges_before(self, relation: int, node: int) -> int:
        """Return a relation's number of edges to the nodes before `node`, estimated if the nodes are not mapped."""
        schema, parts = self.store.schema, self.store.parts
        destination = schema.destinations[relation]
        if not self._is_mapped[destination]:
            return schema.relations[relation].num_edges * node // max(1, schema.node_types[destination].num_nodes)
        owner = bisect_right(parts, node - 1, key=lambda part: part.first_nodes[destination]) - 1
        lists = parts[max(0, owner)].lists[relation]
        return lists.first_edge + int(lists.indptr[node - lists.first_node])

    @cached_property
    def _is_mapped(self) -> list[bool]:
        """For each node type, whether the mapped parts have all its nodes."""
        schema, parts = self.store.schema, self.store.parts
        return [bool(parts) and covers(schema, parts, node_type.name) for node_type in schema.node_types]


# --- edges of a slice -------------------------------------------------------------------------


class SliceLists(NamedTuple):
    """The in-edges of a slice in one relation: sources and positions in the store."""

    indptr: Tensor  # [nodes + 1] int64
    sources: Tensor  # [num_edges]
    positions: range | Tensor  # [num_edges] int64


def edges_of(
    store: Store,
    some: Slice,
    keys: Sequence[RelationName],
    degrees: Mapping[RelationName, Tensor],
    reads: Mapping[RelationName, ReadEdges],
) -> dict[RelationName, InEdges]:
    """Return all in-edges of a slice's nodes, by relation. Sources are given by their ids in the store."""
    lists = _sampled(store, some, keys) if some.part is None else _mapped(some.part, some, keys)
    edges = {}
    for key, (indptr, sources, positions) in lists.items():
        num_sources, first = store.schema.node_type(key[0]).num_nodes, some.first if key[0] == key[2] else 0
        edges[key] = InEdges(indptr, sources, num_sources, None, first, degrees.get(key))
        if key in reads:
            rows = _edge_rows(store, some.part, key, reads[key].names, positions)
            edges[key] = with_fields(edges[key], rows, *reads[key])
    return edges


def _edge_rows(
    store: Store, part: Part | None, key: RelationName, names: Sequence[str], positions: range | Tensor
) -> dict[str, Tensor]:
    """Return rows of edge fields: of a mapped part, its consecutive rows without a copy; else gathered ones."""
    rows, ids = dict[str, Tensor](), positions
    if isinstance(ids, range):
        for name in names:
            table = None if part is None else part.tables.get((key, name))
            if table is not None and not table.by_edge_id:
                rows[name] = table.rows[ids.start - table.first : ids.stop - table.first]
                ops.read_soon(rows[name])
        ids = torch.arange(ids.start, ids.stop)
    wanted = [Wanted(key, name, ids) for name in names if name not in rows]
    return rows | dict(zip((want.field for want in wanted), store.features.gather(wanted), strict=True))


def _mapped(part: Part, some: Slice, keys: Sequence[RelationName]) -> dict[RelationName, SliceLists]:
    found = {}
    for key in keys:
        lists = part.lists[part.schema.relation_index[key]]
        indptr = lists.indptr[some.first - lists.first_node : some.end - lists.first_node + 1]
        begin, end = int(indptr[0]), int(indptr[-1])
        ops.read_soon(lists.indices[begin:end])
        positions = range(lists.first_edge + begin, lists.first_edge + end)
        found[key] = SliceLists(indptr - begin, lists.indices[begin:end], positions)
        ops.require_whole([lists.indptr])
    return found


def _sampled(store: Store, some: Slice, keys: Sequence[RelationName]) -> dict[RelationName, SliceLists]:
    schema = store.schema
    frontiers = [Frontier(some.ids) if name == some.node_type else None for name in schema.type_index]
    fanouts = [-1 if relation.key in keys else 0 for relation in schema.relations]
    picks = store.graph.sample(frontiers, Draw(key=0, hop=0, fanouts=fanouts))
    found = {}
    for key in keys:
        picked = picks[schema.relation_index[key]]
        assert picked is not None
        indptr = torch.zeros(len(some) + 1, dtype=torch.int64)
        torch.cumsum(picked.counts, 0, out=indptr[1:])
        found[key] = SliceLists(indptr, picked.sources, picked.edges)
    return found


# --- sources of a slice -----------------------------------------------------------------------


def gather_sources(
    key: RelationName, rows: Tensor, gather: Gather, some: Slice, edges: InEdges
) -> tuple[Tensor, InEdges]:
    """Read the rows of a slice's sources with `gather`. Return them, and the edges with sources numbered as these.

    Of `rows`, which may exceed memory, only shape and dtype are used. If source and destination type are equal, the
    slice's own nodes come first; then come the other sources in the order of their ids.
    """
    first, end = (some.first, some.end) if key[0] == key[2] else (0, 0)
    sources = edges.sources.to(torch.int64)
    is_own = (sources >= first) & (sources < end)
    others: Tensor = torch.unique(sources[~is_own])
    own, num_own = torch.arange(first, end), end - first
    found = ops.empty((num_own + len(others), rows.shape[1]), rows.dtype)
    gather([own, others], [found[:num_own], found[num_own:]])
    at = torch.where(is_own, sources - first, torch.searchsorted(others, sources) + num_own)
    degrees = None if edges.source_degrees is None else edges.source_degrees[torch.cat([own, others])]
    return found, replace(edges, sources=at, num_sources=len(found), first=0, source_degrees=degrees)


Group = tuple[str, Tensor, dict[str, Tensor]]  # a node type, some nodes of it, and their rows by column
Progress = Callable[[int, int], None]  # (rows done, rows in all)
Sources = Mapping[RelationName, tuple[Tensor, Gather | None]]  # rows to aggregate; None, or a function that reads them

PLAIN_EDGE_BYTES, WEIGHED_EDGE_BYTES = 16, 256  # per edge, if rows are aggregated as they are, or weighed


# --- the plan ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerPlan:
    """The widths of the rows that a layer reads, rewrites and computes, by node type or relation."""

    widths: Mapping[str, int]  # the layer's input rows
    rewritten: Mapping[TypeKey, int]  # rows written to files before they are aggregated: by `enter`, or by `project`
    written_as: Mapping[RelationName, RelationName]  # the first relation that sends the same rows of `project`
    sent: Mapping[RelationName, int]  # the rows that relations aggregate
    computed: Mapping[str, int]  # types that get new rows
    kept: frozenset[str]  # types whose rows the layer does not change, and later steps need
    with_degrees: frozenset[RelationName]  # relations that read their sources' degrees

    @property
    def rewritten_types(self) -> list[str]:
        changed = {key if isinstance(key, str) else key[0] for key in self.rewritten}
        return [name for name in self.widths if name in changed]


@dataclass(frozen=True)
class ModelPlan:
    """The plans of all layers of a model, and the widths of its input, embedding and output rows."""

    dtype: torch.dtype
    inputs: Mapping[str, int]  # widths of layer one's input rows
    as_stored: frozenset[str]  # types whose stored features are layer one's input rows, unchanged
    layers: tuple[LayerPlan, ...]  # without the last layer if only its input rows are wanted
    embeddings: Mapping[str, int]  # widths of the rows before the last learned step
    outputs: Mapping[str, int]  # widths of the output rows; none if the last layer is left out
    has_head: bool  # whether `GNN.finish` changes rows

    @property
    def with_degrees(self) -> list[RelationName]:
        """Relations whose convolutions read their sources' degrees in the whole graph."""
        return sorted({key for layer in self.layers for key in layer.with_degrees})

    def row_bytes(self, schema: Schema) -> dict[str, int]:
        """Return, by node type, the most bytes that the rows of one node take at a time, over all layers."""
        found = {}
        for name, width in self.inputs.items():
            fields = schema.node_type(name).fields
            most, stored = width, fields[FEATURES].row_bytes if FEATURES in fields else 0
            for layer in self.layers:
                projected = sum(layer.rewritten.get(key, 0) for key in layer.sent if key[0] == name)
                keys = [key for key in layer.sent if key[2] == name]
                brought = sum(layer.rewritten.get(layer.written_as[key], layer.widths[key[0]]) for key in keys)
                after = max(layer.computed.get(name, 0), self.outputs.get(name, 0))
                most = max(most, 2 * layer.widths.get(name, 0) + max(projected, brought + 3 * after))
            found[name] = max(width * self.dtype.itemsize + stored, most * self.dtype.itemsize)
        return found


def plan_of(model: GNN, schema: Schema, node_types: Collection[str] | None, *, embeds_only: bool) -> ModelPlan:
    """Return the plan for the outputs of `node_types` (None: all). `embeds_only`: only layers that embeddings need."""
    try:
        full = _probe(model, schema, None, skip_last=False)
        wanted = list(full.outputs) if node_types is None else list(node_types)
        unknown = [name for name in wanted if name not in full.outputs]
        if unknown or not wanted:
            raise ConfigError(f"the model has no outputs for {unknown or wanted}; it has some for {list(full.outputs)}")
        return _probe(model, schema, wanted, skip_last=embeds_only and not full.has_head)
    except (RuntimeError, IndexError, KeyError) as error:
        raise ConfigError(f"the model does not fit the store: {error}; make it with store.schema") from error


def _probe(model: GNN, schema: Schema, wanted: Collection[str] | None, *, skip_last: bool) -> ModelPlan:
    x, as_stored = _probe_inputs(model, schema)
    dtype = next(iter(x.values())).dtype
    num_layers, layers = model.num_layers - skip_last, list[LayerPlan]()
    needed = [set(x) if wanted is None else set(wanted)]  # types before each layer, and after the last one
    relations: list[tuple[RelationName, ...]] = []
    for depth in reversed(range(num_layers)):
        keys = tuple(key for key in model.stage(depth).relations if key[2] in needed[0])
        for key in keys:
            schema.relation(key)
        if missing := sorted({key[0] for key in keys} - set(x)):
            raise ConfigError(f"node type {missing[0]!r} has no field {FEATURES!r}, and the model makes no rows for it")
        relations.insert(0, keys)
        needed.insert(0, needed[0] | {key[0] for key in keys})
    x = {name: rows for name, rows in x.items() if name in needed[0]}
    inputs = _widths(x)
    for depth in range(num_layers):
        layer, x = _probe_layer(model, schema, depth, relations[depth], x, needed[depth + 1])
        layers.append(layer)
    finished = {} if skip_last else model.finish(x)
    has_head = any(finished[name] is not x[name] for name in finished)
    return ModelPlan(
        dtype,
        inputs,
        frozenset(as_stored & set(inputs)),
        tuple(layers),
        _widths(x) if has_head or skip_last else {name: layers[-1].widths[name] for name in x},
        _widths(finished),
        has_head,
    )


def _probe_inputs(model: GNN, schema: Schema) -> tuple[dict[str, Tensor], set[str]]:
    """Return one input row per node type, made from zeros, and the types whose features the model takes unchanged."""
    x: dict[str, Tensor] = {}
    as_stored: set[str] = set()
    for node_type in schema.node_types:
        name = node_type.name
        if (field := node_type.fields.get(FEATURES)) is None:
            if name in model.types[0]:
                learned = f"a store with the learned rows of {name!r} (the store of its hoploom.Embedding)"
                raise ConfigError(f"{name!r} has no features x, which the model reads; give {learned}")
            continue
        given = torch.zeros(min(1, node_type.num_nodes), *field.shape, dtype=DTYPES[field.dtype])
        rows = model.prepare({name: given}).get(name)
        if rows is None:
            continue
        if rows.dim() != 2:
            raise ConfigError(f"x of {name!r} has rows of shape {tuple(rows.shape[1:])}; models need one dimension")
        x[name] = rows
        if rows is given:
            as_stored.add(name)
    if not x:
        raise ConfigError(
            f"the model has no outputs for any node type of {list(schema.type_index)}; make it with store.schema"
        )
    dtypes = {rows.dtype for rows in x.values()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
        raise ConfigError(
            f"the model computes in {sorted(map(str, dtypes))}; infer needs one of float32 and float64: model.float()"
        )
    return x, as_stored


def _probe_layer(
    model: GNN, schema: Schema, depth: int, keys: tuple[RelationName, ...], x: Rows, needed: set[str]
) -> tuple[LayerPlan, dict[str, Tensor]]:
    stage, entered = model.stage(depth), model.enter(depth, x)
    written_as = dict[RelationName, RelationName]()
    for key in keys:  # HGT has one layer for all relations
        written_as[key] = next((k for k in written_as if k[0] == key[0] and stage.conv(k) is stage.conv(key)), key)
    z = {key: stage.project(key, entered[key[0]]) for key in keys}
    rewritten, edges, none = dict[TypeKey, int](), dict[RelationName, InEdges](), torch.empty(0, dtype=torch.int32)
    for key, rows in z.items():
        if rows is not entered[key[0]]:
            rewritten[written_as[key]] = rows.shape[1]
        elif rows is not x[key[0]]:
            rewritten[key[0]] = rows.shape[1]
        edges[key] = InEdges(torch.zeros(len(x[key[2]]) + 1, dtype=torch.int64), none, len(x[key[0]]))
        fields = {name: schema.relation(key).fields[name] for name in model.read_of(key).names}
        empty = {name: torch.empty(0, *field.shape, dtype=DTYPES[field.dtype]) for name, field in fields.items()}
        edges[key] = with_fields(edges[key], empty, *model.read_of(key))
    edges = model.encode(edges)
    own = {name: rows for name, rows in x.items() if name in needed}
    out = dict(model.close(depth, stage.propagate(z, {name: entered[name] for name in own}, edges), own))
    computed = {name: rows.shape[1] for name, rows in out.items() if rows is not own[name]}
    kept = frozenset(out) - frozenset(computed)
    read = frozenset(key for key in keys if stage.conv(key).needs_degrees)
    return LayerPlan(_widths(x), rewritten, written_as, _widths(z), computed, kept, read), out


def _widths(x: Mapping[Any, Tensor]) -> dict[Any, int]:
    return {key: rows.shape[1] for key, rows in x.items()}


# --- the passes -------------------------------------------------------------------------------


class LayerWise:
    """Computes a model's rows for all nodes of a store, layer by layer; each rank computes its share of the nodes."""

    def __init__(
        self, model: GNN, plan: ModelPlan, store: Store, memory: int, folder: SharedFolder, progress: Progress
    ) -> None:
        self._model, self._plan, self._store, self._schema = model, plan, store, store.schema
        self._folder, self._progress = folder, progress
        self._on_disk = [_exceed_memory(store, plan.dtype, layer) for layer in plan.layers]
        widths = [plan.inputs[name] for name in plan.as_stored if self._features_on_disk(name)]
        for layer, is_on_disk in zip(plan.layers, self._on_disk, strict=True):
            widths += layer.sent.values() if is_on_disk else ()
        edge_bytes = max(widths, default=0) * plan.dtype.itemsize  # at most one source row per edge
        weighed = any(key in layer.rewritten for layer in plan.layers for key in layer.sent)
        edge_bytes += WEIGHED_EDGE_BYTES if weighed else PLAIN_EDGE_BYTES
        relations = [key for key in store.schema.relation_index if any(key in layer.sent for layer in plan.layers)]
        self._reads = {key: read for key in relations if (read := model.read_of(key)).names}
        edge_bytes += max((self._field_bytes(key) for key in self._reads), default=0)
        slices, ranks = Slices(store, relations, memory, plan.row_bytes(store.schema), edge_bytes), folder.context
        # Ranks may have other parts and budgets: they take the shares that rank 0 counts, and map what all can map.
        shares = {name: ranks.broadcast(slices.borders(name, ranks.world_size)).tolist() for name in plan.inputs}
        self._own = {name: list(slices.of(name, *own[ranks.rank :][:2])) for name, own in shares.items()}
        self._num_between = len(plan.layers) - bool(plan.outputs)  # layers whose rows are written into files
        mapped = {name: self._mapped_features(name) for name in plan.inputs}
        by_rank = ranks.gather(torch.tensor([rows is not None for rows in mapped.values()]))
        by_all = dict(zip(mapped, torch.stack(by_rank).all(dim=0).tolist(), strict=True))
        self._x = {name: rows for name, rows in mapped.items() if rows is not None and by_all[name]}
        self._files: dict[str, RowFile] = {}  # of those rows that were computed
        self._sources: Sources = {}  # of the last layer
        self._degrees: dict[RelationName, Tensor] = {}
        passes = [name for name in plan.inputs if name not in self._x] + sorted({key[2] for key in plan.with_degrees})
        for depth, layer in enumerate(plan.layers):
            passes += [*layer.rewritten_types, *(layer.computed if depth < self._num_between else ())]
        self._done, self._total = 0, sum(len(some) for name in (*passes, *plan.embeddings) for some in self._own[name])

    def _field_bytes(self, key: RelationName) -> int:
        """Return the bytes per edge of the fields that layers read, as stored and as layers get them."""
        fields, width = self._schema.relation(key).fields, self._model.edge_dim(key) or 0
        return sum(fields[name].row_bytes for name in self._reads[key].names) + width * self._plan.dtype.itemsize

    def run(self) -> None:
        """Compute all layers but the last, and write the rows that the last layer aggregates. All ranks call."""
        keys = self._plan.with_degrees
        types = sorted({key[2] for key in keys})
        widths = {key: None if self._weights_of(key) is None else 2 for key in keys}
        counted = self._pass("degrees", "counting edges", widths, types, self._degrees_of)
        self._degrees = {key: file.read() for key, file in counted.items()}
        made = {name: width for name, width in self._plan.inputs.items() if name not in self._x}
        self._files = self._pass("input", "reading features", made, made, self._prepared)
        self._x |= {name: file.read() for name, file in self._files.items()}
        for depth, layer in enumerate(self._plan.layers[: self._num_between]):
            z, rewritten = self._rewrite(depth)
            compute = partial(self.computed, depth, z)
            doing = f"computing layer {depth + 1}"
            files = self._pass(f"rows-{depth}", doing, layer.computed, layer.computed, compute)
            dropped = [self._files.pop(name) for name in list(self._files) if name not in layer.kept]
            for file in [one for one in (*dropped, *rewritten) if not one.header]:
                file.path.unlink(missing_ok=True)
            self._files |= files
            self._x = {name: rows for name, rows in self._x.items() if name in layer.kept}
            self._x |= {name: file.read() for name, file in files.items()}
        if self._plan.outputs:
            self._sources, _ = self._rewrite(self._num_between)

    def results(self) -> Iterator[Group]:
        """Yield (node type, ids, rows by column) for each slice of this rank; before each type, once with no nodes."""
        for name, width in self._plan.embeddings.items():
            widths = {"embedding": width, "output": self._plan.outputs.get(name, 0)}
            empty = {column: torch.empty(0, size, dtype=self._plan.dtype) for column, size in widths.items()}
            yield name, torch.arange(0), empty
            for some in self._slices([name]):
                if not self._plan.outputs:
                    yield name, some.ids, {"embedding": self._x[name][some.span]}
                    continue
                is_new = name in self._plan.layers[-1].computed
                rows = self.computed(self._num_between, self._sources, some) if is_new else {name: self._own_rows(some)}
                embedding = self._own_rows(some) if is_new and not self._plan.has_head else rows[name]
                yield name, some.ids, {"embedding": embedding, "output": self._model.finish(rows)[name]}

    def _pass(
        self,
        name: str,
        doing: str,
        widths: Mapping[Any, int | None],  # by node type, or by relation: of its sources; None: an integer each
        types: Iterable[str],
        compute: Callable[[Slice], Mapping[Any, Tensor]],
    ) -> dict[Any, RowFile]:
        """Write what `compute` returns for this rank's slices of `types`. Ranks share one file per key of `widths`."""
        files = {}
        with self._folder.together(doing), ExitStack() as opened:
            for number, (owner, width) in enumerate(widths.items()):
                count = self._schema.node_type(owner if isinstance(owner, str) else owner[0]).num_nodes
                shape, dtype = ((count,), torch.int64) if width is None else ((count, width), self._plan.dtype)
                files[owner] = opened.enter_context(self.new_file(f"{name}-{number}", shape, dtype))
            for some in self._slices(types):
                for owner, rows in compute(some).items():
                    files[owner].write(some.first, rows)
            for file in [one for one in files.values() if one.header or self._folder.context.world_size > 1]:
                file.sync()
        return files

    def new_file(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> RowFile:
        """Make the file for the rows of a pass."""
        return RowFile(self._folder.scratch / f"{name}.rows", shape, dtype)

    def _slices(self, names: Iterable[str]) -> Iterator[Slice]:
        """Yield this rank's slices of the types `names`; raise StoreError if a mapped file is unreadable."""
        for name in names:
            for some in self._own[name]:
                self._folder.check_peers()
                yield some
                self._store.require_whole()
                self._done += len(some)
                self._progress(self._done, self._total)
        self._store.require_whole()  # also without slices: unreadable edge lists may have led to none

    def _weights_of(self, key: RelationName) -> str | None:
        return self._reads[key].weights if key in self._reads else None

    def _degrees_of(self, some: Slice) -> dict[RelationName, Tensor]:
        """Return, by relation, in-degrees of a slice's nodes without loops, or sums of weights and loops' weights."""
        keys = [key for key in self._plan.with_degrees if key[2] == some.node_type]
        found = dict[RelationName, Tensor]()
        for key, edges in edges_of(self._store, some, keys, {}, self._reads).items():
            if edges.weights is None:
                found[key] = torch.bincount(edges.destinations[~edges.are_loops], minlength=len(some))
            else:
                found[key] = torch.stack(weighted_degrees(edges), dim=1).to(self._plan.dtype)
        return found

    def _prepared(self, some: Slice) -> dict[str, Tensor]:
        return {some.node_type: self._model.prepare({some.node_type: self._features(some)})[some.node_type]}

    def _rewrite(self, depth: int) -> tuple[Sources, Iterable[RowFile]]:
        """Write to files the rows that layer `depth` normalises or projects. Return all source rows, and the files."""
        layer, stage = self._plan.layers[depth], self._model.stage(depth)

        def changed(some: Slice) -> dict[TypeKey, Tensor]:
            name = some.node_type
            rows = self._model.enter(depth, {name: self._own_rows(some)})[name]
            made: dict[TypeKey, Tensor] = {name: rows} if name in layer.rewritten else {}
            return made | {
                key: stage.project(key, rows) for key in layer.sent if key[0] == name and key in layer.rewritten
            }

        doing = f"projecting for layer {depth + 1}"
        files = self._pass(f"sources-{depth}", doing, layer.rewritten, layer.rewritten_types, changed)
        sources: dict[RelationName, tuple[Tensor, Gather | None]] = {}
        for key in layer.sent:
            name, file, gather = key[0], files.get(layer.written_as[key]) or files.get(key[0]), None
            rows = self._x[name] if file is None else file.read()
            file = file or self._files.get(name)
            if depth == 0 and name in self._plan.as_stored and rows is self._x[name] and self._features_on_disk(name):
                gather = _gather_features(self._store, name)
            elif file is not None and self._store.reads is not None and self._on_disk[depth]:
                gather = file.gatherer(self._store.reads)
            sources[key] = rows, gather
        return sources, files.values()

    def _mapped_features(self, node_type: str) -> Tensor | None:
        """Return a type's features if layer one takes them unchanged and one mapped part has them all, else None."""
        if node_type not in self._plan.as_stored or node_type in self._store.learned_types:
            return None
        tables = [part.tables.get((node_type, FEATURES)) for part in self._store.parts]
        num_nodes = self._schema.node_type(node_type).num_nodes
        return next((table.rows for table in tables if table is not None and table.rows.shape[0] == num_nodes), None)

    def _features_on_disk(self, node_type: str) -> bool:
        """Return whether some features of a type are on disk because they exceed the memory budget."""
        store = self._store
        if store.reads is None or node_type in store.learned_types:
            return False
        return not all(shard.in_memory(node_type, FEATURES) for shard in store.shards)

    def _features(self, some: Slice) -> Tensor:
        return self._store.features.gather([Wanted(some.node_type, FEATURES, some.ids)])[0]

    def _own_rows(self, some: Slice) -> Tensor:
        """Return the rows of a slice's nodes that the current layer takes as input."""
        if some.node_type not in self._files and self._features_on_disk(some.node_type):
            return self._features(some)
        rows = self._x[some.node_type][some.span]
        ops.read_soon(rows)
        return rows

    def computed(self, depth: int, z: Sources, some: Slice) -> dict[str, Tensor]:
        """Return the rows that layer `depth` computes for a slice's nodes, by node type; `z` are the source rows."""
        name, own = some.node_type, None
        keys = [key for key in self._plan.layers[depth].sent if key[2] == name]
        edges = self._model.encode(edges_of(self._store, some, keys, self._degrees, self._reads))
        given = dict[RelationName, Tensor]()
        for key in keys:
            rows, gather = z[key]
            given[key] = rows
            if gather is not None:
                given[key], edges[key] = gather_sources(key, rows, gather, some, edges[key])
                own = given[key][: len(some)] if rows is self._x[name] else own
        own_rows = {name: self._own_rows(some) if own is None else own}
        try:
            entered = self._model.enter(depth, own_rows)
            after = self._model.stage(depth).propagate(given, entered, edges)
        except IndexError as error:
            raise StoreError(
                f"in-edges of {name!r} {some.first} to {some.end - 1}: {error}; run hoploom check"
            ) from error
        return {name: self._model.close(depth, after, own_rows)[name]}


def _exceed_memory(store: Store, dtype: torch.dtype, layer: LayerPlan) -> bool:
    """Return whether the rows that a layer aggregates are larger than what the budget leaves beside the topology."""
    if store.budget is None or store.reads is None:
        return False
    num_values = sum(store.schema.node_type(key[0]).num_nodes * width for key, width in layer.sent.items())
    lists = [lists for part in store.parts for lists in part.lists]
    offsets = sum(one.indptr.nbytes for one in lists)
    others = sum(column.nbytes for one in lists for column in one.columns) - offsets
    return num_values * dtype.itemsize > store.budget.num_bytes - offsets - store.budget.lists * others


def _gather_features(store: Store, node_type: str) -> Gather:
    features = (store.unlearned or store).features
    assert isinstance(features, Sharded), "features within a budget are"
    return lambda ids, outs: features.gather_at(
        [Wanted(node_type, FEATURES, one) for one in ids], [None] * len(ids), outs
    )
