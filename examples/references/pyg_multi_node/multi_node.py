"""PyG's tutorial "Multi-Node-Multi-GPU Training in Pure PyTorch": a GCN on any number of hosts.

    srun -l -N2 --ntasks-per-node=8 python3 multi_node.py --store /shared/fake.store   # see job.sh for containers
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint gpu1:29400 multi_node.py ...

The store must be on a file system that all hosts share. If it does not exist, the script generates a graph.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn.models import GCN

import hoploom
from hoploom import NeighborLoader
from hoploom.train import Context


def open_store(context: Context, path: Path, num_nodes: int) -> hoploom.Store:
    """The store at this path. Where there is none, rank 0 writes PyG's generated graph."""
    if context.is_main and not path.exists():
        hoploom.from_pyg(FakeDataset(avg_num_nodes=num_nodes)[0]).save(path)
    context.barrier()
    return hoploom.open(path)


def run(context: Context, store: hoploom.Store, num_epochs: int) -> None:
    fields = store.schema.node_type("node").fields
    [y] = store.features.gather([("node", "y", torch.arange(store.schema.node_type("node").num_nodes))])
    model = context.wrap(GCN(fields["x"].shape[0], 64, num_layers=2, out_channels=int(y.max()) + 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # FakeDataset has no splits, so all nodes are seeds, as in the tutorial. Each rank gets its share of them.
    seeds = "train" if "train" in store.schema.node_type("node").splits else None
    loader = NeighborLoader(store, [10, 10], seeds, batch_size=128, shuffle=True, device=context.device)
    place = f"rank {context.rank} of {context.world_size}, local rank {context.local_rank}"
    print(f"{place}: {len(loader)} steps on {context.device}", flush=True)
    for epoch in range(1, num_epochs + 1):
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            losses = F.cross_entropy(out, batch.y[: batch.batch_size], reduction="none")
            loss = context.mean_loss(losses)
            loss.backward()
            optimizer.step()
        mean = context.sum(loss) / context.world_size  # over the seeds of all ranks
        if context.is_main:
            print(f"Epoch: {epoch:02d}, Loss: {mean:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path, default=Path("fake.store"))
    parser.add_argument("--nodes", type=int, default=100_000, help="of the generated graph")
    parser.add_argument("--epochs", type=int, default=9)
    args = parser.parse_args()
    with hoploom.init() as context:  # torchrun or Slurm says who this is
        run(context, open_store(context, args.store, args.nodes), args.epochs)
