"""Link prediction: who will be friends with whom?

    python examples/link_prediction.py                    # one process per GPU, or one on the CPU

A model must not see the links that it predicts. So the friendships are split first, as undirected pairs. Most of them
become the edges for messages, in both directions. The others are only predicted: for training, validation and test.
Negative samples are random pairs without an edge. The metric is AUROC over all test pairs; guessing gives 0.5.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import hoploom
from hoploom import LinkNeighborLoader
from hoploom.nn import GraphSAGE
from hoploom.train import Context, Learner, LinkPrediction, Training

SHARES = {"message": 0.7, "train": 0.15, "val": 0.05, "test": 0.1}
NUM_NEIGHBORS, BATCH_SIZE, NUM_CIRCLES, NUM_FEATURES, NUM_FRIENDS = [10, 5], 512, 20, 32, 10


def make_friends(num_nodes: int) -> tuple[Tensor, Tensor]:
    """Features, which tell little, and friendships in both directions: mostly within circles of friends."""
    torch.manual_seed(0)
    circle = torch.arange(num_nodes) % NUM_CIRCLES
    x = torch.randn(NUM_CIRCLES, NUM_FEATURES)[circle] + 2 * torch.randn(num_nodes, NUM_FEATURES)
    one = torch.randint(num_nodes, (num_nodes * NUM_FRIENDS // 2,))
    same = torch.randint(num_nodes // NUM_CIRCLES, one.shape) * NUM_CIRCLES + circle[one]
    other = torch.where(torch.rand(one.shape) < 0.9, same, torch.randint(num_nodes, one.shape))
    return x, torch.stack([torch.cat([one, other]), torch.cat([other, one])])


def split_links(edge_index: Tensor) -> dict[str, Tensor]:
    """Each undirected pair into one split: what is no message edge in one direction is none in the other."""
    low, high = edge_index.min(dim=0).values, edge_index.max(dim=0).values
    pairs = torch.stack([low, high])[:, low != high].unique(dim=1)
    pairs = pairs[:, torch.randperm(pairs.shape[1])]
    ends = (torch.tensor(list(SHARES.values())).cumsum(0) * pairs.shape[1]).round().long()
    return dict(zip(SHARES, pairs.tensor_split(ends[:-1], dim=1), strict=True))


def prepare(folder: Path, num_nodes: int) -> None:
    """The message graph as a store, and the links to ask about as arrays beside it, for all processes to open."""
    if (folder / "message.store").exists():
        return
    x, edge_index = make_friends(num_nodes)
    links = split_links(edge_index)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val", "test"):
        np.save(folder / f"{name}.npy", links[name].numpy())
    message = torch.cat([links["message"], links["message"].flip(0)], dim=1)
    hoploom.from_tensors({"x": x}, message).save(folder / "message.store")


def run(context: Context, folder: Path, num_epochs: int) -> None:
    """What every process does."""
    store = hoploom.open(folder / "message.store")
    share = {"rank": context.rank, "world_size": context.world_size, "shuffle": True}

    def load(split: str, **options: object) -> LinkNeighborLoader:
        links = torch.from_numpy(np.load(folder / f"{split}.npy"))
        options |= {"neg_sampling": "binary", "strict_negatives": True, "device": context.device, "num_workers": 2}
        return LinkNeighborLoader(store, NUM_NEIGHBORS, edge_label_index=links, batch_size=BATCH_SIZE, **options)

    torch.manual_seed(0)
    model = context.wrap(GraphSAGE(NUM_FEATURES, hidden_channels=64, num_layers=2, out_channels=16))
    task, val_loader, test_loader = LinkPrediction(), load("val"), load("test")
    learner = Learner(model, torch.optim.Adam(model.parameters(), lr=0.01), task, load("train", **share))
    checkpoint = hoploom.Checkpoint(folder, context)
    hoploom.fit(
        learner,
        Training(epochs=num_epochs, patience=3),
        context,
        validate=lambda: hoploom.evaluate(model, val_loader, task, context),
        checkpoint=checkpoint,
    )
    checkpoint.restore("best", {"model": model})
    test = hoploom.evaluate(model, test_loader, task, context)
    if context.is_main:
        print(f"Test AUROC {test['auroc']:.4f}, average precision {test['average_precision']:.4f}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 1)
    parser.add_argument("--folder", type=Path, default=Path("runs/link_prediction"))
    arguments = parser.parse_args(argv)
    folder = arguments.folder / str(arguments.nodes)
    prepare(folder, arguments.nodes)
    hoploom.spawn(run, arguments.processes, args=[folder, arguments.epochs])


if __name__ == "__main__":
    main()
