"""What the accuracy tests run in one process or in several: a model trained by `fit`, judged by `evaluate`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hoploom
from hoploom.nn import GNN, Shape
from hoploom.train import Context, Learner, NodeClassification, Training, evaluate, fit


@dataclass(frozen=True)
class Spec:
    """One training run. Batches are of all ranks together."""

    kind: str
    shape: Shape
    fanouts: tuple[int, ...]
    batch_size: int
    epochs: int
    rate: float
    decay: float = 0.01


def train(context: Context, spec: Spec, store_path: Path, result_path: Path) -> None:
    """Train on the training nodes; write the metrics of the test nodes, with all their neighbours."""
    torch.set_num_threads(1)
    store = hoploom.open(store_path)
    torch.manual_seed(0)
    plain = GNN(spec.kind, store.schema, spec.shape)
    options: dict[str, Any] = {"mode": "blocks", "aggregate": plain.first_reduce, "degrees": plain.needs_degrees}
    size = spec.batch_size // context.world_size
    loader = hoploom.NeighborLoader(
        store, spec.fanouts, "train", batch_size=size, shuffle=True, num_workers=1, **_ranks(context), **options
    )
    model = context.wrap(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.rate, weight_decay=spec.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, spec.rate, total_steps=spec.epochs * len(loader))
    task = NodeClassification(num_classes=spec.shape.out)
    fit(Learner(model, optimizer, task, loader, schedule), Training(epochs=spec.epochs, progress=False), context)
    test = hoploom.NeighborLoader(store, [-1] * len(spec.fanouts), "test", batch_size=512, **options)
    found = evaluate(model, test, task, context)
    if context.is_main:
        result_path.write_text(json.dumps(found))


def _ranks(context: Context) -> dict[str, int]:
    return {"rank": context.rank, "world_size": context.world_size}
