"""Does `hoploom plan` predict what is measured, at 1 M, 10 M and 100 M edges? (Preparing: at 1 M and 10 M.)

"ours" is measured, "its figure" is the plan's, from constants that `hoploom bench` measures in the same run; a ratio of
1 is a perfect forecast. The graphs are made in a temporary folder and removed; the largest takes about 1 GB.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import graph
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import report
import torch
from measure import REPETITIONS, Spread, spread_of
from report import Report, Row
from torch import Tensor

from hoploom import NeighborLoader, ops
from hoploom.batch import Sampled
from hoploom.ingest.synthetic import generate
from hoploom.ingest.tables.build import BuildOptions, build
from hoploom.ingest.tables.graph_file import read_graph
from hoploom.scale import Constants, Question, ScalePlan, plan
from hoploom.scale.measure import FULL, Effort, draw_edges
from hoploom.scale.measure import measure as measure_machine
from hoploom.scale.plan import gather_seconds
from hoploom.scale.sizes import Popularity, is_hashed
from hoploom.schema import Field
from hoploom.store import Store, open_store

EDGES = (1_000_000, 10_000_000, 100_000_000)
DEGREE, FEATURES, CLASSES = 20, 64, 16
CACHED = 0.1  # share of the nodes
PREPARED = 10_000_000  # edges of the largest graph that is built from tables, and cut into parts
WIDTH, CUT_PARTS, MEMORY, TURNS = 16, 4, 4 * 10**9, 3
TINY = Effort(3_000_000, 48 << 20, 1_000_000, 0.1)
GRAPH_FILE = """
[nodes.node]
files = "nodes.parquet"
id = "id"
features = ["x"]
label = "y"
[edges."node to node"]
files = "edges.parquet"
source = "source"
destination = "destination"
"""
PARTITION = """
import json, sys, time
from pathlib import Path
from hoploom.partition import partition
store, out, parts, memory = sys.argv[1:]
begin = time.perf_counter()
partition(store, out, int(parts), method="stream", seeds="train", fanouts=None, memory=int(memory))
seconds = time.perf_counter() - begin
status = Path("/proc/self/status").read_text()  # getrusage would count the process that started this one
print(json.dumps([seconds, 1024 * int(status.partition("VmHWM:")[2].split()[0])]))
"""


def measure(tiny: bool) -> Report:
    """The machine first, then graph by graph."""
    constants = measure_machine(effort=TINY if tiny else FULL)
    rows: list[Row] = []
    for num_edges in EDGES:
        num_nodes = num_edges // DEGREE // (100 if tiny else 1)
        with tempfile.TemporaryDirectory(prefix="hoploom-scale-") as folder:
            rows += _rows(Path(folder) / "graph.store", num_nodes, constants)
            if num_edges <= PREPARED:
                rows += _preparing(Path(folder), num_nodes, constants)
    notes = [
        f"degree {DEGREE}, {FEATURES} float16 features; {graph.NUM_SEEDS} seeds, fanouts {graph.FANOUTS}",
        "sampling and gathering are one subgraph each: its own picks and nodes at the planned rates",
        f"tables: Parquet, scattered integer ids, {WIDTH} float32 features and a label a node",
        f"parts: {CUT_PARTS}, by stream, nothing sampled; a process of its own, whose peak holds the files it maps too",
    ]
    return Report(rows, notes)


def _rows(folder: Path, num_nodes: int, constants: Constants) -> Iterator[Row]:
    generate(
        folder,
        num_nodes=num_nodes,
        avg_degree=DEGREE,
        num_features=FEATURES,
        num_classes=CLASSES,
        feature_dtype="float16",
    )
    graph.forget(folder)
    store = open_store(folder)
    graph.touch(store)
    answer = plan(_question(store), constants)
    blocks = next(iter(_loader(store, 1)))
    size = sum(path.stat().st_size for path in folder.rglob("*.npy"))
    name = f"{store.schema.relations[0].num_edges / 1e6:,.3g} M edges"
    yield _row(f"{name}: size", "MB", _once(size), answer.disk, 1e-6)
    yield _row(f"{name}: picks of a batch", "thousand", _once(_num_picks(blocks)), answer.batch.picks, 1e-3)
    yield _row(f"{name}: nodes of a batch", "thousand", _once(blocks.n_id.numel()), answer.batch.nodes, 1e-3)
    yield from _hits(name, store, blocks.n_id, answer)
    yield from _loading(name, store, answer.question, constants)
    del store, blocks
    yield _row(f"{name}: edge list to CSC", "s", _sorting(num_nodes), num_nodes * DEGREE / constants.sort_edges, 1)


def _preparing(folder: Path, num_nodes: int, constants: Constants) -> Iterator[Row]:
    """Tables to a store; the graph's store, which lies in the folder, to parts."""
    num_edges = num_nodes * DEGREE
    _write_tables(folder, num_nodes, num_edges)
    name = f"{num_edges / 1e6:,.3g} M edges"
    question = Question(
        nodes=num_nodes,
        edges=num_edges,
        features=Field("float32", (WIDTH,)),
        train_share=0.0,
        memory_per_host=MEMORY,
        batch_size=min(graph.NUM_SEEDS, num_nodes),
    )
    planned = sum(plan(question, constants).build.values())
    building = spread_of(_seconds(lambda turn=turn: _build(folder, turn)) for turn in range(TURNS))
    yield _row(f"{name}: tables to store", "s", building, planned, 1)
    store = open_store(folder / "graph.store")
    cut = replace(_question(store), hosts=CUT_PARTS, edge_cut="stream", memory_per_host=MEMORY, original_id_bytes=8)
    planned = sum(plan(cut, constants).partition.values())
    turns = [_partition(folder, turn) for turn in range(TURNS)]
    yield _row(f"{name}: store to parts", "s", spread_of(seconds for seconds, _ in turns), planned, 1)
    peak = spread_of(peak for _, peak in turns)
    yield Row(f"{name}: store to parts, peak memory", "MB", peak.scaled(1e-6), "-")


