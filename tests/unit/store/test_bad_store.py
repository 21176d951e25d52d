"""A damaged file or store.json is refused or found by name, no path leads out, and nothing in a store is ever run."""

import io
import json
import math
import os
import re
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.damage import INDICES, INDPTR, RELATION, TRAIN, X, array_files, edit, flip, rewrite, sample_all
from support.refusals import assert_raises

import hoploom
from hoploom import StoreError
from hoploom.cli import main
from hoploom.store import format as layout
from hoploom.store.check import problems
from hoploom.store.fetch import fetch
from hoploom.store.storage_path import StoragePath
from hoploom.store.store import held_parts

pytestmark = pytest.mark.usefixtures("no_sync")


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_flipped_bit_is_found_in_the_file_that_has_it(place: float, ring_folder: Path) -> None:
    for name in array_files(ring_folder):
        position = int(place * ((ring_folder / name).stat().st_size - 1))
        flip(ring_folder, name, position)
        (problem,) = problems(ring_folder)
        assert problem.startswith(f"{name}: checksum")
        flip(ring_folder, name, position)


@pytest.mark.parametrize("size", [-1, 200, 128, 64, 0, +1], ids=lambda size: f"{size:+d}" if size in (-1, 1) else None)
def test_a_file_of_the_wrong_size_is_refused_by_name(size: int, ring_folder: Path) -> None:
    for name in array_files(ring_folder):
        whole = (ring_folder / name).read_bytes()
        wrong = whole[:-1] if size == -1 else whole + b"\0" if size == 1 else whole[:size]
        if wrong == whole:
            continue
        (ring_folder / name).write_bytes(wrong)
        with pytest.raises(StoreError, match=f"{re.escape(name)} has {len(wrong)} bytes, .* copy it again"):
            hoploom.open(ring_folder)
        (problem,) = problems(ring_folder)
        assert problem.startswith(f"{name}: {len(wrong)} bytes, {len(whole)} expected")
        (ring_folder / name).write_bytes(whole)


def test_a_missing_file_is_refused_by_name(ring_folder: Path) -> None:
    for name in array_files(ring_folder):
        (ring_folder / name).rename(ring_folder / "away")
        assert_raises(StoreError, f"{re.escape(name)} is missing", hoploom.open, ring_folder)
        assert list(problems(ring_folder)) == [f"{name}: missing"]
        (ring_folder / "away").rename(ring_folder / name)


def test_all_damaged_files_are_listed(ring_folder: Path) -> None:
    (ring_folder / X).unlink()
    flip(ring_folder, INDICES, 130)
    (ring_folder / TRAIN).write_bytes(b"")
    assert {problem.split(":")[0] for problem in problems(ring_folder)} == {X, INDICES, TRAIN}


def _socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{path.name}")  # short enough for the system
    os.close(folder)


IN_PLACE_OF_A_FILE: dict[str, Callable[[Path], object]] = {
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
    "socket": _socket,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a pipe": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", IN_PLACE_OF_A_FILE.values(), ids=IN_PLACE_OF_A_FILE.keys())
