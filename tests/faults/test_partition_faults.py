"""Partitioning what is damaged, or being killed at it: an error that says which relation, nothing left behind."""

import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.graphs import ring
from support.stores import contents

import hoploom
from hoploom import DataError, StoreError
from hoploom.partition import METHODS, partition, report
from hoploom.partition.renumber import order_nodes
from hoploom.store import format as layout

pytestmark = pytest.mark.usefixtures("no_sync")

PARTITION = "import sys, hoploom; hoploom.partition.partition(sys.argv[1], sys.argv[2], 3, fanouts=None)"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("file", "place", "wrong"), [("indices", 37, -7), ("indices", 3, 60), ("indptr", 5, 10**9)])
def test_damage_is_an_error_naming_the_relation(method: str, file: str, place: int, wrong: int, tmp_path: Path) -> None:
    hoploom.from_pyg(ring(60)).save(tmp_path / "store")
    path = next((tmp_path / "store").rglob(f"csc.{file}.npy"))
    width = 4 if file == "indices" else 8
    contents = bytearray(path.read_bytes())
    begin = len(contents) - (120 if file == "indices" else 61) * width + place * width
    contents[begin : begin + width] = wrong.to_bytes(width, "little", signed=True)
    path.write_bytes(contents)
    for seeds in (torch.arange(60), None):
        with pytest.raises((StoreError, DataError), match="hoploom check"):
            partition(tmp_path / "store", tmp_path / "parts", 2, method=method, seeds=seeds, fanouts=[-1, -1])
        assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_split_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    hoploom.from_pyg(ring(60)).save(tmp_path / "store")
    path = tmp_path / "store" / layout.split_file(0, "node", "train")
    contents = bytearray(path.read_bytes())
    contents[-8:] = (60).to_bytes(8, "little")
    path.write_bytes(contents)
    with pytest.raises(StoreError, match=r"a split of 'node' holds 60, out of range \[0, 60\); run hoploom check"):
        partition(tmp_path / "store", tmp_path / "parts", 2)


@pytest.mark.timeout(300)
def test_a_run_that_is_killed_leaves_what_the_next_one_clears(tmp_path: Path) -> None:
    hoploom.generate(tmp_path / "store", num_nodes=20_000, avg_degree=20, num_features=16)
    command = [sys.executable, "-c", PARTITION, str(tmp_path / "store"), str(tmp_path / "parts")]
    for wait in (0.0, 0.1):
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".parts.partial-*")) and run.poll() is None:
            assert time.monotonic() < deadline
            threading.Event().wait(0.002)
        with suppress(subprocess.TimeoutExpired):
            run.wait(wait)
        run.send_signal(signal.SIGKILL)
        if run.wait(60) == 0 or (tmp_path / "parts").exists():
            break  # it was faster
        assert len(list(tmp_path.glob(".parts.partial-*"))) == 1  # that of the one before was cleared
    if not (tmp_path / "parts").exists():
        partition(tmp_path / "store", tmp_path / "parts", 3, fanouts=None)
    partition(tmp_path / "store", tmp_path / "whole", 3, fanouts=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "store", "whole"]
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_seeds_left_out_are_train_where_one_type_has_it(tmp_path: Path) -> None:
    data = ring(12)
    store = hoploom.from_pyg(data)
    costs = partition(store, tmp_path / "a", 2, method="range", fanouts=[1])
    assert costs.sampling["seeds"] == "train"
    del data.train_mask
    costs = partition(hoploom.from_pyg(data), tmp_path / "b", 2, method="range", fanouts=[1])
    assert costs.sampling == {}
    assert report(tmp_path / "b").remote_share is None
    named = partition(store, tmp_path / "c", 2, method="range", seeds=("node", "train"), fanouts=[1])
    assert (named.sampling["seeds"], contents(tmp_path / "a")) == ("train", contents(tmp_path / "c"))
    assert partition(store, tmp_path / "d", 2, method="range", fanouts=None).remote_share is None


def test_many_parts_are_ordered_as_fast_as_few() -> None:
    parts = torch.arange(1_000_000).remainder(500).to(torch.int16)
    begin = time.process_time()
    order = order_nodes({"node": parts}, 500)["node"]
    assert time.process_time() - begin < 4  # part by part: 500 passes over a million nodes
    assert torch.equal(order.new_of_old, torch.arange(1_000_000) % 500 * 2000 + torch.arange(1_000_000) // 500)
