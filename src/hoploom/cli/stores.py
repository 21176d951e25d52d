"""Commands about stores: build, import and partition make them, generate too; info and check look at them."""

import argparse
import inspect
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from hoploom.cli.command import (
    Arguments,
    Command,
    add_option,
    check_writable,
    fanouts_of,
    megabytes,
    progress_bar,
    read_positive,
    seeds_of,
    stage_line,
    table,
)
from hoploom.config.values import parse_bytes
from hoploom.errors import ConfigError, StoreError
from hoploom.ingest import synthetic
from hoploom.schema import Field
from hoploom.store import format as layout
from hoploom.store.check import problems
from hoploom.store.disk import check_manifest
from hoploom.store.format import Manifest

TABLES = (".parquet", ".csv", ".gz", ".tsv", ".arrow", ".feather", ".ipc")


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="STORE", help="the new store; must not exist")
    text = "what the process may take, all included (default: 4GB)"
    add_option(parser, "--memory", parse_bytes, default="4GB", metavar="SIZE", help=text)


def _show_store(path: Path, seconds: float) -> None:
    print(f"{headline(path, layout.read_manifest(path))}, {seconds:.1f} s")


# --- build ---------------------------------------------------------------------------------------


def _build_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", type=Path, help="graph.toml; `hoploom init --tables DIR` drafts one")
    _add_out(parser)
    text = "parts, nodes assigned by a hash of their id (default: 1)"
    add_option(parser, "--parts", read_positive, default="1", metavar="N", help=text)
    parser.add_argument("--drop-dangling", action="store_true", help="leave out edges of unknown nodes, and count them")
    parser.add_argument(
        "--engine", default="duckdb", metavar="NAME", help="joins the tables: duckdb (default) or spark"
    )
    parser.add_argument("--master", default="local[*]", metavar="URL", help="Spark's master (default: local[*])")
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
        drop_dangling=arguments.drop_dangling,
    )
    _check_no_table(arguments.graph)
    with stage_line() as show:
        report = build(read_graph(arguments.graph), arguments.out, options, progress=show)
    for relation, count in report.dropped.items():
        if count:
            print(f"{relation}: {count:,} of {report.edges[relation]:,} edges dropped, an end is in no table of nodes")
    _show_store(arguments.out, sum(report.seconds.values()))
    return 0


def _check_no_table(path: Path) -> None:
    """A table, or a folder of them, is not what build reads: it reads what describes them."""
    if path.is_dir() or (path.suffix in TABLES and path.exists()):
        folder = path if path.is_dir() else path.parent
        raise ConfigError(f"{path} is no graph.toml; `hoploom init --tables {folder}` drafts one")


# --- import --------------------------------------------------------------------------------------


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(metavar="KIND", required=True, dest="kind")
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
    glt.add_argument(
        "--split",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="ids of a split; the same name given again adds to it",
    )
    for parser_of_kind in (ogb, archive, glt):
        _add_out(parser_of_kind)


def _import(arguments: Arguments) -> int:
    from hoploom.ingest import formats
    from hoploom.ingest.stream import EdgeRule

    begin = time.monotonic()
    folder, out = arguments.folder, arguments.out
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist; give the path of what was downloaded")
    with stage_line() as show:
        given = {"memory": arguments.memory, "progress": show}
        if arguments.kind == "ogb":
            formats.import_ogb(arguments.name, folder, out, undirected=arguments.undirected, **given)
        elif arguments.kind == "npz":
            rule = EdgeRule(undirected=True, deduplicate=True) if arguments.undirected else None
            formats.import_archive(folder, out, rule=rule, ignore=arguments.ignore, **given)
        else:
            formats.import_glt(folder, out, labels=arguments.labels, splits=_splits(arguments.split), **given)
    _show_store(out, time.monotonic() - begin)
    return 0


def _splits(given: list[str]) -> Mapping[str, list[Path]]:
    splits: dict[str, list[Path]] = {}
    for entry in given:
        name, equals, path = entry.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"--split is {entry!r}; give a name and a file, e.g. train=train_idx.pt")
        splits.setdefault(name, []).append(Path(path))
    return splits


# --- partition -----------------------------------------------------------------------------------


def _partition_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="a store's directory, of any number of parts")
    _add_out(parser)
    add_option(parser, "--parts", read_positive, required=True, metavar="N", help="parts of the new store")
    parser.add_argument(
        "--method",
        default="stream",
        metavar="NAME",
        help="hash, range, stream (default), frequency, or metis (needs pymetis)",
    )
    parser.add_argument(
        "--seeds",
        metavar="SPLIT",
        help="the split that training starts from: SPLIT, TYPE:SPLIT, or none (default: train, where just one node "
        "type has members of it)",
    )
    add_option(
        parser,
        "--fanouts",
        fanouts_of,
        default="15,10,5",
        metavar="N,N",
        help="as in training, to find the hottest nodes; -1 for all neighbours, none to sample nothing (default: "
        "15,10,5)",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report as JSON too")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the report as a picture, an SVG")


def _partition(arguments: Arguments) -> int:
    from hoploom.partition import as_json, as_svg, partition
    from hoploom.store.format import write_whole

    check_writable("--report", arguments.report)
    check_writable("--picture", arguments.picture)
    begin = time.monotonic()
    with stage_line() as show:
        report = partition(
            arguments.store,
            arguments.out,
            arguments.parts,
            method=arguments.method,
            seeds=seeds_of(layout.read_manifest(arguments.store).schema, arguments.seeds),
            fanouts=arguments.fanouts,
            memory=arguments.memory,
            progress=show,
        )
    print(report)
    print()
    _show_store(arguments.out, time.monotonic() - begin)
    for path, write in ((arguments.report, as_json), (arguments.picture, as_svg)):
        if path is not None:
            write_whole(path, [write(report).encode()])
    return 0


