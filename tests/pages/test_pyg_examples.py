"""Scripts in the form of PyG's examples and tutorials, on small graphs: nothing is changed but the import."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch_geometric.transforms as T  # noqa: N812
from torch import Tensor
from torch.nn import Linear
from torch.optim import Adam
from torch_geometric import seed_everything
from torch_geometric.data import Data, HeteroData
from torch_geometric.datasets import FakeDataset, FakeHeteroDataset
from torch_geometric.nn import GCN, SAGEConv, to_hetero
from tqdm import tqdm

# was: from torch_geometric.loader import LinkNeighborLoader, NeighborLoader
from hoploom import LinkNeighborLoader, NeighborLoader

pytestmark = pytest.mark.usefixtures("one_thread")
device = torch.device("cpu")
Losses = list[float]
SCRIPTS: list[Callable[[], Losses]] = []


def script(run: Callable[[], Losses]) -> Callable[[], Losses]:
    SCRIPTS.append(run)
    return run


def one_graph() -> Data:
    """Four classes, which the features tell."""
    seed_everything(0)
    dataset = FakeDataset(1, avg_num_nodes=400, avg_degree=6, num_channels=16, num_classes=4, task="node")
    return T.RandomNodeSplit(num_val=0.2, num_test=0.2)(dataset[0])


def types() -> HeteroData:
    seed_everything(0)
    dataset = FakeHeteroDataset(1, num_node_types=2, num_edge_types=3, avg_num_nodes=200, avg_degree=4, num_classes=3)
    data = T.ToUndirected()(dataset[0])
    data["v0"].train_mask = torch.rand(data["v0"].num_nodes) < 0.6
    return data


def ratings() -> HeteroData:
    seed_everything(0)
    data = HeteroData()
    data["user"].x, data["movie"].x = torch.eye(60), torch.randn(40, 8)
    data["user", "rates", "movie"].edge_index = torch.stack([torch.randint(60, (600,)), torch.randint(40, (600,))])
    data["user", "rates", "movie"].time = torch.arange(600)
    return T.ToUndirected()(data)


class SAGE(torch.nn.Module):
    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__()
        convs = [SAGEConv(in_channels, hidden_channels), SAGEConv(hidden_channels, out_channels)]
        self.convs = torch.nn.ModuleList(convs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i < len(self.convs) - 1:
                x = x.relu_()
        return x

    @torch.no_grad()
    def inference(self, x_all: Tensor, subgraph_loader: Any) -> Tensor:
        for i, conv in enumerate(self.convs):
            xs = []
            for batch in subgraph_loader:
                x = x_all[batch.n_id.to(x_all.device)].to(device)
                x = conv(x, batch.edge_index.to(device))
                if i < len(self.convs) - 1:
                    x = x.relu_()
                xs.append(x[: batch.batch_size].cpu())
            x_all = torch.cat(xs, dim=0)
        return x_all


@script
def reddit() -> Losses:
    """The loader for inference walks over a copy of the data without features."""
    data = one_graph()
    kwargs: Any = {"batch_size": 64, "num_workers": 2, "persistent_workers": True}
    train_loader = NeighborLoader(data, input_nodes=data.train_mask, num_neighbors=[25, 10], shuffle=True, **kwargs)
    subgraph_loader = NeighborLoader(copy.copy(data), input_nodes=None, num_neighbors=[-1], shuffle=False, **kwargs)
    del subgraph_loader.data.x, subgraph_loader.data.y
    subgraph_loader.data.num_nodes = data.num_nodes
    subgraph_loader.data.n_id = torch.arange(data.num_nodes)

    model = SAGE(16, 32, 4)
    optimizer = Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        pbar = tqdm(total=len(train_loader.dataset), disable=True)
        for batch in train_loader:
            optimizer.zero_grad()
            y = batch.y[: batch.batch_size]
            y_hat = model(batch.x, batch.edge_index.to(device))[: batch.batch_size]
            loss = F.cross_entropy(y_hat, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            pbar.update(batch.batch_size)
        assert pbar.n == pbar.total or pbar.disable
    assert all("x" not in batch and "y" not in batch for batch in subgraph_loader)
    y_hat = model.eval().inference(data.x, subgraph_loader)
    assert torch.allclose(y_hat, model(data.x, data.edge_index), atol=1e-4)
    return losses


def trained(model: torch.nn.Module, loader: Any, loss_of: Callable[[Any], Tensor]) -> Losses:
    optimizer = Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    return losses


@script
def to_hetero_mag() -> Losses:
    """A model for several types, whose sizes come from a first batch."""
    data = types()
    train_input_nodes = ("v0", data["v0"].train_mask)
    kwargs: Any = {"batch_size": 32, "num_workers": 2, "persistent_workers": True}
    train_loader = NeighborLoader(data, num_neighbors=[10] * 2, shuffle=True, input_nodes=train_input_nodes, **kwargs)
    val_loader = NeighborLoader(data, num_neighbors=[10] * 2, input_nodes=("v0", ~data["v0"].train_mask), **kwargs)
    model = to_hetero(SAGE((-1, -1), 16, 3), data.metadata(), aggr="sum")
    with torch.no_grad():
        batch = next(iter(train_loader))
        model(batch.x_dict, batch.edge_index_dict)
    assert sum(batch["v0"].batch_size for batch in val_loader) == int((~data["v0"].train_mask).sum())

    def loss_of(batch: HeteroData) -> Tensor:
        batch = batch.to(device, "edge_index")
        batch_size = batch["v0"].batch_size
        out = model(batch.x_dict, batch.edge_index_dict)["v0"][:batch_size]
        return F.cross_entropy(out, batch["v0"].y[:batch_size])

    return trained(model, train_loader, loss_of)


@script
def link_pred() -> Losses:
    """Links of a split of PyG's, in a graph of one type."""
    data = one_graph()
    split = T.RandomLinkSplit(num_val=0.1, num_test=0.1, is_undirected=False, add_negative_train_samples=False)
    train_data, val_data, _ = split(data)
    kwargs: Any = {"edge_label_index": train_data.edge_label_index, "edge_label": train_data.edge_label}
    kwargs |= {"neg_sampling_ratio": 1.0, "batch_size": 128, "shuffle": True}
    train_loader = LinkNeighborLoader(train_data, num_neighbors=[10, 5], **kwargs)
    kwargs = {"edge_label_index": val_data.edge_label_index, "edge_label": val_data.edge_label, "batch_size": 256}
    val_loader = LinkNeighborLoader(val_data, [10, 5], **kwargs)
    assert {0, 1} == {int(label) for batch in val_loader for label in batch.edge_label}
    model = GCN(16, 32, 2, 16)

    def loss_of(batch: Data) -> Tensor:
        h = model(batch.x, batch.edge_index)
        src, dst = batch.edge_label_index
        return F.binary_cross_entropy_with_logits((h[src] * h[dst]).sum(dim=-1), batch.edge_label)

    return trained(model, train_loader, loss_of)


