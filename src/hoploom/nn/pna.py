"""Principal neighbourhood aggregation, with PyG's arguments and parameters.

Its messages are linear in both ends and the edge, so sources are projected once each, and the destination's share is
added after aggregation. Minima and variances are aggregated as further columns of the sources: their negatives and
squares. Variances are differences of means, as in PyG.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch_geometric.nn.resolver import activation_resolver

from hoploom import ops
from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.nn.layers import Conv, Linear, check_counts, refuse_weights
from hoploom.ops import InEdges

Aggregator = Literal["sum", "mean", "min", "max", "std", "var"]
Scaler = Literal["identity", "amplification", "attenuation", "linear", "inverse_linear"]
EPSILON = 1e-5  # variances below are those of equal values, as in PyG


class _AverageDegrees(nn.Module):
    """The averages of a histogram of degrees, under PyG's names."""

    avg_deg_lin: Tensor
    avg_deg_log: Tensor

    def __init__(self, deg: Tensor, is_trained: bool) -> None:
        super().__init__()
        shares, degrees = deg.to(torch.float64) / deg.sum(), torch.arange(deg.numel(), device=deg.device)
        for name, values in (("avg_deg_lin", degrees), ("avg_deg_log", (degrees + 1).log())):
            average = (values * shares).sum().to(torch.float32).view(1)
            self.register_parameter(name, nn.Parameter(average)) if is_trained else self.register_buffer(name, average)

    def scale(self, scaler: Scaler, degrees: Tensor) -> Tensor:
        """Return the factors of destinations with these degrees [n] float."""
        at_least_one = degrees.clamp(min=1)
        if scaler == "amplification":
            return (degrees + 1).log() / self.avg_deg_log
        if scaler == "attenuation":
            return self.avg_deg_log / (at_least_one + 1).log()
        if scaler == "linear":
            return degrees / self.avg_deg_lin
        return self.avg_deg_lin / at_least_one if scaler == "inverse_linear" else torch.ones_like(degrees)