@pytest.mark.parametrize("name", [X, INDICES, TRAIN, "store.json"])
def test_what_is_no_file_is_refused_by_name(
    name: str, make: Callable[[Path], object], ring_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without waiting for the writer of a pipe."""
    (ring_folder / name).unlink()
    make(ring_folder / name)
    assert_raises(StoreError, re.escape(name), hoploom.open, ring_folder)
    (problem,) = problems(ring_folder)
    assert name in problem
    assert main(["check", str(ring_folder)]) == 1
    assert main(["info", str(ring_folder)]) == (2 if name == "store.json" else 0)
    with pytest.raises(StoreError, match=re.escape(name)):
        fetch(StoragePath(str(ring_folder)), ring_folder.parent / "copy")


def with_manifest(raw: bytes) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        path.mkdir()
        (path / "store.json").write_bytes(raw)

    return make


NO_STORES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "does not exist; give the folder of a store"),
    "empty directory": (Path.mkdir, "is no store: it has no store.json"),
    "file": (lambda path: path.write_text("hello"), "is no store: it is not a directory"),
    "store.json is a directory": (lambda path: (path / "store.json").mkdir(parents=True), "store.json"),
    "store.json is empty": (with_manifest(b""), "is damaged"),
    "not UTF-8": (with_manifest(b"\xff\xfe\x00"), "is damaged"),
    "a list": (with_manifest(b"[]"), "is no store"),
    "nested too deep": (with_manifest(b"[" * 100_000), "is damaged"),
    "a key twice": (with_manifest(b'{"format": "zarr", "format": "hoploom-store"}'), "'format' is there twice"),
    "another format": (with_manifest(b'{"format": "zarr", "version": 1}'), "its format is not 'hoploom-store'"),
}


@pytest.mark.parametrize(("make", "message"), NO_STORES.values(), ids=NO_STORES.keys())
def test_what_is_no_store_is_refused(make: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    make(tmp_path / "store")
    assert_raises(StoreError, f"{re.escape(str(tmp_path / 'store'))}.*{message}", hoploom.open, tmp_path / "store")
    (problem,) = problems(tmp_path / "store")
    assert message in problem


@pytest.mark.parametrize("name", ["../secret", "part-00000/../../secret", "/etc/hostname"])
def test_a_listed_path_that_leads_out_is_not_read(name: str, ring_folder: Path) -> None:
    (ring_folder.parent / "secret").write_bytes(b"secret")
    edit(ring_folder, lambda contents: contents["files"].update({name: {"bytes": 6, "crc32": zlib.crc32(b"secret")}}))
    (problem,) = problems(ring_folder)
    assert name in problem
    assert "leads out of the store" in problem


@pytest.mark.parametrize("linked", [X, "part-00001/nodes", "part-00001"])
def test_a_link_that_leads_out_is_not_followed(linked: str, ring_folder: Path) -> None:
    outside = ring_folder.parent / "outside"
    (ring_folder / linked).rename(outside)
    (ring_folder / linked).symlink_to(outside)
    assert_raises(StoreError, "leads out of the store", hoploom.open, ring_folder)
    assert any("leads out of the store" in problem for problem in problems(ring_folder))


def test_a_link_to_a_store_and_links_inside_it_are_followed(ring_folder: Path) -> None:
    (ring_folder / "elsewhere.npy").write_bytes((ring_folder / X).read_bytes())
    (ring_folder / X).unlink()
    (ring_folder / X).symlink_to(ring_folder / "elsewhere.npy")
    link = ring_folder.parent / "link"
    link.symlink_to(ring_folder)
    assert sample_all(link) == 4
    assert list(problems(link)) == []


def npy(header: str, values: bytes = b"", magic: bytes = b"\x93NUMPY\x01\x00") -> bytes:
    return magic + len(header).to_bytes(2, "little") + header.encode("latin1") + values


def described(descr: str = "'<f4'", order: str = "False", shape: str = "(6, 4)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


VALUES = bytes(6 * 4 * 4)
HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "no magic": npy(described(), VALUES, b"\x93NUMPZ\x01\x00"),
    "version 2": npy(described(), VALUES, b"\x93NUMPY\x02\x00"),
    "longer than the file": b"\x93NUMPY\x01\x00\xff\xff{",
    "another dtype": npy(described("'<i4'"), VALUES),
    "big endian": npy(described("'>f4'"), VALUES),
    "objects": npy(described("'|O'"), VALUES),
    "a dtype that is none": npy(described("5"), VALUES),
    "by column": npy(described(order="True"), VALUES),
    "another shape": npy(described(shape="(4, 6)"), VALUES),
    "a negative shape": npy(described(shape="(-6, -4)"), VALUES),
    "a call": npy("__import__('os').system('false')", VALUES),
    "keys of two kinds": npy(described()[:-1] + "1: 2, }", VALUES),
    "a bracket that stays open": npy(described()[:-1], VALUES),
    "deep brackets": npy("(" * 2000 + ")" * 2000, VALUES),
    "large": npy(described() + " " * 20_000, VALUES),
    "values missing": npy(described(), VALUES[:-4]),
    "values left over": npy(described(), VALUES + bytes(4)),
}


@pytest.mark.parametrize("raw", HEADERS.values(), ids=HEADERS.keys())
def test_a_wrong_npy_header_is_refused_by_name(raw: bytes, ring_folder: Path) -> None:
    rewrite(ring_folder, X, raw)
    assert_raises(StoreError, re.escape(X), hoploom.open, ring_folder)
    assert [problem for problem in problems(ring_folder) if X not in problem] == []
    assert list(problems(ring_folder)) != []


def test_no_flipped_bit_in_a_header_raises_anything_but_a_store_error() -> None:
    header = io.BytesIO()
    layout.write_npy_header(header, "float32", (6, 4))
    raw = header.getvalue()
    refused = 0
    for bit in range(len(raw) * 8):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            layout.read_npy_header(io.BytesIO(bytes(damaged)), X, "float32", (6, 4))
        except StoreError:
            refused += 1
    assert refused > 500


class WritesWhenUnpickled:
    """What an attacker would put into a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.marker, "it ran")


