"""Batch norm and graph norm over the nodes of a step: a node counts once, on however many ranks its row is computed.

One process uses torch's kernels. Several ranks add up sums in float64, and send one message per layer and direction.
Before the first layer of a step, they also send the ids of their nodes, from which each counts how many ranks have one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hoploom.nn.layers import eager
from hoploom.nn.relational import module_name
from hoploom.ranks.context import Context, OverRanks
from hoploom.ranks.differentiable import rows_of_all_ranks, sum_over_ranks

Shares = Mapping[str, Tensor]  # by node type, for each node: 1 / the number of ranks that have it, [num_nodes] float64


class GraphNorm(nn.BatchNorm1d):
    """PyG's GraphNorm of one graph that is trained on in samples: means and variances are kept for inference."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.mean_scale = nn.Parameter(torch.ones(width))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the rows, normalised by the mean and variance that were kept."""
        return _scaled(self, rows, self.running_mean, self.running_var)


NORMS: Mapping[Any, type[nn.BatchNorm1d]] = {"batch": nn.BatchNorm1d, "graph": GraphNorm}


class BatchNorms(OverRanks, nn.ModuleDict):
    """A batch norm or graph norm per node type. In training, statistics are those of the nodes of all ranks.

    All ranks call, also those that have no rows. A batch norm of a single node returns the bias. A graph norm of one
    adds the weight to it, with the sign of the row less the learned share, unless that share is 1.
    """

    def __init__(self, widths: Mapping[str, int], norm: type[nn.BatchNorm1d] = nn.BatchNorm1d) -> None:
        super().__init__({module_name(name): norm(width) for name, width in widths.items()})
        self.by_torch = norm is nn.BatchNorm1d
        self.types = list(widths)

    @eager
    def normed(self, x: Mapping[str, Tensor], shares: Shares) -> dict[str, Tensor]:
        """Return the rows x, normalised, by node type. Each row counts as `shares` says, or once."""
        is_local = self.context is None and self.by_torch and all(len(rows) > 1 for rows in x.values())
        if not self.training or is_local:
            return {name: self[module_name(name)](rows) for name, rows in x.items()}
        sums = list[Tensor]()
        for name in self.types:
            rows = x[name].double()
            counted = shares[name] if name in shares else rows.new_ones(len(rows))
            weighed = rows * counted.unsqueeze(1)
            sums.append(torch.cat([counted.sum().view(1), weighed.sum(0), (weighed * rows).sum(0)]))
        total = torch.cat(sums)
        total = total if self.context is None else sum_over_ranks(total, self.context)
        of_types = torch.split(total, [len(each) for each in sums])
        found = zip(self.types, of_types, strict=True)
        return {name: _normed(self[module_name(name)], x[name], each) for name, each in found}


def _normed(norm: Any, rows: Tensor, total: Tensor) -> Tensor:
    """Return rows, normalised. `total` has the number of nodes of all ranks, and sums of their rows and squares."""
    count = round(float(total[0].detach()))  # the shares of one node may add up to a little more than 1
    mean, squares = (total[1:] / max(count, 1)).chunk(2)
    variance = (squares - mean.square()).clamp(min=0)
    if count > 1:
        with torch.no_grad():
            norm.running_mean.lerp_(mean.to(norm.weight.dtype), norm.momentum)
            norm.running_var.lerp_((variance * count / (count - 1)).to(norm.weight.dtype), norm.momentum)
            norm.num_batches_tracked += 1
    return _scaled(norm, rows, mean, variance)


def _scaled(norm: Any, rows: Tensor, mean: Any, variance: Any) -> Tensor:
    """Return the rows, less their mean or, in graph norm, the learned share of it, divided by the deviation of that."""
    if isinstance(norm, GraphNorm):
        left, mean = mean * (1 - norm.mean_scale), mean * norm.mean_scale
        variance = variance + left.square()
    scale: Tensor = norm.weight * (variance + norm.eps).rsqrt()
    shift: Tensor = norm.bias - mean * scale
    return rows * scale.to(norm.weight.dtype) + shift.to(norm.weight.dtype)


def shares_of(n_id: Mapping[str, Tensor], counts: Sequence[Mapping[str, int]], context: Context) -> list[Shares]:
    """Return the shares of the nodes of each layer: of each type, the first nodes `n_id`, as many as `counts` has."""
    shares: list[dict[str, Tensor]] = [{} for _ in counts]
    for name, ids in n_id.items():
        own_counts = torch.tensor([layer[name] for layer in counts])
        of_ranks = [each.tolist() for each in context.gather(own_counts)]
        of_ranks.insert(0, of_ranks.pop(context.rank))  # as rows_of_all_ranks returns them
        everyone = rows_of_all_ranks(ids[: of_ranks[0][0]], context)
        found, places = torch.unique(everyone, return_inverse=True)
        by_rank = torch.split(places, [each[0] for each in of_ranks])
        for depth, layer in enumerate(shares):
            there = torch.cat([each[: counted[depth]] for each, counted in zip(by_rank, of_ranks, strict=True)])
            numbers = torch.bincount(there, minlength=len(found))
            layer[name] = 1 / numbers[by_rank[0][: of_ranks[0][depth]]].double()
    return list(shares)
