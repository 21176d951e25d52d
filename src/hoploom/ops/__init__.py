"""Operations on tensors, one function each. CPU tensors go to the C++ core, layers' reductions of others to kernels.

`ops.kernels`, imported where a store is placed, does the same in Triton. There only the device knows how much there is
of anything, so what goes in and out are arrays of some capacity that the caller keeps, and sizes in tensors.
"""

from hoploom.ops.aggregate import Reduce, aggregate, softmax
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
    pool_trim,
    pool_use,
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
    "EdgeLists",
    "Found",
    "Frontier",
    "IdMap",
    "InEdges",
    "MappedFile",
    "NodeMap",
    "PartitionRule",
    "Picks",
    "Reduce",
    "RelationLists",
    "Rule",
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
    "keep_freed_memory",
    "order_edges",
    "pack",
    "permute",
    "place",
    "pool_trim",
    "pool_use",
    "require_whole",
    "route",
    "sample",
    "scatter_lists",
    "scatter_rows",
    "softmax",
    "take",
]
