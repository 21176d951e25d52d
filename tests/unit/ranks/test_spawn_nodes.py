"""Ranks that `spawn` starts on several hosts: each runs the script, and no launcher is needed."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import TESTS, train_workers
from support.launched import await_programs, runs
from support.networks import Host, hosts
from support.ports import free_ports
from support.until import until

from hoploom import ConfigError, HoploomError, PeerError
from hoploom.ranks.spawn import spawn

SCRIPT = """
import argparse
import os
from pathlib import Path
import hoploom
from support.until import until

def main(context, folder):
    assert (context.world_size, context.local_rank) == (2, 0)
    Path(folder, f"{context.rank}.sum").write_text(str(context.sum(context.rank + 1)))
    Path(folder, f"{context.rank}.pid").write_text(str(os.getpid()))
    while Path(folder, "stay").exists():
        context.barrier()
    until(Path(folder, "go").exists)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--address", default="127.0.0.1:29500")
    parser.add_argument("folder")
    args = parser.parse_args()
    nodes = {"num_nodes": args.num_nodes, "node_rank": args.node_rank, "address": args.address}
    hoploom.spawn(main, 1, [args.folder], **nodes, device="cpu", timeout=120)
"""

Script = subprocess.Popen[str]


@contextmanager
def scripts(
    folder: Path, node_ranks: str, found: Sequence[Host] = (), variables: Sequence[Mapping[str, str]] = ({}, {})
) -> Iterator[list[Script]]:
    """The script on hosts of these numbers, in namespaces of their own if given; afterwards none of them runs."""
    (folder / "train.py").write_text(SCRIPT)
    address = f"{found[0].name}:29500" if found else f"127.0.0.1:{free_ports(1)[0]}"
    line = [sys.executable, "train.py", "--num-nodes", "2", "--address", address, ".", "--node-rank"]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    commands = [found[int(rank)].command([*line, rank]) if found else [*line, rank] for rank in node_ranks]
    started = [
        subprocess.Popen(words, cwd=folder, env=environment | variables[int(rank)], stderr=subprocess.PIPE, text=True)
        for words, rank in zip(commands, node_ranks, strict=True)
    ]
    try:
        yield started
    finally:
        for script in started:
            script.kill()
            script.communicate(timeout=120)


def slurm(node: int, per_host: int = 1) -> dict[str, str]:
    """What srun sets for the first of so many tasks on each of two hosts."""
    first = {"SLURM_PROCID": str(node * per_host), "SLURM_LOCALID": "0", "SLURM_NODEID": str(node)}
    counts = {"SLURM_NTASKS": str(2 * per_host), "SLURM_TASKS_PER_NODE": f"{per_host}(x2)"}
    return first | counts | {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_CPUS_PER_TASK": "2"}


def pod(node: int) -> dict[str, str]:
    """What Kubernetes' PyTorchJob sets, for each pod."""
    return {"RANK": str(node), "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"}


def plain(node: int) -> dict[str, str]:
    """What a shell sets."""
    return {}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (plain, slurm),  # each host reads its own variables
        pytest.param(plain, plain, marks=pytest.mark.slow),
        pytest.param(slurm, slurm, marks=pytest.mark.slow),
        pytest.param(pod, pod, marks=pytest.mark.slow),
    ],
)
def test_a_script_on_each_host_a_task_or_a_pod_trains_together(
    tmp_path: Path, first: Callable[[int], dict[str, str]], second: Callable[[int], dict[str, str]]
) -> None:
    (tmp_path / "go").touch()
    with scripts(tmp_path, "01", variables=[first(0), second(1)]) as started:
        for number, host in enumerate(started):
            said = host.communicate(timeout=120)[1]
            assert host.returncode == 0, said
            assert said.count("hoploom: rank ") == (number == 0)  # what it took, of rank 0 alone
    assert [(tmp_path / f"{rank}.sum").read_text() for rank in range(2)] == ["3", "3"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (slurm(0), "node_rank is 1 and num_nodes is 2, but SLURM_PROCID and SLURM_NTASKS say 0 of 2"),
        (
            slurm(1, 2),
            "spawn was called in rank 2 of 4, as SLURM_PROCID and SLURM_NTASKS say; call .* one process per host",
        ),
        (pod(0), "node_rank is 1 and num_nodes is 2, but RANK and WORLD_SIZE say 0 of 2; give those"),
        (pod(1) | {"WORLD_SIZE": "3"}, "but RANK and WORLD_SIZE say 1 of 3"),
        (pod(1) | {"LOCAL_RANK": "0"}, "spawn was called in rank 1 of 2, as RANK and WORLD_SIZE say; call "),
        (pod(1) | {"LOCAL_WORLD_SIZE": "2"}, "spawn was called in rank 1 of 2, as RANK and WORLD_SIZE say; call "),
    ],
)
def test_ranks_do_not_spawn_and_hosts_have_their_own_numbers(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=message):
        spawn(train_workers.exit_with, 2, [3], num_nodes=2, node_rank=1, address="127.0.0.1:9")


