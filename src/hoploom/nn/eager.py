"""What torch.compile leaves as it is: grouping edges and aggregating over them. The layers between are compiled.

Their kernels are compiled already, and their shapes depend on values. Each is a break in the graph, no recompilation.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hoploom import ops
from hoploom.ops import InEdges
from hoploom.ops.aggregate import add_ends as _add_ends

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """The same function, which runs uncompiled within a compiled model."""
    same: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return same


aggregate = eager(ops.aggregate)
softmax = eager(ops.softmax)
add_ends = eager(_add_ends)
group = eager(InEdges.of)
