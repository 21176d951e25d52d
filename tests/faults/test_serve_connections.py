"""Connections that are half open, many, of another version, or left: what each side does, and that nothing stays.

And requests and answers that cannot be sent: to ask again, or another server, helps nobody.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.batch_servers import listening
from support.fleets import within
from support.until import until
from support.wires import frame, nearby, over_tcp, plain, read_whole, send

import hoploom
from hoploom import BatchError, ConfigError, PeerError
from hoploom.serve import handshake, wire
from hoploom.serve.client import Peer, UnavailableError, read_message
from hoploom.serve.handshake import LostError
from hoploom.serve.memory_budget import BusyError, RequestContext
from hoploom.serve.metrics import Metrics
from hoploom.serve.security import ClientSecurity, Reloading, read_server_security
from hoploom.serve.server import Server, ServerLimits
from hoploom.serve.wire import IncomingMessage, Message, StreamedTensor, TensorSpec

pytestmark = pytest.mark.timeout(180)
INFO = Message({"ask": "info"})
STREAMS, UNDER_WAY = "hoploom_open_streams", "hoploom_requests_under_way"
Answer = Callable[[Message, RequestContext], Message]


def at_once(request: Message, call: RequestContext) -> Message:
    return Message({})


@contextmanager
def answering(
    answer: Answer, limits: ServerLimits | None = None, silence: float = 30.0
) -> Iterator[tuple[Server, Peer]]:
    service: Any = SimpleNamespace(answer=answer)
    with (
        Server(service, "127.0.0.1:0", read_server_security(), Metrics(), limits) as server,
        Peer(server.address, Reloading(ClientSecurity()), silence) as peer,
    ):
        yield server, peer


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def saying(*answers: bytes) -> Iterator[str]:
    """A listener that says one of these to each thing that a client says, and then nothing more."""
    taken = []

    def serve() -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            taken.append(accepted)
            for answer in answers:
                accepted.recv(1 << 16)
                accepted.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for one in taken:
                one.close()
            thread.join()


WELCOME = handshake.encode_greeting({"hoploom": "0"})
ROWS = frame({"tensors": [["int64", [4]]]}, bytes(8))
NEVER_ENDING = {
    "says nothing": [],
    "lets clients in and says nothing": [WELCOME],
    "begins a greeting": [WELCOME[:20]],
    "begins a header": [WELCOME, ROWS[:20]],
    "begins a tensor": [WELCOME, ROWS],
    "begins a piece": [WELCOME, frame({"tensors": [["int64", [4], True]]}, wire.LENGTH.pack(16), bytes(9))],
    "makes an answer, and then nothing": [WELCOME, wire.PREFIX.pack(wire.HEARTBEAT, 0) * 3],
}


@pytest.mark.parametrize("answers", NEVER_ENDING.values(), ids=NEVER_ENDING)
def test_a_server_that_stops_in_the_middle_is_lost_in_time(answers: list[bytes]) -> None:
    before = files()
    with (
        saying(*answers) as address,
        Peer(address, Reloading(ClientSecurity()), 0.3) as peer,
        within(20),
        pytest.raises(LostError, match=f"{address} .*answer"),
    ):
        peer.request(INFO, read_message)
    assert files() <= before


def test_a_client_that_stops_in_the_middle_is_cut_off(ring_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that sends a byte now and then; others are answered meanwhile."""
    monkeypatch.setattr("hoploom.serve.connection.SLOWEST", 1 << 26)
    monkeypatch.setattr("hoploom.serve.handshake.TIMEOUT", 0.5)
    request = frame({"ask": "split", "tensors": [["int64", [1000]]]}, bytes(8000))
    over = threading.Event()
    with listening(ring_path, limits=ServerLimits(stall=0.5)) as server, ExitStack() as stack:
        before = threading.active_count()

        def drip(talking: socket.socket, said: bytes) -> None:
            for place in range(len(said)):
                if over.wait(0.05):
                    return
                try:
                    talking.sendall(said[place : place + 1])
                except OSError:
                    return

        for said in (b"", b"HOP", handshake.encode_greeting({})[:-1]):
            stack.enter_context(plain(server.address)).sendall(said)
        for end in (3, 30, len(request) - 1):
            connection = stack.enter_context(over_tcp(server.address))
            send(connection, request[:end])
        for begun in (b"", handshake.encode_greeting({})):
            talking = stack.enter_context(plain(server.address))
            talking.sendall(begun)
            thread = threading.Thread(target=drip, args=[talking, request if begun else handshake.encode_greeting({})])
            thread.start()
            stack.callback(thread.join)
            stack.callback(over.set)
        with hoploom.connect(server.address, timeout=30) as store:
            assert store.split("train").tolist() == list(range(6))
        until(lambda: server.metrics.value(STREAMS) == 0)
        until(lambda: threading.active_count() <= before)  # the dripping ones have met a closed connection, too


