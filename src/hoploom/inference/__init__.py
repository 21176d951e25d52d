"""Layer-wise inference over the whole graph, out of core."""

from hoploom.inference.infer import Inference, infer

__all__ = ["Inference", "infer"]
__dir__ = __all__.copy
