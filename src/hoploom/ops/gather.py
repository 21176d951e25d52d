"""Rows by id, and the stitching of answers from several parts."""

import math

import torch
from torch import Tensor

from hoploom import _core
from hoploom.ops.buffers import tensor_of


def gather(table: Tensor, ids: Tensor, out: Tensor, first: int = 0, places: Tensor | None = None) -> Tensor:
    """out[i] = table[ids[i] - first], for all i or those in `places`. Tables and outputs are bytes: see as_bytes."""
    if places is None:
        _core.gather(table.numpy(), ids.numpy(), first, out.numpy())
        return out
    _core.gather_at(table.numpy(), ids.numpy(), places.numpy(), first, out.numpy())
    return out


def route(ids: Tensor, bounds: Tensor, places: Tensor | None = None) -> list[Tensor]:
    """Per part: the positions in `ids`, or among `places`, that it owns, in order; part p begins at bounds[p - 1]."""
    routed, counts = _core.route(ids.numpy(), bounds.numpy(), None if places is None else places.numpy())
    positions, begin, owned = tensor_of(routed), 0, []
    for count in tensor_of(counts).tolist():
        owned.append(positions[begin : begin + count])
        begin += count
    return owned


def byte_rows(rows: Tensor) -> Tensor:
    """The same memory as rows of bytes: [rows, row bytes] uint8."""
    shape = rows.shape[0], math.prod(rows.shape[1:]) * rows.element_size()
    return rows.reshape(-1).view(torch.uint8).view(shape) if rows.numel() else torch.empty(shape, dtype=torch.uint8)


def scatter_rows(rows: Tensor, places: Tensor, out: Tensor) -> None:
    """out[places[i]] = rows[i], as bytes."""
    _core.scatter(rows.numpy(), places.numpy(), out.numpy())


def scatter_lists(values: Tensor, counts: Tensor, places: Tensor, begins: Tensor, out: Tensor) -> None:
    """Copy the i-th run of values (counts[i] long) to where run places[i] begins in `out`."""
    _core.scatter_lists(values.numpy(), counts.numpy(), places.numpy(), begins.numpy(), out.numpy())
