"""PinSAGE: the neighbours of an item are the items that random walks visit most often, weighted by the visits.

    python examples/pinsage.py               # also under torchrun
    python examples/pinsage.py --alone       # with the features of the item only, to compare

A user buys mostly items of one genre. The features of an item alone say little about its genre. A walk goes from an
item to a user who bought it, and then to another item of this user.
"""

import argparse
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData

import hoploom
from hoploom.nn import SAGEConv
from hoploom.train import Learner, NodeClassification, Training

NUM_GENRES, NUM_FEATURES, NUM_LAYERS = 5, 16, 2
BOUGHT, BOUGHT_BY, NEAR = ("user", "bought", "item"), ("item", "bought_by", "user"), ("item", "near", "item")


def make_graph(num_items: int) -> HeteroData:
    """Two users per item, and ten purchases of each. `NEAR` has no edges: the hook fills it."""
    torch.manual_seed(0)
    genre = torch.arange(num_items) % NUM_GENRES
    taste = torch.randint(NUM_GENRES, (2 * num_items,))
    users = torch.arange(2 * num_items).repeat_interleave(10)
    items = torch.randint(num_items // NUM_GENRES, users.shape) * NUM_GENRES + taste[users]
    items = torch.where(torch.rand(users.shape) < 0.2, torch.randint(num_items, users.shape), items)
    data = HeteroData()
    data["user"].num_nodes = 2 * num_items
    data["item"].x = torch.randn(NUM_GENRES, NUM_FEATURES)[genre] + 3 * torch.randn(num_items, NUM_FEATURES)
    data["item"].y = genre
    data["item"].train_mask = torch.rand(num_items) < 0.5
    data["item"].test_mask = ~data["item"].train_mask
    data[BOUGHT].edge_index = torch.stack([users, items])
    data[BOUGHT_BY].edge_index = torch.stack([items, users])
    data[NEAR].edge_index = torch.empty(2, 0, dtype=torch.int64)
    return data


def nearest_items(
    layer: hoploom.sample.Layer, graph: hoploom.sample.LayerGraph, seeds: dict[str, Tensor]
) -> dict[tuple[str, str, str], hoploom.Edges]:
    """The hook: the items that are visited most. A walk goes against the edges: to a buyer by `BOUGHT`, and on."""
    fanout = layer.fanout[NEAR]
    walks = {"num_walks": 20, "length": 4, "restart": 0.5, "path": [BOUGHT, BOUGHT_BY]}
    return {NEAR: graph.most_visited(seeds["item"], fanout, **walks)}


class PinSAGE(nn.Module):
    """Each layer adds up what it makes of the neighbours' rows, weighted: an item's weights sum to one."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone
        widths = [NUM_FEATURES, 64, NUM_GENRES]
        self.projections = nn.ModuleList([nn.Linear(width, 64) for width in widths[:-1]])
        self.layers = nn.ModuleList([SAGEConv((64, width), out, aggr="sum") for width, out in pairwise(widths)])

    def forward(self, batch: HeteroData) -> dict[str, Tensor]:
        x = batch["item"].x
        for project, layer, block in zip(self.projections, self.layers, batch.blocks, strict=True):
            x_dst, weight = x[: block.num_destinations["item"]], block.data[NEAR]["weight"]
            weight = weight * 0 if self.alone else weight
            x = layer((project(x).relu(), x_dst), block.edge_index[NEAR], edge_weight=weight)
            x = x if layer is self.layers[-1] else x.relu()
        return {"item": x}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone", action="store_true", help="leave the neighbours out")
    parser.add_argument("--items", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=5)
    words = parser.parse_args(argv)
    store = hoploom.from_pyg(make_graph(words.items))
    options = {"mode": "blocks", "sample_frontier": nearest_items, "batch_size": 100}
    with hoploom.init() as context:
        model = context.wrap(PinSAGE(words.alone))
        task = NodeClassification(NUM_GENRES)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        train_loader = hoploom.NeighborLoader(store, [5] * NUM_LAYERS, ("item", "train"), shuffle=True, **options)
        hoploom.fit(Learner(model, optimizer, task, train_loader), Training(words.epochs), context)
        test_loader = hoploom.NeighborLoader(store, [5] * NUM_LAYERS, ("item", "test"), **options)
        accuracy = hoploom.evaluate(model, test_loader, task, context)["accuracy"]
        if context.is_main:
            print(f"Test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
