"""Files whose checksums are right and whose values are nonsense are found, and sampling from them raises."""

import io
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.damage import (
    EDGE_IDS,
    INDICES,
    INDPTR,
    MODES,
    RELATION,
    TRAIN,
    array_files,
    every_mode,
    rewrite,
    sample_all,
    set_value,
)
from support.graphs import random_graph, save_in_parts
from support.refusals import assert_raises
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import hoploom
from hoploom import BatchError, DataError, HoploomError, LinkNeighborLoader, StoreError
from hoploom.store import check
from hoploom.store.check import problems

pytestmark = pytest.mark.usefixtures("no_sync")

INDPTR_DAMAGES = {
    "decreases": (3, 3, "decreases at node 8"),
    "far beyond the last edge": (3, 2**62, "decreases at node 9"),
    "the least number": (3, -(2**63), "decreases at node 8"),
}


@pytest.mark.parametrize(("position", "value", "message"), INDPTR_DAMAGES.values(), ids=INDPTR_DAMAGES.keys())
@every_mode
def test_a_damaged_indptr_is_found_and_sampling_raises(
    mode: dict[str, Any], position: int, value: int, message: str, ring_folder: Path
) -> None:
    set_value(ring_folder, INDPTR, position, value)
    assert list(problems(ring_folder)) == [f"{INDPTR}: {message}"]
    assert_raises(BatchError, "indptr is damaged at node", sample_all, ring_folder, **mode)


