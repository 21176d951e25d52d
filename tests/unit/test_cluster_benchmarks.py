"""Benchmarks of clusters can be tried out, with the last commit's side played by this one; long lines delay and lose
nothing."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support import ROOT
from support.ports import free_ports

BENCHMARKS = ROOT / "benchmarks"
DELAY = 0.2  # seconds, one way
SENT = bytes(range(256)) * (1 << 14)  # 4 MB: more than sockets hold


@contextmanager
def _delayed(target: int) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """The port of a line to another one, and the process that delays."""
    (port,) = free_ports(1)
    way = f"127.0.0.1:{port}=127.0.0.1:{target}"
    command = [sys.executable, str(BENCHMARKS / "delaying.py"), way]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield port, process
        finally:
            process.kill()


def _set(process: "subprocess.Popen[str]", delay: float) -> float:
    """Seconds of a core so far."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps({"delay": delay}), file=process.stdin, flush=True)
    return float(json.loads(process.stdout.readline())["cores"])


def _echo(listening: socket.socket) -> None:
    """Send back what comes, once it has ended, of two connections."""
    for _ in range(2):
        accepted, _ = listening.accept()
        with accepted:
            came = b""
            while some := accepted.recv(1 << 16):
                came += some
            accepted.sendall(came)


def _echoed(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 10) as connected:
        connected.sendall(sent)
        connected.shutdown(socket.SHUT_WR)
        came = b""
        while some := connected.recv(1 << 16):
            came += some
    return came


def test_a_longer_line_delays_every_byte_both_ways_and_loses_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, _delayed(listening.getsockname()[1]) as (port, process):
        thread = threading.Thread(target=_echo, args=(listening,), daemon=True)
        thread.start()
        assert _set(process, DELAY) > 0
        begin = time.perf_counter()
        assert _echoed(port, b"a") == b"a"
        assert time.perf_counter() - begin >= 2 * DELAY
        _set(process, 0.001)
        assert _echoed(port, SENT) == SENT
        thread.join(10)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["serving", "server_client", "worker_mode", "glt", "lines"])
def test_every_benchmark_of_clusters_can_be_rehearsed(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "graphs"
    before = folder / "hoploom-63c9d6b"
    python = before / ".venv" / "bin" / "python"
    if not python.exists():  # to build it takes minutes
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        (before / "benchmarks").symlink_to(BENCHMARKS)
        (before / "made").touch()
    environment = os.environ | {"HOPLOOM_BENCH_DIR": str(folder)}
    environment.pop("HOPLOOM_PEERS", None)
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--tiny", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    if name == "lines" and not found["rows"]:
        pytest.skip(found["absent"][0])
    assert found["rows"]
    assert all(row["ours"]["median"] > 0 for row in found["rows"] if row["unit"] != "% of it")
    assert all(row["ratio"] is None or row["ratio"] > 0 for row in found["rows"])
