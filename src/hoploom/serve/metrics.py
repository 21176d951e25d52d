"""What a server counts, and two pages over HTTP that show it: /metrics for Prometheus and /health for probes.

/metrics asks for the server's token and client certificates; /health does not, because probes carry neither. On
loopback both are free, as the server is. prometheus_client's own endpoint has no token and no bound on connections.
"""

import bisect
import functools
import http.client
import http.server
import io
import itertools
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from hoploom.closing import Closing
from hoploom.config.values import is_loopback, join_address
from hoploom.errors import ConfigError
from hoploom.serve.security import ServerSecurity, check_listen, is_same, load_pair
from hoploom.serve.tls import Renewed

KINDS = ("info", "sample", "gather", "split", "batch")
OTHER = "other"  # what a client may call a request is unbounded, what is counted is not
BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BOUNDS = (*map(floatToGoString, BUCKETS), "+Inf")  # as they are written
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # as generate_latest writes it
PLAIN = "text/plain; charset=utf-8"
MAX_REQUEST = 16 * 1024  # bytes of a request line and its headers
CONNECTIONS = 16  # of /metrics and /health at once
CONNECTED = 10.0  # seconds for one, from its first byte to its last
CLOSING = 5.0  # seconds for the thread to end

Outcome = Literal["ok", "refused", "failed"]


# --- the counts ----------------------------------------------------------------------------------


class RequestCount:
    """One request, counted from its first byte to its last; whoever answers it says what it turned out to be."""

    outcome: Outcome = "ok"  # an error that leaves the block makes it failed
    received = 0  # bytes
    sent = 0

    def __init__(self, metrics: "Metrics", kind: str) -> None:
        self._metrics, self._kind = metrics, kind if kind in KINDS else OTHER

    def __enter__(self) -> Self:
        self._began = self._metrics.clock()
        self._metrics.begin_request()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.outcome = "failed"
        self._metrics.end_request(self._kind, self, self._metrics.clock() - self._began)


