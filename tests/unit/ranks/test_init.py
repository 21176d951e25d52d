"""How a process meets the others: by arguments, half a set of variables, a group that exists; and strangers there."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.networks import hosts
from support.ports import free_ports
from support.rank_processes import run_ranks
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.torch_version import TorchVersion
from torch_geometric.data import Data

import hoploom
from hoploom import ConfigError, PeerError
from hoploom.config.values import is_loopback
from hoploom.ranks.context import Context, init
from hoploom.ranks.environment import LOCALS, RankInfo, with_local_rank
from hoploom.ranks.rendezvous import (
    Rendezvous,
    _claim,
    _listens,
    address_towards,
    hold_local_store,
    interface_of,
    meet,
    rendezvous_store,
)

CORES = len(os.sched_getaffinity(0))


def main(rank: int, *ports: int) -> None:
    again(rank, ports[0])
    half_a_set(rank, ports[1])
    adopted(rank, ports[2])


def check_two(context: Context, rank: int) -> None:
    assert (context.rank, context.world_size, context.local_rank) == (rank, 2, rank)
    assert (context.sum(rank + 1), torch.get_num_threads()) == (3, max(1, CORES // 2))


@contextmanager
def started(rank: int, port: int) -> Iterator[None]:
    """RANK without LOCAL_RANK: the ranks of a host are counted."""
    names = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.MonkeyPatch.context() as patch:
        for name, text in names.items():
            patch.setenv(name, text)
        yield


def again(rank: int, port: int) -> None:
    """Contexts in turn at one port, which a model, a loader or a thread of the last one must not keep."""
    seeds = torch.arange(100)
    data = Data(x=torch.ones(100, 2), edge_index=torch.stack([seeds, (seeds + 1) % 100]))
    for _ in range(2):
        with started(rank, port), hoploom.init(timeout=30) as context:
            model = context.wrap(torch.nn.Linear(2, 1))
            for batch in hoploom.NeighborLoader(data, [1], batch_size=25):
                context.mean_loss(model(batch.x).flatten()[: batch.batch_size]).backward()
            del model


def half_a_set(rank: int, port: int) -> None:
    with started(rank, port), hoploom.init(device="cpu", timeout=30) as context:
        check_two(context, rank)
        assert "GLOO_SOCKET_IFNAME" in os.environ
        with pytest.raises(ConfigError, match=r"torch\.distributed is in use already, with .*backend='nccl'"):
            hoploom.init(backend="nccl")
    assert "GLOO_SOCKET_IFNAME" not in os.environ  # a later context may be one of several hosts


def adopted(rank: int, port: int) -> None:
    """The user's own group: used, never closed, and not crossed by what a context does."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # as PyG's examples set it
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for _ in range(2):
        with hoploom.init(timeout=30) as context:
            check_two(context, rank)
            assert (context.rank_info.address, context.rank_info.port) == ("127.0.0.1", port)
            pending = dist.all_reduce(torch.tensor(float(rank)), async_op=True)
            context.barrier()
            pending.wait()
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    assert total == 3
    dist.destroy_process_group()


def test_ranks_meet_by_half_a_set_of_variables_and_in_a_group_that_exists() -> None:
    words = ["-m", "unit.ranks.test_init", *map(str, free_ports(3))]
    ended = run_ranks(words, [{"OWN_RANK": str(rank)} for rank in range(2)])
    assert [code for code, _ in ended] == [0, 0], "\n".join(said for _, said in ended)


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.1.1") == "lo"
    assert interface_of("192.0.2.1") is None  # nobody's
    if len(socket.if_nameindex()) > 1 and not is_loopback(own := address_towards(socket.gethostname(), 9)):
        assert interface_of(own) not in (None, "lo")


