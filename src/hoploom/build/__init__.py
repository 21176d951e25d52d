"""Getting data in."""

from hoploom.build.pyg import from_pyg
from hoploom.build.synthetic import generate
from hoploom.build.tensors import from_tensors

__all__ = ["from_pyg", "from_tensors", "generate"]
