"""What a server tells its monitors: the counts, their text line by line, and an endpoint that takes no harm."""

import re
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from support import ROOT
from support.certificates import TOKEN, certificates, mutual_server, server_pair
from support.until import until

from hoploom import ConfigError
from hoploom.serve.metrics import BUCKETS, KINDS, OTHER, Metrics, MetricsEndpoint
from hoploom.serve.security import ServerSecurity, load_pair

DEADLINE = 10.0
SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="[^"\\\n]*",?)+)\})? (-?[0-9.e+-]+)')
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: str) -> Samples:
    """Every sample, after checking that each line is one, or tells what a metric is."""
    assert text.endswith("\n")
    samples: Samples = {}
    for line in text.splitlines():
        if re.match("# (HELP|TYPE) hoploom_", line):
            continue
        found = SAMPLE.fullmatch(line)
        assert found, line
        name, labels, value = found.groups()
        pairs = tuple((key, inner) for key, inner in re.findall(r'([a-z]+)="([^"]*)"', labels or ""))
        assert (name, pairs) not in samples
        samples[name, pairs] = float(value)
    return samples


def test_the_page_of_operations_says_what_a_server_tells() -> None:
    """Names, types, labels and texts of its table, and the kinds of requests below it."""
    page = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| `(hoploom_\w+)` \| (\w+) \| (.*) \| (.*) \|$", page, re.MULTILINE)
    metrics = Metrics()
    for kind in (*KINDS, "anything"):
        with metrics.request(kind):
            pass
    text = metrics.text()
    assert dict(re.findall(r"^# HELP (\w+) (.*)$", text, re.MULTILINE)) == {name: told for name, _, _, told in rows}
    assert re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE) == [(name, kind) for name, kind, _, _ in rows]
    told = {(re.sub("_(sum|count|bucket)$", "", name), key) for name, labels in read(text) for key, _ in labels}
    assert told - {("hoploom_request_seconds", "le")} == {
        (name, label) for name, _, labels, _ in rows for label in re.findall(r"`(\w+)`", labels)
    }
    (kinds,) = re.findall(r"^`kind` is (.*?)\. `outcome`", page, re.MULTILINE | re.DOTALL)
    assert re.findall(r"`(\w+)`", kinds) == [*KINDS, OTHER]


def test_every_request_is_counted_with_its_kind_outcome_and_bytes() -> None:
    metrics = Metrics()
    for size in (10, 20):
        with metrics.request("gather") as told:
            told.received, told.sent = size, size * 400
            assert metrics.value("hoploom_requests_under_way") == 1
    assert metrics.value("hoploom_requests_total", kind="gather", outcome="ok") == 2
    with metrics.request("gather") as told:
        told.outcome = "refused"
    with pytest.raises(RuntimeError), metrics.request("sample"):
        raise RuntimeError
    samples = read(metrics.text())
    requests = {labels: value for (name, labels), value in samples.items() if name == "hoploom_requests_total"}
    assert requests == {
        (("kind", "gather"), ("outcome", "ok")): 2,
        (("kind", "gather"), ("outcome", "refused")): 1,
        (("kind", "sample"), ("outcome", "failed")): 1,
    }
    assert samples["hoploom_received_bytes_total", (("kind", "gather"),)] == 30
    assert samples["hoploom_sent_bytes_total", (("kind", "gather"),)] == 12_000
    assert samples["hoploom_requests_under_way", ()] == 0


def test_what_clients_call_a_request_cannot_grow_the_counts() -> None:
    metrics = Metrics()
    for number in range(50):
        with metrics.request(f'nonsense"\n{number}'):
            pass
    samples = read(metrics.text())
    assert samples["hoploom_requests_total", (("kind", "other"), ("outcome", "ok"))] == 50
    assert len(samples) < 50


def test_buckets_are_cumulative_and_hold_what_they_should() -> None:
    """Requests of 0.0001 (at a bound), 0.3 and 99 seconds."""
    now = [0.0]
    metrics = Metrics(clock=lambda: now[0])
    for seconds in (0.0001, 0.3, 99.0):
        now[0] = 0.0
        with metrics.request("batch"):
            now[0] = seconds
    samples = read(metrics.text())
    counts = [samples["hoploom_request_seconds_bucket", (("kind", "batch"), ("le", str(bound)))] for bound in BUCKETS]
    assert counts == [1 if bound < 0.3 else 2 for bound in BUCKETS]
    assert samples["hoploom_request_seconds_bucket", (("kind", "batch"), ("le", "+Inf"))] == 3
    assert samples["hoploom_request_seconds_count", (("kind", "batch"),)] == 3
    assert samples["hoploom_request_seconds_sum", (("kind", "batch"),)] == pytest.approx(99.3001)


