"""Server-client mode: one server makes the batches, one client receives them, against a loader that has the graph here.

Both sides make them in two threads. Then with a client that computes: how much of its time it waits.
"""

from pathlib import Path
from typing import Any

import cluster
import cluster_trainer
import graph
import report
from measure import take_turns
from report import Report, Row, Target

BATCHES = 24
THREADS = 2
SLOWER = 3.0  # a trainer that computes so many times as long as the server takes for a batch
# whose batches -> what the loader is given: for hoploom.nn's models layer one arrives aggregated
KINDS: dict[str, dict[str, str]] = {"PyG's models": {}, "hoploom.nn's models": {"aggregate": "mean"}}


def measure(tiny: bool) -> Report:
    """Server and loader take turns in one client process."""
    path = graph.path_of(cluster.SHAPE, tiny)
    script = Path(cluster_trainer.__file__)
    rows, notes = [], [cluster.GLT]
    with (
        cluster.serving(path, [[]], "--threads", str(THREADS)) as servers,
        cluster.Trainers(script, 1) as trainers,
    ):
        trainers.tell_all({"do": "open", "name": "local", "path": str(path), "servers": []})
        trainers.tell_all({"do": "open", "name": "servers", "path": None, "servers": servers})
        for kind, options in KINDS.items():
            for name in ("local", "servers"):
                load = {"do": "load", "name": name, "rank": 0, "world_size": 1, "num_workers": THREADS, **options}
                trainers.tell_all(load)
            found = take_turns({name: _walk(trainers, name) for name in ("local", "servers")}, repetitions=7, warmups=1)
            ours, baseline = found["servers"], found["local"]
            ratio, target = baseline.median / ours.median, Target("ratio", ">=", 0.6)
            question = f"server-client, one of each, batches for {kind}"
            rows.append(Row(question, "ms/batch", ours, "local loader", baseline, ratio, target))
            (told,) = trainers.tell_all({"do": "travel", "name": "servers", "batches": BATCHES})
            notes.append(f"received for a batch for {kind}: {told['bytes'] / 1e6:.1f} MB")
            compute = SLOWER * ours.median / 1e3
            waited = take_turns({"waited": _wait(trainers, compute)}, repetitions=5, warmups=1)["waited"]
            row = Row(
                f"time that a slower trainer waits, {kind}", "% of it", waited, "-", target=Target("ours", "<", 5)
            )
            rows.append(row)
    return Report(rows, notes)


def _walk(trainers: cluster.Trainers, name: str) -> Any:
    def side(number: int) -> float:
        (answer,) = trainers.tell_all({"do": "walk", "name": name, "batches": BATCHES})
        trainers.tell_all({"do": "rest", "name": name})
        return float(answer["seconds"]) / BATCHES * 1e3

    return side


def _wait(trainers: cluster.Trainers, compute: float) -> Any:
    def side(number: int) -> float:
        told = {"do": "walk", "name": "servers", "batches": BATCHES, "compute": compute, "skip": 1}
        (answer,) = trainers.tell_all(told)
        trainers.tell_all({"do": "rest", "name": "servers"})
        return 100 * float(answer["waited"]) / float(answer["seconds"])

    return side


if __name__ == "__main__":
    report.main(measure)
