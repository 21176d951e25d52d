"""The families of models: which convolution a layer has, how large it is, and what stands between two layers."""

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
    """The size of a model, and what is between its layers."""

    hidden: int
    num_layers: int
    out: int
    dropout: float = 0.0
    heads: int = 1  # attention only
    norm: bool | None = False  # a layer norm before each convolution's input
    residual: bool = False  # every layer adds to its input; then a linear layer stands at both ends
    aggr: Aggr = "mean"  # of "sage", "rsage" and "rgcn"; "sum" for edge weights that sum to one
    act: Act = "relu"  # between layers, as PyG names them; residual takes GELU
    jk: Jumping | None = None  # every layer's rows join before a last linear layer

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
    """PyG's activations by name; a module, or any other function, as it is."""
    if act is None:
        return nn.Identity()
    if act == "relu":
        return nn.ReLU(inplace=True)
    try:
        found = activation_resolver(act)
        found = found() if isinstance(found, type) else found
    except (ValueError, TypeError) as error:  # unknown, or made from arguments only
        raise ConfigError(f"act is {act!r}; {OTHER_ACT}") from error
    if not callable(found):
        raise ConfigError(f"act is {act!r}; {OTHER_ACT}")
    return found if isinstance(found, nn.Module) else _Applied(found)


def check_activation(act: Act, module: nn.Module, width: int) -> None:
    """ConfigError unless rows of this width stay as wide."""
    tried = copy.deepcopy(module).eval()  # it may count what it has seen, or draw
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
    """Heads stand beside each other, those of the last layer are averaged."""
    if is_last and not shape.has_output:
        return GATConv(ends, out, shape.heads, concat=False, **options)
    if out % shape.heads:
        raise ConfigError(f"hidden={out} does not divide by heads={shape.heads}; give a multiple")
    return GATConv(ends, out // shape.heads, shape.heads, **options)


@dataclass(frozen=True)
class Kind:
    """A family of models."""

    make: Callable[[Ends, int, Shape, bool], Conv]  # from a relation's channels, the outputs', and whether it is last
    has_root: bool = False  # a linear layer of its own for the destination
    any_relations: bool = True  # works between different node types
    any_aggr: bool = False  # aggregates as its shape says
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
