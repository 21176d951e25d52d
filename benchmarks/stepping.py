"""How long does a training step take (sample, gather, forward, backward, update), against PyG as its tutorial has it?

PyG samples with pyg-lib, its fastest installation, or with torch-sparse if there is no pyg-lib; the row names it.

GraphSAGE-256 x 3 on both sides, two threads, two workers (ours are threads, PyG's processes). A repetition is an epoch
of few steps, from its first batch on, so that no side works ahead while the other is measured. Ours runs through `fit`.
Bfloat16 only wins on processors that multiply it (AVX512-BF16, AMX).
"""

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import graph
import peer
import report
import torch
from measure import Side, Spread, spread_of, take_turns
from opening import MB, ask
from report import Report, Row, Target
from torch import nn

import hoploom
from hoploom import NeighborLoader
from hoploom.nn import GraphSAGE
from hoploom.store import Store
from hoploom.train import Learner, NodeClassification, Training, fit
from hoploom.train.step import Precision

HIDDEN, LAYERS, WORKERS = 256, 3, 2
OUR_STEPS, THEIR_STEPS = 10, 2
REPETITIONS, WARMUPS = 5, 1


class Reports:
    """Stands where a run's journal does, and keeps what every step reports."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def recording(self, *_: object) -> AbstractContextManager[None]:
        """Return a context manager that records nothing; `timed` is the same."""
        return nullcontext()

    def step(self, step: Any) -> None:
        self.steps.append(step)

    def epoch(self, *_: object, **__: object) -> None:
        """Write nothing; `ended` and `checkpoint` are the same."""

    timed = recording
    ended = checkpoint = epoch


class Ours:
    """Training through `fit`, epoch by epoch."""

    def __init__(self, store: Store, batch_size: int, num_classes: int, precision: Precision = "fp32") -> None:
        self.precision: Precision = precision
        self.context = hoploom.init(device="cpu")
        model = GraphSAGE(store.schema.node_types[0].fields["x"].shape[0], HIDDEN, LAYERS, num_classes)
        self.forward_seconds: list[float] = []
        _time_forward(model, self.forward_seconds)
        self.options: dict[str, Any] = {"batch_size": batch_size, "mode": "blocks", "aggregate": model.first_reduce}
        seeds = graph.seeds_at(store, 0, OUR_STEPS * batch_size)
        loader = NeighborLoader(store, graph.FANOUTS, seeds, shuffle=True, num_workers=WORKERS, **self.options)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
        self.learner = Learner(model, optimizer, NodeClassification(num_classes=num_classes), loader)
        self.store, self.seeds = store, seeds
        self.reports = Reports()
        self.epochs = 0

    def run(self, _: int) -> float:
        """Seconds per step of the next epoch."""
        self.epochs += 1
        training = Training(epochs=self.epochs, progress=False, precision=self.precision)
        begin = time.perf_counter()
        fit(self.learner, training, self.context, journal=self.reports)  # type: ignore[arg-type]
        return (time.perf_counter() - begin) / OUR_STEPS

    def split(self) -> list[str]:
        """Where the time goes: what the loader's threads do for a batch, what a step does."""
        sample = graph.make_sampler(self.store)
        sampled = spread_of(graph.timed(sample, range(step, step + 1))[0] for step in range(2, 7)).median
        alone = NeighborLoader(self.store, graph.FANOUTS, self.seeds, shuffle=True, **self.options)
        begin = time.perf_counter()
        num_batches = sum(1 for _ in alone)
        loaded = (time.perf_counter() - begin) / num_batches
        steps = self.reports.steps[OUR_STEPS * WARMUPS :]
        forward = spread_of(self.forward_seconds[-len(steps) :]).median
        waited = spread_of(step.wait_seconds for step in steps).median
        whole = spread_of(step.seconds for step in steps).median
        return [
            f"a batch on one thread: sample {sampled * 1e3:.0f} ms, gather and aggregate layer one "
            f"{(loaded - sampled) * 1e3:.0f} ms",
            f"a step: wait {waited * 1e3:.1f} ms, forward {forward * 1e3:.0f} ms, "
            f"backward and update {(whole - forward - waited) * 1e3:.0f} ms",
        ]

    def waits(self) -> Spread:
        """Per epoch, the share of the time that waits for data, in percent; an epoch's first batch is not hidden."""
        steps = self.reports.steps[OUR_STEPS * WARMUPS :]
        epochs = [steps[begin + 1 : begin + OUR_STEPS] for begin in range(0, len(steps), OUR_STEPS)]
        return spread_of(100 * sum(s.wait_seconds for s in one) / sum(s.seconds for s in one) for one in epochs)


