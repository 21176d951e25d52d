"""Ranks whose loaders do not fit together learn it at the first batch, all in the same words; slow ranks are no alarm.

Ranks are threads here, over a store in memory; tests/unit/load/test_loaders_of_ranks.py has processes.
"""

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
from support.until import until
from torch.distributed import HashStore

from hoploom import ConfigError, HoploomError, PeerError
from hoploom.ranks.agreement import Agreement, Group, Meeting, Waits
from hoploom.ranks.held_up import HeldUp
from hoploom.ranks.share import ALONE, DIVIDED, GROUP, Share

QUICK = Waits(dealt=0.0, whole=0.0, heard=0.0, look=0.0)
TOLD = {"seeds": "1001 of 'node' [12]", "store": "9 nodes", "batch_size": "32", "position": "epoch 0, step 0"}


@dataclass
class Read:
    told_of: Mapping[str, str] = field(default_factory=lambda: TOLD)
    trains: bool = True
    seeds: range = range(1001)
    is_divided: bool = False

    def told(self) -> Mapping[str, str]:
        return self.told_of

    def marks(self, limit: int) -> list[int]:
        return list(self.seeds)[:limit]


@pytest.fixture
def store() -> HashStore:
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    return store


def agreement(store: HashStore, rank: int, share: Share | None = None, size: int = 2, **waits: float) -> Agreement:
    made = QUICK if not waits else Waits(**waits)
    return Agreement(share or Share(rank, size, GROUP), made, lambda: Group(store, rank, size))


def together(*reads: Callable[[], None]) -> list[str]:
    """What each rank is told, where all of them read at the same time."""
    told = [""] * len(reads)

    def run(rank: int) -> None:
        try:
            reads[rank]()
        except HoploomError as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(reads))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return told


def begin(store: HashStore, read: Read, rank: int, share: Share | None = None, size: int = 2) -> Callable[[], None]:
    made = agreement(store, rank, share, size, dealt=20, whole=20)
    return lambda: made.pass_batch(read, is_last=False)


def test_ranks_with_the_same_loader_agree_at_its_first_batch(store: HashStore) -> None:
    made = [agreement(store, rank, size=3, dealt=20) for rank in range(3)]
    reads = [lambda one=one: one.pass_batch(Read(), is_last=False) for one in made]
    assert together(*reads) == ["", "", ""]
    assert all(one.is_settled for one in made)


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("seeds", "500 of 'node' [34]", "or give each rank seeds of its own, with none in common"),
        ("store", "8 nodes", "open the same graph on all ranks"),
        ("batch_size", "64", "give the same on all ranks"),
        ("position", "epoch 3, step 0", "alike on all ranks"),
    ],
)
def test_a_difference_is_told_to_all_ranks_in_the_same_words(
    store: HashStore, name: str, value: str, way_out: str
) -> None:
    other = Read({**TOLD, name: value})
    told = together(*(begin(store, other if rank == 2 else Read(), rank, size=3) for rank in range(3)))
    assert len(set(told)) == 1
    assert re.search(rf"divided over 3 ranks \({name}: .* on rank \d, .* on rank 2\); .*{way_out}", told[0])
    assert f"{name}: {TOLD[name]} on rank" in told[0]
    assert f"{value} on rank 2)" in told[0]


def test_a_slow_rank_is_no_alarm(store: HashStore) -> None:
    first, second = agreement(store, 0), agreement(store, 1)
    first.pass_batch(Read(), is_last=False)
    first.pass_batch(Read(), is_last=False)
    assert not first.is_settled
    second.pass_batch(Read(), is_last=False)
    assert second.is_settled
    first.pass_batch(Read(), is_last=False)
    assert first.is_settled


def test_a_difference_of_a_slow_rank_is_seen_at_a_later_batch(store: HashStore) -> None:
    first, second = agreement(store, 0), agreement(store, 1)
    first.pass_batch(Read(), is_last=False)
    for one in (second, first):
        with pytest.raises(ConfigError, match=r"batch_size: 32 on rank 0, 64 on rank 1"):
            one.pass_batch(Read({**TOLD, "batch_size": "64"}), is_last=False)


def test_the_end_of_an_epoch_waits_for_ranks_that_come_later(store: HashStore) -> None:
    first, second = agreement(store, 0), agreement(store, 1)
    assert together(
        lambda: first.pass_batch(Read(), is_last=True), lambda: second.pass_batch(Read(), is_last=True)
    ) == ["", ""]
    assert first.is_settled
    assert second.is_settled


def test_two_ranks_with_the_same_share_are_told(store: HashStore) -> None:
    told = together(*(begin(store, Read(), rank, Share(0, 2)) for rank in range(2)))
    assert told[0] == told[1]
    assert "both gave their loader rank=0, world_size=2" in told[0]


def test_a_share_that_one_rank_reads_alone_is_told_at_its_end(store: HashStore) -> None:
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(
        PeerError, match=r"rank 1 has not started this loader; it did not start it within 0.2 .*rank=0, world_size=1"
    ):
        agreement(store, 0).pass_batch(Read(), is_last=True)


def test_a_share_whose_other_ranks_have_ended_is_told_at_once(store: HashStore) -> None:
    store.set("hoploom/whereabouts/left/1", "")
    with pytest.raises(ConfigError, match="rank 1 has not started this loader; it has ended;"):
        agreement(store, 0).pass_batch(Read(), is_last=True)