def test_counts_from_many_threads_add_up() -> None:
    metrics = Metrics()

    def work() -> None:
        for _ in range(500):
            with metrics.stream(), metrics.request("sample") as told:
                told.sent = 3

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        read(metrics.text())
    samples = read(metrics.text())
    assert samples["hoploom_sent_bytes_total", (("kind", "sample"),)] == 12_000
    assert samples["hoploom_request_seconds_count", (("kind", "sample"),)] == 4000
    assert {samples[name, ()] for name in ("hoploom_open_streams", "hoploom_requests_under_way")} == {0}


def test_what_is_held_and_cached_is_asked_when_it_is_told() -> None:
    held, rows = [0], [0, 0]
    metrics = Metrics(lambda: held[0], lambda: (rows[0], rows[1]))
    held[0], rows[:] = 100, [16, 4]
    assert metrics.value("hoploom_held_bytes") == 100
    assert [metrics.value("hoploom_cache_rows_total", outcome=outcome) for outcome in ("hit", "miss")] == [16, 4]


class Got(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


def port_of(served: MetricsEndpoint) -> int:
    return int(served.address.rpartition(":")[2])


def send(served: MetricsEndpoint, content: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """All that comes back until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port_of(served)), timeout=DEADLINE) as plain:
        connection = tls.wrap_socket(plain, server_hostname="127.0.0.1") if tls else plain
        connection.sendall(content)
        pieces = list(iter(lambda: connection.recv(65536), b""))
        connection.close()
    return b"".join(pieces)


def get(served: MetricsEndpoint, path: str, *headers: str, tls: ssl.SSLContext | None = None, verb: str = "GET") -> Got:
    lines = (f"{verb} {path} HTTP/1.1", "Host: x", *headers, "", "")
    head, _, text = send(served, "\r\n".join(lines).encode("latin-1"), tls).decode().partition("\r\n\r\n")
    first, *rest = head.split("\r\n")
    return Got(int(first.split()[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in rest)}, text)


def client_context(name: str | None = None, which: int = 0) -> ssl.SSLContext:
    """A client that trusts our CA, and shows a certificate if one is named."""
    made, shown = certificates(), certificates(which=which)
    context = ssl.create_default_context(cadata=made["ca.pem"].decode())
    if name:
        load_pair(context, shown[f"{name}.pem"], shown[f"{name}.key"])
    return context


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def served(metrics: Metrics) -> Iterator[MetricsEndpoint]:
    with MetricsEndpoint(metrics, ("127.0.0.1", 0), ServerSecurity(TOKEN)) as free:
        yield free


def test_on_loopback_it_tells_everybody(metrics: Metrics, served: MetricsEndpoint) -> None:
    with metrics.request("batch"):
        pass
    got = get(served, "/metrics")
    assert (got.status, got.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert read(got.text)["hoploom_requests_total", (("kind", "batch"), ("outcome", "ok"))] == 1
    assert served.warning is None
    assert get(served, "/metrics?name=x", verb="GET").status == 200
    head = get(served, "/metrics", verb="HEAD")
    assert (head.status, head.text) == (200, "")


def test_health_says_when_the_server_drains(metrics: Metrics, served: MetricsEndpoint) -> None:
    got = get(served, "/health")
    assert (got[::2], got.headers["content-type"]) == ((200, "ok\n"), "text/plain; charset=utf-8")
    metrics.draining = True
    assert get(served, "/health")[::2] == (503, "draining\n")


def test_other_paths_and_verbs_are_refused(served: MetricsEndpoint) -> None:
    for path in ("/", "/metrics/", "/../etc/passwd", "http://x/metrics", "/%6detrics"):
        got = get(served, path)
        assert got[::2] == (404, "there are /metrics and /health\n"), path
        assert got.headers["content-type"] == "text/plain; charset=utf-8"
    for verb in ("POST", "PUT", "DELETE", "OPTIONS", "NONSENSE"):
        assert get(served, "/metrics", verb=verb).status == 501
    assert get(served, "/health").headers["server"].strip() == "hoploom"


def test_beyond_loopback_it_refuses_to_be_open(metrics: Metrics) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=r"--metrics 0\.0\.0\.0 is reached from other hosts, and nothing protects"):
        MetricsEndpoint(metrics, ("0.0.0.0", 0))
    assert threading.active_count() == before
    with MetricsEndpoint(metrics, ("0.0.0.0", 0), insecure=True) as served:
        assert "--insecure" in str(served.warning)
        assert get(served, "/metrics").status == 200


def test_beyond_loopback_it_asks_for_the_token(metrics: Metrics) -> None:
    with MetricsEndpoint(metrics, ("0.0.0.0", 0), ServerSecurity(TOKEN)) as served:
        assert "without TLS" in str(served.warning)
        right = f"Authorization: Bearer {TOKEN}"
        assert get(served, "/metrics", right).status == 200
        wrong = ((), (f"{right}x",), (right[:-1],), (right, right), ("Authorization: \xff",), (f"Cookie: {TOKEN}",))
        for headers in wrong:
            got = get(served, "/metrics", *headers)
            assert got.status == 401, headers
            assert got.headers["www-authenticate"] == "Bearer"
            assert got.headers["content-type"] == "text/plain; charset=utf-8"
            assert "hoploom_" not in got.text
        assert get(served, "/health").status == 200  # for probes, which have no token
        assert get(served, "/nothing").status == 401


def test_beyond_loopback_it_speaks_tls(metrics: Metrics) -> None:
    with MetricsEndpoint(metrics, ("0.0.0.0", 0), ServerSecurity(TOKEN, *server_pair(certificates()))) as served:
        assert served.warning is None
        tls = client_context()
        assert get(served, "/metrics", f"Authorization: Bearer {TOKEN}", tls=tls).status == 200
        assert get(served, "/metrics", tls=tls).status == 401
        assert send(served, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
        stranger = ssl.create_default_context(cadata=certificates(which=1)["ca.pem"].decode())
        with pytest.raises(ssl.SSLCertVerificationError):
            get(served, "/health", tls=stranger)


def test_beyond_loopback_it_asks_for_the_certificate_that_the_server_asks_for(metrics: Metrics) -> None:
    with MetricsEndpoint(metrics, ("0.0.0.0", 0), mutual_server(certificates())) as served:
        assert get(served, "/metrics", tls=client_context("client")).status == 200
        assert get(served, "/metrics", tls=client_context()).status == 403
        assert get(served, "/health", tls=client_context()).status == 200
        with pytest.raises((ssl.SSLError, ConnectionError, IndexError)):
            get(served, "/metrics", tls=client_context("client", which=1))
        assert get(served, "/metrics", tls=client_context("client")).status == 200


def test_a_bug_is_printed_in_one_line_and_others_are_served(
    metrics: Metrics, served: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Metrics, "text", lambda self: {}["gone"])
    assert (send(served, b"GET /metrics HTTP/1.0\r\n\r\n"), get(served, "/health").status) == (b"", 200)
    errors = capfd.readouterr().err
    assert re.fullmatch(r"hoploom: warning: .*hoploom-metrics.*test_serve_metrics.py:\d+: KeyError: 'gone'\n", errors)


def test_junk_and_large_requests_are_ended_and_it_goes_on(served: MetricsEndpoint) -> None:
    junk = (
        b"\x00\xff" * 500 + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nno colon\r\n\r\n",
    )
    for content in junk:
        assert b"hoploom_requests" not in send(served, content) or content == junk[-1]
    for large in (b"GET /" + b"x" * 100_000, b"GET /metrics HTTP/1.1\r\nA: " + b"x" * 100_000):
        try:
            assert b"hoploom_requests" not in send(served, large)
        except ConnectionError:  # it has hung up on what was still being sent
            continue
    assert get(served, "/metrics").status == 200


def test_closing_ends_open_connections_threads_and_the_port(metrics: Metrics) -> None:
    before = set(threading.enumerate())
    with MetricsEndpoint(metrics, ("127.0.0.1", 0), seconds=600) as served:
        port = port_of(served)
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        until(lambda: served._acceptor.num_waiting == 3)
    assert ([connection.recv(1) for connection in idle], set(threading.enumerate())) == ([b""] * 3, before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    served.close()  # once more does no harm


def test_a_port_that_is_taken_is_the_users_mistake(metrics: Metrics, served: MetricsEndpoint) -> None:
    port = port_of(served)
    for host, number, told in (("127.0.0.1", port, "in use"), ("127.0.0.1", 99999, "0-65535"), ("192.0.2.1", 0, "")):
        with pytest.raises(ConfigError, match=rf"--metrics {host}:{number} cannot be listened on: .*{told}.*; give"):
            MetricsEndpoint(metrics, (host, number), ServerSecurity(TOKEN))
