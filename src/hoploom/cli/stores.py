"""The commands about stores: build, import, generate and partition write, fetch copies, info and check read stores."""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoploom.cli import (
    Arguments,
    Command,
    add_json,
    add_option,
    check_writable,
    fanouts_or_none,
    for_people,
    node_progress,
    paint,
    read_positive,
    seeds_of,
    stage_line,
)
from hoploom.config.values import parse_bytes, parse_count, parse_number, printable, text_table
from hoploom.errors import ConfigError, StoreError

if TYPE_CHECKING:  # these bring torch, which the help of a command does without
    from hoploom.fields import Field
    from hoploom.partition import PartitionReport
    from hoploom.store.format import Manifest

BOTH_WAYS = "add the reverse of every edge; an edge that exists in both directions is kept once"
SECONDS_BETWEEN_LINES = 30.0  # between two lines on a transfer's progress, if no bar is drawn
TABLES = (".parquet", ".csv", ".gz", ".tsv", ".arrow", ".feather", ".ipc")


def _add_out(parser: argparse.ArgumentParser, *, on_spark: bool = False) -> None:
    where = "; with Spark also s3://… or gs://…" if on_spark else ""
    text = f"the new store; must not exist{where}"
    kind = _path_or_url if on_spark else Path
    parser.add_argument("-o", "--out", type=kind, required=True, metavar="STORE", help=text)
    text = "memory limit of the whole process (default: 4GB)"
    add_option(parser, "--memory", parse_bytes, default="4GB", metavar="SIZE", help=text)
    add_json(parser)


def _add_engine(parser: argparse.ArgumentParser, default: str, text: str) -> None:
    parser.add_argument("--engine", default=default, metavar="NAME", help=text)
    parser.add_argument("--master", default="local[*]", metavar="URL", help="Spark's master (default: local[*])")
    text = "a setting of Spark's, as spark-submit takes it; may be given again"
    parser.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help=text)


def _path_or_url(text: str) -> Path | str:
    return text if "://" in text else Path(text)


def _show_store(arguments: Arguments, seconds: float, **more: Any) -> int:
    """Print a line about the new store; with --json, also print one object with `more`. Return the exit code."""
    from hoploom.store.format import STORE_FILE, parse_manifest
    from hoploom.store.storage_path import StoragePath

    place = StoragePath(str(arguments.out))
    with place.open(STORE_FILE) as file:
        manifest = parse_manifest(file.read(), str(place))
    print(f"{_headline(arguments.out, manifest)}, {seconds:.1f} s", file=for_people(arguments))
    if arguments.json:
        shown = {"out": str(arguments.out), "seconds": round(seconds, 3), **more, "store": _contents(manifest)}
        print(json.dumps(shown))
    return 0


# --- build ---------------------------------------------------------------------------------------


def _build_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", type=Path, help="graph.toml; `hoploom init --tables DIR` drafts one")
    _add_out(parser, on_spark=True)
    text = "parts, nodes assigned by a hash of their id (default: 1)"
    add_option(parser, "--parts", read_positive, default="1", metavar="N", help=text)
    parser.add_argument("--drop-dangling", action="store_true", help="leave out edges of unknown nodes, and count them")
    _add_engine(parser, "duckdb", "the engine that joins the tables: duckdb (default) or spark")
    add_option(parser, "--threads", read_positive, metavar="N", help="threads of the engine (default: all cores)")


def _build(arguments: Arguments) -> int:
    from hoploom.ingest.tables.build import BuildOptions, build
    from hoploom.ingest.tables.graph_file import read_graph

    options = BuildOptions(
        parts=arguments.parts,
        memory=arguments.memory,
        threads=arguments.threads,
        engine=arguments.engine,
        master=arguments.master,
        conf=_conf(arguments.conf),
        drop_dangling=arguments.drop_dangling,
    )
    graph: Path = arguments.graph
    if graph.is_dir() or (graph.suffix in TABLES and graph.exists()):  # build reads the file that describes tables
        folder = graph if graph.is_dir() else graph.parent
        raise ConfigError(f"{graph} is no graph.toml; `hoploom init --tables {folder}` drafts one")
    if arguments.engine != "spark" and isinstance(arguments.out, str):
        raise ConfigError(f"--out is {arguments.out}; only --engine spark writes to an object store, so give a path")
    with stage_line() as show:
        report = build(read_graph(arguments.graph), arguments.out, options, progress=show)
    for relation, count in report.dropped.items():
        if count:
            text = f"{relation}: {count:,} of {report.edges[relation]:,} edges dropped, an end is in no table of nodes"
            print(printable(text), file=for_people(arguments))
    for note in report.notes:
        print(printable(note), file=for_people(arguments))
    dropped = {str(relation): count for relation, count in report.dropped.items()}
    return _show_store(arguments, sum(report.seconds.values()), dropped=dropped, unlabelled=report.unlabelled)


