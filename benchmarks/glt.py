"""How long does a batch take on a cluster, next to GLT's own examples on the same graph and cores?

Two trainers with a part each (GLT: collocated samplers, or sampler processes), then one server and one client. Each
rank has a thread for the batches; ours goes over TCP, as GLT does, and once through shared memory. Where GLT cannot be
imported, figures that were measured before on this kind of machine stand in, and their rows say so.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import cluster
import graph
import peer
import report
from measure import spread_of, take_turns
from report import Report, Row, Target

import hoploom

REPETITIONS = 3
WORKER = "two trainers with a part each"
SERVED, NEAR = "one server, one client", "one server, one client, shared memory"  # as users have it on one host
KNOWN = {"collocated": 306.0, "sampler processes": 900.0, "server-client": 555.0}  # ms; two cores, commit 97737b9
OURS = {"collocated": [WORKER], "sampler processes": [WORKER], "server-client": [SERVED, NEAR]}


def measure(tiny: bool) -> Report:
    """One mode of GLT after the other, so that only one holds the graph; ours takes turns with each."""
    rows, notes = [], []
    size = graph.NUM_SEEDS // 16 if tiny else graph.NUM_SEEDS
    with ExitStack() as stack:
        ours = {WORKER: stack.enter_context(_worker_mode(tiny))}
        ours |= {way: stack.enter_context(_served(tiny, way)) for way in (SERVED, NEAR)}
        theirs = stack.enter_context(peer.glt_cluster())
        for mode, ways in OURS.items():
            num_trainers, sides = len(ours[ways[0]].all), {}
            for way in ways:
                steps = cluster.load(ours[way], way, num_workers=2 // num_trainers, batch_size=size)
                sides[way] = cluster.epoch(ours[way], way, steps)
            if theirs is not None:
                sides["GLT"] = _glt(theirs, mode, num_trainers, steps, size, tiny)
            found = take_turns(sides, repetitions=REPETITIONS, warmups=1)
            title = f"GLT, {mode}" if theirs else f"GLT, {mode}, measured before"
            other = found.get("GLT", spread_of([KNOWN[mode]]))
            for way in ways:
                ratio = other.median / found[way].median
                rows.append(Row(f"a batch, {way}", "ms", found[way], title, other, ratio, Target("ratio", ">=", 10)))
        notes += [] if theirs is None else [theirs.versions]
    return Report(rows, notes, [] if notes else ["GLT"])


@contextmanager
def _worker_mode(tiny: bool) -> Iterator[cluster.Trainers]:
    path = cluster.parts_of(cluster.SHAPE, 2, tiny)
    serve = [cluster.serve_command(path, [part]) for part in range(2)]
    with cluster.serving(serve) as servers, cluster.Trainers([cluster.trainer_command()] * 2) as trainers:
        opened = {"do": "open", "name": WORKER, "path": str(path), "servers": servers, "over": "tcp"}
        trainers.tell([opened | {"topology": "parted", "parts": [rank]} for rank in range(2)])
        yield trainers


@contextmanager
def _served(tiny: bool, way: str) -> Iterator[cluster.Trainers]:
    serve = cluster.serve_command(graph.path_of(cluster.SHAPE, tiny), [], "--threads", "2")
    with cluster.serving([serve]) as servers, cluster.Trainers([cluster.trainer_command()]) as trainers:
        opened = {"do": "open", "name": way, "path": None, "servers": servers}
        trainers.tell_all(opened | ({"over": "tcp"} if way == SERVED else {}))
        yield trainers


def _glt(theirs: peer.Peer, mode: str, trainers: int, steps: int, size: int, tiny: bool) -> Any:
    path = graph.path_of(cluster.SHAPE, tiny)
    with hoploom.open(path) as store:
        files, seeds = peer.files_of(path, store), graph.seeds_at(store, 0, trainers * steps * size)
    folder = Path(f"{path.with_suffix('')}-glt")
    told = {"graph": files, "seeds": seeds.tolist(), "fanouts": graph.FANOUTS, "folder": str(folder)}
    theirs.ask("make", mode=mode, trainers=trainers, batch_size=size, threads=2 // trainers, **told)

    def side(_: int) -> float:
        answer = theirs.ask("epoch")
        return float(answer["seconds"]) / int(answer["batches"]) * 1e3

    return side


if __name__ == "__main__":
    report.main(measure)
