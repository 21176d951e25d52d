"""What a server counts: requests, bytes, seconds, batches, cache rows; told as Prometheus text (format 0.0.4).

One lock for all of it: a request costs under ten microseconds, and every text is of one moment. No library, so
nothing but counters, gauges and histograms with fixed buckets.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KINDS = ("info", "sample", "gather", "split", "batch")
OTHER = "other"  # what a client may call a request is unbounded, what is counted is not
BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Outcome = Literal["ok", "refused", "failed"]
Labels = tuple[str, ...]


class Family(NamedTuple):
    """One metric: its type, what it tells, and the names of its labels."""

    type: Literal["counter", "gauge", "histogram"]
    text: str
    labels: Labels = ()


REQUESTS, SECONDS = "hoploom_requests_total", "hoploom_request_seconds"
RECEIVED, SENT = "hoploom_received_bytes_total", "hoploom_sent_bytes_total"
UNDER_WAY, STREAMS = "hoploom_requests_under_way", "hoploom_open_streams"
BATCHES, CACHE_ROWS, HELD = "hoploom_batches_total", "hoploom_cache_rows_total", "hoploom_held_bytes"
DRAINING = "hoploom_draining"

FAMILIES: Mapping[str, Family] = {
    REQUESTS: Family("counter", "Requests answered; refused: the client's mistake, failed: ours.", ("kind", "outcome")),
    SECONDS: Family("histogram", "Seconds from a request to its answer.", ("kind",)),
    RECEIVED: Family("counter", "Bytes of tensors in requests.", ("kind",)),
    SENT: Family("counter", "Bytes of tensors in answers.", ("kind",)),
    UNDER_WAY: Family("gauge", "Requests being answered now."),
    STREAMS: Family("gauge", "Streams that clients hold open."),
    BATCHES: Family("counter", "Batches made."),
    CACHE_ROWS: Family("counter", "Rows wanted of other parts, by whether the cache had them.", ("outcome",)),
    HELD: Family("gauge", "Bytes of batches made and not yet sent."),
    DRAINING: Family("gauge", "1 while the server finishes what is in flight and refuses new requests."),
}


@dataclass
class Request:
    """What a request turned out to be; whoever answers it fills this in."""

    outcome: Outcome = "ok"
    received: int = 0  # bytes
    sent: int = 0


class Histogram:
    """How many observations fell into each bucket, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(BUCKETS, value)] += 1
        self.sum += value


class Metrics:
    """The counts of one server, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = {name: {} for name in FAMILIES}
        self._histograms: dict[Labels, Histogram] = {}
        for name, family in FAMILIES.items():
            if not family.labels:
                self._values[name][()] = 0
        self._values[CACHE_ROWS] = {("hit",): 0, ("miss",): 0}

    @contextmanager
    def request(self, kind: str) -> Iterator[Request]:
        """Counts one request from its first byte to its last; an error that leaves the block makes it failed."""
        known = kind if kind in KINDS else OTHER
        told = Request()
        begun = time.perf_counter()
        self.add(UNDER_WAY, 1)
        try:
            yield told
        except BaseException:
            told.outcome = "failed"
            raise
        finally:
            self._finish(known, told, time.perf_counter() - begun)

    def _finish(self, kind: str, told: Request, seconds: float) -> None:
        with self._lock:
            self._add(UNDER_WAY, -1)
            self._add(REQUESTS, 1, kind, told.outcome)
            self._add(RECEIVED, told.received, kind)
            self._add(SENT, told.sent, kind)
            self._histograms.setdefault((kind,), Histogram()).observe(seconds)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Counts a stream as open."""
        self.add(STREAMS, 1)
        try:
            yield
        finally:
            self.add(STREAMS, -1)

    def count_cache(self, hits: int, misses: int) -> None:
        """Rows that a cache had, and that it had not."""
        with self._lock:
            self._add(CACHE_ROWS, hits, "hit")
            self._add(CACHE_ROWS, misses, "miss")

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter or a gauge, e.g. add(HELD, batch_bytes)."""
        with self._lock:
            self._add(name, amount, *labels)

    def put(self, name: str, value: float) -> None:
        """Set a gauge."""
        assert FAMILIES[name].type == "gauge", name
        with self._lock:
            self._values[name][()] = value

    def value(self, name: str, *labels: str) -> float:
        """What a counter or gauge stands at."""
        with self._lock:
            return self._values[name].get(labels, 0)

    def _add(self, name: str, amount: float, *labels: str) -> None:
        family, values = FAMILIES[name], self._values[name]
        assert len(labels) == len(family.labels), (name, labels)
        assert family.type != "counter" or amount >= 0, (name, amount)
        values[labels] = values.get(labels, 0) + amount

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        with self._lock:
            lines = [line for name in FAMILIES for line in self._lines(name)]
        return "\n".join(lines) + "\n"

    def _lines(self, name: str) -> Iterator[str]:
        family = FAMILIES[name]
        yield f"# HELP {name} {family.text}"
        yield f"# TYPE {name} {family.type}"
        for labels, value in sorted(self._values[name].items()):
            yield _sample(name, zip(family.labels, labels, strict=True), value)
        if family.type == "histogram":
            for labels, histogram in sorted(self._histograms.items()):
                yield from _histogram_lines(name, tuple(zip(family.labels, labels, strict=True)), histogram)


def _histogram_lines(name: str, labels: tuple[tuple[str, str], ...], histogram: Histogram) -> Iterator[str]:
    so_far = 0
    for bound, count in zip((*map(str, BUCKETS), "+Inf"), histogram.counts, strict=True):
        so_far += count
        yield _sample(f"{name}_bucket", (*labels, ("le", bound)), so_far)
    yield _sample(f"{name}_sum", labels, histogram.sum)
    yield _sample(f"{name}_count", labels, so_far)


def _sample(name: str, labels: "Iterator[tuple[str, str]] | tuple[tuple[str, str], ...]", value: float) -> str:
    inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
    return f"{name}{{{inner}}} {value!r}" if inner else f"{name} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
