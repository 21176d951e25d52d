"""A graph server without the wire: memory that comes back, picks within it, and whose store is asked."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batch_servers import without_graph
from support.graphs import random_graph, save_in_parts
from support.placements import within
from support.wires import over_the_wire
from torch_geometric.data import Data

import hoploom
from hoploom import ConfigError, Store, StoreError
from hoploom.ops import Reads, RowRequest
from hoploom.serve import requests, service, wire
from hoploom.serve.graph_server import BatchOptions, GraphServer
from hoploom.serve.memory_budget import BusyError
from hoploom.serve.peers import read_info
from hoploom.serve.service import PICK_BYTES, Service
from hoploom.serve.wire import Message
from hoploom.store.format import Manifest, PartRange, manifest_to_json


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("node") / "store"
    save_in_parts(hoploom.from_pyg(random_graph(60, 500, seed=1)), path, 2)
    return path


@pytest.fixture
def node(path: Path) -> Iterator[GraphServer]:
    with GraphServer(path, None, BatchOptions()) as node:
        yield node


def test_what_is_held_and_made_is_told(node: GraphServer) -> None:
    trainer, servers = without_graph(hoploom.from_pyg(random_graph(60, 500, seed=1)))
    next(iter(hoploom.NeighborLoader(trainer, [2], torch.arange(4), batch_size=4)))
    asked = servers.requests[0] | {"identity": node.store.identity}
    answer = node.service.answer(Message(asked, [torch.arange(4)]))
    size = sum(tensor.nbytes for tensor in answer.tensors if isinstance(tensor, torch.Tensor))
    assert node.metrics.value("hoploom_held_bytes") == size > 0
    assert answer.done is not None
    answer.done()
    assert node.metrics.value("hoploom_held_bytes") == 0


def _sample(store: Store, fanout: int, **more: Any) -> Message:
    header = {
        **{"ask": "sample", "part": 0, "frontiers": [[0, False, False]], "key": 1, "hop": 0, "fanouts": [fanout]},
        **dict.fromkeys(("replace", "last", "labor", "weighted"), False),
        **more,
    }
    return Message(header, [torch.arange(store.schema.node_types[0].num_nodes)])


@pytest.fixture
def whole() -> Store:
    return hoploom.from_pyg(random_graph(60, 500, seed=1))


@pytest.mark.parametrize(("fanout", "replace"), [(-1, False), (3, False), (3, True), (1 << 20, False)])
def test_the_most_picks_are_those_that_come(fanout: int, replace: bool, whole: Store) -> None:
    asked = _sample(whole, fanout, replace=replace)
    (part,) = whole.parts
    frontiers, draw = requests.read_frontiers(asked, part), requests.read_draw(asked, part)
    (picks,) = part.sample(frontiers, draw)
    assert picks is not None
    assert picks.sources.numel() == requests.most_picks(part, frontiers, draw, 0)
    assert picks.sources.numel() <= requests.most_picks(part, frontiers, draw, 1 << 26)


def _service(whole: Store, memory: int, wait: float = 5.0) -> Service:
    return Service(whole, {0: whole.parts[0]}, memory, wait=wait)


def test_picks_of_all_relations_together_are_bounded(whole: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_PICKS", 499)
    with pytest.raises(ConfigError, match="would pick 500 edges; at most 499"):
        _service(whole, 1 << 20).answer(_sample(whole, -1))


def test_in_degrees_are_told_without_any_edge_however_many_there_are(whole: Store) -> None:
    answer = _service(whole, 1).answer(_sample(whole, -1, counts_only=True))
    counts, sources, edges = answer.tensors
    assert torch.equal(counts, whole.parts[0].lists[0].indptr.diff())  # type: ignore[arg-type]
    assert len(sources) == len(edges) == 0  # type: ignore[arg-type]


def test_many_picks_take_memory_until_sent_and_few_do_not(whole: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = _service(whole, 500 * PICK_BYTES)
    free = serving.answer(_sample(whole, -1))  # under a megabyte
    assert serving.budget.taken == 0
    monkeypatch.setattr(service, "FREE", 60 * PICK_BYTES)
    serving = _service(whole, 500 * PICK_BYTES, wait=0.02)
    many = serving.answer(_sample(whole, -1))
    assert serving.budget.taken == (60 + 2 * 500) * 4  # counts, sources and edges, as they are sent
    assert all(map(torch.equal, free.tensors, many.tensors))  # type: ignore[arg-type]
    with pytest.raises(BusyError, match="do not fit"):
        serving.answer(_sample(whole, -1))
    few = serving.answer(_sample(whole, 1))
    assert "error" not in few.header
    for answer in (many, many, few):
        assert answer.done is not None
        answer.done()  # twice is once
    assert serving.budget.taken == 0
    assert "error" not in serving.answer(_sample(whole, -1)).header


def test_picks_that_never_fit_are_refused(whole: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "FREE", 0)
    serving = _service(whole, 499 * PICK_BYTES)
    with pytest.raises(ConfigError, match=r"for all picks and requests; lower the fanouts .* more --memory"):
        serving.answer(_sample(whole, -1))
    assert serving.budget.taken == 0


GATHER = {"ask": "gather", "part": 0, "wanted": [["node", "x", 0]]}


@pytest.mark.parametrize("kind", ["sample", "gather", "split", "batch", "anything"])
def test_a_request_for_another_store_is_refused_before_anything_else(kind: str, node: GraphServer) -> None:
    with pytest.raises(StoreError, match=f"another store \\({node.store.identity[:12]}\\) than was asked for"):
        node.service.answer(Message({"ask": kind, "identity": "0" * 64}))


def test_info_is_told_to_everybody_and_rows_to_who_names_the_store(node: GraphServer) -> None:
    assert node.service.answer(Message({"ask": "info", "identity": "0" * 64})).header["identity"] == node.store.identity
    asked = {**GATHER, "identity": node.store.identity}
    assert len(node.service.answer(Message(asked, [torch.arange(3)])).tensors) == 1


@pytest.mark.parametrize("ask", [["x"], {"x": 1}, None, 7])
def test_a_kind_that_is_no_name_is_refused(ask: Any, node: GraphServer) -> None:
    with pytest.raises(ConfigError, match=r"ask of a request is .*; it needs a name"):
        node.service.answer(Message({"ask": ask}))


def test_a_store_of_thousands_of_parts_introduces_itself() -> None:
    many = 7000
    one = hoploom.from_pyg(Data(edge_index=torch.arange(many).repeat(2, 1), num_nodes=many))
    store = replace(one, ranges=tuple(PartRange((v,), (1,), (v,), (1,), {"node": {}}) for v in range(many)))
    assert len(manifest_to_json(Manifest(store.schema, store.ranges, {}))) > wire.MAX_HEADER
    told = over_the_wire(
        Service(store, dict.fromkeys(range(many), store.parts[0]), 1 << 20).answer(Message({"ask": "info"}))
    )
    about = read_info(told, "here:1")
    assert (about.manifest.parts, about.manifest.schema) == (store.ranges, store.schema)
    assert about.parts == tuple(range(many))


WRONG: dict[str, dict[str, Any]] = {
    "no parts": {"parts": None},
    "a part too many": {"parts": [2]},
    "parts as a number": {"parts": 3},
    "answers as a number": {"answers": 3},
    "answers of numbers": {"answers": [3]},
    "no identity": {"identity": None},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG.keys())
def test_what_a_server_says_of_itself_is_checked(changes: dict[str, Any], node: GraphServer) -> None:
    told = node.service.answer(Message({"ask": "info"}))
    with pytest.raises(StoreError, match="cannot be read"):
        read_info(Message(told.header | changes, told.tensors), "here:1")


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[]", b"[" * 100_000, json.dumps({"parts": 1}).encode(), None])
def test_a_manifest_that_is_none_is_refused(text: bytes | None, node: GraphServer) -> None:
    told = node.service.answer(Message({"ask": "info"}))
    tensors = [] if text is None else [torch.tensor(list(text), dtype=torch.uint8)]
    with pytest.raises(StoreError, match="cannot be read"):
        read_info(Message(told.header, tensors), "here:1")


NUM_NODES, WIDTH = 3000, 64
ROW = 4 * WIDTH  # bytes
ALL = torch.arange(NUM_NODES)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budget") / "graph.store"
    hoploom.generate(folder, num_nodes=NUM_NODES, avg_degree=4, num_features=WIDTH, num_classes=4)
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    called: list[int] = []
    rows = Reads.rows

    def counted(self: Reads, wanted: Sequence[RowRequest]) -> None:
        called.append(sum(request.places.numel() for request in wanted))
        rows(self, wanted)

    monkeypatch.setattr(Reads, "rows", counted)
    return called


def _ask(large: Path, memory: int, ids: torch.Tensor) -> tuple[GraphServer, Message]:
    """A server, and its answer for x and y of these nodes."""
    node = GraphServer(large, None, BatchOptions(store_memory=memory))
    header = {"ask": "gather", "part": 0, "wanted": [["node", "x", 0], ["node", "y", 0]]}
    return node, node.service.answer(Message(header, [ids]))


def _check(large: Path, answer: Message, ids: torch.Tensor) -> None:
    tables = hoploom.open(large).parts[0].tables
    for name, came in zip(("x", "y"), over_the_wire(answer).tensors, strict=True):
        assert torch.equal(came, tables["node", name].rows[ids])  # type: ignore[arg-type]


def test_the_rows_of_a_request_are_read_together(large: Path, reads: list[int]) -> None:
    ids = torch.randperm(NUM_NODES)
    _, answer = _ask(large, within(large, 0), ids)
    assert reads == [2 * NUM_NODES]  # both fields, in one call, before the answer begins
    _check(large, answer, ids)
    assert len(reads) == 1


def test_rows_take_their_share_of_the_window_until_they_are_sent(
    large: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PIECE", 10 * ROW)
    ids = torch.arange(NUM_NODES - 100, NUM_NODES)
    node, answer = _ask(large, within(large, 0.5), ids)
    window = node.service.rows.size
    assert node.store.budget is not None
    assert node.store.budget.window == window > 4 * 100 * ROW
    assert (reads, node.service.rows.taken) == ([100], 100 * ROW)  # the field y is in memory
    _check(large, answer, ids)
    assert answer.done is not None
    for _ in range(2):
        answer.done()
    assert node.service.rows.taken == 0


def test_more_rows_than_that_come_in_pieces_and_nobody_waits_for_memory(
    large: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PIECE", 10 * ROW)
    ids = torch.arange(NUM_NODES).flip(0)
    node, answer = _ask(large, within(large, 0.5), ids)
    assert reads == []
    window = node.service.rows.size
    assert node.service.rows.taken == window // 4
    _check(large, answer, ids)
    assert max(reads) <= window // 8 // ROW
    reads.clear()
    node.service.rows.take_some(window)  # others have all of it
    answer = node.service.answer(Message({"ask": "gather", "part": 0, "wanted": [["node", "x", 0]]}, [ids]))
    assert node.service.rows.taken == window
    assert torch.equal(over_the_wire(answer).tensors[0], hoploom.open(large).parts[0].tables["node", "x"].rows[ids])  # type: ignore[arg-type]
    assert max(reads) == 10
