"""A store whose parts graph servers hold. Loaders use it like any other store.

With a `path` (worker mode), this host's parts are mapped, and batches are made here. Without a `path` (server-client
mode), this process holds no graph, and servers make the batches.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Literal

import torch

from hoploom import ops
from hoploom.config.values import as_int, as_number, read_addresses
from hoploom.errors import ConfigError, StoreError
from hoploom.load.maker import LocalMaker, Maker
from hoploom.serve.batch_client import served
from hoploom.serve.peers import TIMEOUT, Peers
from hoploom.serve.remote import RemotePart
from hoploom.serve.security import ClientSecurity, read_client_security
from hoploom.store import Store
from hoploom.store.base import Deployment
from hoploom.store.budget import NO_PARTS
from hoploom.store.sharded import Sharded
from hoploom.store.store import Topology, check_topology, join_parts, open_own

LOOK_AHEAD = 4  # batches whose missing rows are fetched together


@dataclass(frozen=True, kw_only=True)
class Connected(Deployment):
    """The deployment of a store with parts on servers."""

    peers: Peers
    by_servers: bool  # they make the batches; else they are made here
    look_ahead: int | None  # batches whose missing rows are fetched together; None: as many as fit the budget
    sending: threading.Lock = field(default_factory=threading.Lock)  # weights of negatives: one for all loaders

    @property
    def makes_batches(self) -> bool:
        return self.by_servers

    def producer(
        self, maker: LocalMaker, device: torch.device | None, look_ahead: int | None, deadline: float
    ) -> Maker | None:
        """Return a maker that asks the servers for batches; None if this process makes them."""
        return served(maker, self.peers, self.sending) if self.by_servers else None

    def traffic(self) -> dict[str, float]:
        return self.peers.traffic()

    def close(self, *, wait: bool) -> None:
        self.peers.close()


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
    ops.keep_freed_memory()  # answers are freed soon: new pages for the next one take a fifth longer
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
    shown = read_client_security(token_file, ca, cert, key) if security is None else security
    own: list[int] | None = [] if made == "here" else None
    mapped = None
    if path is not None:
        mapped, own = open_own(Path(path), parts, topology, memory)
    ahead = None if look_ahead is None else as_int("look_ahead", look_ahead, 1, "give a count of batches")
    return join(Peers(addresses, shown, seconds, own=own), mapped, own, look_ahead=ahead)


def join(peers: Peers, mapped: Store | None, own: Sequence[int] | None, *, look_ahead: int | None = None) -> Store:
    """The store of these peers and of the parts that are mapped here. `own` are the parts that need no peer; None if
    the peers make the batches."""
    try:
        store = _without_graph(peers) if mapped is None else _beside(peers, mapped, own or [])
        if look_ahead is None and (store.budget is None or store.budget.window == 0):
            look_ahead = LOOK_AHEAD  # else as many as fit the budget
        return replace(store, deployment=Connected(peers=peers, by_servers=own is None, look_ahead=look_ahead))
    except BaseException:
        peers.close()
        raise


def _without_graph(peers: Peers) -> Store:
    """All parts are remote."""
    manifest = peers.manifest
    schema = manifest.schema
    shards = [RemotePart(schema, number, peers) for number in range(len(manifest.parts))]
    sharded = Sharded(schema, shards, manifest.parts)
    return Store(schema, sharded, sharded, identity=peers.identity, ranges=manifest.parts, shards=tuple(shards))


def _beside(peers: Peers, local: Store, own: Sequence[int]) -> Store:
    """This host's own parts are mapped or on its disk, the others are remote."""
    if local.identity != peers.identity:
        raise StoreError(
            f"the store here ({local.identity[:12]}) is another one than the servers' ({peers.identity[:12]}); "
            "copy store.json and the parts from where they have it"
        )
    return join_parts(local, own, lambda number: RemotePart(local.schema, number, peers))
