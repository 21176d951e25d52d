"""A store on disk as the system sees it: mapped, shared, walked in a quarter of its size, and on disks that fail."""

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TESTS
from support.batches import assert_same_batches
from support.graphs import save_in_parts
from support.memory_group import forget_pages, memory_group
from support.sparse_stores import mapped_kilobytes, save_sparse, touch_every_page
from support.stores import assert_same
from support.until import until

import hoploom
from hoploom import NeighborLoader, Store, StoreError, ops
from hoploom.ops.disk import has_read_queue
from hoploom.store import budget
from hoploom.store.check import problems


def test_opening_maps_the_files_and_reads_only_their_ends(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path / "store", 100_000, 500)  # 200 MB
    store = hoploom.open(folder)
    assert mapped_kilobytes(folder)["Rss"] < 1024
    assert touch_every_page(store) == 0.0
    in_memory = mapped_kilobytes(folder)
    assert in_memory["Rss"] > 190 * 1024
    assert in_memory["Private_Dirty"] < 1024  # the file's own header may not have reached the disk yet


def test_opening_a_terabyte_takes_as_long_as_opening_a_kilobyte(tmp_path: Path) -> None:
    small = save_sparse(tmp_path / "small", 1, 256)
    large = save_sparse(tmp_path / "large", 1_000_000_000, 256)
    hoploom.open(small)
    begin = time.process_time()
    hoploom.open(small)
    between = time.process_time()
    store = hoploom.open(large)
    assert (time.process_time() - between) - (between - begin) < 0.3
    (batch,) = NeighborLoader(store, [2], input_nodes=torch.tensor([999_999_999]))
    assert batch.x.tolist() == [[0.0] * 256]


def test_writing_to_an_opened_tensor_does_not_change_the_file(ring_store: Store, tmp_path: Path) -> None:
    ring_store.save(tmp_path / "store").parts[0].tables["node", "x"].rows.fill_(-1.0)
    assert list(problems(tmp_path / "store")) == []
    assert_same(ring_store, hoploom.open(tmp_path / "store"))


SECOND_PROCESS = """
import json, sys
from pathlib import Path
import hoploom
sys.path.insert(0, sys.argv[2])
from support.sparse_stores import mapped_kilobytes, touch_every_page

def held():
    lines = map(str.split, Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {word[:-1]: int(size) for word, size, *_ in lines}

before = held()
store = hoploom.open(sys.argv[1])
touch_every_page(store)
after = held()
grown = {kind: after[kind] - before[kind] for kind in ("Private_Dirty", "Rss")}
print(json.dumps({"grown": grown, "mapped": mapped_kilobytes(sys.argv[1])}))
"""


@pytest.mark.slow  # starts a process that imports torch
def test_a_second_process_shares_every_page_and_adds_none(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path / "store", 100_000, 500)  # 200 MB
    store = hoploom.open(folder)
    touch_every_page(store)
    measured = json.loads(run(SECOND_PROCESS, folder, TESTS))
    assert measured["grown"]["Rss"] > 190 * 1024
    assert measured["grown"]["Private_Dirty"] < 8 * 1024
    assert measured["mapped"]["Private_Dirty"] < 1024
    assert measured["mapped"]["Private_Clean"] < 8 * 1024
    assert measured["mapped"]["Shared_Clean"] > 190 * 1024


