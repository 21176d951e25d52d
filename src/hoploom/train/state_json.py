"""Nested dictionaries, lists, tuples and scalars as JSON, the tensors among them set aside by name.

Keys of any scalar type, tuples, NaN and infinity survive. Aliased tensors are written twice.
"""

import math
import numbers
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hoploom.errors import ConfigError, StoreError

DEPTH_LIMIT = 64


def encode(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """The state as JSON values, and its tensors (contiguous, on the CPU) under the paths that lead to them."""
    tensors: dict[str, Tensor] = {}
    return _encoded(state, (), tensors), tensors


def _encoded(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if len(path) > DEPTH_LIMIT:
        raise ConfigError(f"the state is nested more than {DEPTH_LIMIT} deep at {_shown(path)!r:.80}; make it flatter")
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
        f"the state holds a {type(value).__name__} at {_shown(path)!r}; "
        "only tensors, numbers, strings, lists, tuples and dictionaries can be saved"
    )


def _key(key: Any, path: tuple[str, ...]) -> Any:
    if key is None or isinstance(key, str | numbers.Real):
        return _encoded(key, (), {})
    raise ConfigError(f"the state has the key {key!r:.80} at {_shown(path)!r}; keys are numbers or strings")


def _set_aside(tensor: Tensor, path: tuple[str, ...], tensors: dict[str, Tensor]) -> str:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ConfigError(
            f"the state holds a tensor of {tensor.dtype}, {tensor.layout} at {_shown(path)!r}; convert it"
        )
    name = _shown(path)
    while name in tensors or name == "__metadata__":
        name += "'"  # a key "a/b" beside a key "a" that holds "b"
    tensors[name] = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return name


def _shown(path: tuple[str, ...]) -> str:
    return "/".join(path)


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What encode was given."""
    return _decoded(tree, tensors, 0)


def _decoded(node: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if depth > 2 * DEPTH_LIMIT:
        raise StoreError("its state is nested too deep")
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list):
        return [_decoded(entry, tensors, depth + 1) for entry in node]
    if isinstance(node, dict) and len(node) == 1:
        ((kind, content),) = node.items()
        if kind == "tensor" and isinstance(content, str) and content in tensors:
            return tensors[content]
        if kind == "float" and content in ("nan", "inf", "-inf"):
            return float(content)
        if kind == "tuple" and isinstance(content, list):
            return tuple(_decoded(entry, tensors, depth + 1) for entry in content)
        if kind in ("dict", "counter") and isinstance(content, list):
            entries = dict(_items(content, tensors, depth + 1))
            return Counter(entries) if kind == "counter" else entries
    raise StoreError(f"its state has an entry {node!r:.80} that nobody wrote")


def _items(content: list[Any], tensors: Mapping[str, Tensor], depth: int) -> Iterator[tuple[Any, Any]]:
    for item in content:
        if not isinstance(item, list) or len(item) != 2 or isinstance(item[0], list):
            raise StoreError(f"its state has an item {item!r:.80} that nobody wrote")
        key = _decoded(item[0], tensors, depth)
        if not (key is None or isinstance(key, bool | int | float | str)):
            raise StoreError(f"its state has a key {key!r:.80} that nobody wrote")
        yield key, _decoded(item[1], tensors, depth)