def _conf(given: Sequence[str]) -> dict[str, str]:
    """Return Spark's settings by name, from the values of --conf; raise ConfigError if one is not spark.X=VALUE."""
    for setting in given:
        if not re.fullmatch(r"spark\.[^=]+=.*", setting):
            raise ConfigError(f"--conf is {setting!r}; give NAME=VALUE, e.g. spark.executor.memory=8g")
    return dict(setting.split("=", 1) for setting in given)


# --- import --------------------------------------------------------------------------------------


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(metavar="KIND", required=True, dest="kind")
    ogb = kinds.add_parser("ogb", help="a downloaded OGB folder, with raw and split inside")
    ogb.add_argument("name", help="the data set, such as ogbn-products")
    ogb.add_argument("folder", type=Path, help="its folder")
    ogb.add_argument("--undirected", action="store_true", help=BOTH_WAYS)
    glt = kinds.add_parser("glt", help="a folder of GraphLearn-for-PyTorch's partitions")
    glt.add_argument("folder", type=Path, help="the folder of GLT's partitions, with part0, part1, ...")
    glt.add_argument("--labels", type=Path, metavar="FILE", help="the .pt file with the labels")
    glt.add_argument(
        "--split",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="ids of a split; the same name given again adds to it",
    )
    for parser_of_kind in (ogb, glt):
        _add_out(parser_of_kind)


def _import(arguments: Arguments) -> int:
    from hoploom.ingest import formats

    begin = time.monotonic()
    folder, out = arguments.folder, arguments.out
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist; give the path of what was downloaded")
    with stage_line() as show:
        given = {"memory": arguments.memory, "progress": show}
        if arguments.kind == "ogb":
            formats.import_ogb(arguments.name, folder, out, undirected=arguments.undirected, **given)
        else:
            splits: dict[str, list[Path]] = {}
            for entry in arguments.split:
                name, _, path = entry.partition("=")
                if not name or not path:
                    raise ConfigError(f"--split is {entry!r}; give a name and a file, e.g. train=train_idx.pt")
                splits.setdefault(name, []).append(Path(path))
            formats.import_glt(folder, out, labels=arguments.labels, splits=splits, **given)
    return _show_store(arguments, time.monotonic() - begin)


# --- partition -----------------------------------------------------------------------------------


def _partition_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a store's directory, of any number of parts; with Spark also s3://… or gs://…"
    parser.add_argument("store", type=_path_or_url, help=text)
    _add_out(parser, on_spark=True)
    text = "parts of the new store"
    add_option(parser, "--parts", read_positive, dest="num_parts", required=True, metavar="N", help=text)
    parser.add_argument(
        "--method",
        default="stream",
        metavar="NAME",
        help="hash, range or stream (default)",
    )
    parser.add_argument(
        "--seeds",
        metavar="SPLIT",
        help="the split with the training seeds: SPLIT, TYPE:SPLIT, or none (default: train, if exactly one node "
        "type has this split)",
    )
    add_option(
        parser,
        "--fanouts",
        fanouts_or_none,
        default="15,10,5",
        metavar="N,N",
        help="fanouts of your training: the nodes that it uses most come first in their part. -1: all neighbours. "
        "none: nodes keep their order (default: 15,10,5)",
    )
    _add_engine(parser, "local", "where the store is cut: local, in this process (default), or spark")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report, too, as JSON")