def test_connections_that_are_idle_are_kept(ring_path: Path) -> None:
    with listening(ring_path, limits=ServerLimits(stall=0.1)) as server:
        for connect in (over_tcp, nearby):
            with connect(server.address) as connection:
                for _ in range(2):
                    time.sleep(0.3)  # what is idle is what is tested
                    wire.write_message(connection, INFO)
                    connection.begin(0)
                    assert "identity" in IncomingMessage(connection, wire.MAX_RESPONSE).into().header


def test_a_host_that_is_gone_is_noticed(ring_path: Path) -> None:
    """Nothing tells of it, so the kernel asks."""
    with listening(ring_path) as server, over_tcp(server.address) as connection:
        assert connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        option = connection._socket.getsockopt
        idle, between, count = (
            option(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}")) for name in ("IDLE", "INTVL", "CNT")
        )
        assert idle + between * count <= 60


def refuse(request: Message, call: RequestContext) -> Message:
    raise BusyError("no thread is free")


@pytest.mark.usefixtures("tcp_alone")
def test_a_request_that_is_too_large_is_refused_as_such() -> None:
    """The client is still sending it when it is refused."""
    with answering(refuse, ServerLimits(request=1 << 20)) as (_, peer):
        request = Message({"ask": "x"}, [torch.zeros(10_000_000, dtype=torch.int64)])
        with pytest.raises(ConfigError, match="1 tensors of 80000000 bytes; at most 4096 of 1048576"):
            peer.request(request, read_message)


def test_a_refused_client_keeps_its_connection() -> None:
    with answering(refuse) as (server, peer):
        opened = set()
        for _ in range(5):
            with pytest.raises(UnavailableError, match="no thread is free; ask again"):
                peer.request(INFO, read_message)
            opened |= {id(one) for one in peer._open}
        assert len(opened) == 1
        until(lambda: server._metrics.value(STREAMS) == 1)  # the connection of the handshake may close later


def test_a_connection_that_the_server_has_closed_meanwhile_is_not_used_again() -> None:
    with answering(at_once) as (server, peer):
        for _ in range(3):
            peer.request(INFO, read_message)
            for caller in server._present():
                caller.connection.cut()


def test_a_unix_socket_is_left_with_its_server() -> None:
    """Whoever takes its name then is asked nothing."""
    with answering(at_once, silence=1.0) as (server, peer), socket.socket(socket.AF_UNIX) as other:
        peer.request(INFO, read_message)
        ours = server._acceptor._listeners[1].getsockname()
        server.close()
        other.bind(ours)
        other.listen()
        other.setblocking(False)
        for _ in range(2):
            with pytest.raises(LostError):
                peer.request(INFO, read_message)
        with pytest.raises(BlockingIOError):
            other.accept()


@pytest.mark.parametrize("version", [1, wire.PROTOCOL - 1, wire.PROTOCOL + 1, 255])
def test_a_client_of_another_version_is_told_both(ring_path: Path, version: int) -> None:
    with listening(ring_path) as server, plain(server.address) as talking:
        talking.sendall(handshake.NAME + bytes([version]) + b"whatever this version says")
        answer = b"".join(iter(lambda: talking.recv(1 << 12), b""))
    assert answer.startswith(handshake.OPENING)
    assert f"this server speaks protocol {wire.PROTOCOL}, the client {version}".encode() in answer


@pytest.mark.parametrize("version", [1, wire.PROTOCOL - 1, wire.PROTOCOL + 1, 255])
def test_a_server_of_another_version_is_named_at_once(version: int) -> None:
    other = handshake.encode_greeting({"error": handshake.VERSION, "message": "?", "hoploom": "9.9"})
    opening = handshake.NAME + bytes([version])
    with saying(opening + other[len(opening) :]) as address, within(20), pytest.raises(PeerError) as raised:
        hoploom.connect(address, timeout=60)
    assert not isinstance(raised.value, LostError)
    said = (
        f"peer {address} speaks another version of the protocol, {version} (Hoploom 9.9), this process {wire.PROTOCOL}"
    )
    assert f"{said}; install the same Hoploom on both" in str(raised.value)


