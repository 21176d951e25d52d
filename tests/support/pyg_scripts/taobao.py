"""PyG's taobao example: loaders made before the process group, and links; rank 0 evaluates, and no rank waits."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import torch_geometric.transforms as T
import tqdm
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import Embedding, Linear
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import HeteroData
from torch_geometric.nn import SAGEConv

from hoploom import LinkNeighborLoader


class Model(torch.nn.Module):
    def __init__(self, num_users: int, num_items: int, channels: int) -> None:
        super().__init__()
        self.user_emb = Embedding(num_users, channels)
        self.item_emb = Embedding(num_items, channels)
        self.conv = SAGEConv((-1, -1), channels)
        self.lin = Linear(2 * channels, 1)

    def forward(self, x_dict: dict, edge_index_dict: dict, edge_label_index: Tensor) -> Tensor:
        user, item = self.user_emb(x_dict["user"]), self.item_emb(x_dict["item"])
        user = self.conv((item, user), edge_index_dict["item", "rev_to", "user"])
        row, col = edge_label_index
        return self.lin(torch.cat([user[row], item[col]], dim=-1)).view(-1)


def run_train(
    rank: int, data: HeteroData, train_data: HeteroData, val_data: HeteroData, world_size: int, port: str
) -> None:
    train_edge_label_idx = train_data["user", "to", "item"].edge_label_index
    train_edge_label_idx = train_edge_label_idx.split(train_edge_label_idx.size(1) // world_size, dim=1)[rank].clone()
    train_loader = LinkNeighborLoader(
        data=train_data,
        num_neighbors=[8, 4],
        edge_label_index=(("user", "to", "item"), train_edge_label_idx),
        neg_sampling="binary",
        batch_size=256,
        shuffle=True,
        num_workers=2,
        drop_last=True,
    )
    val_loader = LinkNeighborLoader(
        data=val_data,
        num_neighbors=[8, 4],
        edge_label_index=(("user", "to", "item"), val_data["user", "to", "item"].edge_label_index),
        edge_label=val_data["user", "to", "item"].edge_label,
        batch_size=256,
        shuffle=False,
        num_workers=2,
    )

    def train() -> float:
        model.train()
        total_loss = total_examples = 0
        for batch in tqdm.tqdm(train_loader, disable=True):
            optimizer.zero_grad()
            pred = model(batch.x_dict, batch.edge_index_dict, batch["user", "item"].edge_label_index)
            loss = F.binary_cross_entropy_with_logits(pred, batch["user", "item"].edge_label)
            loss.backward()
            optimizer.step()
            total_loss += float(loss)
            total_examples += pred.numel()
        return total_loss / total_examples

    @torch.no_grad()
    def test(loader: LinkNeighborLoader) -> tuple[float, int]:
        model.eval()
        preds, targets = [], []
        for batch in tqdm.tqdm(loader, disable=True):
            pred = model.module(batch.x_dict, batch.edge_index_dict, batch["user", "item"].edge_label_index)
            preds.append(pred.sigmoid().view(-1).cpu())
            targets.append(batch["user", "item"].edge_label.long().cpu())
        target = torch.cat(targets, dim=0).numpy()
        return roc_auc_score(target, torch.cat(preds, dim=0).numpy()), len(target)

    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = Model(data["user"].num_nodes, data["item"].num_nodes, channels=16)
    for batch in train_loader:  # initialize lazy modules
        _ = model(batch.x_dict, batch.edge_index_dict, batch["user", "item"].edge_label_index)
        break
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(1, 3):
        loss = train()
        if rank == 0:
            val_auc, count = test(val_loader)
            whole = val_data["user", "to", "item"].edge_label.numel()
            print(f"epoch {epoch}: loss {loss:.4f}, auc {val_auc:.2f} of {count} of {whole} links", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = HeteroData()
    data["user"].x, data["item"].x = torch.arange(400), torch.arange(300)
    user = torch.randint(400, (6000,))
    data["user", "to", "item"].edge_index = torch.stack([user, (user + torch.randint(20, (6000,))) % 300])
    data = T.ToUndirected()(data)
    train_data, val_data, _ = T.RandomLinkSplit(
        num_val=0.1,
        num_test=0.1,
        neg_sampling_ratio=1.0,
        add_negative_train_samples=False,
        edge_types=[("user", "to", "item")],
        rev_edge_types=[("item", "rev_to", "user")],
    )(data)
    mp.spawn(run_train, args=(data, train_data, val_data, 2, sys.argv[1]), nprocs=2, join=True)
