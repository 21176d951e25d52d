"""A graph server within a budget of memory: how it reads rows, and what of its memory they take."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.placements import within
from support.wires import over_the_wire

import hoploom
from hoploom.ops import Reads, RowRequest
from hoploom.serve import service
from hoploom.serve.graph_server import BatchOptions, GraphServer
from hoploom.serve.wire import Message

NUM_NODES, WIDTH = 3000, 64
ROW = 4 * WIDTH  # bytes
ALL = torch.arange(NUM_NODES)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budget") / "graph.store"
    hoploom.generate(folder, num_nodes=NUM_NODES, avg_degree=4, num_features=WIDTH, num_classes=4)
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of the core has read."""
    called: list[int] = []
    rows = Reads.rows

    def counted(self: Reads, wanted: Sequence[RowRequest]) -> None:
        called.append(sum(request.places.numel() for request in wanted))
        rows(self, wanted)

    monkeypatch.setattr(Reads, "rows", counted)
    return called


def _ask(path: Path, memory: int, ids: torch.Tensor) -> tuple[GraphServer, Message]:
    """A server, and its answer for x and y of these nodes."""
    node = GraphServer(path, None, BatchOptions(store_memory=memory))
    header = {"ask": "gather", "part": 0, "wanted": [["node", "x", 0], ["node", "y", 0]]}
    return node, node.service.answer(Message(header, [ids]))


def _check(path: Path, answer: Message, ids: torch.Tensor) -> None:
    tables = hoploom.open(path).parts[0].tables
    for name, came in zip(("x", "y"), over_the_wire(answer).tensors, strict=True):
        assert torch.equal(came, tables["node", name].rows[ids])  # type: ignore[arg-type]


def test_the_rows_of_a_request_are_read_together(path: Path, reads: list[int]) -> None:
    ids = torch.randperm(NUM_NODES)
    _, answer = _ask(path, within(path, 0), ids)
    assert reads == [2 * NUM_NODES]  # both fields, in one call, before the answer begins
    _check(path, answer, ids)
    assert len(reads) == 1


def test_rows_take_their_share_of_the_window_until_they_are_sent(
    path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PIECE", 10 * ROW)
    ids = torch.arange(NUM_NODES - 100, NUM_NODES)
    node, answer = _ask(path, within(path, 0.5), ids)
    window = node.service.rows.size
    assert node.store.budget is not None
    assert node.store.budget.window == window > 4 * 100 * ROW
    assert (reads, node.service.rows.taken) == ([100], 100 * ROW)  # the field y is in memory
    _check(path, answer, ids)
    assert answer.done is not None
    for _ in range(2):
        answer.done()
    assert node.service.rows.taken == 0


def test_more_rows_than_that_come_in_pieces_and_nobody_waits_for_memory(
    path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PIECE", 10 * ROW)
    ids = torch.arange(NUM_NODES).flip(0)
    node, answer = _ask(path, within(path, 0.5), ids)
    assert reads == []
    window = node.service.rows.size
    assert node.service.rows.taken == window // 4
    _check(path, answer, ids)
    assert max(reads) <= window // 8 // ROW
    reads.clear()
    node.service.rows.take_some(window)  # others have all of it
    answer = node.service.answer(Message({"ask": "gather", "part": 0, "wanted": [["node", "x", 0]]}, [ids]))
    assert node.service.rows.taken == window
    assert torch.equal(over_the_wire(answer).tensors[0], hoploom.open(path).parts[0].tables["node", "x"].rows[ids])  # type: ignore[arg-type]
    assert max(reads) == 10