@contextmanager
def listener(kind: str) -> Iterator[int]:
    """Somebody else at the meeting point: the port."""
    kept: list[socket.socket] = []
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(50)

        def answer() -> None:
            with suppress(OSError):
                while True:
                    one, _ = listening.accept()
                    kept.append(one)
                    if kind == "talks":
                        one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    elif kind == "closes":
                        one.close()

        threading.Thread(target=answer, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    for one in kept:
        one.close()


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Call `init` as a launcher's rank."""

    def call(rank: int, world_size: int, port: int, timeout: float, address: str = "127.0.0.1") -> object:
        names = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": address, "MASTER_PORT": port}
        for name, value in names.items():
            monkeypatch.setenv(name, str(value))
        return init(device="cpu", timeout=timeout)

    return call


@pytest.mark.parametrize(("kind", "timeout", "seconds"), [("is silent", 1, 10), ("closes", 1, 10), ("talks", 1200, 60)])
def test_a_stranger_at_the_meeting_point_is_told_within_the_deadline_and_long_before_one_of_hours(
    kind: str, timeout: float, seconds: float, join: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hoploom.ranks.rendezvous.SILENCE", 0.5 if kind == "talks" else 60.0)
    begin = time.monotonic()
    with (
        listener(kind) as port,
        pytest.raises(PeerError, match=f"rank 1 of 2 reached 127.0.0.1:{port}, but what answers there is not rank 0"),
    ):
        join(1, 2, port, timeout)
    assert time.monotonic() - begin < seconds


@pytest.mark.parametrize("host", ["[::1]", "127.0.1.1"])
def test_any_loopback_address_is_where_ranks_of_a_host_meet(host: str) -> None:
    (port,) = free_ports(1)
    with ThreadPoolExecutor() as pool:
        places = [RankInfo(rank, 0, 2, 1, address=host, port=port) for rank in range(2)]
        stores = list(pool.map(lambda place: rendezvous_store(place, timedelta(seconds=5)), places))
    stores[0].set("said", "here")
    assert stores[1].get("said") == b"here"


def test_a_name_that_does_not_resolve_is_told_as_that(join: Callable[..., object]) -> None:
    with pytest.raises(ConfigError, match=r"rank 0 of 2 was given nosuchhost\.invalid:29674, and this host knows no"):
        join(0, 2, 29674, 1, "nosuchhost.invalid")


def test_a_rank_that_never_comes_is_named(join: Callable[..., object]) -> None:
    (port,) = free_ports(1)
    with pytest.raises(
        PeerError, match="rank 0 of 3 was meeting the others, and rank 1, rank 2 did not connect in time"
    ):
        join(0, 3, port, 0.3)
    assert not _listens("127.0.0.1", port)


def test_ranks_on_hosts_in_turn_count_those_of_their_own() -> None:
    place = RankInfo(3, 0, 5, 1, "torchrun", uncounted=LOCALS)
    found = with_local_rank(place, ["a", "b", "a", "b", "a"])
    assert (found.local_rank, found.local_world_size, found.node) == (1, 2, 1)
    found = with_local_rank(replace(place, local_rank=2, uncounted=LOCALS[1:]), ["a", "a", "a", "a", "b"])
    assert (found.local_rank, found.local_world_size, found.node) == (2, 4, 0)


def test_those_who_came_all_name_the_one_who_did_not() -> None:
    store = PrefixStore("test", HashStore())
    notes = [Rendezvous(RankInfo(rank, rank, 3, 3), store) for rank in range(2)]

    def reason(rank: int) -> str:
        with pytest.raises(PeerError) as raised:
            notes[rank].arrive("here", [0.2, 60.0][rank])
        return str(raised.value)

    with ThreadPoolExecutor() as pool:
        first, other = pool.map(reason, range(2))
    assert first.startswith("rank 0 of 3 was meeting the others, and rank 2 did not connect in time; check that it was")
    assert other.startswith("rank 1 of 3 was meeting the others, and rank 0 gave up, as rank 2 did not connect in time")


def test_a_rank_that_fails_before_all_have_met_ends_the_waiting_of_all() -> None:
    store = PrefixStore("test", HashStore())
    Rendezvous(RankInfo(1, 1, 2, 2), store).leave("ended with ConfigError: no GPU 1")
    with pytest.raises(PeerError, match="was meeting the others, and rank 1 ended with ConfigError: no GPU 1"):
        Rendezvous(RankInfo(0, 0, 2, 2), store).arrive("here", 600)


def test_a_second_process_with_the_same_rank_is_refused() -> None:
    store = PrefixStore("test", HashStore())
    store.set("process/1", "4711 on gpu7 some-boot")
    store.set_timeout(timedelta(seconds=5))
    with pytest.raises(
        ConfigError, match=r"rank 1 of 2 is taken already: by process 4711 on gpu7, and this is process"
    ):
        _claim(store, RankInfo(1, 1, 2, 2))


def test_processes_that_count_different_ranks_are_told_so() -> None:
    store = PrefixStore("test", HashStore())
    with ThreadPoolExecutor() as pool:
        made = [Rendezvous(RankInfo(rank, rank, 2 + rank, 2 + rank), store) for rank in range(2)]
        errors = [str(one.exception()) for one in [pool.submit(each.arrive, "here", 30) for each in made]]
    assert any("the others count" in error and "start the same number of processes" in error for error in errors)
    assert all("the others count" in error for error in errors)


@pytest.mark.slow
def test_two_hosts_whose_own_names_are_loopback_meet() -> None:
    code = "import hoploom\nwith hoploom.init(device='cpu', timeout=60) as context:\n    assert context.sum(1) == 2"
    with hosts(2) as found:
        given = {"WORLD_SIZE": "2", "MASTER_ADDR": found[0].name, "MASTER_PORT": "29500"}
        given |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        started = [
            subprocess.Popen(host.command([sys.executable, "-c", code]), env=os.environ | given | {"RANK": str(rank)})
            for rank, host in enumerate(found)
        ]
        assert [process.wait(timeout=90) for process in started] == [0, 0]


@pytest.mark.parametrize(
    ("reopens", "said"),
    [(True, "was meeting the others, and rank 0 did not connect in time"), (False, "cannot reach rank 0 at 127")],
)
def test_a_rank_that_reaches_the_last_meeting_as_it_closes_comes_to_the_next_one_or_is_told(
    reopens: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [hold_local_store(0, timedelta(seconds=5))]
    port = held[0].port

    def close_first(*given: object) -> None:
        monkeypatch.undo()
        held.clear()  # the last meeting's
        try:
            _claim(*given)  # type: ignore[arg-type]
        finally:
            if reopens:
                held.append(hold_local_store(port, timedelta(seconds=5)))

    monkeypatch.setattr("hoploom.ranks.rendezvous._claim", close_first)
    with pytest.raises(PeerError, match=f"rank 1 of 2 {said}"):
        meet(RankInfo(1, 0, 2, 1, port=port), 1)
    assert not reopens or held[0].get("hoploom/rank/0/process/1").startswith(f"{os.getpid()} on ".encode())


@pytest.mark.parametrize(("version", "with_libuv"), [("2.6.0+cu124", False), ("2.7.1", False), ("2.13.0+cpu", True)])
def test_the_meeting_point_asks_libuv_only_for_what_this_torch_has(
    version: str, with_libuv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", TorchVersion(version))
    second = timedelta(seconds=1)
    held = hold_local_store(0, second)
    assert held.libuvBackend == with_libuv
    TCPStore("127.0.0.1", held.port, timeout=second).set("said", "here")
    assert held.get("said") == b"here"


if __name__ == "__main__":
    main(int(os.environ["OWN_RANK"]), *map(int, sys.argv[1:]))
