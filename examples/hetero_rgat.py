"""Train an attention model on papers, authors and institutions, and write predictions for all papers to Parquet.

    python examples/hetero_rgat.py                    # one process per GPU, or one on the CPU

Training samples the neighbourhoods of labelled papers. Inference does not sample: it computes one layer after the other
for all nodes, from all neighbours. The rows between layers are on disk, so the graph may be larger than memory.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from pyarrow import parquet

import hoploom
from hoploom import NeighborLoader
from hoploom.inference import Inference
from hoploom.nn import GNN, Shape
from hoploom.train import Context, Learner, NodeClassification, Training

NUM_CLASSES, FANOUTS, BATCH_SIZE = 16, [10, 5], 512


def run(context: Context, path: Path, folder: Path, num_epochs: int) -> None:
    """What every process does."""
    store = hoploom.open(path)

    def load(split: str, **options: object) -> NeighborLoader:
        options |= {"batch_size": BATCH_SIZE, "num_workers": 2, "device": context.device}
        return NeighborLoader(store, FANOUTS, input_nodes=split, **options)

    train_loader = load("train", shuffle=True, rank=context.rank, world_size=context.world_size)
    val_loader = load("val")

    torch.manual_seed(0)
    shape = Shape(hidden=64, num_layers=2, out=NUM_CLASSES, heads=4, dropout=0.1, norm=True, residual=True)
    model = context.wrap(GNN("rgat", store.schema, shape, out_types=["paper"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    task = NodeClassification(NUM_CLASSES, node_type="paper")
    learner = Learner(model, optimizer, task, train_loader)

    checkpoint = hoploom.Checkpoint(folder, context)
    hoploom.fit(
        learner,
        Training(epochs=num_epochs, patience=3, clip_norm=1.0),
        context,
        validate=lambda: hoploom.evaluate(model, val_loader, task, context),
        checkpoint=checkpoint,
    )
    checkpoint.restore("best", {"model": model})
    inference = Inference(task=task, node_types=["paper"])
    out = hoploom.infer(model, store, folder / "predictions", context, inference=inference)
    if context.is_main:
        report(store, out)


def report(store: hoploom.Store, out: Path) -> None:
    """The accuracy over the test papers of what was written."""
    table = parquet.read_table(out / "paper", columns=["id", "prediction"])
    ids, found = (torch.tensor(table[name].to_numpy()) for name in ("id", "prediction"))
    predicted = torch.empty_like(found)
    predicted[ids] = found
    papers = store.split("test")
    [fields] = store.features.gather([("paper", "y", papers)])
    accuracy = (predicted[papers] == fields).float().mean().item()
    print(f"Wrote {len(ids):,} papers to {out}; accuracy of the test papers {accuracy:.4f}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=50_000, help="papers; there are as many authors")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 1)
    parser.add_argument("--folder", type=Path, default=Path("runs/hetero_rgat"))
    arguments = parser.parse_args(argv)
    path = arguments.folder / f"generated-{arguments.nodes}.store"
    if not path.exists():
        shape = {"num_nodes": arguments.nodes, "num_features": 64, "num_classes": NUM_CLASSES}
        hoploom.generate(path, **shape, heterogeneous=True, homophily=0.7)
    shutil.rmtree(arguments.folder / "predictions", ignore_errors=True)  # of an earlier run
    hoploom.spawn(run, arguments.processes, args=[path, arguments.folder, arguments.epochs])


if __name__ == "__main__":
    main()
