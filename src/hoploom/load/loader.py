"""The loader: it combines an order of steps, a maker of batches, a pipeline of threads, and a position to be saved."""

import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.data.data import BaseData
from torch_geometric.typing import TensorFrame

from hoploom import keys
from hoploom.config.values import as_int
from hoploom.errors import BatchError, ConfigError
from hoploom.load.arguments import LoaderArguments, read_fields, seeds_name, shown_counts
from hoploom.load.assemble import Arriving, Batch, Mover, received, spread_shared
from hoploom.load.look_ahead import LookAhead
from hoploom.load.maker import Fingerprint, LocalMaker, Maker, NodeMaker
from hoploom.load.order import DividedOrder, DrawnOrder, Order, StepShare, divided, drawn, localised
from hoploom.load.pipeline import DEADLINE, Pipeline
from hoploom.ranks import agreement
from hoploom.ranks.agreement import DIVIDED, LONE, Meeting, Share
from hoploom.schema import FEATURES, HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, ID_DTYPES, TypeKey
from hoploom.store import Sharded, Store
from hoploom.store.base import Tier
from hoploom.store.from_pyg import PygGraph

FIXED = ("rank", "world_size", "batch_size", "drop_last", "dataset")  # attributes that decide the batches
CALLS = -1  # the step number in the random key of loader([ids]), which no epoch has


@dataclass(frozen=True)
class Position:
    """A position in an epoch: the number of steps that are done."""

    epoch: int = 0
    step: int = 0
    num_seeds: int = 0  # of the steps that are done, over all ranks


@dataclass(frozen=True)
class EpochSteps:
    """The steps of one loop over a loader, for a caller that makes the batches itself and calls `done(step)`."""

    order: Order
    make: Callable[[int], Batch]  # returns the batch that the loop would have yielded
    done: Callable[[int], None]


def producer_of(maker: LocalMaker, device: torch.device | None, look_ahead: int | None, deadline: float) -> Maker:
    """Return the maker of a loader's batches: on the GPU or servers that hold the store, else in this process."""
    deployment = maker.assembler.store.deployment
    deployed: Maker | None = deployment.producer(maker, device, look_ahead, deadline)
    return local_producer(maker, look_ahead or deployment.look_ahead) if deployed is None else deployed


def local_producer(maker: LocalMaker, num_steps: int | None) -> Maker:
    """Return `maker`, wrapped in LookAhead if some rows are on disk or on another host.

    LookAhead fetches the rows of `num_steps` steps at a time; None stands for as many as fit in the memory budget.
    """
    store = maker.assembler.store
    features = store.features
    window = 0 if store.budget is None else store.budget.window
    waits = isinstance(features, Sharded) and any(shard.tier < Tier.MEMORY for shard in features.shards)
    if not (waits and (num_steps or 0) > 1) and not (num_steps is None and window):
        return maker
    assert isinstance(features, Sharded)
    is_local = num_steps is None and all(shard.tier is not Tier.REMOTE for shard in features.shards)
    return LookAhead(maker, features, num_steps, window, store.scratch if is_local else None)


class _WatchedData:
    """Watches the user's PyG data: later batches lack its deleted fields, and have its new node fields."""

    def __init__(self, data: Any, graph: PygGraph) -> None:
        self._graph = graph
        owners: list[tuple[TypeKey, ...]] = [(HOMOGENEOUS_TYPE, HOMOGENEOUS_RELATION)]
        if isinstance(data, HeteroData):
            owners = [(), *((owner,) for owner in (*data.node_types, *data.edge_types))]
        self._storages = [
            (own, storage, {name: (value, _version(value)) for name, value in storage.items()})
            for own, storage in zip(owners, data.stores if isinstance(data, BaseData) else (), strict=False)
        ]

    def check(self) -> None:
        """Record which fields of the data were deleted or added; raise ConfigError if a field's rows were replaced."""
        frames, deleted = self._graph.frames, self._graph.deleted
        for owners, storage, known in self._storages:
            replaced = [name for name, (old, version) in known.items() if not _is_as_read(storage, name, old, version)]
            for key in ((owner, name) for owner in owners for name in known):
                (deleted.discard if key[1] in storage else deleted.add)(key)
            before, added = dict[str, Any](), dict[str, Any]()
            if owners and isinstance(owners[0], str):
                before, shape = frames.get(owners[0], {}), (self._graph.store.schema.node_type(owners[0]).num_nodes,)
                new = {name: rows for name, rows in storage.items() if name not in known}
                added = {name: rows for name, rows in new.items() if _is_dense(rows) and rows.shape[:1] == shape}
                replaced += [name for name in new if name in before and name not in added]
            for name in replaced:
                raise ConfigError(f"{name} of the data was replaced after the loader was made; make the loader again")
            if before or added:
                frames[owners[0]] = {name: rows for name, rows in before.items() if name in known} | added


