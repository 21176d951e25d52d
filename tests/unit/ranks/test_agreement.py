"""Ranks whose loaders do not fit together learn it before the first batch, all in the same words.

Ranks are threads here, over a store in memory; tests/unit/load/test_loaders_of_ranks.py has processes.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistError, HashStore  # type: ignore[attr-defined]

from hoploom import ConfigError, HoploomError, PeerError
from hoploom.ranks import agreement
from hoploom.ranks.agreement import AGREED, ALONE, GROUP, DeadlockDetector, Meeting, Share, agree

SETTINGS = {"seeds": "1001 of 'node' [12]", "store": "9 nodes", "batch_size": "32", "position": "epoch 0, step 0"}
Ranks = Callable[..., list[DeadlockDetector]]  # makes the detectors of so many ranks
BARRIER = "torch.distributed.barrier (train.py:8)"


@dataclass
class Read:
    settings: Mapping[str, str] = field(default_factory=lambda: SETTINGS)
    trains: bool = True
    seeds: range = range(1001)
    is_divided: bool = False

    def seed_hashes(self, limit: int) -> list[int]:
        return list(self.seeds)[:limit]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """The detectors of so many ranks, which look at each other often."""
    made: list[DeadlockDetector] = []
    monkeypatch.setattr(agreement, "PATIENCE", 0.05)
    monkeypatch.setattr(agreement, "INTERVAL", 0.02)

    def make(size: int, seconds: float = 20) -> list[DeadlockDetector]:
        store = HashStore()
        store.set_timeout(timedelta(seconds=seconds))
        made[:] = [DeadlockDetector(store, rank, size) for rank in range(size)]
        return made

    yield make
    for here in made:
        here.leave()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What the call of each rank returns or raises, if all make theirs at the same time."""
    found: list[Any] = [None] * len(calls)

    def run(rank: int) -> None:
        try:
            found[rank] = calls[rank]()
        except HoploomError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def loop(here: DeadlockDetector, read: Read | None = None, share: Share | None = None) -> Callable[[], str]:
    return lambda: agree(share or Share(here.rank, here.size, GROUP), lambda: read or Read(), lambda: here)


def test_ranks_with_the_same_loader_agree_in_every_loop(ranks: Ranks) -> None:
    here = ranks(3)
    for _ in range(2):
        assert together(*map(loop, here)) == [AGREED] * 3


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("seeds", "500 of 'node' [34]", "or give each rank seeds of its own, with none in common"),
        ("store", "8 nodes", "open the same graph on all ranks"),
        ("batch_size", "64", "give the same on all ranks"),
        ("position", "epoch 3, step 0", "alike on all ranks"),
    ],
)
def test_a_difference_is_an_error_of_all_ranks_in_same_words(ranks: Ranks, name: str, value: str, hint: str) -> None:
    other = Read({**SETTINGS, name: value})
    told = together(*(loop(here, other if here.rank == 2 else None) for here in ranks(3)))
    assert len(set(told)) == 1
    assert re.search(rf"divided over 3 ranks \({name}: .* on rank \d, .* on rank 2\); .*{hint}", told[0])
    assert f"{name}: {SETTINGS[name]} on rank" in told[0]
    assert f"{value} on rank 2)" in told[0]


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        (range(1001), "train the same seeds"),
        (range(1000, 1500), "train some of the same seeds (1 of "),
        (range(1001, 1500), ""),
    ],
)
def test_ranks_that_cut_their_own_shares_must_not_share_seeds(ranks: Ranks, seeds: range, said: str) -> None:
    first, second = ranks(2)
    told = together(loop(first, share=Share()), loop(second, Read(seeds=seeds), Share()))
    assert told[0] == told[1]
    assert said in told[0] if said else told[0] == AGREED


