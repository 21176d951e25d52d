"""DGL's tutorial on several GPUs with your own sampler: GraphSAGE on message-flow blocks of ogbn-products.

python custom_sampler.py --root dataset/ogbn_products
"""

import argparse
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch_geometric.data import Data

import hoploom
from hoploom.ingest.formats import import_ogb
from hoploom.nn import SAGEConv
from hoploom.sample import Layer, LayerGraph
from hoploom.train import Context, NodeClassification

FANOUTS = [4, 4, 4]


def sample_frontier(layer: Layer, graph: LayerGraph, seeds: Tensor) -> hoploom.Edges:
    """The edges of one layer. Layer 0 is the one at the seeds: DGL counts from the other end."""
    return graph.sample_neighbors(seeds, layer.fanout)


def create_dataloader(context: Context, store: hoploom.Store, split: str) -> hoploom.NeighborLoader:
    return hoploom.NeighborLoader(
        store,
        FANOUTS,
        input_nodes=split,
        mode="blocks",
        sample_frontier=sample_frontier,
        batch_size=1024,
        shuffle=split == "train",
        drop_last=False,
        num_workers=0,
        device=context.device,
    )


class SAGE(nn.Module):
    def __init__(self, in_feats: int, n_hidden: int, n_classes: int, n_layers: int) -> None:
        super().__init__()
        sizes = [in_feats, *[n_hidden] * (n_layers - 1), n_classes]
        self.layers = nn.ModuleList(SAGEConv(*size, aggr="mean") for size in pairwise(sizes))

    def forward(self, batch: Data) -> Tensor:
        x = batch.x
        for layer, block in zip(self.layers, batch.blocks, strict=True):
            x = layer((x, x[: block.num_destinations]), block.edge_index)
            x = x if layer is self.layers[-1] else F.relu(x)
        return x


def train(context: Context, path: Path, num_epochs: int) -> None:
    store = hoploom.open(path)
    train_dataloader, valid_dataloader = (create_dataloader(context, store, split) for split in ("train", "val"))
    [y] = store.features.gather([("node", "y", store.split("train"))])
    num_features, num_classes = store.schema.node_type("node").fields["x"].shape[0], int(y.max()) + 1
    model = context.wrap(SAGE(num_features, 128, num_classes, len(FANOUTS)))
    opt = torch.optim.Adam(model.parameters())
    best_accuracy, best_model = 0.0, hoploom.Checkpoint(path.parent, context)
    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            predictions, labels = model(batch), batch.y[: batch.batch_size]
            loss = context.mean_loss(F.cross_entropy(predictions, labels, reduction="none"))
            opt.zero_grad()
            loss.backward()
            opt.step()
            accuracy = (predictions.argmax(1) == labels).float().mean()
            mean = context.sum(loss) / context.world_size if step % 10 == 0 else None  # over the seeds of all ranks
            if context.is_main and mean is not None:
                print(f"Epoch {epoch:05d} Step {step:05d} Loss {mean:.4f} Accuracy {accuracy:.4f}", flush=True)
        valid = hoploom.evaluate(model, valid_dataloader, NodeClassification(num_classes), context)
        if context.is_main:
            print(f"Epoch {epoch} Validation Accuracy {valid['accuracy']:.4f}", flush=True)
        if best_accuracy < valid["accuracy"]:  # the same on every rank
            best_accuracy = valid["accuracy"]
            best_model.save("model", {"model": model}, epoch=epoch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True, help="the folder of ogbn-products as OGB downloads it")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 2)
    args = parser.parse_args()
    if not (args.root / "products.store").exists():
        import_ogb("ogbn-products", args.root, args.root / "products.store")
    hoploom.spawn(train, args.processes, args=[args.root / "products.store", args.epochs])
