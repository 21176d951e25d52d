"""Servers that die, hang or are cut off in the middle of an epoch: the same batches, or an error in time."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.batches import assert_same_batches
from support.fleets import CLIENT, MODES, PARTS, WORKER, connect, loader, save, warm_up, within
from support.proxy import Proxy
from support.servers import Server, addresses_of, restart_dead, serving_together
from support.until import until

import hoploom
from hoploom import PeerError, Store
from hoploom.serve.client import LostError, Peer
from hoploom.serve.peers import Peers
from hoploom.train import Context

pytestmark = pytest.mark.timeout(240)
LONG = 60.0  # seconds for what must come to a good end, however busy the machine
SHORT = 6.0  # seconds that a request may take where nobody answers it
every_mode = pytest.mark.parametrize("mode", MODES)
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def undisturbed(path: Path) -> list[Any]:
    return list(loader(hoploom.open(path)))


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def fleet(path: Path, temporary: Path) -> Iterator[list[Server]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        with serving_together(path, PARTS, "--timeout", "3", "--metrics", "127.0.0.1:0") as servers:
            warm_up(servers)
            yield servers


@pytest.fixture
def servers(fleet: list[Server]) -> Iterator[list[Server]]:
    restart_dead(fleet)
    yield fleet
    for server in fleet:
        server.resume()


def _epoch(store: Store, disturb: Any, at: int = 5) -> list[Any]:
    """The batches of an epoch that is disturbed once some of them are here."""
    found = []
    for batch in loader(store):
        found.append(batch)
        if len(found) == at:
            disturb()
    return found


@pytest.mark.parametrize("mode", [pytest.param(WORKER, marks=slow), CLIENT])  # both wait for the same silence
def test_a_stopped_server_is_left_for_its_replica(
    mode: str, servers: list[Server], path: Path, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, note_lost = [], Peers._note_loss

    def counted(peers: Peers, peer: Peer, error: LostError) -> None:
        losses.append(peer.address)
        note_lost(peers, peer, error)

    monkeypatch.setattr(Peers, "_note_loss", counted)
    with connect(mode, addresses_of(servers), path, timeout=9) as store:  # a third of it in silence
        with within(LONG):
            assert_same_batches(undisturbed, _epoch(store, servers[1].pause))
        losses.clear()
        with within(LONG):
            assert_same_batches(undisturbed, loader(store))
        assert servers[1].address not in losses  # it was not asked again
        servers[1].resume()
        servers[2].pause()
        with within(LONG):  # and it is asked when it is back
            assert_same_batches(undisturbed, loader(store))


@pytest.mark.parametrize("mode", [WORKER, pytest.param(CLIENT, marks=slow)])
def test_a_stopped_server_without_a_replica_is_named_in_time(
    mode: str, servers: list[Server], path: Path, undisturbed: list[Any]
) -> None:
    with connect(mode, addresses_of(servers), path, timeout=SHORT) as store:
        assert_same_batches(undisturbed, loader(store))
        for server in servers[1:]:
            server.pause()
        with within(LONG), pytest.raises(PeerError, match=servers[1].address):
            list(loader(store))
        for server in servers[1:]:
            server.resume()
        assert_same_batches(undisturbed, loader(store))


@every_mode
def test_a_line_that_is_cut_and_mended_changes_no_batch(
    mode: str, servers: list[Server], path: Path, undisturbed: list[Any], tcp_alone: None
) -> None:
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(server.address)) for server in servers]
        store = stack.enter_context(connect(mode, [proxy.address for proxy in proxies], path, timeout=LONG))
        deployment: Any = store.deployment

        def cut() -> None:
            for proxy in proxies:
                proxy.cut()
            mending.start()

        def mend() -> None:  # once somebody has been refused: all threads may wait for that one part
            until(lambda: any("does not listen" in peer.last_loss for peer in deployment.peers._peers))
            for proxy in proxies:
                proxy.mend()

        mending = threading.Thread(target=mend)
        assert_same_batches(undisturbed, _epoch(store, cut))
        mending.join()


def test_killed_servers_are_replaced_and_asked_again_once_they_are_back(
    servers: list[Server], path: Path, undisturbed: list[Any]
) -> None:
    """One is killed while its replica serves; restarted, it is all there is of its parts, in the same epoch."""

    def restart_and_kill_the_replica() -> None:
        servers[1].restart()
        servers[2].kill()

    disturbances = {5: servers[1].kill, 15: restart_and_kill_the_replica}
    with ExitStack() as stack:
        stores = [stack.enter_context(connect(mode, addresses_of(servers), path, LONG)) for mode in MODES]
        found: list[list[Any]] = [[], []]
        for both in zip(*map(loader, stores), strict=True):
            for batches, batch in zip(found, both, strict=True):
                batches.append(batch)
            disturbances.get(len(found[0]), lambda: None)()
        assert len(found[0]) > 20
        for batches in found:
            assert_same_batches(undisturbed, batches)


def test_killed_servers_without_a_replica_are_named_by_every_client_and_rank_and_leave_nothing(
    servers: list[Server], path: Path, temporary: Path, tmp_path: Path
) -> None:
    """Rank 0 kills them, while loops of this process are under way."""
    files, threads = set(path.rglob("*")), threading.active_count()
    with ExitStack() as stack:
        loops = []
        for mode in MODES:
            store = stack.enter_context(connect(mode, addresses_of(servers), path, timeout=SHORT))
            loops.append(iter(loader(store)))
            next(loops[-1])
        _kill_from_a_rank(servers, path, tmp_path)
        for loop in loops:
            with within(LONG), pytest.raises(PeerError, match=servers[1].address):
                list(loop)
    assert (set(path.rglob("*")), list(temporary.iterdir())) == (files, [])
    until(lambda: threading.active_count() <= threads)


def lose_a_server(context: Context, servers: str, path: str, victims: str, folder: str) -> None:
    done = 0
    with connect(WORKER, servers.split(","), Path(path), timeout=6) as store:
        for _ in range(1000):
            for _ in loader(store, rank=context.rank, world_size=context.world_size):
                done += 1
                Path(folder, str(context.rank)).write_text(f"{os.getpid()} {done}")
                context.max(done)  # together, step by step
                if done == 3 and context.is_main:
                    Path(folder, "killed").touch()
                    for victim in victims.split(","):
                        os.kill(int(victim), signal.SIGKILL)


def _kill_from_a_rank(servers: list[Server], path: Path, folder: Path) -> None:
    """All but the first, in the middle of an epoch of two ranks, which both end."""
    victims = ",".join(str(server.process.pid) for server in servers[1:])
    given = [",".join(addresses_of(servers)), str(path), victims, str(folder)]
    with pytest.raises(PeerError, match=rf"^rank \d: no answer .*{servers[1].address} "):
        hoploom.spawn(lose_a_server, 2, given, timeout=30)
    ended = time.time()
    assert ended - (folder / "killed").stat().st_mtime < LONG
    for rank in range(2):
        pid, batches = (folder / f"{rank}").read_text().split()
        assert int(batches) >= 3
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
