"""Calculate the memory, time and network traffic of training a graph on a cluster, from measured rates."""

from hoploom.scale.inputs import Constants, Question, default_constants, parse_features, read_constants, to_json
from hoploom.scale.plan import ScalePlan, as_json, as_text, findings, plan

__all__ = [
    "Constants",
    "Question",
    "ScalePlan",
    "as_json",
    "as_text",
    "default_constants",
    "findings",
    "parse_features",
    "plan",
    "read_constants",
    "to_json",
]
__dir__ = __all__.copy
