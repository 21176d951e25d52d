"""Train on sampled batches of two real graphs, and compare the test metric with the published one.

    python -c "from torch_geometric.datasets import Coauthor; Coauthor('data/physics', 'Physics')"
    python -c "from torch_geometric.datasets import HeterophilousGraphDataset as H; H('data', 'Tolokers')"
    python examples/real_graphs.py data               # finds the files that PyG downloaded below this folder

Published figures are means over splits (beside GATv2: GAT's). Physics has no split, so one is drawn; 512 columns stay.
"""

import argparse
import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

import hoploom
from hoploom.nn import GNN, Shape
from hoploom.train import Context, Learner, NodeClassification, Training, evaluate, fit

FILES = {"tolokers": ("tolokers.npz",), "physics": ("ms_academic_phy.npz", "coauthor_physics.npz")}
Case = namedtuple("Case", "kind shape fanouts batch_size epochs rate metric published")  # a batch: of all ranks
TOLOKERS = Shape(hidden=64, num_layers=2, out=2, dropout=0.2, norm=True, residual=True)
ATTENTION = Shape(hidden=64, num_layers=2, out=2, dropout=0.2, heads=8, norm=True, residual=True)
PHYSICS = Shape(hidden=64, num_layers=2, out=5, dropout=0.5, residual=True)
CASES = {
    "tolokers-sage": Case("sage", TOLOKERS, (15, 10), 1024, 40, 0.015, "auroc", 0.8243),
    "tolokers-gat": Case("gat", ATTENTION, (15, 10), 1024, 60, 0.015, "auroc", 0.8370),
    "tolokers-gatv2": Case("gatv2", ATTENTION, (15, 10), 1024, 60, 0.015, "auroc", 0.8370),
    "physics-sage": Case("sage", PHYSICS, (10, 10), 512, 8, 0.005, "accuracy", 0.9719),
    "physics-gcn": Case("gcn", PHYSICS, (10, 10), 512, 8, 0.005, "accuracy", 0.9746),
}


def find(folder: Path, graph: str) -> Path | None:
    """A graph's file in a folder or below it."""
    return next((path for name in FILES[graph] for path in sorted(folder.rglob(name))), None)


def read_tolokers(path: Path, split: int = 0) -> Data:
    """Features standardised, one of ten splits."""
    with np.load(path) as file:
        x, y, edges = (torch.from_numpy(file[name]) for name in ("node_features", "node_labels", "edges"))
        masks = {f"{name}_mask": torch.from_numpy(file[f"{name}_masks"][split]) for name in ("train", "val", "test")}
    return Data(x=(x - x.mean(0)) / x.std(0), edge_index=to_undirected(edges.long().t()), y=y.long(), **masks)


def read_physics(path: Path, num_columns: int = 512) -> Data:
    """Rows of unit length, reduced to fewer columns; from PyG's arrays, or from plain ones with masks."""
    with np.load(path) as file:
        if "adj_indptr" in file.files:
            x, adjacency, y = _sparse(file, "attr", "data"), _sparse(file, "adj", "data"), file["labels"]
            edges, drawn = adjacency.indices(), torch.rand(len(y), generator=torch.Generator().manual_seed(0))
            masks = {"train_mask": drawn < 0.6, "val_mask": (drawn - 0.7).abs() <= 0.1, "test_mask": drawn > 0.8}
        else:
            x, y = _sparse(file, "x", "values"), file["y"]
            edges = torch.from_numpy(np.stack([file["edge_src"], file["edge_dst"]]))
            masks = {f"{name}_mask": torch.from_numpy(file[f"{name}_mask"]) for name in ("train", "val", "test")}
    lengths = (x * x).sum(1).to_dense().sqrt().clamp(min=1e-12)
    scaled = x.values() / lengths[x.indices()[0]]
    unit = torch.sparse_coo_tensor(x.indices(), scaled, x.shape, check_invariants=True)
    torch.manual_seed(0)
    left, scales, _ = torch.svd_lowrank(unit, min(num_columns, *x.shape))
    rows = left * scales
    edges = to_undirected(edges[:, edges[0] != edges[1]].long(), num_nodes=len(y))
    return Data(x=rows / rows.std(), edge_index=edges, y=torch.from_numpy(y).long(), **masks)


def _sparse(file: Any, name: str, values: str) -> Tensor:
    indptr, indices, found = (torch.from_numpy(file[f"{name}_{part}"]) for part in ("indptr", "indices", values))
    rows = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.long().diff())
    ends, shape = torch.stack([rows, indices.long()]), tuple(file[f"{name}_shape"].tolist())
    return torch.sparse_coo_tensor(ends, found.float(), shape, check_invariants=True).coalesce()


def train(context: Context, case: Case, store_path: Path, result_path: Path) -> None:
    """What every process does. Test nodes are judged with all their neighbours."""
    store = hoploom.open(store_path)
    torch.manual_seed(0)
    plain = GNN(case.kind, store.schema, case.shape)
    options: dict[str, Any] = {"mode": "blocks", "aggregate": plain.first_reduce, "degrees": plain.needs_degrees}
    own = {"rank": context.rank, "world_size": context.world_size, "batch_size": case.batch_size // context.world_size}
    loader = hoploom.NeighborLoader(store, case.fanouts, "train", shuffle=True, num_workers=1, **own, **options)
    model, task = context.wrap(plain), NodeClassification(num_classes=case.shape.out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, case.rate, total_steps=case.epochs * len(loader))
    fit(Learner(model, optimizer, task, loader, schedule), Training(case.epochs, progress=False), context)
    test = hoploom.NeighborLoader(store, [-1] * len(case.fanouts), "test", batch_size=512, **options)
    found = evaluate(model, test, task, context)
    if context.is_main:
        result_path.write_text(json.dumps(found))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder with the graphs' files")
    parser.add_argument("--folder", type=Path, default=Path("real-graphs"), help="where stores and results go")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args(words)
    for name, case in CASES.items():
        graph = name.partition("-")[0]
        path, store = find(arguments.data, graph), arguments.folder / f"{graph}.store"
        if path is None:
            print(f"{name}: no {' or '.join(FILES[graph])} in {arguments.data}; skipped")
            continue
        if not store.exists():
            hoploom.from_pyg({"tolokers": read_tolokers, "physics": read_physics}[graph](path)).save(store)
        result = arguments.folder / f"{name}.json"
        hoploom.spawn(train, arguments.processes, (case, store, result))
        print(f"{name}: {case.metric} {json.loads(result.read_text())[case.metric]:.4f}, published {case.published}")


if __name__ == "__main__":
    main()
