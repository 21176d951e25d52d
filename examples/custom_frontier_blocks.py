"""A sampler of one's own: each layer takes the most trusted neighbours, and hands over message-flow blocks.

    python examples/custom_frontier_blocks.py               # one process per GPU, or one on the CPU
    python examples/custom_frontier_blocks.py --uniform     # with neighbours at random, to compare

In the generated graph most accounts are bots with made-up profiles, and a score says how far each is to be trusted.
Neighbours drawn at random are mostly bots; the most trusted of several candidates are mostly not.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

import hoploom
from hoploom.nn import SAGEConv
from hoploom.train import Context, NodeClassification

NUM_CLASSES, NUM_FEATURES, FANOUTS, NUM_CANDIDATES, BOTS = 8, 32, [5, 5], 25, 0.8


def make_graph(num_nodes: int) -> Data:
    """Accounts that follow accounts of their own class; bots have the profile of any class."""
    torch.manual_seed(0)
    num_nodes -= num_nodes % NUM_CLASSES
    y = torch.arange(num_nodes) % NUM_CLASSES
    shown = torch.where(torch.rand(num_nodes) < BOTS, torch.randint(NUM_CLASSES, (num_nodes,)), y)
    x = torch.randn(NUM_CLASSES, NUM_FEATURES)[shown] + torch.randn(num_nodes, NUM_FEATURES)
    trust = (shown == y).float() + 0.3 * torch.randn(num_nodes)
    followed = torch.arange(num_nodes).repeat_interleave(NUM_CANDIDATES)
    followers = torch.randint(num_nodes // NUM_CLASSES, followed.shape) * NUM_CLASSES + y[followed]
    third = torch.arange(num_nodes) // NUM_CLASSES % 3
    masks = {f"{split}_mask": third == number for number, split in enumerate(["train", "val", "test"])}
    return Data(x=x, y=y, trust=trust, edge_index=torch.stack([followers, followed]), **masks)


def most_trusted(trust: Tensor, layer: int, graph: hoploom.sample.LayerGraph, seeds: Tensor) -> hoploom.Edges:
    """The hook: of its random candidates, each seed of the layer keeps the `FANOUTS[layer]` that are trusted most."""
    found = graph.sample_neighbors(seeds, NUM_CANDIDATES)
    order = torch.argsort(trust[found.sources], descending=True, stable=True)
    order = order[torch.argsort(found.destinations[order], stable=True)]  # by seed, the most trusted first
    owners = found.destinations[order]
    places = torch.arange(len(owners)) - torch.searchsorted(owners, owners)  # of each candidate among its seed's
    kept = order[places < FANOUTS[layer]]
    return hoploom.Edges(found.sources[kept], found.destinations[kept], found.positions[kept])


class SAGE(nn.Module):
    """GraphSAGE over blocks: each layer turns a block's sources into its destinations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SAGEConv(NUM_FEATURES, 128), SAGEConv(128, NUM_CLASSES)])

    def forward(self, batch: Data) -> Tensor:
        x = batch.x
        for layer, block in zip(self.layers, batch.blocks, strict=True):
            x = layer(x, block.edge_index, x_dst=x[: block.num_destinations])
            x = x if layer is self.layers[-1] else x.relu()
        return x


def run(context: Context, path: Path, num_epochs: int, uniform: bool) -> None:
    """What every process does."""
    store = hoploom.open(path)
    [trust] = store.features.gather([("node", "trust", torch.arange(store.schema.node_type("node").num_nodes))])
    hook = None if uniform else partial(most_trusted, trust)

    def load(split: str, **options: object) -> hoploom.NeighborLoader:
        options |= {"mode": "blocks", "sample_frontier": hook, "device": context.device, "num_workers": 2}
        return hoploom.NeighborLoader(store, FANOUTS, split, batch_size=256, **options)

    train_loader = load("train", shuffle=True, rank=context.rank, world_size=context.world_size)
    val_loader, test_loader = load("val"), load("test")
    torch.manual_seed(0)
    model = context.wrap(SAGE())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    task, checkpoint, best = NodeClassification(NUM_CLASSES), hoploom.Checkpoint(path.parent, context), 0.0
    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_loader):
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(batch), batch.y[: batch.batch_size], reduction="none")
            context.mean_loss(losses).backward()
            optimizer.step()
            if context.is_main and step % 10 == 0:
                print(f"Epoch {epoch} step {step} loss {losses.mean().item():.4f}", flush=True)
        accuracy = hoploom.evaluate(model, val_loader, task, context)["accuracy"]  # the same number on every rank
        if context.is_main:
            print(f"Epoch {epoch} validation accuracy {accuracy:.4f}", flush=True)
        if accuracy > best:
            best = accuracy
            checkpoint.save("best", {"model": model}, epoch=epoch)
    kept = checkpoint.restore("best", {"model": model})
    test = hoploom.evaluate(model, test_loader, task, context)
    if context.is_main:
        print(f"Test accuracy {test['accuracy']:.4f} with the model of epoch {kept['epoch']}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uniform", action="store_true")
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 1)
    parser.add_argument("--folder", type=Path, default=Path("runs/custom_frontier_blocks"))
    arguments = parser.parse_args(argv)
    path = arguments.folder / f"accounts-{arguments.nodes}.store"
    if not path.exists():
        hoploom.from_pyg(make_graph(arguments.nodes)).save(path)
    hoploom.spawn(run, arguments.processes, args=[path, arguments.epochs, arguments.uniform])


if __name__ == "__main__":
    main()
