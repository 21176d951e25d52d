"""What a graph server answers, without the wire: a request in, an answer out, nothing kept in between.

Rows in memory are gathered piece by piece while they are sent, so an answer takes a megabyte however long it is. Those
on disk are read together, or in pieces as large as the store's budget allows. Picks are made at once. Many picks, and
rows that were read, take memory until they are sent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hoploom
from hoploom import ops
from hoploom.errors import ConfigError, StoreError
from hoploom.serve import requests
from hoploom.serve.memory_budget import ALONE, WAIT, Call, MemoryBudget, Reservation
from hoploom.serve.wire import PIECE, PROTOCOL, Described, Message, Streamed
from hoploom.store import Part, Store
from hoploom.store.base import Shard, Wanted
from hoploom.store.format import Manifest, manifest_to_json
from hoploom.store.remote_shard import IdEncoding, read_all
from hoploom.store.sharded import empty_rows

Answer = Callable[[Message, Call], Message]
Fill = Callable[[Sequence[Wanted], Sequence[Tensor]], None]  # rows of what is wanted, to where they belong
PICK_BYTES = 16  # of a pick in an answer: source and edge
SHARE = 4  # the part of the window of a store's budget that the rows of one answer may take


@dataclass(frozen=True)
class PickLimits:
    """How many picks an answer may hold, and which of them take memory of the budget."""

    most: int = 1 << 26  # of all relations in one answer: 1 GiB
    free: int = 1 << 20  # bytes of picks that take none
    wait: float = WAIT  # seconds that others wait for it


class Service:
    """Answers for the parts of a store that this process holds.

    Requests, and picks that are not sent yet, take at most `memory` bytes. Rows read from the disk take the window of
    the store's budget.
    `more` are kinds of requests that need more than parts, by name: whole batches.
    """

    def __init__(
        self,
        store: Store,
        parts: Mapping[int, Part],
        memory: int,
        more: Mapping[str, Answer] | None = None,
        limits: PickLimits | None = None,
    ) -> None:
        self.store, self.parts = store, dict(parts)
        self._limits = limits or PickLimits()
        self.budget = MemoryBudget(memory, self._limits.wait, "picks and requests")
        self.rows = MemoryBudget(0 if store.budget is None else store.budget.window, 0, "rows")
        own: dict[str, Answer] = {
            "info": self._info,
            "sample": self._sample,
            "gather": self._gather,
            "split": self._split,
        }
        self._kinds = own | dict(more or {})

    @property
    def kinds(self) -> list[str]:
        return list(self._kinds)

    def answer(self, request: Message, call: Call = ALONE) -> Message:
        """The answer to one request; ConfigError for one that has none, StoreError for another store's."""
        kind = requests.read_text(request.header, "ask")
        if kind != "info" and "identity" in request.header:
            self._check_identity(requests.read_text(request.header, "identity"))
        if kind not in self._kinds:
            raise ConfigError(f"a request asks for {kind!r:.40}; this server answers {self.kinds}")
        return self._kinds[kind](request, call)

    def _check_identity(self, given: str) -> None:
        """A client that has met another server at this address must get no rows of this one."""
        own = self.store.identity
        if given != own:
            raise StoreError(
                f"this server is of another store ({own[:12]}) than was asked for ({given:.12}); start it with the one "
                "that its clients have met, or start them again"
            )

    def _info(self, request: Message, call: Call) -> Message:
        """Whom one speaks to. The manifest is a tensor of its text: with many parts a header could not hold it."""
        manifest = manifest_to_json(Manifest(self.store.schema, self.store.ranges, {})).encode()
        header = {
            "protocol": PROTOCOL,
            "hoploom": hoploom.__version__,
            "identity": self.store.identity,
            "parts": sorted(self.parts),
            "answers": self.kinds,
        }
        return Message(header, [torch.from_numpy(np.frombuffer(bytearray(manifest), dtype=np.uint8))])

    def _part(self, header: Mapping[str, Any]) -> tuple[Part, Shard]:
        """A part, and what answers for it: within a budget, that reads from the disk."""
        number = header.get("part")
        if type(number) is not int or number not in self.parts:
            raise ConfigError(f"a request is for part {number!r:.40}; this server holds parts {sorted(self.parts)}")
        return self.parts[number], self.store.shards[number]

    def _split(self, request: Message, call: Call) -> Message:
        (part, _), schema = self._part(request.header), self.store.schema
        node_type, name = (requests.read_text(request.header, key) for key in ("type", "split"))
        if name not in schema.node_type(node_type).splits:
            raise ConfigError(f"a request is for split {name!r:.80} of {node_type!r}, which has none of that name")
        ids = part.split(node_type, name).clone()
        part.require_whole()
        return Message({}, [ids])

    def _sample(self, request: Message, call: Call) -> Message:
        """One hop, all relations of a part."""
        (part, shard), schema = self._part(request.header), self.store.schema
        draw = requests.read_draw(request.header, len(schema.relations))
        frontiers = requests.read_frontiers(request, part)
        most = requests.most_picks(part, frontiers, draw, self._limits.most) * PICK_BYTES
        with Reservation(self.budget, call, of="a hop", beside=call.requested) as reservation:
            reservation.take(most if most > self._limits.free else 0)
            picks = shard.begin_sample(frontiers, draw)()
            encoding = IdEncoding(schema, self.store.ranges[request.header["part"]])
            columns = [
                column for n, one in enumerate(picks) if one is not None for column in encoding.encode_picks(n, one)
            ]
            reservation.settle(min(reservation.taken, sum(column.nbytes for column in columns)))
        relations = [index for index, one in enumerate(picks) if one is not None]
        return Message({"relations": relations}, columns, reservation.close)

    def _gather(self, request: Message, call: Call) -> Message:
        """Rows of many fields of a part. Those on disk are read before the answer begins, if they fit its share of the
        window: sorted, each block once. Else in pieces that fit what is free; nobody waits for memory that a client
        may only give back once it has this answer, too."""
        part, shard = self._part(request.header)
        wanted = requests.read_wanted(request, part)
        if shard is part:  # all of it is in memory
            return Message({}, _gathered(part, wanted, call))
        far = {n: want for n, want in enumerate(wanted) if not shard.in_memory(want.owner, want.field)}
        size = sum(_described(part, want).num_bytes for want in far.values())
        with Reservation(self.rows, call) as reservation:
            free = max(PIECE, reservation.take_some(min(size, self.rows.size // SHARE)))
            read = dict(zip(far, _read(shard, part, list(far.values())), strict=True)) if size <= free else {}
            piece = max(PIECE, free // 2)  # while one is sent, the next is read
            tensors: list[Tensor | Streamed] = []
            for n, want in enumerate(wanted):
                if n in read:
                    tensors.append(read[n])
                elif n in far:
                    tensors.append(_streamed(part, want, partial(read_all, shard), piece))
                else:
                    tensors.append(_streamed(part, want, part.gather_into, PIECE))
            return Message({}, tensors, reservation.close)


def _described(part: Part, want: Wanted) -> Described:
    rows = part.tables[want.owner, want.field].rows
    return Described(rows.dtype, (want.ids.numel(), *rows.shape[1:]))


def _gathered(part: Part, wanted: Sequence[Wanted], call: Call) -> Sequence[Tensor | Streamed]:
    """Rows of memory: a few at once, more while they are sent."""
    tables = [part.tables[want.owner, want.field] for want in wanted]
    if sum(table.raw.shape[1] * want.ids.numel() for table, want in zip(tables, wanted, strict=True)) > PIECE:
        return [_streamed(part, want, part.gather_into, PIECE) for want in wanted]
    outs = [
        call.empty((want.ids.numel(), *table.rows.shape[1:]), table.rows.dtype)
        for table, want in zip(tables, wanted, strict=True)
    ]
    part.gather_into(wanted, outs)
    return outs


def _streamed(part: Part, want: Wanted, fill: Fill, piece: int) -> Tensor | Streamed:
    """Rows that are gathered while they are sent, about `piece` bytes at a time."""
    described = _described(part, want)
    if described.num_bytes == 0:
        return ops.empty(described.shape, described.dtype)

    def fill_rows(row: int, out: Tensor) -> None:
        fill([want._replace(ids=want.ids[row : row + out.shape[0]])], [out])

    return Streamed(described, fill_rows, piece)


def _read(shard: Shard, part: Part, wanted: Sequence[Wanted]) -> list[Tensor]:
    """Rows that are on disk, all of them together."""
    outs = [empty_rows(part.schema, want.owner, want.field, want.ids.numel()) for want in wanted]
    read_all(shard, wanted, outs)
    return outs
