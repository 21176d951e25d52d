"""Disks that fail under a store with a budget (a real file system on a loop device), and what loops leave behind."""

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from support.batches import assert_same_batches
from support.memory_group import forget_pages
from support.until import until

import hoploom
from hoploom import NeighborLoader, Store, StoreError, ops
from hoploom.ops.disk import has_read_queue
from hoploom.store import budget

NUM_NODES = 20_000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "graph.store"
    hoploom.generate(folder, num_nodes=NUM_NODES, avg_degree=8, num_features=64, num_classes=4)
    return folder


def _opened(path: Path) -> Store:
    """All rows and edges are on disk."""
    return hoploom.open(path, memory=8 * (NUM_NODES + 1) + 1000)


def _loader(store: Store, **options: object) -> NeighborLoader:
    given = {"batch_size": 100, "shuffle": True, "seed": 3} | options
    return NeighborLoader(store, [4, 2], torch.arange(0, NUM_NODES, 5), **given)  # type: ignore[arg-type]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[Path], tuple[Path, Path]]]:
    """Puts a store on a disk of its own, whose bytes lie in a file: (the store there, that file)."""
    image, mounted = tmp_path / "disk.img", tmp_path / "mounted"
    mounted.mkdir()
    with ExitStack() as closing:

        def put(store: Path) -> tuple[Path, Path]:
            with image.open("wb") as file:
                file.truncate(64 << 20)
            _need(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)])
            device = _need(["losetup", "--find", "--show", str(image)])
            closing.callback(subprocess.run, ["losetup", "--detach", device], check=True)
            _need(["mount", device, str(mounted)])
            closing.callback(subprocess.run, ["umount", "--lazy", mounted], check=True)  # maps may keep it busy
            copied = Path(shutil.copytree(store, mounted / store.name))
            _need(["mount", "-o", "remount,ro", str(mounted)])  # all is written
            return copied, image

        yield put


