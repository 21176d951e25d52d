"""Train GraphSAGE on all GPUs of a machine: one process each, a loop written by hand.

    python examples/multi_gpu_sage.py --root data/Reddit    # the Reddit graph; PyG downloads it into data/Reddit/raw
    python examples/multi_gpu_sage.py                       # a generated graph
    python examples/multi_gpu_sage.py --processes 2         # without GPUs: two processes on the CPU

Every process opens the same store, so the machine holds the graph once. Every training node is used exactly once per
epoch, whatever the number of processes, and the metrics are over all nodes of the split.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch_geometric.datasets import Reddit

import hoploom
from hoploom import NeighborLoader
from hoploom.nn import GraphSAGE
from hoploom.train import Context, NodeClassification

NUM_NEIGHBORS, BATCH_SIZE, LEARNING_RATE = [25, 10], 1024, 0.003


def prepare(folder: Path, root: Path | None, num_nodes: int) -> Path:
    """The graph as a store on disk, written once: Reddit where its folder is given, else a generated graph."""
    path = folder / ("reddit.store" if root is not None else f"generated-{num_nodes}.store")
    if path.exists():
        return path
    if root is not None:
        hoploom.from_pyg(Reddit(str(root))[0]).save(path)  # train_mask, val_mask and test_mask become splits
    else:
        hoploom.generate(path, num_nodes=num_nodes, avg_degree=50, num_features=100, num_classes=41, homophily=0.6)
    return path


def make_model(store: hoploom.Store) -> tuple[GraphSAGE, int]:
    """GraphSAGE for the store's features and classes, and the number of classes."""
    [labels] = store.features.gather([("node", "y", store.split("train"))])
    num_features, num_classes = store.schema.node_type("node").fields["x"].shape[0], int(labels.max()) + 1
    torch.manual_seed(12345)
    return GraphSAGE(num_features, hidden_channels=256, num_layers=2, out_channels=num_classes), num_classes


def run(context: Context, path: Path, num_epochs: int) -> None:
    """What every process does."""
    store = hoploom.open(path)
    common = {"num_neighbors": NUM_NEIGHBORS, "batch_size": BATCH_SIZE, "num_workers": 4, "device": context.device}
    share = {"rank": context.rank, "world_size": context.world_size}
    train_loader = NeighborLoader(store, input_nodes="train", shuffle=True, **share, **common)
    val_loader = NeighborLoader(store, input_nodes="val", **common)  # evaluate shares it out
    test_loader = NeighborLoader(store, input_nodes="test", **common)

    model, num_classes = make_model(store)
    model = context.wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    task = NodeClassification(num_classes)

    for epoch in range(1, num_epochs + 1):
        model.train()
        loss_sum = torch.zeros((), device=context.device)
        for batch in train_loader:
            optimizer.zero_grad()
            out = model(batch)[: batch.batch_size]
            losses = F.cross_entropy(out, batch.y[: batch.batch_size], reduction="none")
            context.mean_loss(losses).backward()
            optimizer.step()
            loss_sum += losses.detach().sum()

        loss = context.sum(loss_sum) / len(store.split("train"))
        val = hoploom.evaluate(model, val_loader, task, context)
        if context.is_main:
            print(f"Epoch {epoch:02d}: loss {loss:.4f}, validation accuracy {val['accuracy']:.4f}", flush=True)

    test = hoploom.evaluate(model, test_loader, task, context)
    if context.is_main:
        print(f"Test accuracy {test['accuracy']:.4f}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="PyG's folder of the Reddit dataset")
    parser.add_argument("--nodes", type=int, default=100_000, help="of the generated graph")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 1)
    parser.add_argument("--folder", type=Path, default=Path("runs/multi_gpu_sage"), help="where the store is written")
    arguments = parser.parse_args(argv)
    path = prepare(arguments.folder, arguments.root, arguments.nodes)
    hoploom.spawn(run, arguments.processes, args=[path, arguments.epochs])


if __name__ == "__main__":
    main()
