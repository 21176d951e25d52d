"""What cannot be placed is refused before anything is copied, with the way out."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.graphs import in_parts, ring, save_in_parts
from support.place_workers import placed_of
from support.refusals import assert_refused

import hoploom
from hoploom import ConfigError, Store
from hoploom.gpu import host_memory as hostmemory
from hoploom.gpu import place_plan, placement

ON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "neither topology nor features are given"),
    "no place": ({"topology": "gpu"}, "topology is 'gpu'; give 'cuda', 'host', 'auto'"),
    "a share of topology": ({"topology": "20%"}, "topology is '20%'"),
    "another place": ({"features": "disk"}, "features is 'disk'; give 'cuda', 'host'"),
    "too much": ({"features": "120%"}, "features is '120%'; give 'cuda', 'host', 'auto', a share such as"),
    "truth": ({"features": True}, "features is True; give"),
    "odd bytes": ({"features": "4 gigs"}, "features is '4 gigs'; give a size such as 512GB"),
    "no number": ({"features": "nan%"}, "features is 'nan%'; give 'cuda', 'host'"),
    "a share or bytes": ({"features": "0.5"}, "features is '0.5'; give '50%' for a share or '4GB' for bytes"),
    "without a unit": ({"features": "4e9"}, "features is '4e9'; give '50%' for a share or '4GB' for bytes"),
    "a space before": ({"features": " host"}, "features is ' host'; give 'cuda', 'host'"),
    "arrays": ({"topology": np.zeros(2)}, "topology is array([0., 0.]); give"),
    "a word for ranks": (
        {"features": "host", "device": ON_DEVICE, "among": "x"},
        "among is 'x'; give the context that hoploom.init made, or leave it out",
    ),
    "device": ({"topology": "host", "device": "tpu"}, "device is 'tpu'; give 'cuda'"),
    "two devices": (
        {"topology": "cuda:0", "features": "cuda:1"},
        "name ['cuda:0', 'cuda:1']; a store is placed on one",
    ),
    "two kinds": ({"topology": "cuda", "device": "cpu"}, "topology, features and device name ['cpu', 'cuda']; a store"),
    "no device": ({"topology": "cuda:99999999999"}, "topology is 'cuda:99999999999'; give 'cuda', 'host', 'auto'"),
    "rows spread over GPUs": ({"features": "spread"}, "features is 'spread'; give 'cuda', 'host', 'auto', a share"),
}


@pytest.mark.parametrize(("given", "said"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_refused(ring_store: Store, given: dict[str, Any], said: str) -> None:
    assert_refused(lambda: hoploom.place(ring_store, **given), said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_store_stays_as_it_is(ring_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(lambda: hoploom.place(ring_store, "cuda"), "TRITON_INTERPRET is set", "unset it, or give 'cpu'")
    monkeypatch.setattr(placement, "kernels_are_interpreted", lambda: False)
    for given in (
        {"topology": "cuda"},
        {"topology": "host"},
        {"topology": "cpu"},
        {"features": "cuda", "device": "cpu"},
    ):
        said = (
            "there is no GPU here; leave out place, [placement] or --device",
            "in tests, TRITON_INTERPRET=1 runs kernels on 'cpu'",
        )
        assert_refused(lambda given=given: hoploom.place(ring_store, **given), *said)  # type: ignore[misc]


def test_what_is_no_store_is_named(ring_store: Store) -> None:
    for wrong, kind in (("ring.store", "str"), (ring(12), "Data"), (None, "NoneType")):
        said = f"store is a {kind}; give hoploom.open(path) or hoploom.from_pyg(graph)"
        assert_refused(lambda wrong=wrong: hoploom.place(wrong, "host"), said)  # type: ignore[misc]


def test_without_triton_it_says_what_to_install(ring_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hoploom.gpu.loading", "hoploom.gpu.place_plan"):  # import Triton themselves
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ["triton", *(name for name in sys.modules if name.startswith("hoploom.ops.kernels."))]:
        monkeypatch.setitem(sys.modules, name, None)
    assert_refused(
        lambda: hoploom.place(ring_store, "host"), "placing needs Triton", "pip install triton, or leave the store"
    )


def test_too_little_device_memory_is_said_with_the_numbers(
    ring_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = hoploom.from_tensors({"x": torch.ones(1000, 64)}, torch.empty(2, 0, dtype=torch.int64))
    monkeypatch.setattr(hostmemory, "FOLDER", tmp_path)
    monkeypatch.setattr(place_plan, "free_memory", lambda device: 100_000)
    said = "placing this takes 256 kB of", "which has 100 kB free; give features='auto'"
    assert_refused(lambda: hoploom.place(store, features=ON_DEVICE), *said)
    assert_refused(lambda: hoploom.place(store, "host", ON_DEVICE), *said)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("num_parts", [1, 2])
def test_bytes_that_hold_no_row_are_refused(num_parts: int) -> None:
    """10 rows of 16 bytes: one row is 16, and a share that is one row of each of two parts is 32."""
    whole = hoploom.from_tensors({"x": torch.ones(10, 4)}, torch.empty(2, 0, dtype=torch.int64))
    store, least = in_parts(whole, num_parts), 16 * num_parts
    for few in (1, least - 1):
        said = f"features is {few} bytes, which hold no row of this store; give '{least}B' or more"
        assert_refused(lambda few=few: hoploom.place(store, features=few, device=ON_DEVICE), said)  # type: ignore[misc]
    for enough, rows in ((0, 0), (least, num_parts)):
        with hoploom.place(store, features=enough, device=ON_DEVICE) as placed:
            assert placed_of(placed).report[0].share == rows / 10


def test_some_of_the_parts_are_not_enough(tmp_path: Path) -> None:
    save_in_parts(hoploom.from_pyg(ring(12)), tmp_path / "ring", 3)
    some = hoploom.open(tmp_path / "ring", parts=[0])
    way = "open all parts of the store on this host, or leave it as it is"
    assert_refused(lambda: hoploom.place(some, "host", device=ON_DEVICE), "the topology cannot be placed", way)
    assert_refused(lambda: hoploom.place(some, features="host", device=ON_DEVICE), "the features cannot be placed", way)


def test_all_topology_beside_some_features_can_be_placed(tmp_path: Path) -> None:
    save_in_parts(hoploom.from_pyg(ring(12)), tmp_path / "ring", 3)
    some = hoploom.open(tmp_path / "ring", parts=[0], topology="all")
    with hoploom.place(some, ON_DEVICE) as store:
        assert placed_of(store).lists[0].indptr.tolist() == list(range(0, 25, 2))
    assert_refused(
        lambda: hoploom.place(some, ON_DEVICE, "host"),
        "the features cannot be placed: some of them are in parts that are not open",
    )


def test_a_store_is_placed_once(ring_store: Store) -> None:
    with hoploom.place(ring_store, ON_DEVICE) as store:
        said = "placed already, or was; give topology and features in one call, on the opened store again"
        assert_refused(lambda: hoploom.place(store, features="host"), said)


def test_learned_rows_are_made_after_placing(ring_store: Store) -> None:
    learned = hoploom.Embedding(ring_store, dim=4, join="add").store
    said = "the store has learned rows of ['node']; place the store first, then make the rows: hoploom.Embedding(placed"
    assert_refused(lambda: hoploom.place(learned, ON_DEVICE), said)


def test_a_closed_store_gathers_nothing(ring_store: Store) -> None:
    with hoploom.place(ring_store, ON_DEVICE, "host") as store:
        placed = placed_of(store)
    store.close()
    for use in (lambda: placed.lists, lambda: placed.gather([], torch.zeros(1, dtype=torch.int64))):
        with pytest.raises(ConfigError, match="the placed store is closed; place the opened store again"):
            use()
    said = "placed already, or was; give topology and features in one call, on the opened store again"
    assert_refused(lambda: hoploom.place(store, "host"), said)
    with hoploom.place(ring_store, ON_DEVICE) as again:
        assert placed_of(again).lists is not None
