"""Models that can run one layer at a time over a whole graph, and plans of what each layer reads and computes.

A plan is made by running the model once on one row per node type, before anything is read or written.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from hoploom.errors import ConfigError
from hoploom.load.assemble import FEATURES
from hoploom.ops import InEdges
from hoploom.schema import DTYPES, NodeType, RelationName, Schema

Rows = Mapping[str, Tensor]  # by node type: [num_nodes, channels]
METHODS = ("num_layers", "prepare", "enter", "stage", "close", "finish")


class Stage(Protocol):
    """The convolutions of a layer."""

    @property
    def relations(self) -> tuple[RelationName, ...]: ...

    def project(self, key: RelationName, x: Tensor) -> Tensor: ...

    def propagate(
        self, z: Mapping[RelationName, Tensor], x_dst: Rows, edges: Mapping[RelationName, InEdges], aggregated: None
    ) -> Mapping[str, Tensor]: ...


class Layered(Protocol):
    """A model in layers, as `hoploom.nn.GNN` is one. All but a stage's `propagate` acts on every row by itself."""

    @property
    def num_layers(self) -> int: ...

    def prepare(self, x: Rows, n_id: Rows) -> Mapping[str, Tensor]: ...

    def enter(self, depth: int, x: Rows) -> Rows: ...

    def stage(self, depth: int) -> Stage: ...

    def close(self, depth: int, rows: Mapping[str, Tensor], own: Rows) -> Mapping[str, Tensor]: ...

    def finish(self, x: Rows) -> Rows: ...


@dataclass(frozen=True)
class LayerPlan:
    """The rows that a layer reads and computes, by their widths."""

    relations: tuple[RelationName, ...]
    entered: Mapping[str, int]  # types whose rows `enter` changes before they are aggregated
    projected: Mapping[RelationName, int]  # relations whose rows `project` changes
    computed: Mapping[str, int]  # types that get new rows
    kept: frozenset[str]  # types whose rows pass it unchanged, and are needed after it
    widths: Mapping[str, int]  # of the rows it starts from

    @property
    def sent(self) -> dict[RelationName, int]:
        """Widths of the rows that relations aggregate."""
        return {key: self.projected.get(key, self.entered.get(key[0], self.widths[key[0]])) for key in self.relations}

    def num_sent_bytes(self, schema: Schema, dtype: torch.dtype) -> int:
        """Return the bytes of these rows of all nodes."""
        return sum(schema.node_type(key[0]).num_nodes * width for key, width in self.sent.items()) * dtype.itemsize

    @property
    def rewritten(self) -> list[str]:
        """The types whose rows are written once more before the layer aggregates them."""
        projected = {key[0] for key in self.projected}
        return [name for name in self.widths if name in self.entered or name in projected]


@dataclass(frozen=True)
class ModelPlan:
    """The rows that a whole model reads and computes."""

    dtype: torch.dtype
    inputs: Mapping[str, int]  # widths of the rows that layer one starts from
    as_stored: frozenset[str]  # types that layer one takes as the features are
    layers: tuple[LayerPlan, ...]  # without the last one where only what it starts from is asked for
    outputs: Mapping[str, int]  # widths of the output rows; none where the last layer is left out
    ends: Mapping[str, int]  # widths of the rows after the last layer, before `finish`
    has_head: bool  # `finish` changes rows
    with_degrees: frozenset[RelationName]  # relations whose convolutions ask for their sources' degrees


def as_layered(model: nn.Module) -> Layered | None:
    """Return the model, if it can be run layer by layer."""
    if not all(hasattr(model, name) for name in METHODS):
        return None
    if model.num_layers < 1:  # type: ignore[operator]
        raise ConfigError(f"the model has num_layers={model.num_layers}; infer needs at least one")
    return model  # type: ignore[return-value]


def plan_of(model: Layered, schema: Schema, node_types: Collection[str] | None, *, embeds_only: bool) -> ModelPlan:
    """Return the plan for rows of these types; None: of all types for which the model has outputs."""
    try:
        full = _probe(model, schema, None, skip_last=False)
        wanted = list(full.outputs) if node_types is None else list(node_types)
        unknown = [name for name in wanted if name not in full.outputs]
        if unknown or not wanted:
            raise ConfigError(f"the model has no outputs for {unknown or wanted}; it has some for {list(full.outputs)}")
        return _probe(model, schema, wanted, skip_last=embeds_only and not full.has_head)
    except (RuntimeError, IndexError, KeyError) as error:
        raise ConfigError(f"the model does not fit the store: {error}; make it with store.schema") from error


@dataclass(frozen=True, eq=False)
class _ProbedEdges(InEdges):
    """The edges of a node without any. Notes whether a layer reads degrees in the whole graph."""

    key: RelationName = ("", "", "")
    with_degrees: set[RelationName] | None = None

    @cached_property
    def in_degrees_of_sources(self) -> Tensor:
        assert self.with_degrees is not None
        self.with_degrees.add(self.key)
        return torch.zeros(self.num_sources, dtype=torch.int64)


