"""Training on sampled batches is as accurate as published: GraphSAGE on Tolokers, a real graph.

Minutes of full-batch training shrink to seconds by a smaller model (two layers of 64) and larger steps.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.metrics import roc_auc_score
from support.real_graphs import file_of, real_graphs
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import trim_to_layer

from hoploom import NeighborLoader

pytestmark = pytest.mark.usefixtures("one_thread")  # small tensors gain nothing from more

PUBLISHED = 0.8243  # SAGE, the mean of ten splits (yandex-research/heterophilous-graphs)
EPOCHS, RATE, WIDTH = 40, 0.015, 64


def tolokers(split: int) -> Data:
    data = real_graphs.read_tolokers(file_of("tolokers"), split)
    return data.update({"y": data.y.float()})


class Sage(nn.Module):
    """GraphSAGE with residual connections and layer norms, as in the published comparison."""

    def __init__(self, num_features: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(num_features, width), nn.Linear(width, 1)
        self.convolutions = nn.ModuleList(SAGEConv(width, width) for _ in range(num_layers))
        self.mixers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_layers + 1))

    def forward(self, x: Tensor, edge_index: Tensor, counts: tuple[list[int], list[int]] | None = None) -> Tensor:
        """One logit per node; of a batch, told its counts, only the seeds' are of use."""
        x = self._drop(F.gelu(self.first(x)))
        for number, (convolution, mixer) in enumerate(zip(self.convolutions, self.mixers, strict=True)):
            if counts is not None:
                x, edge_index, _ = trim_to_layer(number, *counts, x, edge_index)
            x = x + self._drop(mixer(F.gelu(convolution(self.norms[number](x), edge_index))))
        return self.last(self.norms[-1](x)).squeeze(-1)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.2, self.training)


def train(data: Data) -> Sage:
    torch.manual_seed(0)
    model = Sage(data.num_features, WIDTH, num_layers=2)
    loader = NeighborLoader(data, [15, 10], data.train_mask, batch_size=1024, shuffle=True, num_workers=1)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=EPOCHS * len(loader))
    for _ in range(EPOCHS):
        for batch in loader:
            logits = model(batch.x, batch.edge_index, (batch.num_sampled_nodes, batch.num_sampled_edges))
            loss = F.binary_cross_entropy_with_logits(logits[: batch.batch_size], batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def roc_auc(model: Sage, data: Data) -> float:
    """On the test nodes, with all neighbours."""
    with torch.no_grad():
        logits = model(data.x, data.edge_index)[data.test_mask]
    return float(roc_auc_score(data.y[data.test_mask], logits))


@pytest.mark.slow  # the quick tests train each model until it finds communities
def test_graphsage_on_sampled_batches_is_within_one_point_of_the_published_result() -> None:
    data = tolokers(split=0)
    assert roc_auc(train(data), data) >= PUBLISHED - 0.01
