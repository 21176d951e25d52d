"""Recommend where tastes change: the next item of a user, from the ratings of the last days before.

    python examples/temporal_recommendation.py

Users rate items of one of 10 tastes. Every 10 days, each user draws a new taste. So old ratings mislead, and a window
of 5 days sees the taste of today. A model sees only ratings strictly before the one that it predicts. It learns from 55
days and is judged on the last 5. The items of one taste are alike, so the best ranks are those of a model that knows
every taste of today.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.sampler import NegativeSampling

import hoploom
from hoploom import LinkNeighborLoader, LinkPrediction, Store
from hoploom.train import Learner, Training

TASTES, ITEMS, USERS, SEASONS, RATINGS = 10, 30, 500, 6, 10  # items of each taste; ratings of a user in each season
DAY, HOURS = 24, 240  # hours of a day, and of a season
RATES, RATED = ("user", "rates", "item"), ("item", "rated_by", "user")
CANDIDATES = 100


def rated_in_seasons() -> tuple[Store, Tensor, Tensor]:
    """A store of ratings with their hours; the ratings [2, n], and their hours [n]."""
    torch.manual_seed(0)
    taste = torch.randint(TASTES, (USERS, SEASONS, 1))
    items = (taste * ITEMS + torch.randint(ITEMS, (USERS, SEASONS, RATINGS))).flatten()
    users = torch.arange(USERS).repeat_interleave(SEASONS * RATINGS)
    hours = (torch.arange(SEASONS)[None, :, None] * HOURS + torch.randint(HOURS, (USERS, SEASONS, RATINGS))).flatten()
    data = HeteroData()
    data["user"].num_nodes, data["item"].num_nodes = USERS, TASTES * ITEMS
    for key, ends in ((RATES, (users, items)), (RATED, (items, users))):
        data[key].edge_index, data[key].time = torch.stack(ends), hours
    return hoploom.from_pyg(data, time_attr="time"), torch.stack([users, items]), hours


def best_mrr() -> float:
    """The MRR of who knows all tastes: how many items of the right taste come before the true one is luck."""
    found = 1.0  # none
    for above in range(1, ITEMS):
        share = above / (TASTES * ITEMS)  # of the items; the number among the candidates is binomial
        found += (1 - (1 - share) ** (CANDIDATES + 1)) / ((CANDIDATES + 1) * share)
    return found / ITEMS


class Tastes(nn.Module):
    """A row for each item; a user is the mean of the items that the batch has for that user."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(TASTES * ITEMS, 32)
        nn.init.normal_(self.items.weight, std=0.1)

    def forward(self, batch: HeteroData) -> dict[str, Tensor]:
        items = self.items(batch["item"].n_id)
        source, destination = batch[RATED].edge_index
        users = items.new_zeros(batch["user"].num_nodes, 32).index_add(0, destination, items[source])
        counts = torch.bincount(destination, minlength=len(users)).clamp(min=1)
        return {"user": users / counts[:, None], "item": items}


def later_edges(loader: LinkNeighborLoader) -> int:
    """The number of ratings that batches have, and that are not before the one to predict."""
    found = 0
    for batch in loader:
        tree = batch["user"].batch[batch[RATED].edge_index[1]]
        found += int((batch[RATED].time >= batch["user"].seed_time[tree]).sum())
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    words = parser.parse_args(argv)
    store, ratings, hours = rated_in_seasons()
    is_test = hours >= SEASONS * HOURS - 5 * DAY
    task = LinkPrediction(loss="softmax", metrics=["mrr", "hits@10"])  # of one item a link, this is recall@10

    def loader(chosen: Tensor, negatives: int, window: int | None, **options: Any) -> LinkNeighborLoader:
        return LinkNeighborLoader(
            store,
            {RATED: [20], RATES: [0]},
            edge_label_index=(RATES, ratings[:, chosen]),
            edge_label_time=hours[chosen],
            time_attr="time",
            time_window=window,
            strictly_before=True,
            neg_sampling=NegativeSampling("triplet", negatives),
            batch_size=256,
            **options,
        )

    with hoploom.init() as context:
        for window in (None, 5 * DAY):
            torch.manual_seed(0)
            model = context.wrap(Tastes())
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-4)
            learner = Learner(model, optimizer, task, loader(~is_test, 20, window, shuffle=True))
            hoploom.fit(learner, Training(words.epochs), context)
            judged = loader(is_test, CANDIDATES, window)
            found = hoploom.evaluate(model, judged, task, context)
            if context.is_main:
                name = "all ratings before" if window is None else "the last 5 days"
                print(f"{name}: MRR {found['mrr']:.3f}, recall@10 {found['hits@10']:.3f}, later {later_edges(judged)}")
        if context.is_main:
            print(f"who knows all tastes: MRR {best_mrr():.3f}")


if __name__ == "__main__":
    main()
