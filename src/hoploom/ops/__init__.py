"""Operations on tensors: in the C++ core on the CPU; `aggregate` and `softmax` also run on GPUs, as Triton kernels.

`ops.kernels` also samples, relabels and gathers on a GPU; it is imported when a store is placed there. Kernels write to
arrays of fixed capacity. How much of an array is in use is in a tensor on the device; the host does not know it.
"""

import types

from hoploom.ops.disk import DiskError as DiskError
from hoploom.ops.disk import DiskFile as DiskFile
from hoploom.ops.disk import FileRows as FileRows
from hoploom.ops.disk import Reads as Reads
from hoploom.ops.disk import RowRequest as RowRequest
from hoploom.ops.edges import InEdges as InEdges
from hoploom.ops.edges import build_csc as build_csc
from hoploom.ops.messages import EdgeTerm as EdgeTerm
from hoploom.ops.messages import aggregate_messages as aggregate_messages
from hoploom.ops.messages import attend as attend
from hoploom.ops.messages import dot_ends as dot_ends
from hoploom.ops.messages import pair_scores as pair_scores
from hoploom.ops.messages import sum_per_head as sum_per_head
from hoploom.ops.products import has_fast_product as has_fast_product
from hoploom.ops.products import linear as linear
from hoploom.ops.reductions import Reduce as Reduce
from hoploom.ops.reductions import aggregate as aggregate
from hoploom.ops.reductions import softmax as softmax
from hoploom.ops.rows import ELEMENTS as ELEMENTS
from hoploom.ops.rows import Empty as Empty
from hoploom.ops.rows import MappedFile as MappedFile
from hoploom.ops.rows import RowRule as RowRule
from hoploom.ops.rows import RowStep as RowStep
from hoploom.ops.rows import aggregate_tables as aggregate_tables
from hoploom.ops.rows import any_damaged as any_damaged
from hoploom.ops.rows import byte_rows as byte_rows
from hoploom.ops.rows import draw_rows as draw_rows
from hoploom.ops.rows import empty as empty
from hoploom.ops.rows import empty_pinned as empty_pinned
from hoploom.ops.rows import gather as gather
from hoploom.ops.rows import give_back_freed_memory as give_back_freed_memory
from hoploom.ops.rows import is_counting as is_counting
from hoploom.ops.rows import joined as joined
from hoploom.ops.rows import keep_best as keep_best
from hoploom.ops.rows import keep_freed_memory as keep_freed_memory
from hoploom.ops.rows import look_up_rows as look_up_rows
from hoploom.ops.rows import narrow as narrow
from hoploom.ops.rows import owned as owned
from hoploom.ops.rows import pool_keep_at_most as pool_keep_at_most
from hoploom.ops.rows import pool_trim as pool_trim
from hoploom.ops.rows import pool_use as pool_use
from hoploom.ops.rows import read_soon as read_soon
from hoploom.ops.rows import require_whole as require_whole
from hoploom.ops.rows import route as route
from hoploom.ops.rows import scatter_rows as scatter_rows
from hoploom.ops.rows import select as select
from hoploom.ops.rows import update_rows as update_rows
from hoploom.ops.rows import wait_readable as wait_readable
from hoploom.ops.sample import EdgeLists as EdgeLists
from hoploom.ops.sample import Frontier as Frontier
from hoploom.ops.sample import IdMap as IdMap
from hoploom.ops.sample import IdRanks as IdRanks
from hoploom.ops.sample import NodeBudget as NodeBudget
from hoploom.ops.sample import NodeMap as NodeMap
from hoploom.ops.sample import Picks as Picks
from hoploom.ops.sample import Rule as Rule
from hoploom.ops.sample import SlotMap as SlotMap
from hoploom.ops.sample import draw_bounded as draw_bounded
from hoploom.ops.sample import draw_words as draw_words
from hoploom.ops.sample import fill_edges as fill_edges
from hoploom.ops.sample import permute as permute
from hoploom.ops.sample import sample as sample
from hoploom.ops.sample import stitch as stitch
from hoploom.ops.sample import widen_picks as widen_picks
from hoploom.ops.shared_softmax import shared_softmax as shared_softmax

# The names imported above; modules are names here, too.
__all__ = sorted(name for name, of in globals().items() if name[0] != "_" and not isinstance(of, types.ModuleType))
__dir__ = __all__.copy
