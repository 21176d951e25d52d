"""A part that another process holds: both seams over the wire. Costs a round trip a hop, and one for all rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hoploom import ops
from hoploom.schema import Schema
from hoploom.serve.client import read_message
from hoploom.serve.incoming import Incoming
from hoploom.serve.peers import Peers
from hoploom.serve.wire import Message
from hoploom.store.remote_shard import RemoteShard, Target

MAX_IDS = 1 << 22  # in one request: 32 MiB at most, of wire.MAX_REQUEST


class RemotePart(RemoteShard):
    """A Shard over peers, for one part. Every request names the store, so that no other one answers it."""

    def __init__(self, schema: Schema, number: int, peers: Peers, max_ids: int = MAX_IDS) -> None:
        super().__init__(schema, number, peers.manifest.parts[number], max_ids)
        self._peers = peers

    def _header(self, kind: str) -> dict[str, object]:
        return {"ask": kind, "identity": self._peers.identity, "part": self.number}

    def _request_hop(self, header: dict[str, Any], columns: list[Tensor]) -> Callable[[], tuple[Any, list[Any]]]:
        request = Message(self._header("sample") | header, columns)
        finish = self._peers.begin(request, self.number, read_message)

        def picks() -> tuple[Any, list[Any]]:
            answer = finish()
            return answer.header.get("relations"), list(answer.tensors)

        return picks

    def _request_rows(self, listed: list[list[Any]], ids: list[Tensor], targets: list[Target]) -> Callable[[], None]:
        message = Message({**self._header("gather"), "wanted": listed}, ids)
        return self._peers.begin(message, self.number, lambda incoming: self._place(incoming, targets))

    def _place(self, incoming: Incoming, targets: Sequence[Target]) -> None:
        """Write rows to their positions as they come."""
        if incoming.described != [(out.dtype, (positions.numel(), *out.shape[1:])) for positions, out in targets]:
            raise self._wrong("rows of another dtype or shape")
        for index, row, rows in incoming.pieces():
            positions, out = targets[index]
            num_rows = rows.shape[0]
            ops.scatter_rows(rows, positions if num_rows == positions.numel() else positions[row : row + num_rows], out)

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
