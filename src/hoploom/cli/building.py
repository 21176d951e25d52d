"""Commands that make stores from what people have: build, import, partition."""

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from hoploom.cli.command import Arguments, Command
from hoploom.cli.stores import headline
from hoploom.errors import ConfigError
from hoploom.scale.amounts import parse_bytes, parse_fanouts
from hoploom.store import layout

DEFAULT_MEMORY = "4GB"
USUAL_SEEDS = "train"


class Stages:
    """What is done now, on one line of stderr that is drawn only where that is a terminal."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._width = 0

    def show(self, what: str) -> None:
        if sys.stderr.isatty():
            line = f"{time.monotonic() - self._begin:6.0f} s  {what}"
            print(f"\r{line:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(line)

    def __enter__(self) -> "Stages":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="STORE", help="the new store; must not exist")
    parser.add_argument(
        "--memory",
        default=DEFAULT_MEMORY,
        metavar="SIZE",
        help=f"what the process may take, all included (default: {DEFAULT_MEMORY})",
    )


def _memory(arguments: Arguments) -> int:
    return parse_bytes("--memory", arguments.memory)


def _show_store(path: Path, seconds: float) -> None:
    print(f"{headline(path, layout.read_manifest(path))}, {seconds:.1f} s")


# --- build ---------------------------------------------------------------------------------------


def _build_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", type=Path, help="graph.toml; `hoploom init --tables DIR` drafts one")
    _add_out(parser)
    parser.add_argument("--parts", type=int, default=1, metavar="N", help="parts, nodes assigned by a hash of their id")
    parser.add_argument("--drop-dangling", action="store_true", help="leave out edges of unknown nodes, and count them")
    parser.add_argument(
        "--engine", default="duckdb", metavar="NAME", help="what joins the tables: duckdb (default) or spark"
    )
    parser.add_argument("--master", default="local[*]", metavar="URL", help="Spark's master (default: local[*])")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of the engine (default: all cores)")


def _build(arguments: Arguments) -> int:
    from hoploom.build.tables.build import BuildOptions, build
    from hoploom.build.tables.reader import read_graph

    options = BuildOptions(
        parts=arguments.parts,
        memory=_memory(arguments),
        threads=arguments.threads,
        engine=arguments.engine,
        master=arguments.master,
        drop_dangling=arguments.drop_dangling,
    )
    with Stages() as stages:
        report = build(read_graph(arguments.graph), arguments.out, options, progress=stages.show)
    for relation, count in report.dropped.items():
        if count:
            print(f"{relation}: {count:,} of {report.edges[relation]:,} edges dropped, an end is in no table of nodes")
    _show_store(arguments.out, sum(report.seconds.values()))
    return 0


# --- import --------------------------------------------------------------------------------------


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    ogb = kinds.add_parser("ogb", help="a downloaded OGB folder, with raw and split inside")
    ogb.add_argument("name", help="the data set, such as ogbn-products")
    ogb.add_argument("folder", type=Path, help="its folder")
    ogb.add_argument("--undirected", action="store_true", help="every edge leads both ways, once")
    archive = kinds.add_parser("npz", help="an archive of NumPy's, or of SciPy's sparse matrices")
    archive.add_argument("folder", type=Path, metavar="file", help="the .npz")
    archive.add_argument("--undirected", action="store_true", help="every edge leads both ways, once")
    archive.add_argument("--ignore", action="append", default=[], metavar="ARRAY", help="leave an array out")
    glt = kinds.add_parser("glt", help="a folder of GraphLearn-for-PyTorch's partitions")
    glt.add_argument("folder", type=Path, help="the folder with META")
    glt.add_argument("--labels", type=Path, metavar="FILE", help="the .pt or .npy with the labels")
    glt.add_argument("--split", action="append", default=[], metavar="NAME=FILE", help="the ids of a split")
    for parser_of_kind, run in ((ogb, _import_ogb), (archive, _import_npz), (glt, _import_glt)):
        _add_out(parser_of_kind)
        parser_of_kind.set_defaults(import_kind=run)


def _import(arguments: Arguments) -> int:
    begin = time.monotonic()
    with Stages() as stages:
        arguments.import_kind(arguments, stages)
    _show_store(arguments.out, time.monotonic() - begin)
    return 0


def _import_ogb(arguments: Arguments, stages: Stages) -> None:
    from hoploom.build.importing import import_ogb

    given = (arguments.name, arguments.folder, arguments.out)
    import_ogb(*given, undirected=arguments.undirected, memory=_memory(arguments), progress=stages.show)


def _import_npz(arguments: Arguments, stages: Stages) -> None:
    from hoploom.build.bulk import EdgeRule
    from hoploom.build.importing import import_archive

    rule = EdgeRule(undirected=True, deduplicate=True) if arguments.undirected else None
    given = (arguments.folder, arguments.out)
    import_archive(*given, rule=rule, ignore=arguments.ignore, memory=_memory(arguments), progress=stages.show)


def _import_glt(arguments: Arguments, stages: Stages) -> None:
    from hoploom.build.importing import import_glt

    import_glt(
        arguments.folder,
        arguments.out,
        labels=arguments.labels,
        splits=_splits(arguments.split),
        memory=_memory(arguments),
        progress=stages.show,
    )


def _splits(given: list[str]) -> Mapping[str, Path]:
    splits = {}
    for entry in given:
        name, equals, path = entry.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"--split is {entry!r}; give a name and a file, e.g. train=train_idx.pt")
        splits[name] = Path(path)
    return splits


# --- partition -----------------------------------------------------------------------------------


def _partition_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="a store's directory, of any number of parts")
    _add_out(parser)
    parser.add_argument("--parts", type=int, required=True, metavar="N", help="parts of the new store")
    parser.add_argument(
        "--method", default="stream", metavar="NAME", help="hash, range, stream (default), or metis (needs pymetis)"
    )
    parser.add_argument(
        "--seeds", metavar="SPLIT", help="the split that training starts from (default: train, where there is one)"
    )
    parser.add_argument(
        "--fanouts", default="15,10,5", metavar="N,N", help="as in training: finds the hottest nodes (default: 15,10,5)"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report as JSON too")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the report as a picture, an SVG")


def _partition(arguments: Arguments) -> int:
    from hoploom.partition import as_json, as_svg, partition
    from hoploom.store.durable import write_whole

    begin = time.monotonic()
    with Stages() as stages:
        report = partition(
            arguments.store,
            arguments.out,
            arguments.parts,
            method=arguments.method,
            seeds=_seeds(arguments),
            fanouts=list(parse_fanouts("--fanouts", arguments.fanouts)),
            memory=_memory(arguments),
            progress=stages.show,
        )
    print(report)
    print()
    _show_store(arguments.out, time.monotonic() - begin)
    for path, write in ((arguments.report, as_json), (arguments.picture, as_svg)):
        if path is not None:
            write_whole(path, [write(report).encode()])
    return 0


def _seeds(arguments: Arguments) -> str | None:
    """The split asked for; else the usual one, if the store has it."""
    if arguments.seeds is not None:
        return str(arguments.seeds)
    having = [t for t in layout.read_manifest(arguments.store).schema.node_types if USUAL_SEEDS in t.splits]
    return USUAL_SEEDS if having else None


COMMANDS = {
    "build": Command(_build_arguments, _build),
    "import": Command(_import_arguments, _import),
    "partition": Command(_partition_arguments, _partition),
}
