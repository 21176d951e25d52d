"""Nested state with tensors as one safetensors file, written whole or not at all, with a checksum over all of it.

Any safetensors reader sees the tensors; the structure around them is JSON in the file's metadata: keys of any scalar
type, tuples, NaN and infinity survive, aliased tensors are written twice. The library reads and checks the layout; the
header is written here, so that the tensors follow it straight from memory. Costs one more pass over the bytes.
"""

import json
import math
import numbers
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hoploom.errors import ConfigError, StoreError
from hoploom.store.format import regular, write_whole

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
DEPTH_LIMIT = 64  # of what is written


def write(path: Path, state: Any, *, first: Path | None = None) -> None:
    """Write the state; the file that was there stays until the new one is whole and on the disk.

    `first`: another file for the same, written before it; no link, so that one damage does not take both.
    """
    tree, tensors = encode(state)
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ConfigError(f"the state holds a tensor of {tensor.dtype} at {name!r}; convert it, e.g. to float64")
    text, entries, raw = json.dumps(tree, separators=(",", ":")), _entries(tensors), [*map(_raw, tensors.values())]
    metadata = {"tree": text, "crc32": _checksum(text, entries, raw)}
    header = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the data begin at a multiple of eight bytes
    for file in filter(None, (first, path)):
        write_whole(file, (len(header).to_bytes(8, "little"), header, *raw))


def read(path: Path) -> Any:
    """What was written. StoreError where the file is missing, damaged, or of another program."""
    try:
        with safe_open(regular(path), framework="pt", backend="pread") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
        if not {"tree", "crc32"} <= set(metadata):
            raise StoreError("its header holds no state, it is not from Hoploom")
        if not set(NAMES).issuperset(tensor.dtype for tensor in tensors.values()):
            raise StoreError("it holds tensors of a dtype that Hoploom does not write")
        if _checksum(metadata["tree"], _entries(tensors), map(_raw, tensors.values())) != metadata["crc32"]:
            raise StoreError("its checksum does not match")
        return decode(json.loads(metadata["tree"]), tensors)
    except (StoreError, SafetensorError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise StoreError(f"{path} is damaged: {error}; take another checkpoint, or copy it again") from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}") from error


def read_tree(path: Path) -> Any:
    """What was written, from the header alone: empty tensors stand for the tensors, and nothing is checked."""
    try:
        with safe_open(regular(path), framework="pt", backend="pread") as file:
            return decode(json.loads(file.metadata()["tree"]), dict.fromkeys(file.offset_keys(), torch.empty(0)))
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise StoreError(f"cannot read {path}: {error}") from error


def _entries(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What the header says of tensors that lie one after another."""
    entries, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    return entries


def _checksum(tree: str, entries: dict[str, Any], raw: Iterable[memoryview]) -> str:
    """Of the structure, the header's entries and the data."""
    checksum = zlib.crc32(json.dumps([tree, entries], sort_keys=True).encode())
    for piece in raw:
        checksum = zlib.crc32(piece, checksum)
    return f"{checksum:08x}"


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


# --- the structure --------------------------------------------------------------------------


def encode(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """The state as JSON values, and its tensors (contiguous, on the CPU) under the paths that lead to them."""
    tensors: dict[str, Tensor] = {}
    return _encoded(state, (), tensors), tensors


def _encoded(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if len(path) > DEPTH_LIMIT:
        raise ConfigError(f"the state is nested more than {DEPTH_LIMIT} deep at {_at(path)!r:.80}; make it flatter")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor):
        return {"tensor": _set_aside(value, path, tensors)}
    if isinstance(value, list):
        return [_encoded(entry, (*path, str(i)), tensors) for i, entry in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [_encoded(entry, (*path, str(i)), tensors) for i, entry in enumerate(value)]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"  # MultiStepLR keeps its milestones in one
        return {kind: [[_key(key, path), _encoded(entry, (*path, str(key)), tensors)] for key, entry in value.items()]}
    raise ConfigError(
        f"the state holds a {type(value).__name__} at {_at(path)!r}; "
        "only tensors, numbers, strings, lists, tuples and dictionaries can be saved"
    )


def _key(key: Any, path: tuple[str, ...]) -> Any:
    if key is None or isinstance(key, str | numbers.Real):
        return _encoded(key, (), {})
    raise ConfigError(f"the state has the key {key!r:.80} at {_at(path)!r}; keys are numbers or strings")


def _set_aside(tensor: Tensor, path: tuple[str, ...], tensors: dict[str, Tensor]) -> str:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ConfigError(f"the state holds a tensor of {tensor.dtype}, {tensor.layout} at {_at(path)!r}; convert it")
    name = _at(path)
    while name in tensors or name == "__metadata__":
        name += "'"  # a key "a/b" beside a key "a" that holds "b"
    tensors[name] = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return name


def _at(path: tuple[str, ...]) -> str:
    return "/".join(path)


def decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What encode was given."""
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list):
        return [decode(entry, tensors) for entry in node]
    if isinstance(node, dict) and len(node) == 1:
        ((kind, content),) = node.items()
        if kind == "tensor" and isinstance(content, str) and content in tensors:
            return tensors[content]
        if kind == "float" and content in ("nan", "inf", "-inf"):
            return float(content)
        if kind == "tuple" and isinstance(content, list):
            return tuple(decode(entry, tensors) for entry in content)
        if kind in ("dict", "counter") and isinstance(content, list):
            entries = dict(_items(content, tensors))
            return Counter(entries) if kind == "counter" else entries
    raise StoreError(f"its state has an entry {node!r:.80} that nobody wrote")


def _items(content: list[Any], tensors: Mapping[str, Tensor]) -> Iterator[tuple[Any, Any]]:
    for item in content:
        if not isinstance(item, list) or len(item) != 2 or isinstance(item[0], list):
            raise StoreError(f"its state has an item {item!r:.80} that nobody wrote")
        key = decode(item[0], tensors)
        if not (key is None or isinstance(key, bool | int | float | str)):
            raise StoreError(f"its state has a key {key!r:.80} that nobody wrote")
        yield key, decode(item[1], tensors)
