"""PyG's tutorial "Multi-GPU Training in Pure PyTorch": GraphSAGE on Reddit, one process per GPU.

python multi_gpu.py --root data/Reddit                                    # starts its own processes
torchrun --standalone --nproc-per-node 2 multi_gpu.py --root data/Reddit  # torchrun starts them
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch_geometric.datasets import Reddit
from torch_geometric.nn import GraphSAGE

import hoploom
from hoploom import NeighborLoader
from hoploom.train import Context, NodeClassification


def open_reddit(context: Context, root: Path) -> hoploom.Store:
    """Rank 0 writes the store once; every process maps it, so the host holds the graph once."""
    path = root / "reddit.store"
    if context.is_main and not path.exists():
        hoploom.from_pyg(Reddit(str(root))[0]).save(path)  # train_mask and val_mask become splits
    context.barrier()
    return hoploom.open(path)


def run(context: Context, root: Path, num_epochs: int) -> None:
    store = open_reddit(context, root)
    common = {"num_neighbors": [25, 10], "batch_size": 1024, "num_workers": 4, "device": context.device}
    train_loader = NeighborLoader(store, input_nodes="train", shuffle=True, **common)  # this rank's share of the seeds
    val_loader = NeighborLoader(store, input_nodes="val", shuffle=False, **common)

    [y] = store.features.gather([("node", "y", store.split("train"))])
    num_features, num_classes = store.schema.node_type("node").fields["x"].shape[0], int(y.max()) + 1
    torch.manual_seed(12345)
    model = context.wrap(GraphSAGE(num_features, hidden_channels=256, num_layers=2, out_channels=num_classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    for epoch in range(1, num_epochs + 1):
        model.train()
        for batch in train_loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = context.mean_loss(F.cross_entropy(out, batch.y[: batch.batch_size], reduction="none"))
            loss.backward()
            optimizer.step()
        val = hoploom.evaluate(model, val_loader, NodeClassification(num_classes), context)  # on all ranks
        mean = context.sum(loss) / context.world_size  # over the seeds of all ranks
        if context.is_main:
            print(f"Epoch: {epoch:02d}, Loss: {mean:.4f}, Validation Accuracy: {val['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True, help="PyG downloads Reddit into it")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 2)
    args = parser.parse_args()
    if torch.distributed.is_torchelastic_launched():
        with hoploom.init() as context:
            run(context, args.root, args.epochs)
    else:
        hoploom.spawn(run, args.processes, args=[args.root, args.epochs])
