"""What two ranks of a plain DDP script do with loaders: without hoploom.init, with and without their shares."""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from hoploom import HoploomError, LinkNeighborLoader, NeighborLoader
from hoploom.ranks import agreement
from hoploom.ranks.context import Context
from support.batches import seeds_of
from support.graphs import random_graph, ring

SEEDS = torch.arange(1001)
GRAPH = ring(1001)


def train(seeds: torch.Tensor = SEEDS, graph: Any = GRAPH, **options: Any) -> NeighborLoader:
    return NeighborLoader(graph, [2], seeds, **{"batch_size": 100, "shuffle": True} | options)


def resumed_on_rank_one(rank: int) -> NeighborLoader:
    loader = train()
    if rank == 1:
        loader.set_epoch(3)
    return loader


def ahead_on_rank_one(rank: int) -> NeighborLoader:
    loader = train()
    assert sum(batch.batch_size for batch in loader) in (500, 501)
    loader.set_epoch(3 if rank == 1 else 1)
    return loader


def drawing(seed: int) -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.ones(1001), 500, generator=torch.Generator().manual_seed(seed))


class Remembering(list[int]):
    """The same positions on every rank in the first epoch alone."""

    def set_epoch(self, epoch: int) -> None:
        self[:] = [place + epoch * dist.get_rank() for place in range(500)]


def remembering(rank: int) -> NeighborLoader:
    loader = train(sampler=Remembering(range(500)), shuffle=False)
    assert sum(batch.batch_size for batch in loader) == 250
    return loader


SILENT: dict[str, Callable[[int], Any]] = {
    "a split whose parts overlap": lambda rank: train(SEEDS[rank * 400 : rank * 400 + 500]),
    "all seeds on every rank": lambda rank: train(rank=0, world_size=1),
    "a random split without a seed": lambda rank: train(torch.randperm(1001)[:500]),
    "other batch sizes": lambda rank: train(batch_size=32 + rank),
    "other seeds of randomness": lambda rank: train(seed=rank),
    "another graph": lambda rank: train(graph=random_graph(1001, 2002, rank)),
    "the same share twice": lambda rank: train(rank=0, world_size=2),
    "a state restored on one rank": resumed_on_rank_one,
    "another epoch on one rank, later": ahead_on_rank_one,
    "a sampler that each rank seeds": lambda rank: train(sampler=drawing(rank), shuffle=False),
    "one sampler on every rank": lambda rank: train(sampler=drawing(0), shuffle=False, rank=0, world_size=1),
    "a sampler with a memory of its own": remembering,
    "other links": lambda rank: LinkNeighborLoader(GRAPH, [2], GRAPH.edge_index[:, rank:], batch_size=100),
}


def plain_script(rank: int, folder: str) -> None:
    """Every good case and every silent one, into a file per rank; the last of them ends the script."""
    made_early = train()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    told: dict[str, Any] = {"made before the group": seeds_of(made_early), "dealt": _taught()}
    told["divided"] = _divided(rank)
    told["dealt by hand"] = _told(train(SEEDS.split(501)[rank], rank=0, world_size=1))
    told["evaluated on all"] = sum(b.batch_size for b in train(shuffle=False, rank=0, world_size=1))
    if rank == 0:
        told["evaluated on rank 0"] = sum(b.batch_size for b in train(shuffle=False, rank=0, world_size=1))
    count = torch.tensor(sum(batch.batch_size for batch in train(shuffle=False)))
    dist.all_reduce(count)
    told["evaluated together"] = int(count)
    torch.manual_seed(rank)
    for name, make in SILENT.items():
        began = time.monotonic()
        told[name] = _told(make(rank))
        told[f"{name}, seconds"] = time.monotonic() - began
    told["rank 0 alone"], told["rank 0 alone, seconds"] = _read_by_rank_0_alone(rank)
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    list(train(torch.randperm(1001)[:500]))


def _divided(rank: int) -> dict[str, Any]:
    """The seeds of loaders whose seeds, links or positions the ranks have divided themselves."""
    own = train(SEEDS.split(600)[rank], num_workers=1)
    found: dict[str, Any] = {"length": len(own), "first epoch": seeds_of(own), "seeds of a step": own.num_seeds(5)}
    left = train(SEEDS.split(600)[rank])
    batches = iter(left)
    for _ in range(2):
        next(batches)
    resumed = train(SEEDS.split(600)[rank])
    middle = left.state_dict()
    resumed.load_state_dict(middle)
    found["resumed"], found["rest"] = seeds_of(resumed), seeds_of(batches)
    found["second epoch"] = seeds_of(own)
    found["dropped"] = seeds_of(train(SEEDS.split(450)[rank], drop_last=True))
    sampler = DistributedSampler(range(1001), 2, rank, shuffle=True, seed=5)
    found["sampled"] = [batch.input_id.tolist() for batch in train(sampler=sampler, shuffle=False)]
    links = GRAPH.edge_index.split(1001, dim=1)[rank]
    found["links"] = [
        batch.input_id.numel() for batch in LinkNeighborLoader(GRAPH, [2], links, batch_size=100, shuffle=True)
    ]
    weights = torch.ones(SEEDS.split(600)[rank].numel())
    drawn = train(SEEDS.split(600)[rank], sampler=WeightedRandomSampler(weights, 250 + rank), shuffle=False)
    found["drawn"] = [batch.batch_size for batch in drawn]
    started = train(SEEDS.split(600)[rank])
    started.load_state_dict(started.state_dict())
    other = train(SEEDS.split(600)[rank].flip(0)) if rank else train(SEEDS.split(600)[rank])
    found["state of other seeds"] = _refusal(lambda: other.load_state_dict(middle))
    found["too uneven"] = _told(train(SEEDS.split(999)[rank], batch_size=10))
    return found


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except HoploomError as error:
        return str(error)
    return ""


def _taught() -> list[int]:
    model = DistributedDataParallel(nn.Linear(1, 1))
    seen, loader = [], train()
    for _ in range(2):
        for batch in loader:
            model(batch.x[: batch.batch_size].float().view(-1, 1)).sum().backward()
            seen += batch.input_id.tolist()
    return seen


def _read_by_rank_0_alone(rank: int) -> tuple[int | str, float]:
    """Evaluate on rank 0 while the other rank waits in a barrier, with a loader that both made and one of its own.

    The other rank then reads the first one, too.
    """
    val_loader, began, count = train(shuffle=False), time.monotonic(), 0
    agreement.INTERVAL = 0.1  # seconds
    if rank == 0:
        count = len(seeds_of(val_loader)) + len(seeds_of(train(batch_size=90)))
    seconds = time.monotonic() - began
    dist.barrier()
    return count if rank == 0 else _told(val_loader), seconds


def _told(loader: Any) -> str:
    return _refusal(lambda: list(loader))


def a_share_read_by_rank_0_alone(context: Context, folder: str) -> None:
    """Read all seeds on rank 0 while the other rank waits in a call of ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "PATIENCE", 0.2)
        patch.setattr(agreement, "INTERVAL", 0.1)
        val_loader = train(shuffle=False)
        if context.is_main:
            assert seeds_of(val_loader) == [*range(1001)]
        context.barrier()
