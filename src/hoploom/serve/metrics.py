"""Counts of a server's requests, and an HTTP endpoint with two pages: /metrics for Prometheus and /health for probes.

Except on loopback, /metrics requires the server's token and client certificates. /health never does, because probes
have neither. prometheus_client's own endpoint has no token and no limit of connections.
"""

import bisect
import itertools
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from hoploom.config.values import is_loopback, join_address
from hoploom.errors import ConfigError
from hoploom.serve.acceptor import BACKLOG, READ, Acceptor, NewConnection, Steps
from hoploom.serve.security import Reloading, ServerSecurity, check_listen, is_same, tls_context
from hoploom.system import Closing

KINDS = ("info", "sample", "gather", "split", "batch")
OTHER = "other"  # counts all other kinds together: clients could send any number of names
BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BOUNDS = (*map(floatToGoString, BUCKETS), "+Inf")  # the upper ends of the buckets, as Prometheus writes them
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of generate_latest's text
PLAIN = "text/plain; charset=utf-8"
MAX_REQUEST = 16 * 1024  # bytes of a request line and its headers
CONNECTIONS = 64  # to the endpoint at once; a new one replaces the one that has been idle for longest
SECONDS = 1.0  # for one connection

Outcome = Literal["ok", "refused", "failed"]


@dataclass
class RequestCount:
    """The outcome and size of one request, which `Metrics.request` adds to the counts when the request ends."""

    outcome: Outcome = "ok"
    received: int = 0  # bytes
    sent: int = 0


