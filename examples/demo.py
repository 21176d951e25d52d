"""Train PyG's GraphSAGE on a synthetic graph through hoploom.NeighborLoader; `make demo` runs it.

    python examples/demo.py [DIRECTORY]

Writes the graph to DIRECTORY (default ./demo-store) unless a store is there already. Its labels are planted
communities, so the accuracies say that the batches carry the graph, and nothing about real data.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import MLP, GraphSAGE
from tqdm import tqdm

import hoploom
from hoploom.build.synthetic import generate

NUM_NODES, NUM_FEATURES, NUM_CLASSES, HOMOPHILY = 120_000, 100, 40, 0.5
BATCH_SIZE, NUM_EPOCHS, NUM_MLP_EPOCHS = 1024, 3, 5


def open_or_generate(path: Path) -> hoploom.Store:
    if path.exists():
        return hoploom.open(path)
    began = time.perf_counter()
    store = generate(path, num_nodes=NUM_NODES, num_features=NUM_FEATURES, num_classes=NUM_CLASSES, homophily=HOMOPHILY)
    print(f"wrote {path} in {time.perf_counter() - began:.1f} s")
    return store


def make_loader(store: hoploom.Store, split: str, *, shuffle: bool = False) -> hoploom.NeighborLoader:
    return hoploom.NeighborLoader(
        store, [15, 10], input_nodes=split, batch_size=BATCH_SIZE, shuffle=shuffle, num_workers=2
    )


def seed_scores(model: GraphSAGE, batch: Data) -> Tensor:
    """The model's scores of the batch's seeds; layers leave out the hops that they no longer need."""
    hops = {"num_sampled_nodes_per_hop": batch.num_sampled_nodes, "num_sampled_edges_per_hop": batch.num_sampled_edges}
    return model(batch.x, batch.edge_index, **hops)[: batch.batch_size]


def train_epoch(model: GraphSAGE, optimizer: torch.optim.Optimizer, loader: hoploom.NeighborLoader, bar: tqdm) -> None:
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(seed_scores(model, batch), batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        bar.update(batch.batch_size)


@torch.no_grad()
def accuracy(model: GraphSAGE, loader: hoploom.NeighborLoader) -> tuple[float, int]:
    """Over every seed of the loader, and their number."""
    model.eval()
    num_right = num_seeds = 0
    for batch in loader:
        predicted = seed_scores(model, batch).argmax(dim=1)
        num_right += int((predicted == batch.y[: batch.batch_size]).sum())
        num_seeds += batch.batch_size
    return num_right / num_seeds, num_seeds


def mlp_accuracy(store: hoploom.Store) -> float:
    """Test accuracy of an MLP, which sees a node's own features only."""
    x, y = {}, {}
    for split in ("train", "test"):
        ids = store.split(split)
        x[split], y[split] = store.features.gather([("node", "x", ids), ("node", "y", ids)])
    model = MLP([NUM_FEATURES, 128, NUM_CLASSES], dropout=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(NUM_MLP_EPOCHS):
        for rows in torch.randperm(len(y["train"])).split(BATCH_SIZE):
            optimizer.zero_grad()
            functional.cross_entropy(model(x["train"][rows]), y["train"][rows]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return float((model(x["test"]).argmax(dim=1) == y["test"]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("demo-store"))
    store = open_or_generate(parser.parse_args().directory)
    [nodes], [edges] = store.schema.node_types, store.schema.relations
    num_seeds = nodes.splits["train"]
    print(f"{nodes.num_nodes:,} nodes, {edges.num_edges:,} edges; {num_seeds:,} nodes to train on")

    torch.manual_seed(0)
    model = GraphSAGE(NUM_FEATURES, 64, num_layers=2, out_channels=NUM_CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train, val = make_loader(store, "train", shuffle=True), make_loader(store, "val")
    for epoch in range(NUM_EPOCHS):
        with tqdm(desc=f"epoch {epoch}", total=num_seeds, unit=" seeds", unit_scale=True) as bar:
            train_epoch(model, optimizer, train, bar)
        print(f"epoch {epoch}: val accuracy {accuracy(model, val)[0]:.3f}")
    sage_accuracy, num_tested = accuracy(model, make_loader(store, "test"))
    print(f"test accuracy over all {num_tested:,} test nodes: {sage_accuracy:.3f}; MLP {mlp_accuracy(store):.3f}")


if __name__ == "__main__":
    main()
