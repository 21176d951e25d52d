"""Open a store: from files, from servers on other hosts, or from a server beside each host's trainers.

What ranks must know of each other (who holds which part, where servers listen, their token) goes through
`gather_json`, so a rank that fails here ends the others with its name, within the context's deadline.
"""

import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hoploom.config.values import as_int, is_loopback, join_address
from hoploom.deploy.cluster_file import Security, ServerOptions
from hoploom.deploy.local_server import LocalServer
from hoploom.deploy.programs import ServerCommand
from hoploom.errors import ConfigError
from hoploom.ranks import environment
from hoploom.ranks.collectives import gather_json
from hoploom.ranks.context import Context
from hoploom.ranks.environment import LOOPBACK, LaunchSettings, RankInfo
from hoploom.ranks.rendezvous import address_towards
from hoploom.store import Store, open_store
from hoploom.store.base import Part
from hoploom.store.budget import NO_PARTS
from hoploom.store.format import read_manifest
from hoploom.store.mapping import held_parts
from hoploom.store.on_disk import OnDisk
from hoploom.store.store import check_topology

Serve = bool | Literal["auto"]
NO_SCRATCH = "scratch is set, but parts are on other hosts; it is for a store of which all parts are here: leave it out"
NO_TLS = (
    "hoploom: warning: the graph servers beside the trainers send without TLS, so others on the network path can read "
    "what they send; give hoploom.open cert=, key= and ca= (`hoploom certs` makes them), or set them in [security] of "
    "the cluster file"
)
CONNECT = ("topology", "made", "look_ahead", "timeout", "token_file", "ca", "cert", "key")


def open(
    path: str | Path | None = None,
    *,
    context: Context | None = None,
    parts: Sequence[int] | None = None,
    topology: Literal["own", "all", "auto", "local", "parted"] | None = None,
    memory: int | str | None = None,
    scratch: str | Path | None = None,
    serve: Serve = "auto",
    servers: str | Sequence[str] | None = None,
    **options: Any,
) -> Store:
    """Open a store from a directory. It is mapped and not loaded, so this is fast for any size.

    With `parts`, only these parts are opened, and only their folders are needed. Ids and schema stay those of the whole
    store. Splits have the members in these parts. Reading anything of another part raises a StoreError. With
    `topology="all"`, the edges of the other parts are opened too, so sampling sees every edge; their fields are not.

    `memory` is for a graph larger than memory: what this process may hold of the store, beside the batches. What does
    not fit is read from the disk as batches need it, many reads at once. Batches stay the same. `scratch` is a folder
    on a disk with room: what coming batches read is copied there in the order in which they need it.

    >>> store = hoploom.open("papers.store")
    >>> store = hoploom.open("papers.store", parts=[2])
    >>> store = hoploom.open("papers.store", parts=[2], topology="all")
    >>> store = hoploom.open("papers.store", memory="6GB")
    >>> store = hoploom.open("papers.store", memory="6GB", scratch="/mnt/nvme")

    With `context`, this opens the right store for the current deployment. All ranks call it, and the store is closed
    with the context. On one host it maps the files; under `hoploom launch` it does what the cluster file says. On
    several hosts without servers, it starts one beside the trainers of each host, for the host's share of the parts or
    for `parts`. With `serve=True`, each rank of one host counts as a host. `servers`, `topology` and `options` are
    those of `hoploom.connect`.

    >>> store = hoploom.open("papers.store", context=context)
    """
    if context is None:
        only_with_context = {"servers": servers is not None, "serve": serve != "auto"}
        given = next((name for name, is_given in only_with_context.items() if is_given), next(iter(options), None))
        if given is not None:
            raise ConfigError(f"hoploom.open got {given!r} without a context; give context=hoploom.init() as well")
        if path is None:
            raise ConfigError("path is None, and there is no context; give the path of a store")
        lists = topology or "own"
        return open_store(path, parts=parts, topology=lists, memory=memory, scratch=scratch)  # type: ignore[arg-type]
    options |= {"topology": topology, "memory": memory, "scratch": scratch}
    opening = Opening(None if path is None else Path(path), read_parts(parts), serve, servers, options)
    return open_for(context, context.rank_info, opening, context.closing)


