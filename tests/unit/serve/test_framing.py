"""Messages as bytes: whole ones arrive, and cut, damaged and random ones end in an error that is known."""

import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.batch_servers import listening
from support.graphs import cut, ring, save_in_parts
from support.wires import frame, line, over_the_wire, read_whole
from torch import Tensor

import hoploom
from hoploom import ConfigError, StoreError, ops
from hoploom.ops import Frontier, Picks
from hoploom.schema import DTYPES
from hoploom.serve import wire
from hoploom.serve.connect import RemotePart
from hoploom.serve.connection import Connection
from hoploom.serve.memory_budget import MemoryBudget
from hoploom.serve.requests import read_owned
from hoploom.serve.service import Service
from hoploom.serve.shared_memory import ClientSegments, ServerSegments
from hoploom.serve.wire import BrokenError, IncomingMessage, MalformedError, Message, StreamedTensor, TensorSpec
from hoploom.store import Store, Wanted
from hoploom.store.base import Draw, range_of
from hoploom.store.sharded import IdEncoding, IdRange, Sharded

KNOWN = (MalformedError, EOFError, BrokenError, TimeoutError)
LIMIT = 1 << 16  # bytes of tensors that the fuzzed side takes


def rows_of(row: int, out: Tensor) -> None:
    """Row v of a streamed tensor is full of v."""
    out.copy_(torch.arange(row, row + out.shape[0]).view(-1, *[1] * (out.dim() - 1)).expand(out.shape))


def streamed(rows: int, width: int, piece: int) -> StreamedTensor:
    return StreamedTensor(TensorSpec(torch.float32, (rows, width)), rows_of, piece)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4), (300, 100)], ids=str)