def _time_forward(model: nn.Module, seconds: list[float]) -> None:
    began: list[float] = []
    model.register_forward_pre_hook(lambda *_: began.append(time.perf_counter()))
    model.register_forward_hook(lambda *_: seconds.append(time.perf_counter() - began.pop()))


def measure(tiny: bool) -> Report:
    """Ours and both forms of the tutorial's loop take turns."""
    store = graph.open_warm(graph.MAIN, tiny)
    size = graph.NUM_SEEDS // 100 if tiny else graph.NUM_SEEDS
    num_classes = int(store.parts[0].tables[store.schema.node_types[0].name, "y"].rows.max()) + 1
    ours = Ours(store, size, num_classes)
    sides: dict[str, Side] = {"ours": ours.run, "bf16": Ours(store, size, num_classes, "bf16").run}
    with ExitStack() as running:
        for library in ("pyg-lib", "torch-sparse"):
            if (found := running.enter_context(peer.pyg(library))) is not None:
                break
        if found is not None:
            found.read(graph.path_of(graph.MAIN, tiny), store)
            found.ask("make_model", hidden=HIDDEN, num_layers=LAYERS, num_classes=num_classes)
            seeds = graph.seeds_at(store, 0, THEIR_STEPS * size).tolist()
            found.ask("make_loader", seeds=seeds, fanouts=graph.FANOUTS, batch_size=size, num_workers=WORKERS)
            sides |= {"whole": _their_side(found, trim=False), "trimmed": _their_side(found, trim=True)}
        spreads = take_turns(sides, repetitions=REPETITIONS, warmups=WARMUPS)
        notes = [*ours.split(), *([found.versions] if found else [])]
        wait = Row("training waits for data", "% of the time", ours.waits(), "-", None, None, Target("ours", "<", 3))
        rows = [
            _row("training step", f"PyG's tutorial, {library}", spreads["ours"], spreads.get("whole"), 10),
            _row("training step", f"PyG, {library}, trim_to_layer", spreads["ours"], spreads.get("trimmed"), 4),
            _row("training step in bfloat16", "ours, float32", spreads["bf16"], spreads["ours"], 1 / 0.65),
            wait,
            _memory(str(graph.path_of(graph.MAIN, tiny)), size, notes),
        ]
        return Report(rows, notes, peer.absent(found))


def _memory(folder: str, size: int, notes: list[str]) -> Row:
    """What a fresh process holds that trains on the store which this one has mapped."""
    answers = [ask("train", folder, size, WORKERS) for _ in range(3)]
    released, trained, library = (
        spread_of((held[after] - held["torch"]) / MB for held in answers)
        for after in ("released", "trained", "hoploom")
    )
    notes.append(
        f"a training process beyond `import torch`: {library.median:.0f} MB by imports, {trained.median:.0f} MB right "
        f"after a step, with its activations and batches, {released.median:.0f} MB without them"
    )
    question = "a training process adds, activations released"
    return Row(question, "MB private", released, "-", None, None, Target("ours", "<", 300))


def _their_side(found: peer.Peer, *, trim: bool) -> Side:
    def run(_: int) -> float:
        answer = found.ask("train_epoch", trim=trim)
        return float(answer["seconds"]) / int(answer["batches"])

    return run


def _row(question: str, baseline: str, ours: Spread, theirs: Spread | None, least: float) -> Row:
    ratio = None if theirs is None else theirs.median / ours.median
    return Row(question, "s", ours, baseline, theirs, ratio, Target("ratio", ">=", least))


if __name__ == "__main__":
    report.main(measure)
