"""Ranking: the best destinations of each source, by the scores of a trained model."""

from hoploom.ranking.highest import Best, best

__all__ = ["Best", "best"]
__dir__ = __all__.copy
