"""A tensor file gives back what went in, to the last bit, or says what is wrong with it."""

import json
import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fit_workers import alone, learner_of
from torch import Tensor

from hoploom import ConfigError, StoreError
from hoploom.train.checkpoint import DTYPES, Checkpoint, _checksum, read_state, write_state

STATE = {"a": torch.arange(6.0).view(2, 3), "b": [torch.tensor(7), "text"]}


def there_and_back(state: Any, folder: Path) -> Any:
    write_state(folder / "state.safetensors", state)
    return read_state(folder / "state.safetensors")


def bits(tensor: Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def raw_tensor(kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = math.prod(shape) * kind.itemsize
    raw = torch.randint(2 if kind == torch.bool else 256, (size,), dtype=torch.uint8)
    return raw.view(kind).reshape(shape)


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4), (1,)])
def test_tensors_of_every_dtype_and_shape_survive_bit_by_bit(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = {name: raw_tensor(kind, shape) for name, kind in DTYPES.items()}
    found = there_and_back({"odd": torch.ones(3, dtype=torch.uint8)} | tensors, tmp_path)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape, bits(found[name])) == (tensor.dtype, shape, bits(tensor))


def test_structure_survives_with_its_types_and_keys(tmp_path: Path) -> None:
    state = {
        0: {1: [None, True, 2, -0.1, "three"], 2.5: (), False: (1, (2, [3]))},
        "0": Counter({3: 2, 5: 1}),
        "empty": {},
        "numbers": [1 << 100, 1e-320, math.inf, -math.inf, -0.0],
        "a/b": 1,
        "a": {"b": 2},
    }
    found = there_and_back(state, tmp_path)
    assert found == state
    assert [type(key) for key in found[0]] == [int, float, bool]
    assert (type(found["0"]), type(found[0][2.5]), str(found["numbers"][4])) == (Counter, tuple, "-0.0")
    assert math.isnan(there_and_back([math.nan], tmp_path)[0])


def test_tensors_whose_paths_look_alike_stay_apart(tmp_path: Path) -> None:
    state = {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2), "__metadata__": torch.tensor(3)}
    assert there_and_back(state, tmp_path) == state


def test_a_transposed_tensor_comes_back_as_it_reads(tmp_path: Path) -> None:
    tensor = torch.arange(6).view(2, 3).t()
    assert there_and_back(tensor, tmp_path).tolist() == tensor.tolist()


def test_the_file_has_the_layout_of_safetensors(tmp_path: Path) -> None:
    write_state(tmp_path / "f", STATE)
    raw = (tmp_path / "f").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    assert (size % 8, raw[8:9]) == (0, b"{")
    assert all(isinstance(value, str) for value in header["__metadata__"].values())
    assert header["a"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert header["b/0"] == {"dtype": "I64", "shape": [], "data_offsets": [24, 32]}
    assert len(raw) == 8 + size + 32


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": [1, {2}]}, "a set at 'a/1'"),
        ({"f": print}, "a builtin_function_or_method at 'f'"),
        ({(1, 2): 3}, r"the key \(1, 2\)"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        ({"c": torch.zeros(2, dtype=torch.complex128)}, "torch.complex128 at 'c'"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(state: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        write_state(tmp_path / "f", state)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_holds_itself_is_refused(tmp_path: Path) -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(ConfigError, match="nested more than 64 deep"):
        write_state(tmp_path / "f", state)


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_state(path, STATE)
    raw = path.read_bytes()
    for size in (*range(0, len(raw), 7), len(raw) - 1):
        path.write_bytes(raw[:size])
        with pytest.raises(StoreError, match=r"/f is damaged: .*; take another"):
            read_state(path)


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_state(path, STATE)
    raw = path.read_bytes()
    for position in range(len(raw)):
        changed = bytearray(raw)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises(StoreError):
            read_state(path)


def described(**changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes


def write_raw(path: Path, header: bytes, raw: bytes = b"\0" * 4) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"__metadata__": {}}, "not from Hoploom"),
        ({"__metadata__": {"tree": "null"}, "a": described()}, "not from Hoploom"),
        ({"a": described(dtype="F8_E8M0")}, "a dtype that Hoploom does not write"),
        ({"a": described(dtype="F32", shape=[1 << 61, 0], data_offsets=[0, 0])}, ""),
        ({"a": described(data_offsets=[1, 5])}, ""),
        ({"a": described(), "b": described(data_offsets=[2, 6])}, ""),
        ({"a": described(shape=[8], data_offsets=[0, 8])}, ""),
        ({"a": described()}, "its checksum does not match"),
        ({"a": 3}, ""),
    ],
)
def test_a_header_that_lies_is_refused(entries: Any, said: str, tmp_path: Path) -> None:
    header = {"__metadata__": {"tree": "null", "crc32": "0"}} | entries
    write_raw(tmp_path / "f", json.dumps(header).encode(), b"\0" * 4 if "a" in entries else b"")
    with pytest.raises(StoreError, match=rf"/f is damaged: .*{said}.*; take another"):
        read_state(tmp_path / "f")


@pytest.mark.parametrize(
    "tree",
    [
        *('{"tensor": "none"}', '{"tuple": 1}', '{"dict": [[1]]}', '{"dict": [[[1], 2]]}', "{}"),
        *('{"list": [], "dict": []}', "NaN,", "[" * 100000),
    ],
)
def test_a_structure_that_nobody_wrote_is_refused(tree: str, tmp_path: Path) -> None:
    metadata = {"tree": tree, "crc32": _checksum(tree, {}, ())}
    write_raw(tmp_path / "f", json.dumps({"__metadata__": metadata}).encode(), b"")
    with pytest.raises(StoreError, match=r"is damaged: .*; take another"):
        read_state(tmp_path / "f")


def test_a_missing_file_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot read .*/f: .*No such file"):
        read_state(tmp_path / "f")


def test_two_names_are_two_files_and_a_damage_to_one_leaves_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: named.append(Path(new).name) or replace(old, new))
    (tmp_path / ".best.partial").write_text("of a process that was killed")
    for damaged, other in (("last", "best"), ("best", "last")):
        write_state(tmp_path / "last", STATE, first=tmp_path / "best")
        with (tmp_path / damaged).open("r+b") as file:
            file.truncate(100)
        with pytest.raises(StoreError, match=f"{damaged} is damaged"):
            read_state(tmp_path / damaged)
        assert read_state(tmp_path / other).keys() == STATE.keys()
    assert named == ["best", "last"] * 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["best", "last"]


def test_a_disk_that_fills_while_a_run_saves_keeps_the_checkpoint_before(small_disk: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint(small_disk("size=256k"), alone())
    checkpoint.save("last", learner_of().parts(), number=1)
    with pytest.raises(StoreError, match=r"the disk is full writing .*/disk/last.safetensors; .*free some space"):
        checkpoint.save("last", {"model": torch.nn.Linear(1000, 1000)}, number=2)
    assert [path.name for path in checkpoint.folder.iterdir()] == ["last.safetensors"]
    assert checkpoint.restore("last", learner_of().parts()) == {"number": 1}
