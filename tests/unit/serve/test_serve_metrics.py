"""What a server tells its monitors: the counts, their text line by line, and an endpoint that takes no harm."""

import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from support.certificates import TOKEN, certificates, mutual_server, server_pair

from hoploom import ConfigError
from hoploom.serve import endpoint
from hoploom.serve.endpoint import Endpoint
from hoploom.serve.metrics import BATCHES, BUCKETS, CACHE_ROWS, DRAINING, FAMILIES, HELD, SECONDS, STREAMS, Metrics
from hoploom.serve.security import ServerSecurity

DEADLINE = 10.0
SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="[^"\\\n]*",?)+)\})? (-?[0-9.e+-]+)')
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: str) -> Samples:
    """Every sample, after checking each line against the format: families in one piece, HELP and TYPE first."""
    assert text.endswith("\n")
    samples: Samples = {}
    family, seen = "", []
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            seen.append(family)
            assert line == f"# HELP {family} {FAMILIES[family].text}"
        elif line.startswith("# TYPE "):
            assert line == f"# TYPE {family} {FAMILIES[family].type}"
        else:
            found = SAMPLE.fullmatch(line)
            assert found, line
            name, labels, value = found.groups()
            assert re.fullmatch(rf"{family}(_bucket|_sum|_count)?", name)
            pairs = tuple((key, inner) for key, inner in re.findall(r'([a-z]+)="([^"]*)"', labels or ""))
            assert (name, pairs) not in samples
            samples[name, pairs] = float(value)
    assert seen == list(FAMILIES)
    return samples


# --- the counts ----------------------------------------------------------------------------------


def test_a_server_that_did_nothing_tells_zeros() -> None:
    samples = read(Metrics().text())
    assert set(samples.values()) == {0.0}
    assert (CACHE_ROWS, (("outcome", "hit"),)) in samples


def test_every_request_is_counted_with_its_kind_outcome_and_bytes() -> None:
    metrics = Metrics()
    for size in (10, 20):
        with metrics.request("gather") as told:
            told.received, told.sent = size, size * 400
            assert metrics.value("hoploom_requests_under_way") == 1
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


def test_buckets_are_cumulative_and_hold_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of 0.0001 (at a bound), 0.3 and 99 seconds."""
    now = [0.0]
    monkeypatch.setattr("hoploom.serve.metrics.time.perf_counter", lambda: now[0])
    metrics = Metrics()
    for seconds in (0.0001, 0.3, 99.0):
        now[0] = 0.0
        with metrics.request("batch"):
            now[0] = seconds
    samples = read(metrics.text())
    counts = [samples[f"{SECONDS}_bucket", (("kind", "batch"), ("le", str(bound)))] for bound in BUCKETS]
    assert counts == [1 if bound < 0.3 else 2 for bound in BUCKETS]
    assert samples[f"{SECONDS}_bucket", (("kind", "batch"), ("le", "+Inf"))] == 3
    assert samples[f"{SECONDS}_count", (("kind", "batch"),)] == 3
    assert samples[f"{SECONDS}_sum", (("kind", "batch"),)] == pytest.approx(99.3001)


def test_counts_from_many_threads_add_up() -> None:
    metrics = Metrics()

    def work() -> None:
        for _ in range(500):
            with metrics.stream(), metrics.request("sample") as told:
                told.sent = 3
                metrics.add(BATCHES, 1)
                metrics.add(HELD, 100)
                metrics.add(HELD, -100)
                metrics.count_cache(hits=4, misses=1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        read(metrics.text())
    samples = read(metrics.text())
    assert samples[BATCHES, ()] == 4000
    assert samples["hoploom_sent_bytes_total", (("kind", "sample"),)] == 12_000
    assert samples[f"{SECONDS}_count", (("kind", "sample"),)] == 4000
    assert samples[CACHE_ROWS, (("outcome", "hit"),)] == 16_000
    assert samples[CACHE_ROWS, (("outcome", "miss"),)] == 4000
    assert {samples[name, ()] for name in (HELD, STREAMS, "hoploom_requests_under_way")} == {0}


# --- over HTTP -----------------------------------------------------------------------------------


class Got(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


def port_of(served: Endpoint) -> int:
    return int(served.address.rpartition(":")[2])


def send(served: Endpoint, content: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """All that comes back until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port_of(served)), timeout=DEADLINE) as plain:
        connection = tls.wrap_socket(plain, server_hostname="127.0.0.1") if tls else plain
        connection.sendall(content)
        pieces = list(iter(lambda: connection.recv(65536), b""))
        connection.close()
    return b"".join(pieces)


