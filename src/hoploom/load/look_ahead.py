"""Look-ahead: the rows that the next batches miss are fetched together, each once.

Batches are computable, so those of a group of steps are sampled first. Their remote rows that no cache has come in one
request per peer, and then each batch is assembled. A row that the group before has fetched is taken from it. Costs the
memory of two groups' rows, and a first batch that waits for its group.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from hoploom.load.assemble import Assembler, Batch, Sent
from hoploom.load.maker import Drawn, Maker
from hoploom.load.pipeline import LEAD, Delivery, Producer, Stages, Work
from hoploom.ops import IdMap
from hoploom.schema import Owner, Schema
from hoploom.store import Sharded, Wanted
from hoploom.store.budget import little_idle
from hoploom.store.row_cache import Cached, HeldRows
from hoploom.store.sharded import empty_rows

Rows = Mapping[Owner, HeldRows]

NO_ROWS: Rows = {}
MOST_STEPS = 128  # ahead, however small their rows are


@dataclass
class Fetches:
    """What look-ahead has asked for."""

    num_groups: int = 0  # of steps: each asks every peer at most once
    num_fetched: int = 0  # rows
    num_reused: int = 0  # rows that the group before had fetched


@dataclass
class Needed:
    """The rows of one owner that batches need and that are not here."""

    ids: IdMap  # each once
    fields: list[str]
    num_asked: int = 0  # by every batch: a row that several need counts several times


class Fetched(NamedTuple):
    """The rows of a group, and what assembles its batches from them."""

    rows: Rows
    assembler: Assembler


class StepSize(NamedTuple):
    """What a step has to wait for."""

    num_bytes: int  # of rows
    id_bytes: int  # of their ids, each once, as narrow as they fit


def id_bytes(schema: Schema, owner: Owner) -> int:
    """What an id of a node or of an edge's position takes, as narrow as it fits."""
    count = schema.node_type(owner).num_nodes if isinstance(owner, str) else schema.relation(owner).num_edges
    return 4 if count < 1 << 31 else 8


