"""The page of runs, live: a small server on loopback whose page asks once a second for what is new.

Whoever has the address with its token may look, nobody else; beyond loopback it speaks TLS or not at all. It only
reads what runs write, on this host or in a folder that several hosts share, and can be stopped at any time.
"""

import hmac
import http.server
import json
import secrets
import socket
import ssl
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hoploom.closing import Closing
from hoploom.config.values import is_loopback, join_address, split_address
from hoploom.errors import ConfigError
from hoploom.report.page import encoded
from hoploom.report.reading import RunReader
from hoploom.report.runs import run_page

REQUEST_SECONDS = 10.0  # for a request, from its first byte to its last
LOOK_UP = 0.5  # seconds between two looks whether to stop
CLOSING = 5.0  # seconds for the thread to end
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class LivePage(Closing):
    """Answers from the moment it is made until close(); `url` is where, with the token.

    >>> with LivePage([RunReader("run")]) as watch:
    ...     print(watch.url)
    ...     watch.wait()
    """

    def __init__(
        self,
        runs: Sequence[RunReader],
        listen: str = "127.0.0.1:0",
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        host, port = split_address(listen)
        tls = _tls(certificate, key)
        if tls is None and not is_loopback(host):
            raise ConfigError(
                f"--listen {listen} is reached from other hosts, and nothing protects it; give --cert and --key "
                "(`hoploom certs` makes them for tests), or listen on 127.0.0.1 and forward the port: "
                "ssh -L 8000:127.0.0.1:PORT HOST"
            )
        self._token, self._scheme = secrets.token_urlsafe(32), "http" if tls is None else "https"
        handler = partial(_Handler, _Live(runs), self._token)
        try:
            self._server = _Server((host.strip("[]"), port), handler, tls)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"--listen {listen} cannot be listened on: {reason}; give another port") from error
        serve = partial(self._server.serve_forever, poll_interval=0.1)
        self._thread = threading.Thread(target=serve, name="hoploom-watch", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """What to open in a browser."""
        host, port = self._server.server_address[:2]
        return f"{self._scheme}://{join_address(str(host), port)}/?token={self._token}"

    def wait(self) -> None:
        """For as long as it answers, or until a KeyboardInterrupt."""
        while self._thread.is_alive():
            self._thread.join(LOOK_UP)

    def close(self) -> None:
        """Stop to answer."""
        self._server.shutdown()
        self._thread.join(CLOSING)
        self._server.server_close()


def _tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--cert and --key belong together; give both")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--cert {certificate} and --key {key} cannot be used: {error}; give PEM files of both"
        ) from error
    return context


class _Live:
    """The page as of now; read on only when somebody asks."""

    def __init__(self, runs: Sequence[RunReader]) -> None:
        self._runs, self._lock = runs, threading.Lock()
        self._seen: Any = None
        self._version, self._content = 0, b""

    def html(self) -> bytes:
        with self._lock:
            self._read()
            return encoded(run_page(self._runs), is_live=True)

    def content(self, seen: str) -> bytes | None:
        """What is new since a version; None: nothing."""
        with self._lock:
            self._read()
            return None if seen == str(self._version) else self._content

    def _read(self) -> None:
        for run in self._runs:
            if not run.folder.is_dir():
                raise ConfigError(f"the folder {run.folder} is gone; put it back, or stop `hoploom watch` with Ctrl-C")
        now = [
            (run.written_at, run.state, run.silence // 60 if run.state == "silent" else 0, run.num_bytes)
            for run in self._runs
        ]
        if now == self._seen:
            return
        for run in self._runs:
            run.refresh()
        page = run_page(self._runs)
        self._seen, self._version = now, self._version + 1
        news = {"version": self._version, "title": page.title, "markup": page.markup(), **page.figures()}
        self._content = json.dumps(news, allow_nan=False).encode()


class _Server(http.server.ThreadingHTTPServer):
    """A thread per request; the handshake of TLS is made there, where it holds up nobody else."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: Any, tls: ssl.SSLContext | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._tls = tls
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without the look-up of this host's name that HTTPServer does: a broken resolver would hang it."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of before is free at once
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(REQUEST_SECONDS)  # of one read or write
        with request.dup() as line, _read_for(REQUEST_SECONDS, line):
            if self._tls is not None:
                request = self._tls.wrap_socket(request, server_side=True)
            super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A line on stderr; none where a browser went away, which is no error of ours."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError | ssl.SSLError):
            print(f"hoploom: the page could not be made: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


@contextmanager
def _read_for(seconds: float, line: socket.socket) -> Iterator[None]:
    """Within: what a client has not sent by then is not read any more, however little at a time it sends."""

    def end() -> None:
        with suppress(OSError):  # it is gone already
            line.shutdown(socket.SHUT_RD)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS

    def __init__(self, live: _Live, token: str, *rest: Any) -> None:
        self._live, self._token = live, token
        super().__init__(*rest)

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        query = parse_qs(asked.query)
        given = "".join(query.get("token", []))
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return self._answer(
                403, b"this address is out of date: open the new address that `hoploom watch` printed\n", "text/plain"
            )
        if asked.path not in ("/", "/content"):
            return self._answer(404, b"there is nothing here\n", "text/plain")
        try:
            page = self._live.html() if asked.path == "/" else self._live.content("".join(query.get("seen", [])))
        except ConfigError as error:
            return self._answer(410, str(error).encode("utf-8", "backslashreplace"), "text/plain")
        except Exception:
            self._answer(500, b"the page could not be made; `hoploom watch` says why in its terminal\n", "text/plain")
            raise
        kind = "text/html" if asked.path == "/" else "application/json"
        return self._answer(204 if page is None else 200, page or b"", kind)

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: an address holds the token."""
