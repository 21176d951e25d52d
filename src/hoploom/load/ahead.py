"""Look-ahead: the rows that the next batches miss are fetched together, each once.

Batches are computable, so those of a group of steps are sampled first; their rows that lie elsewhere, and in no cache,
are asked for in one request per peer, and then each batch is assembled from what is here. A row that the group before
has fetched is taken from it. Costs the memory of two groups' rows, and a first batch that waits for a whole group.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from hoploom.load.assemble import Assembler
from hoploom.load.loader import Delivery, Work
from hoploom.load.maker import Drawn, Maker
from hoploom.load.prefetch import UntilOneFails, Workers, at_once, result_of
from hoploom.ops import IdMap
from hoploom.schema import Owner
from hoploom.store import Sharded, Store, Wanted
from hoploom.store.row_cache import Cached, HeldRows, lies_here, missing
from hoploom.store.sharded import empty_rows

Submit = Callable[[Callable[[], Any]], "Future[Any]"]
Rows = Mapping[Owner, HeldRows]


@dataclass
class Fetches:
    """What look-ahead has asked for, over all loops."""

    num_groups: int = 0  # of steps: each asks every peer at most once
    num_fetched: int = 0  # rows
    num_reused: int = 0  # rows that the group before had fetched
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, num_fetched: int, num_reused: int) -> None:
        """Count one group."""
        with self._lock:
            self.num_groups += 1
            self.num_fetched += num_fetched
            self.num_reused += num_reused


class Fetched(NamedTuple):
    """The rows of a group, and what assembles its batches from them."""

    rows: Rows
    assembler: Assembler


class Group(NamedTuple):
    """Steps under way together."""

    steps: range
    drawn: Mapping[int, "Future[Drawn]"]
    fetched: "Future[Fetched]"


class LookAhead:
    """Makes batches in groups of steps; what is counted in `fetches` is over all loops."""

    def __init__(self, maker: Maker, features: Sharded, num_steps: int) -> None:
        self.num_steps = num_steps
        self.fetches = Fetches()
        self._maker, self._features = maker, features

    def made(self, work: Work, steps: range, delivery: Delivery) -> Generator[Any, None, None]:
        """The batches of these steps, in order. The group after the one that is delivered is on its way."""
        with ExitStack() as running:
            submit, fetch, num_ahead = at_once, at_once, 1
            if delivery.num_threads:
                fetch = running.enter_context(Workers[Any](1)).submit  # the others wait for no peer while they can work
                submit = running.enter_context(Workers[Any](delivery.num_threads)).submit  # closed first
                num_ahead = delivery.num_ahead
            run = Run(self, work, steps, (submit, fetch), delivery.deadline)
            spans = iter([steps[at : at + self.num_steps] for at in range(0, len(steps), self.num_steps)])
            groups: deque[Group] = deque()
            waiting: deque[tuple[int, Group]] = deque()
            under_way: deque[Future[Any]] = deque()
            newest: Group | None = None
            for step in steps:
                while len(groups) < (2 if delivery.num_threads else 1) and (span := next(spans, None)) is not None:
                    newest = run.begin(span, newest)
                    groups.append(newest)
                    waiting.extend((one, newest) for one in span)
                while waiting and len(under_way) < num_ahead:
                    under_way.append(submit(partial(run.finish, *waiting.popleft())))
                yield result_of(under_way.popleft(), step, delivery.deadline)
                if step == groups[0].steps[-1]:
                    groups.popleft()

    def draw(self, indices: Tensor, first: int, key: int) -> Drawn:
        """The first stage of a batch."""
        return self._maker.draw(indices, first, key)

    def finish(self, drawn: Drawn, assembler: Assembler) -> Any:
        """The last one."""
        return self._maker.finish(drawn, assembler)

    def fetch(self, drawn: Sequence[Drawn], before: Rows) -> Fetched:
        """The rows that these batches need and nobody here has, in one request per peer."""
        rows: dict[Owner, HeldRows] = {}
        wanted: list[Wanted] = []
        places: list[Tensor | None] = []
        outs: list[Tensor] = []
        num_fetched = num_reused = 0
        for owner, (ids_held, fields) in self._missing(drawn, before).items():
            ids, old = ids_held.ids, before.get(owner)
            found = None if old is None else old.ids.find(ids)
            rows[owner] = HeldRows(ids_held, {f: empty_rows(self._features.schema, owner, f, len(ids)) for f in fields})
            for name, out in rows[owner].tables.items():
                known = found if old is not None and name in old.tables else None
                if old is not None and known is not None:
                    old.copy(name, known, out)
                wanted.append(Wanted(owner, name, ids))
                places.append(None if known is None else known.misses)
                outs.append(out)
            num_reused += 0 if found is None else found.hits.numel()
            num_fetched += len(ids) if found is None else found.misses.numel()
        self._features.gather_at(wanted, places, outs)
        self.fetches.add(num_fetched, num_reused)
        return Fetched(rows, self._assembler(rows))

    def _missing(self, drawn: Sequence[Drawn], before: Rows) -> dict[Owner, tuple[IdMap, list[str]]]:
        """By owner: the ids whose rows are not here, each once, and the fields that are needed of them."""
        needed: dict[Owner, tuple[IdMap, list[str]]] = {}
        shards, routes = self._features.shards, self._features.routes
        for one in drawn:
            seen: set[tuple[Owner, int]] = set()
            wanted = self._maker.assembler.wanted(one.sampled)
            for owner, name, ids in wanted:
                if all(lies_here(shard, owner, name) for shard in shards):
                    continue
                if owner not in needed:
                    needed[owner] = IdMap(len(before[owner].ids) if owner in before else 0), []
                held, fields = needed[owner]
                if name not in fields:
                    fields.append(name)
                if (owner, id(ids)) not in seen:
                    seen.add((owner, id(ids)))
                    for shard, places in zip(shards, routes[owner].split(ids), strict=True):
                        held.add(ids, missing(shard, owner, ids, places))
        return {owner: of_owner for owner, of_owner in needed.items() if len(of_owner[0])}

    def _assembler(self, rows: Rows) -> Assembler:
        """What assembles batches from these rows first."""
        features, assembler = self._features, self._maker.assembler
        shards = [shard if shard.is_here else Cached(shard, rows) for shard in features.shards]
        over = Sharded(features.schema, shards, features.routes)
        return replace(assembler, store=assembler.store.over(over))


class Run:
    """One loop: its groups, on two kinds of threads."""

    def __init__(self, ahead: LookAhead, work: Work, steps: range, on: tuple[Submit, Submit], deadline: float) -> None:
        self._ahead, self._work, self._deadline = ahead, work, deadline
        self._submit, self._submit_fetch = on
        # else each step of a group would wait for a peer that is lost
        self._draw_next = UntilOneFails(self._draw, steps)

    def begin(self, steps: range, before: Group | None) -> Group:
        """Draw the steps of a group, then fetch what they miss."""
        drawn = {step: self._submit(partial(self._draw_next, step)) for step in steps}
        rows_before = None if before is None else before.fetched
        return Group(steps, drawn, self._submit_fetch(partial(self._fetch, list(drawn.values()), rows_before)))

    def finish(self, step: int, group: Group) -> Any:
        """The batch of a step, once its rows are here."""
        with self._work.naming(step):
            drawn = result_of(group.drawn[step], step, self._deadline)
            fetched = result_of(group.fetched, step, self._deadline)
            return self._work.send(self._ahead.finish(drawn, fetched.assembler))

    def _draw(self, step: int) -> Drawn:
        with self._work.naming(step):
            return self._ahead.draw(*self._work.place(step))

    def _fetch(self, drawn: list["Future[Drawn]"], before: "Future[Fetched] | None") -> Fetched:
        """What could not be drawn is left out: its error is raised where its step is due."""
        sound = [one.result() for one in drawn if one.exception(self._deadline) is None]
        rows = {} if before is None or before.exception(self._deadline) is not None else before.result().rows
        return self._ahead.fetch(sound, rows)


def look_ahead(maker: Maker, store: Store, num_steps: int) -> LookAhead | None:
    """Look-ahead by so many steps; None where it is by one, nothing lies elsewhere, or batches are made elsewhere."""
    features = store.features
    if (
        num_steps == 1
        or store.elsewhere is not None
        or not isinstance(features, Sharded)
        or all(shard.is_here for shard in features.shards)
    ):
        return None
    return LookAhead(maker, features, num_steps)