def get(served: Endpoint, path: str, *headers: str, tls: ssl.SSLContext | None = None, verb: str = "GET") -> Got:
    lines = (f"{verb} {path} HTTP/1.1", "Host: x", *headers, "", "")
    head, _, text = send(served, "\r\n".join(lines).encode("latin-1"), tls).decode().partition("\r\n\r\n")
    first, *rest = head.split("\r\n")
    return Got(int(first.split()[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in rest)}, text)


def client_context(name: str | None = None, which: int = 0) -> ssl.SSLContext:
    """A client that trusts our CA, and shows a certificate if one is named."""
    made, shown = certificates(), certificates(which=which)
    context = ssl.create_default_context(cadata=made["ca.pem"].decode())
    if name:
        endpoint.load_pair(context, shown[f"{name}.pem"], shown[f"{name}.key"])
    return context


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def served(metrics: Metrics) -> Iterator[Endpoint]:
    with Endpoint(metrics, "127.0.0.1", 0, ServerSecurity(TOKEN)) as free:
        yield free


def test_on_loopback_it_tells_everybody(metrics: Metrics, served: Endpoint) -> None:
    metrics.add(BATCHES, 7)
    got = get(served, "/metrics")
    assert got.status == 200
    assert got.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert read(got.text)[BATCHES, ()] == 7
    assert served.warning is None
    assert get(served, "/metrics?name=x", verb="GET").status == 200
    head = get(served, "/metrics", verb="HEAD")
    assert (head.status, head.text) == (200, "")


def test_health_says_when_the_server_drains(metrics: Metrics, served: Endpoint) -> None:
    assert get(served, "/health")[::2] == (200, "ok\n")
    metrics.put(DRAINING, 1)
    assert get(served, "/health")[::2] == (503, "draining\n")


def test_other_paths_and_verbs_are_refused(served: Endpoint) -> None:
    for path in ("/", "/metrics/", "/../etc/passwd", "http://x/metrics", "/%6detrics"):
        assert get(served, path)[::2] == (404, "there are /metrics and /health\n"), path
    for verb in ("POST", "PUT", "DELETE", "OPTIONS", "NONSENSE"):
        assert get(served, "/metrics", verb=verb).status == 501
    assert get(served, "/health").headers["server"].strip() == "hoploom"


def test_beyond_loopback_it_refuses_to_be_open(metrics: Metrics) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=r"--metrics 0\.0\.0\.0 is reached from other hosts, and nothing protects"):
        Endpoint(metrics, "0.0.0.0", 0)
    assert threading.active_count() == before
    with Endpoint(metrics, "0.0.0.0", 0, insecure=True) as served:
        assert "--insecure" in str(served.warning)
        assert get(served, "/metrics").status == 200


def test_beyond_loopback_it_asks_for_the_token(metrics: Metrics) -> None:
    with Endpoint(metrics, "0.0.0.0", 0, ServerSecurity(TOKEN)) as served:
        assert "without TLS" in str(served.warning)
        right = f"Authorization: Bearer {TOKEN}"
        assert get(served, "/metrics", right).status == 200
        wrong = ((), (f"{right}x",), (right[:-1],), (right, right), ("Authorization: \xff",), (f"Cookie: {TOKEN}",))
        for headers in wrong:
            got = get(served, "/metrics", *headers)
            assert got.status == 401, headers
            assert got.headers["www-authenticate"] == "Bearer"
            assert "hoploom_" not in got.text
        assert get(served, "/health").status == 200  # for probes, which have no token
        assert get(served, "/nothing").status == 401


