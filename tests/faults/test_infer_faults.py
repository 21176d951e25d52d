"""Layer-wise inference by several ranks, and whatever stops it: it is whole, or nothing is left."""

import fcntl
import gc
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support import infer_workers
from support.graphs import library, random_graph, ring
from support.infer_workers import (
    EVERYTHING,
    SMALL,
    assert_equal_to_forward,
    graph_with_loops,
    in_threads,
    model_of,
    read,
)
from support.models import learned
from support.stores import left_in
from support.until import until
from torch import nn

import hoploom
from hoploom import ConfigError, PeerError, Store, StoreError
from hoploom.inference import Inference, files, infer
from hoploom.nn import GNN, GraphSAGE, Shape
from hoploom.ranks.spawn import spawn

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")


@pytest.mark.parametrize("kind", ["sage", "gcn"])
def test_ranks_on_hosts_see_each_others_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared disks promise: what one host has synced is there for another that opens the file afterwards."""
    store = hoploom.from_pyg(graph_with_loops())
    models = [model_of(store, kind) for _ in range(3)]
    unsynced: set[tuple[int, str]] = set()
    mapped: list[str] = []
    write, sync, put = os.pwrite, os.fsync, files.MappedFile

    def path_of(handle: int) -> str:
        return os.readlink(f"/proc/self/fd/{handle}")

    def pwrite(handle: int, *given: Any) -> int:
        unsynced.add((threading.get_ident(), path_of(handle)))
        return write(handle, *given)

    def fsync(handle: int) -> None:
        unsynced.discard((threading.get_ident(), path_of(handle)))
        sync(handle)

    def map_(handle: int, size: int) -> Any:
        path = path_of(handle)
        assert path not in {name for _, name in unsynced}
        assert fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        mapped.append(Path(path).name)
        return put(handle, size)

    for name, patch in (("pwrite", pwrite), ("fsync", fsync)):
        monkeypatch.setattr(os, name, patch)
    monkeypatch.setattr(files, "MappedFile", map_)
    raised = in_threads(3, lambda own: infer(models[own.rank], store, tmp_path / "out", own, inference=EVERYTHING))
    assert (raised, unsynced) == ([None] * 3, set())
    assert {f"rows-{depth}-0.rows" for depth in range(2)} <= set(mapped)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_stops_one_rank_stops_all_within_a_slice(failing: int, tmp_path: Path) -> None:
    store = hoploom.from_pyg(graph_with_loops())
    models, calls = [model_of(store) for _ in range(3)], [0] * 3

    def run(context: Any) -> None:
        def progress(done: int, total: int) -> None:
            calls[context.rank] += 1
            if context.rank == failing:
                raise KeyboardInterrupt
            until(lambda: any(tmp_path.glob(f".out.partial-*/failed-{failing}")))

        infer(models[context.rank], store, tmp_path / "out", context, inference=EVERYTHING, progress=progress)

    raised = in_threads(3, run)
    assert [type(error) for error in raised] == [KeyboardInterrupt if r == failing else PeerError for r in range(3)]
    assert max(calls) == 1
    told = str(raised[(failing + 1) % 3])
    assert (told, left_in(tmp_path)) == (f"rank {failing} failed computing layer 1: KeyboardInterrupt", [])


def test_processes_write_together_and_fail_together(tmp_path: Path) -> None:
    spawn(infer_workers.infer_and_fail, 2, [str(tmp_path)])
    graph = random_graph(60, 400, 1)
    store = hoploom.from_pyg(graph)
    assert left_in(tmp_path) == ["gcn", "sage", "told-0", "told-1"]
    for kind in ("sage", "gcn"):
        assert left_in(tmp_path / kind / "node") == ["part-00000.parquet", "part-00001.parquet"]
        assert_equal_to_forward(tmp_path / kind, model_of(store, kind), graph)
    assert (tmp_path / "told-0").read_text().startswith("PeerError: rank 1 failed ")
    assert (tmp_path / "told-1").read_text() == "ZeroDivisionError: rank 1 has had enough"


def test_a_rank_without_the_context_is_told_so(ring_store: Store, tmp_path: Path, monkeypatch: Any) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"this is rank 1 of 2; pass the context"):
        infer(model_of(ring_store), ring_store, tmp_path / "out")


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What holds on to itself stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(("error", "every"), [(KeyboardInterrupt, 1), (OSError, 6)], ids=["Ctrl-C", "OSError"])
def test_whenever_it_is_stopped_nothing_is_left_and_the_model_is_as_it_was(
    error: type[BaseException], every: int, tmp_path: Path
) -> None:
    store = hoploom.from_pyg(ring(12))
    model = model_of(store, "gcn").train()
    model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    num_descriptors, scratch = len(os.listdir("/proc/self/fd")), tmp_path / "scratch"
    chosen = Inference(memory=SMALL, scratch=scratch)
    calls: list[tuple[int, int]] = []
    infer(model, store, tmp_path / "sound", inference=chosen, progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (12 * 7, 12 * 7)
    for stop, _ in calls[::every]:

        def progress(done: int, total: int, stop: int = stop) -> None:
            assert left_in(scratch)
            if done == stop:
                raise error

        with suppress(error):
            infer(model, store, tmp_path / "out", inference=chosen, progress=progress)
        assert ".rows" not in Path("/proc/self/maps").read_text()
        assert (left_in(tmp_path), left_in(scratch)) == (["scratch", "sound"], [])
        assert [module.training for module in model.modules()] == modes
    assert len(os.listdir("/proc/self/fd")) == num_descriptors
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("options", ["size={}k", "size=1m,nr_inodes={}"])
def test_a_disk_may_fill_up_at_any_moment(options: str, small_disk: Callable[[str], Path]) -> None:
    store = hoploom.from_pyg(random_graph(400, 800, 1))
    model = GNN("gcn", store.schema, Shape(16, 2, 4))
    messages: list[str] = []
    for size in range(1, 40) if "inodes" in options else range(4, 400, 4):
        disk = small_disk(options.format(size))
        try:
            infer(model, store, disk / "out", inference=Inference(memory=16 * SMALL))
            break
        except StoreError as error:
            messages.append(str(error))
        assert left_in(disk) == []
    assert len(messages) >= 5
    assert [message for message in messages if "the disk is full writing" not in message] == []
    assert (left_in(disk), read(disk / "out" / "node", "id").tolist()) == (["out"], list(range(400)))


@pytest.mark.parametrize("existing", ["file", "directory", "link to nothing"])
def test_what_exists_is_refused_and_left_alone(existing: str, ring_store: Store, tmp_path: Path) -> None:
    target = tmp_path / "out"
    if existing == "file":
        target.write_text("precious")
    elif existing == "directory":
        target.mkdir()
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"/out exists; give another path, or remove it first"):
        infer(model_of(ring_store), ring_store, target)
    assert left_in(tmp_path) == ["out"]


def test_what_appears_meanwhile_is_left_alone(ring_store: Store, tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done == total:
            (tmp_path / "out").mkdir()

    with pytest.raises(StoreError, match="/out exists"):
        infer(model_of(ring_store), ring_store, tmp_path / "out", progress=progress)
    assert (left_in(tmp_path), left_in(tmp_path / "out")) == (["out"], [])


def test_a_place_that_cannot_be_written_is_a_store_error(ring_store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*/file/out"):
        infer(model_of(ring_store), ring_store, tmp_path / "file" / "out")
    assert left_in(tmp_path) == ["file"]


def test_sources_that_do_not_exist_are_a_store_error(tmp_path: Path) -> None:
    hoploom.from_pyg(ring(12)).save(tmp_path / "store")
    (path,) = tmp_path.rglob("csc.indices.npy")
    path.write_bytes(path.read_bytes()[:-4] + (99).to_bytes(4, "little"))
    store = hoploom.open(tmp_path / "store")
    for kind in ("sage", "gcn", "gat"):
        with pytest.raises(StoreError, match=r"in-edges of 'node' 0 to 11: .*; run hoploom check"):
            infer(model_of(store, kind), store, tmp_path / "out")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no column": ({"columns": []}, r"columns is \[\]; give some of \['embedding', 'output', 'prediction'\]"),
    "one word": ({"columns": "output"}, "columns is 'output'; give some of .* in a list"),
    "unknown": ({"columns": ["logits"]}, r"columns is \['logits'\]; give some of"),
    "twice": ({"columns": ["output", "output"]}, "each once"),
    "one type": ({"node_types": "paper"}, r"node_types is 'paper'; give a list of names: \['paper'\]"),
    "memory": ({"memory": 12}, "memory is 12; give bytes, at least 1024"),
    "memory in words": ({"memory": "1G"}, "memory is '1G'; give bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_options_are_refused_when_they_are_made(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ConfigError, match=message):
        Inference(**options)


def test_models_that_do_not_fit_are_refused_before_anything_is_written(library_store: Store, tmp_path: Path) -> None:
    rings = hoploom.from_pyg(ring(12))
    sage = model_of(rings)
    refused: list[tuple[nn.Module, Store, dict[str, Any], str]] = [
        (nn.Linear(4, 4), rings, {}, "Linear cannot run layer by layer and has no num_layers, .* set model.num_layers"),
        (sage, library_store, {}, r"no outputs for any node type of \['author', 'paper', 'venue'\]; make it with"),
        (GraphSAGE(5, 8, 2, 3), rings, {}, "x of 'node' has 4 features, but the model expects 5; make it with"),
        (model_of(rings).half(), rings, {}, r"the model computes in \['torch.float16'\]; .* model.float\(\)"),
        (sage, rings, {"node_types": ["paper"]}, r"no outputs for \['paper'\]; it has some for \['node'\]"),
    ]
    for model, store, options, message in refused:
        with pytest.raises(ConfigError, match=message):
            infer(model, store, tmp_path / "out", inference=Inference(**options))
    assert left_in(tmp_path) == []


def test_a_store_without_the_learned_rows_of_the_model_is_refused(tmp_path: Path) -> None:
    store = hoploom.from_pyg(library())
    model = GNN("rsage", learned(store).schema, Shape(8, 2, 4))
    with pytest.raises(
        ConfigError, match=r"'venue' has no features x, .*give a store with the learned rows of 'venue'"
    ):
        infer(model, store, tmp_path / "out")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_and_a_file_shows_nothing(
    ring_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        infer(model_of(ring_store), ring_store, tmp_path / type(stream).__name__)
        shown = "[####################]  36 of 36 rows" in stream.getvalue()
        assert shown == stream.isatty()
