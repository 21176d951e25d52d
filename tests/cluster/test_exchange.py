"""Ranks that exchange rows and hops with each other: no server, real processes, real faults."""

import os
import re
import signal
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import exchange_workers
from support.exchanges import HOMES, ranks_here
from support.graphs import random_graph, save_in_parts
from support.until import until

import hoploom
from hoploom import BatchError, ConfigError, PeerError, StoreError, TrainError
from hoploom.ops import Frontier
from hoploom.ranks import exchange
from hoploom.ranks.all_to_all import AllToAll
from hoploom.ranks.exchange import Exchange
from hoploom.ranks.inquiries import Inquiry, Reply, answer_size, settle
from hoploom.ranks.rank_part import HeldParts
from hoploom.ranks.spawn import spawn
from hoploom.store.base import Draw
from hoploom.train import init

pytestmark = pytest.mark.usefixtures("one_thread")


def _saved(folder: Path, num_parts: int, seed: int = 1) -> str:
    """60 nodes in so many parts."""
    save_in_parts(hoploom.from_pyg(random_graph(60, 400, seed)), folder, num_parts)
    return str(folder)


@pytest.mark.parametrize("topology", ["local", "parted"])
@pytest.mark.slow
def test_ranks_loop_as_they_like(topology: str, tmp_path: Path) -> None:
    spawn(exchange_workers.loop_in_many_ways, 3, [_saved(tmp_path / "graph", 4), topology], timeout=60)


@pytest.mark.slow
def test_what_differs_is_refused_and_ranks_go_on(tmp_path: Path) -> None:
    paths = [_saved(tmp_path / f"graph-{seed}", 2, seed) for seed in (1, 2)]
    spawn(exchange_workers.refuse_what_differs, 2, paths, timeout=60)


@pytest.mark.slow
def test_a_rank_stays_until_the_last_one_needs_no_rows_and_closes_in_any_order(tmp_path: Path) -> None:
    spawn(exchange_workers.linger, 2, [_saved(tmp_path / "graph", 2)], timeout=60)


@pytest.mark.slow
def test_a_rank_that_is_killed_in_an_exchange_ends_the_others_by_name(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="rank 1 was killed by SIGKILL"):
        spawn(exchange_workers.lose_a_rank, 3, [_saved(tmp_path / "graph", 3), str(tmp_path), "KILL"], timeout=60)
    for rank in (0, 2):
        seconds, _, said = (tmp_path / f"{rank}").read_text().partition(" ")
        assert float(seconds) < 20
        assert "no sign of life came from rank 1" in said


@pytest.mark.slow
def test_a_rank_that_hangs_in_an_exchange_ends_the_others_by_name(tmp_path: Path) -> None:
    def let_it_die() -> None:  # the others' end comes first: `spawn` waits for all
        until(lambda: (tmp_path / "0").exists() and (tmp_path / "2").exists(), "the end of the others")
        os.kill(int((tmp_path / "lost").read_text()), signal.SIGKILL)

    killing = threading.Thread(target=let_it_die)
    killing.start()
    with pytest.raises(hoploom.HoploomError):
        spawn(exchange_workers.lose_a_rank, 3, [_saved(tmp_path / "graph", 3), str(tmp_path), "STOP"], timeout=4)
    killing.join(60)
    for rank in (0, 2):
        assert "no sign of life came from rank 1" in (tmp_path / f"{rank}").read_text()


@pytest.mark.slow
def test_a_rank_that_leaves_with_an_error_is_named_with_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="rank one's own"):
        spawn(exchange_workers.leave_with_an_error, 2, [_saved(tmp_path / "graph", 2), str(tmp_path)], timeout=60)
    assert "rank 1 ended with KeyError: " in (tmp_path / "0").read_text()


@pytest.mark.slow
def test_a_rank_that_leaves_its_store_and_goes_on_is_not_lost(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="rank 2 was killed by SIGKILL"):
        spawn(exchange_workers.leave_a_store_and_go_on, 3, [_saved(tmp_path / "graph", 3), str(tmp_path)], timeout=60)
    for rank in (0, 1):
        assert re.search("no sign of life came from rank 2 |rank 2 was killed", (tmp_path / f"{rank}").read_text())


@pytest.mark.slow
def test_a_rank_that_closes_while_another_waits_for_it_learns_that(tmp_path: Path) -> None:
    spawn(exchange_workers.close_against_a_sum, 2, [_saved(tmp_path / "graph", 2), str(tmp_path)], timeout=60)
    for rank in (0, 1):
        said = (tmp_path / f"{rank}").read_text()
        assert "rank 0 was closing its store, whose rows the other ranks may still need" in said
        assert "but rank 1 was summing over all ranks" in said


@pytest.mark.parametrize("while_rows_are_read", [False, True])
def test_any_error_of_an_answer_is_of_the_rank_that_asks(while_rows_are_read: bool, tmp_path: Path) -> None:
    failing = mock.Mock(side_effect=IndexError("row 7 is not there"))
    gather = HeldParts._gather

    def broken(held: HeldParts, *asked: Any) -> Reply:
        return gather(held, *asked)._replace(write=failing) if while_rows_are_read else failing()

    with ranks_here(Path(_saved(tmp_path / "graph", 4)), "parted") as store:
        wanted = [("node", "x", torch.arange(60))]
        with (
            mock.patch.object(HeldParts, "_gather", broken),
            pytest.raises(BatchError, match="rank 1: IndexError: row 7 is not there"),
        ):
            store.features.gather(wanted)
        (rows,) = store.features.gather(wanted)  # the rounds go on
    assert torch.equal(rows, random_graph(60, 400, 1).x)


