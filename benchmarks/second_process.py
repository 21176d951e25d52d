"""A fresh process that maps, opens, iterates or trains on a store and prints the seconds or the memory that took.

Asked by opening.py and stepping.py.

Memory is what /proc/self/smaps_rollup calls Private_Clean + Private_Dirty. Pages of the store's files that the first
process has mapped too are Shared_Clean: they do not count, those that this process alone has touched do.
"""

import ctypes
import json
import sys
import time
from pathlib import Path

BATCHES = 24


def private_bytes() -> int:
    """Memory that no other process shares."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def map_files(path: str) -> dict[str, float]:
    """Map the store's files with numpy and nothing else."""
    import numpy as np

    begin = time.perf_counter()
    arrays = [np.load(file, mmap_mode="r") for file in Path(path).rglob("*.npy")]
    return {"seconds": time.perf_counter() - begin, "files": len(arrays)}


def open_store(path: str) -> dict[str, float]:
    """Open the store."""
    import hoploom

    begin = time.perf_counter()
    hoploom.open(path)
    return {"seconds": time.perf_counter() - begin}


def iterate_store(path: str, batch_size: int, num_workers: int) -> dict[str, float]:
    """Import, open, iterate: the bytes held after each."""
    import torch

    held: dict[str, float] = {"torch": private_bytes()}
    import torch_geometric  # noqa: F401

    held["pyg"] = private_bytes()
    import hoploom
    from hoploom import ops

    held["hoploom"] = private_bytes()
    store = hoploom.open(path)
    seeds = torch.arange(BATCHES * batch_size) % store.schema.node_types[0].num_nodes
    loader = hoploom.NeighborLoader(
        store, [15, 10, 5], input_nodes=seeds, batch_size=batch_size, num_workers=num_workers
    )
    for batch in loader:
        tensors = [batch.x, batch.y, batch.edge_index, batch.n_id, batch.e_id]
    held["iterated"] = private_bytes()  # with the last batch still in hand
    held["batch"] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    held["buffers"] = sum(ops.pool_use())
    return held


def train_on_store(path: str, batch_size: int, num_workers: int) -> dict[str, float]:
    """Import, train some steps, evaluate: the bytes held after each, at last without what a step needed."""
    import torch

    torch.set_num_threads(2)
    held: dict[str, float] = {"torch": private_bytes()}
    import hoploom
    from hoploom import ops
    from hoploom.nn import GraphSAGE
    from hoploom.train import Learner, NodeClassification, Training, evaluate, fit

    held["hoploom"] = private_bytes()
    store = hoploom.open(path)
    (labels,) = (part.tables["node", "y"].rows for part in store.parts)
    model = GraphSAGE(store.schema.node_types[0].fields["x"].shape[0], 256, 3, int(labels.max()) + 1)
    options = {"batch_size": batch_size, "num_workers": num_workers, "mode": "blocks", "aggregate": model.first_reduce}
    seeds = torch.arange(BATCHES // 4 * batch_size) % store.schema.node_types[0].num_nodes
    loader = hoploom.NeighborLoader(store, [15, 10, 5], seeds, shuffle=True, **options)
    task = NodeClassification(num_classes=int(labels.max()) + 1)
    learner = Learner(model, torch.optim.Adam(model.parameters()), task, loader)
    with hoploom.init(device="cpu") as context:
        fit(learner, Training(epochs=1, progress=False), context)
        evaluate(model, loader, task, context)
    held["trained"] = private_bytes()
    model.zero_grad(set_to_none=True)
    ops.pool_trim()
    ctypes.CDLL(None).malloc_trim(0)
    held["released"] = private_bytes()
    return held


def main(what: str, path: str, *counts: str) -> None:
    """One line of JSON."""
    stages = {"map": map_files, "open": open_store, "iterate": iterate_store, "train": train_on_store}
    print(json.dumps(stages[what](path, *map(int, counts))))  # type: ignore[operator]


if __name__ == "__main__":
    main(*sys.argv[1:])
