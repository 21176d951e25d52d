"""Turns PyG's Data and HeteroData into a message and back, without pickle.

Integers that fit are sent as int32. This costs a pass over them on either side, and the bytes that it saves cost more,
even on loopback. To send edges as sources and counts would save another 1 % of a batch, for twice the cost.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from hoploom import ops
from hoploom.batch import Block
from hoploom.errors import PeerError
from hoploom.load.assemble import Batch, of_blocks
from hoploom.serve.wire import Message

NARROWED = 1 << 12  # integers of a tensor for which it pays to check whether they fit into 32 bits
NEVER = 1 << 62


# The two recursions are no closures: a closure that calls itself is a cycle, and would keep its batch until Python
# looks for cycles, which may be many batches later.


def packed(batch: Batch, narrow_from: int = NARROWED) -> Message:
    """A batch as a message, with the fields of each storage in their order."""
    tensors: list[Tensor] = []
    fields = [
        [storage._key, [[name, _plain(value, tensors, narrow_from)] for name, value in storage.items()]]
        for storage in batch.stores
    ]
    return Message({"homogeneous": isinstance(batch, Data), "fields": fields}, tensors)


def _plain(value: Any, tensors: list[Tensor], narrow_from: int) -> Any:
    """A value, ready for JSON; its tensors are appended to the list."""
    if isinstance(value, Tensor):
        narrow = _narrowed(value) if value.numel() >= narrow_from else None
        tensors.append(value if narrow is None else narrow)
        return {"tensor": len(tensors) - 1, "wide": narrow is not None}
    if isinstance(value, Block):
        parts = (value.edge_index, value.e_id, value.num_sources, value.num_destinations, value.data)
        return {"block": [_plain(part, tensors, narrow_from) for part in parts]}
    if isinstance(value, Mapping):
        return {"keys": list(value), "values": [_plain(entry, tensors, narrow_from) for entry in value.values()]}
    if isinstance(value, list):
        return [_plain(entry, tensors, narrow_from) for entry in value]
    if value is None or isinstance(value, int):
        return value
    raise TypeError(f"a batch holds a {type(value).__name__}, which cannot be sent")


def unpacked(message: Message, *, pinned: bool = False) -> Batch:
    """The batch of a message. It shares the message's tensors, except for those that are widened."""
    try:
        batch = Data() if message.header["homogeneous"] else HeteroData()
        for key, fields in message.header["fields"]:
            storage = _storage(batch, tuple(key) if isinstance(key, list) else key)
            storage._mapping.update((name, _value(plain, message.tensors, pinned=pinned)) for name, plain in fields)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise PeerError(
            f"a server's batch cannot be read ({error!r:.200}); use the same Hoploom on both sides"
        ) from error
    return of_blocks(batch) if "blocks" in batch else batch


def _value(plain: Any, tensors: Sequence[Any], *, pinned: bool) -> Any:
    """The inverse of _plain."""
    if isinstance(plain, list):
        return [_value(entry, tensors, pinned=pinned) for entry in plain]
    if not isinstance(plain, dict):
        return plain
    if "tensor" in plain:
        tensor = tensors[plain["tensor"]]
        return _widened(tensor, pinned=pinned) if plain["wide"] else tensor
    if "block" in plain:
        return Block(*(_value(part, tensors, pinned=pinned) for part in plain["block"]))
    keys = [tuple(key) if isinstance(key, list) else key for key in plain["keys"]]
    return dict(zip(keys, _value(plain["values"], tensors, pinned=pinned), strict=True))


def _storage(batch: Batch, key: Any) -> Any:
    if isinstance(batch, Data):
        return batch._store
    return batch._global_store if key is None else batch[key]


def _narrowed(tensor: Tensor) -> Tensor | None:
    """The same integers as int32; None if they do not fit, or are no int64."""
    if tensor.dtype != torch.int64 or not tensor.is_contiguous():
        return None
    values = tensor.numpy()
    if np.bitwise_or.reduce(values, axis=None) >> 31:  # some bit above, or a sign
        return None
    narrow = ops.empty(tuple(tensor.shape), torch.int32)
    np.copyto(narrow.numpy(), values, casting="unsafe")  # by NumPy: torch would start a team of threads
    return narrow


def _widened(tensor: Tensor, *, pinned: bool) -> Tensor:
    wide = ops.empty(tuple(tensor.shape), torch.int64, pinned=pinned)
    np.copyto(wide.numpy(), tensor.numpy())
    return wide
