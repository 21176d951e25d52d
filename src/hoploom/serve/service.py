"""What a graph server answers, without the wire: a request in, an answer out, nothing kept in between.

Everything in a request is checked against the schema before anything is allocated. Rows are gathered piece by piece
while they are sent, so an answer takes a megabyte however long it is; picks are made whole.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

import hoploom
from hoploom import ops
from hoploom.errors import ConfigError
from hoploom.ops import Picks
from hoploom.schema import DTYPES, Field, Owner
from hoploom.serve import checks
from hoploom.serve.wire import PROTOCOL, Described, Message, Streamed, rows_at_once
from hoploom.store import Part, Store
from hoploom.store.base import Wanted
from hoploom.store.layout import Manifest, to_json

Answer = Callable[[Message], Message]


class Service:
    """Answers for the parts of a store that this process holds.

    `more` are kinds of requests that need more than parts, by name: whole batches.
    """

    def __init__(self, store: Store, parts: Mapping[int, Part], more: Mapping[str, Answer] | None = None) -> None:
        self.store, self.parts = store, dict(parts)
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

    def answer(self, request: Message) -> Message:
        """The answer to one request; ConfigError for one that cannot be answered."""
        kind = request.header.get("ask")
        if kind not in self._kinds:
            raise ConfigError(f"a request asks for {kind!r:.40}; this server answers {self.kinds}")
        return self._kinds[kind](request)

    def _info(self, request: Message) -> Message:
        manifest = json.loads(to_json(Manifest(self.store.schema, self.store.ranges, {})))
        header = {
            "protocol": PROTOCOL,
            "hoploom": hoploom.__version__,
            "identity": self.store.identity,
            "parts": sorted(self.parts),
            "answers": self.kinds,
            "store": manifest,
        }
        return Message(header)

    def _part(self, header: Mapping[str, Any]) -> Part:
        number = header.get("part")
        if type(number) is not int or number not in self.parts:
            raise ConfigError(f"a request is for part {number!r:.40}; this server holds parts {sorted(self.parts)}")
        return self.parts[number]

    def _split(self, request: Message) -> Message:
        part, schema = self._part(request.header), self.store.schema
        node_type, name = (checks.text(request.header, key) for key in ("type", "split"))
        if name not in schema.node_type(node_type).splits:
            raise ConfigError(f"a request is for split {name!r:.80} of {node_type!r}, which has none of that name")
        return Message({}, [part.split(node_type, name)])

    def _sample(self, request: Message) -> Message:
        """One hop, all relations of a part."""
        part, schema = self._part(request.header), self.store.schema
        draw = checks.draw(request.header, len(schema.relations))
        frontiers = checks.frontiers(request, part)
        checks.picks_fit(part, frontiers, draw)
        picks = part.sample(frontiers, draw)
        return Message({"relations": [i for i, p in enumerate(picks) if p is not None]}, _columns(picks))

    def _gather(self, request: Message) -> Message:
        """Rows of many fields of a part."""
        part = self._part(request.header)
        wanted = checks.wanted(request, part)
        by_edge_id: dict[int, Tensor] = {}
        return Message({}, [self._rows(part, want, by_edge_id) for want in wanted])

    def _rows(self, part: Part, want: Wanted, by_edge_id: dict[int, Tensor]) -> Tensor | Streamed:
        field = field_of(self.store, want.owner, want.field)
        described = Described(DTYPES[field.dtype], (want.ids.numel(), *field.shape))
        if described.num_bytes == 0:
            return ops.empty(described.shape, described.dtype)
        return Streamed(described, _pieces(part, want, rows_at_once(described)))


def field_of(store: Store, owner: Owner, name: str) -> Field:
    """How a field is described; the user's edge ids are a field like any other."""
    schema = store.schema
    fields = schema.node_type(owner).fields if isinstance(owner, str) else schema.relation(owner).fields
    if name not in fields:
        raise ConfigError(f"a request is for {name!r:.80} of {owner!r}, which has {sorted(fields)}")
    return fields[name]


def _columns(picks: Sequence[Picks | None]) -> list[Tensor]:
    return [column for one in picks if one is not None for column in one]


def _pieces(part: Part, want: Wanted, step: int) -> Iterator[Tensor]:
    for at in range(0, want.ids.numel(), step):
        yield part.gather([Wanted(want.owner, want.field, want.ids[at : at + step])])[0]
