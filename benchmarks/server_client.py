"""Server-client mode: a server makes the batches, a client receives them, against a loader that has the graph here.

Both sides make batches in two threads, on the same two cores; the client of a server has two threads besides, which
wait for answers. Nobody computes: a batch is dropped when it is there. On one host the batches come through shared
memory; over TCP they come as between hosts. Then with a client that computes: how much of its time it waits.
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import before
import cluster
import graph
import report
from measure import take_turns
from report import Report, Row, Target

BATCHES = 24
THREADS = 2
SLOWER = 3.0  # a trainer that computes so many times as long as the server takes for a batch
LOCAL, SHARED, TCP = "local loader", "one host", "TCP"
# whose batches -> what the loader is given, and the ratios to reach: for hoploom.nn's models layer one is aggregated
KINDS: dict[str, tuple[dict[str, str], dict[str, float]]] = {
    "PyG's models": ({}, {SHARED: 0.8, TCP: 0.5}),
    "hoploom.nn's models": ({"aggregate": "mean"}, {SHARED: 0.8, TCP: 0.6}),
}


def measure(tiny: bool) -> Report:
    """Each has a client process of its own; they take turns."""
    path = graph.path_of(cluster.SHAPE, tiny)
    graph.forget(path)
    flight = before.found()
    rows, notes = [], []
    with ExitStack() as stack:
        trainers = {LOCAL: _trainer(stack, path=str(path))}
        (address,) = stack.enter_context(cluster.serving([_server(path)]))
        trainers[SHARED] = _trainer(stack, servers=[address])
        trainers[TCP] = _trainer(stack, servers=[address], over="tcp")
        if flight is not None:
            (address,) = stack.enter_context(cluster.serving([_server(path, flight)]))
            trainers[before.NAME] = _trainer(stack, flight, servers=[address])
        for kind, (options, targets) in KINDS.items():
            for trainer in trainers.values():
                steps = cluster.load(trainer, kind, num_workers=THREADS, **options)
            sides = {name: cluster.epoch(one, kind, steps) for name, one in trainers.items()}
            found = take_turns(sides, repetitions=5, warmups=1)
            question = f"server-client, one of each, batches for {kind}"
            for way, limit in targets.items():
                for name, target in ((LOCAL, Target("ratio", ">=", limit)), (before.NAME, None)):
                    ours, theirs = found[way], found.get(name)
                    ratio = None if theirs is None else theirs.median / ours.median
                    rows.append(Row(f"{question}, {way}", "ms/batch", ours, name, theirs, ratio, target))
            (told,) = trainers[TCP].tell_all({"do": "travel", "name": kind, "batches": steps})
            notes.append(f"received for a batch for {kind}: {told['bytes'] / 1e6:.1f} MB")
            compute = SLOWER * found[TCP].median / 1e3
            waited = take_turns({"waited": _wait(trainers[TCP], kind, compute)}, repetitions=3, warmups=1)["waited"]
            question = f"time that a slower trainer waits, {kind}, {TCP}"
            rows.append(Row(question, "% of it", waited, "-", target=Target("ours", "<", 5)))
    return Report(rows, notes, [] if flight else [before.NAME])


def _server(path: Path, python: Path | str = sys.executable) -> list[str]:
    return cluster.serve_command(path, [], "--threads", str(THREADS), python=python)


def _trainer(stack: ExitStack, python: Path | None = None, **opened: Any) -> cluster.Trainers:
    command = cluster.trainer_command() if python is None else before.trainer_command(python)
    trainer = stack.enter_context(cluster.Trainers([command]))
    for kind in KINDS:
        trainer.tell_all({"do": "open", "name": kind, "path": None, "servers": []} | opened)
    return trainer


def _wait(trainer: cluster.Trainers, name: str, compute: float) -> Any:
    def side(number: int) -> float:
        (answer,) = trainer.tell_all({"do": "walk", "name": name, "batches": BATCHES, "compute": compute, "skip": 1})
        trainer.tell_all({"do": "rest", "name": name})
        return 100 * float(answer["waited"]) / float(answer["seconds"])

    return side


if __name__ == "__main__":
    report.main(measure)
