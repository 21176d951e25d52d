"""The store of ranks that exchange rows and hops with each other: each maps its own parts, and no server runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hoploom import ops
from hoploom.errors import ConfigError
from hoploom.load.loader import made_here
from hoploom.load.maker import Maker
from hoploom.load.pipeline import Producer
from hoploom.ranks.collectives import gather_json
from hoploom.ranks.context import Context
from hoploom.ranks.exchange import Exchange
from hoploom.ranks.rank_part import HeldParts, RankPart
from hoploom.store import Store
from hoploom.store.base import Deployment
from hoploom.store.beside import join_parts, open_own, read_look_ahead, read_topology, steps_ahead

SAME = 'give exchange="collective" and the same graph on all ranks'


@dataclass(frozen=True, kw_only=True)
class Exchanged(Deployment):
    """A store whose other parts other ranks hold."""

    exchange: Exchange
    look_ahead: int | None  # batches whose missing rows are fetched together; None: as many as fit the budget

    def producer(self, maker: Maker, device: torch.device | None, look_ahead: int | None, deadline: float) -> Producer:
        return made_here(maker, look_ahead or self.look_ahead)

    def traffic(self) -> dict[str, float]:
        return self.exchange.traffic()

    def close(self, *, wait: bool) -> None:
        if wait:
            self.exchange.close()
        else:
            self.exchange.leave()


def open_exchanged(context: Context, path: Path, parts: Sequence[int], options: dict[str, Any]) -> Store:
    """This rank's parts of a store, and the others by exchange. All ranks call."""
    ops.keep_freed_memory()  # what others send is freed at once: faulting pages in anew takes longer
    topology = options.get("topology", "auto")
    read_topology(topology)
    ahead = read_look_ahead(options.get("look_ahead"))
    local, own = open_own(path, parts, topology, options.get("memory"))
    homes = _homes(context, local, own)
    return join_ranks(local, own, homes, context.exchange(HeldParts(local).answer), ahead)


def join_ranks(
    local: Store, own: Sequence[int], homes: Sequence[Sequence[int]], exchange: Exchange, look_ahead: int | None
) -> Store:
    """The store of the parts that are here, and of those that other ranks hold: `homes` has them by rank."""

    def remote(number: int) -> RankPart:
        holders = [rank for rank, held in enumerate(homes) if number in held]
        return RankPart(local.schema, number, local.ranges[number], holders[exchange.rank % len(holders)], exchange)

    store = join_parts(local, own, remote)
    of_ranks = tuple(tuple(held) for held in homes)
    ahead = steps_ahead(store, look_ahead)
    return replace(store, deployment=Exchanged(exchange=exchange, look_ahead=ahead, homes=of_ranks))


def _homes(context: Context, local: Store, own: list[int]) -> list[list[int]]:
    """The parts of every rank; ConfigError where the ranks have opened other things, or no rank has a part."""
    told = gather_json(context, {"exchange": "collective", "store": local.identity, "parts": own})
    for rank, one in enumerate(told):
        if not isinstance(one, dict) or one.get("exchange") != "collective":
            raise ConfigError(f"this rank exchanges rows with the others, but rank {rank} does not; {SAME}")
        if one["store"] != local.identity:
            mine = local.identity[:12]
            raise ConfigError(f"rank {rank} opened another store ({one['store'][:12]}) than this rank ({mine}); {SAME}")
    homes = [list(one["parts"]) for one in told]
    missing = set(range(len(local.ranges))) - {part for held in homes for part in held}
    if missing:
        raise ConfigError(f"no rank holds part {min(missing)} of {local.path}, they hold {homes}; give parts= on each")
    return homes
