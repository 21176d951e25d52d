"""Write a small graph in the file format of a public data set, so that you can try an example without a download.

    python small_data.py reddit data/Reddit              # as PyG downloads it
    python small_data.py products dataset/ogbn_products  # as OGB downloads it
    python small_data.py papers100M dataset/ogbn_papers100M
    python small_data.py glt-partitions dataset/products # ogbn-products in two parts, as GLT partitions it

Most neighbours of a node are of its own class, and its features depend on the class, so a model can learn something.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy import sparse

NUM_CLASSES, NUM_NODES, DEGREE, NUM_FEATURES = 5, 3000, 10, 16
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Graph:
    """Arrays that every layout is written from."""

    x: np.ndarray  # [num_nodes, num_features] float32
    y: np.ndarray  # [num_nodes] int64
    edges: np.ndarray  # [num_edges, 2] int64
    split: np.ndarray  # [num_nodes] int64: an index into SPLITS


def make_graph() -> Graph:
    random = np.random.default_rng(0)
    y = np.arange(NUM_NODES) % NUM_CLASSES
    x = random.normal(size=(NUM_CLASSES, NUM_FEATURES))[y] + 2 * random.normal(size=(NUM_NODES, NUM_FEATURES))
    ends = np.repeat(np.arange(NUM_NODES), DEGREE)
    friends = random.integers(NUM_NODES // NUM_CLASSES, size=len(ends)) * NUM_CLASSES + y[ends]
    split = random.choice(len(SPLITS), size=NUM_NODES, p=[0.6, 0.2, 0.2])
    return Graph(x.astype(np.float32), y, np.stack([ends, friends], 1), split)


def reddit(folder: Path, graph: Graph) -> None:
    raw = made(folder / "raw")
    np.savez(raw / "reddit_data.npz", feature=graph.x, label=graph.y, node_types=graph.split + 1)
    pairs = sparse.coo_matrix((np.ones(len(graph.edges)), tuple(graph.edges.T)), (NUM_NODES, NUM_NODES))
    sparse.save_npz(raw / "reddit_graph.npz", pairs)


def products(folder: Path, graph: Graph) -> None:
    raw, split = made(folder / "raw"), made(folder / "split" / "sales_ranking")
    tables = {"edge": graph.edges, "node-label": graph.y, "num-node-list": [NUM_NODES]}
    for name, table in (tables | {"num-edge-list": [len(graph.edges)]}).items():
        np.savetxt(raw / f"{name}.csv.gz", table, fmt="%d", delimiter=",")
    np.savetxt(raw / "node-feat.csv.gz", graph.x, fmt="%.4g", delimiter=",")
    write_splits(split, graph)


def papers100M(folder: Path, graph: Graph) -> None:  # noqa: N802  (the data set's own name)
    raw, split = made(folder / "raw"), made(folder / "split" / "time")
    sizes = {"num_nodes_list": np.array([NUM_NODES]), "num_edges_list": np.array([len(graph.edges)])}
    rows = {"node_feat": graph.x, "node_year": np.full((NUM_NODES, 1), 2013)}
    np.savez(raw / "data.npz", edge_index=graph.edges.T.copy(), **rows, **sizes)
    np.savez(raw / "node-label.npz", node_label=graph.y.reshape(-1, 1).astype(np.float32))
    write_splits(split, graph)


def glt_partitions(folder: Path, graph: Graph) -> None:
    part_of_node = np.random.default_rng(1).integers(2, size=NUM_NODES)
    part_of_edge = part_of_node[graph.edges[:, 1]]
    cut = folder / "ogbn-products-partitions"
    save(cut / "node_pb.pt", part_of_node)
    save(folder / "ogbn-products-label" / "label.pt", graph.y)
    for part in range(2):
        edges, nodes = np.flatnonzero(part_of_edge == part), np.flatnonzero(part_of_node == part)
        arrays = {"rows": graph.edges[edges, 0], "cols": graph.edges[edges, 1], "eids": edges}
        for name, array in arrays.items():
            save(cut / f"part{part}" / "graph" / f"{name}.pt", array)
        save(cut / f"part{part}" / "node_feat" / "ids.pt", nodes)
        save(cut / f"part{part}" / "node_feat" / "feats.pt", graph.x[nodes])
        for split in ("train", "test"):
            ids = nodes[graph.split[nodes] == SPLITS.index(split)]
            save(folder / f"ogbn-products-{split}-partitions" / f"partition{part}.pt", ids)


def write_splits(folder: Path, graph: Graph) -> None:
    for number, name in enumerate(SPLITS):
        np.savetxt(folder / f"{name}.csv.gz", np.flatnonzero(graph.split == number), fmt="%d")


def save(path: Path, array: np.ndarray) -> None:
    torch.save(torch.from_numpy(array), made(path.parent) / path.name)


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


LAYOUTS = {"reddit": reddit, "products": products, "papers100M": papers100M, "glt-partitions": glt_partitions}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in LAYOUTS:
        sys.exit(__doc__)
    LAYOUTS[sys.argv[1]](Path(sys.argv[2]), make_graph())
