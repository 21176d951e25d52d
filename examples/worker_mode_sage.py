"""Train GraphSAGE in worker mode: every host holds parts of the graph, serves them to the others, and trains.

A store in two parts, then two "hosts", which are both this one (worker_mode.toml):

    hoploom generate demo/graph.store --nodes 100000 --degree 20 --features 64 --classes 16
    hoploom partition demo/graph.store -o demo/graph.parts --parts 2 --fanouts 15,10
    hoploom launch examples/worker_mode.toml -- examples/worker_mode_sage.py

The same script without a cluster file. On one host every process maps the whole store; on several, with parts, a
graph server is started beside the processes of each:

    torchrun --standalone --nproc-per-node 2 examples/worker_mode_sage.py --store demo/graph.parts
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint gpu1:29400 examples/worker_mode_sage.py

Nothing below says where the graph is: `context.open` finds out, and batches are the same wherever it is.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

import hoploom
from hoploom import NeighborLoader
from hoploom.load.presample import count_visits
from hoploom.nn import GraphSAGE
from hoploom.store.row_cache import cached, report
from hoploom.train import Context, NodeClassification

NUM_NEIGHBORS, BATCH_SIZE, LEARNING_RATE = [15, 10], 512, 0.003


def make_model(store: hoploom.Store) -> tuple[GraphSAGE, int]:
    """GraphSAGE for the store's features and classes, and the number of classes."""
    [labels] = store.features.gather([("node", "y", store.split("train"))])
    num_features, num_classes = store.schema.node_type("node").fields["x"].shape[0], int(labels.max()) + 1
    torch.manual_seed(12345)
    return GraphSAGE(num_features, hidden_channels=128, num_layers=2, out_channels=num_classes), num_classes


def run(context: Context, store: hoploom.Store, num_epochs: int) -> None:
    """What every process does: a loop as on one machine."""
    common = {"num_neighbors": NUM_NEIGHBORS, "batch_size": BATCH_SIZE, "num_workers": 2, "device": context.device}
    share = {"rank": context.rank, "world_size": context.world_size}
    # With locality, a process gets the seeds of its own host's parts, as far as equal batches allow.
    train_loader = NeighborLoader(store, input_nodes="train", shuffle=True, locality=True, **share, **common)
    val_loader = NeighborLoader(store, input_nodes="val", **common)  # evaluate shares it out

    model, num_classes = make_model(store)
    model = context.wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    task = NodeClassification(num_classes)

    for epoch in range(1, num_epochs + 1):
        model.train()
        loss_sum = torch.zeros((), device=context.device)
        for batch in train_loader:
            optimizer.zero_grad()
            losses = F.cross_entropy(model(batch)[: batch.batch_size], batch.y[: batch.batch_size], reduction="none")
            context.mean_loss(losses).backward()
            optimizer.step()
            loss_sum += losses.detach().sum()

        loss = context.sum(loss_sum) / len(store.split("train"))
        val = hoploom.evaluate(model, val_loader, task, context)
        if context.is_main:
            print(f"Epoch {epoch:02d}: loss {loss:.4f}, validation accuracy {val['accuracy']:.4f}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("demo/graph.parts"), help="hoploom launch names its own")
    parser.add_argument("--cache", default="20%", help="of the other hosts' rows; a share, or a size such as 4GB")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args(argv)
    with hoploom.init() as context:
        store = context.open(arguments.store)  # here, on servers, or both: as it was launched
        print(f"rank {context.rank} of {context.world_size} maps {len(store.parts)} of {len(store.ranges)} parts")
        # Rows that training will ask the other hosts for most, as sampling tells; those of this host are mapped anyway.
        store = cached(store, arguments.cache, count_visits(store, NUM_NEIGHBORS, "train"))
        run(context, store, arguments.epochs)
        if report(store) is not None:
            print(f"rank {context.rank}: {report(store)}", flush=True)


if __name__ == "__main__":
    main()
