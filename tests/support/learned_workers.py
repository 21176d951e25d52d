"""A graph whose users have no features, and training steps with learned rows, alone or by several ranks."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

import hoploom
from hoploom.nn import GNN, Shape
from hoploom.nn.embedding import Embedding
from hoploom.ranks.context import DEADLINE, Context
from hoploom.ranks.environment import RankInfo
from support.graphs import in_parts

USERS, ITEMS = 403, 250
SEEDS = 60  # of a step, over all ranks
STEPS = 5


@cache
def shop(num_parts: int = 1) -> hoploom.Store:
    """Users without features buy items with features, which have labels."""
    draw = torch.Generator().manual_seed(3)
    data = HeteroData()
    data["user"].num_nodes = USERS
    data["item"].x = torch.randn(ITEMS, 4, generator=draw)
    data["item"].y = torch.randint(0, 3, (ITEMS,), generator=draw)
    bought = torch.stack([torch.randint(0, count, (3000,), generator=draw) for count in (USERS, ITEMS)])
    data["user", "buys", "item"].edge_index = bought
    data["item", "rev_buys", "user"].edge_index = bought.flip(0)
    store = hoploom.from_pyg(data)
    return store if num_parts == 1 else in_parts(store, num_parts)


def alone() -> Context:
    return Context(RankInfo(), torch.device("cpu"), "gloo", DEADLINE)


def items(embedding: Embedding, context: Context, **options: Any) -> hoploom.NeighborLoader:
    """Return a loader of all items, whose steps have the same seeds for any number of ranks."""
    given = {"batch_size": SEEDS // context.world_size, "shuffle": True, "mode": "blocks", "num_workers": 1} | options
    return hoploom.NeighborLoader(embedding.store, [4, 3], input_nodes="item", **given)


def trained(context: Context, *, num_parts: int = 1, steps: int = STEPS, **options: Any) -> Embedding:
    """Take some steps; gradients of links are large, so that rounding shows."""
    embedding = Embedding(shop(num_parts), "user", context=context, **({"dim": 8, "lr": 0.1} | options))
    torch.manual_seed(1)
    model = context.wrap(GNN("rsage", embedding.store.schema, Shape(8, 2, 3), out_types=["item"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, taken = items(embedding, context), 0
    while taken < steps:
        for step, batch in enumerate(loader):
            losses = torch.nn.functional.cross_entropy(
                model(batch)["item"], batch["item"].y[: batch["item"].batch_size], reduction="none"
            )
            optimizer.zero_grad()
            context.mean_loss(losses, loader.num_seeds(step)).backward()
            optimizer.step()
            embedding.step()
            taken += 1
            if taken == steps:
                break
    return embedding


def save_rows(context: Context, folder: str, cases: list[dict[str, Any]]) -> None:
    """Write the rows that each case ends with, and their state."""
    for number, case in enumerate(cases):
        embedding = trained(context, **case)
        if context.is_main:
            torch.save((embedding.rows, embedding.state), f"{folder}/{number}-of-{context.world_size}.pt")
        context.barrier()


def differs(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm() / left.double().norm())
