"""What batches of a store cost, for each choice of fanouts and batch size. Times the loader alone: no model runs."""

import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from torch_geometric.data import Data, HeteroData

from hoploom.cli.command import fanouts_of, read_positive, seeds_of, table
from hoploom.errors import ConfigError
from hoploom.load import NeighborLoader
from hoploom.store import Store, open_store

WARM_UP = 2  # steps before the clock starts: the first ones map pages and fill recycled memory
NUM_STEPS = 20  # steps that are timed, or as many as an epoch has
HEADER = ("fanouts", "batch size", "nodes", "edges", "     MB", "     ms", "seeds/s")


def cost_table(path: Path, fanouts: list[str], batch_sizes: list[str], seeds: str | None, num_workers: int) -> str:
    """A row for each pair of fanouts and batch size."""
    tried = list(product(fanouts, batch_sizes))
    choices = [(fanouts_of("--fanouts", f) or [], read_positive("--batch-size", size)) for f, size in tried]
    store = open_store(path)
    members = seeds_of(store.schema, seeds)
    if members is None:
        raise ConfigError(f"{path} has no split to take seeds from; name one, e.g. --seeds train")
    rows = [
        _row(text, choice[1], _cost(store, members, *choice, num_workers))
        for (text, _), choice in zip(tried, choices, strict=True)
    ]
    return table(HEADER, rows)


def _cost(
    store: Store, members: str | tuple[str, str], fanouts: list[int], batch_size: int, num_workers: int
) -> list[float]:
    """Seeds, nodes, edges, bytes and seconds of one batch, in the mean."""
    loader = NeighborLoader(store, fanouts, members, batch_size=batch_size, shuffle=True, num_workers=num_workers)
    for _ in loader.steps(range(min(len(loader), WARM_UP))):
        pass
    began = time.perf_counter()
    found = [_sizes(batch) for batch in loader.steps(range(min(len(loader), NUM_STEPS)))]
    seconds = time.perf_counter() - began
    return [sum(column) / len(found) for column in zip(*found, strict=True)] + [seconds / len(found)]


def _sizes(batch: Data | HeteroData) -> tuple[int, int, int, int]:
    """Seeds, nodes, edges and bytes."""
    seeds = sum(kept.get("batch_size", 0) for kept in batch.node_stores)
    nodes = sum(len(kept.n_id) for kept in batch.node_stores)
    edges = sum(kept.edge_index.shape[1] for kept in batch.edge_stores)
    return seeds, nodes, edges, sum(_bytes(batch))


def _bytes(batch: Data | HeteroData) -> Iterator[int]:
    for kept in batch.stores:
        for value in kept.values():
            yield getattr(value, "nbytes", 0)


def _row(fanouts: str, batch_size: int, cost: list[float]) -> list[str | int]:
    seeds, nodes, edges, size, seconds = cost
    shown = [f"{size / 1e6:7,.1f}", f"{seconds * 1e3:7,.1f}"]
    return [fanouts, batch_size, round(nodes), round(edges), *shown, round(seeds / seconds)]
