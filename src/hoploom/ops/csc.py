"""COO to CSC: stable, within the result's own memory, several threads."""

import os
from typing import NamedTuple

import torch
from torch import Tensor

from hoploom import _core
from hoploom.errors import DataError
from hoploom.ops.buffers import tensor_of

EDGES_PER_THREAD = 1 << 15  # fewer are sorted before another thread has started


class Csc(NamedTuple):
    indptr: Tensor  # [num_destinations + 1] int64
    indices: Tensor  # [num_edges] int32 while ids fit, else int64
    permutation: Tensor | None  # [num_edges] int64 input positions; None if the input was in order


def build_csc(
    edge_index: Tensor,
    num_sources: int,
    num_destinations: int,
    *,
    edge_time: Tensor | None = None,
    source_time: Tensor | None = None,
) -> Csc:
    """Sort edges by destination (and by time within a list, where a time is given)."""
    sources, destinations = edge_index.to(torch.int64).contiguous()
    try:
        indptr, indices, permutation, wide = _core.build_csc(
            sources.numpy(),
            destinations.numpy(),
            num_sources,
            num_destinations,
            min(len(os.sched_getaffinity(0)), 1 + sources.numel() // EDGES_PER_THREAD),
            None if edge_time is None else edge_time.numpy(),
            None if source_time is None else source_time.numpy(),
        )
    except IndexError as error:
        raise DataError(f"edge_index: {error}; check num_nodes, or drop the edge") from error
    except RuntimeError as error:
        raise DataError(f"edge_index: {error}; let no other thread write to it meanwhile") from error
    return Csc(
        tensor_of(indptr),
        tensor_of(indices, torch.int64 if wide else torch.int32),
        None if permutation is None else tensor_of(permutation),
    )
