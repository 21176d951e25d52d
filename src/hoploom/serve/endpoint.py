"""/metrics and /health over HTTP, in a thread beside the server.

Made to be asked every few seconds by one or two monitors, and to take no harm from others: few connections at once,
small requests, and an end to each connection after some seconds whatever it does. Nothing is logged.

/metrics asks for what the server asks for (token, client certificate); /health says one word, to everybody, because
the probes of load balancers and Kubernetes carry neither. On loopback both are free, as the server is.
"""

import functools
import http.client
import http.server
import socket
import socketserver
import ssl
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

from hoploom.errors import ConfigError
from hoploom.serve.address import join_address
from hoploom.serve.metrics import CONTENT_TYPE, DRAINING, Metrics
from hoploom.serve.pem import load_pair
from hoploom.serve.security import ServerSecurity, check_listen, is_loopback
from hoploom.serve.token_auth import HEADER, carries, expected_header

MAX_CONNECTIONS = 16
MAX_REQUEST = 16 * 1024  # bytes of request line and headers
SECONDS = 10.0  # for a connection, from the first byte to the last
CLOSING = 5.0  # seconds for the thread to end
PLAIN = "text/plain; charset=utf-8"


class Reply(NamedTuple):
    """One answer."""

    status: int
    text: str
    type: str = PLAIN


class Pages:
    """What is answered to whom."""

    def __init__(self, metrics: Metrics, security: ServerSecurity) -> None:
        self._metrics = metrics
        self._expected = None if security.token is None else expected_header(security.token)
        self._certified = security.client_ca is not None

    def reply(self, path: str, given: str, *, certified: bool) -> Reply:
        """The answer to a GET of a path, with an authorization header and perhaps a client's certificate."""
        if path == "/health":
            return Reply(503, "draining\n") if self._metrics.value(DRAINING) else Reply(200, "ok\n")
        if self._certified and not certified:
            return Reply(403, "show a client certificate\n")
        if self._expected is not None and not carries(given, self._expected):
            return Reply(401, "send the header Authorization: Bearer TOKEN\n")
        if path == "/metrics":
            return Reply(200, self._metrics.text(), CONTENT_TYPE)
        return Reply(404, "there are /metrics and /health\n")


class Endpoint:
    """Answers from the moment it is made until close(); `address` is what it listens on, with its port resolved."""

    def __init__(
        self,
        metrics: Metrics,
        host: str,
        port: int,
        security: ServerSecurity | None = None,
        *,
        insecure: bool = False,
    ) -> None:
        given = security or ServerSecurity()
        self.warning = check_listen(host, given, insecure=insecure, flag="--metrics")
        asked = ServerSecurity() if is_loopback(host) else given
        try:
            self._server = _Server(Pages(metrics, asked), host, port, _tls(asked))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"--metrics {host}:{port} cannot be listened on: {reason}; give another port") from error
        self._thread = threading.Thread(target=self._server.run, name="hoploom-metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """host:port."""
        host, port = self._server.server_address[:2]
        return join_address(str(host), port)

    def close(self) -> None:
        """End every connection and the thread."""
        self._server.stop()
        self._thread.join(CLOSING)
        self._server.server_close()

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tls(security: ServerSecurity) -> ssl.SSLContext | None:
    if security.certificate is None or security.key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_pair(context, security.certificate, security.key)
    if security.client_ca is not None:
        context.load_verify_locations(cadata=security.client_ca.decode("ascii", "replace"))
        context.verify_mode = ssl.CERT_OPTIONAL  # a wrong one is refused here, none by the page
    return context


class _Server(http.server.ThreadingHTTPServer):
    """Accepts in one thread, answers in at most MAX_CONNECTIONS; the accepting one ends what takes too long."""

    daemon_threads = False  # so that server_close() waits for them
    request_queue_size = 16

    def __init__(self, pages: Pages, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._deadlines: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        bare = host.strip("[]")
        self.address_family = socket.AF_INET6 if ":" in bare else socket.AF_INET
        super().__init__((bare, port), functools.partial(_Handler, pages))

    def server_bind(self) -> None:
        """Without the look-up of this host's name that HTTPServer does: a broken resolver would hang it."""
        socketserver.TCPServer.server_bind(self)

    def run(self) -> None:
        """Serve until stop()."""
        self.serve_forever(poll_interval=0.1)

    def stop(self) -> None:
        """Take no more, and end what is there."""
        self.shutdown()
        self._end(float("inf"))

    def get_request(self) -> tuple[Any, Any]:
        """The handshake waits for the handler's thread: here a silent client would hold up all others."""
        connection, address = super().get_request()
        if self._tls is None:
            return connection, address
        try:
            return self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address
        except ValueError as error:
            raise OSError(f"no TLS with {address}") from error

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuses, by hanging up, what is one connection too many."""
        with self._lock:
            if len(self._deadlines) >= MAX_CONNECTIONS:
                return False
            self._deadlines[request] = time.monotonic() + SECONDS
        return True

    def service_actions(self) -> None:
        """Called between requests and ten times a second."""
        self._end(time.monotonic())

    def _end(self, now: float) -> None:
        with self._lock:
            for connection, deadline in self._deadlines.items():
                if deadline <= now:
                    with suppress(OSError):  # not SSLSocket's own, which another thread may be reading with
                        socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and forget it before another gets its descriptor."""
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client's broken connection is no event for the server's output."""


class _Bounded:
    """Reads lines of a request until they are too many bytes; http.client would allow some megabytes."""

    def __init__(self, file: Any, left: int) -> None:
        self._file = file
        self._left = left

    def readline(self, limit: int) -> bytes:
        line: bytes = self._file.readline(min(limit, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("request")
        return line

    def close(self) -> None:
        self._file.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request, one answer, and the connection is closed."""

    server_version = "hoploom"
    sys_version = ""
    timeout = SECONDS

    def __init__(self, pages: Pages, *arguments: Any) -> None:
        self._pages = pages
        super().__init__(*arguments)

    def setup(self) -> None:
        """The handshake, and a reader that stops at MAX_REQUEST bytes."""
        super().setup()
        if isinstance(self.connection, ssl.SSLSocket):
            self.connection.do_handshake()
        self.rfile: Any = _Bounded(self.rfile, MAX_REQUEST)

    def do_GET(self) -> None:  # http.server's name
        reply = self._pages.reply(self.path.partition("?")[0], self._given(), certified=self._certified())
        content = reply.text.encode()
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.type)
        self.send_header("Content-Length", str(len(content)))
        if reply.status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _given(self) -> str:
        values = self.headers.get_all(HEADER) or []
        return str(values[0]) if len(values) == 1 else ""

    def _certified(self) -> bool:
        return isinstance(self.connection, ssl.SSLSocket) and bool(self.connection.getpeercert())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a request may hold anything, a token too."""
