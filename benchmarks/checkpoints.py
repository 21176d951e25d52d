"""What share of a run goes into its checkpoints? One after the first step, then every 5 minutes, two after each epoch.

A short run is the worst case: its first checkpoint and those of its epochs count most. For long epochs, a second row
says what one checkpoint of a large model takes of the 5 minutes between two of them.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import report
import torch
from measure import spread_of
from report import Report, Row, Target

import hoploom
from hoploom.nn import GraphSAGE
from hoploom.store import Store
from hoploom.train import Checkpoint, Context, Learner, NodeClassification, Training, evaluate, fit
from hoploom.train.checkpoint import MINUTES

REPETITIONS, EPOCHS, NUM_CLASSES, NUM_FEATURES = 5, 3, 40, 100
SMALL, LARGE = 64, 2236  # width of the hidden layer: that of `make demo`, and 10 M parameters in one more layer
LIMIT = Target("ours", "<", 1)


class Timed(Checkpoint):
    """Adds up what saving takes."""

    seconds = 0.0

    def save(self, name: str, parts: Any, **extra: Any) -> None:
        began = time.perf_counter()
        super().save(name, parts, **extra)
        self.seconds += time.perf_counter() - began


def _learner(store: Store, context: Context, width: int, layers: int) -> Learner:
    model = context.wrap(GraphSAGE(NUM_FEATURES, width, layers, NUM_CLASSES))
    options: dict[str, Any] = {"batch_size": 1024, "mode": "blocks", "shuffle": True}
    loader = hoploom.NeighborLoader(store, [15, 10, 5][:layers], input_nodes="train", **options)
    return Learner(model, torch.optim.Adam(model.parameters(), lr=0.01), NodeClassification(NUM_CLASSES), loader)


def _share_of_a_run(store: Store, context: Context, folder: Path) -> float:
    """Per cent of a run as `make demo` makes it."""
    learner, checkpoint = _learner(store, context, SMALL, 2), Timed(folder, context)
    validation = hoploom.NeighborLoader(store, [15, 10], input_nodes="val", batch_size=1024, mode="blocks")
    training, began = Training(EPOCHS, progress=False), time.perf_counter()
    fit(
        learner,
        training,
        context,
        checkpoint=checkpoint,
        validate=lambda: evaluate(learner.model, validation, learner.task, context),
    )
    return 100 * checkpoint.seconds / (time.perf_counter() - began)


def _share_of_the_pause(store: Store, context: Context, folder: Path) -> float:
    """Per cent of the minutes between two checkpoints, of a model and its Adam."""
    learner, checkpoint = _learner(store, context, LARGE, 3), Timed(folder, context)
    fit(learner, Training(1, max_steps=1, progress=False), context)
    checkpoint.save("last", learner.parts())
    return 100 * checkpoint.seconds / (60 * MINUTES)


def measure(tiny: bool) -> Report:
    """Each in a folder of its own."""
    num_nodes = 4_000 if tiny else 40_000
    with tempfile.TemporaryDirectory() as place, hoploom.init(device="cpu") as context:
        sizes = {"num_nodes": num_nodes, "num_features": NUM_FEATURES, "num_classes": NUM_CLASSES}
        store = hoploom.generate(Path(place) / "graph.store", homophily=0.5, **sizes)
        counted = range(REPETITIONS + 1)
        runs = [_share_of_a_run(store, context, Path(place) / f"run-{number}") for number in counted][1:]
        pauses = [_share_of_the_pause(store, context, Path(place) / f"large-{number}") for number in counted][1:]
    rows = [
        Row(f"checkpoints of a run of {EPOCHS} epochs", "% of the run", spread_of(runs), "-", None, None, LIMIT),
        Row("a checkpoint of 10 M parameters", "% of 5 minutes", spread_of(pauses), "-", None, None, LIMIT),
    ]
    return Report(rows, [f"{num_nodes:,} nodes, one process"])


if __name__ == "__main__":
    report.main(measure)
