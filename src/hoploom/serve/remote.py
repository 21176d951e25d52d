"""A part that another process holds: both seams over the wire. Costs a round trip a hop, and one for all rows."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import PeerError
from hoploom.ops import Frontier, Picks
from hoploom.schema import Owner, Schema
from hoploom.serve.client import read_message
from hoploom.serve.narrowing import Narrowing
from hoploom.serve.peers import Peers
from hoploom.serve.wire import Incoming, Message
from hoploom.store.base import Draw, Location, Wanted

MAX_IDS = 1 << 22  # in one request: 32 MiB at most, of wire.MAX_REQUEST


class WantedRows(NamedTuple):
    """Rows ids[places] of some fields of one owner."""

    ids: Tensor  # [n] int64
    places: Tensor  # [m] int64
    wants: list[int]  # which of what is wanted


class RemotePart:
    """A Shard over peers, for one part. Every request names the store, so that no other one answers it."""

    def __init__(self, schema: Schema, number: int, peers: Peers, max_ids: int = MAX_IDS) -> None:
        self.schema, self.number = schema, number
        self._peers, self._max_ids = peers, max_ids
        self._narrowing = Narrowing(schema, peers.manifest.parts[number])

    @property
    def is_here(self) -> bool:
        return False

    @property
    def is_remote(self) -> bool:
        return True

    def lies_here(self, owner: Owner, name: str) -> bool:
        return False

    def locate(self, owner: Owner, ids: Tensor, places: Tensor) -> Location:
        return Location(places[:0], (), places)

    def _header(self, kind: str) -> dict[str, object]:
        return {"ask": kind, "identity": self._peers.identity, "part": self.number}

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        """Ask for one hop, all relations in one round trip."""
        destinations = self.schema.destinations
        drawn = [
            relation
            for relation, (end, fanout) in enumerate(zip(destinations, draw.fanouts, strict=True))
            if fanout != 0 and frontiers[end] is not None
        ]
        if not drawn:
            return lambda: [None] * len(destinations)
        types = {destinations[relation] for relation in drawn}
        listed, tensors = [], []
        for number, frontier in enumerate(frontiers):
            if frontier is None or number not in types:
                continue
            nodes, trees, times = frontier
            listed.append([number, trees is not None, times is not None])
            tensors.append(self._narrowing.nodes[number].sent(nodes))
            tensors += [column for column in (trees, times) if column is not None]
        header = self._header("sample") | dict(zip(draw._fields, draw, strict=True))
        header |= {"frontiers": listed, "fanouts": list(draw.fanouts)}
        finish = self._peers.begin(Message(header, tensors), self.number, read_message)
        return lambda: self._picks(finish(), drawn, frontiers)

    def _picks(self, answer: Message, drawn: Sequence[int], frontiers: Sequence[Frontier | None]) -> list[Picks | None]:
        """The answer's columns by relation, checked: whoever answers may be mistaken."""
        columns = list(answer.tensors)
        if answer.header.get("relations") != list(drawn) or len(columns) != 3 * len(drawn):
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
        """Ask for rows, all fields in one round trip; they are written to their places as they come.

        What does not fit one request goes in more of them, when the call returned is made.
        """
        columns: dict[tuple[int, int], WantedRows] = {}
        num_ids = 0
        for index, (want, place) in enumerate(zip(wanted, places, strict=True)):
            if count := place.numel():
                key = id(want.ids), id(place)  # fields of one type share their ids
                if key not in columns:
                    columns[key] = WantedRows(want.ids, place, [])
                    num_ids += count
                columns[key].wants.append(index)
        if not columns:
            return lambda: None
        if num_ids <= self._max_ids:
            return self._begin_gather(list(columns.values()), wanted, outs)
        first, *others = _split(list(columns.values()), self._max_ids)
        finish = self._begin_gather(first, wanted, outs)

        def finish_all() -> None:
            finish()
            for request in others:
                self._begin_gather(request, wanted, outs)()

        return finish_all

    def _begin_gather(
        self, columns: Sequence[WantedRows], wanted: Sequence[Wanted], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """One request."""
        listed: list[list[object]] = []
        targets: list[tuple[Tensor, Tensor]] = []  # places, and what is written at them
        ids: list[Tensor] = []
        for number, (all_ids, places, wants) in enumerate(columns):
            ids.append(self._narrowing.of(wanted[wants[0]].owner).sent(all_ids, places))
            for index in wants:
                owner, name, _ = wanted[index]
                listed.append([owner if isinstance(owner, str) else list(owner), name, number])
                targets.append((places, outs[index]))
        message = Message({**self._header("gather"), "wanted": listed}, ids)
        return self._peers.begin(message, self.number, lambda incoming: self._place(incoming, targets))

    def _place(self, incoming: Incoming, targets: Sequence[tuple[Tensor, Tensor]]) -> None:
        if incoming.described != [(out.dtype, (places.numel(), *out.shape[1:])) for places, out in targets]:
            raise self._wrong("rows of another dtype or shape")
        for index, row, rows in incoming.pieces():
            places, out = targets[index]
            num_rows = rows.shape[0]
            ops.scatter_rows(rows, places if num_rows == places.numel() else places[row : row + num_rows], out)

    def split(self, node_type: str, name: str) -> Tensor:
        """The part's own members of a split."""
        held, index = self._peers.manifest.parts[self.number], self.schema.type_index[node_type]
        count = held.splits.get(node_type, {}).get(name, 0)
        if count == 0:
            return torch.empty(0, dtype=torch.int64)
        request = Message({**self._header("split"), "type": node_type, "split": name})
        answer = self._peers.ask(request, self.number).tensors
        members = answer[0] if len(answer) == 1 else None
        first, end = held.first_nodes[index], held.first_nodes[index] + held.num_nodes[index]
        if not isinstance(members, Tensor) or members.dtype != torch.int64 or members.shape != (count,):
            raise self._wrong(f"other than {count} members of {name!r}")
        if int(members.min()) < first or int(members.max()) >= end:
            raise self._wrong(f"members of {name!r} that it does not hold")
        return members

    def _wrong(self, what: str) -> PeerError:
        return PeerError(f"part {self.number} answered with {what}; use the same Hoploom on both sides")


def _split(columns: Sequence[WantedRows], most: int) -> list[list[WantedRows]]:
    """The columns of each request: no more than so many ids in one."""
    requests: list[list[WantedRows]] = [[]]
    left = most
    for column in columns:
        for begin in range(0, column.places.numel(), most):
            piece = column._replace(places=column.places[begin : begin + most])
            if piece.places.numel() > left:
                requests.append([])
                left = most
            requests[-1].append(piece)
            left -= piece.places.numel()
    return requests
