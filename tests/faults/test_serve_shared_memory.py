"""Memory that servers and clients on one host share: right while it is held, used again, and gone with either side."""

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TESTS
from support.batch_servers import listening
from support.batches import assert_same_batches
from support.fleets import save_wide
from support.servers import Server, serving
from support.until import until
from torch import Tensor

import hoploom
from hoploom import Store
from hoploom.serve.client import Peer, read_message
from hoploom.serve.connect import ServedBatches
from hoploom.serve.graph_server import BatchOptions
from hoploom.serve.handshake import LostError
from hoploom.serve.security import ClientSecurity, Reloading
from hoploom.serve.server import ServerLimits
from hoploom.serve.wire import Message

pytestmark = pytest.mark.timeout(180)
NODES, WIDTH = 4000, 64
STEPS = 10
GATHER = {"ask": "gather", "part": 0, "wanted": [["node", "x", 0]]}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wide(tmp_path_factory.mktemp("shared"), NODES, 20_000, WIDTH)


@pytest.fixture(scope="module")
def process(path: Path) -> Iterator[Server]:
    with serving(path, [[]]) as (process,):
        yield process


@pytest.fixture
def server(process: Server) -> Iterator[Server]:
    """No test ends it, and each leaves it as it was."""
    pid, before = process.process.pid, files(process.process.pid)
    yield process
    until(lambda: maps(pid) == [] and files(pid) == before)


