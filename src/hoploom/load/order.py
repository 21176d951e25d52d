"""The order of an epoch: its seeds are permuted, cut into steps, and each step is distributed over the ranks.

Most orders are arithmetic and take no memory. Two kinds keep a list of positions for one epoch: an order that gives
seeds to the ranks that hold their parts, and one that a torch sampler draws.
"""

import hashlib
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from hoploom import keys, ops
from hoploom.config.values import as_int
from hoploom.errors import BatchError, ConfigError, HoploomError, StoreError
from hoploom.schema import ID_DTYPES
from hoploom.store import Store

NO_LOCALITY = "locality=True changes nothing: servers make the batches here, and no rank holds a part"
# Mixed into an epoch's key, so that these random numbers differ from those of its permutation.
LOCALITY, SAMPLER = 0x6465616C, 0x64726177
OrderKind = TypeVar("OrderKind", bound="Order")


class StepShare(NamedTuple):
    """One rank's seeds of a step."""

    indices: Tensor  # [n] int64: positions of the seeds among all seeds of the loader
    first: int  # the index of the first one within the step, over all ranks
    key: int  # determines all random numbers of the step
    of_all_ranks: Callable[[], Tensor] | None = None  # returns the seeds of the whole step; None: `indices` are all

    def whole_step(self) -> Tensor:
        """Return the positions of the step's seeds, over all ranks: [n] int64."""
        return self.indices if self.of_all_ranks is None else self.of_all_ranks()


@dataclass(frozen=True)
class Order:
    """The seeds of each step and rank in one epoch.

    Each seed is read once, ranks differ by at most one seed in a step, and a short last step joins the one before.
    """

    num_seeds: int
    batch_size: int  # of one rank
    shuffle: bool = False
    drop_last: bool = False
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    first_step: int = 0  # number of steps that are done
    first_seed: int = 0  # number of seeds that these steps took
    least_tail: int = 1
    extra_seeds: int = 0  # of a step, beyond batch_size per rank; each goes to another rank
    epoch: int = 0

    def check(self) -> None:
        """Raise ConfigError if the seeds cannot be divided over the ranks."""
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is not in [0, world_size={self.world_size})")
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
        """The number of steps of the epoch, including those that are done."""
        full, tail = divmod(self.num_seeds - self.first_seed, self.global_batch)
        joins = self.drop_last or tail == 0 or (tail < max(self.world_size, self.least_tail) and full > 0)
        return self.first_step + full + (not joins)

    @property
    def steps(self) -> range:
        """The steps of the epoch that are not done yet."""
        return range(self.first_step, self.num_steps)

    @property
    def dataset(self) -> range:
        """The positions of all seeds, in the order in which the loader was given them."""
        return range(self.num_seeds)

    @property
    def layout(self) -> int:
        """A hash of the settings that a saved position inside an epoch depends on; 0 if it depends on none."""
        return 0

    @property
    def layout_hint(self) -> str:
        """The end of the error message for a saved position with another `layout`: the reason, and what to do."""
        return (
            "and that epoch was divided for another world size, locality, batch size or sampler; "
            "resume with the same ones"
        )

    def at_epoch(self, epoch: int) -> Self:
        """Return the order of another epoch, from its first step on."""
        return replace(self, epoch=epoch, first_step=0, first_seed=0)

    def after(self, step: int, num_seeds: int) -> Self:
        """Return the order of the rest of the epoch, after `step` steps that took `num_seeds` seeds over all ranks."""
        return replace(self, first_step=step, first_seed=num_seeds)

    def for_one_rank(self) -> "Order":
        """Return the order of one process that reads all seeds."""
        return replace(self, rank=0, world_size=1, extra_seeds=0)

    def step(self, step: int) -> StepShare:
        """Return this rank's seeds of a step."""
        span, (begin, end) = self.step_span(step), self.rank_span(step)
        of_all_ranks = partial(self.indices, *span) if self.world_size > 1 else None
        return StepShare(self.indices(begin, end), begin - span[0], self._key(step), of_all_ranks)

    def _key(self, step: int) -> int:
        return keys.batch_key(self.seed, self.epoch, step)

    def step_span(self, step: int) -> tuple[int, int]:
        """Return the positions [begin, end) of a step in the epoch's order, over all ranks."""
        begin = self.first_seed + (step - self.first_step) * self.global_batch
        last = step == self.num_steps - 1 and not self.drop_last
        return begin, self.num_seeds if last else begin + self.global_batch

    def rank_span(self, step: int) -> tuple[int, int]:
        """Return the positions [begin, end) of this rank's share of a step in the epoch's order."""
        begin, end = self.step_span(step)
        size = end - begin
        return begin + size * self.rank // self.world_size, begin + size * (self.rank + 1) // self.world_size

    def indices(self, begin: int, end: int) -> Tensor:
        """Return which seeds are at positions [begin, end) of the epoch's order: [n] int64."""
        if not self.shuffle:
            return torch.arange(begin, end)
        return ops.permute(keys.epoch_key(self.seed, self.epoch), self.num_seeds, begin, end)

    @contextmanager
    def naming(self, step: int) -> Iterator[None]:
        """In a `with` block, add the step to StoreErrors, and turn errors that are not Hoploom's into BatchErrors."""
        of_step = f"step {step} of epoch {self.epoch} on rank {self.rank}"
        try:
            yield
        except StoreError as error:
            if type(error) is not StoreError or str(error).startswith(of_step):  # named where the step began
                raise
            raise StoreError(f"{of_step}: {error}") from error
        except HoploomError:
            raise
        except Exception as error:
            raise BatchError(f"{of_step} failed: {type(error).__name__}: {error}") from error

    def _as(self, kind: type[OrderKind], **more: Any) -> OrderKind:
        """Return an order of the class `kind` with the fields of this one, updated with `more`."""
        return kind(**{name: getattr(self, name) for name in Order.__dataclass_fields__} | more)


