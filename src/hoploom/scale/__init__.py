"""Plans: the memory, time and traffic of a graph on a cluster, calculated from measured rates."""

from hoploom.scale.constants import Constants, constants_as_text, default_constants, read_constants, to_json
from hoploom.scale.plan import Finding, ScalePlan, findings, plan
from hoploom.scale.spec import Question, parse_cut, parse_features
from hoploom.scale.text import as_json, as_text

__all__ = [
    "Constants",
    "Finding",
    "Question",
    "ScalePlan",
    "as_json",
    "as_text",
    "constants_as_text",
    "default_constants",
    "findings",
    "parse_cut",
    "parse_features",
    "plan",
    "read_constants",
    "to_json",
]
__dir__ = __all__.copy
