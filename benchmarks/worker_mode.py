"""Worker mode: two parts, two hosts' trainers on the same two cores, against two loaders that have all of it here.

Each trainer maps its part and fetches the rest from the other's server; one thread makes batches in each. Also what
travels, and what the cache has, from 2 to 8 parts.
"""

from pathlib import Path
from typing import Any

import cluster
import cluster_trainer
import report
from measure import take_turns
from report import Report, Row, Target

BATCHES = 16  # of each rank in one repetition
THREADS = 1
CACHE = "20%"
# what is asked -> (how the graph is opened, the ratio to reach)
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "topology and rows elsewhere": ({"topology": "parted", "look_ahead": 1}, 0.4),
    "topology and rows elsewhere, look-ahead 4": ({"topology": "parted", "look_ahead": 4}, 0.4),
    "topology here, look-ahead 4": ({"topology": "local", "look_ahead": 4}, 0.4),
    f"topology here, {CACHE} cached": ({"topology": "local", "look_ahead": 1, "cache": CACHE}, 0.7),
    f"topology here, {CACHE} cached, look-ahead 4": ({"topology": "local", "look_ahead": 4, "cache": CACHE}, 0.7),
}


def measure(tiny: bool) -> Report:
    """All ways take turns with the local loaders, in the same two trainers."""
    path = cluster.parts_of(cluster.SHAPE, 2, tiny)
    script = Path(cluster_trainer.__file__)
    rows = []
    with cluster.serving(path, [[0], [1]]) as servers, cluster.Trainers(script, 2) as trainers:
        trainers.tell_all({"do": "open", "name": "local", "path": str(path), "servers": []})
        _load(trainers, "local")
        for name, (options, _) in WAYS.items():
            opened = {"do": "open", "name": name, "path": str(path), "servers": servers, **options}
            trainers.tell([opened | {"parts": [rank]} for rank in range(2)])
            _load(trainers, name)
        found = take_turns({name: _walk(trainers, name) for name in ("local", *WAYS)}, repetitions=5, warmups=1)
    baseline = found.pop("local")
    for name, ours in found.items():
        ratio = baseline.median / ours.median
        target = Target("ratio", ">=", WAYS[name][1])
        rows.append(Row(f"worker mode, {name}", "ms/batch", ours, "local loaders", baseline, ratio, target))
    return Report(rows, [cluster.GLT, *_travel(tiny)])


def _load(trainers: cluster.Trainers, name: str) -> None:
    told = {"do": "load", "name": name, "world_size": 2, "num_workers": THREADS}
    trainers.tell([told | {"rank": rank} for rank in range(2)])


def _walk(trainers: cluster.Trainers, name: str) -> Any:
    def side(number: int) -> float:
        answers = trainers.tell_all({"do": "walk", "name": name, "batches": BATCHES})
        trainers.tell_all({"do": "rest", "name": name})
        return max(answer["seconds"] for answer in answers) / BATCHES * 1e3

    return side


def _travel(tiny: bool) -> list[str]:
    """Bytes on the wire for a batch, and hit rates, for one of 2, 4 and 8 hosts."""
    notes = []
    script = Path(cluster_trainer.__file__)
    for num_parts in (2, 4, 8):
        path = cluster.parts_of(cluster.SHAPE, num_parts, tiny)
        others = [list(range(1, num_parts))]
        with cluster.serving(path, others) as servers, cluster.Trainers(script, 1) as trainers:
            said = []
            for name, (options, _) in WAYS.items():
                opened = {"do": "open", "name": name, "path": str(path), "servers": servers, "parts": [0], **options}
                trainers.tell_all(opened)
                load = {"do": "load", "name": name, "world_size": num_parts, "rank": 0, "num_workers": THREADS}
                trainers.tell_all(load)
                (told,) = trainers.tell_all({"do": "travel", "name": name, "batches": BATCHES})
                hits = "" if told["hit_rate"] is None else f" (hit rate {told['hit_rate']:.2f})"
                said.append(f"{name} {told['bytes'] / 1e6:.1f} MB{hits}")
        notes.append(f"received for a batch, {num_parts} parts: {'; '.join(said)}")
    return notes


if __name__ == "__main__":
    report.main(measure)