def test_a_peek_at_a_loader_costs_nothing_later(store: HashStore) -> None:
    peeked, second = agreement(store, 0), agreement(store, 1)
    peeked.pass_batch(Read(), is_last=False)
    second.pass_batch(Read(), is_last=False)
    peeked.pass_batch(Read(), is_last=True)
    assert peeked.is_settled


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        (range(1001), "train the same seeds"),
        (range(1000, 1500), "train some of the same seeds (1 of "),
        (range(1001, 1500), ""),
    ],
)
def test_ranks_that_cut_their_own_shares_must_not_share_seeds(store: HashStore, seeds: range, said: str) -> None:
    reads = [Read(), Read(seeds=seeds)]
    told = together(*(begin(store, read, rank, Share()) for rank, read in enumerate(reads)))
    assert told[0] == told[1]
    assert (said in told[0]) if said else not told[0]


@pytest.mark.parametrize(("second", "said"), [(range(1001, 1500), ""), (range(1000, 1500), "(1 of ")])
def test_seeds_that_ranks_divided_must_have_none_in_common(store: HashStore, second: range, said: str) -> None:
    reads = [Read(seeds=range(1001), is_divided=True), Read(seeds=second, is_divided=True)]
    told = together(*(begin(store, read, rank, Share(rank, 2, DIVIDED)) for rank, read in enumerate(reads)))
    assert told[0] == told[1]
    assert (said in told[0]) if said else not told[0]


def meeting(store: HashStore, rank: int, told: Mapping[str, str] = TOLD, size: int = 2) -> Meeting:
    return Meeting(Group(store, rank, size), told, ["train.py:3"], 1001)


def test_ranks_find_out_whether_they_have_the_same_seeds_when_their_loaders_are_made(store: HashStore) -> None:
    for texts in (["of 'node' [1]"] * 3, ["of 'node' [1]", "of 'node' [2]", "of 'node' [3]"]):
        meetings = [meeting(store, rank, {**TOLD, "seeds": text}, 3) for rank, text in enumerate(texts)]
        for one in meetings:
            assert one.seeds(may_be_lone=False) == [f"1001 {text}" for text in texts]


def test_a_loader_that_another_rank_does_not_make_is_an_error_in_the_end(store: HashStore) -> None:
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(PeerError, match=r"rank 0 waits for rank 1 to make the same loader, and 0.05 .*rank=0, world"):
        meeting(store, 0).seeds(may_be_lone=False)


def test_a_slow_rank_is_waited_for_as_long_as_the_group_waits(
    store: HashStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hoploom.ranks.agreement.NOTICE", 0.0)
    first, found = meeting(store, 0), list[object]()
    waiting = threading.Thread(target=lambda: found.append(first.seeds(may_be_lone=True)))
    waiting.start()
    until(lambda: bool(store.check(["hoploom/made/waits/0"])), "the first rank's wait")
    meeting(store, 1)
    waiting.join(30)
    assert found == [["1001 1001 of 'node' [12]"] * 2]
    assert "hoploom: rank 0 waits for rank 1 to make the same loader; if only one rank" in capsys.readouterr().err


def test_ranks_that_wait_before_different_loaders_go_on_to_compare_them(store: HashStore) -> None:
    meetings = [meeting(store, rank, {**TOLD, "batch_size": str(rank)}) for rank in range(2)]
    found: list[object] = [0, 0]

    def wait(rank: int) -> None:
        found[rank] = meetings[rank].seeds(may_be_lone=False)

    assert together(lambda: wait(0), lambda: wait(1)) == ["", ""]
    assert found == [None, None]


def test_a_rank_that_read_the_loader_alone_is_known(store: HashStore) -> None:
    first, second = meeting(store, 0), meeting(store, 1)
    assert second.lone_reader() is None
    first.note_lone()
    assert second.lone_reader() == 0


def test_evaluation_on_every_rank_asks_nobody(store: HashStore) -> None:
    for _ in range(2):
        one = agreement(store, 0, Share())
        one.pass_batch(Read(trains=False), is_last=True)
        assert one.is_settled
    assert store.num_keys() == 0


def test_ranks_in_an_arrangement_of_the_users_own_are_left_alone(store: HashStore) -> None:
    one = agreement(store, 3, Share(1, 2), size=4)
    one.pass_batch(Read(), is_last=True)
    assert one.is_settled


def test_without_a_process_group_there_is_nobody_to_ask() -> None:
    alone = Agreement(Share(0, 1, ALONE))
    alone.pass_batch(Read(), is_last=True)
    assert not alone.is_settled  # a process group may come
    assert not torch.distributed.is_initialized()


def test_only_a_note_younger_than_the_wait_says_that_a_rank_stands_still(store: HashStore) -> None:
    """A rank that has just left its barrier for the loader may not have taken its note back yet."""
    held, since = HeldUp(store, rank=0, size=3), dict[int, int]()
    for rank, looks in ((1, 5), (2, 9)):
        store.set(f"hoploom/held/at/{rank}", f"{looks} torch.distributed.barrier (train.py:8)")
    assert held.calls(since) == {}
    store.set("hoploom/held/at/1", "7 torch.distributed.barrier (train.py:8)")
    assert held.calls(since) == {1: "torch.distributed.barrier (train.py:8)"}
    store.set("hoploom/held/at/2", "11 torch.distributed.all_reduce (train.py:8)")
    assert held.calls(since) == {
        1: "torch.distributed.barrier (train.py:8)",
        2: "torch.distributed.all_reduce (train.py:8)",
    }
    store.set("hoploom/held/at/2", "0 ")
    assert held.calls(since) == {1: "torch.distributed.barrier (train.py:8)"}


def test_who_keeps_the_notes_may_hang(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr("hoploom.ranks.agreement._Notes.post_dealt", lambda notes, reading: over.wait(20))
    agreement(store, 0, dealt=0, reply=0.05).pass_batch(Read(), is_last=False)
    over.set()
