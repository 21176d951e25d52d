"""The families of models: convolution, size, and the operations between layers."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch_geometric.nn.resolver import activation_resolver

from hoploom.config.values import as_int, as_number
from hoploom.errors import ConfigError
from hoploom.nn.layers import Aggr, Conv, Ends, GATConv, GCNConv, GINConv, SAGEConv

Act = str | Callable[[Tensor], Tensor] | None  # an activation by name or as a function; None: none
Jumping = Literal["last", "cat", "max"]  # how jumping knowledge joins the layers' rows
OTHER_ACT = "name one of torch.nn's activations, or give a module or None"


@dataclass(frozen=True)
class Shape:
    """The size of a model, and the operations between its layers."""

    hidden: int
    num_layers: int
    out: int
    dropout: float = 0.0
    heads: int = 1  # attention only
    norm: bool | None = False  # a layer norm before each convolution's input
    residual: bool = False  # layers add to their input; a linear layer at both ends
    aggr: Aggr = "mean"  # of "sage", "rsage" and "rgcn"; "sum" for edge weights that sum to one
    act: Act = "relu"  # between layers, by PyG's names; residual models use GELU
    jk: Jumping | None = None  # combine all layers' rows before a last linear layer

    def __post_init__(self) -> None:
        for name in ("hidden", "num_layers", "out", "heads"):
            as_int(name, getattr(self, name), 1, "give a whole number of at least 1")
        if as_number("dropout", self.dropout, "give a share from 0 to 1") > 1:
            raise ConfigError(f"dropout is {self.dropout}; give a share from 0 to 1")
        if self.jk not in (None, *get_args(Jumping)):
            raise ConfigError(f"jk is {self.jk!r}; give 'last', 'cat' or 'max', or take PyG's model for another")
        if not isinstance(self.norm, bool | None):
            raise ConfigError(f"norm is {self.norm!r}; give True, a layer norm before each convolution, or PyG's model")
        if self.residual and (self.jk is not None or self.act != "relu"):
            given = f"act={self.act!r}" if self.jk is None else f"jk={self.jk!r}"
            raise ConfigError(
                f"{given} does not go with residual=True, which adds layers up after GELU; drop one of them"
            )

    @property
    def has_output(self) -> bool:
        """Whether a linear layer follows the last convolution."""
        return self.residual or self.jk is not None


class _Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def activation(act: Act) -> nn.Module:
    """Return PyG's activation of a name, or the given module or function as a module."""
    if act is None:
        return nn.Identity()
    if act == "relu":
        return nn.ReLU(inplace=True)
    try:
        found = activation_resolver(act)
        found = found() if isinstance(found, type) else found
    except (ValueError, TypeError) as error:  # unknown, or one that needs arguments
        raise ConfigError(f"act is {act!r}; {OTHER_ACT}") from error
    if not callable(found):
        raise ConfigError(f"act is {act!r}; {OTHER_ACT}")
    return found if isinstance(found, nn.Module) else _Applied(found)


def check_activation(act: Act, module: nn.Module, width: int) -> None:
    """Raise ConfigError unless the activation keeps the width of rows."""
    tried = copy.deepcopy(module).eval()  # it may have state or randomness
    rows = torch.zeros(2, width)
    try:
        with torch.no_grad():
            out = tried(rows.to(next(tried.parameters(), rows).device))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"act is {act!r}, which fails on rows of {width}: {error}; {OTHER_ACT}") from error
    if not isinstance(out, Tensor) or out.shape != rows.shape:
        raise ConfigError(f"act is {act!r}, which changes the shape of rows of {width}; {OTHER_ACT}")


def _sage(ends: Ends, out: int, shape: Shape, is_last: bool, **options: bool) -> Conv:
    return SAGEConv(ends, out, shape.aggr, **options)


def _gin(ends: Ends, out: int, shape: Shape, *_: Any) -> Conv:
    if ends[0] != ends[1]:
        raise ConfigError(f"GIN adds sources of {ends[0]} channels to destinations of {ends[1]}; use residual=True")
    between = nn.ReLU() if shape.act == "relu" else activation(shape.act)
    return GINConv(nn.Sequential(nn.Linear(ends[0], out), between, nn.Linear(out, out)))


def _gat(ends: int | Ends, out: int, shape: Shape, is_last: bool, **options: bool) -> Conv:
    """Return a GATConv with concatenated heads, or averaged ones in the last layer."""
    if is_last and not shape.has_output:
        return GATConv(ends, out, shape.heads, concat=False, **options)
    if out % shape.heads:
        raise ConfigError(f"hidden={out} does not divide by heads={shape.heads}; give a multiple")
    return GATConv(ends, out // shape.heads, shape.heads, **options)


@dataclass(frozen=True)
class Kind:
    """A family of models."""

    make: Callable[[Ends, int, Shape, bool], Conv]  # (relation's channels, output channels, shape, is last layer)
    has_root: bool = False  # has a linear layer for the destination
    any_relations: bool = True  # works between different node types
    any_aggr: bool = False  # uses the `aggr` of its shape
    has_heads: bool = False  # of attention


KINDS: dict[str, Kind] = {
    "sage": Kind(_sage, any_aggr=True),
    "gcn": Kind(lambda ends, out, *_: GCNConv(ends[0], out), any_relations=False),
    "gat": Kind(lambda ends, *rest: _gat(ends[0], *rest), any_relations=False, has_heads=True),
    "gin": Kind(_gin),
    "rsage": Kind(_sage, any_aggr=True),
    "rgcn": Kind(partial(_sage, root_weight=False, bias=False), has_root=True, any_aggr=True),
    "rgat": Kind(lambda *given: _gat(*given, add_self_loops=False), has_root=True, has_heads=True),
}