def test_tensors_arrive_as_they_were_sent(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = (torch.arange(max(1, torch.Size(shape).numel())) % 2)[: torch.Size(shape).numel()].view(shape).to(dtype)
    arrived = over_the_wire(Message({"ask": "x"}, [sent, sent.T if sent.dim() == 2 else sent]))
    assert arrived.header == {"ask": "x"}
    for ours, theirs in zip((sent, sent.T if sent.dim() == 2 else sent), arrived.tensors, strict=True):
        assert isinstance(theirs, Tensor)
        assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("piece", [1, 100, 401, 1 << 20])
def test_what_is_made_while_it_is_sent_arrives_whole(piece: int) -> None:
    one, other, empty = over_the_wire(
        Message({}, [streamed(50, 25, piece), torch.arange(9), streamed(0, 25, piece)])
    ).tensors
    assert isinstance(one, Tensor)
    assert torch.equal(one, torch.arange(50.0).view(-1, 1).expand(50, 25))
    assert torch.equal(other, torch.arange(9))  # type: ignore[arg-type]
    assert empty.shape == (0, 25)  # type: ignore[union-attr]


def test_more_tensors_than_one_call_of_the_system_takes_arrive_with_their_shared_memory() -> None:
    near, far = line()
    shared = ServerSegments(MemoryBudget(1 << 24, 0))
    sent = [torch.arange(20_000), *(torch.tensor([number]) for number in range(1, 1500))]
    with near, far, shared, ClientSegments() as seen, ThreadPoolExecutor(1) as threads:
        writing = threads.submit(wire.write_message, near, Message({}, sent), shared)
        far.begin(1 << 20)
        arrived = IncomingMessage(far, wire.MAX_RESPONSE, seen).into()
        assert writing.result() == sum(one.nbytes for one in sent)
        assert all(torch.equal(one, other) for one, other in zip(sent, arrived.tensors, strict=True))  # type: ignore[arg-type]
        assert far.files == []


def bytes_of(message: Message) -> bytes:
    near, far = line()
    with near, far:
        wire.write_message(near, message)
        near.cut()
        return b"".join(iter(lambda: far._socket.recv(1 << 16), b""))


WHOLE = Message({"ask": "x"}, [torch.arange(3), streamed(4, 2, 16), torch.tensor(2.5)])


@pytest.mark.parametrize("read", ["into", "pieces"])
def test_a_message_cut_at_any_byte_is_told_from_a_whole_one(read: str) -> None:
    whole = bytes_of(WHOLE)
    made = wire.PREFIX.pack(wire.HEARTBEAT, 0) + whole
    for said in (whole, made):
        for end in range(len(said)):
            with pytest.raises(EOFError):
                taken_in(said[:end], read=read)
        taken_in(said, read=read)


def taken_in(said: bytes, limit: int = LIMIT, *, read: str = "into", shared: ClientSegments | None = None) -> Any:
    """What a reader makes of these bytes, after which the other side hangs up. At most `limit` bytes are allocated."""
    given, took = socket.socketpair()
    allocated: list[int] = []

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = ops.empty(shape, dtype)
        allocated.append(tensor.nbytes)
        assert sum(allocated) <= limit
        return tensor

    with given, Connection(took, 10.0, takes_files=True) as connection:
        given.sendall(said)
        given.shutdown(socket.SHUT_WR)
        connection.begin(0)
        incoming = IncomingMessage(connection, limit, shared)
        assert sum(one.num_bytes for one in incoming.specs) <= limit
        return list(incoming.pieces()) if read == "pieces" else incoming.into(allocate)


def test_an_answer_that_breaks_off_says_why() -> None:
    def fail(row: int, out: Tensor) -> None:
        if row:
            raise StoreError("gone")

    near, far = line()
    with near, far:
        with pytest.raises(StoreError):
            wire.write_message(near, Message({}, [StreamedTensor(TensorSpec(torch.int64, (4,)), fail, 16)]))
        wire.send_broken(near, {"error": "StoreError", "message": "gone"})
        far.begin(0)
        with pytest.raises(BrokenError) as broken:
            read_whole(far)
    assert broken.value.header == {"error": "StoreError", "message": "gone"}


HEADERS: list[Any] = [0, -1, 1, 7, 1 << 40, 1 << 70, 1.5, None, True, "", "int64", "float32", "x", [], {}, [1], [[3]]]


def _json(chance: random.Random) -> Any:
    """A header that is nearly right."""

    def value(near: Any) -> Any:
        return chance.choice(HEADERS) if chance.random() < 0.1 else near

    def tensor() -> Any:
        shape = [value(chance.randrange(5)) for _ in range(chance.randrange(4))]
        listed = [value(chance.choice(list(DTYPES))), value(shape)]
        listed += [value(chance.random() < 0.5), value(chance.choice([None, 1, 2]))][: chance.randrange(3)]
        return value(listed)

    header: dict[str, Any] = {"tensors": value([tensor() for _ in range(chance.randrange(4))])}
    for name, near in (("segments", [[1, 4096]]), ("dropped", [1]), ("ask", "info")):
        if chance.random() < 0.1:
            header[name] = value(near)
    return value(header)


def fuzzed(chance: random.Random, whole: list[bytes]) -> bytes:
    """Random bytes, frames with random headers, or real ones with some bytes changed, cut out or put in."""
    kind = chance.random()
    if kind < 0.1:
        return chance.randbytes(chance.randrange(64))
    if kind < 0.6:
        lengths = [wire.LENGTH.pack(chance.choice([0, 4, 8, 16, 24, wire.BROKEN, 1 << 31])) for _ in range(3)]
        tail = [chance.choice([piece, chance.randbytes(chance.randrange(40))]) for piece in lengths * 3]
        if chance.random() < 0.2:
            tail.insert(chance.randrange(4), frame(_json(chance)))
        return frame(_json(chance), *tail)
    said = bytearray(chance.choice(whole))
    for _ in range(chance.randrange(1, 4)):
        place = chance.randrange(len(said)) if said else 0
        change = chance.random()
        if change < 0.5 and said:
            said[place] = chance.randrange(256)
        elif change < 0.75:
            del said[place : place + chance.randrange(9)]
        else:
            said[place:place] = chance.randbytes(chance.randrange(9))
    return bytes(said)


@pytest.fixture
def seen() -> Iterator[ClientSegments]:
    """Of a client that knows segment 1, where nothing lies any more."""
    near, far = line()
    with near, far, ServerSegments(MemoryBudget(1 << 20, 0)) as shared, ClientSegments() as seen:
        wire.write_message(near, Message({}, [torch.zeros(1 << 14)]), shared)
        far.begin(0)
        IncomingMessage(far, 1 << 20, seen).into()
        yield seen


@pytest.mark.parametrize("count", [1500, pytest.param(10**6, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_any_bytes_end_in_a_message_or_in_an_error_that_is_known(count: int, seen: ClientSegments) -> None:
    chance = random.Random(17)
    broken = wire.LENGTH.pack(wire.BROKEN) + frame({"error": "x", "tensors": []})
    whole = [bytes_of(WHOLE), bytes_of(Message({"a": [1, {"b": None}]}, [torch.zeros(7, dtype=torch.bfloat16)]))]
    whole += [frame({"tensors": [["int8", [9], True]]}, wire.LENGTH.pack(3), b"abc", broken)]
    outcomes: dict[str, int] = {}
    for _ in range(count):
        said, read = fuzzed(chance, whole), chance.choice(["into", "pieces"])
        try:
            taken_in(said, read=read, shared=chance.choice([None, seen]))
            outcome = "whole"
        except KNOWN as error:
            outcome = type(error).__name__
        except BaseException as error:
            error.add_note(f"{read}: {said!r}")
            raise
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert min(outcomes[name] for name in ("whole", "MalformedError", "EOFError", "BrokenError")) > count / 1000


SPAN = 1 << 31


@pytest.mark.parametrize("first", [0, 1, SPAN - 1, SPAN, 1 << 47])
@pytest.mark.parametrize(("size", "dtype"), [(1, torch.int32), (SPAN, torch.int32), (SPAN + 1, torch.int64)])
def test_the_first_and_the_last_id_of_a_part_arrive_as_they_were(first: int, size: int, dtype: torch.dtype) -> None:
    own, ids = IdRange(first, size), torch.tensor([first, first + size - 1, 0])
    for places in (torch.tensor([1, 0]), torch.tensor([0, 0, 1])):
        sent = own.encode(ids, places)
        assert sent.dtype is dtype
        assert torch.equal(read_owned("node", sent, first, size), ids[places])
    assert torch.equal(own.decode(own.encode(ids[:2])), ids[:2])


def test_a_server_takes_ids_of_either_width_and_names_one_that_is_not_its_own() -> None:
    assert read_owned("node", torch.tensor([30, 39]), 30, 10).tolist() == [30, 39]
    assert read_owned("node", torch.tensor([0, 9], dtype=torch.int32), 30, 10).tolist() == [30, 39]
    for wrong in (torch.tensor([29]), torch.tensor([-1], dtype=torch.int32)):
        with pytest.raises(ConfigError, match=r"ids of node: id 29 is out of range \[30, 40\)"):
            read_owned("node", wrong, 30, 10)
    with pytest.raises(ConfigError, match="needs int32 or int64"):
        read_owned("node", torch.tensor([30.0]), 30, 10)


class _Served:
    """Peers that answer at once, in this process; what was sent either way is kept."""

    def __init__(self, store: Store) -> None:
        parts = cut(store, 3)
        self.identity, self.manifest = store.identity, SimpleNamespace(parts=tuple(map(range_of, parts)))
        whole = Store(store.schema, store.graph, store.features, tuple(parts), ranges=self.manifest.parts, shards=parts)  # type: ignore[arg-type]
        self._service = Service(whole, dict(enumerate(parts)), 1 << 20)
        self.sent: list[Tensor] = []
        self.answered: list[Tensor] = []

    def begin(self, request: Message, part: int, reading: Any) -> Any:
        self.sent += request.tensors  # type: ignore[arg-type]
        answer = self._service.answer(request)
        tensors: list[Any] = list(answer.tensors)
        self.answered += tensors
        come = SimpleNamespace(
            header=answer.header,
            described=[TensorSpec(one.dtype, tuple(one.shape)) for one in tensors if isinstance(one, Tensor)],
            into=lambda *given: answer,
        )
        return lambda: reading(come)


def test_frontiers_and_picks_of_remote_parts_travel_as_int32() -> None:
    store = hoploom.from_pyg(ring(40))
    served = _Served(store)
    parts = [RemotePart(store.schema, number, served) for number in range(3)]  # type: ignore[arg-type]
    there = Sharded(store.schema, parts, served.manifest.parts)
    for nodes in (torch.tensor([39, 0, 14, 13, 26]), torch.tensor([30, 31]), torch.arange(13)):
        for draw in (Draw(3, 0, [-1]), Draw(3, 1, [1]), Draw(3, 0, [-1], counts_only=True)):
            (ours,), (theirs,) = (graph.sample([Frontier(nodes)], draw) for graph in (there, store.graph))
            assert isinstance(ours, Picks)
            assert isinstance(theirs, Picks)
            assert all(map(torch.equal, ours, theirs))
    assert {one.dtype for one in [*served.sent, *served.answered]} == {torch.int32}


def test_answers_with_no_picks_are_told_apart() -> None:
    store = hoploom.from_pyg(ring(40))
    encoding = IdEncoding(store.schema, range_of(cut(store, 3)[1]))
    column = torch.zeros(2, dtype=torch.int32)
    assert encoding.decode_picks(0, [column, column, column]) is not None
    for wrong in (column.float(), column.view(1, 2), column.short()):
        assert encoding.decode_picks(0, [column, wrong, column]) is None


def test_rows_arrive_as_the_store_holds_them(tmp_path: Path) -> None:
    """Whatever type a field has, its bytes are what travels."""
    data, dtypes = ring(40), {"half": torch.float16, "brain": torch.bfloat16, "byte": torch.int8, "word": torch.int64}
    for name, dtype in dtypes.items():
        data[name] = (data.x * 3).to(dtype)
    local = save_in_parts(hoploom.from_pyg(data), tmp_path / "store", 3)
    ids = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    with listening(tmp_path / "store") as served, hoploom.connect(served.address, made="here") as there:
        for name, dtype in dtypes.items():
            before = there.traffic()["bytes_received"]
            (rows,) = there.features.gather([Wanted("node", name, ids)])
            assert rows.dtype is dtype
            assert torch.equal(rows, local.features.gather([Wanted("node", name, ids)])[0])
            assert there.traffic()["bytes_received"] - before == rows.nbytes
