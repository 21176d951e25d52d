"""Small raw folders in the layouts of other tools. Node v links to v + 1 and v + 2; features, label and year are v's.

Edge e of the list goes from e // 2 to e // 2 + 1 + e % 2 (modulo the number of nodes).
"""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_NODES = 10
SPLIT = {"train": range(0, 6), "valid": range(6, 8), "test": range(8, 10)}


def ring_edges(num_nodes: int = NUM_NODES) -> NDArray[np.int64]:
    edge = np.arange(2 * num_nodes)
    return np.stack([edge // 2, (edge // 2 + 1 + edge % 2) % num_nodes])


def features(num_nodes: int = NUM_NODES, width: int = 3) -> NDArray[np.float32]:
    """Row v is v, v + 1/8, v + 2/8: exact in decimal and in binary."""
    return (np.arange(num_nodes)[:, None] + np.arange(width) / 8).astype(np.float32)


def write_csv(path: Path, rows: Any, header: list[str] | None = None) -> None:
    """Rows as OGB writes them: gzipped, no header but where one is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [] if header is None else [",".join(header)]
    lines += [",".join(map(str, row)) for row in rows]
    with gzip.open(path, "wt", newline="") as file:
        file.write("".join(f"{line}\n" for line in lines))


def column(values: Any) -> list[list[Any]]:
    return [[value] for value in values]


def ogb_csv(root: Path, split: str, *, year: bool) -> Path:
    """The layout of ogbn-arxiv and ogbn-products."""
    raw, nodes = root / "raw", range(NUM_NODES)
    write_csv(raw / "edge.csv.gz", ring_edges().T.tolist())
    write_csv(raw / "num-node-list.csv.gz", [[NUM_NODES]])
    write_csv(raw / "num-edge-list.csv.gz", [[2 * NUM_NODES]])
    write_csv(raw / "node-feat.csv.gz", features().tolist())
    write_csv(raw / "node-label.csv.gz", column(nodes))
    if year:
        write_csv(raw / "node_year.csv.gz", column(2000 + v for v in nodes))
    ogb_split(root / "split" / split)
    return root


def ogb_split(folder: Path) -> None:
    for name, ids in SPLIT.items():
        write_csv(folder / f"{name}.csv.gz", column(ids))


def ogb_papers(root: Path, **changed: Any) -> Path:
    """The layout of ogbn-papers100M: only the first five papers have a label."""
    raw = root / "raw"
    raw.mkdir(parents=True)
    arrays: dict[str, Any] = {
        "edge_index": ring_edges(),
        "num_nodes_list": np.array([NUM_NODES]),
        "num_edges_list": np.array([2 * NUM_NODES]),
        "node_feat": features(),
        "node_year": 2000 + np.arange(NUM_NODES)[:, None],
    }
    np.savez_compressed(raw / "data.npz", **{k: v for k, v in (arrays | changed).items() if v is not None})
    label = np.where(np.arange(NUM_NODES) < 5, np.arange(NUM_NODES), np.nan).astype(np.float32)[:, None]
    np.savez_compressed(raw / "node-label.npz", node_label=label)
    ogb_split(root / "split" / "time")
    return root


def ogb_mag(root: Path) -> Path:
    """The layout of ogbn-mag, with three of its four types; author a writes papers a and a + 1."""
    raw = root / "raw"
    sizes = {"author": 4, "institution": 2, "paper": NUM_NODES}
    write_csv(raw / "num-node-dict.csv.gz", [sizes.values()], header=list(sizes))
    relations = {
        ("author", "affiliated_with", "institution"): [(a, a % 2) for a in range(4)],
        ("author", "writes", "paper"): [(a, a + p) for a in range(4) for p in range(2)],
        ("paper", "cites", "paper"): ring_edges().T.tolist(),
    }
    write_csv(raw / "triplet-type-list.csv.gz", list(reversed(relations)))
    for number, (key, edges) in enumerate(relations.items()):
        folder = raw / "relations" / "___".join(key)
        write_csv(folder / "edge.csv.gz", edges)
        write_csv(folder / "num-edge-list.csv.gz", [[len(edges)]])
        write_csv(folder / "edge_reltype.csv.gz", column([number] * len(edges)))
    write_csv(raw / "node-feat" / "paper" / "node-feat.csv.gz", features().tolist())
    write_csv(raw / "node-feat" / "paper" / "node_year.csv.gz", column(2000 + v for v in range(NUM_NODES)))
    write_csv(raw / "node-label" / "paper" / "node-label.csv.gz", column(range(NUM_NODES)))
    for name in ("label", "feat"):
        write_csv(raw / f"nodetype-has-{name}.csv.gz", [["False", "False", "True"]], header=list(sizes))
    ogb_split(root / "split" / "time" / "paper")
    write_csv(root / "split" / "time" / "nodetype-has-split.csv.gz", [["False", "False", "True"]], header=list(sizes))
    return root


GLT_PARTS = 3


def glt_book(num_nodes: int) -> Tensor:
    return torch.arange(num_nodes) % GLT_PARTS


def glt_folder(root: Path) -> Path:
    """The homogeneous layout: the ring, edge e in the part of its source; its feature is e."""
    rows, cols = torch.from_numpy(ring_edges())
    _glt_pickle(root / "META")
    _glt_save(glt_book(NUM_NODES), root / "node_pb.pt")
    _glt_save(glt_book(NUM_NODES)[rows], root / "edge_pb.pt")
    _glt_nodes(root, NUM_NODES, None)
    _glt_edges(root, rows, cols, None)
    return root


def glt_typed_folder(root: Path) -> Path:
    """The heterogeneous layout: author a writes papers a and a + 1, papers cite in a ring. Authors have no features."""
    _glt_pickle(root / "META")
    for name, size in (("author", 4), ("paper", NUM_NODES)):
        _glt_save(glt_book(size), root / "node_pb" / f"{name}.pt")
    _glt_nodes(root, NUM_NODES, "paper")
    author, paper = torch.arange(8) // 2, torch.arange(8) // 2 + torch.arange(8) % 2
    for name, (rows, cols) in {
        "author__writes__paper": (author, paper),
        "paper__cites__paper": torch.from_numpy(ring_edges()),
    }.items():
        _glt_edges(root, rows, cols, name)
        _glt_save(rows % GLT_PARTS, root / "edge_pb" / f"{name}.pt")
    return root


def _glt_nodes(root: Path, num_nodes: int, name: str | None) -> None:
    for part in range(GLT_PARTS):
        ids = torch.nonzero(glt_book(num_nodes) == part).view(-1).flip(0)  # in no order that helps
        folder = root / f"part{part}" / "node_feat" / (name or "")
        _glt_save(ids, folder / "ids.pt")
        _glt_save(torch.from_numpy(features(num_nodes))[ids], folder / "feats.pt")
        _glt_save(ids[:1], folder / "cache_ids.pt")  # copies for GLT's cache, not for us
        _glt_save(torch.zeros(1, 3), folder / "cache_feats.pt")


def _glt_edges(root: Path, rows: Tensor, cols: Tensor, name: str | None) -> None:
    for part in range(GLT_PARTS):
        ids = torch.nonzero(rows % GLT_PARTS == part).view(-1)
        graph = root / f"part{part}" / "graph" / (name or "")
        for file, values in (("rows", rows[ids]), ("cols", cols[ids]), ("eids", ids)):
            _glt_save(values, graph / f"{file}.pt")
        folder = root / f"part{part}" / "edge_feat" / (name or "")
        _glt_save(ids, folder / "ids.pt")
        _glt_save(ids.float().view(-1, 1), folder / "feats.pt")


def _glt_save(values: Tensor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(values, path)


def _glt_pickle(path: Path) -> None:
    """GLT writes a pickle; this one would leave a file behind if it were loaded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"cposix\nsystem\n(S'touch " + str(path.with_name("LOADED")).encode() + b"'\ntR.")
