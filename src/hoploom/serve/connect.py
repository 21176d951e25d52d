"""Stores whose parts are held by graph servers. Loaders use them like any other store.

With a `path` (worker mode), this host's parts are mapped, and batches are made in this process: a hop costs one round
trip, all rows another. Without a `path` (server-client mode), this process holds no graph, and servers make batches.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric.data import Data

from hoploom import ops
from hoploom.config.values import as_bytes, as_int, as_number, read_addresses
from hoploom.errors import ConfigError, PeerError, StoreError
from hoploom.load.assemble import Batch
from hoploom.load.maker import LinkMaker, LocalMaker, Maker, NodeMaker
from hoploom.sample import LinkTask
from hoploom.schema import Owner, Schema
from hoploom.serve import wire
from hoploom.serve.batch_messages import BatchRequest, Description, Negatives, decode_batch, weight_hash
from hoploom.serve.peers import TIMEOUT, Peers
from hoploom.serve.security import ClientSecurity, read_client_security
from hoploom.serve.wire import IncomingMessage, Message
from hoploom.store import Store
from hoploom.store.base import Deployment
from hoploom.store.budget import NO_PARTS
from hoploom.store.remote_shard import RemoteShard, Target
from hoploom.store.sharded import Sharded
from hoploom.store.store import Topology, check_topology, join_parts, open_own

LOOK_AHEAD = 4  # batches whose missing rows are fetched together
MAX_IDS = 1 << 22  # in one request: 32 MiB at most, of wire.MAX_REQUEST


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
    """Connect to graph servers and use their parts as one store. Close it, or use it in a `with` block.

    >>> store = hoploom.connect("10.0.0.1:7000,10.0.0.2:7000")  # the servers make the batches
    >>> store = hoploom.connect(servers, "papers.parts", parts=[0])  # part 0 is mapped here, the rest is remote

    Several servers may hold the same part; one that does not answer within `timeout` seconds is replaced by another.
    `topology="local"` maps the edges of all parts here, so their files must be here; with "parted", servers also sample
    hops. `memory` is what this process may hold of the files here, e.g. "6GB"; the rest is read from the disk when it
    is needed, as `hoploom.open` does. `token_file`, `ca`, `cert` and `key` are the paths of files for a token and TLS.
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
    """Return the store of these peers and of the parts that are mapped in this process.

    `own` are the parts that need no peer; None if the peers make the batches.
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
    """The deployment of a store with parts on servers."""

    peers: Peers
    by_servers: bool  # servers make the batches, otherwise this process
    look_ahead: int | None  # batches whose missing rows are fetched together; None: as many as fit the budget
    sending: threading.Lock = field(default_factory=threading.Lock)  # held by a loader that sends weights of negatives

    @property
    def makes_batches(self) -> bool:
        return self.by_servers

    def producer(
        self, maker: LocalMaker, device: torch.device | None, look_ahead: int | None, deadline: float
    ) -> Maker | None:
        """Return a maker that asks the servers for batches; None if this process makes them."""
        return served_batches(maker, self.peers, self.sending) if self.by_servers else None

    def traffic(self) -> dict[str, float]:
        return self.peers.traffic()

    def close(self, *, wait: bool) -> None:
        self.peers.close()


class RemotePart(RemoteShard):
    """A shard on peers, for one part. Every request names the store, so that a server of another store refuses it."""

    def __init__(self, schema: Schema, number: int, peers: Peers, max_ids: int = MAX_IDS) -> None:
        super().__init__(schema, number, peers.manifest.parts[number], max_ids)
        self._peers = peers

    def _header(self, kind: str) -> dict[str, object]:
        return {"ask": kind, "identity": self._peers.identity, "part": self.number}

    def _request_hop(self, header: dict[str, Any], columns: list[Tensor]) -> Callable[[], tuple[Any, list[Any]]]:
        request = Message(self._header("sample") | header, columns)

        def read_picks(incoming: IncomingMessage) -> tuple[Any, list[Any]]:
            response = incoming.into()
            return response.header.get("relations"), list(response.tensors)

        return self._peers.begin(request, self.number, read_picks)

    def _request_rows(self, listed: list[list[Any]], ids: list[Tensor], targets: list[Target]) -> Callable[[], None]:
        message = Message({**self._header("gather"), "wanted": listed}, ids)
        return self._peers.begin(message, self.number, lambda incoming: self._scatter(incoming, targets))

    def _scatter(self, incoming: IncomingMessage, targets: Sequence[Target]) -> None:
        """Write rows to their targets while they are received."""
        if incoming.specs != [(out.dtype, (positions.numel(), *out.shape[1:])) for positions, out in targets]:
            raise self._wrong("rows of another dtype or shape")
        for index, row, rows in incoming.pieces():
            positions, out = targets[index]
            num_rows = rows.shape[0]
            ops.scatter_rows(rows, positions if num_rows == positions.numel() else positions[row : row + num_rows], out)

    def split(self, node_type: str, name: str) -> Tensor:
        """Return the part's own members of a split."""
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