def test_a_rank_with_seeds_of_its_own_waits_for_nobody_for_long(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoploom.ranks.agreement.WHOLE", 0.05)
    monkeypatch.setattr("hoploom.ranks.agreement.READ", 0.05)
    first, second = ranks(2)
    assert loop(first, share=Share())() == AGREED
    with pytest.raises(ConfigError, match="rank 0 and rank 1 train the same seeds"):
        loop(second, share=Share())()


def test_evaluation_on_every_rank_and_arrangements_of_the_users_own_ask_nobody(ranks: Ranks) -> None:
    here = ranks(4)[3]
    assert loop(here, Read(trains=False), Share())() == AGREED
    assert loop(here, share=Share(1, 2))() == AGREED
    assert not here.store.check(["whole loaders/1/3"])
    assert not here.store.check(["loaders/1/3"])


def test_a_slow_rank_is_waited_for_with_a_line_that_names_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hoploom.ranks.agreement.NOTICE", 0.0)
    first, second = ranks(2)

    def slow() -> str:
        assert capsys is not None
        while "waits for rank 1" not in (text := capsys.readouterr().err):
            threading.Event().wait(0.01)
        assert "hoploom: rank 0 waits for rank 1 to read their shares of a loader; if only one rank" in text
        return loop(second)()

    assert together(loop(first), slow) == [AGREED, AGREED]


def test_a_rank_that_never_comes_is_an_error_once_the_groups_timeout_is_over(ranks: Ranks) -> None:
    first, _ = ranks(2, seconds=0.2)
    with pytest.raises(PeerError, match=r"rank 0 waits for rank 1 to read their shares .* 0.2 seconds .*world_size=1"):
        loop(first)()


@pytest.mark.parametrize("share", [Share(0, 2, GROUP), Share(0, 2)])
def test_a_rank_that_has_ended_is_known_at_once(ranks: Ranks, share: Share) -> None:
    first, second = ranks(2)
    second.leave()
    if share.is_given:
        with pytest.raises(ConfigError, match=r"rank 0 waits for the other ranks to read .*, but rank 1 has ended; if"):
            loop(first, share=share)()
    else:
        assert loop(first, share=share)() == ALONE


def test_a_rank_that_left_without_a_call_is_known_though_another_left_after_it(ranks: Ranks) -> None:
    first, second, third = ranks(3)
    first.leave()
    second.begin("sums")
    second.leave()
    third.begin("sums")
    over = threading.Event()
    timer = threading.Timer(10, over.set)
    timer.start()
    try:
        with pytest.raises(DistError, match="left before its part"):
            third.wait("sums", "adding", over.wait)
    finally:
        timer.cancel()


def test_a_rank_that_has_no_detector_yet_blocks_nobody(ranks: Ranks) -> None:
    """A status that is not there would be waited for: until the timeout of the store, with its connection taken."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    ranks(0)  # for the intervals
    here = DeadlockDetector(store, 0, 2)
    try:
        here.begin("sums")
        over = threading.Event()
        threading.Timer(1, over.set).start()
        here.wait("sums", "adding", over.wait)
        assert here._watching.is_alive()
    finally:
        here.leave()


def test_a_loop_of_one_rank_alone_leaves_no_trace(ranks: Ranks) -> None:
    """The other rank waits for it in a call of Hoploom, and then begins the same loop."""
    first, second = ranks(2)
    second.begin("calls")
    is_over = threading.Event()

    def wait_and_read() -> str:
        second.wait("calls", "waiting at a barrier", is_over.wait)
        return loop(second)()

    def read_alone_and_together() -> list[str]:
        alone = loop(first)()
        is_over.set()
        return [alone, loop(first)()]

    assert together(read_alone_and_together, wait_and_read) == [[ALONE, AGREED], AGREED]


def test_only_a_status_younger_than_the_wait_says_that_a_rank_is_blocked(ranks: Ranks) -> None:
    """A rank that has just left its barrier for the loader may not have posted that yet."""
    first, second, third = ranks(3)
    for here in (second, third):
        here.leave()
    one = meeting(first)

    def blocked(*looks: int) -> str:
        for rank, count in enumerate((0, *looks)):
            first.store.set(f"status/{rank}", f'{{"call": "{BARRIER if count else ""}", "looks": {count}}}')
        return one._lost()[1]

    assert not blocked(5, 9)
    assert not blocked(7, 9)
    assert blocked(7, 11) == f"rank 1 waits in {BARRIER}"
    assert not blocked(7, 0)


def test_the_process_that_holds_the_store_may_hang(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr("hoploom.ranks.agreement.REPLY", 0.05)
    monkeypatch.setattr("hoploom.ranks.agreement._Loop.post", lambda one, **entry: over.wait(20))
    with pytest.raises(PeerError, match=r"0\.1 seconds have passed"):
        loop(ranks(2, seconds=0.1)[0])()
    over.set()


def meeting(here: DeadlockDetector, seeds: str = SETTINGS["seeds"]) -> Meeting:
    return Meeting(here, Read({**SETTINGS, "seeds": seeds}), ["train.py:3"], 1001)


@pytest.mark.parametrize("seeds", [["of 'node' [1]"] * 3, ["of 'node' [1]", "of 'node' [2]", "of 'node' [3]"]])
def test_ranks_find_out_whether_they_have_the_same_seeds(ranks: Ranks, seeds: list[str]) -> None:
    for one in [meeting(here, text) for here, text in zip(ranks(3), seeds, strict=True)]:
        assert one.seeds(may_be_lone=False) == [f"1001 {text}" for text in seeds]


def test_a_rank_that_read_the_loader_alone_is_known(ranks: Ranks) -> None:
    first, second = map(meeting, ranks(2))
    assert second.lone_reader() is None
    first.note_lone()
    assert second.lone_reader() == 0
