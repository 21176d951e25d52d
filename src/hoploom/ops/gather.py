"""Rows by id, and the stitching of answers from several parts."""

from torch import Tensor

from hoploom import _core


def gather(table: Tensor, ids: Tensor, out: Tensor, first: int = 0) -> Tensor:
    """out[i] = table[ids[i] - first]. Tables and outputs are bytes: [rows, row bytes] uint8."""
    _core.gather(table.numpy(), ids.numpy(), first, out.numpy())
    return out


def scatter_rows(rows: Tensor, places: Tensor, out: Tensor) -> None:
    """out[places[i]] = rows[i], as bytes."""
    _core.scatter(rows.numpy(), places.numpy(), out.numpy())


def scatter_lists(values: Tensor, counts: Tensor, places: Tensor, begins: Tensor, out: Tensor) -> None:
    """Copy the i-th run of values (counts[i] long) to where run places[i] begins in `out`."""
    _core.scatter_lists(values.numpy(), counts.numpy(), places.numpy(), begins.numpy(), out.numpy())
