"""The commands about runs: train, evaluate, infer, report, watch, and init, which writes a file to start from."""

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoploom.cli import (
    Arguments,
    Command,
    add_json,
    add_option,
    check_writable,
    read_address,
    read_positive,
    read_up_to,
    say,
)
from hoploom.config.values import parse_bytes, printable
from hoploom.errors import BatchError, ConfigError, PeerError, TrainError
from hoploom.ranks import environment
from hoploom.ranks.environment import RankInfo

if TYPE_CHECKING:
    from hoploom.inference.propagate import MatrixNorm
    from hoploom.ranks.context import Context
    from hoploom.schema import RelationName
    from hoploom.store import Store
    from hoploom.train.runs.run_file import RunFile


# --- options -------------------------------------------------------------------------------------


def _add_set(parser: argparse.ArgumentParser) -> None:
    text = "another value for a key of run.toml, e.g. train.epochs=3"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)


def _add_processes(parser: argparse.ArgumentParser) -> None:
    text = "processes on this machine (default: train.processes)"
    add_option(parser, "--processes", read_up_to(4096), metavar="N", help=text)


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="run.toml; `hoploom init` writes one")
    _add_set(parser)
    _add_processes(parser)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint, if there is one")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_json(parser)


def _add_run(parser: argparse.ArgumentParser, what: str = "the output folder of a run") -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help=what)
    _add_set(parser)
    _add_processes(parser)
    text = "the checkpoint to load (default: best; last if the run had no validation)"
    parser.add_argument("--checkpoint", choices=("best", "last"), help=text)


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    text = "train, val or test: what task.train, task.val and task.test name (default: test)"
    parser.add_argument("--split", choices=("train", "val", "test"), default="test", help=text)
    add_json(parser)


def _infer_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser, "the output folder of a run; for --propagate, a store")
    parser.add_argument("-o", "--out", type=Path, metavar="DIR", help="where to write (default: RUN/nodes)")
    text = "embedding, output, prediction (default: embedding,prediction; for links embedding,output)"
    parser.add_argument("--columns", metavar="NAME,...", help=text)
    text = "the node types to write (default: all with outputs)"
    parser.add_argument("--node-types", metavar="NAME,...", help=text)
    text = "for links: also write the K best destinations of every source, as OUT/best-K"
    add_option(parser, "--best", read_positive, metavar="K", help=text)
    text = "without a model: write the features of a store, propagated over 1 to K hops, as OUT/node/x_1.npy, ..."
    add_option(parser, "--propagate", read_positive, metavar="K", help=text)
    text = "for --propagate: gcn (both ends' degrees, self-loops), symmetric (no self-loops) or mean (default: gcn)"
    parser.add_argument("--norm", choices=("gcn", "symmetric", "mean"), help=text)
    text = "memory of each process besides the model (default: 256MiB)"
    add_option(parser, "--memory", parse_bytes, default="256MiB", metavar="SIZE", help=text)
    add_json(parser)


# --- train ---------------------------------------------------------------------------------------


def train(arguments: Arguments) -> int:
    """Run `hoploom train`: train as run.toml describes, on one or several processes. Return the exit code."""
    from hoploom.train.runs.run import RESULT_FILE
    from hoploom.train.runs.run_file import check_run, read_run_file

    run_file = read_run_file(arguments.file, arguments.set)
    started = environment.read_rank()
    num_processes = _num_processes(arguments, run_file, started)
    resume = arguments.resume or started.restarts > 0
    check_run(run_file, num_processes, resume=resume)
    if started.rank == 0:
        processes = f"starting {num_processes} processes, " if num_processes > 1 else ""
        say(f"{processes}opening {run_file.store or 'the graph on servers'}")
        least, more = divmod(run_file.loader.batch_size, num_processes)
        if more and not arguments.quiet:
            shares = f"{more} with {least + 1:,} seeds and {num_processes - more} with {least:,}"
            step = f"a step of {run_file.loader.batch_size:,} seeds goes to {num_processes} processes"
            print(f"hoploom: {step}: {shares}", file=sys.stderr, flush=True)
    work = (resume, not arguments.quiet, arguments.json)
    try:
        with environment.quiet() if arguments.quiet else nullcontext():
            complete = _on_ranks(train_rank, run_file, work, started, num_processes)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt("; ".join(_way_on("", arguments, run_file, started))) from interrupt
    except (TrainError, PeerError, BatchError) as error:
        raise type(error)("; ".join([str(error), *_way_on(str(error), arguments, run_file, started)])) from error
    if complete is None:  # other processes trained
        complete = (run_file.output.folder / RESULT_FILE).exists()
    if not complete:
        raise KeyboardInterrupt("; ".join(_way_on("", arguments, run_file, started)))
    return 0