@dataclass(frozen=True)
class Opening:
    """The arguments of `open` with a context."""

    path: Path | None
    parts: tuple[int, ...] | None
    serve: Serve
    servers: str | Sequence[str] | None
    options: Mapping[str, Any] = field(default_factory=dict)  # of connect; without servers, those of open_store count

    @property
    def memory(self) -> int | str | None:
        return self.options.get("memory")

    @property
    def scratch(self) -> str | Path | None:
        return self.options.get("scratch")

    def check(self) -> None:
        """Raise ConfigError for what can never work."""
        known = [*CONNECT, "memory", "scratch"]
        unknown = [name for name in self.options if name not in known]
        if unknown:
            raise ConfigError(f"hoploom.open got {unknown[0]!r}; besides its own arguments it takes {known}")
        if self.options.get("topology") is not None:
            check_topology(self.options["topology"])
        if self.serve not in (True, False, "auto"):
            raise ConfigError(f"serve is {self.serve!r}; give True, False or 'auto'")
        if self.servers and self.serve is True:
            raise ConfigError("serve is True, but there are servers already; leave serve or servers out")
        if self.memory is not None and self.servers and (self.path is None or self.parts == ()):
            raise ConfigError(NO_PARTS)
        if self.scratch is not None and (self.servers or self.serve is True):
            raise ConfigError(NO_SCRATCH)


def open_for(context: Context, place: RankInfo, opening: Opening, closing: ExitStack) -> Store:
    """The store; what has to be closed with it is put on `closing`. All ranks call."""
    opening.check()
    deployment = environment.read_launch_settings()
    store = _open(context, place, deployment, _as_deployed(opening, deployment), closing)
    if deployment.widths:
        from hoploom.deploy.glt_yaml import check_widths  # of a file that only GLT's users have

        check_widths(context, store, deployment.widths)
    return store


def _open(context: Context, place: RankInfo, deployment: LaunchSettings, opening: Opening, closing: ExitStack) -> Store:
    if opening.servers:
        return _with_homes(context, _connected(opening, closing))
    if opening.path is None:
        raise ConfigError("there is no store: path is None and no server is named; give one of them, or hoploom launch")
    num_parts = len(read_manifest(opening.path).parts)
    if opening.serve is True or (opening.serve == "auto" and not place.on_one_host and num_parts > 1):
        if opening.scratch is not None:
            raise ConfigError(NO_SCRATCH)
        return _with_homes(context, _side_by_side(context, _hosts(place, deployment), opening, closing))
    store = open_store(opening.path, parts=opening.parts, memory=opening.memory, scratch=opening.scratch)
    return store if opening.parts is None else _with_homes(context, store)


def _as_deployed(opening: Opening, deployment: LaunchSettings) -> Opening:
    """What `hoploom launch` says wins over the script's path; servers that the script names win over both."""
    options = dict(deployment.security) | {k: v for k, v in opening.options.items() if v is not None}
    opening = replace(opening, options=options)
    if opening.servers or not deployment.servers:
        return opening
    if opening.serve is True:
        raise ConfigError("serve is True, but hoploom launch has started servers; leave serve or its servers out")
    path = None if deployment.store is None else Path(deployment.store)
    parts = deployment.parts if opening.parts is None else opening.parts
    deployed = replace(opening, path=path, parts=parts, servers=deployment.servers)
    deployed.check()
    return deployed


def _connected(opening: Opening, closing: ExitStack, token: str | None = None) -> Store:
    """The store on servers. `token` is that of this run."""
    from hoploom.serve.connect import connect  # loaded where somebody needs it
    from hoploom.serve.security import read_client_security

    assert opening.servers
    given = dict(opening.options)
    if token is not None:
        files = {name: given.pop(name, None) for name in ("ca", "cert", "key")}
        given["security"] = read_client_security(**files, token=token)
    if opening.path is not None and opening.parts == ():  # nothing to map: all hops and rows come from servers
        store = connect(opening.servers, **given | {"made": "here", "memory": None})
    else:
        given |= {} if opening.path is None else {"parts": opening.parts}
        store = connect(opening.servers, opening.path, **given)
    closing.callback(store.close)
    return store


def _leaders(nodes: Sequence[int]) -> list[int]:
    """A rank on each host."""
    return [nodes.index(node) for node in sorted(set(nodes))]