def test_pickled_objects_are_refused_and_never_run(ring_folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    objects = np.empty((6, 4), dtype=object)
    objects[0, 0] = WritesWhenUnpickled(marker)
    file = io.BytesIO()
    np.save(file, objects, allow_pickle=True)
    rewrite(ring_folder, X, file.getvalue())
    assert_raises(StoreError, f"{re.escape(X)} holds object", hoploom.open, ring_folder)
    (problem,) = problems(ring_folder)
    assert X in problem
    assert not marker.exists()
    np.load(ring_folder / X, allow_pickle=True)
    assert marker.read_text() == "it ran"  # the bait was live


@pytest.mark.parametrize("version", [2, 99, 0, -1, "1", 1.0, True, None, [1]])
def test_another_version_is_refused(version: Any, ring_folder: Path) -> None:
    edit(ring_folder, lambda contents: contents.update(version=version))
    message = f"format version {version!r}, this Hoploom reads up to 1"
    assert_raises(StoreError, re.escape(message), hoploom.open, ring_folder)
    (problem,) = problems(ring_folder)
    assert message in problem


def at(*path: Any, **values: Any) -> Callable[[Any], None]:
    def change(contents: Any) -> None:
        for key in path:
            contents = contents[key]
        contents.update(values)

    return change


in_node_type = partial(at, "node_types", 0)
in_field = partial(at, "node_types", 0, "fields", "x")
in_relation = partial(at, "relations", 0)
in_second_part = partial(at, "parts", 1)


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
    "means of other rows": (
        in_field(mean=[0.5] * 9, deviation=[1.0] * 9),
        "mean and deviation have [9] numbers for rows",
    ),
    "a mean alone": (in_field(mean=[0.5, 1, 2]), "mean and deviation have"),
    "an infinite mean": (in_field(mean=[math.inf], deviation=[1.0]), "mean is inf, not of type float"),
    "a shape of many extents": (in_field(shape=[1] * 70), "is too large for a row"),
    "name is a number": (in_node_type(name=5), "5"),
    "relation to an unknown type": (in_relation(destination="paper"), "paper"),
    "a node type twice": (twice("node_types"), "twice"),
    "a relation twice": (twice("relations"), "twice"),
    "no node types": (at(node_types=[]), "node"),
    "homogeneous is a word": (at(homogeneous="yes"), "yes"),
    "weight is no field": (at(weight="heavy"), "heavy"),
    "time is no field": (at(time="when"), "when"),
    "no parts": (at(parts=[]), "no parts"),
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
    "a file of negative size": (at("files", X, bytes=-1), "-1"),
    "a file without a checksum": (without("files", X, "crc32"), "crc32"),
    "no word on homogeneity": (without("homogeneous"), "homogeneous"),
}


@pytest.mark.parametrize(("change", "message"), LIES.values(), ids=LIES.keys())
def test_a_store_json_that_lies_is_refused(change: Callable[[Any], None], message: str, ring_folder: Path) -> None:
    edit(ring_folder, change)
    assert_raises(StoreError, re.escape(message), hoploom.open, ring_folder)
    assert any(message in problem for problem in problems(ring_folder))


def test_several_types_are_not_homogeneous(sound_stores: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound_stores / "library", tmp_path / "library"))
    edit(folder, at(homogeneous=True))
    assert_raises(StoreError, "homogeneous", hoploom.open, folder)


@pytest.mark.parametrize("column", ["weight", "time"])
def test_weights_and_times_cannot_go_missing_unseen(column: str, events_folder: Path) -> None:
    name = f"{RELATION}/csc.{column}.npy"
    (events_folder / name).unlink()
    edit(events_folder, without("files", name))
    assert_raises(StoreError, re.escape(name), hoploom.open, events_folder)
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
    given: Any = {"num_nodes": {"b": 2}, "splits": {"a": {"train": torch.tensor([1])}}, "weight_attr": "w"}
    hoploom.from_tensors(nodes, {("a", "to", "b"): edges}, **given).save(path)
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
    assert_raises(StoreError, r"part-00000/nodes/[^/]*/x\.npy is not listed", hoploom.open, ring_folder)
