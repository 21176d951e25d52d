"""Ranking: losses and metrics of true links among candidates, and the best destinations of each source."""

from hoploom.ranking.all_nodes import LinkRanks, rank_links
from hoploom.ranking.highest import Best, best_of_rows
from hoploom.ranking.near import hard_candidates

__all__ = ["Best", "LinkRanks", "best_of_rows", "hard_candidates", "rank_links"]
__dir__ = __all__.copy
