"""A shard in another process: the requests for hops and rows, and where their responses are written.

A hop is one request, and so are all rows, unless they are too many for one.
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


class IdColumn(NamedTuple):
    """The ids[positions] of a request, and the indices of the fields that are wanted of them."""

    ids: Tensor  # [n] int64
    positions: Tensor  # [m] int64
    wants: list[int]


class Target(NamedTuple):
    """The memory for the rows of one field: out[positions]."""

    positions: Tensor  # [m] int64
    out: Tensor


class RemoteShard:
    """The requests for one part. A subclass sends them."""

    tier: ClassVar[Tier] = Tier.REMOTE

    def __init__(self, schema: Schema, number: int, held: PartRange, max_ids: int) -> None:
        self.schema, self.number = schema, number
        self._encoding = IdEncoding(schema, held)
        self._max_ids = max_ids  # of one request

    def in_memory(self, owner: Owner, name: str) -> bool:
        return False

    def look_up(self, owner: Owner, ids: Tensor, positions: Tensor) -> RowLookup:
        return RowLookup(owner, ids, (positions[:0],), (), positions)

    def _request_hop(self, header: dict[str, Any], columns: list[Tensor]) -> Callable[[], tuple[Any, list[Any]]]:
        """Request a hop; the returned function returns the drawn relations and three columns of picks for each."""
        raise NotImplementedError

    def _request_rows(self, listed: list[list[Any]], ids: list[Tensor], targets: list[Target]) -> Callable[[], None]:
        """Request rows of each [owner, field, index in ids]; the returned function writes them to their targets."""
        raise NotImplementedError

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
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
            columns.append(self._encoding.nodes[number].encode(nodes))
            columns += [column for column in (trees, times) if column is not None]
        header = dict(zip(draw._fields, draw, strict=True)) | {"frontiers": listed, "fanouts": list(draw.fanouts)}
        finish = self._request_hop(header, columns)
        return lambda: self._picks(*finish(), drawn, frontiers)

    def _picks(
        self, relations: Any, columns: list[Any], drawn: Sequence[int], frontiers: Sequence[Frontier | None]
    ) -> list[Picks | None]:
        """Return the picks of a response by relation; raise PeerError if they do not fit the request."""
        if relations != list(drawn) or len(columns) != 3 * len(drawn):
            raise self._wrong("picks of other relations")
        found: list[Picks | None] = [None] * len(self.schema.relations)
        for place, index in enumerate(drawn):
            picks = self._encoding.decode_picks(index, columns[3 * place : 3 * place + 3])
            frontier = frontiers[self.schema.destinations[index]]
            assert frontier is not None
            if picks is None or picks.counts.shape != frontier.nodes.shape or picks.sources.shape != picks.edges.shape:
                raise self._wrong("picks that do not fit the frontier")
            found[index] = picks
        return found

    def begin_gather(
        self, wanted: Sequence[Wanted], positions: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Begin to write rows, as Shard.begin_gather. The returned function sends what is too much for one request."""
        columns: dict[tuple[int, int], IdColumn] = {}
        for index, (want, own) in enumerate(zip(wanted, positions, strict=True)):
            if own.numel():
                key = id(want.ids), id(own)  # fields of one type share their ids
                columns.setdefault(key, IdColumn(want.ids, own, [])).wants.append(index)
        if not columns:
            return lambda: None
        first, *others = self._requests(list(columns.values()))
        finish = self._begin_gather(first, wanted, outs)

        def finish_all() -> None:
            finish()
            for request in others:
                self._begin_gather(request, wanted, outs)()

        return finish_all

    def _requests(self, columns: list[IdColumn]) -> list[list[IdColumn]]:
        """Cut the columns into requests of at most `max_ids` ids."""
        requests: list[list[IdColumn]] = [[]]
        left = self._max_ids
        for column in columns:
            for begin in range(0, column.positions.numel(), self._max_ids):
                positions = column.positions[begin : begin + self._max_ids]
                if requests[-1] and positions.numel() > left:
                    requests.append([])
                    left = self._max_ids
                requests[-1].append(column._replace(positions=positions))
                left -= positions.numel()
        return requests

    def _begin_gather(
        self, columns: Sequence[IdColumn], wanted: Sequence[Wanted], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        listed: list[list[Any]] = []
        targets: list[Target] = []
        ids: list[Tensor] = []
        for number, (all_ids, positions, wants) in enumerate(columns):
            ids.append(self._encoding.owned[wanted[wants[0]].owner].encode(all_ids, positions))
            for index in wants:
                owner, name, _ = wanted[index]
                listed.append([owner if isinstance(owner, str) else list(owner), name, number])
                targets.append(Target(positions, outs[index]))
        return self._request_rows(listed, ids, targets)

    def _wrong(self, what: str) -> PeerError:
        return PeerError(f"part {self.number} answered with {what}; use the same Hoploom on both sides")


def read_all(shard: Shard, wanted: Sequence[Wanted], outs: Sequence[Tensor]) -> None:
    """Write all wanted rows of a shard to `outs`."""
    if isinstance(shard, Part):
        shard.gather_into(wanted, outs)
        return
    positions = {id(want.ids): torch.arange(want.ids.numel()) for want in wanted}  # fields of one type share their ids
    shard.begin_gather(wanted, [positions[id(want.ids)] for want in wanted], outs)()


# --- the encoding of ids --------------------------------------------------------------------
# Ids travel as int32, relative to the first one of their range, if the range has at most 2^31 ids: node ids and edge
# positions relative to the part's first, sources relative to 0. Costs a pass over the ids on either side and saves half
# of their bytes. Ids that arrive as int64 are taken as they are.

MOST = 1 << 31  # ids of a range that fit into int32
WIDTHS = (torch.int32, torch.int64)


class IdRange(NamedTuple):
    """A range of ids."""

    first: int
    size: int

    def encode(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Encode the ids, or those at some positions, to be sent."""
        if self.size <= MOST:
            return ops.narrow(ids, self.first, positions)
        return ids if positions is None else ops.select(ids, positions)

    def decode(self, ids: Tensor) -> Tensor:
        """Decode received ids to int64; raise IndexError if one is out of range."""
        return ops.owned(ids, self.first, self.size)


class IdEncoding:
    """The id ranges of one part."""

    def __init__(self, schema: Schema, held: PartRange) -> None:
        self.nodes = [IdRange(*of_type) for of_type in zip(held.first_nodes, held.num_nodes, strict=True)]
        edges = [IdRange(*of_relation) for of_relation in zip(held.first_edges, held.num_edges, strict=True)]
        sources = [IdRange(0, schema.node_types[index].num_nodes) for index in schema.sources]
        counts = [IdRange(0, of_relation.size) for of_relation in edges]
        self._columns = list(zip(counts, sources, edges, strict=True))  # of picks, by relation
        self.owned: dict[Owner, IdRange] = {t.name: own for t, own in zip(schema.node_types, self.nodes, strict=True)}
        self.owned |= {relation.key: own for relation, own in zip(schema.relations, edges, strict=True)}

    def encode_picks(self, relation: int, picks: Picks) -> list[Tensor]:
        """Encode the columns of picks, to be sent."""
        return [ids.encode(column) for ids, column in zip(self._columns[relation], picks, strict=True)]

    def decode_picks(self, relation: int, columns: Sequence[Any]) -> Picks | None:
        """Decode received picks to int64; return None if the columns cannot be picks."""
        for column in columns:
            if column.dtype not in WIDTHS or column.dim() != 1:
                return None
        counts, sources, edges = columns
        return ops.widen_picks(counts, sources, edges, self._columns[relation][2].first)