def _partition(arguments: Arguments) -> int:
    from hoploom.partition import partition, report_as_json
    from hoploom.store.format import read_manifest, write_whole

    check_writable("--report", arguments.report, ".json")
    begin = time.monotonic()
    with stage_line() as show:
        if arguments.engine == "spark":
            report = _partition_on_spark(arguments, show)
        elif arguments.engine == "local":
            for flag, where in (("the store", arguments.store), ("--out", arguments.out)):
                if isinstance(where, str):
                    raise ConfigError(f"{flag} is {where}; only --engine spark reads and writes object stores")
            report = partition(
                arguments.store,
                arguments.out,
                arguments.num_parts,
                method=arguments.method,
                seeds=seeds_of(read_manifest(arguments.store).schema, arguments.seeds),
                fanouts=arguments.fanouts,
                memory=arguments.memory,
                progress=show,
            )
        else:
            raise ConfigError(f"--engine is {arguments.engine!r}; give local or spark")
    print(printable(f"{report}\n", "\n"), file=for_people(arguments))
    if arguments.report is not None:
        write_whole(arguments.report, [report_as_json(report).encode()])
    return _show_store(arguments, time.monotonic() - begin, report=json.loads(report_as_json(report)))


def _partition_on_spark(arguments: Arguments, show: Callable[[str], None]) -> "PartitionReport":
    from hoploom.store.fetch import manifest_at
    from hoploom.store.storage_path import StoragePath
    from hoploom.system import needs

    with needs("spark"):
        from hoploom.partition.on_spark import SparkOptions, partition_on_spark

    _, manifest = manifest_at(StoragePath(str(arguments.store)))
    return partition_on_spark(
        arguments.store,
        arguments.out,
        arguments.num_parts,
        SparkOptions(master=arguments.master, conf=_conf(arguments.conf), memory=arguments.memory),
        method=arguments.method,
        seeds=seeds_of(manifest.schema, arguments.seeds),
        fanouts=arguments.fanouts,
        progress=show,
    )


# --- fetch ---------------------------------------------------------------------------------------


def _fetch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="the store: a path, s3://BUCKET/PATH or gs://BUCKET/PATH")
    text = "the folder of the store on this host; what is there already is not transferred again"
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help=text)
    text = "a part to fetch; give it again for more (default: all)"
    add_option(parser, "--part", parse_count, appends=True, metavar="K", help=text)
    add_json(parser)


def _fetch(arguments: Arguments) -> int:
    from hoploom.store.fetch import fetch
    from hoploom.store.storage_path import StoragePath

    try:
        with _bytes_shown() as show:
            fetched = fetch(StoragePath(arguments.url), arguments.to, arguments.part, show)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt("run the same command again: complete files are kept") from interrupt
    parts, seconds = ",".join(map(str, fetched.parts)), max(fetched.seconds, 1e-3)
    came = f"{_size(fetched.transferred)} in {seconds:.1f} s, {_size(int(fetched.transferred / seconds))}/s"
    here = f"parts {parts} of {arguments.url} are in {arguments.to}"
    what = (
        f"{came}; {_size(fetched.bytes - fetched.transferred)} were there" if fetched.transferred else "they were there"
    )
    print(f"{here}: {fetched.num_files} files, {_size(fetched.bytes)}; {what}", file=for_people(arguments), flush=True)
    if arguments.json:
        print(json.dumps({"to": str(arguments.to), **asdict(fetched)}))
    return 0


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


