"""A batch of its own size as one of fixed size, with rubbish wherever the batch does not reach."""

from itertools import accumulate

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from hoploom.gpu.device_hops import NO_PICKS
from hoploom.gpu.whole_steps import PaddedEdges, padded_views
from hoploom.nn.layers import by_relation, by_type

HUGE = 1e6  # finite: zero times infinity is no zero, and gradients of unused rows are products with zero


def padded(batch: Data | HeteroData, num_layers: int, spare: int = 3) -> Data | HeteroData:
    """The same batch with room for `spare` more nodes and edges at every hop."""
    nodes = {name: list(accumulate(map(int, hops))) for name, hops in by_type(batch, "num_sampled_nodes").items()}
    picks = {key: list(accumulate(map(int, hops))) for key, hops in by_relation(batch, "num_sampled_edges").items()}
    most_nodes = {name: [total + spare * hop for hop, total in enumerate(totals)] for name, totals in nodes.items()}
    most_edges = {key: [total + spare * hop for hop, total in enumerate(totals, 1)] for key, totals in picks.items()}
    hops = [
        {
            key: PaddedEdges(
                *arrays_of(index, nodes[key[2]][-2], most_nodes[key[2]][-1], most_edges[key][-1]),
                torch.tensor(picks[key][hop]),
                most_edges[key][hop],
            )
            for key, index in by_relation(batch, "edge_index").items()
        }
        for hop in range(len(next(iter(picks.values()))))
    ]
    out = batch.__class__()
    out.views = padded_views(hops, most_nodes, num_layers)
    for name, rows in (
        ("x", by_type(batch, "x")),
        ("n_id", by_type(batch, "n_id")),
        ("in_degree", by_type(batch, "in_degree")),
    ):
        for node_type, own in rows.items():
            storage = out if isinstance(out, Data) else out[node_type]
            storage[name] = filled(own, most_nodes[node_type][-1])
    return out


def arrays_of(edge_index: Tensor, expanded: int, most_nodes: int, most_edges: int) -> tuple[Tensor, Tensor]:
    """Sources and indptr. `expanded` destinations have been asked for picks, those behind them not."""
    indptr = torch.full((most_nodes + 1,), NO_PICKS)
    indptr[:expanded] = torch.searchsorted(edge_index[1].contiguous(), torch.arange(expanded))
    sources = torch.full((most_edges,), 10**12)
    sources[: edge_index.shape[1]] = edge_index[0]
    return sources, indptr


def filled(rows: Tensor, most: int) -> Tensor:
    """Rows beyond the batch's own hold large numbers; ids some other node's."""
    out = torch.full((most, *rows.shape[1:]), HUGE if rows.is_floating_point() else 0, dtype=rows.dtype)
    out[: rows.shape[0]] = rows
    return out
