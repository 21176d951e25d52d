"""Look-ahead: the rows that the next batches miss are fetched together, each once.

Batches are computable, so those of a group of steps are sampled first. Their remote rows that neither a cache nor an
earlier group has come in one request per peer, and then each batch is assembled. Where a row is, is looked up once.
Costs the memory of two groups' rows, and a first batch that waits for its group.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from hoploom.batch import Sampled
from hoploom.load.assemble import Assembler, Batch
from hoploom.load.maker import LocalMaker, Maker
from hoploom.load.order import Order
from hoploom.load.pipeline import LEAD, Pipeline, Stages
from hoploom.load.row_window import PrefetchedRows, Window, ids_key
from hoploom.ops import IdMap
from hoploom.schema import Owner, Schema
from hoploom.store import Sharded, Wanted
from hoploom.store.base import RowLookup
from hoploom.store.budget import little_idle
from hoploom.store.row_cache import Cached

MOST_STEPS = 128  # ahead, however small their rows are


@dataclass
class Fetches:
    """What look-ahead has asked for."""

    num_groups: int = 0  # of steps: each asks every peer at most once
    num_fetched: int = 0  # rows
    num_reused: int = 0  # rows that the group before had fetched


@dataclass
class Needed:
    """The rows of one owner that a batch needs and that are not here."""

    ids: IdMap  # each once
    fields: list[str]


@dataclass(frozen=True)
class Fetched:
    """The rows of a group, and what assembles its batches from them."""

    windows: Mapping[Owner, Window]
    assemblers: Mapping[int, Assembler]  # by the batch's id()


class StepSize(NamedTuple):
    """What a step has to wait for."""

    num_bytes: int  # of rows
    id_bytes: int  # of their ids, each once, as narrow as they fit


def id_bytes(schema: Schema, owner: Owner) -> int:
    """What an id of a node or of an edge's position takes, as narrow as it fits."""
    return 4 if schema.described(owner).count < 1 << 31 else 8