def _write_tables(folder: Path, num_nodes: int, num_edges: int) -> None:
    """Ids below 2^62, in no order."""
    draw = np.random.default_rng(1)
    ids = draw.permutation(np.unique(draw.integers(2**62, size=num_nodes + num_nodes // 8 + 8)))[:num_nodes]
    x = pa.FixedSizeListArray.from_arrays(pa.array(draw.random(num_nodes * WIDTH, dtype=np.float32)), WIDTH)
    y = pa.array(draw.integers(CLASSES, size=num_nodes))
    pq.write_table(pa.table({"id": ids, "x": x, "y": y}), folder / "nodes.parquet")
    ends = {name: ids[draw.integers(num_nodes, size=num_edges)] for name in ("source", "destination")}
    pq.write_table(pa.table(ends), folder / "edges.parquet")
    (folder / "graph.toml").write_text(GRAPH_FILE)


def _build(folder: Path, turn: int) -> None:
    options = BuildOptions(threads=report.CORES, memory=MEMORY)
    build(read_graph(folder / "graph.toml"), folder / f"tables-{turn}.store", options)


def _partition(folder: Path, turn: int) -> tuple[float, float]:
    """Seconds, and the most bytes that the process held."""
    given = [str(folder / "graph.store"), str(folder / f"parts-{turn}"), str(CUT_PARTS), str(MEMORY)]
    done = subprocess.run(
        [sys.executable, "-c", PARTITION, *given], capture_output=True, text=True, timeout=600, check=True
    )
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


def _question(store: Store) -> Question:
    (node_type,), (relation,) = store.schema.node_types, store.schema.relations
    return Question(
        nodes=node_type.num_nodes,
        edges=relation.num_edges,
        features=Field("float16", (FEATURES,)),
        original_id_bytes=0,
        train_share=1.0,  # the splits together
        fanouts=tuple(graph.FANOUTS),
        batch_size=min(graph.NUM_SEEDS, node_type.num_nodes),
        classes=CLASSES,
    )


def _row(question: str, unit: str, measured: Spread, predicted: float, factor: float) -> Row:
    forecast = _once(predicted).scaled(factor)
    return Row(question, unit, measured.scaled(factor), "plan", forecast, measured.median / predicted)


def _once(value: float) -> Spread:
    return Spread(value, value, value, 1)


def _seconds(work: object) -> float:
    begin = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - begin


def _loader(store: Store, num_batches: int) -> NeighborLoader:
    size = min(graph.NUM_SEEDS, store.schema.node_types[0].num_nodes)
    seeds = graph.seeds_at(store, 0, min(size * num_batches, store.schema.node_types[0].num_nodes))
    return NeighborLoader(store, graph.FANOUTS, seeds, batch_size=size, mode="blocks")


def _num_picks(batch: object) -> int:
    return sum(block.edge_index.shape[1] for block in batch.blocks)  # type: ignore[attr-defined]


def _hits(name: str, store: Store, n_id: Tensor, answer: ScalePlan) -> Iterator[Row]:
    """How many of the batch's nodes are among those that most edges come from."""
    num_nodes = answer.question.nodes
    counts = torch.zeros(num_nodes, dtype=torch.int32)
    for part in store.parts:
        sources = part.lists[0].indices
        counts.index_add_(0, sources, torch.ones(1, dtype=torch.int32).expand(sources.numel()))
    cached = torch.zeros(num_nodes, dtype=torch.bool)
    cached[torch.topk(counts, int(num_nodes * CACHED)).indices] = True
    found = float(cached[n_id].float().mean())
    crowd, hops = Popularity(num_nodes, answer.question.skew), answer.batch.hops
    predicted = crowd.hit_rate(hops[0].frontier, hops[-1].drawn, CACHED)
    yield _row(f"{name}: hits of a cache of {CACHED:.0%}", "%", _once(found), predicted, 100)


def _loading(name: str, store: Store, question: Question, constants: Constants) -> Iterator[Row]:
    """One thread, batch by batch."""
    if question.nodes <= graph.NUM_SEEDS:
        return
    torch.set_num_threads(1)
    sample = graph.make_sampler(store)
    batches: list[Sampled] = []
    sampling = []
    for step in range(2 + REPETITIONS):
        sampling.append(_seconds(lambda step=step: batches.append(sample(step))))
        del batches[:-1]
    nodes, num_picks = batches[-1].nodes[0], batches[-1].edge_index[0].shape[1]
    slower = constants.hashed_slowdown if is_hashed(question) else 1.0
    yield _row(f"{name}: sampling", "ms", spread_of(sampling[2:]), num_picks / constants.sample_picks * slower, 1e3)
    gathering = [_seconds(lambda: _gather(store, nodes)) for _ in range(2 + REPETITIONS)]
    planned = nodes.numel() * gather_seconds(question, constants)
    yield _row(f"{name}: gathering", "ms", spread_of(gathering[2:]), planned, 1e3)
    torch.set_num_threads(report.CORES)


def _gather(store: Store, nodes: Tensor) -> None:
    """Features and labels, as the loader asks for them."""
    from hoploom.store.base import Wanted

    store.features.gather([Wanted("node", name, nodes) for name in ("x", "y")])


def _sorting(num_nodes: int) -> Spread:
    """A random edge list, as many edges as the graph has."""
    edge_index = draw_edges(num_nodes, num_nodes * DEGREE)
    count = 3 if num_nodes > 1_000_000 else REPETITIONS
    return spread_of(_seconds(lambda: ops.build_csc(edge_index, num_nodes, num_nodes)) for _ in range(count))


if __name__ == "__main__":
    report.main(measure)
