"""An epoch as arithmetic: its permutation is cut into steps, each step into ranks."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hoploom import keys, ops
from hoploom.errors import ConfigError


@dataclass(frozen=True)
class Order:
    """Which seeds each step of each rank is for.

    Every seed comes once over all ranks, the ranks of a step differ by at most one seed, and every rank has the
    same number of steps. A tail too short to give every rank a seed, or below `least_tail`, joins the step before it.
    """

    num_seeds: int
    batch_size: int  # of one rank
    shuffle: bool = False
    drop_last: bool = False
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    first_step: int = 0  # steps that are behind us, and
    first_seed: int = 0  # the seeds they took
    least_tail: int = 1

    def check(self) -> None:
        """Raise ConfigError if the numbers cannot work."""
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}; give at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is not in [0, world_size={self.world_size})")
        if self.num_seeds == 0:
            raise ConfigError("there are no seeds; check input_nodes (an empty split or mask?)")
        if self.num_seeds < self.world_size:
            raise ConfigError(f"{self.num_seeds} seeds cannot feed {self.world_size} ranks; use fewer ranks")

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world_size

    @property
    def num_steps(self) -> int:
        """Steps of the epoch, those behind us included."""
        full, tail = divmod(self.num_seeds - self.first_seed, self.global_batch)
        joins = self.drop_last or tail == 0 or (tail < max(self.world_size, self.least_tail) and full > 0)
        return self.first_step + full + (not joins)

    @property
    def layout(self) -> int:
        """What a position inside an epoch hangs on besides the seeds' order; 0: on nothing."""
        return 0

    def step_span(self, step: int) -> tuple[int, int]:
        """The epoch positions of a step, over all ranks."""
        begin = self.first_seed + (step - self.first_step) * self.global_batch
        last = step == self.num_steps - 1 and not self.drop_last
        return begin, self.num_seeds if last else begin + self.global_batch

    def rank_span(self, step: int) -> tuple[int, int]:
        """The epoch positions of this rank's share of a step."""
        begin, end = self.step_span(step)
        size = end - begin
        return begin + size * self.rank // self.world_size, begin + size * (self.rank + 1) // self.world_size

    def indices(self, epoch: int, begin: int, end: int) -> Tensor:
        """Which seeds stand at these positions of the epoch."""
        if not self.shuffle:
            return torch.arange(begin, end)
        return ops.permute(keys.epoch_key(self.seed, epoch), self.num_seeds, begin, end)

    def after(self, step: int, num_seeds: int) -> "Order":
        """The rest of an epoch of which `step` steps took `num_seeds` seeds, at any world size."""
        return replace(self, first_step=step, first_seed=num_seeds)
