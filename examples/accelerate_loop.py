"""Train with accelerate: `prepare` leaves the loader as it is, since it divides its seeds over the ranks by itself.

accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py FOLDER [epochs]
On CPUs, too. torchrun --standalone --nproc-per-node 2 does the same.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GraphSAGE

import hoploom


def main(folder: Path, epochs: int) -> None:
    """`FOLDER/state`, if it is there, is where an earlier run stood: within an epoch, too."""
    # first, since loaders read its process group; without cpu=True, its ranks on CPUs would train apart
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    store = hoploom.open(folder / "graph.store")
    loader = hoploom.NeighborLoader(store, [10, 5], input_nodes="train", batch_size=64, shuffle=True)
    val_loader = hoploom.NeighborLoader(store, [10, 5], input_nodes="val", batch_size=64)
    model = GraphSAGE(16, 32, num_layers=2, out_channels=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader, val_loader = accelerator.prepare(model, optimizer, loader, val_loader)
    accelerator.register_for_checkpointing(loader)
    if (folder / "state").exists():
        accelerator.load_state(folder / "state")

    while loader.state_dict()["epoch"] < epochs:
        seeds = 0
        for batch in loader:
            outputs = model(batch.x, batch.edge_index)[: batch.batch_size]
            accelerator.backward(cross_entropy(outputs, batch.y[: batch.batch_size]))
            optimizer.step()
            optimizer.zero_grad()
            seeds += batch.batch_size
        accelerator.save_state(folder / "state")
        hits = torch.zeros(2, device=accelerator.device)
        with torch.no_grad():
            for batch in val_loader:  # each rank has its share of the seeds
                outputs = accelerator.unwrap_model(model)(batch.x, batch.edge_index)[: batch.batch_size]
                hits += torch.tensor([(outputs.argmax(dim=1) == batch.y[: batch.batch_size]).sum(), batch.batch_size])
        right, num_val = accelerator.reduce(hits).tolist()
        trained = int(accelerator.reduce(torch.tensor(seeds, device=accelerator.device)))
        accelerator.print(
            f"epoch {loader.epoch}: {trained} seeds, accuracy {right / num_val:.3f} of {int(num_val)} seeds"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3)
