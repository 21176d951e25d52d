"""Train with Lightning on two processes: the loader is made in `train_dataloader`, where each rank knows its number.

Give it an empty folder: python examples/lightning_ddp.py FOLDER [epochs] [--resume]
"""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import hoploom


class Model(lightning.LightningModule):
    """PyG's GraphSAGE over Hoploom's batches."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.store = hoploom.open(folder / "graph.store")
        self.net = GraphSAGE(16, 32, num_layers=2, out_channels=4)

    def loader(self, split: str, *, shuffle: bool = False) -> hoploom.NeighborLoader:
        return hoploom.NeighborLoader(self.store, [10, 5], input_nodes=split, batch_size=64, shuffle=shuffle)

    def train_dataloader(self) -> hoploom.NeighborLoader:
        return self.loader("train", shuffle=True)

    def val_dataloader(self) -> hoploom.NeighborLoader:
        return self.loader("val")

    def outputs(self, batch: Data) -> Tensor:
        return self.net(batch.x, batch.edge_index)[: batch.batch_size]  # the seeds come first

    def training_step(self, batch: Data) -> Tensor:
        self.log("seeds", float(batch.batch_size), reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)
        return cross_entropy(self.outputs(batch), batch.y[: batch.batch_size])

    def validation_step(self, batch: Data) -> None:
        hits = (self.outputs(batch).argmax(dim=1) == batch.y[: batch.batch_size]).float()
        # batch_size weighs this rank's batches; sync_dist averages over the ranks
        self.log("accuracy", hits.mean(), batch_size=batch.batch_size, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(folder: Path, epochs: int, *, resume: bool) -> None:
    """Two processes; Lightning saves a checkpoint after every epoch."""
    saving = ModelCheckpoint(folder / "checkpoints", save_last=True)
    options = {"strategy": "ddp", "devices": 2, "accelerator": "cpu", "logger": False}
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=[saving], **options)
    trainer.fit(Model(folder), ckpt_path="last" if resume else None)
    if trainer.is_global_zero:
        print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word != "--resume"]
    main(Path(given[0]), int(given[1]) if len(given) > 1 else 3, resume="--resume" in sys.argv)
