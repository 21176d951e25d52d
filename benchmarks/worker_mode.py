"""Worker mode: two parts, two hosts' trainers on the same two cores, against two loaders that have all of it here.

Each trainer maps its part and asks the other's server for the rest, over TCP as between hosts: shared memory, which one
host would allow, is not used. One thread makes batches in each; the servers have the same two cores. Nobody computes: a
batch is dropped when it is there. Also what travels, and what the cache has, with 2 and with 8 parts.
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

THREADS = 1
CACHE = "20%"
LOCAL = "local loaders"
# what is asked -> (how the graph is opened, the ratio to reach)
WAYS: dict[str, tuple[dict[str, Any], float | None]] = {
    "topology and rows on the other host": ({"topology": "parted"}, 0.6),
    "topology and rows on the other host, look-ahead 1": ({"topology": "parted", "look_ahead": 1}, None),
    "topology here": ({"topology": "local"}, None),
    "topology here, look-ahead 1": ({"topology": "local", "look_ahead": 1}, None),
    f"topology here, {CACHE} cached": ({"topology": "local", "cache": CACHE}, 0.8),
    f"topology here, {CACHE} cached, look-ahead 1": ({"topology": "local", "look_ahead": 1, "cache": CACHE}, None),
}


def measure(tiny: bool) -> Report:
    """All ways take turns with the local loaders and with the last commit that spoke Flight."""
    path = cluster.parts_of(cluster.SHAPE, 2, tiny)
    graph.forget(path)
    flight = before.found()
    with ExitStack() as stack:
        ours, steps = _trainers(stack, path, sys.executable, cluster.trainer_command())
        ours.tell_all({"do": "open", "name": LOCAL, "path": str(path), "servers": []})
        cluster.load(ours, LOCAL, num_workers=THREADS)
        sides = {name: cluster.epoch(ours, name, steps) for name in (LOCAL, *WAYS)}
        if flight is not None:
            theirs, _ = _trainers(stack, path, flight, before.trainer_command(flight))
            sides |= {f"{before.NAME}, {name}": cluster.epoch(theirs, name, steps) for name in WAYS}
        found = take_turns(sides, repetitions=3, warmups=1)
    rows = []
    for name, (_, limit) in WAYS.items():
        target = None if limit is None else Target("ratio", ">=", limit)
        for baseline, spread, aim in (
            (LOCAL, found[LOCAL], target),
            (before.NAME, found.get(f"{before.NAME}, {name}"), None),
        ):
            ratio = None if spread is None else spread.median / found[name].median
            rows.append(Row(f"worker mode, {name}", "ms/batch", found[name], baseline, spread, ratio, aim))
    return Report(rows, _travel(tiny), [] if flight else [before.NAME])


def _trainers(stack: ExitStack, path: Path, python: Path | str, command: list[str]) -> tuple[cluster.Trainers, int]:
    """A server of each part, and beside it a trainer that has opened the graph in every way; the steps of an epoch."""
    serve = [cluster.serve_command(path, [part], python=python) for part in range(2)]
    servers = stack.enter_context(cluster.serving(serve))
    trainers = stack.enter_context(cluster.Trainers([command] * 2))
    for name, (options, _) in WAYS.items():
        opened = {"do": "open", "name": name, "path": str(path), "servers": servers, **options}
        opened |= {"over": "tcp"} if python == sys.executable else {}  # Flight has nothing else
        trainers.tell([opened | {"parts": [rank]} for rank in range(2)])
        steps = cluster.load(trainers, name, num_workers=THREADS)
    return trainers, steps


def _travel(tiny: bool) -> list[str]:
    """Bytes on the wire for a batch, and hit rates, for one of 2 and of 8 hosts."""
    notes = []
    for num_parts in (2, 8):
        path = cluster.parts_of(cluster.SHAPE, num_parts, tiny)
        others = [cluster.serve_command(path, range(1, num_parts))]
        with cluster.serving(others) as servers, cluster.Trainers([cluster.trainer_command()]) as trainers:
            said = []
            for name, (options, _) in WAYS.items():
                opened = {"do": "open", "name": name, "path": str(path), "servers": servers, "parts": [0], **options}
                trainers.tell_all(opened)
                steps = cluster.load(trainers, name, num_workers=THREADS)
                (told,) = trainers.tell_all({"do": "travel", "name": name, "batches": steps})
                hits = "" if told["hit_rate"] is None else f" (hit rate {told['hit_rate']:.2f})"
                said.append(f"{name} {told['bytes'] / 1e6:.1f} MB{hits}")
        notes.append(f"received for a batch, {num_parts} parts: {'; '.join(said)}")
    return notes


if __name__ == "__main__":
    report.main(measure)
