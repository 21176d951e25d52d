"""Operations on tensors, one function each. CPU tensors go to the C++ core, layers' reductions of others to kernels.

`ops.kernels`, imported where a store is placed, does the same in Triton. There only the device knows how much there is
of anything, so what goes in and out are arrays of some capacity that the caller keeps, and sizes in tensors.
"""

from hoploom.ops.aggregate import Reduce, aggregate, softmax
from hoploom.ops.disk import (
    DiskError,
    DiskFile,
    FileRows,
    ListColumn,
    Reads,
    RowRequest,
    SparseArray,
    has_read_queue,
)
from hoploom.ops.edges import Csc, InEdges, build_csc
from hoploom.ops.partition import PartitionRule, RelationLists, Topology, assign_parts, count_cut
from hoploom.ops.relabel import Found, IdMap, NodeMap, fill_edges
from hoploom.ops.rows import (
    ELEMENTS,
    MappedFile,
    aggregate_tables,
    any_damaged,
    byte_rows,
    empty,
    gather,
    give_back_freed_memory,
    keep_freed_memory,
    pool_keep_at_most,
    pool_trim,
    pool_use,
    read_soon,
    require_whole,
    route,
    scatter_lists,
    scatter_rows,
)
from hoploom.ops.sample import EdgeLists, Frontier, Picks, Rule, draw_bounded, draw_words, permute, sample
from hoploom.ops.spool import KEY_BYTES, order_edges, pack, place, take

__all__ = [
    "ELEMENTS",
    "KEY_BYTES",
    "Csc",
    "DiskError",
    "DiskFile",
    "EdgeLists",
    "FileRows",
    "Found",
    "Frontier",
    "IdMap",
    "InEdges",
    "ListColumn",
    "MappedFile",
    "NodeMap",
    "PartitionRule",
    "Picks",
    "Reads",
    "Reduce",
    "RelationLists",
    "RowRequest",
    "Rule",
    "SparseArray",
    "Topology",
    "aggregate",
    "aggregate_tables",
    "any_damaged",
    "assign_parts",
    "build_csc",
    "byte_rows",
    "count_cut",
    "draw_bounded",
    "draw_words",
    "empty",
    "fill_edges",
    "gather",
    "give_back_freed_memory",
    "has_read_queue",
    "keep_freed_memory",
    "order_edges",
    "pack",
    "permute",
    "place",
    "pool_keep_at_most",
    "pool_trim",
    "pool_use",
    "read_soon",
    "require_whole",
    "route",
    "sample",
    "scatter_lists",
    "scatter_rows",
    "softmax",
    "take",
]
