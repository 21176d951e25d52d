"""Ranking: losses and metrics of true links among candidates, and the best destinations of each source."""

from hoploom.ranking.highest import Best, best

__all__ = ["Best", "best"]
__dir__ = __all__.copy