class Metrics:
    """The counts of one server, from any thread; `held_bytes` and `cache_rows` (hits, misses) are called when read."""

    def __init__(
        self,
        held_bytes: Callable[[], float] = lambda: 0,
        cache_rows: Callable[[], tuple[int, int]] = lambda: (0, 0),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.draining = False
        self.under_way = 0  # requests being answered
        self.clock = clock
        self._ended = threading.Condition()
        self.registry = at = _Registry()
        self._requests = _Requests(self._ended)
        at.register(self._requests)
        under_way = Gauge("hoploom_requests_under_way", "Requests being answered now.", registry=at)
        under_way.set_function(lambda: self.under_way)
        self._streams = Gauge("hoploom_open_streams", "Streams that clients hold open.", registry=at)
        self.batches = Counter("hoploom_batches", "Batches built.", registry=at)
        at.register(_CacheRows(cache_rows))
        held = Gauge("hoploom_held_bytes", "Bytes of batches that are built and not yet sent.", registry=at)
        held.set_function(held_bytes)
        draining = "1 while the server finishes current requests and refuses new ones."
        Gauge("hoploom_draining", draining, registry=at).set_function(lambda: self.draining)

    def request(self, kind: str) -> RequestCount:
        """Counts one request, within a block."""
        return RequestCount(self, kind)

    def begin_request(self) -> None:
        with self._ended:
            self.under_way += 1

    def end_request(self, kind: str, count: RequestCount, seconds: float) -> None:
        with self._ended:
            self._requests.add(kind, count, seconds)
            self.under_way -= 1
            if not self.under_way:
                self._ended.notify_all()

    def wait_until_idle(self, seconds: float) -> bool:
        """Whether there came a moment without a request under way."""
        with self._ended:
            return self._ended.wait_for(lambda: self.under_way == 0, seconds)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Counts a stream as open."""
        with self._streams.track_inprogress():
            yield

    def value(self, name: str, **labels: str) -> float:
        """What a counter or gauge stands at."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry).decode()


class _Registry(CollectorRegistry):
    """Without the times at which counters were made."""

    def collect(self) -> Iterable[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _OfKind:
    """What the requests of a kind have come to."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.in_buckets = [0] * (len(BUCKETS) + 1)  # by the seconds that they took
        self.seconds = 0.0
        self.received = self.sent = 0


class _Requests(Collector):
    """Counts of requests by kind. A Counter of prometheus_client's for each of these takes a lock and a few
    microseconds every time, as much as half of a small request."""

    def __init__(self, lock: threading.Condition) -> None:
        self._kinds: dict[str, _OfKind] = {}
        self._lock = lock  # whoever adds holds it

    def add(self, kind: str, count: RequestCount, seconds: float) -> None:
        of_kind = self._kinds.get(kind) or self._kinds.setdefault(kind, _OfKind())
        of_kind.outcomes[count.outcome] = of_kind.outcomes.get(count.outcome, 0) + 1
        of_kind.in_buckets[bisect.bisect_left(BUCKETS, seconds)] += 1
        of_kind.seconds += seconds
        of_kind.received += count.received
        of_kind.sent += count.sent

    def collect(self) -> Iterable[Metric]:
        outcomes = "Requests answered; refused: a mistake of the client, failed: of the server."
        requests = CounterMetricFamily("hoploom_requests", outcomes, labels=("kind", "outcome"))
        seconds = HistogramMetricFamily(
            "hoploom_request_seconds", "Seconds from a request to its answer.", labels=("kind",)
        )
        received = CounterMetricFamily("hoploom_received_bytes", "Bytes of tensors in requests.", labels=("kind",))
        sent = CounterMetricFamily("hoploom_sent_bytes", "Bytes of tensors in answers.", labels=("kind",))
        with self._lock:
            for kind, of_kind in self._kinds.items():
                for outcome, number in of_kind.outcomes.items():
                    requests.add_metric((kind, outcome), number)
                reached = itertools.accumulate(of_kind.in_buckets)
                seconds.add_metric((kind,), list(zip(BOUNDS, reached, strict=True)), of_kind.seconds)
                received.add_metric((kind,), of_kind.received)
                sent.add_metric((kind,), of_kind.sent)
        return requests, seconds, received, sent


class _CacheRows(Collector):
    """Hits and misses, as the cache has counted them."""

    def __init__(self, count: Callable[[], tuple[int, int]]) -> None:
        self._count = count

    def collect(self) -> Iterable[Metric]:
        text = "Rows needed from other parts, by whether the cache had them."
        metric = CounterMetricFamily("hoploom_cache_rows", text, labels=("outcome",))
        for outcome, count in zip(("hit", "miss"), self._count(), strict=True):
            metric.add_metric((outcome,), count)
        yield metric


# --- over HTTP -----------------------------------------------------------------------------------


class MetricsEndpoint(Closing):
    """Answers from the moment it is made until close(); `address` is what it listens on, with its port resolved."""

    def __init__(
        self,
        metrics: Metrics,
        address: tuple[str, int],
        security: ServerSecurity | None = None,
        *,
        insecure: bool = False,
        connections: int = CONNECTIONS,
        seconds: float = CONNECTED,
    ) -> None:
        (host, port), security = address, security or ServerSecurity()
        self.warning = check_listen(host, security, insecure=insecure, flag="--metrics")
        required = ServerSecurity() if is_loopback(host) else security
        try:
            self._server = _Server((host.strip("[]"), port), metrics, required, connections, seconds)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"--metrics {host}:{port} cannot be listened on: {reason}; give another port") from error
        serve = functools.partial(self._server.serve_forever, poll_interval=0.1)
        self._thread = threading.Thread(target=serve, name="hoploom-metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """host:port."""
        host, port = self._server.server_address[:2]
        return join_address(str(host), port)

    @property
    def num_connections(self) -> int:
        return len(self._server.deadlines)

    def close(self) -> None:
        """End every connection and the thread."""
        self._server.shutdown()
        self._server.end_connections(float("inf"))
        self._thread.join(CLOSING)
        self._server.server_close()


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
    """Accepts in one thread, answers in a few; the accepting one ends what takes too long."""

    daemon_threads = False  # so that server_close() waits for them
    request_queue_size = 16

    def __init__(
        self, address: tuple[str, int], metrics: Metrics, security: ServerSecurity, connections: int, seconds: float
    ) -> None:
        self._renewed, self._connections, self._seconds = Renewed(security, _tls), connections, seconds
        self.deadlines: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, functools.partial(_Handler, metrics, security, seconds))

    def server_bind(self) -> None:
        """Without the look-up of this host's name that HTTPServer does: a broken resolver would hang it."""
        socketserver.TCPServer.server_bind(self)

    def get_request(self) -> tuple[Any, Any]:
        """The handshake waits for the handler's thread: here a silent client would hold up all others."""
        connection, address = super().get_request()
        _, context = self._renewed.now()
        if context is None:
            return connection, address
        try:
            return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address
        except ValueError as error:
            raise OSError(f"no TLS with {address}") from error

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuses, by hanging up, what is one connection too many."""
        with self._lock:
            if len(self.deadlines) >= self._connections:
                return False
            self.deadlines[request] = time.monotonic() + self._seconds
        return True

    def service_actions(self) -> None:
        """Called between requests and ten times a second."""
        self.end_connections(time.monotonic())

    def end_connections(self, now: float) -> None:
        """End those that are open for too long."""
        with self._lock:
            for connection, deadline in self.deadlines.items():
                if deadline <= now:
                    with suppress(OSError):  # not SSLSocket's own, which another thread may be reading with
                        socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and forget it before another gets its descriptor."""
        with self._lock:
            self.deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client's broken connection is no event for the server's output."""


class _Bounded(io.BufferedReader):
    """Lines of a request until they are too many bytes: http.server would keep 6 MB before it looks for a token."""

    left = MAX_REQUEST

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(self.left + 1)
        self.left -= len(line)
        if self.left < 0:
            raise http.client.LineTooLong("request")
        return line


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request, one answer, and the connection is closed."""

    server_version = "hoploom"
    sys_version = ""

    def __init__(self, metrics: Metrics, security: ServerSecurity, seconds: float, *arguments: Any) -> None:
        self._metrics, self._security, self._seconds = metrics, security, seconds
        super().__init__(*arguments)

    def setup(self) -> None:
        """The handshake, in this thread, and a reader that stops at so many bytes."""
        self.request.settimeout(self._seconds)
        super().setup()
        if isinstance(self.connection, ssl.SSLSocket):
            self.connection.do_handshake()
        self.rfile = _Bounded(self.rfile.detach())

    def do_GET(self) -> None:  # http.server's name
        path = self.path.partition("?")[0]
        status, text = self._reply(path)
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", METRICS_TYPE if (path, status) == ("/metrics", 200) else PLAIN)
        self.send_header("Content-Length", str(len(content)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _reply(self, path: str) -> tuple[int, str]:
        """The status and what the page says."""
        if path == "/health":
            return (503, "draining\n") if self._metrics.draining else (200, "ok\n")
        if self._security.client_ca is not None and not self._is_certified():
            return 403, "show a client certificate\n"
        if self._security.token is not None and not self._has_token(self._security.token):
            return 401, "send the header Authorization: Bearer TOKEN\n"
        if path == "/metrics":
            return 200, self._metrics.text()
        return 404, "there are /metrics and /health\n"

    def _has_token(self, token: str) -> bool:
        values = self.headers.get_all("authorization") or []
        return len(values) == 1 and is_same(str(values[0]), f"Bearer {token}")

    def _is_certified(self) -> bool:
        return isinstance(self.connection, ssl.SSLSocket) and bool(self.connection.getpeercert())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a request may hold anything, a token too."""
