"""A part that another rank holds: both seams over an `Exchange`, and what answers for the parts that this rank holds.

Ranks of one job trust each other: answers are not checked as those of servers are.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hoploom import ops
from hoploom.ops import Frontier, Picks
from hoploom.ranks.exchange import Exchange, Reply, aligned
from hoploom.schema import DTYPES, Field, Owner, Schema
from hoploom.store import Store
from hoploom.store.base import NO_IDS, Draw, Location, Wanted
from hoploom.store.sharded import Sharded

MOST_BYTES = 1 << 28  # of rows that are asked for at once


@dataclass(frozen=True)
class RankPart:
    """A Shard over an exchange, for one part."""

    schema: Schema
    number: int
    rank: int  # who holds it
    exchange: Exchange

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

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        """Ask for one hop of all relations."""
        destinations = self.schema.destinations
        drawn = [i for i, end in enumerate(destinations) if frontiers[end] is not None and draw.fanouts[i] != 0]
        if not drawn:
            return lambda: [None] * len(destinations)
        types = {destinations[index] for index in drawn}
        listed, columns = [], []
        for number, frontier in enumerate(frontiers):
            if frontier is not None and number in types:
                listed.append([number, *(column is not None for column in frontier)])
                columns += [column for column in frontier if column is not None]
        header = {"frontiers": listed, "draw": [*draw._replace(fanouts=list(draw.fanouts))]}
        finish = self.exchange.ask(self.rank, pack("sample", header, columns))

        def picks() -> list[Picks | None]:
            _, _, answered = unpack(finish())
            found: list[Picks | None] = [None] * len(destinations)
            for place, index in enumerate(drawn):
                found[index] = Picks(*answered[3 * place : 3 * place + 3])
            return found

        return picks

    def begin_gather(
        self, wanted: Sequence[Wanted], places: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Ask for rows of all fields. Those that are too many for one message come one message after the other."""
        pieces = self._pieces(wanted, places)
        finish = self._begin_piece(wanted, pieces[0], outs) if pieces else lambda: None

        def finish_all() -> None:
            finish()
            for piece in pieces[1:]:
                self._begin_piece(wanted, piece, outs)()

        return finish_all

    def _pieces(self, wanted: Sequence[Wanted], places: Sequence[Tensor]) -> list[dict[int, Tensor]]:
        """The places of each message, by what is wanted at them."""
        pieces: list[dict[int, Tensor]] = []
        left = 0
        for index, (want, place) in enumerate(zip(wanted, places, strict=True)):
            row_bytes = max(1, field_of(self.schema, want).row_bytes)
            begin = 0
            while begin < place.numel():
                if left < row_bytes:
                    pieces.append({})
                    left = max(MOST_BYTES, row_bytes)
                taken = (
                    place if begin == 0 and place.numel() * row_bytes <= left else place[begin:][: left // row_bytes]
                )
                pieces[-1][index] = taken
                begin += taken.numel()
                left -= taken.numel() * row_bytes
        return pieces

    def _begin_piece(
        self, wanted: Sequence[Wanted], places: Mapping[int, Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """One message: fields of the same rows share their ids."""
        columns: dict[tuple[int, int, int], int] = {}
        ids: list[Tensor] = []
        listed = []
        for index, place in places.items():
            owner, name, all_ids = wanted[index]
            key = id(all_ids), place.data_ptr(), place.numel()
            if key not in columns:
                columns[key] = len(ids)
                ids.append(ops.select(all_ids, place))
            listed.append([owner, name, columns[key]])
        sizes = [place.numel() * field_of(self.schema, wanted[index]).row_bytes for index, place in places.items()]
        finish = self.exchange.ask(self.rank, pack("gather", listed, ids), sum(map(aligned, sizes)))

        def write() -> None:
            answer = finish()
            for (index, place), size in zip(places.items(), sizes, strict=True):
                out = ops.byte_rows(outs[index])
                ops.scatter_rows(answer[:size].view(place.numel(), out.shape[1]), place, out)
                answer = answer[aligned(size) :]

        return write

    def split(self, node_type: str, name: str) -> Tensor:
        """The part's own members of a split."""
        _, _, members = unpack(self.exchange.ask(self.rank, pack("split", [self.number, node_type, name], []))())
        return members[0]


class HeldParts:
    """What this rank answers the others with, of its own parts."""

    def __init__(self, store: Store) -> None:
        assert isinstance(store.features, Sharded)
        self._schema, self._graph, self._features, self._shards = (
            store.schema,
            store.graph,
            store.features,
            store.shards,
        )

    def answer(self, question: Tensor) -> Reply:
        """Answer what a RankPart has asked. Rows are read by `write`: whoever asks knows how long that answer is."""
        kind, header, columns = unpack(question)
        if kind == "gather":
            return self._gather(header, columns)
        if kind == "split":
            number, node_type, name = header
            return _packed([self._shards[number].split(node_type, name)])
        return _packed(self._sample(header, columns))

    def _gather(self, listed: Sequence[Any], columns: Sequence[Tensor]) -> Reply:
        wanted = [
            Wanted(owner if isinstance(owner, str) else tuple(owner), name, columns[at]) for owner, name, at in listed
        ]
        fields = [field_of(self._schema, want) for want in wanted]
        sizes = [want.ids.numel() * of.row_bytes for want, of in zip(wanted, fields, strict=True)]

        def write(out: Tensor) -> None:
            rows = []
            for want, of, size in zip(wanted, fields, sizes, strict=True):
                rows.append(out[:size].view(DTYPES[of.dtype]).view(want.ids.numel(), *of.shape))
                out = out[aligned(size) :]
            self._features.gather_at(wanted, [None] * len(wanted), rows)

        return Reply(sum(map(aligned, sizes)), write)

    def _sample(self, header: Mapping[str, Any], columns: Sequence[Tensor]) -> list[Tensor]:
        left = list(columns)
        frontiers: list[Frontier | None] = [None] * len(self._schema.node_types)
        for number, *present in header["frontiers"]:
            frontiers[number] = Frontier(*(left.pop(0) if is_there else None for is_there in present))  # type: ignore[arg-type]
        answers: list[Tensor] = []
        for index, picks in enumerate(self._graph.sample(frontiers, draw := Draw(*header["draw"]))):
            frontier = frontiers[self._schema.destinations[index]]
            if frontier is not None and draw.fanouts[index] != 0:
                answers += picks or Picks(torch.zeros_like(frontier.nodes), NO_IDS, NO_IDS)
        return answers


def field_of(schema: Schema, want: Wanted) -> Field:
    """The field that is wanted."""
    owner = want.owner
    return (schema.node_type(owner) if isinstance(owner, str) else schema.relation(owner)).fields[want.field]


# --- messages ------------------------------------------------------------------------------------


def pack(kind: str, header: Any, columns: Sequence[Tensor]) -> Tensor:
    """Any JSON and columns of int64 as bytes: [n] uint8."""
    text = json.dumps([kind, header, [column.numel() for column in columns]]).encode()
    first = 8 + -(-len(text) // 8) * 8
    out = ops.empty((first + sum(column.nbytes for column in columns),), torch.uint8)
    out[:8].view(torch.int64).fill_(len(text))
    out[8 : 8 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for column in columns:
        out.numpy()[first : first + column.nbytes] = column.contiguous().view(torch.uint8).numpy()
        first += column.nbytes
    return out


def unpack(message: Tensor) -> tuple[str, Any, list[Tensor]]:
    """What was packed. The columns are views."""
    size = int(message[:8].view(torch.int64))
    kind, header, counts = json.loads(bytes(message[8 : 8 + size].numpy()))
    columns = message[8 + -(-size // 8) * 8 :]
    return kind, header, list(columns.view(torch.int64).split(counts)) if counts else []  # type: ignore[no-untyped-call]


def _packed(columns: Sequence[Tensor]) -> Reply:
    """A reply of any size."""
    packed = pack("", None, columns)
    return Reply(packed.numel(), lambda out: np.copyto(out.numpy(), packed.numpy()))
