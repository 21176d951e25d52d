"""The live page of runs: a small server on loopback, whose page asks once a second for changes.

The address is valid only with its token. The server reads the files that runs write, on this host or in a folder that
several hosts share, and can be stopped at any time.
"""

import hmac
import http.server
import json
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hoploom.config.values import is_loopback, join_address, split_address
from hoploom.errors import ConfigError
from hoploom.report.page import encoded
from hoploom.report.reading import RunReader
from hoploom.report.runs import run_page
from hoploom.system import Closing

REQUEST_SECONDS = 10.0  # the longest read or write of a request
POLL_SECONDS = 0.5  # between two checks that the server's thread is alive
CLOSING = 5.0  # seconds for the thread to end
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class LivePage(Closing):
    """A server of the live page of runs, which answers until it is closed."""

    def __init__(self, runs: Sequence[RunReader], listen: str = "127.0.0.1:0") -> None:
        host, port = split_address(listen)
        if not is_loopback(host):
            raise ConfigError(
                f"--listen {listen} is reached from other hosts, and nothing protects it; listen on 127.0.0.1 and "
                "forward the port: ssh -L 8000:127.0.0.1:PORT HOST"
            )
        self._token = secrets.token_urlsafe(32)
        handler = partial(_Handler, _Live(runs), self._token)
        try:
            self._server = _Server((host.strip("[]"), port), handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"--listen {listen} cannot be listened on: {reason}; give another port") from error
        serve = partial(self._server.serve_forever, poll_interval=0.1)
        self._thread = threading.Thread(target=serve, name="hoploom-watch", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address to open in a browser, with its token."""
        host, port = self._server.server_address[:2]
        return f"http://{join_address(str(host), port)}/?token={self._token}"

    def wait(self) -> None:
        """Wait until the server is closed; Ctrl-C ends the wait with a KeyboardInterrupt."""
        while self._thread.is_alive():
            self._thread.join(POLL_SECONDS)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._thread.join(CLOSING)
        self._server.server_close()


class _Live:
    """The current page of runs. The files of the runs are read only when a request arrives."""

    def __init__(self, runs: Sequence[RunReader]) -> None:
        self._runs, self._lock = runs, threading.Lock()
        self._seen: Any = None
        self._version, self._content = 0, b""

    def html(self) -> bytes:
        with self._lock:
            self._read()
            return encoded(run_page(self._runs), is_live=True)

    def content(self, seen: str) -> bytes | None:
        """Return the page's content as JSON; None if its version is still `seen`, the one that the browser has."""
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
    """An HTTP server with a thread per request, on an IPv4 or IPv6 address."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind the socket, but do not look up this host's name as HTTPServer does: a broken resolver would block."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier server's port is free at once
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a request in a line on stderr, unless the browser has only closed the connection."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"hoploom: the page could not be made: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS

    def __init__(self, live: _Live, token: str, *rest: Any) -> None:
        self._live, self._token = live, token
        super().__init__(*rest)

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        given = "".join(query.get("token", []))
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return self._answer(
                403, b"this address is out of date: open the new address that `hoploom watch` printed\n", "text/plain"
            )
        if address.path not in ("/", "/content"):
            return self._answer(404, b"there is nothing here\n", "text/plain")
        try:
            page = self._live.html() if address.path == "/" else self._live.content("".join(query.get("seen", [])))
        except ConfigError as error:
            return self._answer(410, str(error).encode("utf-8", "backslashreplace"), "text/plain")
        except Exception:
            self._answer(500, b"the page could not be made; `hoploom watch` says why in its terminal\n", "text/plain")
            raise
        kind = "text/html" if address.path == "/" else "application/json"
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
        """Log nothing, because the address of a request holds the token."""
