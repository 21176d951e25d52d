"""Real hosts, as far as one machine has them: network namespaces, wires between them, wires that are pulled."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from support import TESTS
from support.fleets import save
from support.networks import Host, hosts
from support.servers import addresses_of, command_of, serving_by
from support.until import until

PORT = 7000  # of servers and of the meeting + 1, in namespaces of their own
PARTS = [[0, 3], [1], [2]]
AWAY = 1.0  # seconds that a wire is pulled
ENDING = 150.0  # seconds for a training on a busy machine


@contextmanager
def _running(commands: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Commands, each with all that it starts in a group of its own, which ends with the block."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for words in commands:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes.append(
                subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
            )
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=20)


def _torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *words, str(TESTS / "support" / "host_workers.py")]


def _pull(host: Host, mode: str, folder: Path, trainers: Sequence[subprocess.Popen[str]]) -> None:
    """Pull a host's wire for a moment when all ranks have come to the middle of their training."""

    def in_the_middle() -> bool:
        for trainer in trainers:
            assert trainer.poll() is None, trainer.communicate(timeout=20)[1]
        return all((folder / f"{mode}.ready.{rank}").exists() for rank in range(len(trainers)))

    until(in_the_middle, "the middle of training", ENDING)
    host.plug(into=False)
    (folder / f"{mode}.cut").touch()
    time.sleep(AWAY)  # the length of the outage is what is tested
    host.plug(into=True)


def _train_on(found: Sequence[Host], path: Path, folder: Path) -> None:
    """A server on each host, a trainer on the first two: in both deployments, then each with the whole store."""
    token = folder / "token"
    token.write_text("a-token-of-some-length-0123456789")
    token.chmod(0o600)
    addresses = ",".join(f"{host.address}:{PORT}" for host in found)
    options = ["--token-file", str(token), "--peers", addresses]
    commands = [
        host.command(command_of(path, parts, f"{host.address}:{PORT}", options))
        for host, parts in zip(found, PARTS, strict=True)
    ]
    with ExitStack() as stack:
        servers = stack.enter_context(serving_by(commands))
        meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", found[0].name]
        meeting += ["--master-port", str(PORT + 1)]
        script = [str(path), str(folder), ",".join(addresses_of(servers)), str(token)]
        trainers = [
            host.command([*_torchrun(*meeting, "--node-rank", str(rank)), *script])
            for rank, host in enumerate(found[:2])
        ]
        processes = stack.enter_context(_running(trainers))
        _pull(found[2], "worker", folder, processes)
        _pull(found[1], "client", folder, processes)
        for process in processes:
            _, said = process.communicate(timeout=ENDING)
            assert process.returncode == 0, said


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("impaired", [False, True])
def test_training_on_hosts_whose_wires_are_pulled_loses_as_with_the_store_at_hand(
    impaired: bool, tmp_path: Path
) -> None:
    with hosts(3) as found:
        for host in found if impaired else ():
            if refusal := host.impair("delay", "5ms", "1ms", "loss", "0.5%"):
                pytest.skip(f"the kernel here has no netem: {refusal}")
        path = save(tmp_path)
        _train_on(found, path, tmp_path)
    expected = (tmp_path / "alone.losses").read_text()
    assert len(set(expected.split())) == 3
    assert (tmp_path / "worker.losses").read_text() == expected
    assert (tmp_path / "client.losses").read_text() == expected
