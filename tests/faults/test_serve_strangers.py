"""Clients that misbehave: slow, killed, or no clients at all. The server goes on, in bounded memory, until told."""

import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TESTS
from support.batch_servers import request_of
from support.batches import assert_same, assert_same_batches
from support.fleets import gauge, loader, save_wide, warm_up, within
from support.servers import Server, addresses_of, serving
from support.until import until
from support.wires import frame, over_tcp, plain, said_by, send

import hoploom
from hoploom.serve import handshake, wire
from hoploom.serve.batch_messages import decode_batch
from hoploom.serve.wire import IncomingMessage, Message

pytestmark = pytest.mark.timeout(240)

NODES, WIDTH = 20_000, 1024  # of a batch of all rows, 80 MB, the buffers on the way hold but a part
ROWS = NODES * WIDTH * 4  # bytes of all features
MEMORY = 256_000_000
STREAMS, UNDER_WAY, HELD = "hoploom_open_streams", "hoploom_requests_under_way", "hoploom_held_bytes"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wide(tmp_path_factory.mktemp("strangers"), NODES, 60_000, WIDTH)


@pytest.fixture(scope="module")
def pair(path: Path) -> Iterator[list[Server]]:
    """Two servers of everything. The last tests stop them."""
    with serving(path, [[], []], "--metrics", "127.0.0.1:0", "--memory", str(MEMORY), "--grace", "120") as servers:
        warm_up(servers)
        yield servers


@pytest.fixture(scope="module")
def server(pair: list[Server]) -> Server:
    return pair[0]


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Any]:
    return list(loader(hoploom.open(path)))


GATHER = Message({"ask": "gather", "part": 0, "wanted": [["node", "x", 0]]}, [torch.arange(10 * NODES) % NODES])


def _whole_batch(server: Server, size: int) -> Message:
    with hoploom.connect([server.address]) as store:
        return request_of(store, NODES, size)


def _is_served(server: Server, expected: list[Any]) -> None:
    with hoploom.connect([server.address], timeout=60) as store:
        assert_same_batches(expected, loader(store))


def _is_free(server: Server) -> bool:
    return all(gauge(server, name) == 0 for name in (STREAMS, UNDER_WAY, HELD))


def test_clients_that_stop_reading_cost_little_memory(server: Server, expected: list[Any]) -> None:
    until(lambda: _is_free(server))
    before = server.status("RssAnon")
    batch = _whole_batch(server, 18_000)  # with their neighbors nearly all rows
    with ExitStack() as stack:
        for request in (GATHER, GATHER, GATHER, batch, batch):  # ten times all rows each, or once
            slow = stack.enter_context(over_tcp(server.address))
            wire.write_message(slow, request)
            assert said_by(slow) == "no refusal"
        until(lambda: gauge(server, UNDER_WAY) == 5)
        until(lambda: gauge(server, HELD) > ROWS)  # on a busy machine the batches are still made
        assert gauge(server, HELD) <= MEMORY
        _is_served(server, expected)
        assert server.status("RssAnon") - before < MEMORY + 80_000_000
    until(lambda: _is_free(server))


HOLD = "from faults.test_serve_strangers import hold_streams; hold_streams(sys.argv[1])"


def hold_streams(servers: str) -> None:
    """A loop that has begun, and a stream whose answer is not read to its end; then nothing, until killed."""
    with over_tcp(servers) as connection, hoploom.connect(servers) as store:
        wire.write_message(connection, GATHER)
        connection.wait()
        for batch in loader(store):
            print(batch.batch_size, flush=True)
            threading.Event().wait(120)


def test_a_killed_client_leaves_nothing_on_the_server(server: Server) -> None:
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TESTS)!r}); {HOLD}", server.address]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "4\n"
            assert gauge(server, STREAMS) >= 2
            assert gauge(server, UNDER_WAY) >= 1
        finally:
            client.kill()
    until(lambda: _is_free(server))


def test_a_client_that_leaves_without_a_word_ends_in_silence(server: Server) -> None:
    script = "from support.fleets import *; b = iter(loader(hoploom.connect(sys.argv[1]))); next(b); hoploom.kept = b"
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TESTS)!r}); {script}", server.address]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    until(lambda: _is_free(server))


NOISE = random.Random(7).randbytes(100_000)
HELLO = handshake.encode_greeting({})


