"""Operations on tensors, one function each. CPU tensors go to the C++ core, layers' reductions of others to kernels.

`ops.kernels`, imported where a store is placed, does the same in Triton. There only the device knows how much there is
of anything, so what goes in and out are arrays of some capacity that the caller keeps, and sizes in tensors.
"""

from hoploom.ops.aggregate import Reduce, aggregate, softmax
from hoploom.ops.buffers import (
    MappedFile,
    any_damaged,
    empty,
    give_back_freed_memory,
    keep_freed_memory,
    pool_trim,
    pool_use,
    require_whole,
    tensor_of,
)
from hoploom.ops.csc import Csc, build_csc
from hoploom.ops.draws import draw_bounded, draw_words, permute
from hoploom.ops.edges import InEdges, OutEdges
from hoploom.ops.gather import byte_rows, gather, route, scatter_lists, scatter_rows
from hoploom.ops.partition import PartitionRule, RelationLists, Topology, assign_parts, count_cut
from hoploom.ops.relabel import Found, IdMap, NodeMap, fill_edges
from hoploom.ops.rows import ELEMENTS, aggregate_tables
from hoploom.ops.sample import EdgeLists, Frontier, Picks, Rule, sample
from hoploom.ops.spool import KEY_BYTES, Ordered, Packed, order_edges, pack, place, take

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
    "Ordered",
    "OutEdges",
    "Packed",
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
    "tensor_of",
]
