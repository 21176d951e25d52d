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
from hoploom.serve.peers import Peers
from hoploom.serve.wire import Incoming, Message
from hoploom.store.base import Draw, Location, Wanted

MAX_IDS = 1 << 22  # in one request: 32 MiB, of wire.MAX_REQUEST


class WantedRows(NamedTuple):
    """Rows ids[places] of some fields."""

    ids: Tensor  # [n] int64
    places: Tensor  # [m] int64
    wants: list[int]  # which of what is wanted


class RemotePart:
    """A Shard over peers, for one part. Every request names the store, so that no other one answers it."""

    def __init__(self, schema: Schema, number: int, peers: Peers, max_ids: int = MAX_IDS) -> None:
        self.schema, self.number = schema, number
        self._peers, self._max_ids = peers, max_ids

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
        drawn = [i for i, end in enumerate(destinations) if frontiers[end] is not None and draw.fanouts[i] != 0]
        if not drawn:
            return lambda: [None] * len(destinations)
        types = {destinations[index] for index in drawn}
        listed, tensors = [], []
        for number, frontier in enumerate(frontiers):
            if frontier is None or number not in types:
                continue
            listed.append([number, frontier.trees is not None, frontier.times is not None])
            tensors += [column for column in frontier if column is not None]
        header = {**self._header("sample"), "frontiers": listed, **draw._asdict(), "fanouts": list(draw.fanouts)}
        finish = self._peers.begin(Message(header, tensors), self.number, read_message)
        return lambda: self._picks(finish(), drawn, frontiers)

    def _picks(self, answer: Message, drawn: Sequence[int], frontiers: Sequence[Frontier | None]) -> list[Picks | None]:
        """The answer's columns by relation, checked: whoever answers may be mistaken."""
        columns = list(answer.tensors)
        if answer.header.get("relations") != list(drawn) or len(columns) != 3 * len(drawn):
            raise self._wrong("picks of other relations")
        found: list[Picks | None] = [None] * len(self.schema.relations)
        for place, index in enumerate(drawn):
            picks = Picks(*columns[3 * place : 3 * place + 3])  # type: ignore[arg-type]
            frontier = frontiers[self.schema.destinations[index]]
            assert frontier is not None
            fits = picks.counts.shape == frontier.nodes.shape and picks.sources.shape == picks.edges.shape
            if not fits or any(column.dtype != torch.int64 for column in picks):
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
        for index, (want, place) in enumerate(zip(wanted, places, strict=True)):
            if place.numel():
                key = want.ids.data_ptr(), place.data_ptr()  # fields of one type share their ids
                columns.setdefault(key, WantedRows(want.ids, place, [])).wants.append(index)
        if not columns:
            return lambda: None
        first, *others = _split(list(columns.values()), self._max_ids)
        finish = self._begin_gather(first, wanted, outs)

        def finish_all() -> None:
            finish()
            for request in others:
                self._begin_gather(request, wanted, outs)()

        return finish_all if others else finish

    def _begin_gather(
        self, columns: Sequence[WantedRows], wanted: Sequence[Wanted], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """One request."""
        listed: list[list[object]] = []
        targets: list[tuple[Tensor, Tensor]] = []  # places, and what is written at them
        for number, column in enumerate(columns):
            for index in column.wants:
                owner = wanted[index].owner
                listed.append([owner if isinstance(owner, str) else list(owner), wanted[index].field, number])
                targets.append((column.places, outs[index]))
        ids = [_chosen(column.ids, column.places) for column in columns]
        message = Message({**self._header("gather"), "wanted": listed}, ids)
        return self._peers.begin(message, self.number, lambda incoming: self._place(incoming, targets))

    def _place(self, incoming: Incoming, targets: Sequence[tuple[Tensor, Tensor]]) -> None:
        expected = [(out.dtype, (places.numel(), *out.shape[1:])) for places, out in targets]
        if [tuple(one) for one in incoming.described] != expected:
            raise self._wrong("rows of another dtype or shape")
        raw = [ops.byte_rows(out) for _, out in targets]
        for index, row, rows in incoming.pieces():
            ops.scatter_rows(rows, targets[index][0][row : row + rows.shape[0]], raw[index])

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


def _chosen(ids: Tensor, places: Tensor) -> Tensor:
    """ids[places], by the core: torch would start a team of threads. Places are distinct and in order."""
    if places.numel() == ids.numel():
        return ids
    out = ops.empty((places.numel(),), torch.int64)
    ops.gather(ids.view(torch.uint8).view(-1, 8), places, out.view(torch.uint8).view(-1, 8))
    return out