@contextmanager
def _bytes_shown() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows the bandwidth and the time left: a bar on a terminal, else a line at intervals."""
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, disable=None) as bar:
        begun = said = time.monotonic()
        doing = ""

        def show(what: str, done: int, total: int) -> None:
            nonlocal doing, begun, said
            now = time.monotonic()
            if what != doing:
                doing, begun = what, now
                if not bar.disable:
                    bar.reset(total)
                    bar.set_description_str(what)
            if not bar.disable:
                bar.update(done - bar.n)
            elif now - said >= SECONDS_BETWEEN_LINES:
                said, rate = now, done / max(now - begun, 1e-3)
                left = (total - done) / max(rate, 1.0) / 60
                line = f"{what}: {_size(done)} of {_size(total)}, {_size(int(rate))}/s, {left:.0f} min left"
                print(line, file=sys.stderr, flush=True)

        yield show


# --- info ----------------------------------------------------------------------------------------


def _store_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="a store's folder")
    add_json(parser)


def _info(arguments: Arguments) -> int:
    from hoploom.store.format import read_manifest
    from hoploom.store.store import check_manifest

    manifest = read_manifest(arguments.store)
    check_manifest(arguments.store, manifest)
    if arguments.json:
        print(json.dumps(_contents(manifest), indent=1))
    else:
        print("\n\n".join(_description(arguments.store, manifest)))
    return 0


def _headline(path: Path | str, manifest: "Manifest") -> str:
    num_nodes = sum(t.num_nodes for t in manifest.schema.node_types)
    num_edges = sum(r.num_edges for r in manifest.schema.relations)
    parts = f"{len(manifest.parts)} part" + "s" * (len(manifest.parts) > 1)
    size = f"{_num_bytes(manifest) / 1e6:,.1f} MB"
    return f"{printable(str(path))}: {num_nodes:,} nodes, {num_edges:,} edges, {parts}, {size}"


def _contents(manifest: "Manifest") -> dict[str, Any]:
    """Return the content of store.json with the bytes of the store and of each part, but without the list of files."""
    from hoploom.store.format import manifest_to_json

    contents: dict[str, Any] = json.loads(manifest_to_json(manifest))
    del contents["files"]
    for number, part in enumerate(contents["parts"]):
        part["bytes"] = _num_bytes(manifest, number)
    return contents | {"num_files": len(manifest.files), "bytes": _num_bytes(manifest)}


def _description(path: Path, manifest: "Manifest") -> Iterator[str]:
    """Yield what `hoploom info` prints, block by block: a headline, and tables of node types, relations and parts."""
    schema = manifest.schema
    named = (("weights", schema.weight), ("times", schema.time))
    yield "\n".join([_headline(path, manifest), *(f"{what} are in field {name!r}" for what, name in named if name)])
    node_types = [
        (t.name, t.num_nodes, _fields(t.fields.items()), ", ".join(f"{k} {n:,}" for k, n in t.splits.items()))
        for t in schema.node_types
    ]
    yield text_table(("node type", "nodes", "fields", "splits"), node_types)
    relations = [(" ".join(r.key), r.num_edges, _fields(r.fields.items())) for r in schema.relations]
    yield text_table(("relation", "edges", "fields"), relations)
    of_types = [
        *((t.name, t.fields) for t in schema.node_types),
        *((" ".join(r.key), r.fields) for r in schema.relations),
    ]
    numbers = [
        (owner, name, index, f"{mean:.6g}", f"{deviation:.6g}")
        for owner, fields in of_types
        for name, field in fields.items()
        for index, (mean, deviation) in enumerate(zip(field.mean, field.deviation, strict=True))
    ]
    if numbers:
        yield text_table(("standardised", "field", "index", "mean", "deviation"), numbers)
    parts = [
        (number, sum(part.num_nodes), sum(part.num_edges), _num_bytes(manifest, number))
        for number, part in enumerate(manifest.parts)
    ]
    yield text_table(("part", "nodes", "edges", "bytes"), parts)


def _fields(fields: "Iterable[tuple[str, Field]]") -> str:
    return ", ".join(f"{name} {f.dtype}{list(f.shape) if f.shape else ''}" for name, f in fields)


def _num_bytes(manifest: "Manifest", part: int | None = None) -> int:
    """Return the total bytes of all files of a store, or of the files of part number `part`."""
    from hoploom.store.format import part_folder

    folder = "" if part is None else part_folder(part) + "/"
    return sum(entry.bytes for name, entry in manifest.files.items() if name.startswith(folder))


# --- check ---------------------------------------------------------------------------------------


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="a store's folder; with --leaks, a run.toml")
    text = "look for predicted links, later edges and labels in some training batches of a run.toml"
    parser.add_argument("--leaks", action="store_true", help=text)
    add_json(parser)


def _check_leaks(arguments: Arguments) -> int:
    """Print the leaks of a run's training batches; return 1 if there are any."""
    from hoploom.ranks.context import init
    from hoploom.train.runs.leaks import find_leaks
    from hoploom.train.runs.run_file import read_run_file

    people, run_file = for_people(arguments), read_run_file(arguments.store)
    with init(device="cpu") as context:
        leaks = find_leaks(run_file, context)
    for leak in leaks.found:
        print(printable(leak), file=people, flush=True)
    if not leaks.found:
        print(f"{paint('ok', 'green', people)}: {leaks.num_edges:,} edges in {leaks.num_batches} batches", file=people)
    if arguments.json:
        print(json.dumps({"ok": not leaks.found, "leaks": leaks.found, "edges": leaks.num_edges}))
    return 1 if leaks.found else 0


