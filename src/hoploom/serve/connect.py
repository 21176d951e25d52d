"""Stores whose parts are held by graph servers. Loaders use them like any other store.

With a `path` (worker mode), this process maps this host's parts and makes the batches. Each hop takes one round trip
to the servers, and all rows together one. Without a `path` (server-client mode), the servers make the batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

from hoploom import ops
from hoploom.config.values import as_int, as_number, read_addresses
from hoploom.errors import ConfigError, PeerError, StoreError
from hoploom.load.assemble import Batch, note_served_edges
from hoploom.load.maker import LinkMaker, LocalMaker, Maker, NodeMaker
from hoploom.load.order import StepShare
from hoploom.ops import Frontier, Picks
from hoploom.sample.negatives import KnownLinks
from hoploom.schema import Schema, TypeKey
from hoploom.serve.batch_messages import MAX_SEEDS, BatchRequest, Description, Negatives, decode_batch
from hoploom.serve.peers import TIMEOUT, Peers
from hoploom.serve.security import ClientSecurity, read_client_security
from hoploom.serve.wire import IncomingMessage, Message
from hoploom.store import Store
from hoploom.store.base import Deployment, Draw, RowLookup, Tier, Wanted
from hoploom.store.budget import NO_PARTS
from hoploom.store.sharded import IdEncoding, Sharded
from hoploom.store.store import Topology, check_topology, join_parts, open_own

LOOK_AHEAD = 4  # batches whose missing rows are fetched together
MAX_IDS = 1 << 22  # in one request: at most 32 MiB, within wire.MAX_REQUEST


def connect(
    servers: str | Sequence[str],
    path: str | PathLike[str] | None = None,
    *,
    parts: Sequence[int] | None = None,
    topology: Topology = "auto",
    memory: int | str | None = None,
    made: Literal["servers", "here"] | None = None,
    look_ahead: int | None = None,
    timeout: float = TIMEOUT,
    security: ClientSecurity | None = None,
    token_file: PathLike[str] | str | None = None,
    ca: PathLike[str] | str | None = None,
    cert: PathLike[str] | str | None = None,
    key: PathLike[str] | str | None = None,
) -> Store:
    """Connect to graph servers; return their parts as one store. Close the store, or use it in a `with` block.

    >>> store = hoploom.connect("10.0.0.1:7000,10.0.0.2:7000")  # the servers make the batches
    >>> store = hoploom.connect(servers, "papers.parts", parts=[0])  # part 0 is mapped here, others are remote

    Several servers may hold the same part: if one fails, a request goes to another, for `timeout` seconds in total.
    `topology="local"` maps the edges of all parts, so this host needs all their files; with "parted", servers also
    sample hops. `memory` limits the bytes of the files that this process holds, e.g. "6GB"; other bytes are read from
    disk when needed, as by `hoploom.open`. `token_file`, `ca`, `cert` and `key` are paths of files for a token and TLS.
    With `made="here"`, this process makes batches even without a `path`. Rows of `look_ahead` batches are read at once.
    """
    ops.keep_freed_memory()  # responses are freed soon: new pages for the next one take a fifth longer
    addresses = read_addresses(servers)
    seconds = as_number("timeout", timeout, "give the seconds that a request may take")
    if seconds == 0:
        raise ConfigError("timeout is 0; give the seconds that a request may take")
    if made not in (None, "servers", "here"):
        raise ConfigError(f"made is {made!r}; batches are made on the 'servers' or 'here'")
    if made == "servers" and path is not None:
        raise ConfigError("made='servers' needs no store here; leave path out")
    check_topology(topology)
    if memory is not None and path is None:
        raise ConfigError(NO_PARTS)
    if path is None and (parts is not None or topology != "auto"):
        raise ConfigError(
            "parts and topology say which files are read here, and path is missing; give it, or leave them out"
        )
    if security is not None and (token_file, ca, cert, key) != (None,) * 4:
        raise ConfigError("security is given, and files of it too; give security, or token_file, ca, cert and key")
    if security is None:
        security = read_client_security(token_file, ca, cert, key)
    own: list[int] | None = [] if made == "here" else None
    mapped = None
    if path is not None:
        mapped, own = open_own(Path(path), parts, topology, memory)
    steps = None if look_ahead is None else as_int("look_ahead", look_ahead, 1, "give a count of batches")
    return join(Peers(addresses, security, seconds, own=own), mapped, own, look_ahead=steps)


def join(peers: Peers, mapped: Store | None, own: Sequence[int] | None, *, look_ahead: int | None = None) -> Store:
    """Return one store of all parts: those of `mapped`, the others from `peers`, which are closed if this fails.

    `own` lists parts that need no peer; None: the peers make the batches.
    """
    try:
        if mapped is None:
            schema, ranges = peers.manifest.schema, peers.manifest.parts
            shards = [RemotePart(schema, number, peers) for number in range(len(ranges))]
            sharded = Sharded(schema, shards, ranges)
            store = Store(schema, sharded, sharded, identity=peers.identity, ranges=ranges, shards=tuple(shards))
        elif mapped.identity != peers.identity:
            raise StoreError(
                f"the store here ({mapped.identity[:12]}) is another one than the servers' ({peers.identity[:12]}); "
                "copy store.json and the parts from where they have it"
            )
        else:
            store = join_parts(mapped, own or [], lambda number: RemotePart(mapped.schema, number, peers))
        if look_ahead is None and (store.budget is None or store.budget.window == 0):
            look_ahead = LOOK_AHEAD  # otherwise as many as fit the budget
        return replace(store, deployment=Connected(peers=peers, by_servers=own is None, look_ahead=look_ahead))
    except BaseException:
        peers.close()
        raise


@dataclass(frozen=True, kw_only=True)
class Connected(Deployment):
    """The connection of a store to graph servers, which hold parts of it and, if `by_servers`, make the batches."""

    peers: Peers
    by_servers: bool  # servers make the batches, otherwise this process
    look_ahead: int | None  # batches whose missing rows are fetched together; None: as many as fit the budget

    @property
    def makes_batches(self) -> bool:
        return self.by_servers

    def producer(
        self, maker: LocalMaker, device: torch.device | None, look_ahead: int | None, deadline: float
    ) -> Maker | None:
        """Return an object that gets batches from the servers in place of `maker`; None if this process makes them."""
        return served_batches(maker, self.peers) if self.by_servers else None

    def traffic(self) -> dict[str, float]:
        return self.peers.traffic()

    def close(self) -> None:
        self.peers.close()


class IdColumn(NamedTuple):
    """The ids of one type in a request: those at `positions` of `ids`. `wants` lists the indices of fields to read."""

    ids: Tensor  # [n] int64
    positions: Tensor  # [m] int64
    wants: list[int]


class RemotePart:
    """A part on graph servers, used like a local shard: one request a hop, and one for the rows of `max_ids` ids."""

    tier: ClassVar[Tier] = Tier.REMOTE

    def __init__(self, schema: Schema, number: int, peers: Peers, max_ids: int = MAX_IDS) -> None:
        self.schema, self.number, self._peers, self._max_ids = schema, number, peers, max_ids
        self._encoding = IdEncoding(schema, peers.manifest.parts[number])

    def in_memory(self, owner: TypeKey, name: str) -> bool:
        return False

    def look_up(self, owner: TypeKey, ids: Tensor, positions: Tensor) -> RowLookup:
        return RowLookup(owner, ids, (positions[:0],), (), positions)

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
        excluded = {n: found for n in drawn if (found := self._excluded(draw, n)) is not None}
        columns += excluded.values()
        header = draw._asdict() | {"frontiers": listed, "fanouts": list(draw.fanouts), "excluded": list(excluded)}
        request = Message(self._header("sample") | header, columns)
        return self._peers.begin(request, self.number, lambda incoming: self._picks(incoming.into(), drawn, frontiers))

    def _excluded(self, draw: Draw, relation: int) -> Tensor | None:
        """Return the excluded edges of a relation that this part has, encoded for a message; None if there are none."""
        excluded = None if draw.excluded is None else draw.excluded[relation]
        if excluded is None:
            return None
        held = self._encoding.owned[self.schema.relations[relation].key]
        begin, end = torch.searchsorted(excluded, torch.tensor([held.first, held.first + held.size])).tolist()
        return held.encode(excluded[begin:end]) if end > begin else None

    def _picks(
        self, response: Message, drawn: Sequence[int], frontiers: Sequence[Frontier | None]
    ) -> list[Picks | None]:
        """Return the picks of a response, one entry per relation; raise PeerError if they do not fit the request."""
        columns = response.tensors
        if response.header.get("relations") != drawn or len(columns) != 3 * len(drawn):
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
        """Request rows. Return a function that writes them to `outs`; it sends more requests if one is not enough."""
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
        """Split the columns into requests of at most `max_ids` ids; return the columns of each request."""
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
        targets: list[tuple[Tensor, Tensor]] = []  # out[positions] of each wanted field
        ids: list[Tensor] = []
        for number, (all_ids, positions, wants) in enumerate(columns):
            ids.append(self._encoding.owned[wanted[wants[0]].owner].encode(all_ids, positions))
            for index in wants:
                owner, name, _ = wanted[index]
                listed.append([owner if isinstance(owner, str) else list(owner), name, number])
                targets.append((positions, outs[index]))
        message = Message({**self._header("gather"), "wanted": listed}, ids)
        return self._peers.begin(message, self.number, lambda incoming: self._scatter(incoming, targets))

    def _header(self, kind: str) -> dict[str, object]:
        return {"ask": kind, "identity": self._peers.identity, "part": self.number}

    def _scatter(self, incoming: IncomingMessage, targets: Sequence[tuple[Tensor, Tensor]]) -> None:
        """While a response arrives, write its rows to `targets`: one pair (positions, out) for each field."""
        if incoming.specs != [(out.dtype, (positions.numel(), *out.shape[1:])) for positions, out in targets]:
            raise self._wrong("rows of another dtype or shape")
        for index, row, rows in incoming.pieces():
            positions, out = targets[index]
            num_rows = rows.shape[0]
            ops.scatter_rows(rows, positions if num_rows == positions.numel() else positions[row : row + num_rows], out)

    def split(self, node_type: str, name: str) -> Tensor:
        """Return the ids of the nodes in split `name` that this part holds, [n] int64."""
        held, index = self._peers.manifest.parts[self.number], self.schema.type_index[node_type]
        count = held.splits.get(node_type, {}).get(name, 0)
        if count == 0:
            return torch.empty(0, dtype=torch.int64)
        request = Message({**self._header("split"), "type": node_type, "split": name})
        tensors = self._peers.ask(request, self.number).whole_tensors
        first, end = held.first_nodes[index], held.first_nodes[index] + held.num_nodes[index]
        if len(tensors) != 1 or tensors[0].dtype != torch.int64 or tensors[0].shape != (count,):
            raise self._wrong(f"other than {count} members of {name!r}")
        if int(tensors[0].min()) < first or int(tensors[0].max()) >= end:
            raise self._wrong(f"members of {name!r} that it does not hold")
        return tensors[0]

    def _wrong(self, what: str) -> PeerError:
        return PeerError(f"part {self.number} answered with {what}; use the same Hoploom on both sides")


@dataclass(frozen=True)
class ServedBatches(Maker):
    """Gets each batch of a loader from a server. This process only adds `input_id` and applies the transform."""

    peers: Peers
    description: Description
    columns: Mapping[str, Tensor]  # one entry per seed of the loader
    input_id: Tensor | None
    transform: Callable[[Batch], Any] | None
    pinned: bool
    excludes: Callable[[StepShare], tuple[Tensor | None, ...]]
    known: KnownLinks | None = None

    @property
    def least_threads(self) -> int:
        """Two threads for each server, so that a server makes one batch while it sends another."""
        return 2 * self.peers.num_servers

    def make(self, share: StepShare) -> Batch:
        indices, first, key, _ = share
        seeds = {name: column[indices] for name, column in self.columns.items()}
        known, negatives = None if self.known is None else self.known.pairs, self.description.negatives
        if self.known is not None and negatives is not None and negatives.mode == "triplet":  # links keep their source
            known = self.known.pairs[torch.isin(self.known.pairs // self.known.num_destinations, seeds["sources"])]
        request = BatchRequest(self.description, seeds, first, key, self.excludes(share), known)
        message = request.message(self.peers.identity)
        batch = decode_batch(self.peers.ask(message, pinned=self.pinned), pinned=self.pinned)
        if self.pinned:
            note_served_edges(batch)
        storage = batch._store if isinstance(batch, Data) else batch[self.description.owner]
        storage._mapping["input_id"] = indices if self.input_id is None else self.input_id[indices]
        return batch if self.transform is None else self.transform(batch)


def served_batches(maker: LocalMaker, peers: Peers) -> ServedBatches:
    """Return the object that gets the batches of `maker` from servers; raise ConfigError if servers cannot."""
    if maker.sampler.sample_frontier is not None:
        raise ConfigError(
            "sample_frontier is a function, which cannot go to the servers; use connect(..., made='here'), "
            "which makes batches in this process"
        )
    owner: TypeKey
    columns: dict[str, Tensor | None]
    negatives: Negatives | None = None
    known: KnownLinks | None = None
    if isinstance(maker, NodeMaker):
        owner, input_id = maker.node_type, maker.input_id
        columns = {"nodes": maker.nodes, "times": maker.times}
    else:
        assert isinstance(maker, LinkMaker)
        owner, input_id, drawn = maker.task.key, maker.input_id, maker.task.negatives
        if drawn is not None:
            if drawn.src_weight is not None or drawn.dst_weight is not None:
                raise ConfigError(
                    "src_weight and dst_weight of neg_sampling are not sent to servers; use connect(..., made='here'), "
                    "which makes batches in this process, or in a run task.candidates = 'uniform'"
                )
            negatives = Negatives(drawn.mode.value, drawn.amount, maker.task.strict, maker.task.candidates)
        sources, destinations = maker.ends
        columns = {"sources": sources, "destinations": destinations, "labels": maker.labels, "times": maker.times}
        columns["candidates"] = maker.candidates
        known = maker.task.known
        if known is not None and known.pairs.numel() > MAX_SEEDS:
            raise ConfigError(f"known_links are {known.pairs.numel():,} links, too many; use connect(..., made='here')")
    added = maker.assembler
    fields = None if added.fields is None else tuple((of, tuple(names)) for of, names in added.fields.items())
    description = Description(owner, maker.sampler.sampling, added.reduce, added.degrees, negatives, fields)
    given = {name: column for name, column in columns.items() if column is not None}
    return ServedBatches(peers, description, given, input_id, maker.transform, added.pinned, maker.excludes, known)
