"""Which tensors of edges are known to come grouped by destination, so that no device sorts them again.

What is noted belongs to one tensor object. Its copies and views, on this device or another, have to be noted anew.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class _Note(NamedTuple):
    state: tuple[object, ...]  # of the tensor, when this was noted
    num_edges_below: Mapping[int, int]


# State of a module, as layers get a tensor and nothing else of its loader. An entry goes with its tensor, keeps no
# memory, and counts for that object as it was: whatever torch writes into it or into a view of it raises _version, and
# `tensor.data = other` moves data_ptr. What shows in neither (a write through .data, a stranger's kernel) is met by
# assertions of InEdges, on the device.
_NOTES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def note_grouped(edge_index: Tensor, num_edges_below: Mapping[int, int]) -> None:
    """These edges, with all that is enqueued done, ascend by destination; so many have one below so many nodes."""
    if not edge_index.is_inference():  # has no version
        _NOTES[edge_index] = _Note(_state(edge_index), num_edges_below)


def noted(edge_index: Tensor) -> Mapping[int, int] | None:
    """What was noted of these edges; None where they may be in any order."""
    note: _Note | None = _NOTES.get(edge_index)  # type: ignore[no-untyped-call]
    return note.num_edges_below if note is not None and note.state == _state(edge_index) else None


def _state(tensor: Tensor) -> tuple[object, ...]:
    return tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride()