class Metrics(Collector):
    """The counts of one server, thread-safe. Prometheus's own counters would take half the time of a small request."""

    def __init__(
        self,
        held_bytes: Callable[[], int] = lambda: 0,
        cache_rows: Callable[[], tuple[int, int]] = lambda: (0, 0),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.draining = False
        self.in_flight = 0  # requests
        self._held_bytes, self._cache_rows, self._clock = held_bytes, cache_rows, clock
        self._requests: Counter[tuple[str, Outcome]] = Counter()  # by kind of request, like the counts below
        self._in_buckets: dict[str, list[int]] = {}  # the requests that took as long as each of BUCKETS
        self._seconds: dict[str, float] = {}
        self._received, self._sent = Counter[str](), Counter[str]()
        self._streams = 0
        self._changed = threading.Condition()  # guards all counts; notified when no request is in flight

    @contextmanager
    def request(self, kind: str) -> Iterator[RequestCount]:
        """Count and time the request that is answered in the `with` block; count it as failed if the block raises."""
        kind, count = kind if kind in KINDS else OTHER, RequestCount()
        with self._changed:
            self.in_flight += 1
        began = self._clock()
        try:
            yield count
        except BaseException:
            count.outcome = "failed"
            raise
        finally:
            seconds = self._clock() - began
            with self._changed:
                self._requests[kind, count.outcome] += 1
                in_buckets = self._in_buckets.setdefault(kind, [0] * len(BOUNDS))
                in_buckets[bisect.bisect_left(BUCKETS, seconds)] += 1
                self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds
                self._received[kind] += count.received
                self._sent[kind] += count.sent
                self.in_flight -= 1
                if not self.in_flight:
                    self._changed.notify_all()

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait up to `seconds` until no request is in flight; return False if some still are."""
        with self._changed:
            return self._changed.wait_for(lambda: self.in_flight == 0, seconds)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a client's connection as open while the `with` block runs."""
        with self._changed:
            self._streams += 1
        try:
            yield
        finally:
            with self._changed:
                self._streams -= 1

    def collect(self) -> Iterable[Metric]:
        """Return all metrics, in the form that prometheus_client's registry expects."""
        outcomes = "Requests answered; refused: a mistake of the client, failed: of the server."
        requests = CounterMetricFamily("hoploom_requests", outcomes, labels=("kind", "outcome"))
        text = "Seconds from a request to its answer."
        seconds = HistogramMetricFamily("hoploom_request_seconds", text, labels=("kind",))
        received = CounterMetricFamily("hoploom_received_bytes", "Bytes of tensors in requests.", labels=("kind",))
        sent = CounterMetricFamily("hoploom_sent_bytes", "Bytes of tensors in answers.", labels=("kind",))
        text = "Rows needed from other parts, by whether the cache had them."
        cache = CounterMetricFamily("hoploom_cache_rows", text, labels=("outcome",))
        for outcome, number in zip(("hit", "miss"), self._cache_rows(), strict=True):
            cache.add_metric((outcome,), number)
        with self._changed:
            for labels, number in self._requests.items():
                requests.add_metric(labels, number)
            for kind, in_buckets in self._in_buckets.items():
                reached = itertools.accumulate(in_buckets)
                seconds.add_metric((kind,), list(zip(BOUNDS, reached, strict=True)), self._seconds[kind])
                received.add_metric((kind,), self._received[kind])
                sent.add_metric((kind,), self._sent[kind])
        held = "Bytes of batches that are built and not yet sent."
        return [
            *(requests, seconds, received, sent),
            GaugeMetricFamily("hoploom_requests_under_way", "Requests being answered now.", self.in_flight),
            GaugeMetricFamily("hoploom_open_streams", "Streams that clients hold open.", self._streams),
            cache,
            GaugeMetricFamily("hoploom_held_bytes", held, self._held_bytes()),
        ]

    def value(self, name: str, **labels: str) -> float:
        """Return the value of a counter or gauge; 0.0 if nothing was counted with these labels."""
        samples = (sample for metric in self.collect() for sample in metric.samples)
        return next((sample.value for sample in samples if (sample.name, sample.labels) == (name, labels)), 0.0)

    def text(self) -> str:
        """Return all metrics in Prometheus's text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry).decode()


class MetricsEndpoint(Closing):
    """An HTTP server for /metrics and /health, until it is closed. Its `address` is the HOST:PORT it listens on."""

    def __init__(
        self,
        metrics: Metrics,
        address: tuple[str, int],
        security: ServerSecurity | None = None,
        *,
        insecure: bool = False,
        seconds: float = SECONDS,
    ) -> None:
        (host, port), security = address, security or ServerSecurity()
        self.warning = check_listen(host, security, insecure=insecure, flag="--metrics")
        self._metrics, self._security = metrics, ServerSecurity() if is_loopback(host) else security
        self._reloading = Reloading(self._security, _https_context)
        where, family = (host.strip("[]"), port), socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server(where, family=family, backlog=BACKLOG)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"--metrics {host}:{port} cannot be listened on: {reason}; give another port") from error
        self.address = join_address(*listener.getsockname()[:2])
        self._acceptor = Acceptor([listener], self._answer, CONNECTIONS, seconds, "hoploom-metrics")

    def close(self) -> None:
        """Close all connections and end the thread."""
        self._acceptor.close()

    def _answer(self, connection: NewConnection) -> Steps[None]:
        """Answer one HTTP request, then close its connection. A generator for the acceptor's loop."""
        _, context = self._reloading.now()
        if context is not None:
            yield from connection.start_tls(context)
        request = b""
        while b"\r\n\r\n" not in request and len(request) < MAX_REQUEST:
            some = yield from connection.retry(READ, connection.socket.recv, MAX_REQUEST - len(request))
            if not some:
                return
            request += some
        verb = request.partition(b" ")[0].decode("latin-1")
        status, text = self._page(request, connection.socket)
        is_metrics = status is HTTPStatus.OK and text.startswith("# HELP")
        lines = [
            f"HTTP/1.0 {status} {status.phrase}",
            "Server: hoploom",
            f"Content-Type: {METRICS_TYPE if is_metrics else PLAIN}",
            f"Content-Length: {len(text.encode())}",
            *(["WWW-Authenticate: Bearer"] if status is HTTPStatus.UNAUTHORIZED else []),
            "\r\n",
        ]
        yield from connection.hang_up(("\r\n".join(lines) + ("" if verb == "HEAD" else text)).encode())

    def _page(self, request: bytes, connected: socket.socket) -> tuple[HTTPStatus, str]:
        """Return the status and the text of the page that a request asks for."""
        first, *headers = request.decode("latin-1").partition("\r\n\r\n")[0].split("\r\n")
        verb, _, rest = first.partition(" ")
        target, _, version = rest.partition(" ")
        path, security = target.partition("?")[0], self._security
        if len(request) >= MAX_REQUEST and not request.endswith(b"\r\n\r\n"):
            return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a request has at most {MAX_REQUEST} bytes\n"
        if version not in ("HTTP/1.0", "HTTP/1.1"):
            return HTTPStatus.BAD_REQUEST, "ask with GET PATH HTTP/1.1\n"
        if verb not in ("GET", "HEAD"):
            return HTTPStatus.NOT_IMPLEMENTED, "ask with GET or HEAD\n"
        if path == "/health":
            draining = self._metrics.draining
            return (HTTPStatus.SERVICE_UNAVAILABLE, "draining\n") if draining else (HTTPStatus.OK, "ok\n")
        is_certified = isinstance(connected, ssl.SSLSocket) and bool(connected.getpeercert())
        if security.client_ca is not None and not is_certified:
            return HTTPStatus.FORBIDDEN, "show a client certificate\n"
        named = [line.partition(":") for line in headers]
        values = [value.strip(" \t") for name, _, value in named if name.lower() == "authorization"]
        if security.token is not None and not (len(values) == 1 and is_same(values[0], f"Bearer {security.token}")):
            return HTTPStatus.UNAUTHORIZED, "send the header Authorization: Bearer TOKEN\n"
        if path == "/metrics":
            return HTTPStatus.OK, self._metrics.text()
        return HTTPStatus.NOT_FOUND, "there are /metrics and /health\n"


def _https_context(security: ServerSecurity) -> ssl.SSLContext:
    context = tls_context(security)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # probes may know no newer one
    if security.client_ca is not None:
        context.verify_mode = ssl.CERT_OPTIONAL  # a wrong one is refused here, a missing one by the page
    return context
