"""Three servers of four parts, each part held twice, and the loaders that read of them in both deployments."""

import re
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import hoploom
from hoploom import Store
from support.graphs import random_graph, save_in_parts
from support.servers import Server, addresses_of

PARTS = [[0, 1], [2, 3], [0, 1, 2, 3]]  # the last one is the others' replica
WORKER, CLIENT = "worker", "server-client"
MODES = (WORKER, CLIENT)


def save(folder: Path) -> Path:
    save_in_parts(hoploom.from_pyg(random_graph(400, 3000, seed=1)), folder / "store", 4)
    return folder / "store"


def save_wide(folder: Path, num_nodes: int, num_edges: int, width: int) -> Path:
    """A store whose rows hold their node's number, `width` times; the first 200 nodes are for training."""
    data = random_graph(num_nodes, num_edges, seed=1)
    data.x = torch.arange(num_nodes, dtype=torch.float32).view(-1, 1).repeat(1, width)
    data.train_mask = torch.arange(num_nodes) < 200
    hoploom.from_pyg(data).save(folder / "store")
    return folder / "store"


def connect(mode: str, servers: Sequence[str], path: Path, timeout: float) -> Store:
    """As a worker that maps part 0, or as a client that maps nothing."""
    if mode == CLIENT:
        return hoploom.connect(servers, timeout=timeout)
    return hoploom.connect(servers, path, parts=[0], topology="parted", look_ahead=2, timeout=timeout)


def loader(store: Store, **options: Any) -> hoploom.NeighborLoader:
    given: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 5, "num_workers": 2, **options}
    return hoploom.NeighborLoader(store, [3, 2], "train", **given)


def warm_up(servers: Sequence[Server]) -> None:
    """The first batch of a server takes seconds: it imports what makes batches, and meets its peers."""

    def ask(address: str) -> None:
        with hoploom.connect([address], timeout=60) as store:
            next(iter(hoploom.NeighborLoader(store, [3, 2], torch.arange(4), batch_size=4)))

    with ThreadPoolExecutor(len(servers)) as threads:
        list(threads.map(ask, addresses_of(servers)))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    begun = time.monotonic()
    yield
    taken = time.monotonic() - begun
    assert taken < seconds, f"{taken:.1f} s"


def gauge(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    value = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert value is not None, text
    return float(value[1])
