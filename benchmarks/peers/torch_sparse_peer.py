"""PyG with torch-sparse or pyg-lib, driven by a benchmark: a line of JSON in, one out. Runs in a venv of its own.

What PyG is given costs it nothing in the loop: edges sorted by destination (`is_sorted=True`), features in memory.
"""

import importlib.util
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402

MODULES = {
    "torch-sparse": "torch_sparse",
    "pyg-lib": "pyg_lib",
    "DGL": "dgl",
    "GraphBolt": "dgl.graphbolt",
    "GLT": "graphlearn_torch",
}


def is_present(module: str) -> bool:
    """Whether a module could be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def greeting() -> dict[str, Any]:
    """Which peers this venv has."""
    import torch_geometric

    library = sys.argv[1]
    if not getattr(torch_geometric.typing, {"torch-sparse": "WITH_TORCH_SPARSE", "pyg-lib": "WITH_PYG_LIB"}[library]):
        raise SystemExit(f"PyG cannot import {library}")
    torch_geometric.typing.WITH_PYG_LIB = library == "pyg-lib"  # PyG would prefer it to torch-sparse
    present = [name for name, module in MODULES.items() if is_present(module)]
    return {
        "present": present,
        "versions": f"PyG {torch_geometric.__version__} with {library}, torch {torch.__version__}",
    }


def hop_counts(edge_index: torch.Tensor, num_seeds: int, num_hops: int) -> tuple[list[int], list[int]]:
    """Nodes and edges of every hop: torch-sparse lists both hop by hop but does not count them, as pyg-lib does."""
    sources, destinations = edge_index
    nodes, edges = [num_seeds], []
    for _ in range(num_hops):
        begin = sum(edges)
        edges.append(int(torch.searchsorted(destinations, sum(nodes))) - begin)
        reached = int(sources[begin : begin + edges[-1]].max()) + 1 if edges[-1] else sum(nodes)
        nodes.append(max(0, reached - sum(nodes)))
    return nodes, edges


class Peer:
    """PyG's sampler and loader over one graph."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.sampler: Any = None
        self.loader: Any = None
        self.model: Any = None
        self.optimizer: Any = None

    def read(self, indptr: str, indices: str, fields: dict[str, str]) -> dict[str, Any]:
        """Build the Data from a store's .npy files."""
        from torch_geometric.data import Data

        begins, sources = np.load(indptr), np.load(indices, mmap_mode="r")
        edge_index = np.empty((2, len(sources)), dtype=np.int64)
        edge_index[0] = sources
        edge_index[1] = np.repeat(np.arange(len(begins) - 1), np.diff(begins))
        tensors = {name: torch.from_numpy(np.load(path)) for name, path in fields.items()}
        self.graph = Data(edge_index=torch.from_numpy(edge_index), num_nodes=len(begins) - 1, **tensors)
        return {}

    def sample(self, seeds: list[int], fanouts: list[int]) -> dict[str, Any]:
        """One batch's subgraph."""
        from torch_geometric.sampler import NeighborSampler, NodeSamplerInput

        if self.sampler is None:
            self.sampler = NeighborSampler(self.graph, num_neighbors=fanouts, is_sorted=True)
        request = NodeSamplerInput(input_id=None, node=torch.tensor(seeds))
        begin = time.perf_counter()
        sampled = self.sampler.sample_from_nodes(request)
        return {"seconds": time.perf_counter() - begin, "picks": sampled.row.numel(), "nodes": sampled.node.numel()}

    def make_loader(self, seeds: list[int], fanouts: list[int], batch_size: int, num_workers: int) -> dict[str, Any]:
        """A loader over these seeds; its workers persist, so that no epoch pays for starting them."""
        from torch_geometric.loader import NeighborLoader

        self.loader = NeighborLoader(
            self.graph,
            fanouts,
            input_nodes=torch.tensor(seeds),
            batch_size=batch_size,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            is_sorted=True,
        )
        self.num_hops = len(fanouts)
        return {}

    def run_epoch(self) -> dict[str, Any]:
        """All batches of the loader."""
        begin = time.perf_counter()
        num_batches = sum(1 for _ in self.loader)
        return {"seconds": time.perf_counter() - begin, "batches": num_batches}

    def make_model(self, hidden: int, num_layers: int, num_classes: int) -> dict[str, Any]:
        """PyG's GraphSAGE, as its tutorial on several GPUs makes it."""
        from torch_geometric.nn import GraphSAGE

        self.model = GraphSAGE(self.graph.x.shape[1], hidden, num_layers, num_classes)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.001)
        return {}

    def train_epoch(self, trim: bool) -> dict[str, Any]:
        """The tutorial's loop over the loader; with `trim`, layers are told the counts of the hops."""
        begin = time.perf_counter()
        num_batches = 0
        self.model.train()
        for batch in self.loader:
            counts: dict[str, Any] = {}
            if trim:
                nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges  # pyg-lib counts them
                if nodes is None:
                    nodes, edges = hop_counts(batch.edge_index, batch.batch_size, self.num_hops)
                counts = {"num_sampled_nodes_per_hop": nodes, "num_sampled_edges_per_hop": edges}
            self.optimizer.zero_grad()
            out = self.model(batch.x, batch.edge_index, **counts)[: batch.batch_size]
            loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            self.optimizer.step()
            num_batches += 1
        return {"seconds": time.perf_counter() - begin, "batches": num_batches}


def main() -> None:
    """Answer requests until the other side closes the pipe."""
    torch.set_num_threads(2)
    print(json.dumps(greeting()), flush=True)
    peer = Peer()
    handlers: dict[str, Callable[..., dict[str, Any]]] = {
        "read": peer.read,
        "sample": peer.sample,
        "make_loader": peer.make_loader,
        "run_epoch": peer.run_epoch,
        "make_model": peer.make_model,
        "train_epoch": peer.train_epoch,
    }
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(handlers[request.pop("ask")](**request)), flush=True)


if __name__ == "__main__":
    main()
