"""Ranks that Lightning or accelerate starts: each notes the seeds that it gets, by epoch, in FOLDER/NAME-RANK.json.

python trainer_workers.py lightning-method|lightning-direct|lightning-resumed|accelerate FOLDER NAME NUM_STEPS
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import hoploom

NUM_TRAIN, BATCH_SIZE = 53, 8


def loaders(folder: Path) -> tuple[hoploom.NeighborLoader, hoploom.NeighborLoader]:
    store = hoploom.open(folder / "graph.store")
    common = {"num_neighbors": [2], "batch_size": BATCH_SIZE}
    train = hoploom.NeighborLoader(store, input_nodes=list(range(NUM_TRAIN)), shuffle=True, **common)
    return train, hoploom.NeighborLoader(store, input_nodes=list(range(60, 91)), **common)


def with_lightning(folder: Path, name: str, *, direct: bool, resumed: bool = False) -> None:
    """Two epochs; then, if asked, what is left of them from the checkpoint after each step but the last."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Noting(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)
            self.notes: list[Any] = []

        def train_dataloader(self) -> hoploom.NeighborLoader:
            return loaders(folder)[0]

        def val_dataloader(self) -> hoploom.NeighborLoader:
            return loaders(folder)[1]

        def training_step(self, batch: Any) -> torch.Tensor:
            self.notes.append(("train", self.current_epoch, batch.input_id.tolist()))
            return self.linear(batch.x).mean()

        def validation_step(self, batch: Any) -> None:
            self.notes.append(("val", self.current_epoch, batch.input_id.tolist()))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(name: str, checkpoint: str | None = None) -> int:
        module, saving = Noting(), ModelCheckpoint(folder / name, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = lightning.Trainer(
            max_epochs=2, strategy="ddp", devices=2, accelerator="cpu", logger=False, num_sanity_val_steps=0,
            enable_checkpointing=resumed, callbacks=[saving] if resumed else [], enable_progress_bar=False,
        )  # fmt: skip
        given = dict(zip(("train_dataloaders", "val_dataloaders"), loaders(folder), strict=True)) if direct else {}
        trainer.fit(module, ckpt_path=checkpoint, **given)
        (folder / f"{name}-{trainer.global_rank}.json").write_text(json.dumps(module.notes))
        return trainer.global_step

    num_steps = fit(name)
    for step in range(1, num_steps if resumed else 1):
        fit(f"from-{step}", str(folder / name / f"step={step}.ckpt"))


def with_accelerate(folder: Path, name: str, num_steps: int) -> None:
    """The same, or until NUM_STEPS are taken; FOLDER/state is continued where it is there."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    train, val = accelerator.prepare(*loaders(folder))
    accelerator.register_for_checkpointing(train)
    stopped, notes = folder / "state", []
    if stopped.exists():
        accelerator.load_state(str(stopped))
    for step, note in enumerate(_epochs(train, val), 1):
        notes.append(note)
        if step == num_steps:
            accelerator.save_state(str(stopped))
            break
    (folder / f"{name}-{accelerator.process_index}.json").write_text(json.dumps(notes))
    accelerator.end_training()


def _epochs(train: hoploom.NeighborLoader, val: hoploom.NeighborLoader) -> Iterator[Any]:
    while (epoch := train.state_dict()["epoch"]) < 2:
        for batch in train:
            yield "train", epoch, batch.input_id.tolist()
        yield from [("val", epoch, batch.input_id.tolist()) for batch in val]


if __name__ == "__main__":
    how, folder, name, num_steps = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    if how == "accelerate":
        with_accelerate(folder, name, num_steps)
    else:
        with_lightning(folder, name, direct=how == "lightning-direct", resumed=how == "lightning-resumed")