def _check(arguments: Arguments) -> int:
    from hoploom.store.check import problems
    from hoploom.store.format import read_manifest

    if arguments.leaks:
        return _check_leaks(arguments)
    if not arguments.store.exists():
        raise StoreError(f"{arguments.store} does not exist; give a store's folder")
    people, found = for_people(arguments), []
    for problem in problems(arguments.store):
        print(printable(problem), file=people, flush=True)
        found.append(problem)
    told: dict[str, Any] = {"ok": not found, "problems": found}
    if not found:
        manifest = read_manifest(arguments.store)
        told |= {"files": len(manifest.files), "bytes": _num_bytes(manifest)}
        print(f"{paint('ok', 'green', people)}: {told['files']} files, {told['bytes']:,} bytes", file=people)
    if arguments.json:
        print(json.dumps(told))
    return 1 if found else 0


# --- generate ------------------------------------------------------------------------------------

GENERATE_OPTIONS = (  # flag, argument and default of synthetic.generate, how it is read, help
    ("--degree", "avg_degree", "20", parse_number, "mean in-degree"),
    ("--features", "num_features", "100", read_positive, "features of a node"),
    ("--classes", "num_classes", "16", read_positive, "communities, which are also the labels"),
    ("--homophily", "homophily", "0.8", parse_number, "share of the edges that stay in their community"),
    ("--seed", "seed", "0", parse_count, "the seed of all random numbers"),
    ("--parts", "num_parts", "1", read_positive, "parts of the store"),
    ("--feature-dtype", "feature_dtype", "float32", lambda flag, text: text, "float32, float16 or bfloat16"),
)
GENERATE_FLAGS = (
    ("--heterogeneous", "heterogeneous", "papers, authors and institutions"),
    ("--weights", "weights", "add edge weights"),
    ("--times", "times", "add edge times"),
)


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="where to write the store; must not exist")
    text = "nodes of the labelled type: 10000, 10k or 1.5M"
    add_option(parser, "--nodes", read_positive, dest="num_nodes", required=True, metavar="N", help=text)
    for flag, keyword, default, read, text in GENERATE_OPTIONS:
        add_option(parser, flag, read, dest=keyword, default=default, metavar="X", help=f"{text} (default: {default})")
    for flag, keyword, text in GENERATE_FLAGS:
        parser.add_argument(flag, dest=keyword, action="store_true", help=text)
    add_json(parser)


def _generate(arguments: Arguments) -> int:
    from hoploom.ingest.synthetic import generate

    options = ("num_nodes", *(option[1] for option in (*GENERATE_OPTIONS, *GENERATE_FLAGS)))
    begin = time.monotonic()
    with node_progress() as show:
        generate(arguments.out, progress=show, **{name: getattr(arguments, name) for name in options})
    return _show_store(arguments, time.monotonic() - begin)


COMMANDS = {
    "build": Command(_build_arguments, _build, lambda a: f"reading {a.graph}", "hoploom.ingest.tables.build"),
    "import": Command(_import_arguments, _import, lambda a: f"reading {a.folder}", "hoploom.ingest.formats"),
    "partition": Command(_partition_arguments, _partition, lambda a: f"opening {a.store}", "hoploom.report.page"),
    "fetch": Command(_fetch_arguments, _fetch, lambda a: f"reading {a.url}", "hoploom.store.fetch"),
    "info": Command(_store_arguments, _info, lambda a: f"opening {a.store}", "hoploom.store.format"),
    "check": Command(_check_arguments, _check, lambda a: f"reading {a.store}", "hoploom.store.check"),
    "generate": Command(_generate_arguments, _generate, lambda a: f"writing {a.out}", "hoploom.ingest.synthetic"),
}