def _is_dense(rows: Any) -> bool:
    return isinstance(rows, Tensor) and rows.layout == torch.strided


def _version(rows: Any) -> int:
    """Return how often a non-contiguous tensor, which the loader copied, was written in place; 0 for other values."""
    return 0 if not _is_dense(rows) or rows.is_contiguous() or rows.is_inference() else rows._version


def _is_as_read(storage: Any, name: str, old: Any, version: int) -> bool:
    """Return False if a field has other rows than the loader read; True also if it is gone, or on another device."""
    if (now := storage.get(name)) is old:
        return _version(now) == version
    if now is None or not isinstance(old, Tensor | TensorFrame) or getattr(now, "device", None) != old.device:
        return True
    if not (_is_dense(now) and _is_dense(old) and (now.dtype, now.shape) == (old.dtype, old.shape)):
        return False
    return bool(((now == old) | ((now != now) & (old != old))).all())  # NaN, as of missing labels, equals NaN


class Loader:
    """The base class of the loaders: each loop over a loader yields the batches of one epoch."""

    rank: int
    world_size: int
    batch_size: int
    drop_last: bool
    dataset: range  # positions of the seeds, as PyG names them

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED:
            raise AttributeError(f"{name} of a loader cannot be changed; make another loader")
        super().__setattr__(name, value)

    def __init__(self, given: LoaderArguments, graph: PygGraph, maker: LocalMaker) -> None:
        """Take the arguments, the graph read from their `data`, and a maker of batches in this process."""
        mover = Mover(given.device)
        if mover.is_cuda or (given.pin_memory and torch.cuda.is_available()):
            maker = replace(maker, assembler=replace(maker.assembler, pinned=True))
        self.data, self.maker = given.data, maker
        self.store = given.data if isinstance(given.data, Store) else graph.store
        if self.store.learned and maker.assembler.reduce is not None:
            raise ConfigError("aggregate= adds features up before the learned rows are there; leave it out")
        chosen = read_fields(self.store.schema, given.fields, graph.frames)
        self.learned = [of for of in self.store.learned if chosen is None or FEATURES in chosen[of.node_type]]
        self._given = given
        self._mover = mover
        self._watched = _WatchedData(self.data, graph)
        self._meeting: Meeting | None = None  # with the other ranks, if the script gives no shares
        self._is_settled = False  # whether it is known how the seeds are divided
        self._call_chain = agreement.call_chain()
        share = agreement.read_share(given.rank, given.world_size)
        self._set_order(self._order_of(share), share)
        deadline = given.timeout or DEADLINE
        self._producer = producer_of(self.maker, mover.device, given.look_ahead, deadline)
        self.num_workers = max(given.num_workers, self._producer.least_threads)
        self._pipeline = Pipeline(self.num_workers, given.prefetch_factor or 2, deadline)
        self._next = self._consumed = Position()
        self._num_loops = 0
        self._meet()

    def _order_of(self, share: Share) -> Order:
        """Return the order in which a rank reads the seeds; `share` has the rank and the world size."""
        given, (node_type, nodes) = self._given, self.maker.seed_nodes
        order = Order(
            nodes.numel(),
            given.batch_size,
            bool(given.shuffle),
            bool(given.drop_last),
            given.random_seed(),
            share.rank,
            share.world_size,
            least_tail=given.least_tail,
        )
        if given.sampler is None:
            return localised(order, self.store, node_type, nodes, given.locality)
        return drawn(order, given.sampler, given.locality)

    def _set_order(self, order: Order, share: Share) -> None:
        order.check()
        is_divided = isinstance(order, DividedOrder)
        self.share = Share(share.rank, share.world_size, DIVIDED) if is_divided else share  # that this rank reads
        vars(self).update({name: getattr(order, name) for name in FIXED})
        self._order = self._looping = order  # _looping is the order of the newest loop
        self._is_compared, self._looped = False, -1  # whether with other ranks' loaders; the newest loop's epoch

    def _meet(self) -> None:
        """Update this rank's share of the seeds, and post a hash of the seeds for other ranks to compare."""
        if not dist.is_initialized():
            return
        share = self.share if self.share.is_given else agreement.read_share(None, None)
        if share != self.share:
            self._set_order(self._order_of(share), share)
        here = agreement.detector_here()
        if here is not None and self._meeting is None and not share.is_given and share.world_size == here.size:
            self._meeting = Meeting(here, self.reading(self._order), self._call_chain, self._order.num_seeds)

    def settle(self, *, together: bool = False) -> None:
        """Ask the other ranks whether all were given the same seeds, or each its own share, and order them so.

        The wait has the timeout of the process group. Pass `together` if all ranks read the loader. Without it, this
        rank may be the only one that reads the loader, and then reads all seeds.
        """
        self._meet()
        meeting = self._meeting
        if meeting is None or self._is_settled:
            return
        seeds = meeting.seeds(may_be_lone=not together)
        self._is_settled = True
        if not seeds:
            self._read_all()
        elif len(set(seeds)) > 1:
            counts = [int(text.partition(" ")[0]) for text in seeds]
            self._set_order(divided(self._order, counts, repr(seeds)), self.share)

    def _read_all(self) -> None:
        """Switch to reading all seeds, because the other ranks do not read this loader but wait for this rank."""
        self._set_order(self._order.for_one_rank(), Share(0, 1, LONE))
        if self._meeting is not None:
            self._meeting.note_lone()
        line = f"rank {dist.get_rank()} reads all {self._order.num_seeds:,} seeds of a loader that no other rank reads"
        print(f"hoploom: {line}", file=sys.stderr, flush=True)

    def _tell_share(self) -> None:
        """Print on rank 0 how the seeds are divided over the ranks, unless the script gave rank= and world_size=."""
        order = self._order
        if not isinstance(order, DividedOrder):
            if order.world_size > 1:
                agreement.print_share(self.share)
        elif self.share.rank == 0 and not self._num_loops:
            counts = " to ".join(f"{count:,}" for count in sorted({min(order.counts), max(order.counts)}))
            line = f"each of {order.world_size} ranks reads the {counts} seeds that it was given"
            line += f", in {order.num_steps:,} steps"
            node_type, nodes = self.maker.seed_nodes
            some = nodes[:: max(1, nodes.numel() // 4096)]
            for name in self.store.schema.node_type(node_type).splits if isinstance(self.maker, NodeMaker) else ():
                members = self.store.split(name, node_type)  # [n] int64, ascending
                if (num_unread := members.numel() - order.num_seeds) > 0:
                    at = torch.searchsorted(members, some).clamp(max=members.numel() - 1)
                    if torch.equal(members[at], some):
                        line += f"; {num_unread:,} seeds of the split {name!r} are on no rank"
                        break
            print(f"hoploom: {line}", file=sys.stderr, flush=True)

    def __len__(self) -> int:
        self.settle()
        return self._order.num_steps

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError("a loader is never copied or pickled; make another, and give it this one's state_dict()")

    def share_steps(self, num_seeds: int) -> Self:
        """Set the seeds of a step, over all ranks; batch_size must be num_seeds // world_size. Return self."""
        self._order = replace(self._order, extra_seeds=num_seeds - self.batch_size * self.world_size)
        self._looping = self._order
        return self

    @property
    def epoch(self) -> int:
        """The epoch of the newest loop, or of the next loop if none has begun."""
        return self._consumed.epoch

    def __iter__(self) -> Iterator[Batch]:
        return self._epoch(self.begin_epoch())

    def begin_epoch(self) -> EpochSteps:
        """Begin the next epoch, or the rest of a restored one. Return its EpochSteps, for making the batches."""
        self._watched.check()
        self.settle()
        reader = None if self._meeting is None or self.share.origin == LONE else self._meeting.lone_reader()
        if reader is not None:
            raise ConfigError(
                f"rank {reader} has read all seeds of this loader, while the other ranks waited for it; make "
                f"another loader for loops of all ranks, or give that one of rank {reader} rank=0, world_size=1"
            )
        start = self._next
        order = self._order.at_epoch(start.epoch).after(start.step, start.num_seeds)
        if self.share.world_size > 1 or isinstance(order, DrawnOrder) or not self._is_compared:
            compared = agreement.agree(self.share, partial(self.reading, order))
            if compared == agreement.ALONE:
                self._read_all()
                return self.begin_epoch()
            self._is_compared = bool(compared)
        self._tell_share()
        self._next, self._consumed = Position(start.epoch + 1), start
        self._num_loops += 1
        self._looped, self._looping = start.epoch, order
        return EpochSteps(order, partial(self._make_step, order), partial(self._pass, order, self._num_loops))

    def rehearsal(self) -> Order:
        """Return the order of epoch 0, for trying out steps without moving the loader's position."""
        return self._order.at_epoch(0)

    def _epoch(self, epoch: EpochSteps) -> Iterator[Batch]:
        with closing(self._made(epoch.order, epoch.order.steps)) as made:
            for step, batch in zip(epoch.order.steps, made, strict=True):
                epoch.done(step)
                yield batch

    def _pass(self, order: Order, loop: int, step: int) -> None:
        """Set the loader's position to just after the finished `step`, unless a loop newer than `loop` has begun."""
        if loop == self._num_loops:
            at_end = step == order.num_steps - 1
            after = Position(order.epoch, step + 1, order.step_span(step)[1])
            self._consumed = Position(order.epoch + 1) if at_end else after

    def reading(self, order: Order | None = None) -> Fingerprint:
        """Return the Fingerprint of `order`, for ranks to compare; None: of all seeds of epoch 0, not one share."""
        if order is None:
            order = self._order if isinstance(self._order, DividedOrder) else self._order.for_one_rank()
            order = order.at_epoch(0)
        return Fingerprint(type(self).__name__, order, self.maker)

    def steps(self, steps: range, *, dealt: bool = True) -> Generator[Batch, None, None]:
        """Return the batches of these steps of epoch 0, without moving the loader's position.

        With `dealt=False`, `steps` are those of one process that reads all seeds. Ranks can take these steps in turn:
        `loader.steps(range(rank, loader.num_whole_steps, world_size), dealt=False)`.
        """
        self._watched.check()
        order = self._order if dealt else self._order.for_one_rank()
        if len(steps) and not 0 <= min(steps) <= max(steps) < order.num_steps:
            raise ConfigError(f"steps are {steps}, but an epoch has {order.num_steps}; stay within it")
        if dealt and not self.share.is_given and order.world_size > 1 and steps.step > 1:
            raise ConfigError(
                f"steps are {steps} of a loader whose seeds are already divided over {order.world_size} ranks "
                f"({self.share.origin}); give dealt=False to take whole steps in turn"
            )
        return self._made(order.at_epoch(0), steps)

    @property
    def num_whole_steps(self) -> int:
        """The number of steps of an epoch if one process reads all seeds."""
        return self._order.for_one_rank().num_steps

    def stage_seconds(self) -> dict[str, float]:
        """Return the seconds spent so far on making batches in this process, by stage, over all threads."""
        return dict(self.maker.seconds.so_far)

    def num_seeds(self, step: int) -> int:
        """Return the number of seeds of a step, over all ranks, in the iteration that was started last."""
        steps = self._looping.steps
        if not steps.start <= step < steps.stop:
            raise ConfigError(f"step {step} is not in {steps}, the steps of the newest loop; count from where it began")
        begin, end = self._looping.step_span(step)
        return end - begin

    def _made(self, order: Order, steps: range) -> Generator[Batch, None, None]:
        send = self._mover.send
        with self._producer.stages(order, self._pipeline) as stages:
            finish = stages.finish
            sending = replace(stages, finish=lambda step, begun, fetched: send(finish(step, begun, fetched)))
            with closing(self._pipeline.run(sending, steps, order.naming)) as made:
                for batch in made:
                    yield self._delivered(batch)

    def _make_step(self, order: Order, step: int) -> Batch:
        """Return the batch of a step. It depends only on the store, options, seed, epoch, step, rank and world size."""
        with order.naming(step):
            made = self._mover.send(self._producer.make(order.step(step)))
        return self._delivered(made)

    def _delivered(self, sent: Batch | Arriving) -> Batch:
        """Return a batch for the calling thread, with the learned rows of its nodes as they are now."""
        batch = received(sent)
        if self.maker.transform is None:  # else the maker has done this
            spread_shared(batch)
        for learned in self.learned:
            learned.attach(batch)
        return batch

    def __call__(self, index: Tensor | list[int]) -> Batch:
        """Return a batch of the seeds at positions `index` among all seeds of the loader: `loader([0, 1, 2])`."""
        self._watched.check()
        indices = torch.as_tensor(index)
        if indices.dim() != 1 or indices.dtype not in ID_DTYPES:
            of = f"dtype {indices.dtype} and shape {tuple(indices.shape)}"
            raise ConfigError(f"index has {of}; give a list of positions")
        limit = len(self.dataset)
        outside = indices[(indices < 0) | (indices >= limit)]
        if outside.numel():
            raise ConfigError(f"index holds {outside[0]}, out of range [0, {limit}); give positions among the seeds")
        key = keys.batch_key(self._order.seed, self._consumed.epoch, CALLS)
        try:
            made = self._producer.make(StepShare(indices.to(torch.int64).contiguous(), 0, key))
        except TimeoutError as error:
            raise BatchError(f"a batch of {indices.numel()} given positions failed: TimeoutError: {error}") from error
        return self._delivered(self._mover.send(made))

    def enable_multithreading(self, worker_threads: int | None = None) -> AbstractContextManager[None]:
        """Do nothing: workers are threads here. PyG's loaders have worker processes."""
        return nullcontext()

    def enable_cpu_affinity(self, loader_cores: Any = None) -> AbstractContextManager[None]:
        """Do nothing: workers are threads here, and no core is reserved for them."""
        return nullcontext()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next loop. A position that was restored inside this epoch is kept."""
        epoch = as_int("epoch", epoch, 0, "give the number of an epoch")
        if epoch != self._next.epoch:
            self._next = Position(epoch)
        self._consumed = self._next

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch that the newest loop has yielded, as seven integers."""
        self.settle()
        at, order = self._consumed, self._order
        if at.step:
            order = self._looping if at.epoch == self._looped else order.at_epoch(at.epoch)
        return {
            "epoch": at.epoch,
            "step": at.step,
            "consumed_seeds": at.num_seeds,
            "num_seeds": order.num_seeds,
            "seed": order.seed,
            "shuffle": int(order.shuffle),
            "layout": order.layout,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position, without making batches. The world size and the batch size may be different."""
        self.settle()
        order = self._order
        if not isinstance(state, Mapping) or any(isinstance(value, Tensor) for value in state.values()):
            raise ConfigError(f"the state is {state!r:.80}; give what state_dict() returned")
        for name in ("num_seeds", "seed", "shuffle"):
            mine = int(getattr(order, name))
            if state.get(name) != mine:
                raise ConfigError(f"the state has {name}={state.get(name)!r}, this loader {mine!r}; they must agree")
        way_out = "give what state_dict() returned"
        names = ("epoch", "step", "consumed_seeds")
        position = Position(*(as_int(f"the state's {name}", state.get(name), 0, way_out) for name in names))
        if position.num_seeds > order.num_seeds:
            raise ConfigError(f"the state's position {position} is outside of an epoch of {order.num_seeds} seeds")
        if position.step and state.get("layout") != order.at_epoch(position.epoch).layout:
            raise ConfigError(
                f"the state is from the middle of epoch {position.epoch}, {order.layout_hint}, or go on with "
                f"set_epoch({position.epoch + 1})"
            )
        left = order.num_seeds - position.num_seeds
        if 0 < left < order.world_size:
            raise ConfigError(
                f"{left} seeds are left of epoch {position.epoch} for {order.world_size} ranks; "
                f"resume with at most {left} ranks, or go on with set_epoch({position.epoch + 1})"
            )
        self._next = self._consumed = position
        self._looped = -1

    def shown(self) -> dict[str, str]:
        """Return, by name, the facts about the loader that `repr` shows."""
        order, name = self._order, seeds_name(self._given)
        shown = {"seeds of": name} if name else {}
        shown |= {"seeds": f"{order.num_seeds:,}", "steps": f"{order.num_steps:,}, of {order.batch_size:,} seeds each"}
        return shown | shown_counts(self.store.schema, self.maker.sampler.sampling)

    def __repr__(self) -> str:
        shown = self.shown()
        first = f"{shown.pop('seeds of')}: " if "seeds of" in shown else ""
        steps = shown.pop("steps").replace(", of", " steps of").replace(" seeds each", "")
        words = [f"{shown.pop('seeds')} seeds", steps, *(f"{name} {text}" for name, text in shown.items())]
        return f"{type(self).__name__}({first}{', '.join([*words, str(self.share)])})"

    def __str__(self) -> str:
        return f"{type(self).__name__}()"  # as PyG's