@dataclass(frozen=True, kw_only=True)
class DividedOrder(Order):
    """The order if the script has divided the seeds itself.

    All ranks make as many steps as the rank with the most seeds; the others take smaller batches.
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
        return _short_hash((self.counts, self.batch_size, self.drop_last, self.origin))

    def at_epoch(self, epoch: int) -> Self:
        return replace(super().at_epoch(epoch), own=self.own.at_epoch(epoch))

    def step(self, step: int) -> StepShare:
        begins, ends = self._begins(step), self._begins(step + 1)
        seeds = self.own.indices(int(begins[self.rank]), int(ends[self.rank]))
        return StepShare(seeds, int((ends - begins)[: self.rank].sum()), self._key(step))

    def step_span(self, step: int) -> tuple[int, int]:
        return int(self._begins(step).sum()), int(self._begins(step + 1).sum())

    def for_one_rank(self) -> Order:
        return self.own

    def _begins(self, step: int) -> Tensor:
        """Return, for each rank, which of its own seeds is the first of a step: [world_size] int64."""
        counts = torch.tensor(self.counts)
        even = counts * step // max(1, self.num_steps)
        if not self.drop_last:
            return even
        return torch.where(counts >= self.num_steps * self.batch_size, step * self.batch_size, even)


def divided(order: Order, counts: Sequence[int], origin: str) -> DividedOrder:
    """Return the order of ranks that each read only the seeds given to them; `counts` has their number by rank."""
    own = order.for_one_rank()
    own = replace(own, seed=keys.mix(own.seed, order.rank))  # ranks with equally many seeds shuffle them differently
    hashed = hashlib.sha256(origin.encode()).hexdigest()
    more = {"num_seeds": sum(counts), "extra_seeds": 0, "counts": tuple(counts), "own": own, "origin": hashed}
    return order._as(DividedOrder, **more)


@dataclass(frozen=True, kw_only=True)
class ListedOrder(Order):
    """An order that keeps a list of one epoch's seeds in memory. `at_epoch` makes the list; only the newest is kept."""

    listed: Tensor | None = field(default=None, repr=False, compare=False)  # [positions of all steps] int64
    _newest: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False, compare=False)  # one at most

    def at_epoch(self, epoch: int) -> Self:
        order = super().at_epoch(epoch)
        key = epoch, self.extra_seeds
        if key not in self._newest:
            listed = order.list_epoch(epoch)
            self._newest.clear()
            self._newest[key] = listed
        return replace(order, listed=self._newest[key])

    def list_epoch(self, epoch: int) -> Tensor:
        """Return the seeds (their indices) of all steps of an epoch, in order: [positions of all steps] int64."""
        raise NotImplementedError

    def indices(self, begin: int, end: int) -> Tensor:
        assert self.listed is not None
        return self.listed[begin:end]