def train_rank(context: "Context", run_file: "RunFile", resume: bool, progress: bool, as_object: bool) -> bool:
    """Train on this rank; return False if the run was stopped early."""
    from hoploom.train.runs.run import result_json, run, summary

    result = run(run_file, context, resume=resume, progress=progress, checked=True)
    if context.is_main:
        try:
            print(summary(result), file=sys.stderr if as_object else sys.stdout, flush=True)
            if as_object and result.is_complete:  # else the command prints how to continue
                print(json.dumps({"folder": str(result.folder), **json.loads(result_json(result))}), flush=True)
        except OSError as error:  # a full disk, or a pipe without a reader
            raise OSError(error.errno, f"{error.strerror}; the run is complete, see {result.folder}") from error
    return result.is_complete


def _way_on(error: str, arguments: Arguments, run_file: "RunFile", started: RankInfo) -> list[str]:
    """Return hints on how to go on after a stop: the last checkpoint (unless `error` names it), and the command."""
    from hoploom.train.checkpoint import last_good
    from hoploom.train.runs.run_file import LAST

    path = run_file.output.folder / f"{LAST}.safetensors"
    saved = last_good(path)
    found = [] if saved in error else [saved]
    if not path.exists():
        return found
    if started.source != "single":  # the command line of torchrun or srun is not known
        return [*found, "start it again as before, with --resume at the end"]
    words = ["hoploom", "train", str(arguments.file)]
    for override in arguments.set:
        words += ["--set", override]
    words += ["--processes", str(arguments.processes)] if arguments.processes else []
    return [*found, f"continue with: {shlex.join([*words, '--resume'])}"]


# --- evaluate and infer --------------------------------------------------------------------------


def evaluate_run(arguments: Arguments) -> int:
    """Print the metrics of a finished run on a split."""
    from hoploom.train.runs.run import read_finished

    run_file, checkpoint = read_finished(arguments.run, arguments.set, arguments.checkpoint)
    _on_ranks_of_run(arguments, run_file, evaluate_rank, (checkpoint, arguments.split, arguments.json))
    return 0


def evaluate_rank(context: "Context", run_file: "RunFile", checkpoint: Path, split: str, as_object: bool) -> None:
    """Evaluate on this rank; rank 0 prints the metrics."""
    from hoploom.train.runs.run import complete_setup, evaluation, open_graph, trained_model, with_placement

    setup = complete_setup(run_file, open_graph(run_file, context), context, with_placement)
    if split not in setup.seeds:
        raise ConfigError(f"--split is {split!r}, but the run has only {', '.join(setup.seeds)}; give one of these")
    model = trained_model(run_file, setup, context, checkpoint)
    found = evaluation(run_file, setup, context, model, split)()
    if context.is_main:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items() if "/" not in name)
        result = {"checkpoint": str(checkpoint), "split": split, "metrics": found}
        print(json.dumps(result) if as_object else f"{split}: {shown}", flush=True)


def infer_run(arguments: Arguments) -> int:
    """Write the outputs of a finished run for every node, or the propagated features of a store."""
    from hoploom.train.runs.run import read_finished

    if arguments.propagate is not None:
        return _propagate(arguments)
    if arguments.norm is not None:
        raise ConfigError("--norm is for --propagate; leave it out")
    run_file, checkpoint = read_finished(arguments.run, arguments.set, arguments.checkpoint)
    out: Path = arguments.out or run_file.output.folder / "nodes"
    options = {
        "columns": None if arguments.columns is None else arguments.columns.split(","),
        "node_types": None if arguments.node_types is None else arguments.node_types.split(","),
        "memory": arguments.memory,
    }
    given = (checkpoint, str(out), options, arguments.best, arguments.json)
    _on_ranks_of_run(arguments, run_file, infer_rank, given)
    return 0


