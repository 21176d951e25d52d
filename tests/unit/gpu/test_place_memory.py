"""Host memory that processes share: one copy, whoever is killed, and nothing left behind."""

import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from support import TESTS, place_workers
from support.graphs import random_graph
from torch import Tensor

import hoploom
from hoploom import ConfigError, StoreError
from hoploom.gpu import host_memory as hostmemory
from hoploom.gpu import placed_store as placed_module
from hoploom.gpu.host_memory import HEADER, HostMemory, shared_name, sweep
from hoploom.gpu.placed_store import Lease

# with one, `place` refuses to play it on the CPU; test_place_gpu.py asks the real runtime
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with place_workers.own_folder() as own:
        monkeypatch.setattr(hostmemory, "FOLDER", own)
        yield own
        assert os.listdir(own) == []


def sevens(raw: Tensor) -> None:
    raw.fill_(7)


def never(raw: Tensor) -> None:
    raise AssertionError("written twice")


def test_a_store_may_have_more_tensors_than_files_may_be_open(folder: Path) -> None:
    """As far as the process may raise that limit."""
    fields = {f"x{number}": torch.full((4,), number) for number in range(40)}
    store = hoploom.from_tensors(fields, torch.tensor([[0, 1], [1, 2]]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        with hoploom.place(store, features="host", device=place_workers.DEVICE) as placed:
            assert place_workers.placed_rows(placed, "node", "x7", torch.tensor([3, 1])).tolist() == [7, 7]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_second_one_reads_what_the_first_has_written(folder: Path) -> None:
    with HostMemory("a", 100, sevens) as one, HostMemory("a", 100, never) as other:
        assert other.bytes.tolist() == [7] * 100
        one.bytes[3] = 1
        assert other.bytes[3] == 1  # the same pages


def test_the_last_one_to_close_removes_the_file(folder: Path) -> None:
    one, other = HostMemory("a", 100, sevens), HostMemory("a", 100, never)
    kept = one.bytes
    one.close()
    assert os.listdir(folder) == ["a"]
    other.close()
    other.close()
    assert os.listdir(folder) == []
    assert kept.tolist() == [7] * 100  # who still holds a tensor keeps its pages


def test_one_that_was_never_closed_is_removed_all_the_same(folder: Path) -> None:
    memory = HostMemory("a", 100, sevens)
    kept = memory.bytes
    del memory
    gc.collect()
    assert (os.listdir(folder), kept.tolist()) == ([], [7] * 100)


GPU = torch.device("cuda:0")


class Runtime:
    """CUDA's, as far as memory is pinned: what was asked of it, and what the pages held when they were unpinned."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.unpinned: list[bytes] = []
        self.waited: list[int] = []  # how many were pinned
        self.refuses = False
        self.fails = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if self.refuses:
            return 712
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.unpinned.append(ctypes.string_at(address, self.pinned.pop(address)))
        return 0

    def synchronize(self, device: object = None) -> None:
        self.waited.append(len(self.pinned))
        if self.fails:
            raise RuntimeError("an illegal memory access was encountered")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    own = Runtime()
    monkeypatch.setattr(hostmemory, "_runtime", lambda: own)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", own.synchronize)
    return own


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_memory_is_unpinned_while_its_pages_are_there(how: str, runtime: Runtime, folder: Path) -> None:
    memory = HostMemory("a", 100, sevens)
    memory.register(GPU)
    assert list(runtime.pinned.values()) == [100]
    if how == "closed":
        memory.close()
        memory.close()
    del memory  # without a collection
    assert (runtime.unpinned, runtime.waited, os.listdir(folder)) == ([b"\7" * 100], [1], [])


@without_a_gpu
def test_a_store_that_is_only_dropped_is_unpinned(runtime: Runtime, folder: Path) -> None:
    placed = on_gpu(hoploom.from_pyg(random_graph(30, 100, 1)))
    num_files = len(os.listdir(folder))
    assert len(runtime.pinned) == num_files > 1
    del placed
    assert (len(runtime.pinned), len(runtime.unpinned)) == (0, num_files)
    assert os.listdir(folder) == []


def test_a_device_that_has_failed_does_not_keep_the_memory(runtime: Runtime, folder: Path) -> None:
    memory = HostMemory("a", 100, sevens)
    memory.register(GPU)
    runtime.fails = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        memory.close()
    assert (runtime.pinned, memory.bytes.numel(), os.listdir(folder)) == ({}, 0, [])


@pytest.fixture
def busy(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A device that is never idle: how long each wait for it was to be. What stays for good ends with the test."""
    waits: list[float] = []
    for module in (hostmemory, placed_module):
        monkeypatch.setattr(module, "idle", lambda device, seconds: waits.append(seconds))
    monkeypatch.setattr(hostmemory, "STILL_READ", [])
    return waits


def num_mapped(folder: Path) -> int:
    """Files of a folder, removed ones too, whose pages this process has."""
    return Path("/proc/self/maps").read_text().count(f"{folder}/")


def on_gpu(store: hoploom.Store) -> hoploom.Store:
    """Placed in host memory, as if a GPU read it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HostMemory, "register", lambda memory, device, real=HostMemory.register: real(memory, GPU))
        placed = hoploom.place(store, "host", "host", device="cpu")
    place_workers.placed_of(placed).lease.device = GPU
    return placed


@without_a_gpu
def test_memory_that_is_still_read_stays_pinned(runtime: Runtime, busy: list[float], folder: Path) -> None:
    """To unpin it would wait for its readers, without a deadline. A store waits once, whatever it is made of."""
    placed = on_gpu(hoploom.from_pyg(random_graph(30, 100, 1)))
    num_files = len(runtime.pinned)
    assert num_files > 1
    with pytest.raises(StoreError, match=r"^cuda:0 still reads the placed store 60 s after it was closed; see what"):
        placed.close()
    assert busy == [60]
    placed.close()
    del placed
    gc.collect()
    assert (len(runtime.pinned), runtime.unpinned, busy) == (num_files, [], [60])
    assert num_mapped(folder) == num_files


def test_memory_that_is_dropped_and_still_read_stays_too(runtime: Runtime, busy: list[float], folder: Path) -> None:
    memory = HostMemory("a", 100, sevens)
    memory.register(GPU)
    with pytest.raises(StoreError, match=r"^cuda:0 still reads host memory 60 s after it was closed; see what else"):
        memory._unpin()  # type: ignore[misc]
    del memory
    assert num_mapped(folder) == 1
    assert (runtime.unpinned, busy) == ([], [60])


@without_a_gpu
@pytest.mark.parametrize("of", ["store", "placed"])
def test_a_hung_device_does_not_hide_a_first_error(of: str, runtime: Runtime, busy: list[float], folder: Path) -> None:
    def fail(held: AbstractContextManager[object] | None) -> None:
        assert held is not None
        with held:
            raise ValueError("first")

    placed = on_gpu(hoploom.from_pyg(random_graph(30, 100, 1)))
    with pytest.raises(ValueError, match="first"):
        fail(placed if of == "store" else placed.placed)
    assert busy == [60]


def test_all_memory_is_closed_after_an_error_of_a_kernel(runtime: Runtime) -> None:
    told: list[bool] = []
    runtime.fails = True
    held = Lease(GPU, [told.append] * 2)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        held.close()
    assert told == [True] * 2


def test_a_refusal_to_pin_is_said_and_not_left_to_the_next_kernel(
    runtime: Runtime, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.refuses = True
    asked: list[torch.device] = []
    monkeypatch.setattr(hostmemory, "_forget_refusal", asked.append)
    with HostMemory("a", 100, sevens) as memory:
        with pytest.raises(ConfigError, match=r"100 B of host memory cannot be pinned for cuda:0 \(CUDA error 712\)"):
            memory.register(GPU)
        assert asked == [GPU]
    assert (runtime.unpinned, runtime.waited) == ([], [])


@pytest.mark.slow
def test_a_killed_writer_leaves_no_half_and_a_killed_reader_no_lock(folder: Path) -> None:
    half, whole = shared_name("half"), shared_name("whole")
    words = [sys.executable, place_workers.__file__, str(folder), whole, half]
    done = subprocess.run(words, cwd=TESTS, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (folder / half).stat().st_size == (folder / whole).stat().st_size == HEADER + 1000
    with HostMemory(half, 1000, sevens) as memory:
        assert memory.bytes.tolist() == [7] * 1000
    with HostMemory(whole, 1000, never) as memory:
        assert memory.bytes.tolist() == [5] * 1000


def test_what_nobody_uses_is_swept_away(folder: Path) -> None:
    left, wanted, used = shared_name("left"), shared_name("wanted"), shared_name("used")
    for name in (left, wanted, "not-ours"):
        (folder / name).write_bytes(b"left by a killed process")
    with HostMemory(used, 100, sevens):
        sweep(keep=[wanted])
        assert sorted(os.listdir(folder)) == sorted([wanted, used, "not-ours"])
    sweep()
    (folder / "not-ours").unlink()


def test_a_failing_writer_leaves_nothing(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        HostMemory("a", 100, lambda raw: raw.fill_(1 // 0))
    assert os.listdir(folder) == []


def test_who_comes_second_waits_for_the_writer_but_not_for_ever(folder: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(raw: Tensor) -> None:
        begun.set()
        assert go_on.wait(30)
        sevens(raw)

    held: list[HostMemory] = []
    writer = threading.Thread(target=lambda: held.append(HostMemory("a", 100, slowly)))
    writer.start()
    assert begun.wait(30)
    with pytest.raises(StoreError, match=r"was being written by another process for 0.1 seconds; look"):
        HostMemory("a", 100, never, seconds=0.1)
    go_on.set()
    with HostMemory("a", 100, never) as memory:
        assert memory.bytes.tolist() == [7] * 100
    writer.join()
    held[0].close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
def test_the_file_of_another_user_is_refused(folder: Path) -> None:
    (folder / "a").write_bytes(b"")
    os.chown(folder / "a", 12345, 12345)
    with pytest.raises(StoreError, match="is not a file of this user; remove it"):
        HostMemory("a", 100, sevens)
    (folder / "a").unlink()
    (folder / "b").symlink_to("/etc/passwd")
    with pytest.raises(StoreError, match="cannot be opened"):
        HostMemory("b", 100, sevens)
    (folder / "b").unlink()


def test_too_little_room_is_said_with_numbers_before_anything_is_copied(
    monkeypatch: pytest.MonkeyPatch, small_disk: Callable[[str], Path]
) -> None:
    disk = small_disk("size=64k")
    monkeypatch.setattr(hostmemory, "FOLDER", disk)
    store = hoploom.from_tensors({"x": torch.ones(1000, 64)}, torch.randint(1000, (2, 10)))
    said = r"placing needs 25[0-9] kB of host memory in .*, where 65.5 kB are free; enlarge it .*--shm-size"
    with pytest.raises(ConfigError, match=said):
        hoploom.place(store, features="host", device=place_workers.DEVICE)
    with pytest.raises(ConfigError, match=r"where 65.5 kB are free"):
        HostMemory("a", 100_000, sevens)
    assert os.listdir(disk) == []
    with hoploom.place(store, features="90%", device=place_workers.DEVICE) as placed:  # 100 rows, of 256 bytes
        assert os.listdir(disk) != []
        place_workers.assert_all_rows(placed)
    assert os.listdir(disk) == []
