"""What a server counts, and two pages over HTTP that show it: /metrics for Prometheus and /health for probes.

/metrics asks for the server's token and client certificates; /health does not, because probes carry neither. On
loopback both are free, as the server is. prometheus_client's own endpoint has no token and no bound on connections.
"""

import bisect
import itertools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Literal, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from hoploom.closing import Closing
from hoploom.config.values import is_loopback, join_address
from hoploom.errors import ConfigError
from hoploom.serve.arrivals import BACKLOG, READ, Arrival, Arrivals, Steps
from hoploom.serve.security import ServerSecurity, check_listen, is_same, load_pair
from hoploom.serve.tls import Renewed

KINDS = ("info", "sample", "gather", "split", "batch")
OTHER = "other"  # what a client may call a request is unbounded, what is counted is not
BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BOUNDS = (*map(floatToGoString, BUCKETS), "+Inf")  # as they are written
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # as generate_latest writes it
PLAIN = "text/plain; charset=utf-8"
MAX_REQUEST = 16 * 1024  # bytes of a request line and its headers
CONNECTIONS = 64  # of /metrics and /health at once; a new one takes the place of the one that is silent for longest
CONNECTED = 1.0  # seconds for one

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
        self._metrics, self._security = metrics, ServerSecurity() if is_loopback(host) else security
        self._renewed = Renewed(self._security, _tls)
        where, family = (host.strip("[]"), port), socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server(where, family=family, backlog=BACKLOG)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"--metrics {host}:{port} cannot be listened on: {reason}; give another port") from error
        self.address = join_address(*listener.getsockname()[:2])
        self._arrivals = Arrivals([listener], self._meet, connections, seconds, "hoploom-metrics")

    @property
    def num_connections(self) -> int:
        return self._arrivals.num_waiting

    def close(self) -> None:
        """End every connection and the thread."""
        self._arrivals.close()

    def _meet(self, arrival: Arrival) -> Steps[None]:
        """Answer one request and close the connection."""
        _, context = self._renewed.now()
        if context is not None:
            yield from arrival.secure(context)
        request = b""
        while b"\r\n\r\n" not in request and len(request) < MAX_REQUEST:
            some = yield from arrival.retry(READ, arrival.socket.recv, MAX_REQUEST - len(request))
            if not some:
                return
            request += some
        status, text, verb = self._reply(request, arrival.socket)
        found = status is HTTPStatus.OK and text.startswith("# HELP")
        lines = [
            f"HTTP/1.0 {status} {status.phrase}",
            "Server: hoploom",
            f"Content-Type: {METRICS_TYPE if found else PLAIN}",
            f"Content-Length: {len(text.encode())}",
            *(["WWW-Authenticate: Bearer"] if status is HTTPStatus.UNAUTHORIZED else []),
            "\r\n",
        ]
        yield from arrival.hang_up(("\r\n".join(lines) + ("" if verb == "HEAD" else text)).encode())

    def _reply(self, request: bytes, connected: socket.socket) -> tuple[HTTPStatus, str, str]:
        """Return the status, the text of the page and the verb of a request."""
        first, *headers = request.decode("latin-1").partition("\r\n\r\n")[0].split("\r\n")
        verb, _, rest = first.partition(" ")
        path, _, version = rest.partition(" ")
        path = path.partition("?")[0]
        if len(request) >= MAX_REQUEST and not request.endswith(b"\r\n\r\n"):
            return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a request has at most {MAX_REQUEST} bytes\n", verb
        if version not in ("HTTP/1.0", "HTTP/1.1"):
            return HTTPStatus.BAD_REQUEST, "ask with GET PATH HTTP/1.1\n", verb
        if verb not in ("GET", "HEAD"):
            return HTTPStatus.NOT_IMPLEMENTED, "ask with GET or HEAD\n", verb
        if path == "/health":
            draining = self._metrics.draining
            return (HTTPStatus.SERVICE_UNAVAILABLE, "draining\n", verb) if draining else (HTTPStatus.OK, "ok\n", verb)
        if self._security.client_ca is not None and not _is_certified(connected):
            return HTTPStatus.FORBIDDEN, "show a client certificate\n", verb
        if self._security.token is not None and not _has_token(headers, self._security.token):
            return HTTPStatus.UNAUTHORIZED, "send the header Authorization: Bearer TOKEN\n", verb
        if path == "/metrics":
            return HTTPStatus.OK, self._metrics.text(), verb
        return HTTPStatus.NOT_FOUND, "there are /metrics and /health\n", verb


def _has_token(headers: Sequence[str], token: str) -> bool:
    named = [line.partition(":") for line in headers]
    values = [value.strip(" \t") for name, _, value in named if name.lower() == "authorization"]
    return len(values) == 1 and is_same(values[0], f"Bearer {token}")


def _is_certified(connected: socket.socket) -> bool:
    return isinstance(connected, ssl.SSLSocket) and bool(connected.getpeercert())


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
