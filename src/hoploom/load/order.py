"""An epoch as arithmetic: its permutation is cut into steps, each step into ranks.

With locality, ranks get seeds of their own parts. That takes a few copies of the seeds' ids, where arithmetic takes no
memory; they are worked out once an epoch, alike on every rank.
"""

import hashlib
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hoploom import keys, ops
from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.store import Store

NO_LOCALITY = "locality=True changes nothing: servers make the batches here, and no rank holds a part"
DEALING = 0x6465616C  # folded into the epoch's key, to stay apart from its permutation


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
    extra_seeds: int = 0  # of a step, besides batch_size for every rank: so many ranks take one more

    def check(self) -> None:
        """Raise ConfigError if the numbers cannot work."""
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}; give at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is not in [0, world_size={self.world_size})")
        if self.num_seeds == 0:
            raise ConfigError("there are no seeds; check input_nodes (an empty split or mask?)")
        if self.num_seeds < self.world_size:
            raise ConfigError(
                f"{self.num_seeds} seeds cannot feed {self.world_size} ranks; use fewer ranks, "
                "or rank=0, world_size=1 for a loader that reads all seeds on each rank"
            )

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world_size + self.extra_seeds

    @property
    def num_steps(self) -> int:
        """Steps of the epoch, those behind us included."""
        full, tail = divmod(self.num_seeds - self.first_seed, self.global_batch)
        joins = self.drop_last or tail == 0 or (tail < max(self.world_size, self.least_tail) and full > 0)
        return self.first_step + full + (not joins)

    @property
    def dataset(self) -> range:
        """The positions of the seeds, of which the order is made."""
        return range(self.num_seeds)

    @property
    def layout(self) -> int:
        """What a position inside an epoch hangs on besides the seeds' order; 0: on nothing."""
        return 0

    @property
    def other_layout(self) -> str:
        """What to say of an epoch that was left in another layout."""
        return (
            "and that epoch was divided for another world size, locality, batch size or sampler; "
            "resume with the same ones"
        )

    def of(self, epoch: int) -> "Order":
        """The order of one epoch; called by the thread that loops, before any of its steps is made."""
        return self

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

    def seeds_of(self, epoch: int, step: int) -> tuple[Tensor, int]:
        """Return this rank's seeds of a step by position, and the index of the first one among all of the step."""
        begin, end = self.rank_span(step)
        return self.indices(epoch, begin, end), begin - self.step_span(step)[0]

    def indices(self, epoch: int, begin: int, end: int) -> Tensor:
        """Return the seeds at these positions of the epoch."""
        if not self.shuffle:
            return torch.arange(begin, end)
        return ops.permute(keys.epoch_key(self.seed, epoch), self.num_seeds, begin, end)

    def undealt(self) -> "Order":
        """The order of one process that reads all seeds."""
        return replace(self, rank=0, world_size=1, extra_seeds=0)

    def after(self, step: int, num_seeds: int) -> "Order":
        """The rest of an epoch of which `step` steps took `num_seeds` seeds, at any world size."""
        return replace(self, first_step=step, first_seed=num_seeds)


