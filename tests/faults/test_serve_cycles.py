"""Servers killed and restarted at random, again and again, while a client goes through epochs: nothing is lost."""

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.batches import assert_same
from support.fleets import MODES, PARTS, connect, loader, save, warm_up
from support.process_tree import processes_in
from support.servers import Server, addresses_of, restart_dead, serving_together

import hoploom

CYCLES = 100
LONGEST_LIFE = 0.5  # seconds from a restart to the next kill
SHARED = Path("/dev/shm")


@contextmanager
def _killing(servers: list[Server], cycles: int, seed: int) -> Iterator[threading.Thread]:
    """A thread that kills a server and starts it again, so many times; one at a time is away."""
    chance, over = random.Random(seed), threading.Event()

    def kill_and_restart() -> None:
        for _ in range(cycles):
            if over.wait(chance.uniform(0.0, LONGEST_LIFE)):
                return
            victim = chance.choice(servers)
            victim.process.send_signal(signal.SIGKILL)
            victim.process.wait(60)
            restart_dead([victim])

    thread = threading.Thread(target=kill_and_restart)
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        thread.join(60)


def _run(path: Path, cycles: int) -> int:
    """Epochs in both deployments in turn until all cycles are over, every batch compared; how many they were."""
    here, epochs = loader(hoploom.open(path), num_workers=0), 0
    with ExitStack() as stack:
        servers = stack.enter_context(serving_together(path, PARTS, "--timeout", "10"))
        warm_up(servers)
        stores = [stack.enter_context(connect(mode, addresses_of(servers), path, timeout=60)) for mode in MODES]
        killing = stack.enter_context(_killing(servers, cycles, seed=cycles))
        loaders = [loader(store) for store in stores]
        while killing.is_alive() or epochs < len(MODES):
            there = loaders[epochs % len(MODES)]
            there.set_epoch(epochs)
            here.set_epoch(epochs)
            for found, expected in zip(there, here, strict=True):
                assert_same(expected, found)
            epochs += 1
    return epochs


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_restarts_change_no_batch_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, temporary = save(tmp_path), tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))  # the servers'
    threads, files, shared = threading.active_count(), set(path.rglob("*")), set(SHARED.iterdir())
    epochs = _run(path, CYCLES)
    assert epochs >= CYCLES // 2  # so that most kills met an epoch
    assert (processes_in(path), list(temporary.iterdir()), set(path.rglob("*"))) == ([], [], files)
    assert threading.active_count() <= threads
    assert set(SHARED.iterdir()) <= shared  # no other test runs beside slow ones
