"""One library's own loader over one graph, driven by a benchmark: a line of JSON in, a line of JSON out.

Runs in a venv of its own: `python loader_peer.py LIBRARY`. What the library is given costs it nothing in the loop: the
graph in the form that it reads fastest, features in memory, workers that persist.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402

Array = Any  # a numpy array
Options = dict[str, Any]


class Graph:
    """The graph as it lies in a store: in-edges of every node, feature rows and labels."""

    def __init__(self, indptr: str, indices: str, fields: dict[str, str]) -> None:
        self.indptr, self.indices = np.load(indptr), np.load(indices, mmap_mode="r")
        self.x, self.y = (torch.from_numpy(np.load(fields[name])) for name in ("x", "y"))

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    def edge_index(self) -> torch.Tensor:
        """Sources and destinations, sorted by destination."""
        pairs = np.empty((2, len(self.indices)), dtype=np.int64)
        pairs[0] = self.indices
        pairs[1] = np.repeat(np.arange(self.num_nodes), np.diff(self.indptr))
        return torch.from_numpy(pairs)

    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`indptr` and `indices` as int64."""
        return torch.from_numpy(self.indptr.astype(np.int64)), torch.from_numpy(self.indices.astype(np.int64))


def pyg_loader(graph: Graph, seeds: torch.Tensor, options: Options, *, pyg_lib: bool) -> Iterable[Any]:
    """PyG's NeighborLoader, with workers."""
    import torch_geometric
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    torch_geometric.typing.WITH_PYG_LIB = pyg_lib and torch_geometric.typing.WITH_PYG_LIB
    data = Data(edge_index=graph.edge_index(), num_nodes=graph.num_nodes, x=graph.x, y=graph.y)
    workers = options["num_workers"]
    return NeighborLoader(
        data,
        options["fanouts"],
        input_nodes=seeds,
        batch_size=options["batch_size"],
        num_workers=workers,
        persistent_workers=workers > 0,
        is_sorted=True,
    )


def dgl_loader(graph: Graph, seeds: torch.Tensor, options: Options) -> Iterable[Any]:
    """DGL's DataLoader; it fetches rows and labels with the blocks."""
    import dgl

    indptr, indices = graph.columns()
    whole = dgl.graph(("csc", (indptr, indices, torch.empty(0, dtype=torch.int64))), num_nodes=graph.num_nodes)
    whole.ndata["x"], whole.ndata["y"] = graph.x, graph.y
    sampler = dgl.dataloading.NeighborSampler(
        options["fanouts"][::-1], prefetch_node_feats=["x"], prefetch_labels=["y"]
    )
    workers = options["num_workers"]
    return dgl.dataloading.DataLoader(
        whole,
        seeds,
        sampler,
        batch_size=options["batch_size"],
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def graphbolt_loader(graph: Graph, seeds: torch.Tensor, options: Options) -> Iterable[Any]:
    """GraphBolt's pipeline; it fetches rows with the blocks."""
    import dgl.graphbolt as gb

    whole = gb.fused_csc_sampling_graph(*graph.columns())
    features = gb.BasicFeatureStore({("node", None, "x"): gb.TorchBasedFeature(graph.x)})
    items = gb.ItemSet((seeds, graph.y[seeds]), names=("seed_nodes", "labels"))
    pipe = gb.ItemSampler(items, batch_size=options["batch_size"])
    pipe = pipe.sample_neighbor(whole, options["fanouts"][::-1])
    pipe = pipe.fetch_feature(features, node_feature_keys=["x"])
    return gb.DataLoader(pipe, num_workers=options["num_workers"])


def glt_loader(graph: Graph, seeds: torch.Tensor, options: Options) -> Iterable[Any]:
    """GLT's NeighborLoader: its local loader has no workers, it samples on the cores' threads."""
    import graphlearn_torch as glt

    data = glt.data.Dataset(edge_dir="in")
    data.init_graph(edge_index=graph.edge_index(), graph_mode="CPU")
    data.init_node_features(node_feature_data=graph.x, with_gpu=False)
    data.init_node_labels(node_label_data=graph.y)
    return glt.loader.NeighborLoader(
        data,
        options["fanouts"],
        seeds,
        batch_size=options["batch_size"],
        as_pyg_v1=False,
        device=torch.device("cpu"),
        seed=1,
    )


LOADERS: dict[str, Callable[[Graph, torch.Tensor, Options], Iterable[Any]]] = {
    "torch-sparse": lambda *given: pyg_loader(*given, pyg_lib=False),
    "pyg-lib": lambda *given: pyg_loader(*given, pyg_lib=True),
    "DGL": dgl_loader,
    "GraphBolt": graphbolt_loader,
    "GLT": glt_loader,
}


def versions(library: str) -> str:
    """Import the library, so that one that cannot be imported says so before any graph is read."""
    if library in ("torch-sparse", "pyg-lib"):
        import torch_geometric

        with_it = {"torch-sparse": "WITH_TORCH_SPARSE", "pyg-lib": "WITH_PYG_LIB"}[library]
        if not getattr(torch_geometric.typing, with_it):
            raise SystemExit(f"PyG cannot import {library}")
        return f"PyG {torch_geometric.__version__} with {library}, torch {torch.__version__}"
    if library == "GLT":
        import graphlearn_torch

        return f"GLT {getattr(graphlearn_torch, '__version__', '0.2.4')}, torch {torch.__version__}"
    import dgl

    if library == "GraphBolt":
        import dgl.graphbolt

    return f"{library} {dgl.__version__}, torch {torch.__version__}"


def touched(batch: Any) -> int:
    """Fetch what is fetched late: the rows of a batch."""
    if isinstance(batch, tuple):  # DGL: sources, seeds, blocks
        return len(batch[2][0].srcdata["x"])
    return len(batch.node_features["x"]) if hasattr(batch, "node_features") else len(batch.x)


def main() -> None:
    """Answer requests until the other side closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; only answers go to the other side
    torch.set_num_threads(2)
    library = sys.argv[1]
    try:
        print(json.dumps({"versions": versions(library)}), file=answers, flush=True)
    except ImportError as error:
        raise SystemExit(f"{library} cannot be imported: {error}") from error
    loader: Iterable[Any] = ()
    for line in sys.stdin:
        request = json.loads(line)
        begin, answer = time.perf_counter(), {}
        if request.pop("ask") == "make":
            graph = Graph(**request.pop("graph"))
            loader = LOADERS[library](graph, torch.tensor(request.pop("seeds")), request)
        else:
            rows = [touched(batch) for batch in loader]
            answer = {"batches": len(rows), "rows": sum(rows)}
        print(json.dumps({"seconds": time.perf_counter() - begin, **answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
