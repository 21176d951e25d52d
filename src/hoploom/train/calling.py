"""Call any model with a batch: with the batch itself, or with the fields that forward's arguments name.

The signature of forward is read once; each batch then costs a look-up per argument. A wrong width raises before the
first matrix product where the model has `in_channels`; else the product that fails is explained by its layer's name.
"""

import inspect
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv, GATv2Conv, GINConv, SAGEConv, Sequential
from torch_geometric.nn.models.basic_gnn import BasicGNN

from hoploom.errors import ConfigError, HoploomError
from hoploom.load.assemble import FEATURES, Batch
from hoploom.load.loader import Loader
from hoploom.nn import GNN
from hoploom.ranks.context import unwrap
from hoploom.train.sharding import check_sharding
from hoploom.train.tasks import NodeTask, Task

FIELDS = {"num_sampled_nodes_per_hop": "num_sampled_nodes", "num_sampled_edges_per_hop": "num_sampled_edges"}
TRIMS = NODES, EDGES = "num_sampled_nodes", "num_sampled_edges"
TRIMMED = (SAGEConv, GATConv, GATv2Conv, GINConv)  # look at nothing but a destination's own list
BY_ROW_NORMS = (nn.Identity, nn.LayerNorm)
BY_ROW_ACTIVATIONS = (type(None), nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh)
WEIGHTS = ("edge_weight", "edge_attr")
INPUTS = frozenset((FEATURES, "edge_index", *WEIGHTS, *TRIMS))
LINKS = "edge_label_index"
ON_A_BATCH = re.compile(r"\b(Hetero)?Data\b|'(Global|Base|Node|Edge)Storage'")
PRODUCT = re.compile(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")


@dataclass(frozen=True)
class Argument:
    """One argument of a model's forward."""

    name: str
    is_required: bool = True
    is_positional: bool = False  # and cannot be given by name

    @cached_property
    def field(self) -> str:
        """The batch's field of that name; `x_dict` means the field `x` of every type."""
        name = self.name.removesuffix("_dict")
        return FIELDS.get(name, name)


class Called(nn.Module):
    """A model that is called with a batch, whatever its forward takes.

    >>> outputs = Called(torch_geometric.nn.GraphSAGE(100, 256, 2, 47))(batch)
    """

    def __init__(self, model: nn.Module, *, is_transformed: bool = False) -> None:
        super().__init__()
        self.called_model = model
        own = unwrap(model)
        self._own = (own,)  # a tuple, or torch would list the module a second time
        arguments = arguments_of(own)
        served = _served(own, is_transformed=is_transformed)
        self._arguments = [one for one in arguments if one.is_required or one.field in served]
        if takes_the_batch(arguments):
            self._arguments = []
        self._is_known = bool(arguments)
        self._positional = [one.name for one in arguments if one.is_positional]
        self.takes_links = any(one.field == LINKS for one in self._arguments)
        self._num_layers = (
            len(list(convs.children())) if isinstance(convs := getattr(own, "convs", None), nn.Module) else 0
        )
        self._is_new = True

    def forward(self, *given: Any, **named: Any) -> Any:
        """What the model makes of a batch; anything else goes to it as it is."""
        if named or len(given) != 1 or not isinstance(given[0], (Data, HeteroData)):
            return self.called_model(*given, **named)
        batch: Batch = given[0]
        if self._is_new:
            _check_width(self._own[0], batch)
            self._is_new = False
        fields = self._given(batch)
        try:
            return self._call(fields) if fields else self.called_model(batch)
        except HoploomError:
            raise
        except (RuntimeError, TypeError, AttributeError, ValueError) as error:
            explained = _explained(error, self._own[0], batch, fields)
            is_of_call = not isinstance(error, RuntimeError) and not fields
            if explained is None and is_of_call and (not self._is_known or ON_A_BATCH.search(str(error))):
                explained = _uncallable(error, self._own[0], batch)
            if explained is None:
                raise
            raise explained from error

    def _call(self, fields: dict[str, Any]) -> Any:
        first = list(takewhile(fields.__contains__, self._positional))
        named = {name: value for name, value in fields.items() if name not in self._positional}
        return self.called_model(*(fields[name] for name in first), **named)

    def _given(self, batch: Batch) -> dict[str, Any]:
        """The arguments by name."""
        fields = {one.field: _values(batch, one.field) for one in self._arguments}
        left_out = () if self._fits_trimming(fields, batch) else TRIMS
        given = {}
        for one in self._arguments:
            if one.is_required and one.field in left_out and not _counts_hold(batch):
                raise ConfigError(
                    f"{type(self._own[0]).__name__}.forward takes {one.name!r}, but the loader's transform changed the "
                    "nodes or edges, so num_sampled_nodes and num_sampled_edges no longer match; leave the argument "
                    "out, or do not add or remove nodes and edges in the transform"
                )
            is_needed = one.is_required or one.field == "edge_index"  # no model means to do without all edges
            mistyped = one.name.endswith("_dict") and not isinstance(batch, HeteroData)
            if is_needed and (mistyped or fields[one.field] is None):
                raise _unserved(self._own[0], one.name, batch)
            if fields[one.field] is not None and (one.is_required or one.field not in left_out):
                given[one.name] = fields[one.field]
        return given

    def _fits_trimming(self, fields: Mapping[str, Any], batch: Batch) -> bool:
        """Whether PyG can trim: a hop for every layer, whose counts hold, and one kind of edge weights."""
        hops = fields.get(EDGES)
        is_weighed_twice = all(fields.get(name) is not None for name in WEIGHTS)
        return hops is None or (len(hops) >= self._num_layers and not is_weighed_twice and _counts_hold(batch))


def called(model: nn.Module, loader: Loader) -> nn.Module:
    """What to call with the loader's batches: the model itself where it is one of ours."""
    check_sharding(model)
    is_transformed = getattr(getattr(loader, "maker", None), "transform", None) is not None
    return model if isinstance(unwrap(model), GNN) else Called(model, is_transformed=is_transformed)


def beneath_ddp(model: nn.Module) -> nn.Module:
    """The model without DDP, whose forward may wait for other ranks; what torch.compile made of it stays."""
    inner: Any = model
    while isinstance(getattr(inner, "_orig_mod", None), nn.Module):
        inner = inner._orig_mod
    return inner.module if isinstance(inner, DistributedDataParallel) else model


def takes_the_batch(arguments: Sequence[Argument]) -> bool:
    """Whether a forward of these arguments is called with the batch itself.

    So it is where it names nothing, or needs a single argument that is no field by its name. One that is called `x`
    gets the features. Where all have defaults, one name of a field is enough for fields.
    """
    required = [one for one in arguments if one.is_required]
    return len(required) <= 1 and not any(one.field in INPUTS for one in required or arguments)


def arguments_of(model: nn.Module) -> list[Argument]:
    """What forward takes, without *args and **kwargs; nothing where that cannot be known."""
    if isinstance(model, Sequential):
        return [Argument(name) for name in model.signature.param_dict]
    forward: Any = model.forward
    if isinstance(model, torch.jit.ScriptModule):
        return [Argument(one.name, not one.has_default_value()) for one in forward.schema.arguments[1:]]
    parameters = inspect.signature(forward).parameters.values()
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return [Argument(one.name, one.default is one.empty, one.kind == one.POSITIONAL_ONLY) for one in named]


def _values(batch: Batch, field: str) -> Any:
    """A field of a batch; None where it has none."""
    if not isinstance(batch, HeteroData):
        return batch._store.get(field, None)
    found = {storage._key: storage[field] for storage in batch.stores if storage._key and field in storage}
    return found or None


def _unserved(model: nn.Module, name: str, batch: Batch) -> ConfigError:
    is_dict = isinstance(batch, HeteroData)
    fields = [key for storage in batch.stores if storage._key or not is_dict for key in storage]
    known = [f"{field}_dict" if is_dict else field for field in dict.fromkeys(fields)]
    way_out = "give the loader mode='subgraph', " if "blocks" in batch else ""
    return ConfigError(
        f"{type(model).__name__}.forward takes {name!r}, and the batches have {known}; {way_out}name its arguments so, "
        "or let it take one argument, the batch"
    )


def _uncallable(error: Exception, model: nn.Module, batch: Batch) -> ConfigError:
    fields = list(dict.fromkeys(key for storage in batch.stores for key in storage))
    return ConfigError(
        f"{type(model).__name__}.forward was called with the batch, which has {fields}, and failed ({error!s:.200}); "
        "write forward(self, batch), or name the fields to be called with: forward(self, x) for the features alone, "
        "forward(self, x, edge_index) for the edges, too"
    )


def _served(model: nn.Module, *, is_transformed: bool) -> frozenset[str]:
    """The fields that arguments with a default are given, too."""
    unserved = set() if not is_transformed and _trim_changes_nothing(model) else set(TRIMS)
    is_of_pyg = isinstance(model, (BasicGNN, GraphModule))
    if is_of_pyg and all(getattr(module, "edge_dim", None) is None for module in model.modules()):
        unserved.add("edge_attr")
    return INPUTS.difference(unserved)


# --- trimming ------------------------------------------------------------------------------------


def _trim_changes_nothing(model: nn.Module) -> bool:
    """Whether no seed's row changes where PyG's own model leaves rows out that no seed needs.

    Not for GCN, which asks for the sources' degrees, nor where something may look at all rows: jumping knowledge, and
    every norm and activation that is not known to look at one row at a time.
    """
    if not isinstance(model, BasicGNN) or hasattr(model, "jk") or not isinstance(model.act, BY_ROW_ACTIVATIONS):
        return False
    by_row = all(isinstance(norm, BY_ROW_NORMS) for norm in model.norms)
    by_row = by_row and not any(isinstance(module, _BatchNorm) for module in model.modules())
    return by_row and all(isinstance(conv, TRIMMED) for conv in model.convs)


def _counts_hold(batch: Batch) -> bool:
    """Whether the counts per hop add up to the rows and edges of the batch, which a transform may have changed."""
    rows = [(NODES, FEATURES, 0, storage) for storage in batch.node_stores]
    edges = [(EDGES, "edge_index", 1, storage) for storage in batch.edge_stores]
    return all(
        sum(storage[counts]) == storage[field].shape[axis]
        for counts, field, axis, storage in rows + edges
        if counts in storage and field in storage
    )


# --- widths --------------------------------------------------------------------------------------


def check_outputs(model: nn.Module, task: Task) -> None:
    """Raise ConfigError for a model that says that it has another number of outputs than the task has."""
    module = unwrap(model)
    if not (isinstance(task, NodeTask) and _is_plain(module)):
        return
    (wanted, what), found = task.columns, module.out_channels
    if found != wanted:
        raise ConfigError(f"the model has out_channels={found} for {wanted} {what}; give it out_channels={wanted}")


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a whole model of ours or PyG's, with a forward of its kind."""
    return isinstance(module, (GNN, BasicGNN)) and type(module).forward in (GNN.forward, BasicGNN.forward)


def _check_width(module: nn.Module, batch: Batch) -> None:
    if not _is_plain(module) or FEATURES not in batch or isinstance(batch, HeteroData):
        return
    given: Any = module.in_channels
    wanted, found = given if isinstance(given, int) else given[0], batch[FEATURES].shape[-1]
    if wanted not in (-1, found):
        raise ConfigError(f"the model has in_channels={wanted} for features x of {found}; give it in_channels={found}")


def _explained(error: Exception, model: nn.Module, batch: Batch, given: Mapping[str, Any]) -> ConfigError | None:
    """What was wrong with a call, where that can be known."""
    product = PRODUCT.search(str(error))
    if product is not None:
        return ConfigError(
            f"{_layer_of(error, model)} takes rows of {product[2]} and got rows of {product[1]}; {_widths(batch)}"
        )
    is_typed = isinstance(model, GraphModule) or any(name.endswith("_dict") for name in given)
    if not isinstance(batch, HeteroData) or is_typed or not given:
        return None
    return ConfigError(
        f"{type(model).__name__}.forward takes {list(given)} and fails where they are dictionaries by type, as these "
        f"batches are heterogeneous ({error!s:.200}); make it with torch_geometric.nn.to_hetero(model, data.metadata())"
    )


def _layer_of(error: Exception, model: nn.Module) -> str:
    """The innermost layer that was called when it failed."""
    names = {id(module): f" {name!r}" for name, module in model.named_modules() if name}
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [names[id(owner)] for owner in owners if id(owner) in names]
    return f"layer{found[-1] if found else ''} of {type(model).__name__}"


def _widths(batch: Batch) -> str:
    stores = [storage for storage in batch.node_stores if FEATURES in storage]
    return "x has " + ", ".join(
        f"{storage[FEATURES].shape[-1]}{f' ({storage._key})' * bool(storage._key)}" for storage in stores
    )
