"""PyG's distributed_sampling example: all ranks evaluate their own parts of three splits, and average the results."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torchmetrics import Accuracy

from hoploom import NeighborLoader


class SAGE(torch.nn.Module):
    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(
            [SAGEConv(in_channels, hidden_channels), SAGEConv(hidden_channels, out_channels)]
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.convs[0](x, edge_index).relu_()
        return self.convs[1](x, edge_index)


def eval(loader: NeighborLoader, model: torch.nn.Module, acc: Accuracy) -> float:
    acc_sum = 0.0
    with torch.no_grad():
        for i, batch in enumerate(loader):  # noqa: B007
            out = model.module(batch.x, batch.edge_index)
            acc_sum += acc(out[: batch.batch_size].softmax(dim=-1), batch.y[: batch.batch_size])
    return acc_sum / (i + 1.0) * 100.0


def run(rank: int, world_size: int, data: Data, port: str) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)

    train_idx = data.train_mask.nonzero(as_tuple=False).view(-1)
    train_idx = train_idx.split(train_idx.size(0) // world_size)[rank]
    val_idx = data.val_mask.nonzero(as_tuple=False).view(-1)
    val_idx = val_idx.split(val_idx.size(0) // world_size)[rank]
    test_idx = data.test_mask.nonzero(as_tuple=False).view(-1)
    test_idx = test_idx.split(test_idx.size(0) // world_size)[rank]
    kwargs = dict(batch_size=64, num_workers=2, persistent_workers=True)
    train_loader = NeighborLoader(
        data, input_nodes=train_idx, num_neighbors=[25, 10], shuffle=True, drop_last=True, **kwargs
    )
    val_loader = NeighborLoader(data, input_nodes=val_idx, num_neighbors=[25, 10], drop_last=True, **kwargs)
    test_loader = NeighborLoader(data, input_nodes=test_idx, num_neighbors=[25, 10], drop_last=True, **kwargs)

    torch.manual_seed(12345)
    acc = Accuracy(task="multiclass", num_classes=4)
    model = DistributedDataParallel(SAGE(data.num_features, 32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(1, 5):
        model.train()
        for batch in train_loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()

        dist.barrier()

        if epoch % 2 == 0:
            model.eval()
            for name, loader in ("train", train_loader), ("val", val_loader), ("test", test_loader):
                accuracy = torch.tensor(float(eval(loader, model, acc)))
                dist.all_reduce(accuracy, op=dist.ReduceOp.SUM)
                if rank == 0:
                    print(f"epoch {epoch}: {name} accuracy {float(accuracy) / world_size:.1f} in {len(loader)} steps")

        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    split, y = torch.randperm(1500), torch.randint(4, (1500,))
    data = Data(x=F.one_hot(y, 8).float() + torch.rand(1500, 8), y=y, edge_index=torch.randint(1500, (2, 9000)))
    data.train_mask, data.val_mask, data.test_mask = split < 801, (split >= 801) & (split < 1100), split >= 1100
    mp.spawn(run, args=(2, data, sys.argv[1]), nprocs=2, join=True)
