"""What a plan says of a disk, held against the reader and the loader themselves."""

import json
import math
from pathlib import Path

import pytest
import torch

import hoploom
from hoploom import ConfigError, NeighborLoader, ops
from hoploom.fields import Field
from hoploom.ops import DiskFile, FileRows, Reads, RowRequest
from hoploom.report.plans import plan_page
from hoploom.scale import Question, as_json, as_text, findings, plan
from hoploom.scale.reads import expected_reads
from hoploom.store.disk_figures import USUAL

HEADER, FILE_BYTES = 128, 24 << 20


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> DiskFile:
    path = tmp_path_factory.mktemp("reads") / "rows"
    path.write_bytes(bytes(HEADER + FILE_BYTES))
    found = DiskFile(str(path))
    if not found.is_direct:
        pytest.skip("this folder's file system takes no direct reads: nothing is read in blocks")
    return found


@pytest.mark.parametrize(
    ("share", "row_bytes", "gap"),
    [
        (0.015, 512, 10_000),  # rows that straddle blocks
        (0.05, 512, 25_000),  # half of the file is swept
        (0.9, 512, 10_000),  # the whole of it is
        (0.02, 512, 0),  # single blocks
        (0.02, 64, 0),
        (0.1, 4096, 4096),
        (0.3, 6000, 20_000),  # rows longer than a block
    ],
)
def test_the_reader_takes_as_many_requests_and_bytes_as_expected(
    file: DiskFile, share: float, row_bytes: int, gap: int
) -> None:
    num_rows = FILE_BYTES // row_bytes
    ids = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))[: int(share * num_rows)]
    reads, out = Reads(gap=gap), ops.empty((len(ids), row_bytes), torch.uint8)
    reads.rows([RowRequest(FileRows(file, HEADER, num_rows), ids, torch.arange(len(ids)), out)])
    requests, num_bytes = expected_reads(len(ids), num_rows, row_bytes, gap)
    assert reads.requests == pytest.approx(requests, rel=0.06)
    assert reads.bytes == pytest.approx(num_bytes, rel=0.03)


@pytest.mark.parametrize("memory", [8_000_000, 2_000_000])
def test_a_loader_reads_what_is_planned(tmp_path: Path, memory: int) -> None:
    """With a window, and with a budget that does not even hold the edges."""
    num_nodes, width = 50_000, 128
    hoploom.generate(tmp_path / "graph", num_nodes=num_nodes, avg_degree=12, num_features=width, num_classes=4)
    store = hoploom.open(tmp_path / "graph", memory=memory)
    question = Question(
        nodes=num_nodes,
        edges=store.num_edges,
        features=Field("float32", (width,)),
        original_id_bytes=0,
        fanouts=(5, 3),
        batch_size=8,
        store_memory=memory,
        disk_requests=USUAL.requests_per_second,
        disk_bandwidth=USUAL.bytes_per_second,
    )
    planned = plan(question).reads
    assert planned is not None
    loader = NeighborLoader(store, [5, 3], torch.arange(0, num_nodes, 50), batch_size=8, shuffle=True, num_workers=1)
    batches = list(loader)
    said = store.reading()
    assert planned.steps == pytest.approx(loader._producer.num_steps, rel=0.2)  # type: ignore[attr-defined]
    assert store.budget is not None
    assert (planned.near_rows, planned.near_edges) == pytest.approx((store.budget.rows, store.budget.lists), abs=0.01)
    assert said["wanted_bytes"] / len(batches) == pytest.approx(planned.wanted, rel=1 / 3)
    assert said["requests"] / len(batches) == pytest.approx(planned.requests, rel=1 / 3)
    assert said["bytes"] / len(batches) == pytest.approx(planned.bytes, rel=1 / 3)


def question(**changes: object) -> Question:
    given = {"nodes": 10**7, "edges": 12 * 10**7, "store_memory": 10**9, "original_id_bytes": 0}
    return Question(**given | changes)  # type: ignore[arg-type]


def test_a_slow_disk_bounds_the_step_and_a_fast_one_does_not() -> None:
    slow, fast = (plan(question(disk_requests=rate, disk_bandwidth=1e4 * rate)) for rate in (1e4, 1e9))
    assert slow.times.bottleneck == "disk"
    assert slow.reads is not None
    assert slow.times.total == max(slow.reads.requests / 1e4, slow.reads.bytes / 1e8)
    assert any("disk bounds the step" in finding.what for finding in findings(slow))
    assert fast.times.bottleneck in ("sampling", "gathering")
    assert math.isclose(slow.reads.bytes, fast.reads.bytes)  # type: ignore[union-attr]


def test_the_most_used_nodes_first_read_less_from_disk() -> None:
    mixed, ordered = (plan(question(store_memory=3 * 10**9, ordered=way)).reads for way in (False, True))
    assert mixed is not None
    assert ordered is not None
    assert ordered.rows < 0.8 * mixed.rows


def test_a_plan_shows_the_disk_where_there_is_a_budget_that_is_too_small() -> None:
    answer = plan(question())
    assert "Disk, per step of a rank" in as_text(answer)
    assert json.loads(as_json(answer))["reads"]["steps"] == answer.reads.steps  # type: ignore[union-attr]
    assert json.loads(as_json(answer))["times"]["bottleneck"] == "disk"
    assert ">disk<" in plan_page(answer).markup()
    assert answer.mapped == pytest.approx(10**9, rel=1e-4)  # all of the budget
    for enough in (plan(question(store_memory=10**10)), plan(question(store_memory=None))):
        assert enough.reads is None
        assert "Disk, per step" not in as_text(enough)
        assert json.loads(as_json(enough))["reads"] is None


def test_a_budget_below_the_positions_of_lists_is_refused_as_the_store_refuses_it() -> None:
    with pytest.raises(ConfigError, match=r"where the edge lists begin takes 80\.0 MB of it; give at least 100 MB"):
        as_text(plan(question(store_memory=10**7)))
