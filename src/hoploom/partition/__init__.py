"""Cut a store into parts: choose the part of every node, write the parts, and report what they cost.

The package itself can be called: `hoploom.partition(store, out, num_parts)` is its function `partition`.
"""

import inspect
import sys
from types import ModuleType

from hoploom.partition.assign import METHODS, assign, edge_cut
from hoploom.partition.partition import partition
from hoploom.partition.report import PartitionReport, report, report_as_json

__all__ = ["METHODS", "PartitionReport", "assign", "edge_cut", "partition", "report", "report_as_json"]
__dir__ = __all__.copy


class _Callable(ModuleType):
    __call__ = staticmethod(partition)
    __signature__ = inspect.signature(partition)


sys.modules[__name__].__class__ = _Callable
