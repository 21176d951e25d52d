"""Batches that PyG's own DataLoader asks for: it has no steps, so each call draws picks of its own.

Its worker processes are forked for every epoch, so a count of calls starts again in each. The worker's own seed tells
them apart: torch draws a new one for every epoch, from torch.manual_seed.
"""

import itertools

from torch.utils.data import get_worker_info

from hoploom import keys
from hoploom.errors import ConfigError
from hoploom.store import Store
from hoploom.store.base import NOWHERE


class Calls:
    """The calls for batches of one store, numbered."""

    def __init__(self, seed: int, store: Store) -> None:
        self._seed, self._numbers = seed, itertools.count()
        self._can_fork = store.deployment is NOWHERE and not any(shard.is_remote for shard in store.shards)

    def key(self) -> int:
        """What the picks of the next call derive from."""
        worker, seed = get_worker_info(), self._seed
        if worker is not None:
            if not self._can_fork:
                raise ConfigError(
                    "a store on servers or on a GPU cannot be used in forked worker processes; "
                    "give num_workers=0 to PyG's loader, and num_workers= to Hoploom's own, whose workers are threads"
                )
            seed = keys.mix(seed, worker.seed)
        return keys.batch_key(seed, 0, next(self._numbers))
