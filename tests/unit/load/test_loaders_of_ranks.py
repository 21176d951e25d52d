"""Two processes with PyTorch's own process group: seeds come once, and what was silent ends in one error on both."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from support import TESTS
from support.loader_workers import SILENT
from torch.utils.data import DistributedSampler

SCRIPT = "import sys; from support import loader_workers; loader_workers.plain_script(int(sys.argv[1]), sys.argv[2])"
SAID = {
    "a split whose parts overlap": "rank 0 and rank 1 were given different seeds, but some of the same seeds (",
    "all seeds on every rank": "rank 0 and rank 1 train the same seeds",
    "a random split without a seed": "are among both; give all ranks the same seeds",
    "other batch sizes": "(batch_size: 32 on rank 0, 33 on rank 1); give the same on all ranks",
    "other seeds of randomness": "(seed: 0 on rank 0, 1 on rank 1)",
    "another graph": "(store: 1001 nodes, 2002 edges",
    "the same share twice": "both gave their loader rank=0, world_size=2",
    "a state restored on one rank": "(position: epoch 0, step 0 on rank 0, epoch 3, step 0 on rank 1)",
    "another epoch on one rank, later": "(position: epoch 1, step 0 on rank 0, epoch 3, step 0 on rank 1)",
    "a sampler that each rank seeds": "; the samplers of all ranks must draw the same order",
    "one sampler on every rank": "rank 0 and rank 1 train the same seeds",
    "a sampler with a memory of its own": "(sampler: ",
    "other links": "were given different seeds, but some of the same seeds (",
}


class Ended(NamedTuple):
    told: list[Mapping[str, Any]]  # by rank
    codes: list[int]
    errors: list[str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder, env = tmp_path_factory.mktemp("ranks"), os.environ | {"PYTHONPATH": str(TESTS)}
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


def test_a_loader_made_before_the_process_group_takes_its_rank_at_the_first_loop(ended: Ended) -> None:
    first, second = (told["made before the group"] for told in ended.told)
    assert (sorted(first + second), {len(first), len(second)}) == ([*range(1001)], {500, 501})


def test_seeds_that_the_ranks_divided_are_read_as_they_are(ended: Ended) -> None:
    """600 seeds on rank 0 and 401 on rank 1, in batches of 100: six steps on both."""
    for told, own in zip([told["divided"] for told in ended.told], (range(600), range(600, 1001)), strict=True):
        assert (told["length"], told["seeds of a step"]) == (6, 100 + 67)
        assert sorted(told["first epoch"]) == sorted(told["second epoch"]) == [*own]
        assert told["first epoch"] != told["second epoch"]
    offsets = [told["divided"]["first epoch"][:400] for told in ended.told]
    assert offsets[0] != [b - 600 for b in offsets[1]]


def test_divided_seeds_resume_in_the_middle_of_an_epoch(ended: Ended) -> None:
    for told in (told["divided"] for told in ended.told):
        assert told["resumed"] == told["rest"] == told["first epoch"][-len(told["rest"]) :]


def test_the_tail_of_divided_seeds_is_dropped_on_request(ended: Ended) -> None:
    assert [len(told["divided"]["dropped"]) for told in ended.told] == [400, 400]


def test_a_distributed_sampler_gives_each_rank_its_seeds(ended: Ended) -> None:
    for rank, told in enumerate(ended.told):
        sampler = DistributedSampler(range(1001), 2, rank, shuffle=True, seed=5)
        steps = told["divided"]["sampled"]
        assert [number for step in steps for number in step] == list(sampler)
        assert len(steps) == 6


def test_a_sampler_over_the_seeds_of_each_rank_gives_its_own_number_of_them(ended: Ended) -> None:
    """250 draws on rank 0 and 251 on rank 1, in batches of 100: three steps."""
    assert [told["divided"]["drawn"] for told in ended.told] == [[83, 83, 84], [83, 84, 84]]


def test_a_position_among_other_seeds_of_the_same_number_is_refused(ended: Ended) -> None:
    for told in ended.told:
        assert "that epoch was divided for another" in told["divided"]["state of other seeds"]


def test_links_that_the_ranks_divided_are_read_as_they_are(ended: Ended) -> None:
    for told in ended.told:
        counts = told["divided"]["links"]
        assert (len(counts), sum(counts)) == (11, 1001)


def test_a_rank_with_fewer_seeds_than_steps_is_named(ended: Ended) -> None:
    said = "rank 1 has 2 of them for the 100 steps that the 999 seeds of another rank take"
    for told in ended.told:
        assert said in told["divided"]["too uneven"]


@pytest.mark.parametrize("name", SILENT)
def test_what_was_silent_is_one_error_on_both_ranks(ended: Ended, name: str) -> None:
    assert ended.told[0][name] == ended.told[1][name]
    assert SAID[name] in ended.told[0][name]
    assert max(told[f"{name}, seconds"] for told in ended.told) < 10


def test_rank_0_alone_reads_all_seeds_while_the_others_wait_for_it(ended: Ended) -> None:
    """As `if rank == 0:` before a barrier does, in PyG's tutorial; it read half of the seeds."""
    assert ended.told[0]["rank 0 alone"] == 2 * 1001
    assert "rank 0 has read all seeds of this loader, while the other ranks" in ended.told[1]["rank 0 alone"]
    assert ended.told[0]["rank 0 alone, seconds"] < 20
    assert "hoploom: rank 0 reads all 1,001 seeds of a loader that no other rank reads" in ended.errors[0]


def test_the_script_ends_with_that_error_and_a_status_that_says_so(ended: Ended) -> None:
    assert ended.codes == [1, 1]
    for error in ended.errors:
        assert "ConfigError: rank 0 and rank 1 were given different seeds, but some of" in error
    assert "hoploom: a loader shares its seeds among 2 ranks (from the process group)" in ended.errors[0]
    assert "hoploom: each of 2 ranks reads the 401 to 600 seeds that it was given, in 6 steps" in ended.errors[0]
    assert "hoploom:" not in ended.errors[1]