def test_bytes_that_are_no_conversation_do_no_harm(server: Server, expected: list[Any]) -> None:
    said = [b"", NOISE, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
    said.append(b"\x16\x03\x01" + NOISE)
    said += [HELLO[:9], HELLO, HELLO + NOISE, HELLO + wire.PREFIX.pack(wire.MESSAGE, 1 << 31), HELLO + frame(b"{")]
    with ExitStack() as stack:
        for one in said * 5:
            half_open = stack.enter_context(plain(server.address, 10))
            with suppress(OSError):  # it may hang up in the middle
                half_open.sendall(one)
        _is_served(server, expected)  # while they are open
    _is_served(server, expected)
    until(lambda: _is_free(server))


def _header(**more: Any) -> bytes:
    return json.dumps({"ask": "gather", "tensors": [["int64", [3]]], **more}).encode()


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b'{"ask": "\xff"}', "a header that cannot be read: UnicodeDecodeError"),
        (b"{", "a header that cannot be read: JSONDecodeError"),
        (b"[" * 100_000, "a header that cannot be read: RecursionError"),
        (b"[]", "a header that cannot be read"),
        (b"{}", "a header that cannot be read: KeyError: 'tensors'"),
        (_header(tensors=[["object", [3]]]), "a header that cannot be read: KeyError: 'object'"),
        (_header(tensors=[["int64", [-1]]]), "a header that cannot be read: ValueError: shape [-1]"),
        (_header(tensors=[["int64", [1] * 9]]), "a header that cannot be read: ValueError: shape"),
        (_header(tensors=[["int64", [1 << 47]]]), "1 tensors of 1"),
        (_header(tensors=[["int64", [0]]] * 5000), "5000 tensors of 0 bytes; at most 4096"),
        (_header(tensors=[["int64", [], True]]), "a header that cannot be read: ValueError: pieces True"),
        (_header(tensors=[["int64", [3], False, 1]]), "tensors in shared memory, which this connection has not"),
        (_header(tensors=[["int64", [3], False, "x"]]), "a header that cannot be read: ValueError: segment 'x'"),
        (
            _header(segments=[[1, 4096]]),
            "a header that cannot be read: ValueError: shared memory 1 of 4096 bytes, or its de",
        ),
        (b" " * (1 << 20) + b"{}", "a header of 1048578 bytes; at most 1048576"),
        (_header(tensors=[["int64", [0, 1 << 40, 1 << 40]]]), "a header that cannot be read: ValueError: shape"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_headers_that_cannot_be_read_are_refused(header: bytes, said: str, server: Server) -> None:
    with over_tcp(server.address) as connection:
        send(connection, frame(header))
        assert f"a request is malformed: {said}" in said_by(connection)
        assert said_by(connection) == "EOFError: the connection was closed"


PIECES = {"tensors": [["int64", [3], True]]}


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"WHAT\x00\x00\x00\x00", "a frame of kind b'WHAT'"),
        (wire.PREFIX.pack(wire.HEARTBEAT, 1), "a frame of kind b'MADE'"),
        (frame(PIECES, wire.LENGTH.pack(7)), "a piece of 7 bytes; at most 3 rows of 8 are missing"),
        (frame(PIECES, wire.LENGTH.pack(32)), "a piece of 32 bytes; at most 3 rows of 8 are missing"),
        (frame(PIECES, wire.LENGTH.pack(0)), "a piece of 0 bytes"),
        (frame(PIECES, wire.LENGTH.pack(8), bytes(8), wire.LENGTH.pack(24)), "a piece of 24 bytes; at most 2 rows"),
    ],
)
def test_frames_and_pieces_that_are_none_are_refused(sent: bytes, said: str, server: Server) -> None:
    with over_tcp(server.address) as connection:
        send(connection, sent)
        assert f"a request is malformed: {said}" in said_by(connection)
    until(lambda: _is_free(server))


def test_a_server_asked_to_stop_delivers_what_it_has_begun(pair: list[Server], path: Path, expected: list[Any]) -> None:
    stopped = pair[1]
    with hoploom.connect(addresses_of(pair), timeout=60) as store, over_tcp(stopped.address) as slow:
        assert_same_batches(expected, loader(store))
        wire.write_message(slow, _whole_batch(stopped, 18_000))
        incoming = IncomingMessage(slow, wire.MAX_RESPONSE)
        stopped.process.send_signal(signal.SIGTERM)
        assert "stopping: 1 requests under way, new ones are refused" in _next_line(stopped)
        assert_same_batches(expected, loader(store))  # by the other one
        local = next(iter(hoploom.NeighborLoader(path, [1], torch.arange(NODES), batch_size=18_000)))
        assert_same(local, decode_batch(incoming.into(lambda shape, dtype: torch.empty(shape, dtype=dtype))))
        assert _next_line(stopped) == "stopped\n"
    assert stopped.process.wait(60) == 0
    _said_no_more(stopped)


def test_a_second_request_to_stop_is_obeyed_at_once(server: Server) -> None:
    with over_tcp(server.address) as slow:
        wire.write_message(slow, GATHER)
        said_by(slow)
        server.process.send_signal(signal.SIGTERM)
        assert "stopping: 1 requests" in _next_line(server)
        _kill_by_another_thread(server.process.pid, signal.SIGTERM)
        with within(60):  # not the 120 seconds of grace
            assert server.process.wait(60) == 128 + signal.SIGTERM
    _said_no_more(server)


def _kill_by_another_thread(pid: int, number: int) -> None:
    """The kernel gives a signal to any thread of a process; where not to the main one, nothing wakes that."""
    others = [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid]
    assert ctypes.CDLL(None, use_errno=True).tgkill(pid, others[-1], number) == 0, os.strerror(ctypes.get_errno())


def _said_no_more(server: Server) -> None:
    """On stderr there is what a server says when it begins, and nothing else."""
    assert server.process.stderr is not None
    assert re.fullmatch(r"serving parts 0 of \S+ on \S+, metrics on \S+\n", server.process.stderr.read())


def _next_line(server: Server) -> str:
    assert server.process.stdout is not None
    return server.process.stdout.readline()
