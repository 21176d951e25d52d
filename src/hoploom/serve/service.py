"""The answers of a graph server, apart from the network: a function from a request to a response, without state.

Rows in memory are gathered piece by piece while they are sent, so a long response needs a megabyte of memory. Rows on
disk are read together, or in pieces as large as the store's budget allows. A hop is sampled as a whole. Its picks,
if there are many, and rows read from disk count against a memory budget until they are sent.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hoploom
from hoploom import ops
from hoploom.errors import ConfigError, StoreError
from hoploom.serve import requests
from hoploom.serve.memory_budget import NO_CLIENT, WAIT, MemoryBudget, RequestContext, Reservation
from hoploom.serve.wire import PIECE, PROTOCOL, Message, StreamedTensor, TensorSpec
from hoploom.store import Part, Store
from hoploom.store.base import Shard, Wanted
from hoploom.store.format import Manifest, manifest_to_json
from hoploom.store.sharded import IdEncoding, empty_rows

Handler = Callable[[Message, RequestContext], Message]
Fill = Callable[[Sequence[Wanted], Sequence[Tensor]], None]  # writes the wanted rows into the tensors
PICK_BYTES = 16  # of a pick in a response: source and edge
MAX_PICKS = 1 << 26  # of all relations in one response: 1 GiB
FREE = 1 << 20  # bytes: fewer picks are not counted in the budget
ENOUGH = 1 << 20  # picks: if their bound is not higher, in-degrees are not read to lower it
SHARE = 4  # rows from disk in one response take at most 1/SHARE of the window of the store's budget


class Service:
    """Answers requests for the parts of a store that this process holds.

    Requests, and picks that are not sent yet, take at most `memory` bytes; a request waits `wait` seconds for memory.
    Rows read from disk are limited by the store's memory budget. `more` maps further kinds of requests to their
    handlers; the handler of "batch" needs all parts of the store.
    """

    def __init__(
        self,
        store: Store,
        parts: Mapping[int, Part],
        memory: int,
        more: Mapping[str, Handler] | None = None,
        wait: float = WAIT,
    ) -> None:
        self.store, self.parts = store, dict(parts)
        self.budget = MemoryBudget(memory, wait, "picks and requests")
        self.rows = MemoryBudget(0 if store.budget is None else store.budget.window, 0, "rows")
        own: dict[str, Handler] = {
            "info": self._info,
            "sample": self._sample,
            "gather": self._gather,
            "split": self._split,
        }
        self._handlers = own | dict(more or {})

    @property
    def kinds(self) -> list[str]:
        return list(self._handlers)

    def answer(self, request: Message, context: RequestContext = NO_CLIENT) -> Message:
        """Return the response. Raise ConfigError if the request is wrong, StoreError if it is for another store."""
        kind = requests.read_text(request.header, "ask")
        if kind != "info" and "identity" in request.header:
            given, own = requests.read_text(request.header, "identity"), self.store.identity
            if given != own:  # the client has met another server at this address
                raise StoreError(
                    f"this server is of another store ({own[:12]}) than was asked for ({given:.12}); start it with the "
                    "one that its clients have met, or start them again"
                )
        if kind not in self._handlers:
            raise ConfigError(f"a request asks for {kind!r:.40}; this server answers {self.kinds}")
        return self._handlers[kind](request, context)

    def _info(self, request: Message, context: RequestContext) -> Message:
        """Return a description of the server. The manifest is sent as a tensor, as it may be too long for a header."""
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
        """Return the part that a header names, and a shard to read it: from disk if the store has a memory budget."""
        number = header.get("part")
        if type(number) is not int or number not in self.parts:
            raise ConfigError(f"a request is for part {number!r:.40}; this server holds parts {sorted(self.parts)}")
        return self.parts[number], self.store.shards[number]

    def _split(self, request: Message, context: RequestContext) -> Message:
        (part, _), schema = self._part(request.header), self.store.schema
        node_type, name = (requests.read_text(request.header, key) for key in ("type", "split"))
        if name not in schema.node_type(node_type).splits:
            raise ConfigError(f"a request is for split {name!r:.80} of {node_type!r}, which has none of that name")
        ids = part.split(node_type, name).clone()
        part.require_whole()
        return Message({}, [ids])

    def _sample(self, request: Message, context: RequestContext) -> Message:
        """Sample one hop over all relations from the in-edges that a part holds; return the picks."""
        (part, shard), schema = self._part(request.header), self.store.schema
        draw = requests.read_draw(request, part)
        frontiers = requests.read_frontiers(request, part)
        picks = requests.most_picks(part, frontiers, draw, ENOUGH)
        if picks > MAX_PICKS:
            raise ConfigError(f"a request would pick {picks} edges; at most {MAX_PICKS}: lower the fanout or the batch")
        with Reservation(self.budget, context, of="a hop", beside=context.num_bytes) as reservation:
            reservation.take(picks * PICK_BYTES if picks * PICK_BYTES > FREE else 0)
            drawn = shard.begin_sample(frontiers, draw)()
            encoding = IdEncoding(schema, self.store.ranges[request.header["part"]])
            columns = [
                column for n, one in enumerate(drawn) if one is not None for column in encoding.encode_picks(n, one)
            ]
            reservation.resize(min(reservation.taken, sum(column.nbytes for column in columns)))
        relations = [index for index, one in enumerate(drawn) if one is not None]
        return Message({"relations": relations}, columns, reservation.close)

    def _gather(self, request: Message, context: RequestContext) -> Message:
        """Return rows of many fields of a part.

        If the rows on disk fit this response's share of memory, they are read before anything is sent, in sorted
        order, so that each disk block is read once. Otherwise they are read while they are sent, in pieces that fit.
        This never waits for memory, which a client may free only once it has this response: both would wait forever.
        """
        part, shard = self._part(request.header)
        wanted = requests.read_row_requests(request, part)
        if shard is part:  # all of it is in memory
            return Message({}, _gathered(part, wanted, context))
        on_disk = {n: want for n, want in enumerate(wanted) if not shard.in_memory(want.owner, want.field)}
        size = sum(_spec(part, want).num_bytes for want in on_disk.values())
        with Reservation(self.rows, context) as reservation:
            free = max(PIECE, reservation.take_some(min(size, self.rows.size // SHARE)))
            read: dict[int, Tensor] = {}
            if size <= free:
                listed = list(on_disk.values())
                outs = [empty_rows(part.schema, want.owner, want.field, want.ids.numel()) for want in listed]
                _read_all(shard, listed, outs)
                read = dict(zip(on_disk, outs, strict=True))
            piece = max(PIECE, free // 2)  # while one is sent, the next is read
            tensors: list[Tensor | StreamedTensor] = []
            for n, want in enumerate(wanted):
                if n in read:
                    tensors.append(read[n])
                elif n in on_disk:
                    tensors.append(_streamed(part, want, partial(_read_all, shard), piece))
                else:
                    tensors.append(_streamed(part, want, part.gather_into, PIECE))
            return Message({}, tensors, reservation.close)


def _spec(part: Part, want: Wanted) -> TensorSpec:
    rows = part.tables[want.owner, want.field].rows
    return TensorSpec(rows.dtype, (want.ids.numel(), *rows.shape[1:]))


def _gathered(part: Part, wanted: Sequence[Wanted], context: RequestContext) -> Sequence[Tensor | StreamedTensor]:
    """Return rows from fields that are in memory. Few rows are gathered now; many are gathered while they are sent."""
    tables = [part.tables[want.owner, want.field] for want in wanted]  # few calls of torch, as each takes long
    sizes = [want.ids.numel() for want in wanted]
    if sum(table.raw.shape[1] * size for table, size in zip(tables, sizes, strict=True)) > PIECE:
        return [_streamed(part, want, part.gather_into, PIECE) for want in wanted]
    pairs = zip([table.rows for table in tables], sizes, strict=True)
    outs = [context.empty((size, *rows.shape[1:]), rows.dtype) for rows, size in pairs]
    part.gather_into(wanted, outs)
    return outs


def _streamed(part: Part, want: Wanted, fill: Fill, piece: int) -> Tensor | StreamedTensor:
    """Return a tensor whose rows `fill` gathers while they are sent, about `piece` bytes at a time."""
    spec = _spec(part, want)
    if spec.num_bytes == 0:
        return ops.empty(spec.shape, spec.dtype)

    def fill_rows(row: int, out: Tensor) -> None:
        fill([want._replace(ids=want.ids[row : row + out.shape[0]])], [out])

    return StreamedTensor(spec, fill_rows, piece)


def _read_all(shard: Shard, wanted: Sequence[Wanted], outs: Sequence[Tensor]) -> None:
    """Write all wanted rows of a shard to `outs`."""
    positions = {id(want.ids): torch.arange(want.ids.numel()) for want in wanted}  # fields of one type share their ids
    shard.begin_gather(wanted, [positions[id(want.ids)] for want in wanted], outs)()