class LookAhead(Producer):
    """Makes batches in groups of steps; what is counted in `fetches` is over all loops."""

    def __init__(self, maker: Maker, features: Sharded, num_steps: int | None, window: int = 0) -> None:
        self.num_steps = num_steps  # None: as many as a window of so many bytes holds
        self._window = window
        self._step_size: StepSize | None = None  # found out by the first loop, where there is a window
        self.fetches = Fetches()
        self._counting = threading.Lock()  # every loop has its own threads
        self._maker, self._features = maker, features

    def make(self, indices: Tensor, first: int, key: int) -> Batch:
        return self._maker.make(indices, first, key)

    @contextmanager
    def stages(self, work: Work, delivery: Delivery) -> Iterator[Stages[Sent]]:
        """Two groups are under way, the one that is delivered and the one after it; without threads, one."""
        num_groups = 2 if delivery.num_threads else 1
        num_ahead = delivery.num_ahead
        if self._window:
            fitting = self._window // self.measure(work).num_bytes
            num_ahead = max(1, min(num_ahead, fitting))
            if self.num_steps is None:
                self.num_steps = max(1, min(MOST_STEPS, fitting // (num_groups + 1)))
        group = self.num_steps or 1

        def finish(step: int, drawn: Drawn, fetched: Fetched | None) -> Sent:
            assembler = self._maker.assembler if fetched is None else fetched.assembler
            return work.send(self._maker.finish(drawn, assembler))

        with little_idle(self._window):
            yield Stages(
                finish,
                window=num_groups * group if group > 1 else num_ahead + LEAD,
                num_finishing=num_ahead,
                begin=lambda step: self._maker.draw(*work.place(step)),
                fetch=self._timed_fetch if group > 1 else None,
                group=group,
                naming=work.naming,
            )

    def measure(self, work: Work) -> StepSize:
        """The most that a step has to wait for, of three steps of the first loop."""
        if self._step_size is None:
            first, last = work.order.first_step, work.order.num_steps - 1
            sizes = [self._measured(work, step) for step in sorted({first, (first + last) // 2, last}) if first <= last]
            self._step_size = StepSize(*map(max, zip(StepSize(1, 0), *sizes, strict=True)))
        return self._step_size

    def _measured(self, work: Work, step: int) -> StepSize:
        with work.naming(step):
            drawn = self._maker.draw(*work.place(step))
        schema = self._features.schema
        num_bytes = num_id_bytes = 0
        for owner, needed in self.missing([drawn]).items():
            fields = (schema.node_type(owner) if isinstance(owner, str) else schema.relation(owner)).fields
            num_bytes += len(needed.ids) * sum(fields[name].row_bytes for name in needed.fields)
            num_id_bytes += len(needed.ids) * id_bytes(schema, owner)
        return StepSize(num_bytes, num_id_bytes)

    def _timed_fetch(self, drawn: Sequence[Drawn], previous: Fetched | None) -> Fetched:
        with self._maker.seconds("fetch"):
            return self.fetch(drawn, previous)

    def fetch(self, drawn: Sequence[Drawn], previous: Fetched | None) -> Fetched:
        """The rows that these batches need and nobody here has, in one request per peer."""
        before: Rows = {} if previous is None else previous.rows
        rows: dict[Owner, HeldRows] = {}
        wanted: list[Wanted] = []
        places: list[Tensor | None] = []
        outs: list[Tensor] = []
        num_fetched = num_reused = num_spared = 0
        for owner, needed in self.missing(drawn, before).items():
            ids, old = needed.ids.ids, before.get(owner)
            found = None if old is None else old.ids.find(ids)
            tables = {f: empty_rows(self._features.schema, owner, f, len(ids)) for f in needed.fields}
            rows[owner] = HeldRows(needed.ids, tables)
            for name, out in rows[owner].tables.items():
                known = found if old is not None and name in old.tables else None
                if old is not None and known is not None:
                    old.copy(name, known, out)
                wanted.append(Wanted(owner, name, ids))
                places.append(None if known is None else known.misses)
                outs.append(out)
            num_reused += 0 if found is None else found.hits.numel()
            num_missing = len(ids) if found is None else found.misses.numel()
            num_fetched += num_missing
            num_spared += (needed.num_asked - num_missing) * len(needed.fields)
        self._features.gather_at(wanted, places, outs)
        if (reads := self._maker.assembler.store.reads) is not None:
            reads.count_found(num_spared, of=num_spared)
        with self._counting:
            self.fetches.num_groups += 1
            self.fetches.num_fetched += num_fetched
            self.fetches.num_reused += num_reused
        return Fetched(rows, self._assembler(rows))

    def missing(self, drawn: Sequence[Drawn], before: Rows = NO_ROWS) -> dict[Owner, Needed]:
        """By owner: the ids whose rows are not here, and the fields that are needed of them."""
        needed: dict[Owner, Needed] = {}
        shards = self._features.shards
        for one in drawn:
            seen: set[tuple[Owner, int]] = set()
            wanted = self._maker.assembler.wanted(one.sampled)
            for owner, name, ids in wanted:
                if all(shard.lies_here(owner, name) for shard in shards):
                    continue
                if owner not in needed:
                    needed[owner] = Needed(IdMap(len(before[owner].ids) if owner in before else 0), [])
                of_owner = needed[owner]
                if name not in of_owner.fields:
                    of_owner.fields.append(name)
                if (owner, id(ids)) not in seen:
                    seen.add((owner, id(ids)))
                    for shard, places in zip(shards, self._features.route(owner, ids), strict=True):
                        missing = shard.missing(owner, ids, places)
                        of_owner.ids.add(ids, missing)
                        of_owner.num_asked += missing.numel()
        return {owner: of_owner for owner, of_owner in needed.items() if len(of_owner.ids)}

    def _assembler(self, rows: Rows) -> Assembler:
        features, assembler = self._features, self._maker.assembler
        shards = [shard if shard.is_here else Cached(shard, rows) for shard in features.shards]
        return replace(assembler, store=replace(assembler.store, features=features.over(shards)))
