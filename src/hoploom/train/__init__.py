"""Training: the ranks and what they do together."""

from hoploom.train.context import Context, init, unwrap
from hoploom.train.spawn import spawn

__all__ = ["Context", "init", "spawn", "unwrap"]
