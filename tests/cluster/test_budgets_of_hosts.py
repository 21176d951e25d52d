"""Graph servers and a budget of memory on this host, at once."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batch_servers import listening
from support.batches import assert_same_batches
from support.placements import within
from support.servers import OneProcess

import hoploom
from hoploom import ConfigError, NeighborLoader, Store, StoreError
from hoploom.load.look_ahead import LookAhead
from hoploom.serve.memory_budget import BusyError, RequestContext
from hoploom.serve.service import Service
from hoploom.serve.wire import Message
from hoploom.store.row_cache import cached, report

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]
NUM_NODES, WIDTH = 10_000, 64
QUICKLY = 20.0  # seconds, of the 60 that a request may take


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budget")
    hoploom.generate(folder / "graph.store", num_nodes=NUM_NODES, avg_degree=8, num_features=WIDTH, num_classes=4)
    hoploom.partition(folder / "graph.store", folder / "parts", 2, method="range")
    return folder / "parts"


def _loader(store: Store, **options: Any) -> NeighborLoader:
    given: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3, "num_workers": 2, **options}
    return NeighborLoader(store, [3, 2], torch.arange(0, NUM_NODES, 50), **given)


@pytest.fixture(scope="module")
def address(path: Path, server_process: OneProcess) -> str:
    return server_process.serve(path, [[]], store_memory=within(path, 0.1))[0]


@pytest.mark.parametrize("topology", ["local", "parted"])
def test_a_budget_bounds_how_many_steps_are_fetched_together(path: Path, address: str, topology: Any) -> None:
    with hoploom.connect(address, path, parts=[0], topology=topology, memory=within(path, 0.3)) as store:
        loader = _loader(store)
        ahead: Any = loader._producer
        assert isinstance(ahead, LookAhead)
        assert_same_batches(_loader(hoploom.open(path)), loader)
        assert store.budget is not None
        assert store.reads is not None
        assert store.reads.requests > 0
        wanted = sum(ahead.fetched) / len(loader) * 4 * WIDTH  # bytes a step, less what was fetched before
        assert ahead.num_steps is not None
        assert 4 < ahead.num_steps <= store.budget.window / wanted  # 4 are the default without a budget
        assert len(ahead.fetched) == -(-len(loader) // ahead.num_steps)


def test_a_budget_decides_whether_all_lists_are_mapped(path: Path, address: str) -> None:
    for memory, mapped in ((within(path, 0.1), 1), ("1GB", 2)):
        with hoploom.connect(address, path, parts=[0], memory=memory) as store:
            assert len(store.topology) == mapped


def test_a_rank_on_a_disk_is_at_home_in_its_parts(path: Path, address: str) -> None:
    with hoploom.init(device="cpu") as context:
        options: dict[str, Any]
        for options in ({}, {"servers": address, "topology": "parted"}):
            store = hoploom.open(path, context=context, parts=[1], memory=within(path, 0.1), **options)
            assert store.reads is not None
            assert store.deployment.homes == ((1,),)


@pytest.mark.parametrize("given", [{"servers": "127.0.0.1:1"}, {"path": "s", "parts": [], "servers": "127.0.0.1:1"}])
def test_a_budget_without_parts_is_refused_with_the_way_out(given: dict[str, Any]) -> None:
    message = (
        r"memory limits what this process holds of the parts .*; give path and parts, .* hoploom serve --store-memory"
    )
    with hoploom.init(device="cpu") as context, pytest.raises(ConfigError, match=message):
        hoploom.open(context=context, **given, memory="6GB")
    with pytest.raises(ConfigError, match=message):
        hoploom.connect("127.0.0.1:1", memory="6GB")


def test_a_cache_is_of_the_rows_of_other_hosts(path: Path, address: str) -> None:
    with hoploom.connect(address, path, parts=[0], memory=within(path, 0.1)) as store:
        held = report(cached(store, 1.0, {}))
    assert held is not None
    assert held.num_rows == NUM_NODES // 2  # those of this host are in the budget, or read from the disk


@pytest.fixture
def damaged(path: Path, tmp_path: Path, server_process: OneProcess) -> tuple[str, Path]:
    folder = Path(shutil.copytree(path, tmp_path / "copied"))
    return server_process.serve(folder, [[]], store_memory=within(path, 0.1))[0], folder


def _truncate(folder: Path) -> None:
    (file,) = folder.glob("part-00001/nodes/*/x.npy")
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


@pytest.mark.parametrize("mode", ["rows", "many rows", "batches"])
def test_a_server_whose_file_was_truncated_names_it_at_once(mode: str, damaged: tuple[str, Path]) -> None:
    address, folder = damaged
    said = rf"{address}: row \d+ of 'x' of 'node' \(.*part-00001/nodes/node/x.npy\) cannot be read: the file ends there"
    count = NUM_NODES if mode == "many rows" else 100  # many do not fit one read: the error comes while they are sent
    last = torch.arange(NUM_NODES - count, NUM_NODES)
    with hoploom.connect(address, made="servers" if mode == "batches" else "here") as store:
        next(iter(_loader(store)))
        _truncate(folder)
        begun = time.monotonic()
        with pytest.raises(StoreError, match=said):
            list(_loader(store)) if mode == "batches" else store.features.gather([("node", "x", last)])
        assert time.monotonic() - begun < QUICKLY


def test_a_replica_answers_where_a_file_cannot_be_read(path: Path, address: str, damaged: tuple[str, Path]) -> None:
    _truncate(damaged[1])
    expected = list(_loader(hoploom.open(path)))
    for made in ("servers", "here"):
        with hoploom.connect([damaged[0], address], made=made) as store:  # type: ignore[arg-type]
            with pytest.warns(UserWarning, match=f"{damaged[0]}: row .* cannot be read: .*; other servers") as warned:
                assert_same_batches(expected, _loader(store))
            assert len(warned) == 1


@pytest.mark.filterwarnings("ignore:.* other servers answer for it")
def test_a_replica_that_is_busy_answers_when_it_is_not(
    path: Path, damaged: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gather, refused = Service._gather, []

    def busy_at_first(self: Service, request: Message, call: RequestContext) -> Message:
        if len(refused) < 2:
            refused.append(request)
            raise BusyError("all memory is taken")
        return gather(self, request, call)

    monkeypatch.setattr(Service, "_gather", busy_at_first)  # of the replica, which is in this process
    _truncate(damaged[1])
    last = torch.arange(NUM_NODES - 100, NUM_NODES)
    with listening(path) as replica, hoploom.connect([damaged[0], replica.address], made="here") as store:
        found = [store.features.gather([("node", "x", last)])[0] for _ in range(20)]
    (expected,) = hoploom.open(path).features.gather([("node", "x", last)])
    assert all(torch.equal(expected, rows) for rows in found)
    assert len(refused) == 2


def test_a_server_reads_files_that_were_removed_to_the_end(path: Path, damaged: tuple[str, Path]) -> None:
    address, folder = damaged
    with hoploom.connect(address, made="here") as store:
        shutil.rmtree(folder)
        assert_same_batches(_loader(hoploom.open(path)), _loader(store))
