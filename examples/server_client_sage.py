"""Train GraphSAGE in server-client mode: servers hold the graph and make batches, trainers have no file of it.

A store in two parts, then two servers and two trainers, all on this host (server_client.toml):

    hoploom generate demo/graph.store --nodes 100000 --degree 20 --features 64 --classes 16
    hoploom partition demo/graph.store -o demo/graph.parts --parts 2 --fanouts 15,10
    hoploom launch examples/server_client.toml -- examples/server_client_sage.py

Or servers that stay, for one run after another, and any number of trainers:

    hoploom serve demo/graph.parts --listen 127.0.0.1:7700
    torchrun --standalone --nproc-per-node 2 examples/server_client_sage.py --servers 127.0.0.1:7700

Any server can make any batch, so a lost one is replaced by another, and the numbers do not change. Started with
--store and no server, the script makes the same batches by itself.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

import hoploom
from hoploom import NeighborLoader
from hoploom.nn import GraphSAGE
from hoploom.train import Context, NodeClassification

NUM_NEIGHBORS, BATCH_SIZE, LEARNING_RATE = [15, 10], 512, 0.003


def make_model(store: hoploom.Store) -> tuple[GraphSAGE, int]:
    """GraphSAGE for the store's features and classes, and the number of classes."""
    [labels] = store.features.gather([("node", "y", store.split("train"))])  # the servers' rows
    num_features, num_classes = store.schema.node_type("node").fields["x"].shape[0], int(labels.max()) + 1
    torch.manual_seed(12345)
    return GraphSAGE(num_features, hidden_channels=128, num_layers=2, out_channels=num_classes), num_classes


def run(context: Context, store: hoploom.Store, num_epochs: int) -> None:
    """What every process does: a loop as on one machine."""
    # blocks: every layer draws afresh; as batches come ready made, they could as well be PyG's subgraphs
    common = {"num_neighbors": NUM_NEIGHBORS, "mode": "blocks", "batch_size": BATCH_SIZE, "device": context.device}
    share = {"rank": context.rank, "world_size": context.world_size}
    train_loader = NeighborLoader(store, input_nodes="train", shuffle=True, **share, **common)
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
            losses = F.cross_entropy(model(batch), batch.y[: batch.batch_size], reduction="none")
            context.mean_loss(losses).backward()
            optimizer.step()
            loss_sum += losses.detach().sum()

        loss = context.sum(loss_sum) / len(store.split("train"))
        val = hoploom.evaluate(model, val_loader, task, context)
        if context.is_main:
            print(f"Epoch {epoch:02d}: loss {loss:.4f}, validation accuracy {val['accuracy']:.4f}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", help="host:port,...; hoploom launch names its own")
    parser.add_argument("--store", type=Path, help="a store here, where there are no servers")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args(argv)
    with hoploom.init() as context:
        store = context.open(arguments.store, servers=arguments.servers)  # as it was launched
        print(f"rank {context.rank} of {context.world_size} maps {len(store.parts)} of {len(store.ranges)} parts")
        run(context, store, arguments.epochs)


if __name__ == "__main__":
    main()
