"""Answers that take long, clients that stop reading, many requests at once, another version: none of them hangs."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pyarrow.flight as flight
import pytest
import torch
from support.batches import assert_same_batches
from support.elsewhere import served_by
from support.fleets import within
from support.graphs import random_graph, ring, save_in_parts
from support.servers import Server, addresses_of, serving, serving_by

import hoploom
from hoploom import PeerError
from hoploom.serve import wire
from hoploom.serve.address import read_addresses
from hoploom.serve.wire import Message
from hoploom.store import Wanted

pytestmark = pytest.mark.timeout(180)
NODES, WIDTH = 20_000, 256  # 20 MB of features
MEMORY = 64_000_000  # of which three whole batches have no room
SLOW = """
import sys, threading
from hoploom.serve import service, stalls
stalls.BEAT = 0.1
answer = service.Service.answer

def late(self, request):
    if request.header.get("ask") == "gather":
        threading.Event().wait(2.5)
    return answer(self, request)

service.Service.answer = late
"""
NEWER = """
import sys
from hoploom.serve import wire
wire.COMMAND = b"hoploom/99"
"""
MAIN = "\nfrom hoploom.cli import main\nsys.exit(main(sys.argv[1:]))\n"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("attend") / "store"
    data = random_graph(NODES, 60_000, seed=1)
    data.x = torch.arange(NODES, dtype=torch.float32).view(-1, 1).repeat(1, WIDTH)
    hoploom.from_pyg(data).save(path)
    return path


def changed(path: Path, change: str) -> Iterator[list[Server]]:
    """A server of which something was changed before it started."""
    command = [sys.executable, "-c", change + MAIN, "serve", str(path), "--listen", "127.0.0.1:0"]
    with serving_by([command]) as servers:
        yield servers


@pytest.mark.alone  # a server that is not scheduled for a second and a half is silent
def test_a_slow_answer_is_waited_for_and_a_silent_server_is_not(path: Path) -> None:
    for servers in changed(path, SLOW):
        with hoploom.connect(addresses_of(servers), made="here", timeout=3.0) as store:  # silent for at most 1.5 s
            wanted = [Wanted("node", "x", torch.tensor([5, 7]))]
            with within(20.0):
                assert store.features.gather(wanted)[0][:, 0].tolist() == [5.0, 7.0]
            servers[0].pause()
            with within(20.0), pytest.raises(PeerError, match=servers[0].address):
                store.features.gather(wanted)


def test_another_version_is_refused_at_once(path: Path) -> None:
    for servers in changed(path, NEWER):
        with within(10.0), pytest.raises(PeerError, match="install the same Hoploom on both"):
            hoploom.connect(addresses_of(servers), made="here")


def test_a_client_that_stops_reading_does_not_keep_others_waiting(path: Path) -> None:
    with serving(path, [[]], "--memory", str(MEMORY), "--stall", "2") as servers, ExitStack() as stack:
        everything = torch.arange(NODES)
        with hoploom.connect(addresses_of(servers), timeout=30.0) as store:
            batches = list(hoploom.NeighborLoader(store, [1], everything, batch_size=NODES))
            request = _whole_batch(store)
            for _ in range(3):
                _unread(servers[0], request, stack)
            with within(25.0):
                again = list(hoploom.NeighborLoader(store, [1], everything, batch_size=NODES))
            assert_same_batches(batches, again)


def _whole_batch(store: hoploom.Store) -> Message:
    """What a loader over everything asks for."""
    asked: list[Message] = []

    class Recorder:
        num_servers = 1

        def ask(self, request: Message, part: int | None = None, *, pinned: bool = False) -> Message:
            asked.append(request)
            raise PeerError("only recorded")

    recording = replace(store, deployment=served_by(Recorder(), store.identity))
    with pytest.raises(PeerError, match="only recorded"):
        list(hoploom.NeighborLoader(recording, [1], torch.arange(NODES), batch_size=NODES))
    return asked[0]


def _unread(server: Server, request: Message, stack: ExitStack) -> None:
    """Ask, and never read the answer."""
    client = stack.enter_context(
        flight.FlightClient(f"grpc://{server.address}", generic_options=[("grpc.use_local_subchannel_pool", 1)])
    )
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(wire.COMMAND))
    stack.callback(reader.cancel)
    writer.begin(wire.SCHEMA)
    wire.write(writer, request)


def test_many_parts_and_threads_do_not_wait_for_each_other(tmp_path: Path) -> None:
    store = save_in_parts(hoploom.from_pyg(ring(96)), tmp_path / "store", 24)
    with serving(tmp_path / "store", [[]]) as servers:
        addresses = read_addresses(addresses_of(servers))
        with hoploom.connect(addresses, made="here", timeout=20.0, look_ahead=1) as away, within(60.0):
            loaders = [
                hoploom.NeighborLoader(one, [2, 2], torch.arange(96), batch_size=48, num_workers=threads)
                for one, threads in ((store, 0), (away, 8))
            ]
            for _ in range(3):
                assert_same_batches(*loaders)


def test_a_closed_store_answers_at_once(path: Path) -> None:
    with serving(path, [[]]) as servers:
        store = hoploom.connect(addresses_of(servers), made="here")
        store.close()
        with within(2.0), pytest.raises(PeerError, match="the store was closed"):
            store.features.gather([Wanted("node", "x", torch.tensor([1]))])
