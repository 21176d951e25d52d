"""Call any model with a batch: with the batch itself, or with the fields that forward's arguments name.

The signature of forward is read once; each batch then costs one look-up per argument. A wrong feature width raises an
error before the first layer if the model has `in_channels`; otherwise, the error names the layer that failed.
"""

import inspect
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import Sequential
from torch_geometric.nn.models.basic_gnn import BasicGNN

from hoploom.errors import ConfigError, HoploomError
from hoploom.load.assemble import Batch
from hoploom.nn import GNN, GraphSAGE
from hoploom.ranks.context import unwrap
from hoploom.schema import FEATURES
from hoploom.train.checkpoint import check_whole
from hoploom.train.tasks import NodeTask, Task

FIELDS = {"num_sampled_nodes_per_hop": "num_sampled_nodes", "num_sampled_edges_per_hop": "num_sampled_edges"}
COUNTS = NODES, EDGES = "num_sampled_nodes", "num_sampled_edges"  # per hop; PyG's models trim with them
WEIGHTS = ("edge_weight", "edge_attr")
INPUTS = frozenset((FEATURES, "edge_index", *WEIGHTS, *COUNTS))
ABOUT_A_BATCH = re.compile(r"\b(Hetero)?Data\b|'(Global|Base|Node|Edge)Storage'")
PRODUCT = re.compile(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")


@dataclass(frozen=True)
class Argument:
    """One argument of a model's forward."""

    name: str
    is_required: bool = True
    is_positional: bool = False  # positional-only

    @cached_property
    def field(self) -> str:
        """The batch field that the argument gets; an argument named `x_dict` gets the field `x` of every type."""
        name = self.name.removesuffix("_dict")
        return FIELDS.get(name, name)


class BatchAdapter(nn.Module):
    """A wrapper that calls a model with a batch, or with the batch's fields that the model's forward names.

    >>> outputs = BatchAdapter(torch_geometric.nn.GraphSAGE(100, 256, 2, 47))(batch)
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.called_model = model
        own = unwrap(model)
        self._own = (own,)  # in a tuple: torch would register a plain attribute as a second submodule
        arguments = _arguments_of(own)
        optional = {FEATURES, "edge_index", *WEIGHTS}
        if isinstance(own, (BasicGNN, GraphModule)):
            optional -= {"edge_attr"} if all(getattr(m, "edge_dim", None) is None for m in own.modules()) else set()
        self._arguments = [one for one in arguments if one.is_required or one.field in optional]
        # A forward that requires at most one argument, and names no field of a batch, gets the batch itself.
        required = [one for one in arguments if one.is_required]
        if len(required) <= 1 and not any(one.field in INPUTS for one in required or arguments):
            self._arguments = []
        self._is_known = bool(arguments)
        self._positional = [one.name for one in arguments if one.is_positional]
        self.takes_counts = any(one.field in COUNTS for one in self._arguments)
        self.takes_links = any(one.field == "edge_label_index" for one in self._arguments)
        self._is_new = True

    def forward(self, *given: Any, **named: Any) -> Any:
        """Return the model's output for a batch, or for any other arguments, which go to the model unchanged."""
        if named or len(given) != 1 or not isinstance(given[0], (Data, HeteroData)):
            return self.called_model(*given, **named)
        batch: Batch = given[0]
        if self._is_new and _is_built_in(own := self._own[0]) and FEATURES in batch and isinstance(batch, Data):
            given_width: Any = own.in_channels
            wanted, found = given_width if isinstance(given_width, int) else given_width[0], batch[FEATURES].shape[-1]
            if wanted not in (-1, found):
                message = f"the model has in_channels={wanted} for features x of {found}; give it in_channels={found}"
                raise ConfigError(message)
        self._is_new = False
        values = self._values(batch)
        try:
            if not values:
                return self.called_model(batch)
            first = list(takewhile(values.__contains__, self._positional))
            others = {name: value for name, value in values.items() if name not in self._positional}
            return self.called_model(*(values[name] for name in first), **others)
        except HoploomError:
            raise
        except (RuntimeError, TypeError, AttributeError, ValueError) as error:
            explained = _explained(error, self._own[0], batch, values)
            of_the_call = not isinstance(error, RuntimeError) and not values
            if explained is None and of_the_call and (not self._is_known or ABOUT_A_BATCH.search(str(error))):
                fields = list(dict.fromkeys(key for storage in batch.stores for key in storage))
                explained = ConfigError(
                    f"{type(self._own[0]).__name__}.forward was called with the batch, which has {fields}, and failed "
                    f"({error!s:.200}); write forward(self, batch), or name the fields to be called with: "
                    "forward(self, x) for the features alone, forward(self, x, edge_index) for the edges, too"
                )
            if explained is None:
                raise
            raise explained from error

    def _values(self, batch: Batch) -> dict[str, Any]:
        """Return forward's arguments by name; raise ConfigError if the batch lacks the field of a required argument."""
        fields = {one.field: _field_of(batch, one.field) for one in self._arguments}
        values = {}
        for one in self._arguments:
            if one.field in COUNTS and not _counts_hold(batch):
                raise ConfigError(
                    f"{type(self._own[0]).__name__}.forward takes {one.name!r}, but the loader's transform changed the "
                    "nodes or edges, so num_sampled_nodes and num_sampled_edges no longer match; leave the argument "
                    "out, or do not add or remove nodes and edges in the transform"
                )
            is_needed = one.is_required or one.field == "edge_index"  # no model is meant to run without edges
            mistyped = one.name.endswith("_dict") and not isinstance(batch, HeteroData)
            if is_needed and (mistyped or fields[one.field] is None):
                is_dict = isinstance(batch, HeteroData)
                names = dict.fromkeys(key for s in batch.stores if s._key or not is_dict for key in s)
                known = [f"{field}_dict" if is_dict else field for field in names]
                way_out = "give the loader mode='subgraph', " if "blocks" in batch else ""
                raise ConfigError(
                    f"{type(self._own[0]).__name__}.forward takes {one.name!r}, and the batches have {known}; "
                    f"{way_out}name its arguments so, or let it take one argument, the batch"
                )
            if fields[one.field] is not None:
                values[one.name] = fields[one.field]
        return values


def adapted(model: nn.Module) -> nn.Module:
    """Return a module to call with a batch: `model` itself if it is a GNN of hoploom.nn, else a BatchAdapter of it."""
    check_whole(model)
    return model if isinstance(unwrap(model), GNN) else BatchAdapter(model)


def without_ddp(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, or `model` if there is no DDP. DDP's own forward may wait for other ranks."""
    inner: Any = model
    while isinstance(getattr(inner, "_orig_mod", None), nn.Module):
        inner = inner._orig_mod
    return inner.module if isinstance(inner, DistributedDataParallel) else model


def _arguments_of(model: nn.Module) -> list[Argument]:
    """Return the named arguments of the model's forward; empty if forward has *args and **kwargs only."""
    if isinstance(model, Sequential):
        return [Argument(name) for name in model.signature.param_dict]
    forward: Any = model.forward
    if isinstance(model, torch.jit.ScriptModule):
        return [Argument(one.name, not one.has_default_value()) for one in forward.schema.arguments[1:]]
    parameters = inspect.signature(forward).parameters.values()
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return [Argument(one.name, one.default is one.empty, one.kind == one.POSITIONAL_ONLY) for one in named]


def _field_of(batch: Batch, field: str) -> Any:
    """Return a field of a batch, as a dict by type if the batch is heterogeneous; None if no type has the field."""
    if not isinstance(batch, HeteroData):
        return batch._store.get(field, None)
    return {storage._key: storage[field] for storage in batch.stores if storage._key and field in storage} or None


def _counts_hold(batch: Batch) -> bool:
    """Return whether num_sampled_nodes and num_sampled_edges add up to the batch's size. A transform may change it."""
    rows = [(NODES, FEATURES, 0, storage) for storage in batch.node_stores]
    edges = [(EDGES, "edge_index", 1, storage) for storage in batch.edge_stores]
    return all(
        sum(storage[counts]) == storage[field].shape[axis]
        for counts, field, axis, storage in rows + edges
        if counts in storage and field in storage
    )


# --- errors --------------------------------------------------------------------------------------


def check_outputs(model: nn.Module, task: Task) -> None:
    """Raise ConfigError if a built-in model's `out_channels` is not the number of outputs that a node task needs."""
    module = unwrap(model)
    if not (isinstance(task, NodeTask) and _is_built_in(module)) or task.is_first:
        return
    (wanted, what), found = task.columns, module.out_channels
    if found != wanted:
        raise ConfigError(f"the model has out_channels={found} for {wanted} {what}; give it out_channels={wanted}")


def _is_built_in(module: nn.Module) -> bool:
    """Return whether this is a GNN of hoploom.nn or a BasicGNN of PyG whose forward is not overridden."""
    return isinstance(module, (GNN, BasicGNN)) and type(module).forward in (
        GNN.forward,
        GraphSAGE.forward,
        BasicGNN.forward,
    )


def _explained(error: Exception, model: nn.Module, batch: Batch, values: Mapping[str, Any]) -> ConfigError | None:
    """Return an error that explains why the call of the model failed; None if the cause is unknown."""
    if (product := PRODUCT.search(str(error))) is not None:
        names = {id(module): f" {name!r}" for name, module in model.named_modules() if name}
        owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        layers = [names[id(owner)] for owner in owners if id(owner) in names]  # the innermost is last
        widths = ", ".join(
            f"{storage[FEATURES].shape[-1]}{f' ({storage._key})' * bool(storage._key)}"
            for storage in batch.node_stores
            if FEATURES in storage
        )
        return ConfigError(
            f"layer{layers[-1] if layers else ''} of {type(model).__name__} takes rows of {product[2]} and got rows of "
            f"{product[1]}; x has {widths}"
        )
    is_typed = isinstance(model, GraphModule) or any(name.endswith("_dict") for name in values)
    if not isinstance(batch, HeteroData) or is_typed or not values:
        return None
    return ConfigError(
        f"{type(model).__name__}.forward takes {list(values)} and fails where they are dictionaries by type, as these "
        f"batches are heterogeneous ({error!s:.200}); make it with torch_geometric.nn.to_hetero(model, data.metadata())"
    )
