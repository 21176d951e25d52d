"""Which nodes and edges a part holds: contiguous ranges, so that ownership is a search in a short list."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PartRange:
    """What one part holds, by node type and by relation."""

    first_nodes: tuple[int, ...]
    num_nodes: tuple[int, ...]
    first_edges: tuple[int, ...]
    num_edges: tuple[int, ...]
    splits: Mapping[str, Mapping[str, int]]  # node type -> split -> size