def _with_homes(context: Context, store: Store) -> Store:
    """With what every rank has on its host, for locality."""
    own = [number for number, shard in enumerate(store.shards) if isinstance(shard, Part | OnDisk)]
    homes = tuple(tuple(parts) for parts in gather_json(context, own))
    return replace(store, deployment=replace(store.deployment, homes=homes if any(homes) else ()))


# --- a server beside the trainers of each host ---------------------------------------------------


@dataclass(frozen=True)
class Hosts:
    """How ranks find out on which host they are, and how hosts reach each other."""

    node: int  # of this rank
    meeting: tuple[str, int] | None  # where rank 0 is; None: all on this host

    def address(self, others: Sequence[str]) -> str:
        """This host's address as others reach it; those of `others` are known already."""
        if self.meeting is None:
            return LOOPBACK
        return address_towards(others[0], self.meeting[1]) if others else address_towards(*self.meeting)


def _hosts(place: RankInfo, deployment: LaunchSettings) -> Hosts:
    if place.on_one_host:
        return Hosts(place.rank, None)  # each rank stands for a host of its own
    told = deployment.node if place.node is None else place.node
    node = place.rank // place.local_world_size if told is None else told
    return Hosts(node, (place.address, place.port))


def _side_by_side(context: Context, hosts: Hosts, opening: Opening, closing: ExitStack) -> Store:
    """Start this host's server, once on each host, and connect to all of them."""
    assert opening.path is not None
    nodes = gather_json(context, hosts.node)
    leaders = _leaders(nodes)
    parts = _own_parts(opening, leaders.index(nodes.index(hosts.node)), len(leaders))
    told = gather_json(context, {"parts": parts, "token": secrets.token_urlsafe(32) if context.is_main else ""})
    _check_covered([told[rank]["parts"] for rank in leaders], opening.path)
    token = None if "token_file" in opening.options else told[0]["token"]
    opening = replace(opening, parts=tuple(parts))
    address = _address(context, hosts, leaders)
    if context.is_main and not (is_loopback(address) or "cert" in opening.options or environment.is_quiet()):
        print(NO_TLS, file=sys.stderr, flush=True)
    server = None
    if context.rank in leaders and parts:  # a host may hold none of them
        command, others = _server_command(opening, address), context.after_the_others()
        server = closing.enter_context(LocalServer(command, context.timeout, token=token, before_close=others))
    servers = gather_json(context, "" if server is None else server.address)
    return _connected(replace(opening, servers=[one for one in servers if one]), closing, token)


def _own_parts(opening: Opening, host: int, num_hosts: int) -> list[int]:
    """Those of the user; else those whose files are here, if some are not; else this host's share of all."""
    assert opening.path is not None
    num_parts = len(read_manifest(opening.path).parts)
    if opening.parts is not None:
        return list(opening.parts)
    here = list(held_parts(opening.path))
    if len(here) < num_parts:
        return here
    return [part for part in range(num_parts) if part % num_hosts == host] or [host % num_parts]


def _check_covered(held: Sequence[Sequence[int]], path: Path) -> None:
    missing = set(range(len(read_manifest(path).parts))) - {part for parts in held for part in parts}
    if missing:
        raise ConfigError(f"no host holds part {min(missing)} of {path}, they hold {list(held)}; give parts= on each")


def _address(context: Context, hosts: Hosts, leaders: Sequence[int]) -> str:
    """Where this host listens: the first host only learns from a second one by which way it is reached."""
    first = context.rank == leaders[0] and len(leaders) > 1
    known = gather_json(context, "" if first else hosts.address([]))
    return hosts.address([known[leaders[1]]]) if first else known[context.rank]


def _server_command(opening: Opening, address: str) -> ServerCommand:
    token_file, ca, cert, key = (
        str(opening.options[name]) if name in opening.options else None for name in ("token_file", "ca", "cert", "key")
    )
    security = Security(token_file)
    if cert is not None:
        security = Security(token_file, ca, cert, key, mutual=ca is not None)
    options = ServerOptions(store_memory=None if opening.memory is None else str(opening.memory))
    return ServerCommand(str(opening.path), opening.parts or (), join_address(address, 0), (), security, options)


def read_parts(parts: Sequence[int] | None) -> tuple[int, ...] | None:
    """The parts that a user gives, in order."""
    if parts is None:
        return None
    return tuple(sorted({as_int("a part", part, 0, "give the numbers of parts, e.g. parts=[0]") for part in parts}))
