"""Fixtures that several files share: small graphs as stores. Their makers are in graphs.py."""

import gc
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

if gc.isenabled():  # until the tests are collected: what modules are made of stays
    gc.disable()
# Small tensors gain nothing from more threads of torch, which wait for each other. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():  # read by Triton when kernels are imported, in child processes too
    os.environ.setdefault("TRITON_INTERPRET", "1")

from support.graphs import library, random_graph, ring, save_in_parts
from support.object_store import ObjectStore, object_store
from support.servers import OneProcess, one_process
from support.slurm_cluster import Slurm, slurm_cluster
from support.spark_cluster import SparkCluster, spark_cluster

import hoploom
from hoploom import Store
from hoploom.ops import rows

settings.register_profile("house", deadline=None, max_examples=60)  # machines may be busy
settings.load_profile("house")


def pytest_configure() -> None:
    """Child processes import what tests import, and see a Ctrl-C also where tests run in the background of a shell."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([inherited] if inherited else [])])


def pytest_collection_finish() -> None:
    """What has been imported stays: no collection looks at it again, neither in a test nor at the end."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def server_process() -> Iterator[OneProcess]:
    """A process of graph servers, which no test ends."""
    with one_process() as process:
        yield process


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A server of S3's protocol, which no test ends."""
    with object_store(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with spark_cluster(tmp_path_factory.mktemp("spark")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def s3(s3_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The same; this process and those that it starts use it."""
    for name, value in s3_server.variables.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def bucket(s3: ObjectStore) -> str:
    return s3.new_bucket()


@pytest.fixture
def short_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JVM of seconds: to compile well what runs once takes longer than to run it."""
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", prepend=" ")


@pytest.fixture
def tcp_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of this process stay on TCP: a server's Unix socket passes by a proxy, and what TCP alone does."""
    monkeypatch.setattr("hoploom.serve.client.connect_unix", lambda *_: None)


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on tensors on the CPU go to the kernels too, as a GPU's do."""
    return lambda: monkeypatch.setattr(rows, "runs_in_core", lambda tensor: False)


@pytest.fixture(scope="session")
def graph() -> Store:
    """Thirty nodes, few enough for kernels in the interpreter."""
    return hoploom.from_pyg(random_graph(30, 120, seed=1))


@pytest.fixture
def ring_store() -> Store:
    return hoploom.from_pyg(ring(12))


@pytest.fixture
def library_store() -> Store:
    return hoploom.from_pyg(library(), weight_attr="weight")


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from torch's own threads, and on a busy machine they wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of a given size: small_disk("size=64k")."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    gc.collect()
    gc.freeze()  # a collection before every mount looks at what was made since, not at what tests before have made

    def mount(options: str) -> Path:
        unmount(mounted)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", mounted], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
        return mounted

    yield mount
    unmount(mounted)


def unmount(folder: Path) -> None:
    """Leaves nothing mounted, and fails where something of this process still holds a file there.

    Maps that a failed call's traceback still holds keep a file system busy, and so does, for some milliseconds,
    what the kernel lets go of only after the call that closed it has returned (an io_uring, a thread that has ended).
    """
    gc.collect()
    deadline = time.monotonic() + 60
    while os.path.ismount(folder):
        done = subprocess.run(["umount", folder], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            assert time.monotonic() < deadline, f"{done.stderr.strip()}; {open_files_below(folder)}"
            time.sleep(0.01)


def open_files_below(folder: Path) -> list[str]:
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    maps = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return [name for name in links + maps if name.startswith(f"{folder}/")]


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written without waiting for the disk: what a test reads back is in memory anyway."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def sound_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sound stores, each in two parts: ring, library (weights), events (weights and edge times)."""
    folder = tmp_path_factory.mktemp("sound")
    save_in_parts(hoploom.from_pyg(ring(12)), folder / "ring", 2)
    save_in_parts(hoploom.from_pyg(library(), weight_attr="weight"), folder / "library", 2)
    events = hoploom.from_pyg(random_graph(20, 90, 1), weight_attr="weight", time_attr="edge_time")
    save_in_parts(events, folder / "events", 2)
    return folder


@pytest.fixture
def ring_folder(sound_stores: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound_stores / "ring", tmp_path / "ring"))


@pytest.fixture
def events_folder(sound_stores: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound_stores / "events", tmp_path / "events"))
