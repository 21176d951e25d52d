"""Train a GCN on the GPUs of several machines; a lost process costs the steps since the last checkpoint.

One machine with 8 GPUs, and two of them (the same line on both; `gpu1` is one of the two):

    torchrun --standalone --nproc-per-node 8 multi_node_gcn.py
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint gpu1:29400 --rdzv-id 1 \\
        --max-restarts 3 multi_node_gcn.py --folder /shared/run

Under Slurm, with a container by pyxis (leave the three --container lines out where there is none):

    #!/bin/bash
    #SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12
    srun --label --kill-on-bad-exit=1 --cpus-per-task=12 \\
        --container-name=hoploom \\
        --container-image=IMAGE_WITH_TORCH_AND_HOPLOOM \\
        --container-mounts=/shared:/shared \\
        python3 multi_node_gcn.py --folder /shared/run --store /shared/papers100M.store

`--folder` and the store lie on a file system that all machines share. Started again, the script continues at the very
next step, also with another number of processes. Without --store it generates a graph with float16 features.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

import hoploom
from hoploom import NeighborLoader
from hoploom.nn import GCN
from hoploom.train import Context, Learner, NodeClassification, Training

NUM_FEATURES, NUM_CLASSES = 128, 172  # as in papers100M
GLOBAL_BATCH_SIZE = 2048  # over all processes, so that a step stays a step when their number changes


def open_store(context: Context, path: Path | None, folder: Path, num_nodes: int) -> hoploom.Store:
    """The store at `path`, else a generated one, which rank 0 writes while the others wait."""
    if path is None:
        path = folder / f"generated-{num_nodes}.store"
        if context.is_main and not path.exists():
            shape = {"num_nodes": num_nodes, "num_features": NUM_FEATURES, "num_classes": NUM_CLASSES}
            hoploom.generate(path, **shape, avg_degree=20, homophily=0.8, feature_dtype="float16")
        context.barrier()
    return hoploom.open(path)


def run(context: Context, store: hoploom.Store, folder: Path, num_epochs: int) -> dict[str, float]:
    """Train, from the last checkpoint where there is one; the test metrics of the best epoch."""
    common = {"num_neighbors": [10, 10], "num_workers": 4, "device": context.device}
    share = {"rank": context.rank, "world_size": context.world_size}
    batch_size = max(1, GLOBAL_BATCH_SIZE // context.world_size)
    train_loader = NeighborLoader(store, input_nodes="train", shuffle=True, batch_size=batch_size, **share, **common)
    val_loader = NeighborLoader(store, input_nodes="val", batch_size=batch_size, **common)
    test_loader = NeighborLoader(store, input_nodes="test", batch_size=batch_size, **common)

    torch.manual_seed(0)
    num_features = store.schema.node_type("node").fields["x"].shape[0]
    model = context.wrap(GCN(num_features, hidden_channels=256, num_layers=2, out_channels=NUM_CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    task = NodeClassification(NUM_CLASSES)
    learner = Learner(model, optimizer, task, train_loader)

    checkpoint = hoploom.Checkpoint(folder, context)
    checkpoint.restore("last", learner.parts())
    hoploom.fit(
        learner,
        Training(epochs=num_epochs, checkpoint_every=500),
        context,
        validate=lambda: hoploom.evaluate(model, val_loader, task, context),
        checkpoint=checkpoint,
    )
    checkpoint.restore("best", {"model": model})
    return hoploom.evaluate(model, test_loader, task, context)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="a store with splits and 172 classes; else a graph is generated")
    parser.add_argument("--nodes", type=int, default=1_000_000, help="of the generated graph")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/multi_node_gcn"), help="checkpoints; shared by all")
    arguments = parser.parse_args(argv)
    with hoploom.init() as context:
        store = open_store(context, arguments.store, arguments.folder, arguments.nodes)
        test = run(context, store, arguments.folder, arguments.epochs)
        if context.is_main:
            print(f"Test accuracy {test['accuracy']:.4f} with {context.world_size} processes", flush=True)


if __name__ == "__main__":
    main()
