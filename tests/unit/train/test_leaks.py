"""A graph of tastes: without leaks, a model learns them all; with leaks, training scores say nothing."""

from typing import Any

import torch
from support.proportions import mrr_of_tastes
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv
from torch_geometric.sampler import NegativeSampling

import hoploom
from hoploom import LinkNeighborLoader
from hoploom.train.batch_adapter import adapted
from hoploom.train.link_prediction import LinkPrediction
from hoploom.train.loop import evaluate

RATES, RATED = ("user", "rates", "item"), ("item", "rev_rates", "user")
TASTES, ITEMS, USERS, LINKS = 20, 30, 1500, 10  # tastes, items of each, users, and items that a user rates
CANDIDATES = 100


def ratings() -> tuple[HeteroData, Tensor]:
    """Every user rates random items of one taste. One link of each is held out; nothing else tells tastes apart."""
    generator, data = torch.Generator().manual_seed(1), HeteroData()
    tastes = torch.arange(USERS) % TASTES
    items = torch.stack([torch.randperm(ITEMS, generator=generator)[:LINKS] for _ in range(USERS)])
    links = torch.stack([torch.arange(USERS).repeat_interleave(LINKS), (tastes[:, None] * ITEMS + items).view(-1)])
    is_held_out = torch.arange(links.shape[1]) % LINKS == 0
    data["user"].x = torch.randn(USERS, 16, generator=generator)
    data["item"].x = torch.randn(TASTES * ITEMS, 16, generator=generator)
    data[RATES].edge_index = links[:, ~is_held_out]
    data[RATED].edge_index = data[RATES].edge_index.flip(0)
    return data, links[:, is_held_out]


class Sage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kinds = [{RATES: SAGEConv((16, 16), 32), RATED: SAGEConv((16, 16), 32)}]
        kinds += [{RATES: SAGEConv((32, 32), 32), RATED: SAGEConv((32, 32), 32)}]
        self.layers = nn.ModuleList(map(HeteroConv, kinds))

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> dict[str, Tensor]:
        hidden = {name: rows.relu() for name, rows in self.layers[0](x_dict, edge_index_dict).items()}
        found: dict[str, Tensor] = self.layers[1](hidden, edge_index_dict)
        return found


def trained(exclude: str) -> tuple[float, float]:
    """The MRR of training links and of held-out links, after five epochs."""
    torch.manual_seed(0)
    data, held_out = ratings()
    store, model, task = hoploom.from_pyg(data), Sage(), LinkPrediction(loss="softmax", metrics=["mrr"])

    def links(ends: Tensor | None, fanouts: list[int], negatives: int, **options: Any) -> LinkNeighborLoader:
        given = {"neg_sampling": NegativeSampling("triplet", negatives), "batch_size": 256, **options}
        return LinkNeighborLoader(store, fanouts, (RATES, ends), **given)

    loader = links(None, [10, 10], 10, shuffle=True, exclude=exclude)
    optimizer, called = torch.optim.Adam(model.parameters(), lr=0.01), adapted(model)
    for epoch in range(5):
        loader.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            task.losses(task.outputs(called, batch), task.targets(batch)).mean().backward()
            optimizer.step()
    with hoploom.init(device="cpu") as context:
        seen = evaluate(model, links(None, [-1, -1], CANDIDATES, shuffle=True, exclude=exclude), task, context)
        unseen = evaluate(model, links(held_out, [-1, -1], CANDIDATES), task, context)
    return seen["mrr"], unseen["mrr"]


def test_without_leaks_held_out_links_are_ranked_by_all_tastes() -> None:
    leaking, honest = trained("none"), trained("both")
    assert leaking[0] > 1.5 * leaking[1]
    assert honest[0] < 1.1 * honest[1]
    assert honest[1] > 0.98 * mrr_of_tastes(TASTES, CANDIDATES, TASTES * ITEMS)
    assert leaking[1] < 0.85 * mrr_of_tastes(TASTES, CANDIDATES, TASTES * ITEMS)
