"""An epoch's order that a torch sampler draws: positions among the seeds, which may repeat and may leave some out.

The sampler's random numbers are seeded for every epoch, so that all ranks draw the same and a resumed run draws it
again. That takes a list of positions, where an order of our own takes no memory.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hoploom import keys
from hoploom.errors import ConfigError
from hoploom.load.order import Order, divided
from hoploom.schema import ID_DTYPES

DRAWING = 0x64726177  # folded into the epoch's key, to stay apart from what else derives from it


@dataclass(frozen=True)
class DrawnPositions:
    """What a sampler gave for an epoch."""

    positions: Tensor  # [n] int64

    @cached_property
    def digest(self) -> int:
        return int.from_bytes(hashlib.sha256(self.positions.numpy().tobytes()).digest()[:7], "little")


@dataclass(frozen=True, kw_only=True)
class DrawnOrder(Order):
    """An order of which `num_seeds` positions are drawn by a sampler, once an epoch; they are dealt out like any."""

    sampler: Any
    num_positions: int  # that there are to draw from
    drawn: "DrawnPositions | None" = field(default=None, repr=False, compare=False)  # of one epoch
    _newest: "dict[int, DrawnPositions]" = field(
        default_factory=dict, repr=False, compare=False
    )  # by epoch: one at most

    @property
    def dataset(self) -> range:
        return range(self.num_positions)

    @property
    def layout(self) -> int:
        return 0 if self.drawn is None else self.drawn.digest

    @property
    def other_layout(self) -> str:
        return (
            f"for which sampler={type(self.sampler).__name__} draws other seeds now; give the same sampler over the "
            "same seeds; its order may depend only on the epoch and on random numbers"
        )

    def of(self, epoch: int) -> "DrawnOrder":
        if epoch not in self._newest:
            drawn = DrawnPositions(self.draw(epoch))
            self._newest.clear()
            self._newest[epoch] = drawn
        return replace(self, drawn=self._newest[epoch])

    def undealt(self) -> "DrawnOrder":
        return replace(self, rank=0, world_size=1, extra_seeds=0, _newest={})

    def indices(self, epoch: int, begin: int, end: int) -> Tensor:
        assert self.drawn is not None
        return self.drawn.positions[begin:end]

    def draw(self, epoch: int) -> Tensor:
        """The positions that the sampler gives for an epoch: [num_seeds] int64."""
        name = type(self.sampler).__name__
        if callable(getattr(self.sampler, "set_epoch", None)):
            self.sampler.set_epoch(epoch)
        with _seeded(keys.mix(keys.epoch_key(self.seed, epoch), DRAWING), getattr(self.sampler, "generator", None)):
            given = list(islice(self.sampler, self.num_seeds + 1))
        if len(given) != self.num_seeds:
            gave = f"more than {self.num_seeds}" if len(given) > self.num_seeds else str(len(given))
            raise ConfigError(
                f"sampler={name} gave {gave} positions in epoch {epoch}, but its len() was {self.num_seeds} when the "
                "loader was made; give as many in every epoch, so that all ranks make the same steps"
            )
        try:
            positions = torch.stack(given) if isinstance(given[0], Tensor) else torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._not_positions(given[0]) from error
        if positions.dim() != 1 or positions.dtype not in ID_DTYPES:
            raise self._not_positions(given[0])
        outside = positions[(positions < 0) | (positions >= self.num_positions)]
        if outside.numel():
            raise ConfigError(
                f"sampler={name} gave position {outside[0]} in epoch {epoch}, but there are {self.num_positions} "
                "seeds; give it the same seeds as the loader"
            )
        return positions.to(torch.int64)

    def _not_positions(self, given: object) -> ConfigError:
        name = type(self.sampler).__name__
        return ConfigError(
            f"sampler={name} gave {given!r:.60}; give one position among the seeds at a time, no batches"
        )


@contextmanager
def _seeded(key: int, generator: torch.Generator | None) -> Iterator[None]:
    """Every generator that a sampler may draw from starts from the key, and is afterwards as it was before."""
    own = generator if isinstance(generator, torch.Generator) else torch.Generator()
    states = own.get_state(), random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key)
        own.manual_seed(keys.mix(key, own.initial_seed()))
        random.seed(key)
        np.random.seed(key % 2**32)
        try:
            yield
        finally:
            own.set_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])


def drawn(order: Order, sampler: Any, locality: Any) -> Order:
    """Return the order with its positions drawn by a sampler, as torch's DataLoader takes it.

    A DistributedSampler gives every rank seeds of its own. Raise ConfigError for a sampler that cannot be used.
    """
    name = type(sampler).__name__
    if order.shuffle:
        raise ConfigError(f"sampler={name}: a sampler is mutually exclusive with shuffle=True; leave one of them out")
    if locality is not False and locality is not None:
        raise ConfigError(f"sampler={name} does not go with locality=; leave one of them out")
    replicas = getattr(sampler, "num_replicas", 1)
    if replicas not in (1, order.world_size) and order.world_size != 1:
        raise ConfigError(
            f"sampler={name} divides the seeds for {replicas} ranks, the loader is for {order.world_size}; give the "
            "sampler num_replicas= and rank= of the process group, or leave it out: the loader divides the seeds"
        )
    if replicas == order.world_size > 1 and getattr(sampler, "rank", order.rank) != order.rank:
        raise ConfigError(
            f"sampler={name} is for rank {sampler.rank}, but the loader is for rank {order.rank}; give the sampler "
            "rank= of the process group, or leave it out: two ranks would read the same seeds"
        )
    try:
        length = len(sampler)
    except TypeError as error:
        raise ConfigError(f"sampler={name} must have a length ({error}); give a torch Sampler") from error
    if length == 0:
        raise ConfigError(f"sampler={name} gives no positions; give at least one")
    plain = {field_name: getattr(order, field_name) for field_name in Order.__dataclass_fields__}
    made = DrawnOrder(**plain | {"num_seeds": length}, sampler=sampler, num_positions=order.num_seeds)
    made.draw(0)  # what is wrong with it is told now
    if replicas == order.world_size > 1:
        return divided(made, [length] * replicas, f"{name} {length} {getattr(sampler, 'seed', None)}")
    return made