class Bipartite(torch.nn.Module):
    def __init__(self, metadata: Any) -> None:
        super().__init__()
        self.encoder = to_hetero(SAGE((-1, -1), 16, 16), metadata)
        self.lin = Linear(32, 1)

    def forward(self, x_dict: Any, edge_index_dict: Any, edge_label_index: Tensor) -> Tensor:
        z_dict = self.encoder(x_dict, edge_index_dict)
        row, col = edge_label_index
        return self.lin(torch.cat([z_dict["user"][row], z_dict["movie"][col]], dim=-1)).view(-1)


def trained_on_ratings(data: HeteroData, loader: Any) -> Losses:
    model = Bipartite(data.metadata())
    losses = []
    for batch in loader:
        edge = batch["user", "rates", "movie"]
        pred = model(batch.x_dict, batch.edge_index_dict, edge.edge_label_index)
        losses.append(F.binary_cross_entropy_with_logits(pred, edge.edge_label.float()))
        losses[-1].backward()
    return [float(loss) for loss in losses]


@script
def bipartite_link_pred() -> Losses:
    """The split keeps supervision apart from messages; ends name the relation, as there is one."""
    kwargs: Any = {"num_val": 0.1, "num_test": 0.1, "disjoint_train_ratio": 0.3, "neg_sampling_ratio": 0.0}
    kwargs |= {"edge_types": [("user", "rates", "movie")], "rev_edge_types": [("movie", "rev_rates", "user")]}
    train_data, _, _ = T.RandomLinkSplit(**kwargs)(ratings())
    edge_label_index = train_data["user", "rates", "movie"].edge_label_index
    kwargs = {"neg_sampling": {"mode": "binary", "amount": 2}, "batch_size": 64, "shuffle": True}
    kwargs |= {"edge_label_index": (("user", "movie"), edge_label_index)}
    kwargs |= {"edge_label": train_data["user", "rates", "movie"].edge_label}
    return trained_on_ratings(train_data, LinkNeighborLoader(data=train_data, num_neighbors=[20, 10], **kwargs))