def run(code: str, *arguments: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_an_open_store_holds_no_descriptor(ring_store: Store, tmp_path: Path) -> None:
    gc.collect()  # what other tests left is not closed while this one counts
    before = len(list(Path("/proc/self/fd").iterdir()))
    store = save_in_parts(ring_store, tmp_path / "ring", 20)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert len(store.parts) == 20


MB = 1 << 20
FEW = 25_000  # of 160,000 pages: those of positions, labels and rows between layers come one by one

BEGINNING = """
import resource, sys
from pathlib import Path
import torch
import hoploom
from hoploom import ConfigError, LinkNeighborLoader, NeighborLoader, infer
from hoploom.inference import Inference
from hoploom.load.presample import Presampling, count_visits
from hoploom.nn import GNN, Shape
from hoploom.store.check import problems
from hoploom.store.base import scan_rows
from hoploom.train.runs.link_splits import LinkShares, hold_out

path, memory, out = sys.argv[1:]
KEY = ("node", "to", "node")
small = hoploom.generate(Path(out) / "small.store", num_nodes=300, avg_degree=3, num_features=4, num_classes=4)
for _ in NeighborLoader(small, [2, 2], "train", num_workers=1):  # imports what is imported late
    pass
infer(GNN("sage", small.schema, Shape(hidden=8, num_layers=2, out=4)), small, Path(out) / "small")

def rows(store):
    return sum(float(some.sum()) for some in scan_rows(store.features, "node", "x", store.num_nodes))

def took_of(loader, steps):
    return sum(batch.n_id.numel() for _, batch in zip(range(steps), loader))

enter()
store = hoploom.open(path, memory=memory)
assert not store.budget.holds_all, store
before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
"""
ENDING = """
print(resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before)
"""
TRAINS = "assert took_of(NeighborLoader(store, [5, 3], 'train', batch_size=64, num_workers=2), 20) > 20 * 64"
EVALUATES = "assert took_of(NeighborLoader(store, [-1, -1], 'val', batch_size=64, num_workers=2), 10) > 10 * 64"
WALKS = {
    "all rows": "rows(store)",
    "all rows, mapped": "rows(hoploom.open(path))",
    "labels": "assert store.num_classes == 4",
    "in-degrees": "store.in_degrees(KEY, torch.arange(100))",
    "counting visits": "count_visits(store, [5, 3], torch.arange(0, store.num_nodes, 50), Presampling(batch_size=256))",
    "links": """
loader = LinkNeighborLoader(store, [3], batch_size=64, num_workers=2)
assert took_of(loader, 10) > 10 * 64
""",
    "held-out links": """
held = hold_out(store, KEY, (), LinkShares(0, 0.05, 0.1))
assert took_of(LinkNeighborLoader(held.store, [3], held.links["train"], batch_size=64, num_workers=2), 10) > 10 * 64
assert held.store.reads.requests
""",
    "aggregated": """
loader = NeighborLoader(store, [5, 3], "train", batch_size=64, num_workers=2, mode="blocks", aggregate="mean")
assert took_of(loader, 20) > 20 * 64
""",
    "inference, rows between layers of twice the group": """
model = GNN("sage", store.schema, Shape(hidden=64, num_layers=2, out=4))
infer(model, store, Path(out) / "nodes", inference=Inference(memory=48 << 20))
""",
    "saving": "store.save(Path(out) / 'saved.store')",
    "checking": "assert not list(problems(path))",
}
REFUSED = {  # what does not fit says so before it is taken
    "whole graph": ("store.to_pyg()", "to read the graph takes"),
    "all links": ("LinkNeighborLoader(store, [3])", r"edges of .* as seeds take .* .*edge_label_index="),
    "held-out links": ("hold_out(store, KEY, (), LinkShares(0, 0.1, 0.1))", r"graph without .*: task.links"),
}


def _run(store: Path, walk: str, memory: str, limit: int, folder: Path) -> int:
    """Page faults that had to wait for the disk."""
    forget_pages(store)
    with memory_group(limit) as group:
        done = group.run(BEGINNING + walk + ENDING, [str(store), memory, str(folder)])
        assert group.num_killed == 0
        assert group.peak <= limit
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def _generate(folder: Path, num_megabytes: int) -> Path:
    path = folder / "graph.store"
    hoploom.generate(path, num_nodes=num_megabytes * 1950, avg_degree=2, num_features=128, num_classes=4)
    assert sum(file.stat().st_size for file in path.rglob("*.npy")) > num_megabytes * MB
    return path


def test_training_and_evaluation_live_in_a_quarter_of_their_store(tmp_path: Path) -> None:
    path = _generate(tmp_path, 256)
    _run(path, f"{TRAINS}\n{EVALUATES}", "12MB", 64 * MB, tmp_path)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _generate(tmp_path_factory.mktemp("large"), 640)


@pytest.mark.slow
@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_whatever_walks_a_store_lives_in_a_quarter_of_it(large: Path, walk: str, tmp_path: Path) -> None:
    memory = "48MB" if "hold_out" in walk else "64MB"  # beside the edges that are left
    assert _run(large, walk, memory, 160 * MB, tmp_path) < FEW, "pages were read one at a time"


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_it_is_taken(tmp_path: Path) -> None:
    dense = tmp_path / "dense.store"
    hoploom.generate(dense, num_nodes=500_000, avg_degree=20, num_features=1, num_classes=4)
    tries = "".join(
        f"""
try:
    {call}
except ConfigError as error:
    assert re.search({message!r}, str(error)), error
else:
    raise AssertionError({message!r})
"""
        for call, message in REFUSED.values()
    )
    _run(dense, "import re" + tries, "32MB", 80 * MB, tmp_path)


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