def test_an_indptr_whose_steps_overflow_is_found_and_raises(ring_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every difference of neighbours is positive in 64 bits; read as degrees they would send writes astray."""
    for position, value in enumerate([0, 2**62, -(2**63), -(2**62), 0, 6, 12]):
        set_value(ring_folder, INDPTR, position, value)
    assert list(problems(ring_folder)) == [f"{INDPTR}: decreases at node 7"]
    assert_raises(BatchError, "indptr is damaged at node", sample_all, ring_folder)
    repeat = torch.repeat_interleave

    def repeat_unless_it_crashes(nodes: Tensor, counts: Tensor) -> Tensor:
        assert int(counts.max()) <= 24, "the process would crash"
        return repeat(nodes, counts)

    monkeypatch.setattr(torch, "repeat_interleave", repeat_unless_it_crashes)
    assert_raises(HoploomError, "indptr", lambda: LinkNeighborLoader(hoploom.open(ring_folder), [2]))


@pytest.mark.parametrize(("position", "value"), [(0, 1), (0, -1), (6, 11), (6, 13), (6, 2**62)])
def test_an_indptr_with_wrong_ends_is_refused(position: int, value: int, ring_folder: Path) -> None:
    set_value(ring_folder, INDPTR, position, value)
    assert_raises(StoreError, f"{re.escape(INDPTR)} runs from", hoploom.open, ring_folder)
    (problem,) = problems(ring_folder)
    assert problem.startswith(f"{INDPTR} runs from")


@pytest.mark.parametrize("value", [12, -(2**31)])
@every_mode
def test_an_index_out_of_range_is_found_and_sampling_raises(
    mode: dict[str, Any], value: int, ring_folder: Path
) -> None:
    set_value(ring_folder, INDICES, 5, value)
    assert list(problems(ring_folder)) == [f"{INDICES}: position 5 is {value}, out of range [0, 12)"]
    if mode.get("num_neighbors") == [-1, -1] or mode.get("mode") == "blocks":
        mode = {**mode, "num_neighbors": [-1, -1]}
    assert_raises(BatchError, f"node id {value} is out of range", sample_all, ring_folder, **mode)


@pytest.mark.parametrize("value", [12, -(2**63)])
def test_a_split_out_of_range_is_found_and_sampling_raises(value: int, ring_folder: Path) -> None:
    set_value(ring_folder, TRAIN, 2, value)
    (problem,) = problems(ring_folder)
    assert problem.startswith(f"{TRAIN}: ")
    assert "out of range [0, 12)" in problem
    with pytest.raises(HoploomError):
        sample_all(ring_folder, input_nodes="train")


@pytest.mark.parametrize("value", [24, -1, 2**62])
def test_an_edge_id_that_is_none_is_found_and_links_are_refused(value: int, ring_folder: Path) -> None:
    set_value(ring_folder, EDGE_IDS, 3, value)
    assert_raises(HoploomError, "edge_id", lambda: LinkNeighborLoader(hoploom.open(ring_folder), [2]))
    (problem,) = problems(ring_folder)
    assert problem.startswith(f"{EDGE_IDS}: ")


@pytest.mark.parametrize("seen", [1 << 28, 5])
def test_an_edge_id_given_twice_is_found_and_links_are_refused(
    seen: int, ring_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by two parts, and where few ids are looked at in one pass."""
    monkeypatch.setattr(check, "SEEN_IDS", seen)
    whole = np.load(ring_folder / EDGE_IDS)
    other = np.load(ring_folder / EDGE_IDS.replace("part-00001", "part-00000"))
    for twice in (whole[4], other[0]):
        set_value(ring_folder, EDGE_IDS, 3, int(twice))
        with pytest.raises(HoploomError, match="edge_id"):
            LinkNeighborLoader(hoploom.open(ring_folder), [2])
        assert list(problems(ring_folder)) == [f"{EDGE_IDS}: position 3 is {int(twice)}, which another edge has too"]


def test_an_edge_id_that_257_edges_have_is_found(tmp_path: Path) -> None:
    """Counts in bytes wrap there."""
    num_edges = 300
    graph = Data(x=torch.zeros(2, 1), edge_index=torch.tensor([[0, 1], [1, 0]]).repeat(1, num_edges // 2))
    hoploom.from_pyg(graph).save(tmp_path / "store")
    file = EDGE_IDS.replace("part-00001", "part-00000")
    ids = np.arange(num_edges)
    ids[10:267] = 10
    content = io.BytesIO()
    np.save(content, ids)
    rewrite(tmp_path / "store", file, content.getvalue())
    assert list(problems(tmp_path / "store")) == [f"{file}: position 10 is 10, which another edge has too"]


SPLIT_DAMAGES = {
    "twice": (2, 1, "position 2 is 1, not above the one before it"),
    "falls": (2, 0, "position 2 is 0, not above the one before it"),
    "other part": (5, 11, "position 5 is 11, of another part: this one holds nodes 0 to 5"),
}


@pytest.mark.parametrize(("position", "value", "message"), SPLIT_DAMAGES.values(), ids=SPLIT_DAMAGES.keys())
def test_a_split_that_does_not_rise_or_is_of_another_part_is_found(
    position: int, value: int, message: str, ring_folder: Path
) -> None:
    set_value(ring_folder, TRAIN, position, value)
    assert list(problems(ring_folder)) == [f"{TRAIN}: {message}"]


@pytest.mark.parametrize("chunk", [1 << 20, 4])
@pytest.mark.parametrize(("column", "field"), [("weight", "weight"), ("time", "edge_time")])
def test_weights_and_times_that_differ_from_their_field_are_found(
    column: str, field: str, chunk: int, events_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "CHUNK_EDGES", chunk)
    assert list(problems(events_folder)) == []
    values = np.load(events_folder / f"{RELATION}/csc.{column}.npy")
    for position in (0, 7, len(values) - 1):
        damaged = f"{RELATION}/{field}.npy"
        set_value(events_folder, damaged, position, 77)
        assert list(problems(events_folder)) == [
            f"{RELATION}/csc.{column}.npy: position {position} is {values[position].item()}, "
            f"but field {field!r} says {np.array(77, values.dtype).item()}"
        ]
        set_value(events_folder, damaged, position, values[position])


def test_times_that_differ_from_their_source_node_are_found(tmp_path: Path) -> None:
    """Those of sources in the other part, too."""
    folder = tmp_path / "timed"
    save_in_parts(hoploom.from_pyg(random_graph(20, 90, 1), time_attr="node_time"), folder, 2)
    assert list(problems(folder)) == []
    sources = np.load(folder / INDICES)
    position = int(np.flatnonzero(sources < 10)[0])  # of the first part
    set_value(folder, "part-00000/nodes/node/node_time.npy", int(sources[position]), 1000)
    found = list(problems(folder))
    assert any(problem.startswith(f"{RELATION}/csc.time.npy: position {position} is ") for problem in found)
    assert all("but field 'node_time' says 1000" in problem for problem in found)


@pytest.mark.parametrize("name", [INDPTR, INDICES])
def test_the_links_of_a_damaged_topology_are_refused(name: str, ring_folder: Path) -> None:
    set_value(ring_folder, name, 3, -1)
    with pytest.raises(HoploomError):
        list(LinkNeighborLoader(hoploom.open(ring_folder), [2], batch_size=4))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_found(value: float, events_folder: Path) -> None:
    set_value(events_folder, f"{RELATION}/csc.weight.npy", 3, value)
    (problem,) = problems(events_folder)
    assert problem.startswith(f"{RELATION}/csc.weight.npy: ")
    assert "negative or not finite" in problem


def test_times_out_of_order_are_found(events_folder: Path) -> None:
    indptr = np.load(events_folder / INDPTR)
    begin = int(indptr[np.diff(indptr).argmax()])  # a list of several edges
    set_value(events_folder, f"{RELATION}/csc.time.npy", begin, 1000)
    (problem,) = problems(events_folder)
    assert problem.startswith(f"{RELATION}/csc.time.npy: ")


TIMED_MODES: dict[str, dict[str, Any]] = {
    "weight": {"weight_attr": "weight"},
    "sums": {"weight_attr": "weight", "replace": True},
    "time": {"time_attr": "edge_time", "input_time": torch.full((20,), 50)},
    "last": {"time_attr": "edge_time", "input_time": torch.full((20,), 50), "temporal_strategy": "last"},
    "both": {"time_attr": "edge_time", "input_time": torch.full((20,), 50), "weight_attr": "weight"},
}


@pytest.mark.parametrize("mode", (MODES | TIMED_MODES).values(), ids=MODES | TIMED_MODES)
def test_whatever_a_file_holds_sampling_gives_batches_or_a_hoploom_error(
    mode: dict[str, Any], events_folder: Path
) -> None:
    chosen = random.Random(1)
    raised = 0
    for name in [name for name in array_files(events_folder) if "csc." in name] * 2:
        whole = (events_folder / name).read_bytes()
        damaged = bytearray(whole)
        for _ in range(chosen.choice([1, 4])):
            damaged[chosen.randrange(128, len(whole))] = chosen.choice([0, 1, 127, 128, 255])
        rewrite(events_folder, name, bytes(damaged))
        try:
            sample_all(events_folder, **mode)
        except HoploomError:
            raised += 1
        list(problems(events_folder))
        rewrite(events_folder, name, whole)
    assert raised > 2


@pytest.mark.parametrize("is_typed", [False, True])
@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("edge_attr", (8, 3), "edge_attr has shape (8, 3) for 9 edges; give one row per edge"),
        ("edge_weight", (10,), "edge_weight has shape (10,) for 9 edges; give one row per edge"),
        ("y", (4,), "y has shape (4,) for 6 nodes; give one row per node"),
        ("train_mask", (5,), "train_mask has shape (5,) for 6 nodes; give one row per node"),
    ],
)
def test_a_field_of_pygs_data_with_rows_missing_is_refused(
    name: str, shape: tuple[int, ...], said: str, is_typed: bool
) -> None:
    x, edge_index = torch.zeros(6, 2), torch.zeros(2, 9, dtype=torch.int64)
    data: Any = HeteroData() if is_typed else Data(x=x, edge_index=edge_index)
    if is_typed:
        data["a"].x, data["a", "to", "a"].edge_index = x, edge_index
    owner = data["a", "to", "a"] if is_typed and "edge" in name else data["a"] if is_typed else data
    owner[name] = torch.zeros(shape)
    assert_raises(DataError, re.escape(said), lambda: hoploom.from_pyg(data))


def test_fields_of_the_whole_graph_are_the_graphs() -> None:
    """A label of the graph, and what is called like nothing of nodes or edges."""
    data = Data(x=torch.zeros(6, 2), edge_index=torch.zeros(2, 9, dtype=torch.int64), y=torch.ones(1, 4))
    data.names, data.edge_label, data.train_mask = torch.zeros(3), torch.zeros(4), torch.ones(6, 10).bool()
    store = hoploom.from_pyg(data)
    assert list(store.schema.node_types[0].fields) == ["x", "train_mask"]
    assert not store.schema.node_types[0].splits  # ten masks are no split