def test_beyond_loopback_it_speaks_tls(metrics: Metrics) -> None:
    with Endpoint(metrics, "0.0.0.0", 0, ServerSecurity(TOKEN, *server_pair(certificates()))) as served:
        assert served.warning is None
        tls = client_context()
        assert get(served, "/metrics", f"Authorization: Bearer {TOKEN}", tls=tls).status == 200
        assert get(served, "/metrics", tls=tls).status == 401
        assert send(served, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
        stranger = ssl.create_default_context(cadata=certificates(which=1)["ca.pem"].decode())
        with pytest.raises(ssl.SSLCertVerificationError):
            get(served, "/health", tls=stranger)


def test_beyond_loopback_it_asks_for_the_certificate_that_the_server_asks_for(metrics: Metrics) -> None:
    with Endpoint(metrics, "0.0.0.0", 0, mutual_server(certificates())) as served:
        assert get(served, "/metrics", tls=client_context("client")).status == 200
        assert get(served, "/metrics", tls=client_context()).status == 403
        assert get(served, "/health", tls=client_context()).status == 200
        with pytest.raises((ssl.SSLError, ConnectionError, IndexError)):
            get(served, "/metrics", tls=client_context("client", which=1))
        assert get(served, "/metrics", tls=client_context("client")).status == 200


def test_it_logs_nothing(served: Endpoint, capfd: pytest.CaptureFixture[str]) -> None:
    get(served, "/metrics", f"Authorization: Bearer {TOKEN}")
    get(served, "/nothing")
    send(served, b"\x16\x03\x01junk\r\n\r\n")
    served.close()
    assert capfd.readouterr() == ("", "")


# --- who would do it harm ------------------------------------------------------------------------


def test_junk_and_large_requests_are_ended_and_it_goes_on(served: Endpoint) -> None:
    junk = (
        b"\x00\xff" * 500 + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
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


def until(true: Callable[[], bool]) -> None:
    """Poll until it holds."""
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def dripped(connection: socket.socket) -> float:
    """Send a byte now and then; how long until the other side hangs up."""
    begun = time.monotonic()
    connection.settimeout(0.05)
    while time.monotonic() - begun < DEADLINE:
        try:
            connection.sendall(b"x")
            if connection.recv(1) == b"":
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    return time.monotonic() - begun


@pytest.mark.alone  # every client has 0.4 seconds
@pytest.mark.parametrize("tls", [False, True])
def test_a_slow_client_is_ended_though_it_never_stops_sending(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    monkeypatch.setattr(endpoint, "SECONDS", 0.4)
    security = ServerSecurity(TOKEN, *server_pair(certificates())) if tls else ServerSecurity(TOKEN)
    with (
        Endpoint(metrics, "0.0.0.0" if tls else "127.0.0.1", 0, security) as served,
        socket.create_connection(("127.0.0.1", port_of(served))) as slow,
    ):
        if tls:
            slow.sendall(b"\x16\x03\x01\x3f\xff")  # the header of a long handshake message
        assert dripped(slow) < 3
        assert get(served, "/health", tls=client_context() if tls else None).status == 200


def test_one_connection_too_many_is_refused_and_room_comes_back(
    served: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_CONNECTIONS", 2)
    held = [socket.create_connection(("127.0.0.1", port_of(served))) for _ in range(2)]
    until(lambda: len(served._server._deadlines) == 2)
    with pytest.raises((ConnectionError, IndexError)):
        get(served, "/health")
    for connection in held:
        connection.close()
    until(lambda: not served._server._deadlines)
    assert get(served, "/health").status == 200


@pytest.mark.alone  # measures time
def test_closing_ends_open_connections_threads_and_the_port(metrics: Metrics) -> None:
    before = set(threading.enumerate())
    with Endpoint(metrics, "127.0.0.1", 0) as served:
        port = port_of(served)
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        until(lambda: len(served._server._deadlines) == 3)
        begun = time.monotonic()
    assert time.monotonic() - begun < 3
    assert [connection.recv(1) for connection in idle] == [b""] * 3
    assert set(threading.enumerate()) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    served.close()  # once more does no harm


def test_a_port_that_is_taken_is_the_users_mistake(metrics: Metrics, served: Endpoint) -> None:
    port = port_of(served)
    for host, number, told in (("127.0.0.1", port, "in use"), ("127.0.0.1", 99999, "0-65535"), ("192.0.2.1", 0, "")):
        with pytest.raises(ConfigError, match=rf"--metrics {host}:{number} cannot be listened on: .*{told}.*; give"):
            Endpoint(metrics, host, number, ServerSecurity(TOKEN))


def test_it_listens_on_ipv6_too(metrics: Metrics) -> None:
    try:
        served = Endpoint(metrics, "[::1]", 0)
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with served:
        assert re.fullmatch(r"\[::1\]:\d+", served.address)
