"""Ranks that exchange rows with each other, all in this process. Their threads, and what is between them, are real."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from hoploom.deploy.exchanged import join_ranks
from hoploom.ranks.all_to_all import AllToAll
from hoploom.ranks.exchange import Exchange, leave_all
from hoploom.ranks.rank_part import HeldParts
from hoploom.ranks.whereabouts import Whereabouts
from hoploom.store import Store
from hoploom.store.beside import Topology, open_own
from support.until import until

HOMES = [[0, 2], [1, 3]]
SECONDS = 30.0


@contextmanager
def ranks_here(
    path: Path,
    topology: Topology,
    *,
    memory: int | None = None,
    look_ahead: int | None = 4,
    seconds: float = SECONDS,
) -> Iterator[Store]:
    """Rank 0's store of four parts, of which rank 1 has two."""
    store = HashStore()
    opened = [open_own(path, own, topology, memory)[0] for own in HOMES]
    with ThreadPoolExecutor(len(HOMES)) as meeting:
        exchanges = list(meeting.map(lambda rank: _exchange(rank, store, opened[rank], seconds), range(len(HOMES))))
    try:
        yield join_ranks(opened[0], HOMES[0], HOMES, exchanges[0], look_ahead)
    finally:
        for exchange in exchanges:
            exchange.close()
        for exchange in exchanges:
            exchange.wait(time.monotonic() + seconds)
        leave_all(exchanges)
        until(lambda: not any(exchange._thread.is_alive() for exchange in exchanges), "the end of the rounds")


def _exchange(rank: int, store: Any, held: Store, seconds: float) -> Exchange:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=seconds)
    group = dist.ProcessGroupGloo(PrefixStore("group", store), rank, len(HOMES), options)
    here = Whereabouts(rank, len(HOMES), PrefixStore("whereabouts", store))
    return Exchange(AllToAll(group), store, here, lambda doing: nullcontext(), HeldParts(held).answer, seconds)
