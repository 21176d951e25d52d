"""Where a loader's batches are made, chosen in one place: as the store's deployment says, else by this process."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from hoploom.load.assemble import Batch
from hoploom.load.device import Sent
from hoploom.load.loader import Producer, Work
from hoploom.load.look_ahead import LookAhead
from hoploom.load.maker import Maker
from hoploom.load.pipeline import Delivery, Stages
from hoploom.store import Sharded


@dataclass(frozen=True)
class OneStage:
    """Each batch is made by one call."""

    make: Callable[[Tensor, int, int], Batch]
    least_threads: int = 0

    def stages(self, work: Work, delivery: Delivery) -> AbstractContextManager[Stages[Sent]]:
        """All in the last stage, by one thread."""

        def finish(step: int, begun: None, fetched: None) -> Sent:
            return work.send(self.make(*work.place(step)))

        return nullcontext(Stages(finish, delivery.num_ahead, delivery.num_ahead, naming=work.naming))


def producer_of(maker: Maker, device: torch.device | None, look_ahead: int | None, deadline: float) -> Producer:
    """Who makes a loader's batches, which go to `device` and look ahead by so many steps where the user says so."""
    deployed: Producer | None = maker.assembler.store.deployment.producer(maker, device, look_ahead, deadline)
    return here(maker, look_ahead or 1) if deployed is None else deployed


def here(maker: Maker, num_steps: int) -> Producer:
    """This process makes them, with look-ahead where it is by more than one step and some rows are remote."""
    features = maker.assembler.store.features
    if num_steps > 1 and isinstance(features, Sharded) and not all(shard.is_here for shard in features.shards):
        return LookAhead(maker, features, num_steps)
    return OneStage(maker.make)
