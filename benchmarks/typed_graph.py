"""A graph of three node types with times on its edges, for our loader and for a peer's: both make it by themselves.

It imports torch and PyG only, because a peer's venv has no more.
"""

import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch_geometric.data import HeteroData

RELATIONS = (("user", "buys", "item"), ("item", "has", "tag"), ("user", "follows", "tag"))
SIZES = {"user": 600_000, "item": 300_000, "tag": 100_000}
EDGES = 16_000_000  # of the three relations and their reverses
SPAN = 1_000_000  # times are below it
SEEDS, FANOUTS, WORKERS = 512, [10, 10], 2


def make_graph(tiny: bool) -> HeteroData:
    """Every relation has its reverse, with the times of its edges; few destinations have most of them."""
    generator, data, scale = torch.Generator().manual_seed(0), HeteroData(), 100 if tiny else 1
    for name, size in SIZES.items():
        data[name].x = torch.randn(size // scale, 64, generator=generator)
    for source, name, destination in RELATIONS:
        count = EDGES // scale // (2 * len(RELATIONS))
        drawn = torch.rand(2, count, generator=generator, dtype=torch.float64)
        sources = (drawn[0] * data[source].num_nodes).long()
        destinations = (drawn[1] ** 2 * data[destination].num_nodes).long()
        times = torch.randint(SPAN, (count,), generator=generator)
        for key, ends in (
            ((source, name, destination), (sources, destinations)),
            ((destination, f"rev_{name}", source), (destinations, sources)),
        ):
            data[key].edge_index, data[key].time = torch.stack(ends), times
    return data


def options_of(kind: str, data: HeteroData, num_batches: int) -> dict[str, Any]:
    """The arguments of a loader of PyG, which are those of ours too."""
    generator, count = torch.Generator().manual_seed(1), num_batches * SEEDS
    options: dict[str, Any] = {"num_neighbors": FANOUTS, "batch_size": SEEDS, "num_workers": WORKERS}
    if kind == "links":
        edges = data[RELATIONS[0]].edge_index
        chosen = torch.randint(edges.shape[1], (count,), generator=generator)
        return options | {"edge_label_index": (RELATIONS[0], edges[:, chosen]), "neg_sampling": "binary"}
    options["input_nodes"] = ("user", torch.randint(data["user"].num_nodes, (count,), generator=generator))
    if kind == "temporal":
        options["input_time"] = torch.randint(SPAN // 2, SPAN, (count,), generator=generator)
        options["time_attr"] = "time"
    return options


def seconds_per_batch(loader: Iterable[Any], warm: int, count: int) -> float:
    """The mean time of `count` batches, after `warm` others."""
    batches = iter(loader)
    for _ in islice(batches, warm):
        pass
    begin = time.perf_counter()
    for _ in islice(batches, count):
        pass
    return (time.perf_counter() - begin) / count
