"""Ranks that disagree about what they do together are told so on every rank, within seconds."""

from pathlib import Path

import pytest
from support import crossed_workers

from hoploom import TrainError
from hoploom.ranks.spawn import spawn


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks were told, in a file for each call and rank."""
    folder = tmp_path_factory.mktemp("crossed")
    with pytest.raises(TrainError, match="all of them were refused"):
        spawn(crossed_workers.cross, 2, [str(folder)], device="cpu")
    return folder


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("sum", ["rank 0 was adding up over ranks of a number (sum at crossed_workers.py:", "call 1), but rank 1 was"]),
        ("sum", ["but rank 1 was adding up over ranks of a number (mean_loss at crossed_workers.py:"]),
        ("kind", ["rank 0 was finding the maximum over ranks", "rank 1 was waiting at a barrier"]),
        ("shape", ["rank 0 was adding up over ranks of torch.float64 [2], but rank 1 has torch.float64 [30]"]),
        ("evaluate", ["rank 0 was adding up over ranks (evaluate at crossed_workers.py:", "waits for the other"]),
        ("evaluate", ["rank 1 was averaging gradients (backward at crossed_workers.py:", "if context.is_main"]),
    ],
)
def test_crossed_calls_are_one_error_on_every_rank(refused: Path, name: str, parts: list[str]) -> None:
    told = [(refused / f"{name}-{rank}").read_text() for rank in range(2)]
    assert told[0] == told[1]
    for part in parts:
        assert part in told[0]


def test_ranks_that_wait_for_each_other_learn_it_long_before_the_deadline(refused: Path) -> None:
    assert max(float((refused / f"seconds-{rank}").read_text()) for rank in range(2)) < 30
