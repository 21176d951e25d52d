"""A shard for which another process answers: what is asked, and where answers belong, whatever carries them.

A hop is one question, and all rows are one, but for those that are too many.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import PeerError
from hoploom.ops import Frontier, Picks
from hoploom.schema import Owner, Schema
from hoploom.store.base import Draw, Part, RowLookup, Shard, Tier, Wanted
from hoploom.store.format import PartRange


class WantedRows(NamedTuple):
    """Rows ids[places] of some fields of one owner."""

    ids: Tensor  # [n] int64
    places: Tensor  # [m] int64
    wants: list[int]  # which of what is wanted


class Target(NamedTuple):
    """Where the rows of one field belong: out[places]."""

    places: Tensor  # [m] int64
    out: Tensor


class RemoteShard:
    """The questions for one part. Subclasses send them."""

    tier: ClassVar[Tier] = Tier.REMOTE

    def __init__(self, schema: Schema, number: int, held: PartRange, most: int) -> None:
        self.schema, self.number = schema, number
        self._narrowing = Narrowing(schema, held)
        self._most = most  # what the rows of one question may cost

    def in_memory(self, owner: Owner, name: str) -> bool:
        return False

    def look_up(self, owner: Owner, ids: Tensor, positions: Tensor) -> RowLookup:
        return RowLookup(owner, ids, (positions[:0],), (), positions)

    # --- how they are sent ---------------------------------------------------------------------

    def _ask_hop(self, header: dict[str, Any], columns: list[Tensor]) -> Callable[[], tuple[Any, list[Any]]]:
        """What comes back: the relations that were drawn, and three columns of picks for each."""
        raise NotImplementedError

    def _ask_rows(self, listed: list[list[Any]], ids: list[Tensor], targets: list[Target]) -> Callable[[], None]:
        """Rows of [owner, field, which ids], to their targets."""
        raise NotImplementedError

    def _cost(self, wanted: Sequence[Wanted], wants: Sequence[int]) -> int:
        """What one id of these costs, of what a question may cost."""
        return 1

    # --- what is asked -------------------------------------------------------------------------

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        """Ask for one hop of all relations."""
        destinations = self.schema.destinations
        drawn = [
            relation
            for relation, (end, fanout) in enumerate(zip(destinations, draw.fanouts, strict=True))
            if fanout != 0 and frontiers[end] is not None
        ]
        if not drawn:
            return lambda: [None] * len(destinations)
        types = {destinations[relation] for relation in drawn}
        listed, columns = [], []
        for number, frontier in enumerate(frontiers):
            if frontier is None or number not in types:
                continue
            nodes, trees, times = frontier
            listed.append([number, trees is not None, times is not None])
            columns.append(self._narrowing.nodes[number].sent(nodes))
            columns += [column for column in (trees, times) if column is not None]
        header = dict(zip(draw._fields, draw, strict=True)) | {"frontiers": listed, "fanouts": list(draw.fanouts)}
        finish = self._ask_hop(header, columns)
        return lambda: self._picks(*finish(), drawn, frontiers)

    def _picks(
        self, relations: Any, columns: list[Any], drawn: Sequence[int], frontiers: Sequence[Frontier | None]
    ) -> list[Picks | None]:
        """The answer's columns by relation, checked: whoever answers may be mistaken."""
        if relations != list(drawn) or len(columns) != 3 * len(drawn):
            raise self._wrong("picks of other relations")
        found: list[Picks | None] = [None] * len(self.schema.relations)
        for place, index in enumerate(drawn):
            picks = self._narrowing.picks_come(index, columns[3 * place : 3 * place + 3])
            frontier = frontiers[self.schema.destinations[index]]
            assert frontier is not None
            if picks is None or picks.counts.shape != frontier.nodes.shape or picks.sources.shape != picks.edges.shape:
                raise self._wrong("picks that do not fit the frontier")
            found[index] = picks
        return found

    def begin_gather(
        self, wanted: Sequence[Wanted], places: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Ask for rows of all fields. What is too much for one question is asked when the call returned is made."""
        columns: dict[tuple[int, int], WantedRows] = {}
        for index, (want, place) in enumerate(zip(wanted, places, strict=True)):
            if place.numel():
                key = id(want.ids), id(place)  # fields of one type share their ids
                if key not in columns:
                    columns[key] = WantedRows(want.ids, place, [])
                columns[key].wants.append(index)
        if not columns:
            return lambda: None
        first, *others = self._questions(list(columns.values()), wanted)
        finish = self._begin_gather(first, wanted, outs)
        if not others:
            return finish

        def finish_all() -> None:
            finish()
            for question in others:
                self._begin_gather(question, wanted, outs)()

        return finish_all

    def _questions(self, columns: list[WantedRows], wanted: Sequence[Wanted]) -> list[list[WantedRows]]:
        """The columns of each question, which costs no more than it may: but one id can always be asked for."""
        costs = [max(1, self._cost(wanted, column.wants)) for column in columns]
        if sum(cost * column.places.numel() for cost, column in zip(costs, columns, strict=True)) <= self._most:
            return [columns]
        questions: list[list[WantedRows]] = [[]]
        left = self._most
        for cost, column in zip(costs, columns, strict=True):
            step = max(1, self._most // cost)
            for begin in range(0, column.places.numel(), step):
                piece = column._replace(places=column.places[begin : begin + step])
                if questions[-1] and piece.places.numel() * cost > left:
                    questions.append([])
                    left = self._most
                questions[-1].append(piece)
                left -= piece.places.numel() * cost
        return questions

    def _begin_gather(
        self, columns: Sequence[WantedRows], wanted: Sequence[Wanted], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """One question."""
        listed: list[list[Any]] = []
        targets: list[Target] = []
        ids: list[Tensor] = []
        for number, (all_ids, places, wants) in enumerate(columns):
            ids.append(self._narrowing.of(wanted[wants[0]].owner).sent(all_ids, places))
            for index in wants:
                owner, name, _ = wanted[index]
                listed.append([owner if isinstance(owner, str) else list(owner), name, number])
                targets.append(Target(places, outs[index]))
        return self._ask_rows(listed, ids, targets)

    def _wrong(self, what: str) -> PeerError:
        return PeerError(f"part {self.number} answered with {what}; use the same Hoploom on both sides")


def read_all(shard: Shard, wanted: Sequence[Wanted], outs: Sequence[Tensor]) -> None:
    """All rows that are wanted, by who answers."""
    if isinstance(shard, Part):
        shard.gather_into(wanted, outs)
        return
    places = {id(want.ids): torch.arange(want.ids.numel()) for want in wanted}  # fields of one type share their ids
    shard.begin_gather(wanted, [places[id(want.ids)] for want in wanted], outs)()


# --- ids on their way --------------------------------------------------------------------------

MOST = 1 << 31  # ids of a range that int32 has room for
WIDTHS = (torch.int32, torch.int64)


class IdRange(NamedTuple):
    """Ids from the first one on."""

    first: int
    size: int

    def sent(self, ids: Tensor, places: Tensor | None = None) -> Tensor:
        """The ids, or those at some places, as they are sent."""
        if self.size <= MOST:
            return ops.narrow(ids, self.first, places)
        return ids if places is None else ops.select(ids, places)

    def come(self, ids: Tensor) -> Tensor:
        """Ids that were sent, as int64; IndexError for those that are not in the range."""
        return ops.owned(ids, self.first, self.size)


class Narrowing:
    """What one part's ids are counted from."""

    def __init__(self, schema: Schema, held: PartRange) -> None:
        self.nodes = [IdRange(*of_type) for of_type in zip(held.first_nodes, held.num_nodes, strict=True)]
        edges = [IdRange(*of_relation) for of_relation in zip(held.first_edges, held.num_edges, strict=True)]
        sources = [IdRange(0, schema.node_types[index].num_nodes) for index in schema.sources]
        counts = [IdRange(0, of_relation.size) for of_relation in edges]
        self._columns = list(zip(counts, sources, edges, strict=True))  # of picks, by relation
        self._owned: dict[Owner, IdRange] = {
            of.name: own for of, own in zip(schema.node_types, self.nodes, strict=True)
        }
        self._owned |= {of.key: own for of, own in zip(schema.relations, edges, strict=True)}

    def of(self, owner: Owner) -> IdRange:
        """The ids of an owner that the part has."""
        return self._owned[owner]

    def picks_sent(self, relation: int, picks: Picks) -> list[Tensor]:
        """The columns of picks as they are sent."""
        return [ids.sent(column) for ids, column in zip(self._columns[relation], picks, strict=True)]

    def picks_come(self, relation: int, columns: Sequence[Any]) -> Picks | None:
        """Picks that were sent, as int64; None if the columns cannot be picks."""
        for column in columns:
            if column.dtype not in WIDTHS or column.dim() != 1:
                return None
        counts, sources, edges = columns
        return ops.widen_picks(counts, sources, edges, self._columns[relation][2].first)
