"""Two processes with PyTorch's own process group: seeds come once, and what was silent ends in one error on both."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from support import TESTS
from support.loader_workers import SILENT

SCRIPT = "import sys; from support import loader_workers; loader_workers.plain_script(int(sys.argv[1]), sys.argv[2])"
SAID = {
    "a split beside dealt shares": "seeds: 501 of 'node'",
    "all seeds on every rank": "rank 0 and rank 1 train the same seeds",
    "a random split without a seed": "seeds: 500 of 'node'",
    "other batch sizes": "(batch_size: 32 on rank 0, 33 on rank 1); give the same on all ranks",
    "other seeds of randomness": "(seed: 0 on rank 0, 1 on rank 1)",
    "another graph": "(store: 1001 nodes, 2002 edges",
    "the same share twice": "both gave their loader rank=0, world_size=2",
    "a state restored on one rank": "(position: epoch 0, step 0 on rank 0, epoch 3, step 0 on rank 1)",
    "another epoch on one rank, later": "(position: epoch 1, step 0 on rank 0, epoch 3, step 0 on rank 1)",
    "a sampler that each rank seeds": "; the samplers of all ranks must draw the same order",
    "one sampler on every rank": "rank 0 and rank 1 train the same seeds",
    "a sampler with a memory of its own": "(sampler: ",
    "other links": "seeds: 2002 of 'node to node'",
}


class Ended(NamedTuple):
    told: list[Mapping[str, Any]]  # by rank
    codes: list[int]
    errors: list[str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("ranks")
    env = os.environ | {"PYTHONPATH": str(TESTS)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank), str(folder)], env=env, stderr=-1, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return Ended(told, [rank.returncode for rank in ranks], errors)


def test_plain_ddp_learns_from_every_seed_once_an_epoch(ended: Ended) -> None:
    assert sorted(ended.told[0]["dealt"] + ended.told[1]["dealt"]) == sorted([*range(1001)] * 2)


def test_evaluation_loops_keep_working(ended: Ended) -> None:
    assert [told["evaluated together"] for told in ended.told] == [1001, 1001]
    assert [told["evaluated on all"] for told in ended.told] == [1001, 1001]
    assert ended.told[0]["evaluated on rank 0"] == 1001


def test_shares_that_the_user_cut_himself_pass(ended: Ended) -> None:
    assert [told["dealt by hand"] for told in ended.told] == ["", ""]


def test_a_loader_made_before_the_process_group_says_so(ended: Ended) -> None:
    for rank, told in enumerate(ended.told):
        assert f"made for rank 0 of 1, the only process, but this is rank {rank} of 2" in told["made before the group"]


@pytest.mark.parametrize("name", SILENT)
def test_what_was_silent_is_one_error_on_both_ranks(ended: Ended, name: str) -> None:
    assert ended.told[0][name] == ended.told[1][name]
    assert SAID[name] in ended.told[0][name]
    assert max(told[f"{name}, seconds"] for told in ended.told) < 10


def test_a_share_that_rank_0_reads_alone_names_where_the_other_waits(ended: Ended) -> None:
    """As `if rank == 0:` before a barrier does; it waited for ever, and its metrics were of half the seeds."""
    said = "1001 seeds are divided over 2 ranks, but rank 1 has not started this loader; it waits in "
    assert re.search(
        rf"{said}torch.distributed.barrier \(loader_workers.py:\d+\); .*rank=0, world_size=1",
        ended.told[0]["rank 0 alone"],
    )
    assert ended.told[0]["rank 0 alone, seconds"] < 10
    assert ended.told[1]["rank 0 alone"] == ""


def test_the_script_ends_with_that_error_and_a_status_that_says_so(ended: Ended) -> None:
    assert ended.codes == [1, 1]
    for error in ended.errors:
        assert "ConfigError: the loaders of rank 0 and rank 1 differ" in error
    assert "hoploom: a loader shares its seeds among 2 ranks (from the process group)" in ended.errors[0]
    assert "hoploom:" not in ended.errors[1]