def test_a_split_of_another_rank_whose_file_was_truncated_is_an_error(tmp_path: Path) -> None:
    path = Path(_saved(tmp_path / "graph", 4))
    with ranks_here(path, "parted") as store:
        os.truncate(path / "part-00001/nodes/node/split.train.npy", 0)
        with pytest.raises(StoreError, match=r"rank 1: .*split\.train\.npy cannot be read any more"):
            store.split("train")


def test_ids_and_picks_travel_as_int32(tmp_path: Path) -> None:
    nodes = torch.arange(60).repeat(200)
    with ranks_here(Path(_saved(tmp_path / "graph", 4)), "parted") as store:
        far = torch.cat([part for number, part in enumerate(store.features.route("node", nodes)) if number in HOMES[1]])  # type: ignore[attr-defined]
        store.features.gather([("node", "x", nodes)])
        asked = store.traffic()
        assert 4 * far.numel() < asked["bytes_sent"] < 4 * far.numel() + 1000
        (picks,) = store.graph.sample([Frontier(nodes)], Draw(3, 0, [-1]))
        assert picks is not None
        received = store.traffic()["bytes_received"] - asked["bytes_received"]
        num_picks = int(picks.counts[far].sum())
        assert 4 * far.numel() + 8 * num_picks < received < 4 * far.numel() + 8 * num_picks + 1000


def test_a_failure_in_the_rounds_is_of_the_next_call_and_of_closing_where_nobody_asked(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    broken = mock.patch.object(exchange, "join_questions", side_effect=MemoryError("no room"))
    with ranks_here(Path(_saved(tmp_path / "graph", 4)), "local") as store, broken:
        for _ in range(2):
            with pytest.raises(PeerError, match=r"rank 0 was exchanging rows.* failed with MemoryError: no room"):
                store.features.gather([("node", "x", torch.arange(60))])
    (unheard,) = recwarn
    assert str(unheard.message).startswith("the ranks have stopped exchanging rows: rank 1 was exchanging rows")


@pytest.mark.filterwarnings("ignore:the ranks have stopped")
def test_a_failure_in_the_rounds_keeps_no_messages(tmp_path: Path) -> None:
    sent: list[weakref.ref[Any]] = []

    def broken(ways: AllToAll, message: torch.Tensor, *sizes: Any) -> Any:
        sent.append(weakref.ref(message))
        raise RuntimeError("no way")

    with ranks_here(Path(_saved(tmp_path / "graph", 4)), "local") as store:
        with mock.patch.object(AllToAll, "swap", broken), suppress(PeerError):
            store.features.gather([("node", "x", torch.arange(60))])
        rounds = store.deployment.exchange  # type: ignore[attr-defined]
        rounds._thread.join(60)
        assert isinstance(rounds._failure, PeerError)
        assert sent
        until(lambda: all(message() is None for message in sent), "messages that are freed")


@pytest.mark.filterwarnings("ignore:the ranks have stopped")  # of the other rank, as this one leaves
def test_who_asks_waits_for_about_one_timeout_where_nobody_hears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rounds end as it leaves, though they wait for a ring that was lost."""
    monkeypatch.setattr(exchange, "FAREWELL", 0.5)
    with ranks_here(Path(_saved(tmp_path / "graph", 4)), "local") as store:
        rounds = store.deployment.exchange  # type: ignore[attr-defined]
        until(lambda: rounds._is_idle, "a rank that waits")
        rounds._seconds = 0.5
        with mock.patch.object(Exchange, "_ring"):
            began = time.monotonic()
            for _ in range(2):  # the second call learns it at once
                with pytest.raises(PeerError, match=r"no answer came within 0\.5 seconds"):
                    store.features.gather([("node", "x", torch.arange(60))])
                assert 1 <= time.monotonic() - began < 15
        rounds.leave()
        until(lambda: not rounds._thread.is_alive(), "the end of its rounds", 10)


def test_an_answer_that_nobody_waits_for_any_more_does_not_keep_others_from_theirs() -> None:
    given_up, waiting = (Inquiry(1, [], 0, None) for _ in range(2))
    given_up.answer.set_exception(PeerError("no answer came"))
    settle([given_up, waiting], torch.zeros(2 * answer_size(0), dtype=torch.uint8))
    assert isinstance(given_up.answer.exception(0), PeerError)
    assert waiting.answer.result(0).numel() == 0


def test_one_deadline_is_for_all_exchanges_that_a_context_closes(tmp_path: Path) -> None:
    with ranks_here(Path(_saved(tmp_path / "graph", 4)), "local") as store:
        rounds = store.deployment.exchange  # type: ignore[attr-defined]
        began = time.monotonic()
        for _ in range(20):  # rank 1 does not close
            rounds.wait(began + 0.5)
        assert 0.5 <= time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exchange": "nccl"}, "exchange is 'nccl'; choose 'servers' or 'collective'"),
        ({}, "exchange='collective' is between ranks, and there is one only; start several, or leave it out"),
        ({"serve": True}, "serve is given, but with exchange='collective' ranks ask each other, no servers; leave one"),
        ({"servers": "127.0.0.1:1"}, "servers is given, but with exchange='collective'"),
        ({"timeout": 3.0}, "timeout is given, but with exchange='collective'"),
        ({"path": None}, "exchange='collective' needs the store here, and path is None; give its path"),
    ],
)
def test_what_can_never_be_exchanged_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = _saved(tmp_path / "graph", 2)
    with init(device="cpu") as context, pytest.raises(ConfigError, match=message):
        hoploom.open(context=context, **({"path": path, "exchange": "collective"} | given))
