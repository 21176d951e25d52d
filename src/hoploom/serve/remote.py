"""A part that another process holds: both seams over the wire. Costs a round trip a hop, and one for all rows."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import PeerError
from hoploom.ops import Frontier, Picks
from hoploom.schema import Schema
from hoploom.serve.client import whole
from hoploom.serve.peers import Peers
from hoploom.serve.wire import Incoming, Message
from hoploom.store.base import Draw, Wanted


class RemotePart:
    """A Shard over peers, for one part."""

    def __init__(self, schema: Schema, number: int, peers: Peers) -> None:
        self.schema, self.number = schema, number
        self._peers = peers

    @property
    def is_here(self) -> bool:
        return False

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        """Ask for one hop, all relations in one round trip."""
        num_relations = len(self.schema.relations)
        asked = [
            index
            for index in range(num_relations)
            if frontiers[self.schema.destinations[index]] is not None and draw.fanouts[index] != 0
        ]
        if not asked:
            return lambda: [None] * num_relations
        types = {self.schema.destinations[index] for index in asked}
        listed, tensors = [], []
        for number, frontier in enumerate(frontiers):
            if frontier is None or number not in types:
                continue
            listed.append([number, frontier.trees is not None, frontier.times is not None])
            tensors += [column for column in frontier if column is not None]
        header = {
            "ask": "sample",
            "part": self.number,
            "frontiers": listed,
            "key": draw.key,
            "hop": draw.hop,
            "fanouts": list(draw.fanouts),
            "replace": draw.replace,
            "last": draw.last,
            "labor": draw.labor,
            "weighted": draw.weighted,
        }
        finish = self._peers.begin(Message(header, tensors), self.number, whole)
        return lambda: self._picks(finish(), asked, frontiers)

    def _picks(self, answer: Message, asked: Sequence[int], frontiers: Sequence[Frontier | None]) -> list[Picks | None]:
        """The answer's columns by relation, checked: whoever answers may be mistaken."""
        columns = list(answer.tensors)
        if answer.header.get("relations") != list(asked) or len(columns) != 3 * len(asked):
            raise PeerError(f"part {self.number} answered for other relations than it was asked for; see its version")
        found: list[Picks | None] = [None] * len(self.schema.relations)
        for place, index in enumerate(asked):
            picks = Picks(*columns[3 * place : 3 * place + 3])  # type: ignore[arg-type]
            frontier = frontiers[self.schema.destinations[index]]
            assert frontier is not None
            fits = picks.counts.shape == frontier.nodes.shape and picks.sources.shape == picks.edges.shape
            if not fits or any(column.dtype != torch.int64 for column in picks):
                raise PeerError(f"part {self.number} answered with picks that do not fit the frontier")
            found[index] = picks
        return found

    def begin_gather(
        self, wanted: Sequence[Wanted], places: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Ask for rows, all fields in one round trip; they are written to their places as they come."""
        columns: dict[tuple[int, int], int] = {}
        tensors: list[Tensor] = []
        listed: list[list[object]] = []
        asked: list[int] = []
        for index, (want, place) in enumerate(zip(wanted, places, strict=True)):
            if place.numel() == 0:
                continue
            key = want.ids.data_ptr(), place.data_ptr()  # fields of one type share their ids
            if key not in columns:
                columns[key] = len(tensors)
                tensors.append(_chosen(want.ids, place))
            owner = want.owner if isinstance(want.owner, str) else list(want.owner)
            listed.append([owner, want.field, columns[key]])
            asked.append(index)
        if not asked:
            return lambda: None
        message = Message({"ask": "gather", "part": self.number, "wanted": listed}, tensors)
        return self._peers.begin(message, self.number, lambda incoming: self._place(incoming, asked, places, outs))

    def _place(
        self, incoming: Incoming, asked: Sequence[int], places: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> None:
        expected = [(outs[i].dtype, (places[i].numel(), *outs[i].shape[1:])) for i in asked]
        if [tuple(one) for one in incoming.described] != expected:
            raise PeerError(f"part {self.number} answered with rows of another dtype or shape; see its version")
        raw = [_as_rows(outs[i]) for i in asked]
        for index, row, rows in incoming.pieces():
            ops.scatter_rows(rows, places[asked[index]][row : row + rows.shape[0]], raw[index])

    def split(self, node_type: str, name: str) -> Tensor:
        """The part's own members of a split."""
        request = Message({"ask": "split", "part": self.number, "type": node_type, "split": name})
        (members,) = self._peers.ask(request, self.number).tensors
        assert isinstance(members, Tensor)
        return members


def _chosen(ids: Tensor, places: Tensor) -> Tensor:
    """ids[places], by the core: torch would start a team of threads. Places are distinct and in order."""
    if places.numel() == ids.numel():
        return ids
    out = ops.empty((places.numel(),), torch.int64)
    ops.gather(ids.view(torch.uint8).view(-1, 8), places, out.view(torch.uint8).view(-1, 8))
    return out


def _as_rows(out: Tensor) -> Tensor:
    return out.reshape(-1).view(torch.uint8).view(out.shape[0], -1)