def _probe(model: Layered, schema: Schema, wanted: Collection[str] | None, *, skip_last: bool) -> ModelPlan:
    x, as_stored = _probe_inputs(model, schema)
    if not x:
        raise ConfigError(
            f"the model has no outputs for any node type of {list(schema.type_index)}; make it with store.schema"
        )
    dtype = _dtype_of(x)
    needed, relations = _needed(model, schema, wanted, set(x), skip_last)
    x = {name: rows for name, rows in x.items() if name in needed[0]}
    inputs, layers, with_degrees = _widths(x), [], set[RelationName]()
    for depth in range(model.num_layers - skip_last):
        layer, x = _probe_layer(model, depth, relations[depth], (x, needed[depth + 1]), with_degrees)
        layers.append(layer)
    finished = {} if skip_last else model.finish(x)
    has_head = any(finished[name] is not x[name] for name in finished)
    return ModelPlan(
        dtype,
        inputs,
        frozenset(as_stored & set(inputs)),
        tuple(layers),
        _widths(finished),
        _widths(x),
        has_head,
        frozenset(with_degrees),
    )


def _probe_inputs(model: Layered, schema: Schema) -> tuple[dict[str, Tensor], set[str]]:
    """Return the last node's row of every type, and the types whose features the model takes unchanged."""
    x: dict[str, Tensor] = {}
    as_stored: set[str] = set()
    for node_type in schema.node_types:
        given, nodes = _last_node(node_type)
        prepared = model.prepare(given, {node_type.name: nodes})
        if node_type.name in prepared:
            rows = x[node_type.name] = prepared[node_type.name]
            if rows.dim() != 2:
                raise ConfigError(
                    f"x of {node_type.name!r} has rows of shape {tuple(rows.shape[1:])}; models need one dimension"
                )
            if rows is given.get(node_type.name):
                as_stored.add(node_type.name)
    return x, as_stored


def _last_node(node_type: NodeType) -> tuple[dict[str, Tensor], Tensor]:
    nodes = torch.arange(max(0, node_type.num_nodes - 1), node_type.num_nodes)
    if FEATURES not in node_type.fields:
        return {}, nodes
    field = node_type.fields[FEATURES]
    return {node_type.name: torch.zeros(len(nodes), *field.shape, dtype=DTYPES[field.dtype])}, nodes


def _dtype_of(x: Rows) -> torch.dtype:
    dtypes = {rows.dtype for rows in x.values()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
        raise ConfigError(
            f"the model computes in {sorted(map(str, dtypes))}; infer needs one of float32 and float64: model.float()"
        )
    return dtypes.pop()


def _needed(
    model: Layered, schema: Schema, wanted: Collection[str] | None, present: set[str], skip_last: bool
) -> tuple[list[set[str]], list[tuple[RelationName, ...]]]:
    """Return the types whose rows are needed before and after each layer, and the relations of each layer."""
    needed = [set(present) if wanted is None else set(wanted)]
    relations: list[tuple[RelationName, ...]] = []
    for depth in reversed(range(model.num_layers)):
        skipped = skip_last and depth == model.num_layers - 1
        keys = tuple(key for key in model.stage(depth).relations if key[2] in needed[0] and not skipped)
        for key in keys:
            schema.relation(key)
        missing = sorted({key[0] for key in keys} - present)
        if missing:
            raise ConfigError(f"node type {missing[0]!r} has no field {FEATURES!r}, and the model makes no rows for it")
        relations.insert(0, keys)
        needed.insert(0, needed[0] | {key[0] for key in keys})
    return needed, relations


def _probe_layer(
    model: Layered,
    depth: int,
    keys: tuple[RelationName, ...],
    ends: tuple[Rows, set[str]],
    with_degrees: set[RelationName],
) -> tuple[LayerPlan, dict[str, Tensor]]:
    x, needed = ends
    stage, entered = model.stage(depth), model.enter(depth, x)
    z = {key: stage.project(key, entered[key[0]]) for key in keys}
    projected = {key: rows.shape[1] for key, rows in z.items() if rows is not entered[key[0]]}
    changed = {key[0] for key in keys if key not in projected and entered[key[0]] is not x[key[0]]}
    edges = {key: _no_edges(key, x, with_degrees) for key in keys}
    own = {name: rows for name, rows in x.items() if name in needed}
    rows = stage.propagate(z, {name: entered[name] for name in own}, edges, None)
    out = dict(model.close(depth, rows, own))
    computed = {name: rows.shape[1] for name, rows in out.items() if rows is not own[name]}
    widths = {name: entered[name].shape[1] for name in x if name in changed}
    return LayerPlan(keys, widths, projected, computed, frozenset(set(out) - set(computed)), _widths(x)), out


def _no_edges(key: RelationName, x: Rows, with_degrees: set[RelationName]) -> InEdges:
    indptr = torch.zeros(x[key[2]].shape[0] + 1, dtype=torch.int64)
    sources = torch.empty(0, dtype=torch.int32)
    return _ProbedEdges(indptr, sources, x[key[0]].shape[0], key=key, with_degrees=with_degrees)


def _widths(x: Rows) -> dict[str, int]:
    return {name: rows.shape[1] for name, rows in x.items()}
