"""How fast do rows of another process arrive, against the same bytes over a bare socket, and how soon a few?

One client and one server, on the same two cores. A bare server gathers nothing: its bytes lie ready, and its client
reads them into memory that is there, both in huge pages. The contenders take turns, each with a server of its own, and
so does the last commit that spoke Arrow Flight. On one host ours takes a Unix socket and shared memory by itself; over
TCP it does what it does between hosts.
"""

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import before
import cluster
import graph
import report
from measure import Spread, take_turns
from report import Report, Row, Target

SIDE = Path(__file__).with_name("serving_side.py")
NUM_ROWS = 250_000  # about what a batch of 15-10-5 around 1024 seeds has
ROW_BYTES = 400
FEW = 100
TRIPS = 500
UNIX, TCP = "one host", "TCP"
BARE = {UNIX: "bare Unix socket", TCP: "bare TCP"}
ROWS = f"rows of {ROW_BYTES} bytes from another process"
TRIP = f"round trip for {FEW} rows"


def measure(tiny: bool) -> Report:
    """Every contender is asked for many rows, then for few."""
    path = graph.path_of(cluster.SHAPE, tiny)
    num_rows = NUM_ROWS // 100 if tiny else NUM_ROWS
    flight = before.found()
    with ExitStack() as stack:
        sides = {}
        for kind, bare in BARE.items():
            word = "unix" if kind == UNIX else "tcp"
            sides[bare] = _side(stack, [sys.executable, str(SIDE), "serve", word], [word])
        served = cluster.serve_command(path, [])
        sides[UNIX] = _side(stack, served, ["store"])
        sides[TCP] = _side(stack, served, ["store"], "tcp")
        if flight is not None:
            sides[before.NAME] = _side(stack, cluster.serve_command(path, [], python=flight), ["store"], python=flight)
        many = take_turns({name: partial(_rate, side, num_rows) for name, side in sides.items()}, repetitions=15)
        trips = take_turns({name: partial(_trip, side) for name, side in sides.items()})
    return Report(_rows(many, trips), absent=[] if flight else [before.NAME])


def _side(
    stack: ExitStack, server: list[str], words: list[str], *more: str, python: Path | str = sys.executable
) -> cluster.Trainers:
    """A server, and a client of it."""
    (address,) = stack.enter_context(cluster.serving([server]))
    return stack.enter_context(cluster.Trainers([[str(python), str(SIDE), *words, address, *more]]))


def _rate(side: cluster.Trainers, num_rows: int, _: int) -> float:
    (answer,) = side.tell_all({"rows": num_rows, "trips": 1})
    return num_rows * ROW_BYTES / float(answer["seconds"]) / 1e9


def _trip(side: cluster.Trainers, _: int) -> float:
    (answer,) = side.tell_all({"rows": FEW, "trips": TRIPS})
    return float(answer["seconds"]) * 1e6


def _rows(many: dict[str, Spread], trips: dict[str, Spread]) -> list[Row]:
    """Of every way against its bare socket, and against Flight."""
    rows = []
    for kind, bare in BARE.items():
        fast = Target("ours", ">=", 2.5) if kind == UNIX else None
        for baseline, target in ((bare, Target("ratio", ">=", 0.8)), (before.NAME, fast)):
            ours, theirs = many[kind], many.get(baseline)
            ratio = None if theirs is None else ours.median / theirs.median
            rows.append(Row(f"{ROWS}, {kind}", "GB/s", ours, baseline, theirs, ratio, target))
        for baseline in (bare, before.NAME):
            ours, theirs = trips[kind], trips.get(baseline)
            ratio = None if theirs is None else theirs.median / ours.median
            rows.append(Row(f"{TRIP}, {kind}", "us", ours, baseline, theirs, ratio, Target("ours", "<", 150)))
    return rows


if __name__ == "__main__":
    report.main(measure)