class PNAConv(Conv):
    """Principal neighbourhood aggregation: several aggregates, each scaled by the degree in several ways.

    `deg` is the histogram of in-degrees: entry k is the number of destinations with k in-edges.

    >>> deg = store.degree_histogram(("paper", "cites", "paper"))
    >>> PNAConv(100, 64, ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"], deg)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        aggregators: Sequence[Aggregator],
        scalers: Sequence[Scaler],
        deg: Tensor,
        edge_dim: int | None = None,
        towers: int = 1,
        pre_layers: int = 1,
        post_layers: int = 1,
        divide_input: bool = False,
        act: Any = "relu",
        act_kwargs: dict[str, Any] | None = None,
        train_norm: bool = False,
    ) -> None:
        super().__init__()
        self.in_channels = as_int("in_channels", in_channels, 1, "give x.shape[1]")
        check_counts(edge_dim=edge_dim, towers=towers, post_layers=post_layers)
        for name, given, known in (("aggregators", aggregators, Aggregator), ("scalers", scalers, Scaler)):
            if isinstance(given, str) or not given or set(given) - set(get_args(known)):
                raise ConfigError(f"{name} is {given!r}; give a list of some of {list(get_args(known))}")
        if not isinstance(deg, Tensor) or deg.dim() != 1 or not deg[1:].any():
            raise ConfigError(f"deg is {deg!r:.80}; give the histogram of degrees: store.degree_histogram(relation)")
        if pre_layers != 1:
            raise ConfigError(
                f"pre_layers={pre_layers} needs a row of its own for each edge; give 1, or take PNAConv of "
                "torch_geometric.nn, which runs on the same batches"
            )
        if out_channels % towers or (divide_input and in_channels % towers):
            raise ConfigError(
                f"in_channels={in_channels} (if divide_input) and out_channels={out_channels} are divided among "
                f"towers={towers}; give multiples"
            )
        self.aggregators, self.scalers = list(aggregators), list(scalers)
        self.edge_dim, self.towers, self.divide_input = edge_dim, towers, divide_input
        self.width, width_out = in_channels // towers if divide_input else in_channels, out_channels // towers
        self.aggr_module = _AverageDegrees(deg, train_norm)
        if edge_dim is not None:
            self.edge_encoder = Linear(edge_dim, self.width)
        ends = 2 if edge_dim is None else 3
        joined = (len(aggregators) * len(scalers) + 1) * self.width
        self.pre_nns, self.post_nns = nn.ModuleList(), nn.ModuleList()
        for _ in range(towers):
            self.pre_nns.append(nn.Sequential(Linear(ends * self.width, self.width)))
            modules: list[nn.Module] = [Linear(joined, width_out)]
            for _ in range(post_layers - 1):
                modules += [activation_resolver(act, **(act_kwargs or {})), Linear(width_out, width_out)]
            self.post_nns.append(nn.Sequential(*modules))
        self.lin = Linear(out_channels, out_channels)

    @torch.no_grad()
    def set_average_degree(self, degree: float) -> None:
        """Set both averages to those of nodes that all have this degree."""
        self.aggr_module.avg_deg_lin.fill_(max(1, degree))
        self.aggr_module.avg_deg_log.fill_(math.log(max(1, degree) + 1))

    def project(self, x: Tensor) -> Tensor:
        """Return the sources' shares of messages, z, as columns [-z, z, z * z], each if an aggregate needs it."""
        z = self._of_end(x, 1)
        z = z.float() if z.dtype in (torch.bfloat16, torch.float16) else z  # differences of squares need precision
        squares = [z * z] if self._has("std", "var") and self.edge_dim is None else []
        return torch.cat([-z] * self._has("min") + [z] + squares, dim=1)

    def propagate(self, z: Tensor, edges: InEdges, x_dst: Tensor, aggregated: Tensor | None = None) -> Tensor:
        refuse_weights(self, edges)
        degrees = edges.indptr.diff()
        own = self._of_end(x_dst, 0) + self._constant()
        own = own.masked_fill((degrees == 0).unsqueeze(1), 0)  # without edges, there are no messages
        rows = self._aggregated(z, edges, own, degrees).to(x_dst.dtype)
        scales = torch.stack([self.aggr_module.scale(s, degrees.to(rows.dtype)) for s in self.scalers], dim=1)
        towers = self.towers if self.divide_input else 1
        own_rows = x_dst.view(-1, towers, self.width).expand(-1, self.towers, -1)
        outs = [
            self._after(network, own_rows[:, tower], rows[:, tower], scales)
            for tower, network in enumerate(self.post_nns)
        ]
        return self.lin(torch.cat(outs, dim=1))  # type: ignore[no-any-return]

    def _after(self, network: nn.Module, own: Tensor, rows: Tensor, scales: Tensor) -> Tensor:
        """Return the output of a tower's network for its destinations' own rows, and its aggregates in all scales.

        A scaler multiplies whole rows, so it may as well multiply their products with its columns of the weight.
        """
        first, *others = network.children()
        assert isinstance(first, nn.Linear)
        of_own, of_rows = first.weight[:, : self.width], first.weight[:, self.width :]
        by_scaler = of_rows.reshape(-1, len(self.scalers), rows.shape[1]).transpose(0, 1).flatten(0, 1)
        scaled = ops.linear(rows, by_scaler).view(-1, len(self.scalers), first.out_features) * scales.unsqueeze(2)
        out = ops.linear(own, of_own, first.bias) + scaled.sum(1)
        return nn.Sequential(*others)(out)  # type: ignore[no-any-return]

    def _aggregated(self, z: Tensor, edges: InEdges, own: Tensor, degrees: Tensor) -> Tensor:
        """Return all aggregates of the messages: [num_destinations, towers, aggregators * width]."""
        width = own.shape[1]
        found: dict[str, Tensor] = {}
        num_negated = width * self._has("min")
        if self.edge_dim is not None:
            features, weight = (
                self.features_of(edges, z.dtype),
                (self._of_edges() @ self.edge_encoder.weight).to(z.dtype),
            )
        if self._has("min", "max"):
            columns = z[:, num_negated * (not self._has("min")) : num_negated + width * self._has("max")]
            if self.edge_dim is None:
                most = ops.aggregate(columns, edges, "max")
            else:
                both = torch.cat([-weight] * self._has("min") + [weight] * self._has("max"))
                most = ops.aggregate_messages(columns, edges, "max", ops.EdgeTerm(features, both))
            found = {"min": own - most[:, :width], "max": own + most[:, -width:]}
        if self._has("sum", "mean", "std", "var"):
            columns = z[:, num_negated:]
            if self.edge_dim is None:
                means = ops.aggregate(columns, edges, "mean")
                mean, mean_square = means[:, :width], means[:, width:]
            else:
                term = ops.EdgeTerm(features, weight)
                mean = ops.aggregate_messages(columns, edges, "mean", term)
                mean_square = ops.aggregate_messages(columns, edges, "mean", term, "square")
            found |= {"mean": own + mean, "sum": (own + mean) * degrees.unsqueeze(1)}
            if self._has("std", "var"):  # both are the same with `own` added
                found["var"] = mean_square - mean * mean
                deviation = found["var"].clamp(min=EPSILON).sqrt()
                found["std"] = deviation.masked_fill(deviation <= EPSILON**0.5, 0)
        each = [found[name].view(-1, self.towers, self.width) for name in self.aggregators]
        return torch.cat(each, dim=2)

    def _of_end(self, x: Tensor, end: int) -> Tensor:
        """Return the shares in messages of destinations (end 0) or of sources (end 1): [n, towers * width]."""
        columns = slice(end * self.width, (end + 1) * self.width)
        weights = torch.stack([network[0].weight[:, columns] for network in self.pre_nns])  # type: ignore[index]
        if self.divide_input:
            return torch.einsum("nti,toi->nto", x.view(-1, self.towers, self.width), weights).flatten(1)
        return ops.linear(x, weights.flatten(0, 1))

    def _of_edges(self) -> Tensor:
        """Return the matrix of encoded edge features: [towers * width, width]."""
        return torch.cat([network[0].weight[:, 2 * self.width :] for network in self.pre_nns])  # type: ignore[index]

    def _constant(self) -> Tensor:
        """Return what is in every message: [towers * width]."""
        bias = torch.cat([network[0].bias for network in self.pre_nns])  # type: ignore[index]
        return bias if self.edge_dim is None else bias + self._of_edges() @ self.edge_encoder.bias

    def _has(self, *names: Aggregator) -> bool:
        return any(name in self.aggregators for name in names)
