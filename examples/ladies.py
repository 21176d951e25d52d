"""LADIES: the nodes of a whole layer are sampled together, so a batch does not grow with every hop.

    python examples/ladies.py               # also under torchrun
    python examples/ladies.py --neighbors   # each node samples its own neighbours, to compare

The candidates of a layer are all neighbours of its nodes. Candidates with many links to these nodes are sampled with a
higher probability. At every node, the weights sum to one (Zou et al., Layer-Dependent Importance Sampling, 2019).
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

import hoploom
from hoploom.nn import SAGEConv
from hoploom.train import Learner, NodeClassification, Training

NUM_CLASSES, NUM_FEATURES, NUM_LAYERS = 6, 16, 2


def make_graph(num_nodes: int, degree: int) -> Data:
    """Nodes mostly know their own class, and their features show little of it."""
    torch.manual_seed(0)
    y = torch.randint(NUM_CLASSES, (num_nodes,))
    x = torch.randn(NUM_CLASSES, NUM_FEATURES)[y] + 3 * torch.randn(num_nodes, NUM_FEATURES)
    ends = torch.randint(num_nodes, (2, 6 * degree * num_nodes))
    is_kept = (y[ends[0]] == y[ends[1]]) | (torch.rand(ends.shape[1]) < 0.05)
    is_train = torch.rand(num_nodes) < 0.5
    return Data(x=x, y=y, edge_index=ends[:, is_kept], train_mask=is_train, test_mask=~is_train)


def ladies(num_nodes: int, layer: int, graph: hoploom.sample.LayerGraph, seeds: Tensor) -> hoploom.Edges:
    """The hook: draw `num_nodes` sources for all seeds of the layer, keep the edges from them."""
    found = graph.in_edges(seeds)
    share = 1 / graph.in_degrees(found.destinations)  # an entry of the adjacency matrix whose rows sum to one
    candidates, column = torch.unique(found.sources, return_inverse=True)
    importance = torch.zeros(len(candidates)).index_add_(0, column, share.square())
    is_drawn = torch.zeros(len(candidates), dtype=torch.bool)
    if len(candidates):
        count = min(num_nodes, len(candidates))
        is_drawn[torch.multinomial(importance, count, generator=graph.generator())] = True
    kept = is_drawn[column]
    weight = (share / importance[column])[kept]
    owners, owner = torch.unique(found.destinations[kept], return_inverse=True)
    total = torch.zeros(len(owners)).index_add_(0, owner, weight)
    return replace(found[kept], data={"weight": weight / total[owner]})


class Model(nn.Module):
    """Each layer sums up its sources' rows, each times its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SAGEConv(NUM_FEATURES, 64, aggr="sum"), SAGEConv(64, NUM_CLASSES, aggr="sum")])

    def forward(self, batch: Data) -> Tensor:
        x = batch.x
        for layer, block in zip(self.layers, batch.blocks, strict=True):
            weight = block.data.get("weight")
            if weight is None:  # neighbours at random: their mean
                counts = torch.bincount(block.edge_index[1], minlength=block.num_destinations)
                weight = 1 / counts[block.edge_index[1]]
            x = layer((x, x[: block.num_destinations]), block.edge_index, edge_weight=weight)
            x = x if layer is self.layers[-1] else x.relu()
        return x


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neighbors", action="store_true", help="each node draws its own neighbours")
    parser.add_argument("--nodes", type=int, default=6000)
    parser.add_argument("--drawn", type=int, default=300, help="nodes to draw for a layer")
    parser.add_argument("--epochs", type=int, default=5)
    words = parser.parse_args(argv)
    store = hoploom.from_pyg(make_graph(words.nodes, degree=20))
    hook = None if words.neighbors else partial(ladies, words.drawn)
    options = {"mode": "blocks", "sample_frontier": hook, "batch_size": 200}
    with hoploom.init() as context:
        model = context.wrap(Model())
        task = NodeClassification(NUM_CLASSES)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train_loader = hoploom.NeighborLoader(store, [10] * NUM_LAYERS, "train", shuffle=True, **options)
        hoploom.fit(Learner(model, optimizer, task, train_loader), Training(words.epochs), context)
        test_loader = hoploom.NeighborLoader(store, [10] * NUM_LAYERS, "test", **options)
        accuracy = hoploom.evaluate(model, test_loader, task, context)["accuracy"]
        if context.is_main:
            print(f"{sum(len(batch.n_id) for batch in test_loader) / len(test_loader):.1f} nodes in a batch")
            print(f"Test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
