"""The context: which rank this is, by whose word, and what ranks do together."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support import TESTS
from support.ports import free_ports
from support.rank_processes import run_ranks
from torch import nn
from torch.nn.parameter import UninitializedParameter

from hoploom import ConfigError, PeerError
from hoploom.ranks.context import all_or_none, init, unwrap
from hoploom.ranks.environment import RankInfo, first_host, read_rank, share_of_cores
from hoploom.ranks.rendezvous import _store_at

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "gpu7", "MASTER_PORT": "29400"}
SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1234567"}
SLURM |= {"SLURM_JOB_NODELIST": "gpu[003-004]", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}


def without(name: str) -> dict[str, str]:
    return {other: text for other, text in SLURM.items() if other != name}


def test_torchruns_variables_name_a_rank_and_go_before_slurms() -> None:
    restarted = {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert read_rank(TORCHRUN | restarted) == RankInfo(3, 1, 8, 2, "torchrun", 2, "gpu7", 29400, hosted=True)
    assert read_rank(SLURM | TORCHRUN).source == "torchrun"


def test_slurms_variables_say_where_a_rank_stands() -> None:
    place = read_rank(SLURM)
    assert place == RankInfo(
        5, 1, 8, 2, "slurm", 0, "gpu003", place.port, is_task=True, uncounted=("LOCAL_WORLD_SIZE",)
    )
    assert 1024 < place.port < 32768  # below the ports that Linux hands out by itself


def test_steps_and_jobs_on_one_host_meet_at_different_ports() -> None:
    ports = {read_rank(SLURM | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).port for job in "7890" for step in "0123"}
    assert len(ports) == 16


def test_a_batch_script_may_choose_the_meeting_point() -> None:
    place = read_rank(SLURM | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4711", "WORLD_SIZE": "8"})
    assert (place.address, place.port, place.world_size, place.source) == ("10.0.0.9", 4711, 8, "slurm")


def test_tasks_that_are_told_their_meeting_point_need_no_list_of_nodes() -> None:
    told = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "MASTER_ADDR": "h0", "MASTER_PORT": "2000"}
    assert read_rank(told) == RankInfo(
        1, 0, 4, 1, "slurm", 0, "h0", 2000, is_task=True, uncounted=("LOCAL_WORLD_SIZE",)
    )


def test_an_empty_list_of_a_steps_nodes_leaves_that_of_the_job() -> None:
    assert read_rank(SLURM | {"SLURM_STEP_NODELIST": ""}) == read_rank(SLURM)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "a[1-4]"},  # the shell of salloc
        SLURM | {"SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},  # a batch script that forgot srun
        SLURM | {"SLURM_PROCID": "0", "ENVIRONMENT": "BATCH", "WORLD_SIZE": "8", "MASTER_PORT": "29500"},
        SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    ],
)
def test_a_process_alone_waits_for_nobody(variables: dict[str, str]) -> None:
    place = read_rank(variables)
    assert (place.rank, place.world_size) == (0, 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-005,9],login1", "gpu003"),
        ("node-[01-04]-ib", "node-01-ib"),
        ("rack[1-2]n[07,9]", "rack1n07"),
        ("login1,gpu[1-2]", "login1"),
        ("a-b.example.org", "a-b.example.org"),
        ("127.0.0.1", "127.0.0.1"),
        ("n[5]", "n5"),
    ],
)
def test_the_first_host_of_slurms_short_form(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "gpu[", "gpu[]", "gpu[a-b]", "gpu]3", ",x"])
def test_a_list_of_nodes_that_names_no_host_is_refused(nodes: str) -> None:
    with pytest.raises(ConfigError, match="set MASTER_ADDR"):
        first_host(nodes)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TORCHRUN | {"RANK": "abc"}, "RANK is 'abc', but must be a number from 0 on; start the script with torchrun"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1'"),
        (TORCHRUN | {"RANK": ""}, "RANK is ''"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', but must be a number from 1 on"),
        (TORCHRUN | {"RANK": "8"}, "RANK is 8, but WORLD_SIZE is 8, and ranks count from 0"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE is 9, but WORLD_SIZE is 8"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; the largest port is 65535"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"RANK": "0"}, "RANK is '0', but WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is '2', but RANK and MASTER_ADDR and MASTER_PORT are not set"),
        ({"MASTER_ADDR": "gpu7"}, "unset MASTER_ADDR"),
        ({"LOCAL_RANK": "0"}, "unset LOCAL_RANK"),
        ({"SLURM_PROCID": "0"}, "SLURM_NTASKS is not set, but must be a number"),
        (SLURM | {"SLURM_PROCID": "8"}, "SLURM_PROCID is 8, but SLURM_NTASKS is 8"),
        (SLURM | {"SLURM_NTASKS": "many"}, "SLURM_NTASKS is 'many'"),
        (without("SLURM_JOB_NODELIST"), r"\(SLURM_JOB_NODELIST\) is ''.*set MASTER_ADDR"),
        (without("SLURM_JOB_ID"), "SLURM_JOB_ID is not set.*start the script with torchrun or srun"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value_and_the_way_out(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rank(variables)


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)))
    assert [share_of_cores(RankInfo(0, 0, count, count), {}) for count in (1, 2, 5, 24)] == [12, 6, 2, 1]


def test_a_task_has_its_cores_alone_unless_it_starts_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)))
    five = {"SLURM_CPUS_PER_TASK": "5"}
    assert share_of_cores(read_rank(SLURM), five) == 5
    assert share_of_cores(replace(read_rank(SLURM), source="group"), five) == 5
    assert share_of_cores(read_rank(SLURM | TORCHRUN), five) == 2
    assert share_of_cores(RankInfo(1, 1, 4, 4), five) == 1
    assert share_of_cores(RankInfo(0, 0, 2, 2), {"SLURM_CPUS_PER_TASK": "99"}) == 6


def test_a_single_process_has_no_process_group() -> None:
    with init(device="cpu") as context:
        assert (context.rank, context.local_rank, context.world_size, context.restarts) == (0, 0, 1, 0)
        assert context.is_main
        assert not torch.distributed.is_initialized()
        context.barrier()
        assert (context.sum(0.1), context.sum(2**60 + 1)) == (0.1, 2**60 + 1)
        assert context.max(torch.tensor([3, 4])).tolist() == [3, 4]
        assert context.gather(torch.arange(3))[0].tolist() == [0, 1, 2]
        assert context.broadcast(torch.tensor(True)).tolist() is True
        linear = nn.Linear(2, 1)
        assert context.wrap(linear) is unwrap(linear) is linear
        context.close()
    context.close()


def test_one_process_averages_its_own_losses() -> None:
    values = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    with init(device="cpu") as context:
        context.mean_loss(values).backward()
        assert context.mean_loss(values).item() == 3
        assert context.mean_loss(values, total=9).item() == 1  # a third of what is accumulated over three calls
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.full((3,), 1 / 3))


def test_a_reduction_is_exact_whatever_the_dtype_given() -> None:
    with init(device="cpu") as context:
        assert context.sum(torch.tensor([7], dtype=torch.uint8)).dtype == torch.int64
        assert context.sum(torch.tensor([0.5], dtype=torch.float16)).dtype == torch.float64
        assert context.sum(torch.tensor(True)).item() == 1


def test_an_error_of_ones_own_passes_the_guard_unchanged() -> None:
    with init(device="cpu") as context, pytest.raises(RuntimeError, match="my own"), context.guard("testing"):
        raise RuntimeError("my own timeout")


class OneOfTwo:
    """A rank whose only collective notes that it was entered."""

    rank, world_size, num_gathers = 0, 2, 0

    def gather(self, tensor: torch.Tensor, /) -> list[torch.Tensor]:
        self.num_gathers += 1
        return [tensor, tensor]


@pytest.mark.parametrize(("error", "num_gathers"), [(KeyboardInterrupt, 0), (SystemExit, 0), (ValueError, 2)])
def test_only_an_error_is_told_to_the_other_ranks(error: type[BaseException], num_gathers: int) -> None:
    """What ends the process goes on at once."""
    ranks = OneOfTwo()
    with pytest.raises(error), all_or_none(ranks, "testing"):
        raise error
    assert ranks.num_gathers == num_gathers


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = UninitializedParameter()


def test_bad_arguments_name_the_way_out() -> None:
    for arguments, message in [
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
        ({"device": "gpu"}, "device is 'gpu'; give 'cpu', 'cuda'"),
        ({"device": "cpu", "backend": "nccl"}, r"backend is 'nccl', but on cpu it is one of \['gloo'\]"),
        ({"device": "cuda:99"}, "this host shows .* CUDA devices"),
    ]:
        with pytest.raises(ConfigError, match=message):
            init(**arguments)
    with init(device="cpu") as context:
        with pytest.raises(ConfigError, match="no parameter that needs a gradient"):
            context.wrap(nn.ReLU())
        with pytest.raises(ConfigError, match="without a shape; call it on one batch"):
            context.wrap(Lazy())
        with pytest.raises(ConfigError, match=r"losses have shape \[\]; give one per seed"):
            context.mean_loss(torch.tensor(0.5))
        with pytest.raises(ConfigError, match="total is 2, but this rank alone has 3"):
            context.mean_loss(torch.ones(3), total=2)
        with pytest.raises(ConfigError, match="total is 0"):
            context.mean_loss(torch.ones(0))


def test_a_rank_that_finds_nobody_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    for name, text in (TORCHRUN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, text)
    with pytest.raises(PeerError, match=f"rank 3 of 8 cannot reach rank 0 at 127.0.0.1:{port} within 0.3 seconds"):
        init(timeout=0.3)


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, text in (TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, text)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        with pytest.raises(ConfigError, match=f"rank 0 cannot listen on 127.0.0.1:{port}; set MASTER_PORT"):
            init(timeout=1)
        with pytest.raises(RuntimeError, match="EADDRINUSE"):  # the reason that torch gives, as for other hosts
            _store_at("127.0.0.1", port, timedelta(seconds=1), holds=True)


MEET = "import hoploom\nwith hoploom.init(device='cpu', timeout=60) as c:\n    assert c.sum(c.rank + 1) == 3\n"


def torchrun(code: str, script: Path) -> None:
    script.write_text(code)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run(line, env=os.environ | {"PYTHONPATH": str(TESTS)}, timeout=90, check=True)


def slurm(code: str, script: Path) -> None:
    script.write_text(code)
    common = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "127.0.0.1", "SLURM_JOB_ID": "7"}
    common |= {"MASTER_PORT": str(free_ports(1)[0])}
    tasks = [common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    assert [code for code, _ in run_ranks([str(script)], tasks)] == [0, 0]


@pytest.mark.parametrize("start", [torchrun, slurm])
def test_ranks_of_a_launcher_meet(start: Callable[[str, Path], None], tmp_path: Path) -> None:
    start(MEET, tmp_path / "train.py")


def test_a_rank_imports_no_pyg_and_faults_its_pages_in_once() -> None:
    script = (
        "import resource, sys, torch, hoploom, hoploom.train\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.empty(64 << 20, dtype=torch.uint8).fill_(1)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "alone = min(faults() for _ in range(3))\n"
        "hoploom.spawn, hoploom.train.Context, hoploom.train.Checkpoint\n"
        "with hoploom.init(device='cpu'):\n"
        "    print(alone, min(faults() for _ in range(12)))\n"
        "print([name for name in ('torch_geometric', 'torch._dynamo', 'pyarrow') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    faults, heavy = done.stdout.splitlines()
    alone, trained = map(int, faults.split())
    assert alone > 20 * max(1, trained)
    assert heavy == "[]"
