"""Tensors that are large enough for whoever reads them over TCP to be woken up less often."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.wires import read_whole

from hoploom.serve import wire
from hoploom.serve.connection import LARGE, TOGETHER, Connection
from hoploom.serve.wire import Message

SILENCE = 1.5  # seconds


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Connection]]:
    """Who sends, and who reads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far, near = socket.create_connection(listener.getsockname()), listener.accept()[0]
    with far, Connection(near, SILENCE) as reading:
        yield far, reading


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    """Does what the other side does meanwhile; that has ended when the test has."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.mark.parametrize("size", [LARGE - 1, LARGE, TOGETHER - 1, TOGETHER, TOGETHER + 1, 5 * TOGETHER + 7])
def test_a_small_message_behind_a_large_one_is_not_waited_for_in_vain(
    size: int, ends: tuple[socket.socket, Connection], beside: ThreadPoolExecutor
) -> None:
    far, reading = ends
    sent = torch.arange(size, dtype=torch.int64).to(torch.uint8)

    def send() -> None:
        writing = Connection(far, SILENCE)
        wire.write_message(writing, Message({"n": 1}, [sent]))
        wire.write_message(writing, Message({"n": 2}))  # and then nothing more

    beside.submit(send)
    reading.begin(0)
    header, (large,), _ = read_whole(reading)
    assert (header, torch.equal(large, sent)) == ({"n": 1}, True)  # type: ignore[arg-type]
    reading.begin(0)
    assert read_whole(reading).header == {"n": 2}


def test_a_large_tensor_may_come_slowly(ends: tuple[socket.socket, Connection], beside: ThreadPoolExecutor) -> None:
    """What is waited for at once takes longer than the other side may be silent."""
    far, reading = ends
    sent = torch.ones(TOGETHER, dtype=torch.uint8)

    def send() -> None:
        for piece in sent.numpy().reshape(8, -1):
            time.sleep(SILENCE / 4)
            far.sendall(piece)

    beside.submit(send)
    found = torch.zeros_like(sent)
    reading.begin(found.nbytes)
    reading.receive(memoryview(found.numpy()))
    assert torch.equal(found, sent)


def test_a_large_tensor_that_stops_coming_is_a_lost_peer(ends: tuple[socket.socket, Connection]) -> None:
    far, reading = ends
    far.sendall(bytes(TOGETHER // 2))
    reading.begin(TOGETHER)
    with pytest.raises(TimeoutError):
        reading.receive(memoryview(bytearray(TOGETHER)))


def test_a_large_tensor_whose_sender_has_gone_is_told_at_once(ends: tuple[socket.socket, Connection]) -> None:
    far, reading = ends
    far.sendall(bytes(TOGETHER // 2))
    far.close()
    reading.begin(TOGETHER, idle_timeout=60)
    with pytest.raises(EOFError):
        reading.receive(memoryview(bytearray(TOGETHER)))
