"""Answers that take long, clients that stop reading, many requests at once: none of them hangs."""

import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support.batch_servers import listening, request_of
from support.batches import assert_same_batches
from support.fleets import save_wide, within
from support.graphs import ring, save_in_parts
from support.servers import OneProcess
from support.until import until
from support.wires import over_tcp

import hoploom
from hoploom import PeerError
from hoploom.serve import wire
from hoploom.serve.client import UnavailableError, read_message
from hoploom.serve.graph_server import BatchOptions
from hoploom.serve.server import ServerLimits
from hoploom.serve.wire import Message
from hoploom.store import Wanted

pytestmark = pytest.mark.timeout(180)
NODES, WIDTH = 20_000, 256  # 20 MB of features
FIVE = Message({"ask": "gather", "part": 0, "wanted": [["node", "x", 0]]}, [torch.tensor([5])])
MEMORY = 64_000_000  # of which three whole batches have no room


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wide(tmp_path_factory.mktemp("attend"), NODES, 60_000, WIDTH)


def test_a_short_timeout_does_not_make_a_slow_answer_a_lost_one(path: Path) -> None:
    wanted = [Wanted("node", "x", torch.tensor([5, 7]))]
    with (
        listening(path, seconds=2.5) as slow,
        hoploom.connect(slow.address, made="here", timeout=3.0) as store,  # which may be silent for 1.5 s
    ):
        assert store.features.gather(wanted)[0][:, 0].tolist() == [5.0, 7.0]


def test_a_server_that_only_says_that_it_makes_an_answer_is_left_at_the_deadline(path: Path) -> None:
    wanted = [Wanted("node", "x", torch.tensor([5, 7]))]
    with (
        listening(path, limits=ServerLimits(beat=0.1), seconds=20.0) as slow,
        hoploom.connect(slow.address, made="here", timeout=2.0) as store,
        within(6.0),
        pytest.raises(PeerError, match=r"no answer for part 0 within 2 seconds .* is still making its answer"),
    ):
        store.features.gather(wanted)


def test_an_answer_that_is_read_late_comes_from_a_replica_where_its_own_server_has_ended(path: Path) -> None:
    """The time for an answer begins when somebody waits for it."""
    with (
        listening(path) as one,
        listening(path) as other,
        hoploom.connect([one.address, other.address], made="here", timeout=1.0) as store,
    ):
        peers = store.deployment.peers  # type: ignore[union-attr]
        finish = peers.begin(FIVE, 0, read_message)
        time.sleep(1.2)  # longer than the timeout
        for peer in peers._peers:
            for conversation in [*peer._open]:
                conversation.connection.cut()
        (rows,) = finish().tensors
        assert rows[0, 0] == 5  # type: ignore[index]


def test_a_server_that_stands_still_is_left_at_the_deadline(path: Path) -> None:
    """It may be silent for longer than there is time left."""
    with (
        listening(path, limits=ServerLimits(beat=3600.0), seconds=60.0) as silent,
        hoploom.connect(silent.address, made="here", timeout=6.0) as store,  # which may be silent for 3 s
    ):
        (peer,) = store.deployment.peers._peers  # type: ignore[union-attr]
        pending, began = peer.send(FIVE), time.monotonic()
        with pytest.raises(UnavailableError, match="has not answered in full; ask for less at once"):
            peer.read(pending, read_message, began + 0.5)
        assert time.monotonic() - began < 2.5


def test_a_client_that_stops_reading_does_not_keep_others_waiting(path: Path) -> None:
    everything = torch.arange(NODES)
    with (
        listening(path, BatchOptions(threads=4, memory=MEMORY), ServerLimits(stall=3.0)) as server,
        hoploom.connect(server.address, timeout=60.0) as store,
        ExitStack() as stack,
    ):
        batches = list(hoploom.NeighborLoader(store, [1], everything, batch_size=NODES))
        request = request_of(store, NODES, NODES)
        for _ in range(3):
            wire.write_message(stack.enter_context(over_tcp(server.address)), request)  # the answer is never read
        until(lambda: server.metrics.value("hoploom_held_bytes") > MEMORY / 2)  # so that another has no room
        again = list(hoploom.NeighborLoader(store, [1], everything, batch_size=NODES))
        assert_same_batches(batches, again)


def test_many_parts_and_threads_do_not_wait_for_each_other(tmp_path: Path, server_process: OneProcess) -> None:
    store = save_in_parts(hoploom.from_pyg(ring(96)), tmp_path / "store", 24)
    addresses = server_process.serve(tmp_path / "store", [[]])
    with hoploom.connect(addresses, made="here", timeout=60.0, look_ahead=1) as away:
        loaders = [
            hoploom.NeighborLoader(one, [2, 2], torch.arange(96), batch_size=48, num_workers=threads)
            for one, threads in ((store, 0), (away, 8))
        ]
        for _ in range(3):
            assert_same_batches(*loaders)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_refused_and_takes_nothing_from_the_other(path: Path) -> None:
    """Both would read from one socket, and each get the other's rows."""
    wanted = [Wanted("node", "x", torch.tensor([5, 7]))]
    with listening(path) as server, hoploom.connect(server.address, made="here", timeout=20.0) as store:
        assert store.features.gather(wanted)[0][:, 0].tolist() == [5.0, 7.0]
        until(lambda: server.metrics.value("hoploom_open_streams") == 1)  # what the first connection asked is closed
        child = os.fork()
        if child == 0:
            try:
                with store, pytest.raises(PeerError, match="was forked from one that is connected"):
                    store.features.gather(wanted)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert store.features.gather(wanted)[0][:, 0].tolist() == [5.0, 7.0]
        assert server.metrics.value("hoploom_open_streams") == 1


def test_a_closed_store_answers_at_once(path: Path) -> None:
    with listening(path) as server:
        store = hoploom.connect(server.address, made="here", timeout=60.0)
        store.close()
        with within(30.0), pytest.raises(PeerError, match="the store was closed"):
            store.features.gather([Wanted("node", "x", torch.tensor([1]))])