def _need(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no disk can be made here: {error}")
    if done.returncode:
        pytest.skip(f"no disk can be made here: {command[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


@pytest.mark.parametrize("by_threads", [False, True], ids=["io_uring", "threads"])
@pytest.mark.parametrize("look_ahead", [1, None])
def test_a_disk_that_fails_is_one_error_that_names_file_row_and_batch(
    path: Path, disk: Callable[[Path], tuple[Path, Path]], by_threads: bool, look_ahead: int | None
) -> None:
    copied, image = disk(path)
    store = _opened(copied)
    assert store.reads is not None
    store.reads.by_threads = by_threads
    before = set(threading.enumerate())
    os.truncate(image, 1 << 20)  # what lies behind gives EIO
    failing = (
        r"^step \d+ of epoch 0 on rank 0: (edge|row) \d+ of '\w+' of .* \(/.*\.npy\) cannot be read: "
        r"Input/output error; check the disk, or copy the store again$"
    )
    with pytest.raises(StoreError, match=failing):
        list(_loader(store, num_workers=2, look_ahead=look_ahead))
    assert set(threading.enumerate()) <= before


def test_a_disk_that_cannot_be_measured_fails_where_a_batch_wants_it(
    path: Path, disk: Callable[[Path], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "LEAST", 0)
    copied, image = disk(path)
    (file,) = copied.glob("part-00000/nodes/*/x.npy")
    forget_pages(copied)
    os.truncate(image, 1 << 20)
    assert budget.measure_disk(file) == budget.USUAL


def test_leaving_the_loop_leaves_no_thread_no_file_and_no_memory(path: Path) -> None:
    others = set(threading.enumerate())  # of other tests
    store = _opened(path)

    def leave() -> None:
        for _ in range(5):
            batches = iter(_loader(store, num_workers=2, look_ahead=8))
            next(batches)
            batches.close()  # type: ignore[attr-defined]
        gc.collect()
        until(lambda: set(threading.enumerate()) <= others, "the end of the loops' threads")

    leave()  # what is kept for the next loop is there now
    before = _held()
    leave()
    until(lambda: _no_more(_held(), before), f"no more than {before}, what there was before the loops", seconds=30)


def _no_more(now: tuple[list[str], int, int], before: tuple[list[str], int, int]) -> bool:
    return Counter(now[0]) <= Counter(before[0]) and now[1] <= before[1] and now[2] <= before[2]


def _held() -> tuple[list[str], int, int]:
    """Threads, open files, and bytes of the core's buffers that somebody reads."""
    gc.collect()
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            names.append((task / "comm").read_text())
    own = [name for name in names if not name.startswith("iou-")]  # the kernel's, which waits some seconds for more
    return sorted(own), len(os.listdir("/proc/self/fd")), ops.pool_use()[1]


def test_two_loaders_over_one_store_make_the_batches_of_each_alone(path: Path) -> None:
    store, seeds = _opened(path), (3, 4)
    alone = [list(_loader(store, seed=seed)) for seed in seeds]
    together = zip(*(_loader(store, seed=seed, num_workers=2, look_ahead=5) for seed in seeds), strict=True)
    for expected, found in zip(alone, zip(*together, strict=True), strict=True):
        assert_same_batches(expected, list(found))


FORBID = """
import ctypes, platform, struct, sys

def forbid(number, error):
    code = struct.pack("HBBI", 0x20, 0, 0, 0) + struct.pack("HBBI", 0x15, 0, 1, number)
    code += struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | error) + struct.pack("HBBI", 0x06, 0, 0, 0x7fff0000)
    kept = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxQ", 4, ctypes.addressof(kept))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0, ctypes.get_errno()
"""
FORBIDDING = """
def read():
    out = torch.empty(4, 4, dtype=torch.uint8)
    ids = torch.tensor([7, file.size // 4 - 1, 0, 5000])
    ops.Reads().rows([ops.RowRequest(ops.FileRows(file, 0, file.size // 4), ids, torch.arange(4), out)])
    print(bytes(out.flatten().tolist()).hex())

forbid(425, 1)  # io_uring_setup is answered by EPERM, as in many containers
import torch
from hoploom import _core, ops
assert not _core.has_read_queue()
file = ops.DiskFile(sys.argv[1])
read()
for number in (435, {"x86_64": 56}.get(platform.machine(), 220)):  # clone3 and clone by EAGAIN: no more threads
    forbid(number, 11)
read()
"""
REFUSING = """
import torch
from concurrent.futures import ThreadPoolExecutor
from hoploom import _core, ops

file = ops.DiskFile(sys.argv[1])
rows = ops.FileRows(file, 0, file.size // 512)
ids = torch.randperm(rows.num_rows)

def read(_):
    out = torch.empty(rows.num_rows, 512, dtype=torch.uint8)
    ops.Reads().rows([ops.RowRequest(rows, ids, torch.arange(len(ids)), out)])
    return out

first = read(0)
assert _core.has_read_queue()  # one is there, and the kernel gives no other
forbid(425, 12)
with ThreadPoolExecutor(4) as pool:
    assert all(torch.equal(first, found) for found in pool.map(read, range(40)))
"""


def _forbidden(script: str, path: Path) -> tuple[bytes, list[str]]:
    """The bytes of a file, and what a process prints that reads it with less of the kernel."""
    (file,) = path.glob("part-00000/nodes/*/x.npy")
    command = [sys.executable, "-c", FORBID + script, str(file)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return file.read_bytes(), done.stdout.split()


@pytest.mark.skipif(not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8, reason="64-bit Linux")
def test_where_io_uring_is_forbidden_threads_read_or_the_caller_alone(path: Path) -> None:
    held, printed = _forbidden(FORBIDDING, path)
    assert printed == 2 * [(held[28:32] + held[-4:] + held[:4] + held[20000:20004]).hex()]


@pytest.mark.skipif(not sys.platform.startswith("linux") or not has_read_queue(), reason="needs io_uring")
def test_where_the_kernel_has_no_memory_for_another_queue_threads_read(path: Path) -> None:
    """io_uring_setup (425) is answered by ENOMEM, as where too little memory may be locked."""
    _forbidden(REFUSING, path)
