"""The commands about scale: `plan` estimates what a graph needs, `bench` measures this machine or a store's batches."""

import argparse
import sys
import time
from dataclasses import MISSING, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from hoploom import scale
from hoploom.cli import Arguments, Command, add_option, check_writable, fanouts_or_none, read_positive, seeds_of
from hoploom.config.values import text_table
from hoploom.errors import ConfigError

if TYPE_CHECKING:  # these bring torch, which the help of a command does without
    from hoploom.load import NeighborLoader

OF_STORE, OF_MACHINE = ("fanouts", "batch_size", "seeds", "workers"), ("out", "dir")  # options of `bench`
WARM_UP = 2  # steps before the clock starts: the first ones map pages and fill recycled memory
NUM_STEPS = 20  # steps that are timed, or as many as an epoch has
HEADER = ("fanouts", "batch size", "nodes", "edges", "     MB", "     ms", "seeds/s")


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    for field in fields(scale.Question):
        flag, text = "--" + field.name.replace("_", "-"), field.metadata["help"]
        if field.default is False:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            described = {"metavar": "X", "required": field.default is MISSING, "help": text}
            add_option(parser, flag, field.metadata["read"], default=argparse.SUPPRESS, **described)
    parser.add_argument("--constants", type=Path, metavar="FILE", help="what `hoploom bench` wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _plan(arguments: Arguments) -> int:
    names = {field.name for field in fields(scale.Question)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    constants = None if arguments.constants is None else scale.read_constants(arguments.constants)
    answer = scale.plan(scale.Question(**given), constants)
    print(scale.as_json(answer) if arguments.json else scale.as_text(answer))
    return 0


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "store", type=Path, nargs="?", help="measure batches of this store; without STORE, measure the machine"
    )
    for flag, metavar, text in (
        ("--fanouts", "X,Y", "fanouts to measure; give it again to compare (default: 15,10)"),
        ("--batch-size", "N", "seeds of a batch; give it again to compare (default: 1024)"),
    ):
        parser.add_argument(flag, action="append", metavar=metavar, help=f"with STORE: {text}")
    parser.add_argument("--seeds", metavar="SPLIT", help="with STORE: the split of the seeds (default: train)")
    text = "with STORE: threads that make batches (default: 2)"
    add_option(parser, "--workers", read_positive, metavar="N", help=text)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="without STORE: write the measured rates to this file, for `hoploom plan --constants FILE`",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="without STORE: a folder on the disk where you will keep stores (default: the system's temporary folder)",
    )


def _bench(arguments: Arguments) -> int:
    without_use = OF_MACHINE if arguments.store is not None else OF_STORE
    wrong = [f"--{name.replace('_', '-')}" for name in without_use if getattr(arguments, name) is not None]
    if wrong and arguments.store is not None:
        raise ConfigError(f"{wrong[0]} is for measuring this machine; leave it out, or leave out {arguments.store}")
    if wrong:
        raise ConfigError(f"{wrong[0]} is for the batches of a store; name it: hoploom bench STORE")
    if arguments.store is not None:
        return _bench_store(arguments)
    from hoploom.scale.measure import measure

    check_writable("--out", arguments.out)  # before anything is measured
    constants = measure(arguments.dir, lambda what: print(what, file=sys.stderr, flush=True))
    print(scale.to_json(constants))
    if arguments.out is not None:
        arguments.out.write_text(scale.to_json(constants) + "\n", encoding="utf-8")
    return 0


def _bench_store(arguments: Arguments) -> int:
    """Measure batches, and print their size and time in a table. Each pair of fanouts and batch size is one row."""
    from hoploom.load import NeighborLoader
    from hoploom.store import open_store

    tried = list(product(arguments.fanouts or ["15,10"], arguments.batch_size or ["1024"]))
    choices = [(fanouts_or_none("--fanouts", f) or [], read_positive("--batch-size", size)) for f, size in tried]
    store = open_store(arguments.store)
    members = seeds_of(store.schema, arguments.seeds)
    if members is None:
        raise ConfigError(f"{arguments.store} has no split to take seeds from; name one, e.g. --seeds train")
    rows: list[list[str | int]] = []
    for (text, _), (fanouts, batch_size) in zip(tried, choices, strict=True):
        workers = arguments.workers or 2
        loader = NeighborLoader(store, fanouts, members, batch_size=batch_size, shuffle=True, num_workers=workers)
        seeds, nodes, edges, size, seconds = _mean_cost(loader)
        shown = [f"{size / 1e6:7,.1f}", f"{seconds * 1e3:7,.1f}"]
        rows.append([text, batch_size, round(nodes), round(edges), *shown, round(seeds / seconds)])
    print(text_table(HEADER, rows))
    return 0


def _mean_cost(loader: "NeighborLoader") -> list[float]:
    """Return the means per batch of the loader: seeds, nodes, edges, bytes, and seconds."""
    for _ in loader.steps(range(min(len(loader), WARM_UP))):
        pass
    began = time.perf_counter()
    found = []
    for batch in loader.steps(range(min(len(loader), NUM_STEPS))):
        seeds = sum(kept.get("batch_size", 0) for kept in batch.node_stores)
        nodes = sum(len(kept.n_id) for kept in batch.node_stores)
        edges = sum(kept.edge_index.shape[1] for kept in batch.edge_stores)
        size = sum(getattr(value, "nbytes", 0) for kept in batch.stores for value in kept.values())
        found.append((seeds, nodes, edges, size))
    seconds = time.perf_counter() - began
    return [sum(column) / len(found) for column in zip(*found, strict=True)] + [seconds / len(found)]


COMMANDS = {
    "plan": Command(_plan_arguments, _plan),
    "bench": Command(
        _bench_arguments,
        _bench,
        lambda a: f"opening {a.store}" if a.store else "",
        lambda a: "hoploom.load" if a.store else "hoploom.scale.measure",
    ),
}
