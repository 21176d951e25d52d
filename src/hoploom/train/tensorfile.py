"""Nested state with tensors as one file in the safetensors layout, written whole or not at all.

Any safetensors reader sees the tensors; the structure around them is JSON in the file's metadata. Costs one more pass
over the bytes, for a checksum.
"""

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from hoploom.errors import ConfigError, StoreError
from hoploom.store.durable import write_whole
from hoploom.train.state_json import decode, encode

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_LIMIT = 100 << 20  # bytes; safetensors' own
LENGTH_BYTES = 8
METADATA = "__metadata__"
MOST = 2**63 - 1  # of an extent, an offset, or a number of bytes


@dataclass(frozen=True)
class Entry:
    """Where the header says that a tensor lies among the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def write(path: Path, state: Any) -> None:
    """Write the state; the file that was there stays until the new one is whole and on the disk."""
    tree, tensors = encode(state)
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ConfigError(f"the state holds a tensor of {tensor.dtype} at {name!r}; convert it, e.g. to float64")
    header = _header(json.dumps(tree, separators=(",", ":")), tensors)
    write_whole(path, (len(header).to_bytes(LENGTH_BYTES, "little"), header, *map(_raw, tensors.values())))


def _header(tree: str, tensors: dict[str, Tensor]) -> bytes:
    """The header, padded so that the data begin at a multiple of eight bytes."""
    entries, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    checksum = _described(tree, entries)
    for tensor in tensors.values():
        checksum = zlib.crc32(_raw(tensor), checksum)
    metadata = {"tree": tree, "crc32": f"{checksum:08x}"}
    text = json.dumps({METADATA: metadata, **entries}, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _described(tree: str, entries: dict[str, Any]) -> int:
    """The checksum of all that is not data."""
    return zlib.crc32(json.dumps([tree, entries], sort_keys=True).encode())


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


# --- reading --------------------------------------------------------------------------------


def read(path: Path) -> Any:
    """What was written. StoreError where the file is missing, damaged, or of another program."""
    try:
        with path.open("rb") as file:
            return _read(file, os.fstat(file.fileno()).st_size)
    except StoreError as error:
        raise StoreError(f"{path} is damaged: {error}; take another checkpoint, or copy it again") from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}") from error


def _read(file: BinaryIO, file_size: int) -> Any:
    header, data_size = _read_header(file, file_size)
    metadata = header.pop(METADATA, None)
    if not isinstance(metadata, dict) or not all(isinstance(metadata.get(key), str) for key in ("tree", "crc32")):
        raise StoreError("its header holds no state, it is not from Hoploom")
    entries = _laid_out(header, data_size)
    checksum, tensors = _described(metadata["tree"], header), {}
    for entry in entries:
        tensors[entry.name] = torch.empty(entry.shape, dtype=entry.dtype)
        raw = _raw(tensors[entry.name])
        _read_into(file, raw)
        checksum = zlib.crc32(raw, checksum)
    if f"{checksum:08x}" != metadata["crc32"]:
        raise StoreError("its checksum does not match")
    return decode(_parsed(metadata["tree"]), tensors)


def _read_into(file: BinaryIO, raw: memoryview) -> None:
    if raw and file.readinto(raw) != len(raw):  # type: ignore[attr-defined]  # a buffered reader fills the buffer
        raise StoreError("it ends too early")


def _read_header(file: BinaryIO, file_size: int) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if file_size < LENGTH_BYTES or size > min(HEADER_LIMIT, file_size - LENGTH_BYTES):
        raise StoreError(f"its header should have {size} bytes, the file has {file_size}")
    header = _parsed(file.read(size))
    if not isinstance(header, dict):
        raise StoreError("its header is no JSON object")
    return header, file_size - LENGTH_BYTES - size


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError("its header is no JSON") from error


def _laid_out(header: dict[str, Any], data_size: int) -> list[Entry]:
    """The tensors in the order of their data, which they must cover without gap or overlap."""
    entries = sorted(_entries(header), key=lambda entry: (entry.begin, entry.end))
    at = 0
    for entry in entries:
        if entry.begin != at:
            raise StoreError(f"tensor {entry.name!r} begins at {entry.begin}, not at {at}")
        at = entry.end
    if at != data_size:
        raise StoreError(f"it holds {data_size} bytes of data, its header speaks of {at}")
    return entries


def _entries(header: dict[str, Any]) -> Iterator[Entry]:
    for name, given in header.items():
        match given:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if dtype in DTYPES:
                pass
            case _:
                raise StoreError(f"tensor {name!r} is described as {given!r:.80}")
        num_bytes = _num_bytes(name, dtype, shape)
        if _count(name, end) - _count(name, begin) != num_bytes:
            raise StoreError(f"tensor {name!r} of {num_bytes} bytes lies at {begin} to {end}")
        yield Entry(name, DTYPES[dtype], tuple(shape), begin, end)


def _num_bytes(name: str, dtype: str, shape: list[Any]) -> int:
    """What a tensor takes. Strides must fit torch's integers even where an extent is zero."""
    largest = num_bytes = DTYPES[dtype].itemsize
    for extent in shape:
        num_bytes *= _count(name, extent)
        largest *= max(1, extent)
        if largest > MOST:
            raise StoreError(f"tensor {name!r} has a shape beyond 64 bits, {shape!r:.80}")
    return num_bytes


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise StoreError(f"tensor {name!r} has an extent or offset {value!r:.80}")
    return value