# --- seeds for the ranks that hold their parts ---------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LocalOrder(ListedOrder):
    """An order that gives ranks the seeds of the parts that they hold, as far as the equal shares of a step allow.

    A position inside an epoch is valid only with the same ranks, parts and batch sizes.
    """

    held: tuple[tuple[int, ...], ...]  # parts, by rank
    parts: Tensor = field(compare=False)  # [num_seeds] int16, the part of each seed
    num_parts: int

    @property
    def layout(self) -> int:
        counts = torch.bincount(self.parts.to(torch.int64), minlength=self.num_parts).tolist()
        cuts = (self.batch_size, self.world_size, self.drop_last, self.least_tail)
        cuts += (self.extra_seeds,) if self.extra_seeds else ()  # type: ignore[assignment]
        return _short_hash((self.held, counts, cuts))

    @property
    def hosts(self) -> list[tuple[int, ...]]:
        """The parts of each host. Ranks that hold the same parts count as one host."""
        return sorted(set(self.held))

    def for_one_rank(self) -> Order:
        return self._as(Order, rank=0, world_size=1, extra_seeds=0)

    def list_epoch(self, epoch: int) -> Tensor:
        hosts = self.hosts
        seeds = Order.indices(self, 0, self.num_seeds)
        shares = torch.empty(self.num_steps, self.world_size, dtype=torch.int64)  # seeds, by step and rank
        for rank in range(self.world_size if self.num_steps else 0):
            for steps, step in ((slice(None), 0), (slice(-1, None), self.num_steps - 1)):  # all, and the last
                begin, end = replace(self, rank=rank).rank_span(step)
                shares[steps, rank] = end - begin
        host_of_rank = torch.tensor([hosts.index(parts) for parts in self.held])
        host_of = host_of_rank.repeat(self.num_steps).repeat_interleave(shares.view(-1))  # by position
        sizes = torch.bincount(host_of, minlength=len(hosts)).tolist()
        key = keys.mix(keys.epoch_key(self.seed, epoch), LOCALITY)
        out = torch.empty_like(host_of)
        for host, positions in enumerate(self._distributed(self.parts[seeds], sizes)):
            count = positions.numel()  # in order without shuffling; else seeds of other parts are spread
            spread = ops.permute(keys.mix(key, host), count, 0, count) if self.shuffle else positions.argsort()
            out[host_of == host] = seeds[positions[spread]]
        return out

    def _distributed(self, parts: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return the positions that each host reads, seeds of its parts first, from `parts` [n] and `sizes` by host."""
        free, taken = list(sizes), [[torch.empty(0, dtype=torch.int64)] for _ in sizes]
        holders = [[host for host, held in enumerate(self.hosts) if part in held] for part in range(self.num_parts)]
        left = [torch.empty(0, dtype=torch.int64)]
        for part in sorted(range(self.num_parts), key=lambda part: len(holders[part])):  # the least held first
            positions = torch.nonzero(parts == part).view(-1)
            for host in holders[part]:
                taken[host].append(positions[: free[host]])
                positions = positions[free[host] :]
                free[host] -= taken[host][-1].numel()
            left.append(positions)
        rest = torch.cat(left).sort().values
        for host, missing in enumerate(free):
            taken[host].append(rest[:missing])
            rest = rest[missing:]
        return [torch.cat(pieces) for pieces in taken]


def localised(order: Order, store: Store, node_type: str, nodes: Tensor, locality: Any) -> Order:
    """Return an order that gives seeds to ranks that hold their parts; `nodes` are the seeds' node ids: [n] int64.

    `locality` has each rank's parts; True: those that `hoploom.open` found.
    """
    if locality is False or locality is None:
        return order
    if locality is True and store.deployment.makes_batches:
        if order.rank == 0:
            warnings.warn(NO_LOCALITY, stacklevel=4)  # where the loader is made
        return order
    index, num_parts = store.schema.type_index[node_type], max(1, len(store.ranges))
    held = _parts_of_ranks(locality, store, num_parts, order.world_size)
    if len(set(held)) == 1:
        return order  # all ranks hold the same
    bounds = torch.tensor([part.first_nodes[index] for part in store.ranges[1:]], dtype=torch.int64)
    parts = torch.bucketize(nodes, bounds, right=True).to(torch.int16)
    return order._as(LocalOrder, held=held, parts=parts, num_parts=num_parts)


def _parts_of_ranks(locality: Any, store: Store, num_parts: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    hint = "give the parts of every rank, e.g. locality=[[0], [1]]"
    if locality is True:
        if store.deployment.homes:
            locality = store.deployment.homes
        elif len(store.parts) >= num_parts:
            locality = [()] * world_size  # every rank holds all
        else:
            known = "locality is True, but nobody said which rank holds what"
            raise ConfigError(f"{known}; open the store with hoploom.open(path, context=context), or {hint}")
    lists = [locality, *locality] if isinstance(locality, Sequence) else [None]
    if not all(isinstance(one, Sequence) and not isinstance(one, str | bytes) for one in lists):
        raise ConfigError(f"locality is {locality!r:.80}; give True, or {hint[5:]}")
    held = tuple(tuple(sorted({as_int("a part in locality", part, 0, hint) for part in parts})) for parts in locality)
    if len(held) != world_size:
        raise ConfigError(f"locality lists the parts of {len(held)} ranks, there are {world_size}; {hint}")
    largest = max((part for parts in held for part in parts), default=0)
    if largest >= num_parts:
        raise ConfigError(f"locality names part {largest}, the store has {num_parts}; count parts from 0")
    return held


# --- seeds that a torch sampler draws ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DrawnOrder(ListedOrder):
    """An order that a torch sampler draws, seeded by epoch: all ranks, and a resumed run, draw the same positions."""

    sampler: Any
    num_positions: int  # from which the sampler draws

    @property
    def dataset(self) -> range:
        return range(self.num_positions)

    @cached_property
    def layout(self) -> int:
        if self.listed is None:
            return 0
        return int.from_bytes(hashlib.sha256(self.listed.numpy().tobytes()).digest()[:7], "little")

    @property
    def layout_hint(self) -> str:
        return (
            f"for which sampler={type(self.sampler).__name__} draws other seeds now; give the same sampler over the "
            "same seeds; its order may depend only on the epoch and on random numbers"
        )

    def for_one_rank(self) -> Order:
        return replace(self, rank=0, world_size=1, extra_seeds=0, _newest={})

    def list_epoch(self, epoch: int) -> Tensor:
        """Return the positions that the sampler gives for an epoch: [num_seeds] int64."""
        name = f"sampler={type(self.sampler).__name__}"
        if callable(getattr(self.sampler, "set_epoch", None)):
            self.sampler.set_epoch(epoch)
        with _seeded(keys.mix(keys.epoch_key(self.seed, epoch), SAMPLER), getattr(self.sampler, "generator", None)):
            given = list(islice(self.sampler, self.num_seeds + 1))
        if len(given) != self.num_seeds:
            gave = f"more than {self.num_seeds}" if len(given) > self.num_seeds else str(len(given))
            raise ConfigError(
                f"{name} gave {gave} positions in epoch {epoch}, but its len() was {self.num_seeds} when the "
                "loader was made; give as many in every epoch, so that all ranks make the same steps"
            )
        wrong = ConfigError(f"{name} gave {given[0]!r:.60}; give one position among the seeds at a time, no batches")
        try:
            positions = torch.stack(given) if isinstance(given[0], Tensor) else torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError) as error:
            raise wrong from error
        if positions.dim() != 1 or positions.dtype not in ID_DTYPES:
            raise wrong
        outside = positions[(positions < 0) | (positions >= self.num_positions)]
        if outside.numel():
            raise ConfigError(
                f"{name} gave position {outside[0]} in epoch {epoch}, but there are {self.num_positions} "
                "seeds; give it the same seeds as the loader"
            )
        return positions.to(torch.int64)


@contextmanager
def _seeded(key: int, generator: torch.Generator | None) -> Iterator[None]:
    """Seed every generator that a sampler may draw from with the key, and restore them at the end of the block."""
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
    """Return an order whose positions a torch sampler draws; raise ConfigError for one that cannot be used."""
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
    made = order._as(DrawnOrder, num_seeds=length, sampler=sampler, num_positions=order.num_seeds)
    made.list_epoch(0)  # raises now if the sampler gives no positions
    if replicas == order.world_size > 1:
        return divided(made, [length] * replicas, f"{name} {length} {getattr(sampler, 'seed', None)}")
    return made


def _short_hash(settings: tuple[Any, ...]) -> int:
    return int.from_bytes(hashlib.sha256(repr(settings).encode()).digest()[:7], "little")