def loader(store: Store, **options: Any) -> hoploom.NeighborLoader:
    given: dict[str, Any] = {"batch_size": NODES // STEPS, "num_workers": 0, "seed": 3, "shuffle": True, **options}
    return hoploom.NeighborLoader(store, [2], torch.arange(NODES), **given)


def maps(pid: int | str = "self") -> list[tuple[int, int, str]]:
    """(first byte, the one after the last, inode) of what a process has mapped of shared memory of ours."""
    lines = re.findall(r"^(\w+)-(\w+) .* (\d+) +/memfd:hoploom", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
    return [(int(begin, 16), int(end, 16), inode) for begin, end, inode in lines]


def files(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def is_shared(tensor: Tensor) -> bool:
    return any(begin <= tensor.data_ptr() < end for begin, end, _ in maps())


def rows_of(peer: Peer, ids: Tensor) -> Tensor:
    (rows,) = peer.request(Message(GATHER, [ids]), read_message).tensors
    assert isinstance(rows, Tensor)
    return rows


def test_batches_stay_right_while_others_come_and_after_the_server_is_killed(path: Path) -> None:
    expected = list(loader(hoploom.open(path)))
    with serving(path, [[]]) as (server,), hoploom.connect(server.address, timeout=60) as store:
        kept = list(loader(store))
        assert all(is_shared(batch.x) for batch in kept)
        for _ in range(3):
            assert_same_batches(expected, loader(store))
        assert_same_batches(expected, kept)
        server.kill()
        assert_same_batches(expected, kept)
    assert_same_batches(expected, kept)  # the store is closed, too
    assert len({inode for *_, inode in maps()}) >= STEPS
    kept.clear()
    until(lambda: maps() == [])


def test_what_a_client_writes_into_its_batch_it_alone_sees(path: Path) -> None:
    """Segments go back when nothing lies there any more, and are filled again."""
    expected = list(loader(hoploom.open(path)))
    with listening(path) as server, hoploom.connect(server.address, timeout=60) as store:
        for batch in loader(store):
            batch.x.zero_()
        assert_same_batches(expected, loader(store))


def test_segments_are_used_again_and_a_part_of_one_holds_it(path: Path) -> None:
    with listening(path) as server, Peer(server.address, Reloading(ClientSecurity()), 30.0) as peer:
        seen = set()
        for step in range(50):
            ids = torch.arange(step, step + 1000)
            rows = rows_of(peer, ids)
            assert torch.equal(rows[:, 0], ids.float())
            seen.add(rows.data_ptr())
            del rows
        assert len(seen) <= 2
        held = rows_of(peer, torch.arange(1000))[990:, :1].view(-1)
        for step in range(20):
            rows_of(peer, torch.arange(1000) + step)
        assert held.tolist() == list(range(990, 1000))


def test_a_tensor_that_is_sent_twice_is_held_by_both(path: Path) -> None:
    wanted = {**GATHER, "wanted": [["node", "x", 0]] * 2}
    with listening(path) as server, Peer(server.address, Reloading(ClientSecurity()), 30.0) as peer:
        first, second = peer.request(Message(wanted, [torch.arange(1000)]), read_message).tensors
        del first
        for step in range(1, 5):
            rows_of(peer, torch.arange(1000) + step)
        assert torch.equal(second[:, 0], torch.arange(1000.0))  # type: ignore[index]


@pytest.mark.parametrize(
    ("limits", "most"),
    [(ServerLimits(shared=600_000), 600_000), (ServerLimits(), 64 * 400_000)],
    ids=["bytes", "segments"],
)
def test_a_client_that_keeps_batches_gets_the_same_over_the_socket(path: Path, limits: ServerLimits, most: int) -> None:
    """Once its share of the memory is used up."""
    options = {"batch_size": 400 if most < 1_000_000 else 40}
    expected = list(loader(hoploom.open(path), **options))
    with (
        listening(path, BatchOptions(threads=2), limits) as server,
        hoploom.connect(server.address, timeout=60) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        if most > 1_000_000:
            for module in ("shared_memory", "wire"):
                patch.setattr(f"hoploom.serve.{module}.SHARED_FROM", 1000)
        kept = list(loader(store, **options))
        assert {is_shared(batch.x) for batch in kept} == {True, False}
        assert sum(end - begin for begin, end, _ in maps()) <= 2 * most  # both sides are in this process
        assert_same_batches(expected, kept)
        del kept
        assert_same_batches(expected, loader(store, **options))


@pytest.mark.parametrize("aggregate", [None, "mean"])
def test_rows_that_are_gathered_and_not_sent_keep_no_memory(
    path: Path, aggregate: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over one connection, as each has segments of its own, and when another one is opened is chance."""
    monkeypatch.setattr(ServedBatches, "least_threads", 1)
    with listening(path) as server, hoploom.connect(server.address, timeout=60) as store:
        list(loader(store, aggregate=aggregate))
        before = len(maps())
        for _ in range(5):
            for _ in loader(store, aggregate=aggregate):
                pass
        assert server.metrics.value("hoploom_open_streams") == 1
        assert len(maps()) <= before


def test_a_client_with_too_many_files_open_is_told_so(server: Server) -> None:
    """One that may take no descriptor of a segment, and then not even a socket."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Peer(server.address, Reloading(ClientSecurity()), 30.0) as peer, ExitStack() as held:
        assert rows_of(peer, torch.arange(2)).shape == (2, WIDTH)
        try:
            asked = Message(GATHER, [torch.arange(1000)])
            pending = peer.send(asked)
            resource.setrlimit(resource.RLIMIT_NOFILE, (files() - 1, limits[1]))  # files() has one itself
            said = "cannot be asked: this process has too many files open; raise `ulimit"
            for ask in (lambda: peer.read(pending, read_message), lambda: peer.send(asked)):
                with suppress(OSError):
                    while True:
                        held.callback(os.close, os.dup(0))
                with pytest.raises(LostError, match=said):
                    ask()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        held.close()
        assert rows_of(peer, torch.arange(1000)).shape == (1000, WIDTH)


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("near", [True, False], ids=["nearby", "over TCP"])
def test_files_and_memory_stay_flat(count: int, near: bool, server: Server, request: pytest.FixtureRequest) -> None:
    if not near:
        request.getfixturevalue("tcp_alone")
    pid = server.process.pid

    def held() -> tuple[int, int, int, int]:
        return files(), len(maps()), files(pid), len(maps(pid))

    generator = torch.Generator().manual_seed(1)
    begun = files(), len(maps())
    with Peer(server.address, Reloading(ClientSecurity()), 30.0) as peer:
        before = held()
        for step in range(count):
            ids = torch.randint(NODES, (int(torch.randint(1, 600, (1,), generator=generator)),), generator=generator)
            assert torch.equal(rows_of(peer, ids)[:, -1], ids.float())
            if step == 100:
                before = held()
        assert (before[1] > 0) is near
        after = held()
        assert (after[0], after[2]) == (before[0], before[2])
        assert max(after[1], after[3]) <= 8
    assert (files(), len(maps())) == begun


def test_a_killed_client_leaves_no_memory_with_the_server(server: Server) -> None:
    pid = server.process.pid
    script = """
import sys, torch
from faults.test_serve_shared_memory import Peer, Reloading, ClientSecurity, maps, rows_of
peer = Peer(sys.argv[1], Reloading(ClientSecurity()), 30.0)
kept = [rows_of(peer, torch.arange(1000)) for _ in range(5)]
print(len(maps()), flush=True)
sys.stdin.read()
"""
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TESTS)!r}){script}", server.address]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "5\n"
            assert len(maps(pid)) == 5
        finally:
            client.send_signal(signal.SIGKILL)