def infer_rank(
    context: "Context",
    run_file: "RunFile",
    checkpoint: Path,
    out: str,
    options: dict[str, Any],
    num_best: int | None,
    as_object: bool,
) -> None:
    """Write this rank's share of the output rows. Rank 0 prints the path of the folder with the output."""
    from hoploom.inference.infer import Inference, folder_of, infer
    from hoploom.nn.models import GNN
    from hoploom.ranks.context import unwrap
    from hoploom.train.runs.run import complete_setup, infer_loader, open_graph, trained_model

    setup = complete_setup(run_file, open_graph(run_file, context), context)
    model = trained_model(run_file, setup, context, checkpoint)
    if num_best is not None:
        relation, decoder = _relation_of_best(num_best, run_file, setup.store, model)
        for name, needed in (("columns", ["output"]), ("node_types", [relation[0], relation[2]])):
            if options[name] is not None:
                options[name] = list(dict.fromkeys([*options[name], *needed]))
    options["node_types"] = options["node_types"] or (None if isinstance(unwrap(model), GNN) else setup.out_types)
    make = partial(infer_loader, run_file, setup, context, model)
    inference = Inference(task=(setup.nodes or setup).task, loader=make, **options)
    infer(model, setup.store, out, context, inference=inference)
    if num_best is not None:
        from hoploom.inference.best_links import write_best

        write_best(setup.store, Path(out), relation, num_best, context, decoder)
    if context.is_main:
        print(f"written to {out}", file=sys.stderr if as_object else sys.stdout, flush=True)
        if as_object:
            from pyarrow.parquet import read_schema

            rows, columns = dict[str, int](), dict[str, None]()
            for node_type in setup.store.schema.node_types:
                for part in sorted(Path(out, folder_of(node_type.name)).glob("part-*"))[:1]:
                    rows[node_type.name] = node_type.num_nodes
                    columns |= dict.fromkeys(read_schema(part).names[1:])  # without "id"
            result = {"checkpoint": str(checkpoint), "out": out}
            print(json.dumps({**result, "columns": list(columns), "rows": rows}), flush=True)


def _propagate(arguments: Arguments) -> int:
    from hoploom.train.runs.run_file import parse_run_file

    needless = [f"--{name.replace('_', '-')}" for name in OF_A_MODEL if getattr(arguments, name) is not None]
    if needless or arguments.out is None:
        way_out = f"leave {', '.join(needless)} out" if needless else "say where to write, with -o DIR"
        raise ConfigError(f"--propagate reads a store and no model; {way_out}")
    run_file = parse_run_file(f"store = {json.dumps(str(arguments.run.absolute()))}", arguments.set)
    given = (str(arguments.out), arguments.propagate, arguments.norm or "gcn", arguments.memory, arguments.json)
    _on_ranks_of_run(arguments, run_file, propagate_rank, given)
    return 0


def propagate_rank(
    context: "Context", run_file: "RunFile", out: str, hops: int, norm: "MatrixNorm", memory: int, as_object: bool
) -> None:
    """Write this rank's share of the propagated features. Rank 0 prints the path of the folder."""
    from hoploom.inference.propagate import propagate
    from hoploom.train.runs.run import open_graph

    propagate(open_graph(run_file, context), out, hops, context, norm=norm, memory=memory)
    if context.is_main:
        print(f"written to {out}", file=sys.stderr if as_object else sys.stdout, flush=True)
        if as_object:
            print(json.dumps({"out": out, "hops": hops, "norm": norm}), flush=True)


def _relation_of_best(num_best: int, run_file: "RunFile", store: "Store", model: Any) -> tuple["RelationName", Any]:
    """Return the relation whose best links --best writes, and the decoder; raise ConfigError if it cannot."""
    from hoploom.ranking.scored_links import decoder_of
    from hoploom.train.runs.link_splits import link_relation
    from hoploom.train.runs.run_file import LINKS

    if run_file.task.kind != LINKS:
        raise ConfigError(f"--best is for links, and the run has task.kind = {run_file.task.kind!r}; leave it out")
    if run_file.task.more:
        raise ConfigError("--best scores whole outputs, and here some are of labels (task.more); leave it out")
    decoder = decoder_of(model)
    try:
        decoder.check(None)
    except ConfigError as error:
        raise ConfigError(f"--best writes one list for each source; call hoploom.best instead: {error}") from error
    relation = link_relation(run_file, store.schema)
    if num_best > (count := store.schema.node_type(relation[2]).num_nodes):
        raise ConfigError(
            f"--best is {num_best}, and there are {count} nodes of {relation[2]!r}; give at most that many"
        )
    return relation, decoder


def _on_ranks_of_run(
    arguments: Arguments, run_file: "RunFile", work: Callable[..., None], given: tuple[Any, ...]
) -> None:
    started = environment.read_rank()
    num_processes = _num_processes(arguments, run_file, started)
    say(f"opening {run_file.store or 'the graph on servers'}")
    _on_ranks(work, run_file, given, started, num_processes)


# --- ranks ---------------------------------------------------------------------------------------


