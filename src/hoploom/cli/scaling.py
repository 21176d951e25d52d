"""The commands of scale on paper: `plan` works a question out, `bench` measures what it is worked out from."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from hoploom import scale
from hoploom.cli.command import Arguments, Command, add_option, check_writable
from hoploom.config import values
from hoploom.scale.measure import measure


def _word(what: str, text: str) -> str:
    return text


FLAGS = (  # flag, field of Question, how it is read, help
    ("--nodes", "nodes", values.parse_count, "nodes of all types: 1e10, 2.5M"),
    ("--edges", "edges", values.parse_count, "edges of all relations"),
    (
        "--largest-type",
        "largest_type",
        values.parse_count,
        "nodes of the largest type (default: all); ids are 4 bytes below 2^31",
    ),
    ("--features", "features", scale.parse_features, "width and dtype of a node's features: 256xfp16, or none"),
    ("--edge-features", "edge_features", scale.parse_features, "likewise of an edge's"),
    (
        "--original-id-bytes",
        "original_id_bytes",
        values.parse_count,
        "8 for integer ids, the longest for strings, 0 where none are kept",
    ),
    ("--train-share", "train_share", values.parse_number, "share of the nodes that are training seeds"),
    ("--hosts", "hosts", values.parse_count, "hosts that hold the graph and train"),
    ("--parts-per-host", "parts_per_host", values.parse_count, "parts of the store per host"),
    ("--memory-per-host", "memory_per_host", values.parse_bytes, "memory of a host, e.g. 64GiB"),
    (
        "--network",
        "network",
        values.parse_bandwidth,
        "of a host, in bits or bytes per second: 100Gb, 12.5GB (default: loopback)",
    ),
    ("--topology", "topology", _word, "auto, everywhere (every host maps all of it) or parts"),
    ("--edge-cut", "edge_cut", scale.parse_cut, "share of the edges between hosts, or hash, range, stream, metis"),
    ("--fanouts", "fanouts", values.parse_fanouts, "picks per node, one per layer, -1 for all neighbours"),
    ("--batch-size", "batch_size", values.parse_count, "seeds of a rank's step"),
    ("--mode", "mode", _word, "what a batch is: blocks or subgraph"),
    ("--ranks-per-host", "ranks_per_host", values.parse_count, "training processes of a host"),
    ("--workers", "workers", values.parse_count, "loader threads of a rank"),
    ("--hidden", "hidden", values.parse_count, "width of the model; it has a layer per fanout"),
    ("--classes", "classes", values.parse_count, "width of its output"),
    ("--step-seconds", "step_seconds", values.parse_number, "of the model alone, where it was measured"),
    ("--cache", "cache", values.parse_number, "share of the other hosts' rows that a host keeps"),
    ("--hit-rate", "hit_rate", values.parse_number, "of that cache, where it is known"),
    ("--skew", "skew", values.parse_number, "of the nodes' popularity: 0 all alike, 0.5 degrees as 1 / d^2"),
)
SHOWN = {"memory_per_host": "512GB", "fanouts": "15,10,5", "features": "128xfp32"}  # defaults, as they are given
SWITCHES = (
    ("--weights", "weights", "edges have weights"),
    ("--times", "times", "edges have times"),
    ("--local-seeds", "local_seeds", "a rank's seeds are nodes of its own host"),
)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = {field.name: field.default for field in fields(scale.Question)}
    for flag, field, read, text in FLAGS:
        default = defaults[field]
        shown = isinstance(default, int | float | str) and not isinstance(default, bool)
        words = f"{text} (default: {SHOWN.get(field, default)})" if shown or field in SHOWN else text
        described = {"dest": field, "metavar": "X", "required": field in ("nodes", "edges"), "help": words}
        add_option(parser, flag, read, default=argparse.SUPPRESS, **described)
    for flag, field, text in SWITCHES:
        parser.add_argument(flag, dest=field, action="store_true", help=text)
    parser.add_argument("--constants", type=Path, metavar="FILE", help="what `hoploom bench` wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _plan(arguments: Arguments) -> int:
    asked: dict[str, Any] = {field: getattr(arguments, field) for _, field, *_ in FLAGS if hasattr(arguments, field)}
    asked |= {field: True for _, field, _ in SWITCHES if getattr(arguments, field)}
    constants = None if arguments.constants is None else scale.read_constants(arguments.constants)
    answer = scale.plan(scale.Question(**asked), constants)
    print(scale.as_json(answer) if arguments.json else scale.as_text(answer))
    return 0


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write what plan --constants reads")
    parser.add_argument("--quick", action="store_true", help="under ten seconds, less exact")
    parser.add_argument(
        "--dir", type=Path, help="a folder on the disk that stores will lie on (default: the temporary)"
    )


def _bench(arguments: Arguments) -> int:
    out: Path | None = arguments.out
    check_writable("--out", out)  # said before anything is measured
    constants = measure(arguments.quick, arguments.dir, lambda what: print(what, file=sys.stderr, flush=True))
    print(scale.constants_as_text(constants))
    if out is not None:
        out.write_text(scale.to_json(constants) + "\n", encoding="utf-8")
    return 0


COMMANDS = {"plan": Command(_plan_arguments, _plan), "bench": Command(_bench_arguments, _bench)}
