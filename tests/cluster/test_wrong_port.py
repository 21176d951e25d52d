"""A port where no graph server is: the error says so first, in time, whatever else listens there."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.certificates import certificates, token_file, write
from support.ports import free_ports

import hoploom
from hoploom import PeerError

MORE = 20.0  # seconds that a busy machine may add


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def nothing(closing: ExitStack) -> int:
    return free_ports(1)[0]


def silence(closing: ExitStack) -> int:
    listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    return int(listener.getsockname()[1])


def hanging_up(closing: ExitStack) -> int:
    listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    closing.callback(listener.shutdown, socket.SHUT_RDWR)  # or accept never ends

    def hang_up() -> None:
        with suppress(OSError):
            while True:
                listener.accept()[0].close()

    threading.Thread(target=hang_up, daemon=True).start()
    return int(listener.getsockname()[1])


def http(closing: ExitStack) -> int:
    server = closing.enter_context(HTTPServer(("127.0.0.1", 0), Quiet))
    closing.callback(server.shutdown)
    threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
    return server.server_port


ABSENT = "does not listen; see whether `hoploom serve` runs there, and the port is right"
SILENT = (
    "takes connections and does not answer: the server is busy or stopped, or another program has this port; see its "
    "own output, or give the port of `hoploom serve`"
)
CLOSES = "is no graph server: it takes connections and closes them without an answer; give the port of `hoploom serve`"
HTTP = "is no graph server: it answers with '<!DOCTYPE HTML>'; give the port of `hoploom serve`"


@pytest.mark.parametrize("secured", [False, True], ids=["plainly", "token and certificate"])
@pytest.mark.parametrize(
    ("listener", "said"),
    [(nothing, ABSENT), (silence, SILENT), (hanging_up, CLOSES), (http, HTTP)],
    ids=["nothing", "silence", "hanging up", "http"],
)
def test_a_port_without_a_graph_server_is_told_first(
    listener: Callable[[ExitStack], int], said: str, secured: bool, closing: ExitStack, tmp_path: Path
) -> None:
    address, timeout = f"127.0.0.1:{listener(closing)}", 2.0 if listener is silence else 1.0
    begin = time.monotonic()
    with pytest.raises(PeerError) as raised:
        hoploom.connect(address, timeout=timeout, **_secured(secured, tmp_path))
    assert time.monotonic() - begin < timeout + MORE
    message = str(raised.value)
    start = re.compile(rf"(no graph server answers within {timeout:g} seconds: )?(peer )?{address} {re.escape(said)}")
    assert start.match(message), message
    assert not any(word in message for word in ("token", "certificate", "CA here", "--peers"))


def _secured(secured: bool, folder: Path) -> dict[str, Any]:
    if not secured:
        return {}
    return {"token_file": token_file(folder / "token"), "ca": write(folder / "certs", certificates()) / "ca.pem"}


def test_who_waits_is_told_for_what_before_time_is_over(closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoploom.serve.peers.WARN_AFTER", 0.5)
    address = f"127.0.0.1:{nothing(closing)}"
    said = f"still waiting for graph servers, 1 seconds at most: peer {address} does not listen"
    with pytest.raises(PeerError), pytest.warns(UserWarning, match=said):
        hoploom.connect(address, timeout=1.0)