class LookAhead(Maker):
    """Makes batches in groups of steps; what is counted in `fetches` is over all loops."""

    def __init__(self, maker: LocalMaker, features: Sharded, num_steps: int | None, window: int = 0) -> None:
        self.num_steps = num_steps  # None: as many as a window of so many bytes holds
        self._window = window
        self._step_size: StepSize | None = None  # found out by the first loop, where there is a window
        self.fetches = Fetches()
        self._counting = threading.Lock()  # every loop has its own threads
        self._maker, self._features = maker, features
        self._uncached = features.over(
            [shard.shard if isinstance(shard, Cached) else shard for shard in features.shards]
        )

    def make(self, indices: Tensor, first: int, key: int) -> Batch:
        return self._maker.make(indices, first, key)

    @contextmanager
    def stages(self, order: Order, pipeline: Pipeline) -> Iterator[Stages[Batch]]:
        """Two groups are under way, the one that is delivered and the one after it; without threads, one."""
        num_groups = 2 if pipeline.num_threads else 1
        num_ahead = pipeline.num_ahead
        if self._window:
            fitting = self._window // self.measure(order).num_bytes
            num_ahead = max(1, min(num_ahead, fitting))
            if self.num_steps is None:
                self.num_steps = max(1, min(MOST_STEPS, fitting // (num_groups + 1)))
        group = self.num_steps or 1

        def finish(step: int, sampled: Sampled, fetched: Fetched | None) -> Batch:
            assembler = self._maker.assembler if fetched is None else fetched.assemblers[id(sampled)]
            return self._maker.finish(sampled, assembler)

        with little_idle(self._window):
            yield Stages(
                finish,
                window=num_groups * group if group > 1 else num_ahead + LEAD,
                num_finishing=num_ahead,
                begin=lambda step: self._maker.sample(*order.step(step)),
                fetch=self._timed_fetch if group > 1 else None,
                group=group,
            )

    def measure(self, order: Order) -> StepSize:
        """The most that a step has to wait for, of three steps of the first loop."""
        if self._step_size is None:
            first, last = order.first_step, order.num_steps - 1
            sizes = [
                self._measured(order, step) for step in sorted({first, (first + last) // 2, last}) if first <= last
            ]
            self._step_size = StepSize(*map(max, zip(StepSize(1, 0), *sizes, strict=True)))
        return self._step_size

    def _measured(self, order: Order, step: int) -> StepSize:
        with order.naming(step):
            sampled = self._maker.sample(*order.step(step))
        schema = self._features.schema
        num_bytes = num_id_bytes = 0
        for owner, needed in self.missing(sampled).items():
            fields = schema.described(owner).fields
            num_bytes += len(needed.ids) * sum(fields[name].row_bytes for name in needed.fields)
            num_id_bytes += len(needed.ids) * id_bytes(schema, owner)
        return StepSize(num_bytes, num_id_bytes)

    def _timed_fetch(self, batches: Sequence[Sampled], previous: Fetched | None) -> Fetched:
        with self._maker.seconds("fetch"):
            return self.fetch(batches, previous)

    def fetch(self, batches: Sequence[Sampled], previous: Fetched | None) -> Fetched:
        """The rows that these batches need and nobody here has, in one request per peer."""
        fields = self._waiting([self._maker.assembler.wanted(one) for one in batches])
        windows = self._windows(fields, {} if previous is None else previous.windows)
        lookups = [self._look_up(one, fields) for one in batches]
        wanted: list[Wanted] = []
        places: list[Tensor | None] = []
        outs: list[Tensor] = []
        num_fetched = num_reused = num_spared = 0
        for owner, window in windows.items():
            window.begin()
            of_owner = [(batch, place) for batch in lookups for place, one in enumerate(batch) if one.owner == owner]
            held, fresh = window.find([batch[place] for batch, place in of_owner])
            for (batch, place), rows in zip(of_owner, held, strict=True):
                batch[place] = batch[place]._replace(cached=(*batch[place].cached, rows))
            if fresh.numel():
                for want, table in window.wanted():
                    wanted.append(want)
                    places.append(fresh)
                    outs.append(table)
            num_fetched += fresh.numel()
            num_reused += window.num_needed - fresh.numel()
            num_asked = sum(rows.positions.numel() for rows in held)
            num_spared += (num_asked - fresh.numel()) * len(window.tables)
        self._uncached.gather_at(wanted, places, outs)
        if (reads := self._maker.assembler.store.reads) is not None:
            reads.count_found(num_spared, of=num_spared)
        with self._counting:
            self.fetches.num_groups += 1
            self.fetches.num_fetched += num_fetched
            self.fetches.num_reused += num_reused
        assemblers = {id(one): self._assembler(fields, batch) for one, batch in zip(batches, lookups, strict=True)}
        return Fetched(windows, assemblers)

    def _waiting(self, wanted: Sequence[Sequence[Wanted]]) -> dict[Owner, list[str]]:
        """The fields that are wanted of which some rows cost a wait."""
        fields: dict[Owner, list[str]] = {}
        for owner, name in dict.fromkeys((want.owner, want.field) for of_batch in wanted for want in of_batch):
            if not self._features.in_memory(owner, name):
                fields.setdefault(owner, []).append(name)
        return fields

    def _windows(self, fields: Mapping[Owner, Sequence[str]], before: Mapping[Owner, Window]) -> dict[Owner, Window]:
        """Those of the group before, as far as they have all fields."""
        windows = dict(before)
        for owner, names in fields.items():
            if owner not in before or not before[owner].tables.keys() >= set(names):
                windows[owner] = Window(self._features.schema, owner, names, little_memory=self._window > 0)
        return windows

    def _look_up(self, sampled: Sampled, fields: Mapping[Owner, Sequence[str]]) -> list[RowLookup]:
        """Look up each list of ids of a batch once, for these fields."""
        wanted = [want for want in self._maker.assembler.wanted(sampled) if want.field in fields.get(want.owner, ())]
        lists = {ids_key(want.owner, want.ids): want for want in wanted}
        return [self._features.look_up(want.owner, want.ids) for want in lists.values()]

    def missing(self, sampled: Sampled) -> dict[Owner, Needed]:
        """By owner: the ids whose rows cost a wait, and the fields that are needed of them."""
        fields = self._waiting([self._maker.assembler.wanted(sampled)])
        needed: dict[Owner, Needed] = {}
        for one in self._look_up(sampled, fields):
            needed.setdefault(one.owner, Needed(IdMap(), fields[one.owner])).ids.add(one.ids, one.missing)
        return {owner: of_owner for owner, of_owner in needed.items() if len(of_owner.ids)}

    def _assembler(self, fields: Mapping[Owner, Sequence[str]], lookups: Sequence[RowLookup]) -> Assembler:
        known = {(owner, name) for owner, names in fields.items() for name in names}
        assembler = self._maker.assembler
        rows = PrefetchedRows(self._features, known, lookups)
        return replace(assembler, store=replace(assembler.store, features=rows))
