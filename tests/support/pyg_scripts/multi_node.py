"""PyG's multi-node example under torchrun, with a loader for layer-wise evaluation on rank 0 alone."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

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

    @torch.no_grad()
    def inference(self, x_all: Tensor, subgraph_loader: NeighborLoader) -> Tensor:
        for i, conv in enumerate(self.convs):
            xs = []
            for batch in subgraph_loader:
                x = conv(x_all[batch.node_id], batch.edge_index)
                xs.append(x[: batch.batch_size].relu_() if i == 0 else x[: batch.batch_size])
            x_all = torch.cat(xs, dim=0)
        return x_all


def run(world_size: int, rank: int, local_rank: int) -> None:
    torch.manual_seed(0)
    num_nodes = 1200
    y = torch.randint(4, (num_nodes,))
    data = Data(x=F.one_hot(y, 8).float() + torch.rand(num_nodes, 8), y=y, edge_index=torch.randint(1200, (2, 7000)))

    input_nodes = torch.arange(data.num_nodes).split(data.num_nodes // world_size)[rank].clone()
    kwargs = {"batch_size": 128, "num_workers": 2, "persistent_workers": True}
    train_loader = NeighborLoader(data, input_nodes=input_nodes, num_neighbors=[10, 10], shuffle=True, **kwargs)
    if rank == 0:
        subgraph_loader = NeighborLoader(copy.copy(data), num_neighbors=[-1], shuffle=False, **kwargs)
        del subgraph_loader.data.x, subgraph_loader.data.y
        subgraph_loader.data.node_id = torch.arange(data.num_nodes)

    torch.manual_seed(12345)
    model = DistributedDataParallel(SAGE(data.num_features, 32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(1, 4):
        model.train()
        seen = 0
        for batch in train_loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            seen += batch.batch_size
        dist.barrier()
        print(f"rank {rank} on {local_rank} read {seen} seeds", flush=True)

        if rank == 0:
            model.eval()
            out = model.module.inference(data.x, subgraph_loader)
            accuracy = float((out.argmax(dim=-1) == data.y).float().mean())
            print(f"epoch {epoch}: accuracy {accuracy:.2f} of {len(out)} nodes", flush=True)
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_world_size(), dist.get_rank(), int(os.environ["LOCAL_RANK"]))
    dist.destroy_process_group()