@script
def temporal_link_pred() -> Losses:
    data = ratings()
    edge_type = ("user", "rates", "movie")
    data["user"].time, data["movie"].time = torch.zeros(60, dtype=torch.long), torch.zeros(40, dtype=torch.long)
    for key in data.edge_types:
        del data[key].time
    data["movie"].time[20:] = 300
    index = data[edge_type].edge_index
    time = torch.full((index.size(1),), 100) + 400 * (index[1] >= 20)
    kwargs: Any = {"edge_label_index": (edge_type, index), "edge_label_time": time - 1, "time_attr": "time"}
    kwargs |= {"temporal_strategy": "last", "neg_sampling_ratio": 0.5, "batch_size": 128, "shuffle": True}
    loader = LinkNeighborLoader(data, num_neighbors=[8, 4], **kwargs)
    for batch in loader:
        assert (batch["movie"].time <= batch[edge_type].edge_label_time[batch["movie"].batch]).all()
    return trained_on_ratings(data, loader)


@script
def recommender_system() -> Losses:
    """All movies and users are embedded after training, at one point in time."""
    data = ratings()
    data["user", "rates", "movie"].time = data["movie", "rev_rates", "user"].time = torch.arange(600)
    kwargs: Any = {"num_neighbors": [5, 5], "time_attr": "time", "temporal_strategy": "last", "batch_size": 16}
    encoder = to_hetero(SAGE((-1, -1), 16, 16), data.metadata())
    embeddings = {}
    for node_type in data.node_types:
        time = torch.tensor([500]).repeat(data[node_type].num_nodes)
        loader = NeighborLoader(data, input_nodes=node_type, input_time=time, **kwargs)
        parts = [
            encoder(batch.x_dict, batch.edge_index_dict)[node_type][: batch[node_type].batch_size] for batch in loader
        ]
        embeddings[node_type] = torch.cat(parts)
        assert embeddings[node_type].shape == (data[node_type].num_nodes, 16)
        assert all((batch["user", "rates", "movie"].time <= 500).all() for batch in loader)
    return [float((embeddings["user"] @ embeddings["movie"].t()).mean())]


@pytest.mark.parametrize("run", SCRIPTS, ids=lambda run: run.__name__)
def test_a_script_of_pyg_runs_with_one_import_changed(run: Callable[[], Losses]) -> None:
    losses = run()
    assert len(losses) > 0
    assert all(torch.tensor(losses).isfinite())
    if len(losses) > 10:  # it trains
        assert sum(losses[-3:]) < sum(losses[:3])
