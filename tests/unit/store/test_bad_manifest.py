"""What store.json says is checked before anything is read by it."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.damage import INDPTR, RELATION, X, edit

import hoploom
from hoploom import StoreError
from hoploom.store.check import problems
from hoploom.store.store import held_parts

pytestmark = pytest.mark.usefixtures("no_sync")


@pytest.mark.parametrize("version", [2, 99, 0, -1, "1", 1.0, True, None, [1]])
def test_another_version_is_refused(version: Any, ring_folder: Path) -> None:
    edit(ring_folder, lambda contents: contents.update(version=version))
    message = f"format version {version!r}, this Hoploom reads up to 1"
    with pytest.raises(StoreError, match=re.escape(message)):
        hoploom.open(ring_folder)
    (problem,) = problems(ring_folder)
    assert message in problem


def in_node_type(**values: Any) -> Callable[[Any], None]:
    return lambda contents: contents["node_types"][0].update(values)


def in_field(**values: Any) -> Callable[[Any], None]:
    return lambda contents: contents["node_types"][0]["fields"]["x"].update(values)


def in_relation(**values: Any) -> Callable[[Any], None]:
    return lambda contents: contents["relations"][0].update(values)


def in_second_part(**values: Any) -> Callable[[Any], None]:
    return lambda contents: contents["parts"][1].update(values)


def in_contents(**values: Any) -> Callable[[Any], None]:
    return lambda contents: contents.update(values)


def twice(key: str) -> Callable[[Any], None]:
    return lambda contents: contents[key].append(contents[key][0])


def without(*path: Any) -> Callable[[Any], None]:
    def change(contents: Any) -> None:
        for key in path[:-1]:
            contents = contents[key]
        del contents[path[-1]]

    return change


LIES: dict[str, tuple[Callable[[Any], None], str]] = {
    "unknown dtype": (in_field(dtype="float8"), "float8"),
    "another dtype": (in_field(dtype="int32"), "x.npy"),
    "another width": (in_field(shape=[5]), "x.npy"),
    "negative count": (in_node_type(num_nodes=-12), "-12"),
    "count is a fraction": (in_node_type(num_nodes=12.5), "12.5"),
    "count is true": (in_relation(num_edges=True), "True"),
    "another count": (in_node_type(num_nodes=13), "12 nodes of node, not 13"),
    "huge shape": (in_field(shape=[2**40, 2**40]), "is too large for a row"),
    "huge shape of nothing": (in_field(shape=[0, 2**62]), "is too large for a row"),
    "a shape of many extents": (in_field(shape=[1] * 70), "is too large for a row"),
    "name is a number": (in_node_type(name=5), "5"),
    "relation to an unknown type": (in_relation(destination="paper"), "paper"),
    "a node type twice": (twice("node_types"), "twice"),
    "a relation twice": (twice("relations"), "twice"),
    "no node types": (in_contents(node_types=[]), "node"),
    "homogeneous is a word": (in_contents(homogeneous="yes"), "yes"),
    "weight is no field": (in_contents(weight="heavy"), "heavy"),
    "time is no field": (in_contents(time="when"), "when"),
    "no parts": (in_contents(parts=[]), "no parts"),
    "parts overlap": (in_second_part(first_nodes=[5]), "nodes of node"),
    "parts share edges": (in_second_part(first_edges=[11]), "edges of"),
    "a part with too few nodes": (in_second_part(num_nodes=[5]), "nodes of node"),
    "a part without a node count": (in_second_part(num_nodes=[]), "part"),
    "a part with a split too large": (in_second_part(splits={"node": {"val": 3, "test": 4}}), "split"),
    "a part without its splits": (in_second_part(splits={}), "split"),
    "a part with a split that is not the graph's": (in_second_part(splits={"node": {"other": 0}}), "split"),
    "a split of another size": (in_node_type(splits={"train": 7, "val": 3, "test": 3}), "split"),
    "one part is missing": (lambda contents: contents["parts"].pop(), "the parts hold"),
    "parts in another order": (lambda contents: contents["parts"].reverse(), "nodes of node"),
    "a file is not listed": (without("files", X), X),
    "the topology is not listed": (without("files", INDPTR), INDPTR),
    "a file of negative size": (lambda contents: contents["files"][X].update(bytes=-1), "-1"),
    "a file without a checksum": (without("files", X, "crc32"), "crc32"),
    "no word on homogeneity": (without("homogeneous"), "homogeneous"),
}


@pytest.mark.parametrize(("change", "message"), LIES.values(), ids=LIES.keys())
def test_a_store_json_that_lies_is_refused(change: Callable[[Any], None], message: str, ring_folder: Path) -> None:
    edit(ring_folder, change)
    with pytest.raises(StoreError, match=re.escape(message)):
        hoploom.open(ring_folder)
    assert any(message in problem for problem in problems(ring_folder))


def test_several_types_are_not_homogeneous(sound_stores: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound_stores / "library", tmp_path / "library"))
    edit(folder, in_contents(homogeneous=True))
    with pytest.raises(StoreError, match="homogeneous"):
        hoploom.open(folder)


@pytest.mark.parametrize("column", ["weight", "time"])
def test_weights_and_times_cannot_go_missing_unseen(column: str, events_folder: Path) -> None:
    name = f"{RELATION}/csc.{column}.npy"
    (events_folder / name).unlink()
    edit(events_folder, without("files", name))
    with pytest.raises(StoreError, match=re.escape(name)):
        hoploom.open(events_folder)
    assert any(name in problem for problem in problems(events_folder))


def test_a_listed_name_that_is_too_long_is_told(ring_folder: Path) -> None:
    edit(ring_folder, lambda contents: contents["files"].update({"a" * 5000: {"bytes": 1, "crc32": 1}}))
    assert held_parts(ring_folder) == [0, 1]
    (problem,) = problems(ring_folder)
    assert "File name too long" in problem


def tiny_store(path: Path) -> Path:
    """Every kind of entry that a store.json has, few of each."""
    nodes = {"a": {"x": torch.zeros(3, 2)}, "b": {}}
    edges = {"edge_index": torch.tensor([[2, 0], [1, 0]]), "w": torch.ones(2)}
    store = hoploom.from_tensors(
        nodes,
        {("a", "to", "b"): edges},
        num_nodes={"b": 2},
        splits={"a": {"train": torch.tensor([1])}},
        weight_attr="w",
    )
    store.save(path)
    return path


def paths_of(contents: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(contents, dict | list):
        for key in contents if isinstance(contents, dict) else range(len(contents)):
            yield from paths_of(contents[key], (*path, key))


WRONG: list[Any] = [None, True, -1, 0, 1, 1.5, 10**30, "", "x", "../x", [], [0], ["x"], {}, {"x": 1}]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_no_value_in_store_json_raises_anything_but_a_store_error(wrong: Any, tmp_path: Path) -> None:
    folder = tiny_store(tmp_path / "store")
    contents = json.loads((folder / "store.json").read_text())
    refused = 0
    for path in paths_of(contents):
        changed = json.loads(json.dumps({"root": contents}))
        place = changed
        keys = ("root", *path)
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = wrong
        (folder / "store.json").write_text(json.dumps(changed["root"]))
        try:
            hoploom.open(folder)
        except StoreError:
            refused += 1
            assert list(problems(folder)) != [], path
    assert refused > 20


@pytest.mark.parametrize("name", ["../../../../etc", "/etc", "..", "."])
def test_no_name_leads_out_of_the_store(name: str, ring_folder: Path) -> None:
    def rename(contents: Any) -> None:
        for part in contents["parts"]:
            part["splits"] = {name: part["splits"]["node"]}

    for change in (in_node_type(name=name), in_relation(source=name, destination=name), rename):
        edit(ring_folder, change)
    with pytest.raises(StoreError, match=r"part-00000/nodes/[^/]*/x\.npy is not listed"):
        hoploom.open(ring_folder)