def test_a_thousand_connections_at_once_are_answered(ring_path: Path) -> None:
    with listening(ring_path) as server:
        before, threads = files(), threading.active_count()
        with ExitStack() as stack:
            with ThreadPoolExecutor(8) as pool:
                opened = list(pool.map(lambda _: over_tcp(server.address), range(1000)))
            for connection in opened:
                stack.enter_context(connection)
                wire.write_message(connection, INFO)
            for connection in opened:
                connection.begin(0)
                assert "identity" in read_whole(connection).header
            until(lambda: server.metrics.value(STREAMS) == 1000)
        until(lambda: server.metrics.value(STREAMS) == 0)
        until(lambda: files() <= before and threading.active_count() <= threads)


@pytest.mark.parametrize("connect", [over_tcp, nearby])
def test_an_answer_that_nobody_waits_for_is_made_no_further(connect: Callable[[str], Any]) -> None:
    begun, ended = threading.Event(), threading.Event()

    def answer(request: Message, call: RequestContext) -> Message:
        begun.set()
        try:
            while True:  # for as long as somebody waits for it
                call.check()
                time.sleep(0.01)
        finally:
            ended.set()

    with answering(answer, ServerLimits(beat=0.05)) as (server, _):
        with connect(server.address) as connection:
            wire.write_message(connection, Message({"ask": "batch"}))
            assert begun.wait(10)
            connection.wait()  # it hears that its answer is made
            assert not ended.is_set()
        assert ended.wait(5)
        until(lambda: server._metrics.value(UNDER_WAY) == server._metrics.value(STREAMS) == 0)


def test_a_client_that_reads_nothing_keeps_no_other_from_hearing_that_its_answer_is_made() -> None:
    over = threading.Event()

    def slowly(request: Message, call: RequestContext) -> Message:
        over.wait(request.header["seconds"])
        return Message({})

    with answering(slowly, ServerLimits(beat=0.01), silence=0.5) as (server, peer), nearby(server.address) as deaf:
        until(lambda: [one.connection.is_local for one in server._present()] == [True])
        server._present()[0].connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        wire.write_message(deaf, Message({"ask": "batch", "seconds": 30}))
        assert peer.request(Message({"ask": "batch", "seconds": 2}), read_message).header == {}
        over.set()


def test_a_request_that_no_server_takes_is_refused_before_it_is_sent() -> None:
    with answering(at_once) as (_, peer):
        with pytest.raises(ConfigError, match="a header of 2000023 bytes; at most 1048576; ask for less at once"):
            peer.send(Message({"ask": "x" * 2_000_000}))
        with pytest.raises(ConfigError, match="a request has tensors of 268435464 bytes; at most 268435456; ask for"):
            peer.send(Message({"ask": "x"}, [torch.empty(wire.MAX_REQUEST // 8 + 1, dtype=torch.int64)]))
        with pytest.raises(ConfigError, match="a request has 4097 tensors; at most 4096"):
            peer.send(Message({"ask": "x"}, [torch.empty(0)] * 4097))
        assert peer.request(INFO, read_message).header == {}


def fail(request: Message, call: RequestContext) -> Message:
    """Answer with a header that is too long, or break off with an error that nobody foresaw."""
    if request.header["ask"] == "long":
        return Message({"told": "x" * 2_000_000})
    if request.header["ask"] == "told":
        return Message({"told": {1, 2}})

    def fill(row: int, out: torch.Tensor) -> None:
        if row:
            raise ZeroDivisionError("row by row")

    return Message({}, [StreamedTensor(TensorSpec(torch.int64, (10,)), fill, 8)])


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        ("long", "an answer would have a header of 2000024 bytes"),
        ("rows", "ZeroDivisionError: row by row"),
        ("told", "TypeError: Object of type set is not JSON"),
    ],
)
def test_an_answer_that_cannot_be_sent_says_why(ask: str, told: str) -> None:
    """It is an error of this request: to ask again, or another, helps nobody."""
    with answering(fail) as (server, peer):
        for _ in range(2):
            with pytest.raises(BatchError, match=told):
                peer.request(Message({"ask": ask}), read_message)
    assert server._metrics.value("hoploom_requests_total", kind="other", outcome="failed") == 2