# --- seeds that the ranks divided themselves -------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DividedOrder(Order):
    """An epoch of seeds that were divided before the loaders got them: every rank reads its own, and only these.

    `num_seeds` counts the seeds of all ranks. Ranks with fewer seeds take smaller batches, so that all make as many
    steps as the rank with the most seeds.
    """

    counts: tuple[int, ...]  # seeds of each rank
    own: Order  # of this rank's seeds, as one process would read them
    origin: str  # hash of the seeds of all ranks

    def check(self) -> None:
        short = min(range(self.world_size), key=self.counts.__getitem__)
        if self.counts[short] < self.num_steps:
            raise ConfigError(
                f"the ranks have divided the seeds themselves, and rank {short} has {self.counts[short]} of them for "
                f"the {self.num_steps} steps that the {max(self.counts)} seeds of another rank take; divide them "
                "evenly, or give all seeds to every rank, and the loader divides them"
            )

    @cached_property
    def num_steps(self) -> int:  # counted once: there may be a thousand ranks
        full, tail = divmod(max(self.counts), self.batch_size)
        return full + (tail > 0 and not self.drop_last)

    @property
    def dataset(self) -> range:
        return self.own.dataset

    @property
    def layout(self) -> int:
        cuts = repr((self.counts, self.batch_size, self.drop_last, self.origin))
        return int.from_bytes(hashlib.sha256(cuts.encode()).digest()[:7], "little")

    def of(self, epoch: int) -> "DividedOrder":
        return replace(self, own=self.own.of(epoch))

    def step_span(self, step: int) -> tuple[int, int]:
        return int(self._begins(step).sum()), int(self._begins(step + 1).sum())

    def rank_span(self, step: int) -> tuple[int, int]:
        """Return the positions of a step among this rank's own seeds."""
        return int(self._begins(step)[self.rank]), int(self._begins(step + 1)[self.rank])

    def seeds_of(self, epoch: int, step: int) -> tuple[Tensor, int]:
        begins, ends = self._begins(step), self._begins(step + 1)
        seeds = self.indices(epoch, int(begins[self.rank]), int(ends[self.rank]))
        return seeds, int((ends - begins)[: self.rank].sum())

    def indices(self, epoch: int, begin: int, end: int) -> Tensor:
        return self.own.indices(epoch, begin, end)

    def undealt(self) -> Order:
        return self.own

    @cached_property
    def _counts(self) -> Tensor:
        return torch.tensor(self.counts)

    def _begins(self, step: int) -> Tensor:
        """Return where each rank's seeds of a step begin: [world_size] int64. Full batches if the tail is dropped."""
        even = self._counts * step // max(1, self.num_steps)
        if not self.drop_last:
            return even
        return torch.where(self._counts >= self.num_steps * self.batch_size, step * self.batch_size, even)


def divided(order: Order, counts: Sequence[int], origin: str) -> DividedOrder:
    """Return the order of ranks that have `counts` seeds of their own, from one that would distribute this rank's."""
    plain = {name: getattr(order, name) for name in Order.__dataclass_fields__}
    own = order.undealt()
    own = replace(own, seed=keys.mix(own.seed, order.rank))  # ranks with equally many seeds shuffle them differently
    plain |= {"num_seeds": sum(counts), "extra_seeds": 0}
    return DividedOrder(**plain, counts=tuple(counts), own=own, origin=hashlib.sha256(origin.encode()).hexdigest())


# --- seeds for the ranks that hold their parts ---------------------------------------------------


@dataclass(frozen=True)
class Homes:
    """Which rank holds which parts, and which part owns each seed."""

    held: tuple[tuple[int, ...], ...]  # parts, by rank
    owners: Tensor  # [num_seeds] int16, a part each
    num_parts: int

    @property
    def hosts(self) -> list[tuple[int, ...]]:
        """The parts of each host. Hosts with the same parts are one: either is as near."""
        return sorted(set(self.held))


@dataclass(frozen=True, kw_only=True)
class LocalOrder(Order):
    """An order in which ranks get seeds that lie near them, as far as the equal shares of a step allow.

    A position inside an epoch means something in the same layout only: with these ranks, parts and batch sizes.
    """

    homes: Homes
    _newest: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)  # by epoch: one at most
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def layout(self) -> int:
        counts = torch.bincount(self.homes.owners.to(torch.int64), minlength=self.homes.num_parts).tolist()
        cuts = (self.batch_size, self.world_size, self.drop_last, self.least_tail)
        cuts += (self.extra_seeds,) if self.extra_seeds else ()  # type: ignore[assignment]
        return int.from_bytes(hashlib.sha256(repr((self.homes.held, counts, cuts)).encode()).digest()[:7], "little")

    def indices(self, epoch: int, begin: int, end: int) -> Tensor:
        with self._lock:  # made once, however many threads ask
            if epoch not in self._newest:
                self._newest.clear()
                self._newest[epoch] = self._arranged(epoch)
            return self._newest[epoch][begin:end]

    def undealt(self) -> Order:
        plain = {name: getattr(self, name) for name in Order.__dataclass_fields__}
        return Order(**plain | {"rank": 0, "world_size": 1, "extra_seeds": 0})

    def _arranged(self, epoch: int) -> Tensor:
        """Which seed stands at each position of the epoch: [positions of all steps] int64."""
        hosts = self.homes.hosts
        seeds = super().indices(epoch, 0, self.num_seeds)
        seats = _seats(self, torch.tensor([hosts.index(parts) for parts in self.homes.held]))
        sizes = torch.bincount(seats, minlength=len(hosts)).tolist()
        key = keys.mix(keys.epoch_key(self.seed, epoch), DEALING)
        out = torch.empty_like(seats)
        for host, places in enumerate(_shared_out(self.homes.owners[seeds], self.homes, sizes)):
            count = places.numel()  # in order where there is no shuffling; else what was filled in is spread
            dealt = places[ops.permute(keys.mix(key, host), count, 0, count)] if self.shuffle else places.sort().values
            out[seats == host] = seeds[dealt]
        return out