# --- info ----------------------------------------------------------------------------------------


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="a store's directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _info(arguments: Arguments) -> int:
    manifest = layout.read_manifest(arguments.store)
    check_manifest(arguments.store, manifest)
    print(_as_json(manifest) if arguments.json else _as_text(arguments.store, manifest))
    return 0


def _as_json(manifest: Manifest) -> str:
    """store.json, with sizes instead of the list of files."""
    contents = json.loads(layout.to_json(manifest))
    del contents["files"]
    for number, part in enumerate(contents["parts"]):
        part["bytes"] = _part_bytes(manifest, number)
    return json.dumps(contents | {"num_files": len(manifest.files), "bytes": _bytes(manifest)}, indent=1)


def _as_text(path: Path, manifest: Manifest) -> str:
    schema = manifest.schema
    node_types = [
        (t.name, t.num_nodes, _fields(t.fields.items()), ", ".join(f"{k} {n:,}" for k, n in t.splits.items()))
        for t in schema.node_types
    ]
    relations = [(" ".join(r.key), r.num_edges, _fields(r.fields.items())) for r in schema.relations]
    parts = [
        (number, sum(part.num_nodes), sum(part.num_edges), _part_bytes(manifest, number))
        for number, part in enumerate(manifest.parts)
    ]
    named = (("weights", schema.weight), ("times", schema.time))
    fields_read = [f"{what} are in field {name!r}" for what, name in named if name]
    sections = (
        "\n".join((headline(path, manifest), *fields_read)),
        table(("node type", "nodes", "fields", "splits"), node_types),
        table(("relation", "edges", "fields"), relations),
        table(("part", "nodes", "edges", "bytes"), parts),
    )
    return "\n\n".join(sections)


def headline(path: Path, manifest: Manifest) -> str:
    num_nodes = sum(t.num_nodes for t in manifest.schema.node_types)
    num_edges = sum(r.num_edges for r in manifest.schema.relations)
    parts = f"{len(manifest.parts)} part" + "s" * (len(manifest.parts) > 1)
    return f"{path}: {num_nodes:,} nodes, {num_edges:,} edges, {parts}, {megabytes(_bytes(manifest))}"


def _fields(fields: Iterable[tuple[str, Field]]) -> str:
    return ", ".join(f"{name} {f.dtype}{list(f.shape) if f.shape else ''}" for name, f in fields)


def _bytes(manifest: Manifest) -> int:
    return sum(entry.bytes for entry in manifest.files.values())


def _part_bytes(manifest: Manifest, part: int) -> int:
    folder = layout.part_folder(part) + "/"
    return sum(entry.bytes for name, entry in manifest.files.items() if name.startswith(folder))


# --- check ---------------------------------------------------------------------------------------


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="a store's directory")


def _check(arguments: Arguments) -> int:
    if not arguments.store.exists():
        raise StoreError(f"{arguments.store} does not exist; give a store's directory")
    found = False
    for problem in problems(arguments.store):
        print(problem)
        found = True
    if found:
        return 1
    manifest = layout.read_manifest(arguments.store)
    print(f"ok: {len(manifest.files)} files, {_bytes(manifest):,} bytes")
    return 0


# --- generate ------------------------------------------------------------------------------------

GENERATE_OPTIONS = (  # flag, argument of synthetic.generate, help
    ("--degree", "avg_degree", "mean in-degree"),
    ("--features", "num_features", "features of a node"),
    ("--classes", "num_classes", "communities, and so labels"),
    ("--homophily", "homophily", "share of the edges that stay in their community"),
    ("--seed", "seed", "what all is drawn from"),
    ("--parts", "num_parts", "parts of the store"),
    ("--feature-dtype", "feature_dtype", "float32, float16 or bfloat16"),
    ("--heterogeneous", "heterogeneous", "papers, authors and institutions"),
    ("--weights", "weights", "add edge weights"),
    ("--times", "times", "add edge times"),
)


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="where to write the store; must not exist")
    parser.add_argument(
        "--nodes", dest="num_nodes", type=int, required=True, metavar="N", help="nodes of the labelled type"
    )
    parameters = inspect.signature(synthetic.generate).parameters
    for flag, keyword, text in GENERATE_OPTIONS:
        default = parameters[keyword].default
        if default is False:
            parser.add_argument(flag, dest=keyword, action="store_true", help=text)
        else:
            help_text = f"{text} (default: {default})"
            kind = type(default)
            parser.add_argument(flag, dest=keyword, type=kind, default=default, metavar="X", help=help_text)


def _generate(arguments: Arguments) -> int:
    given = {keyword: getattr(arguments, keyword) for _, keyword, _ in GENERATE_OPTIONS}
    with progress_bar() as show:
        synthetic.generate(arguments.out, num_nodes=arguments.num_nodes, progress=show, **given)
    print(headline(arguments.out, layout.read_manifest(arguments.out)))
    return 0


COMMANDS = {
    "build": Command(_build_arguments, _build),
    "import": Command(_import_arguments, _import),
    "partition": Command(_partition_arguments, _partition),
    "info": Command(_info_arguments, _info),
    "check": Command(_check_arguments, _check),
    "generate": Command(_generate_arguments, _generate),
}
