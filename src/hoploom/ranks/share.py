"""Choose a loader's share of the seeds: from the arguments, else from the process group or the launcher."""

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist

from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.ranks import environment

GIVEN, GROUP, ALONE = "as given", "from the process group", "the only process"
DIVIDED, LONE = "seeds divided before the loader got them", "the only rank that reads this loader"
LAUNCHERS = {"torchrun": "from torchrun's environment", "slurm": "from Slurm's environment", "single": ALONE}


@dataclass(frozen=True)
class Share:
    """One rank's share of a loader's seeds, which are distributed over `world_size` ranks."""

    rank: int = 0
    world_size: int = 1
    origin: str = GIVEN

    @property
    def is_given(self) -> bool:
        """Whether the script decided it: by rank= and world_size=, or by the seeds that it gave to each rank."""
        return self.origin in (GIVEN, DIVIDED, LONE)

    def print_once(self) -> None:
        """Print one line on rank 0 if seeds are distributed over ranks and the script has not decided so."""
        if self.world_size > 1 and self.rank == 0 and not self.is_given:
            _print_share(self.world_size, self.origin)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}, {self.origin}"


def read_share(rank: Any, world_size: Any) -> Share:
    """Return the share of a loader's arguments; without any, that of the process group or the environment."""
    if rank is None and world_size is None:
        return _own_share()
    if rank is None or world_size is None:
        given, missing = (
            (f"world_size is {world_size!r:.80}", "rank") if rank is None else (f"rank is {rank!r:.80}", "world_size")
        )
        raise ConfigError(
            f"{given}, but {missing} is not given; give both, or neither: the process group, else torchrun's or "
            "Slurm's environment then says who this rank is"
        )
    return Share(
        as_int("rank", rank, 0, "give this process's number among world_size, 0 for the first"),
        as_int("world_size", world_size, 1, "give the number of ranks"),
    )


def current_share(share: Share) -> Share:
    """Return the share that applies now: a process group may have been made since the loader was."""
    return _own_share() if not share.is_given and dist.is_initialized() else share


def _own_share() -> Share:
    if dist.is_initialized():
        return Share(dist.get_rank(), dist.get_world_size(), GROUP)
    try:
        place = environment.read_started()
    except ConfigError as error:
        later = "or make the loader once there is a process group, with Lightning in train_dataloader()"
        raise ConfigError(f"{error}; {later}") from error
    return Share(place.rank, place.world_size, LAUNCHERS[place.source] if place.world_size > 1 else ALONE)


@cache
def _print_share(world_size: int, origin: str) -> None:
    """Print the line, once in a process."""
    line = f"a loader shares its seeds among {world_size} ranks ({origin}); rank=0, world_size=1 reads all on each rank"
    print(f"hoploom: {line}", file=sys.stderr, flush=True)