def _seats(order: Order, host_of_rank: Tensor) -> Tensor:
    """Whose each position of an epoch is, step by step and rank by rank: [positions] int64."""
    sizes = torch.empty(order.num_steps, order.world_size, dtype=torch.int64)
    for rank in range(order.world_size if order.num_steps else 0):
        for steps, step in ((slice(None), 0), (slice(-1, None), order.num_steps - 1)):  # all, and the last
            begin, end = replace(order, rank=rank).rank_span(step)
            sizes[steps, rank] = end - begin
    return host_of_rank.repeat(order.num_steps).repeat_interleave(sizes.view(-1))


def _shared_out(owners: Tensor, homes: Homes, sizes: Sequence[int]) -> list[Tensor]:
    """By host, the places in the epoch's permutation that it takes: its own up to its share, then what is left.

    `owners` are the parts at these places: [n] int16.
    """
    free, taken = list(sizes), [[torch.empty(0, dtype=torch.int64)] for _ in sizes]
    holders = [[host for host, parts in enumerate(homes.hosts) if part in parts] for part in range(homes.num_parts)]
    left = [torch.empty(0, dtype=torch.int64)]
    for part in sorted(range(homes.num_parts), key=lambda part: len(holders[part])):  # those with no choice first
        places = torch.nonzero(owners == part).view(-1)
        for host in holders[part]:
            taken[host].append(places[: free[host]])
            places = places[free[host] :]
            free[host] -= taken[host][-1].numel()
        left.append(places)
    rest = torch.cat(left).sort().values
    for host, missing in enumerate(free):
        taken[host].append(rest[:missing])
        rest = rest[missing:]
    return [torch.cat(pieces) for pieces in taken]


def localised(order: Order, store: Store, node_type: str, nodes: Tensor, locality: Any) -> Order:
    """The order with its seeds near the ranks that hold them, as `locality` asks; `nodes` are the seeds: [n] int64.

    `locality` lists the parts of every rank; True: those that `hoploom.open` found. Where servers make the batches True
    changes nothing, so that one script runs in both modes.
    """
    if locality is False or locality is None:
        return order
    if locality is True and store.deployment.makes_batches:
        if order.rank == 0:
            warnings.warn(NO_LOCALITY, stacklevel=4)  # where the loader is made
        return order
    index, num_parts = store.schema.type_index[node_type], max(1, len(store.ranges))
    held = _held(locality, store, num_parts, order.world_size)
    if len(set(held)) == 1:
        return order  # nothing is nearer to one rank than to another
    bounds = torch.tensor([part.first_nodes[index] for part in store.ranges[1:]], dtype=torch.int64)
    owners = torch.bucketize(nodes, bounds, right=True).to(torch.int16)
    plain = {name: getattr(order, name) for name in Order.__dataclass_fields__}
    return LocalOrder(**plain, homes=Homes(held, owners, num_parts))


def _held(locality: Any, store: Store, num_parts: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    way_out = "give the parts of every rank, e.g. locality=[[0], [1]]"
    if locality is True:
        if store.deployment.homes:
            locality = store.deployment.homes
        elif len(store.parts) >= num_parts:
            locality = [()] * world_size  # every rank holds all
        else:
            known = "locality is True, but nobody said which rank holds what"
            raise ConfigError(f"{known}; open the store with hoploom.open(path, context=context), or {way_out}")
    if not _is_list(locality) or not all(map(_is_list, locality)):
        raise ConfigError(f"locality is {locality!r:.80}; give True, or {way_out[5:]}")
    held = tuple(
        tuple(sorted({as_int("a part in locality", part, 0, way_out) for part in parts})) for parts in locality
    )
    if len(held) != world_size:
        raise ConfigError(f"locality lists the parts of {len(held)} ranks, there are {world_size}; {way_out}")
    largest = max((part for parts in held for part in parts), default=0)
    if largest >= num_parts:
        raise ConfigError(f"locality names part {largest}, the store has {num_parts}; count parts from 0")
    return held


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
