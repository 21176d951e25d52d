"""A run's use of the disk, and what bounds it: from real reads, and by arithmetic."""

import json
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fit_workers import alone, learner_of

import hoploom
from hoploom import NeighborLoader, Store
from hoploom.report.reading import RunReader
from hoploom.report.runs import run_page
from hoploom.train.records import DiskMeter, DiskUse, disk_use
from hoploom.train.runs.run import run, summary
from hoploom.train.runs.run_toml import parse_run_file
from hoploom.train.step import StepReport

NUM_NODES, WIDTH = 20_000, 512
READS = {"bytes": 8e6, "wanted_bytes": 6e6, "asked": 1000, "found": 250, "seconds": 0.5, "busy_seconds": 0.4}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seen") / "wide.store"
    hoploom.generate(folder, num_nodes=NUM_NODES, avg_degree=10, num_features=WIDTH, num_classes=4)
    return folder


def report(step: int, seconds: float, waited: float) -> StepReport:
    return StepReport(0, step, 0.5, 100, 50, 0.1, seconds, waited)


def drained(store: Store, *fanouts: int, threads: int, **options: Any) -> DiskUse:
    """Return the use of the disk by a loop that does nothing with its batches."""
    loader = NeighborLoader(store, fanouts, **{"input_nodes": "train", "num_workers": threads} | options)
    meter, began = DiskMeter(loader), time.perf_counter()
    for step, _ in enumerate(loader, 1):
        now = time.perf_counter()
        meter.step(report(step, now - began, now - began))
        began = now
    use = meter.use()
    assert use is not None
    return use


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("by_threads", [False, True])
def test_a_loop_that_sweeps_the_file_for_few_rows_is_bound_by_the_disk(
    path: Path, by_threads: bool, threads: int
) -> None:
    store = hoploom.open(path, memory="3MB")
    assert store.reads is not None
    store.reads.gap, store.reads.by_threads = 1 << 30, by_threads
    use = drained(store, 1, threads=threads, batch_size=100, look_ahead=1, input_nodes=torch.arange(3, NUM_NODES, 20))
    assert use.bound == "disk"
    assert use.wanted < 0.1
    assert 0.3 < use.busy <= 1
    assert use.bytes_per_step == store.reading()["bytes"] / 10


def test_a_loop_whose_batches_take_long_to_make_and_that_reads_little_is_bound_by_sampling(path: Path) -> None:
    def slow(batch: Any) -> Any:
        time.sleep(0.2)  # many times what the reads take, however busy the machine is
        return batch

    (part,) = hoploom.open(path).parts
    held = sum(table.rows.nbytes for table in part.tables.values()) + part.lists[0].indices.nbytes
    store = hoploom.open(path, memory=part.lists[0].indptr.nbytes + int(0.97 * held))
    assert store.reads is not None
    seeds = torch.arange(0, NUM_NODES, 10)
    use = drained(store, 10, 10, 10, threads=2, batch_size=500, look_ahead=24, input_nodes=seeds, transform=slow)
    assert use.bound == "sampling"
    assert use.found > 0.9


@pytest.mark.parametrize(
    ("wait", "threads", "busy", "sampling", "servers", "bound"),
    [
        (0.1, 2, 0.9, 5.0, 0.0, "model"),  # few steps wait, however busy the others are
        (0.9, 2, 0.9, 1.6, 0.0, "disk"),
        (0.9, 2, 0.7, 1.6, 0.0, "sampling"),  # by two threads: 0.8 s each
        (0.9, 2, 0.7, 1.0, 1.8, "servers"),
        (0.4, 0, 0.3, 0.1, 0.0, "model"),  # in turn with the batches, it takes more than half
        (0.6, 0, 0.4, 0.2, 0.0, "disk"),
    ],
)
def test_what_is_busy_longest_bounds_a_run_that_waits(
    wait: float, threads: int, busy: float, sampling: float, servers: float, bound: str
) -> None:
    reads = READS | {"busy_seconds": busy}
    stages = {"sample": sampling, "fetch": reads["seconds"], "gather": servers}
    use = disk_use(4, {"step": 1.0, "wait": wait}, reads, stages, servers, threads=threads)
    assert use == DiskUse(2e6, 0.75, 0.25, busy, bound)


def test_a_store_that_reads_nothing_costs_a_step_nothing() -> None:
    meter = DiskMeter(learner_of().loader)
    meter.step(report(1, 1.0, 0.5))
    assert (meter.use(), meter._num_steps) == (None, 0)


RUN = """
store = "{store}"
memory = "900kB"
[model]
hidden = 8
[loader]
fanouts = [4, 3]
batch_size = 512
threads = 1
[train]
epochs = 2
[output]
folder = "{out}"
tensorboard = false
"""


def test_a_run_writes_and_shows_what_its_steps_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what its validation reads: that is as much again."""
    hoploom.generate(tmp_path / "graph.store", num_nodes=6000, avg_degree=10, num_features=64, num_classes=4)
    running, stores = import_module("hoploom.train.runs.run"), list[Store]()
    opened = running.open_graph
    monkeypatch.setattr(running, "open_graph", lambda *given: stores.append(opened(*given)) or stores[-1])
    validation: list[float] = []
    evaluate = running.evaluate

    def evaluated(*given: Any, **options: Any) -> Any:
        before = stores[0].reading()["bytes"]
        found = evaluate(*given, **options)
        validation.append(stores[0].reading()["bytes"] - before)
        return found

    monkeypatch.setattr(running, "evaluate", evaluated)
    file = parse_run_file(RUN.format(store=tmp_path / "graph.store", out=tmp_path / "run"))
    result = run(file, alone())
    lines = [json.loads(line) for line in (tmp_path / "run" / "times-rank0.jsonl").read_text().splitlines()]
    num_bytes, num_steps = sum(line["reads"]["bytes"] for line in lines), sum(line["steps"] for line in lines)
    use = result.outcome.disk
    assert use is not None
    assert len(validation) == 3  # two of epochs, one of the test
    assert min(validation) > 0
    assert num_bytes == stores[0].reading()["bytes"] - sum(validation)
    assert use.bytes_per_step == num_bytes / num_steps
    assert f"disk: {use}" in summary(result)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["disk"]["bound"] == use.bound
    text = run_page([RunReader(tmp_path / "run")]).markup()
    assert "bound by" in text
    assert f"<td>{use.bound}</td>" in text or f">{use.bound}<" in text
