"""A loader that is told nothing takes its share from the process group or the launcher, and says which."""

import re

import pytest
import torch
import torch.distributed as dist
from support.graphs import ring

from hoploom import ConfigError, NeighborLoader
from hoploom.ranks.agreement import print_share, read_share
from hoploom.ranks.environment import REQUIRED

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
SLURM = {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7"}
SLURM |= {"SLURM_JOB_NODELIST": "gpu[003-005]", "SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_NODEID": "2"}


@pytest.fixture(autouse=True)
def started_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    print_share.cache_clear()
    for name in (*REQUIRED, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def loader(num_seeds: int = 1001, **given: int | None) -> NeighborLoader:
    return NeighborLoader(ring(num_seeds), [2], batch_size=32, **given)


def enter(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)


def test_alone_a_loader_reads_all_seeds_and_says_so() -> None:
    assert repr(loader()) == "NeighborLoader(1,001 seeds, 32 steps of 32, fanouts [2], rank 0 of 1, the only process)"
    assert str(loader()) == "NeighborLoader()"  # as PyG's


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (TORCHRUN, "rank 1 of 2, from torchrun's environment"),
        (SLURM, "rank 2 of 3, from Slurm's environment"),
        ({"MASTER_ADDR": "gpu1", "MASTER_PORT": "29400"}, "rank 0 of 1, the only process"),
    ],
)
def test_a_loader_takes_its_share_from_the_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    enter(monkeypatch, variables)
    assert said in repr(loader())
    assert "16 steps of 32, fanouts [2], rank 0 of 2, as given" in repr(loader(rank=0, world_size=2))
    assert "rank 0 of 1, as given" in repr(loader(rank=0, world_size=1))


def test_half_of_a_launchers_variables_name_the_other_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the processes that Lightning starts have them."""
    enter(monkeypatch, {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"})
    with pytest.raises(ConfigError, match=r"RANK is not set; .*once there is a process group.*train_dataloader\(\)"):
        loader()


def test_a_process_group_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, SLURM)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 4)
    monkeypatch.setattr(dist, "get_world_size", lambda: 5)
    assert str(read_share(None, None)) == "rank 4 of 5, from the process group"


def test_rank_zero_tells_once_what_it_took(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    list(loader())
    list(loader(rank=0, world_size=2))
    assert capsys.readouterr().err == ""
    enter(monkeypatch, TORCHRUN)
    list(loader())
    monkeypatch.setenv("RANK", "0")
    first, second = loader(), loader()
    assert capsys.readouterr().err == ""  # until one of them deals out seeds
    list(first), list(second)
    told = "hoploom: a loader shares its seeds among 2 ranks (from torchrun's environment); rank=0, world_size=1 reads"
    assert re.fullmatch(rf"{re.escape(told)}.*\n", capsys.readouterr().err)


def test_more_ranks_than_seeds_names_the_loader_that_reads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, SLURM)
    with pytest.raises(ConfigError, match=r"2 seeds cannot feed 3 ranks; use fewer ranks, or rank=0, world_size=1"):
        NeighborLoader(ring(9), [2], input_nodes=[1, 2])


def test_whole_steps_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = loader()
    expected = [batch.n_id for batch in alone.steps(range(32))]
    enter(monkeypatch, TORCHRUN)
    dealt = loader()
    assert (len(dealt), dealt.num_whole_steps) == (16, 32)
    for rank in range(2):
        taken = dealt.steps(range(rank, 32, 2), dealt=False)
        assert all(torch.equal(batch.n_id, n_id) for batch, n_id in zip(taken, expected[rank::2], strict=True))
    with pytest.raises(ConfigError, match=r"already divided over 2 ranks .*give dealt=False"):
        dealt.steps(range(1, len(dealt), 2))
