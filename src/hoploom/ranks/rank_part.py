"""A part that another rank holds: both seams over an `Exchange`, and what answers for the parts that this rank holds.

Ranks of one job trust each other: what they ask is not checked as it is by servers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hoploom import ops
from hoploom.ops import Frontier
from hoploom.ranks.exchange import Exchange
from hoploom.ranks.inquiries import Reply, aligned, write_pieces
from hoploom.schema import DTYPES, Field, Owner, Schema
from hoploom.store import Store
from hoploom.store.base import Draw, Wanted
from hoploom.store.format import PartRange
from hoploom.store.narrowing import Narrowing
from hoploom.store.remote_shard import RemoteShard, Target, read_all

MOST_BYTES = 1 << 28  # of rows that are asked for at once


class RankPart(RemoteShard):
    """A Shard over an exchange, for one part that some rank holds."""

    def __init__(self, schema: Schema, number: int, held: PartRange, rank: int, exchange: Exchange) -> None:
        super().__init__(schema, number, held, MOST_BYTES)
        self.rank, self._exchange = rank, exchange

    def _ask_hop(self, header: dict[str, Any], columns: list[Tensor]) -> Callable[[], tuple[Any, list[Any]]]:
        finish = self._exchange.ask(self.rank, pack("sample", self.number, header, columns))

        def picks() -> tuple[Any, list[Any]]:
            _, _, relations, answered = unpack(finish())
            return relations, answered

        return picks

    def _ask_rows(self, listed: list[list[Any]], ids: list[Tensor], targets: list[Target]) -> Callable[[], None]:
        sizes = [
            places.numel() * _field(self.schema, owner, name).row_bytes
            for (owner, name, _), (places, _) in zip(listed, targets, strict=True)
        ]
        finish = self._exchange.ask(self.rank, pack("gather", self.number, listed, ids), sum(map(aligned, sizes)))

        def write() -> None:
            answer = finish()
            for (places, out), size in zip(targets, sizes, strict=True):
                rows = ops.byte_rows(out)
                ops.scatter_rows(answer[:size].view(places.numel(), rows.shape[1]), places, rows)
                answer = answer[aligned(size) :]

        return write

    def _cost(self, wanted: Sequence[Wanted], wants: Sequence[int]) -> int:
        """The bytes of its rows: an answer is in memory as a whole."""
        return sum(_field(self.schema, wanted[index].owner, wanted[index].field).row_bytes for index in wants)

    def split(self, node_type: str, name: str) -> Tensor:
        """The part's own members of a split."""
        *_, (members,) = unpack(self._exchange.ask(self.rank, pack("split", self.number, [node_type, name], []))())
        return members


class HeldParts:
    """What this rank answers the others with, of its own parts."""

    def __init__(self, store: Store) -> None:
        self._schema, self._shards = store.schema, store.shards
        self._narrowings = [Narrowing(store.schema, held) for held in store.ranges]

    def answer(self, question: Tensor) -> Reply:
        """Answer what a RankPart has asked. Rows are read by `write`: whoever asks knows how long that answer is."""
        kind, number, header, columns = unpack(question)
        if kind == "gather":
            return self._gather(number, header, columns)
        if kind == "split":
            members = self._shards[number].split(*header)
            copied = members.clone()
            ops.require_whole([members])  # asked once they have been read
            return _reply(None, [copied])
        return self._sample(number, header, columns)

    def _gather(self, number: int, listed: Sequence[Any], columns: Sequence[Tensor]) -> Reply:
        narrowing = self._narrowings[number]
        ids: dict[int, Tensor] = {}  # fields of one owner share them
        wanted, shapes, sizes = [], [], []
        for given, name, at in listed:
            owner = given if isinstance(given, str) else tuple(given)
            if at not in ids:
                ids[at] = narrowing.of(owner).come(columns[at])
            field = _field(self._schema, owner, name)
            wanted.append(Wanted(owner, name, ids[at]))
            shapes.append((DTYPES[field.dtype], (ids[at].numel(), *field.shape)))
            sizes.append(ids[at].numel() * field.row_bytes)

        def write(out: Tensor) -> None:
            rows = []
            for (dtype, shape), size in zip(shapes, sizes, strict=True):
                rows.append(out[:size].view(dtype).view(shape))
                out = out[aligned(size) :]
            read_all(self._shards[number], wanted, rows)

        return Reply(sum(map(aligned, sizes)), write)

    def _sample(self, number: int, header: Mapping[str, Any], columns: Sequence[Tensor]) -> Reply:
        narrowing, left = self._narrowings[number], list(columns)
        frontiers: list[Frontier | None] = [None] * len(self._schema.node_types)
        for node_type, *given in header["frontiers"]:
            nodes = narrowing.nodes[node_type].come(left.pop(0))
            frontiers[node_type] = Frontier(nodes, *(left.pop(0) if is_there else None for is_there in given))
        draw = Draw(*(header[name] for name in Draw._fields))
        picks = self._shards[number].begin_sample(frontiers, draw)()
        drawn = {index: one for index, one in enumerate(picks) if one is not None}
        return _reply(
            list(drawn), [column for index, one in drawn.items() for column in narrowing.picks_sent(index, one)]
        )


def _field(schema: Schema, owner: Owner | list[str], name: str) -> Field:
    """What of an owner: its name, or the three of a relation."""
    return (schema.node_type(owner) if isinstance(owner, str) else schema.relation(tuple(owner))).fields[name]  # type: ignore[arg-type]


# --- messages ------------------------------------------------------------------------------------


def pack(kind: str, number: int, header: Any, columns: Sequence[Tensor]) -> list[Tensor]:
    """Of a part, any JSON and columns of int32 or int64: the pieces of a message."""
    sizes = [[column.numel(), column.itemsize] for column in columns]
    text = json.dumps([kind, number, header, sizes]).encode()
    return [torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8), *columns]


def unpack(message: Tensor) -> tuple[str, int, Any, list[Tensor]]:
    """What was packed. The columns are views."""
    array = message.numpy()
    begin = 8 + int.from_bytes(array[:8].tobytes(), "little")
    kind, number, header, sizes = json.loads(array[8:begin].tobytes())
    columns = []
    for count, itemsize in sizes:
        begin = aligned(begin)
        columns.append(message[begin : begin + count * itemsize].view(torch.int32 if itemsize == 4 else torch.int64))
        begin += count * itemsize
    return kind, number, header, columns


def _reply(header: Any, columns: Sequence[Tensor]) -> Reply:
    """One of any size."""
    pieces = pack("", 0, header, columns)
    return Reply(sum(aligned(piece.nbytes) for piece in pieces), partial(write_pieces, pieces))