def _num_processes(arguments: Arguments, run_file: "RunFile", started: RankInfo) -> int:
    """Return the number of processes: as many as a launcher has started, else the number in --processes or run.toml."""
    wanted: int | None = arguments.processes
    if started.source == "single":
        return wanted or run_file.train.processes
    if wanted not in (None, started.world_size):
        raise ConfigError(f"--processes is {wanted}, but {started.source} started {started.world_size}; leave it out")
    return started.world_size


def _on_ranks(
    work: Callable[..., Any], run_file: "RunFile", given: tuple[Any, ...], started: RankInfo, num_processes: int
) -> Any:
    """Call work(context, run_file, *given) on every rank; return its result if this process is a rank, else None."""
    from hoploom.ranks.context import init
    from hoploom.ranks.spawn import spawn

    device = None if run_file.train.device == "auto" else run_file.train.device
    if started.world_size > 1 or num_processes == 1:
        with init(device=device) as context:
            return work(context, run_file, *given)
    return spawn(work, num_processes, (run_file, *given), device=device)


# --- init ----------------------------------------------------------------------------------------


def _init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, help="where to write it (run.toml; graph.toml with --tables)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--store", type=Path, help="a store; its node types, labels and splits are written into the new file"
    )
    source.add_argument("--tables", type=Path, metavar="DIR", help="a folder with tables: draft a graph.toml from them")


def _init(arguments: Arguments) -> int:
    path: Path = arguments.file or Path("run.toml" if arguments.tables is None else "graph.toml")
    if not path.exists():
        check_writable("FILE", path)
    way_on = f"hoploom train {path}"
    if arguments.tables is not None:
        from hoploom.ingest.tables.draft import draft

        text, section = draft(arguments.tables, path.parent), ""
        way_on = f"hoploom build {path} -o {path.stem}.store"
        for line in text.splitlines():
            section = line if line.startswith("[") else section
            if "  # guessed" in line:
                print(f"{section} {line}", file=sys.stderr)
    else:
        from hoploom.train.runs.first_run_file import template, template_for

        text, why = (template(), "") if arguments.store is None else template_for(arguments.store, beside=path.parent)
        if why:
            print(printable(why, "\n"), file=sys.stderr)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists; give another path, or remove it first") from error
    print(f"wrote {path}; read it through, then: {way_on}")
    return 0


# --- report and watch ----------------------------------------------------------------------------


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, nargs="+", help="the output folder of a run; several are compared")


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    _add_runs(parser)
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default: %(default)s)"
    )


def _report(arguments: Arguments) -> int:
    from hoploom.report.page import encoded
    from hoploom.report.reading import RunReader
    from hoploom.report.runs import run_page
    from hoploom.store.format import write_whole

    check_writable("--out", arguments.out)
    html = encoded(run_page([RunReader(folder) for folder in arguments.run]))
    write_whole(arguments.out, [html])
    path = str(arguments.out).encode(errors="backslashreplace").decode()  # a name may be no UTF-8
    print(f"wrote {path}, {len(html) / 1e3:,.0f} kB; open it in a browser")
    return 0


def _watch_arguments(parser: argparse.ArgumentParser) -> None:
    _add_runs(parser)
    text = "address of the page; port 0 picks a free port (default: %(default)s)"
    add_option(parser, "--listen", read_address, default="127.0.0.1:0", metavar="HOST:PORT", help=text)


def _watch(arguments: Arguments) -> int:
    from hoploom.report.reading import RunReader
    from hoploom.report.watch import LivePage

    runs = [RunReader(folder) for folder in arguments.run]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a KeyboardInterrupt, too
    try:
        with LivePage(runs, arguments.listen) as live, suppress(KeyboardInterrupt):
            print("watching; open this page, and press Ctrl-C to stop:", file=sys.stderr, flush=True)
            print(live.url, flush=True)
            live.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


RUN = "hoploom.train.runs.run"
OF_A_MODEL = ("checkpoint", "columns", "node_types", "best")
COMMANDS = {
    "train": Command(_train_arguments, train, lambda a: f"reading {a.file}", RUN),
    "evaluate": Command(_evaluate_arguments, evaluate_run, lambda a: f"reading {a.run}", RUN),
    "infer": Command(_infer_arguments, infer_run, lambda a: f"reading {a.run}", RUN),
    "init": Command(
        _init_arguments,
        _init,
        lambda a: f"reading {a.tables or a.store}" if a.tables or a.store else "",
        lambda a: "hoploom.ingest.tables.draft" if a.tables else "hoploom.train.runs.run_file",
    ),
    "report": Command(
        _report_arguments, _report, lambda a: f"reading {', '.join(map(str, a.run))}", "hoploom.report.runs"
    ),
    "watch": Command(_watch_arguments, _watch),
}