@dataclass(frozen=True)
class ServedBatches(Maker):
    """A loader's batches, each made by any of the servers. `input_id` and the transform are added in this process."""

    peers: Peers
    sending: threading.Lock  # held while weights are sent, so that no other thread or loader sends them too
    description: Description
    columns: Mapping[str, Tensor]  # one entry per seed of the loader
    weights: Mapping[str, Tensor]  # of negatives, by hash
    input_id: Tensor | None
    transform: Callable[[Batch], Any] | None
    pinned: bool
    max_request: int = wire.MAX_REQUEST

    @property
    def least_threads(self) -> int:
        """Two requests for each server: one batch is made while another is sent."""
        return 2 * self.peers.num_servers

    def make(self, indices: Tensor, first: int, key: int) -> Batch:
        """Return the batch of these seeds; `first` is the position of the first one in its step."""
        seeds = {name: column[indices] for name, column in self.columns.items()}
        request = BatchRequest(self.description, seeds, first, key, self.weights)
        response = self._ask(request, [])
        if response.header.get("error") == "need":
            with self.sending:
                response = self._ask(request, [])  # another thread or loader may have sent the weights by now
                if response.header.get("error") == "need":
                    response = self._ask(request, list(self.weights))
        if "error" in response.header:
            raise PeerError(f"no batch came: {response.header['error']!r:.80}; use the same Hoploom on both sides")
        batch = decode_batch(response, pinned=self.pinned)
        storage = batch._store if isinstance(batch, Data) else batch[self.description.owner]
        storage._mapping["input_id"] = indices if self.input_id is None else self.input_id[indices]
        return batch if self.transform is None else self.transform(batch)

    def _ask(self, request: BatchRequest, attached: list[str]) -> Message:
        tensors = request.tensors(attached)
        size = sum(tensor.nbytes for tensor in tensors)
        if attached and size > self.max_request:
            raise ConfigError(
                f"with the weights of negatives a request has {as_bytes(size)}, at most {as_bytes(self.max_request)} "
                "go to a server; give them in a smaller dtype such as float16, or use connect(..., made='here')"
            )
        header = {"ask": "batch", "identity": self.peers.identity, **request.header(attached)}
        return self.peers.ask(Message(header, tensors), pinned=self.pinned)


def served_batches(maker: LocalMaker, peers: Peers, sending: threading.Lock) -> ServedBatches:
    """Return a maker that has servers make the batches of `maker`."""
    if maker.sampler.sample_frontier is not None:
        raise ConfigError(
            "sample_frontier is a function, which cannot go to the servers; use connect(..., made='here'), "
            "which makes batches in this process"
        )
    weights: dict[str, Tensor] = {}
    owner: Owner
    columns: dict[str, Tensor | None]
    if isinstance(maker, NodeMaker):
        owner, input_id, negatives = maker.seeds.node_type, maker.seeds.input_id, None
        columns = {"nodes": maker.seeds.nodes, "times": maker.seeds.times}
    else:
        assert isinstance(maker, LinkMaker)
        links = maker.links
        owner, input_id, negatives = links.task.key, links.input_id, _describe_negatives(links.task, weights)
        sources, destinations = links.ends
        columns = {"sources": sources, "destinations": destinations, "labels": links.labels, "times": links.times}
    added = maker.assembler
    fields = None if added.fields is None else tuple((of, tuple(names)) for of, names in added.fields.items())
    description = Description(owner, maker.sampler.sampling, added.reduce, added.degrees, negatives, fields)
    given = {name: column for name, column in columns.items() if column is not None}
    return ServedBatches(peers, sending, description, given, weights, input_id, maker.transform, added.pinned)


def _describe_negatives(task: LinkTask, weights: dict[str, Tensor]) -> Negatives | None:
    """Return the options of a task's negatives; add their weights to `weights`, by hash."""
    if task.negatives is None:
        return None
    hashes: list[str | None] = []
    for weight in (task.negatives.src_weight, task.negatives.dst_weight):
        hashes.append(None if weight is None else weight_hash(weight))
        if weight is not None:
            weights[str(hashes[-1])] = weight
    return Negatives(task.negatives.mode.value, task.negatives.amount, task.strict, *hashes)
