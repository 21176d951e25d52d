"""Connections for tests: two ends in this process, and clients that say to a server what no client of ours does."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hoploom.config.values import split_address
from hoploom.serve import wire
from hoploom.serve.connection import Connection
from hoploom.serve.handshake import connect_tcp, connect_unix
from hoploom.serve.security import ClientSecurity, Reloading
from hoploom.serve.wire import IncomingMessage, Message

PATIENCE = 60.0  # seconds


def line(silence: float = PATIENCE) -> tuple[Connection, Connection]:
    near, far = socket.socketpair()
    return Connection(near, silence), Connection(far, silence, takes_files=True)


def read_whole(connection: Connection) -> Message:
    return IncomingMessage(connection, wire.MAX_RESPONSE).into()


def over_the_wire(message: Message) -> Message:
    near, far = line()

    def write() -> None:
        with near:
            wire.write_message(near, message)

    with far, ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        try:
            far.begin(0)
            return read_whole(far)
        finally:
            far.cut()
            writing.result()


def over_tcp(address: str, security: ClientSecurity | None = None, silence: float = PATIENCE) -> Connection:
    return connect_tcp(address, Reloading(security or ClientSecurity()), silence)[0]


def nearby(address: str, silence: float = PATIENCE) -> Connection:
    """The same over the server's Unix socket."""
    connection, near_by = connect_tcp(address, Reloading(ClientSecurity()), silence)
    connection.close()
    assert near_by is not None
    local = connect_unix(near_by, silence)
    assert local is not None
    return local


def plain(address: str, silence: float = PATIENCE) -> socket.socket:
    """A socket at a server's address, over which nothing has been said yet."""
    return socket.create_connection(split_address(address), silence)


def frame(header: Any, *more: bytes) -> bytes:
    """A message whose header is any JSON, or any bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return wire.PREFIX.pack(wire.MESSAGE, len(text)) + text + b"".join(more)


def send(connection: Connection, said: bytes) -> None:
    connection.begin(len(said))
    connection.send([said])


def said_by(connection: Connection) -> str:
    """The server's refusal, or how it ended the conversation."""
    try:
        connection.begin(0)
        return str(IncomingMessage(connection, wire.MAX_RESPONSE).header.get("message", "no refusal"))
    except (OSError, EOFError) as error:
        return f"{type(error).__name__}: {error}"