@pytest.mark.slow
def test_scripts_on_two_hosts_whose_own_names_are_loopback_train_together(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    with hosts(2) as found, scripts(tmp_path, "01", found) as started:
        for script in started:
            said = script.communicate(timeout=120)[1]
            assert script.returncode == 0, said


@pytest.mark.slow  # the quick tests refuse a rank that is taken
def test_a_second_host_with_the_same_number_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    with scripts(tmp_path, "011") as started, ThreadPoolExecutor() as pool:
        ends = [pool.submit(host.communicate, timeout=120) for host in started]
        first = wait(ends, return_when=FIRST_COMPLETED).done.pop()
        (tmp_path / "go").touch()
        assert "ConfigError: rank 1 of 2 is taken already: by process " in first.result()[1]
        wait(ends)
        assert sorted(host.returncode for host in started) == [0, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_script_that_is_killed_leaves_nothing_and_ends_the_other_hosts(tmp_path: Path, killed: int) -> None:
    (tmp_path / "stay").touch()
    with scripts(tmp_path, "01") as started:
        pids = await_programs(tmp_path, "0", "1")
        started[killed].kill()
        said = started[1 - killed].communicate(timeout=120)[1]
        assert started[1 - killed].returncode == 1
        assert f"PeerError: rank {1 - killed} of 2 was " in said
        until(lambda: not any(map(runs, pids)), "the end of all ranks")


def spawned(**named: Any) -> HoploomError | None:
    """What one host raises, as a thread of this process."""
    try:
        spawn(train_workers.exit_with, named.pop("nprocs", 1), [3], device="cpu", **named)
    except HoploomError as error:
        return error
    return None


def test_hosts_that_do_not_fit_together_are_told_so_on_each() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    named = {"num_nodes": 2, "address": address, "timeout": 30}
    with ThreadPoolExecutor() as pool:
        errors = list(pool.map(lambda rank: spawned(nprocs=rank + 1, node_rank=rank, **named), range(2)))
    for error in errors:
        assert re.search(r"the others count [24] ranks; start the same number of processes on all hosts", str(error))


@pytest.mark.slow  # tests/unit/ranks/test_init.py has the same error of a rank
def test_two_hosts_that_are_both_the_first_end_within_the_deadline() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with ThreadPoolExecutor() as pool:
        errors = pool.map(lambda rank: spawned(node_rank=0, num_nodes=2, address=address, timeout=1), range(2))
    found = sorted(map(str, errors))
    assert "rank 0 cannot listen on 127.0.0.1:" in found[0]
    assert "see that no other process is rank 0, too" in found[0]
    assert "rank 0 of 2 was meeting the others, and rank 1 did not connect in time" in found[1]


@pytest.mark.slow  # tests/unit/ranks/test_init.py has the same error of a rank
def test_a_host_whose_first_host_never_comes_says_where_it_looked() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    error = spawned(node_rank=1, num_nodes=2, address=address, timeout=0.3)
    assert isinstance(error, PeerError)
    assert f"rank 1 of 2 cannot reach rank 0 at {address} within 0.3 seconds" in str(error)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"num_nodes": 2}, "node_rank is None; give this host's number, from 0 to 1"),
        ({"num_nodes": 2, "node_rank": 2}, "node_rank is 2, but num_nodes is 2, and hosts count from 0"),
        ({"num_nodes": 2, "node_rank": 0}, "address is None; give HOST:PORT of rank 0's host"),
        ({"num_nodes": 0}, "num_nodes is 0; give the number of hosts"),
        ({"num_nodes": 1, "node_rank": 1}, "node_rank is 1, but num_nodes is 1"),
        ({"num_nodes": 2, "node_rank": 0, "address": "gpu1:1", "timeout": 0}, "timeout is 0"),
    ],
)
def test_a_wrong_place_among_hosts_is_told_at_once(named: dict[str, Any], message: str) -> None:
    error = spawned(**named)
    assert isinstance(error, ConfigError)
    assert str(error).startswith(message)
