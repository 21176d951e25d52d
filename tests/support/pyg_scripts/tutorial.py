"""The multi-GPU tutorial of PyG on the CPU, with Gloo; only the import of the loader is another."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import GraphSAGE

from hoploom import NeighborLoader


def run(rank: int, world_size: int, dataset: FakeDataset, port: str) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)

    data = dataset[0]
    train_index = data.train_mask.nonzero().view(-1)
    train_index = train_index.split(train_index.size(0) // world_size)[rank]

    train_loader = NeighborLoader(
        data, input_nodes=train_index, num_neighbors=[25, 10], batch_size=128, num_workers=2, shuffle=True
    )

    if rank == 0:
        val_index = data.val_mask.nonzero().view(-1)
        val_loader = NeighborLoader(
            data, input_nodes=val_index, num_neighbors=[25, 10], batch_size=128, num_workers=2, shuffle=False
        )

    torch.manual_seed(12345)
    model = GraphSAGE(
        in_channels=dataset.num_features, hidden_channels=32, num_layers=2, out_channels=dataset.num_classes
    )
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    for epoch in range(1, 4):
        seen = 0
        model.train()
        for batch in train_loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            seen += batch.batch_size

        dist.barrier()
        print(f"rank {rank} read {seen} of {len(train_index)} seeds in {len(train_loader)} steps", flush=True)

        if rank == 0:
            model.eval()
            count = correct = 0
            with torch.no_grad():
                for batch in val_loader:
                    out = model.module(batch.x, batch.edge_index)[: batch.batch_size]
                    pred = out.argmax(dim=-1)
                    correct += int((pred == batch.y[: batch.batch_size]).sum())
                    count += batch.batch_size
            print(
                f"epoch {epoch}: {count} of {len(val_index)} for validation, accuracy {correct / count:.2f}", flush=True
            )

        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    dataset = FakeDataset(num_graphs=1, avg_num_nodes=1200, avg_degree=8, num_channels=16, num_classes=4)
    split = torch.randperm(dataset[0].num_nodes)
    dataset._data.train_mask = split < 701
    dataset._data.val_mask = split >= 901
    dataset._data_list = None
    mp.spawn(run, args=(2, dataset, sys.argv[1]), nprocs=2, join=True)
