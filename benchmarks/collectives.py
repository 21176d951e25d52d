"""Ranks that exchange rows and hops with each other, against ranks that ask a graph server beside each of them.

Each rank maps its part, and one thread makes batches in each; 2 and 4 ranks on the same two cores. Both go over TCP, as
between hosts: Gloo's, and the servers', which share no memory with the trainers here.
"""

from typing import Any

import cluster
import report
from measure import take_turns
from report import Report, Row, Target

THREADS = 1
# what is asked of others -> how the graph is opened
WAYS: dict[str, dict[str, Any]] = {
    "rows": {"topology": "local", "look_ahead": 4},
    "hops and rows": {"topology": "parted", "look_ahead": 4},
}


def measure(tiny: bool) -> Report:
    """Both ways, and loaders that have all of the graph here, take turns in the same trainers."""
    rows: list[Row] = []
    notes: list[str] = []
    for num_ranks in (2, 4):
        _measure(num_ranks, tiny, rows, notes)
    return Report(rows, notes)


def _measure(num_ranks: int, tiny: bool, rows: list[Row], notes: list[str]) -> None:
    path = cluster.parts_of(cluster.SHAPE, num_ranks, tiny)
    parts = [[rank] for rank in range(num_ranks)]
    serve, trainer = [cluster.serve_command(path, own) for own in parts], cluster.trainer_command()
    with cluster.serving(serve) as servers, cluster.Trainers([trainer] * num_ranks) as trainers:
        (told, *_) = trainers.tell([{"do": "address"}] + [{"do": "nothing"}] * (num_ranks - 1))
        joining = {"do": "join", "world_size": num_ranks, "address": told["address"]}
        trainers.tell([joining | {"rank": rank} for rank in range(num_ranks)])
        trainers.tell_all({"do": "open", "path": str(path), "name": "local", "servers": []})
        steps = cluster.load(trainers, "local", num_workers=THREADS)
        for way, options in WAYS.items():
            served = {"do": "open", "name": f"served {way}", "servers": servers, "over": "tcp"}
            for told_all in (served, {"do": "exchange", "name": f"exchanged {way}"}):
                trainers.tell([told_all | {"path": str(path), "parts": own} | options for own in parts])
                cluster.load(trainers, str(told_all["name"]), num_workers=THREADS)
        names = ["local", *(f"{how} {way}" for way in WAYS for how in ("served", "exchanged"))]
        found = take_turns({name: cluster.epoch(trainers, name, steps) for name in names}, repetitions=3, warmups=1)
        for way in WAYS:
            ours, baseline = found[f"exchanged {way}"], found[f"served {way}"]
            ratio, question = baseline.median / ours.median, f"collectives over Gloo, {num_ranks} ranks, {way}"
            target = Target("ratio", ">=", 1.3)
            rows.append(Row(question, "ms/batch", ours, "a server beside each rank", baseline, ratio, target))
            received = trainers.tell_all({"do": "travel", "name": f"exchanged {way}", "batches": steps})
            notes.append(f"{question}: {max(told['bytes'] for told in received) / 1e6:.1f} MB received for a batch")
            most = baseline.median / found["local"].median
            notes.append(f"{question}: an exchange that costs nothing would be {most:.2f} times as fast as servers")
        notes.append(f"{num_ranks} ranks with all of the graph here: {found['local'].median:.1f} ms/batch")


if __name__ == "__main__":
    report.main(measure)
