"""Importance sampling by degree: popular neighbours are sampled more often, and weights keep sums correct on average.

    python examples/importance_sampling.py               # also under torchrun
    python examples/importance_sampling.py --uniform     # uniform sampling, to compare

In the generated graph, accounts with more followers have larger feature rows. The label of an account is the colour
with the largest sum over its neighbours' rows. A few neighbours that are sampled uniformly miss the popular ones.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

import hoploom
from hoploom.nn import SAGEConv
from hoploom.train import Learner, NodeClassification, Training

NUM_COLOURS, FANOUT = 4, 6


def make_graph(num_nodes: int, num_edges: int) -> Data:
    """Few accounts have many followers, and follow many others."""
    torch.manual_seed(0)
    popularity = torch.rand(num_nodes).pow(-0.6)
    edge_index = torch.multinomial(popularity, 2 * num_edges, replacement=True).view(2, num_edges)
    degree = torch.bincount(edge_index[1], minlength=num_nodes).float()
    colour = torch.nn.functional.one_hot(torch.randint(NUM_COLOURS, (num_nodes,)), NUM_COLOURS)
    x = colour * degree.view(-1, 1) / degree.mean()
    y = torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]]).argmax(1)
    is_train = torch.rand(num_nodes) < 0.5
    return Data(x=x, y=y, edge_index=edge_index, train_mask=is_train, test_mask=~is_train)


def by_degree(layer: hoploom.sample.Layer, graph: hoploom.sample.LayerGraph, seeds: Tensor) -> hoploom.Edges:
    """The hook: an in-edge is kept with a probability in proportion to its source's in-degree, `fanout` on average."""
    found = graph.in_edges(seeds)
    importance = graph.in_degrees(found.sources) + 1.0
    owners, owner = torch.unique(found.destinations, return_inverse=True)
    total = torch.zeros(len(owners)).index_add_(0, owner, importance)
    probability = (layer.fanout * importance / total[owner]).clamp(max=1)
    kept = graph.uniform(found.positions) < probability
    return replace(found[kept], data={"weight": 1 / probability[kept]})


def uniform(layer: hoploom.sample.Layer, graph: hoploom.sample.LayerGraph, seeds: Tensor) -> hoploom.Edges:
    """As many neighbours at random."""
    found = graph.sample_neighbors(seeds, layer.fanout)
    owners, owner, counts = torch.unique(found.destinations, return_inverse=True, return_counts=True)
    return replace(found, data={"weight": (graph.in_degrees(owners) / counts)[owner]})


class Colours(nn.Module):
    """One layer: the neighbours' rows are summed up, each times its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(NUM_COLOURS, NUM_COLOURS, aggr="sum", root_weight=False)

    def forward(self, batch: Data) -> Tensor:
        (block,) = batch.blocks
        x_dst = batch.x[: block.num_destinations]
        return self.conv((batch.x, x_dst), block.edge_index, edge_weight=block.data["weight"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uniform", action="store_true", help="draw neighbours at random")
    parser.add_argument("--nodes", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=5)
    words = parser.parse_args(argv)
    store = hoploom.from_pyg(make_graph(words.nodes, 40 * words.nodes))
    options = {"mode": "blocks", "sample_frontier": uniform if words.uniform else by_degree, "batch_size": 100}
    with hoploom.init() as context:
        model = context.wrap(Colours())
        task = NodeClassification(NUM_COLOURS)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        train_loader = hoploom.NeighborLoader(store, [FANOUT], "train", shuffle=True, **options)
        hoploom.fit(Learner(model, optimizer, task, train_loader), Training(words.epochs), context)
        test_loader = hoploom.NeighborLoader(store, [FANOUT], "test", **options)
        accuracy = hoploom.evaluate(model, test_loader, task, context)["accuracy"]
        if context.is_main:
            print(f"Test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
