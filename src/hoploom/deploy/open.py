"""Open a store: from files, from servers on other hosts, or from a server beside each host's trainers.

Ranks exchange their parts, the addresses of servers and the token by `gather_json`. So if one rank fails, the other
ranks end within the context's deadline, with an error that names it.
"""

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from hoploom.config.rules import GPU
from hoploom.config.values import as_int, is_loopback, join_address
from hoploom.deploy.cluster_file import Host, Process, Security, ServerOptions
from hoploom.deploy.guarded import Executor, GuardedProcess, Supervisor
from hoploom.deploy.programs import ServerCommand
from hoploom.errors import ConfigError, PeerError
from hoploom.ranks import environment
from hoploom.ranks.context import Context, gather_json
from hoploom.ranks.environment import LaunchSettings
from hoploom.serve import SERVING
from hoploom.store import Store, open_store
from hoploom.store.base import Part
from hoploom.store.budget import NO_PARTS
from hoploom.store.format import read_manifest
from hoploom.store.on_disk import OnDisk
from hoploom.store.store import check_topology, held_parts
from hoploom.system import Closing

Serve = bool | str  # a GPU, or "auto"
NO_SCRATCH = "scratch is set, but parts are on other hosts; it is for a store of which all parts are here: leave it out"
NO_TLS = (
    "hoploom: warning: the graph servers beside the trainers send without TLS, so others on the network path can read "
    "what they send; give hoploom.open cert=, key= and ca= (docs/security.md has the commands), or set them in "
    "[security] of the cluster file"
)
AFTER_TERMINATE = 10.0  # seconds between SIGTERM and SIGKILL of a server
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
    store. Splits have only the members in these parts. Reading anything of another part raises a StoreError. With
    `topology="all"`, the edges of other parts are opened too, but not their fields, so sampling sees every edge.

    `memory` is for a graph larger than memory: it limits the bytes of the store that this process holds, besides the
    batches. Other bytes are read from disk when batches need them, many reads at once. Batches stay the same. `scratch`
    is a folder on a disk with free space: rows for later batches are copied there in the order of the batches.

    >>> store = hoploom.open("papers.store")
    >>> store = hoploom.open("papers.store", parts=[2])
    >>> store = hoploom.open("papers.store", parts=[2], topology="all")
    >>> store = hoploom.open("papers.store", memory="6GB")
    >>> store = hoploom.open("papers.store", memory="6GB", scratch="/mnt/nvme")

    With `context`, this opens the right store for the current deployment. All ranks call it, and the store is closed
    with the context. On one host it maps the files; under `hoploom launch` it does what the cluster file says. On
    several hosts without servers, it starts a server beside the trainers of each host, for the host's share of the
    parts or for `parts`. `serve=True` starts a server for each rank of a single host; `serve="cuda"` too, and places
    its parts on the GPU of the rank that starts it. `servers`, `topology` and `options` are those of `hoploom.connect`.

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
    numbers = None
    if parts is not None:
        numbers = tuple(
            sorted({as_int("a part", part, 0, "give the numbers of parts, e.g. parts=[0]") for part in parts})
        )
    opening = Opening(None if path is None else Path(path), numbers, serve, servers, options)
    opening.check()
    settings = environment.read_launch_settings()
    return _open_deployed(context, settings, _with_settings(opening, settings))


@dataclass(frozen=True)
class Opening:
    """The arguments of a call of `open` that has a context."""

    path: Path | None
    parts: tuple[int, ...] | None
    serve: Serve
    servers: str | Sequence[str] | None
    options: Mapping[str, Any]  # for `connect`; if files are opened, only `memory` and `scratch` matter

    @property
    def device(self) -> str | None:
        """The GPU that `serve` names for the servers to start."""
        return GPU.read(self.serve) if isinstance(self.serve, str) else None

    @property
    def starts_servers(self) -> bool:
        return self.serve is True or self.device is not None

    def check(self) -> None:
        """Raise ConfigError for unknown, wrong or contradictory arguments."""
        known = [*CONNECT, "memory", "scratch"]
        unknown = [name for name in self.options if name not in known]
        if unknown:
            raise ConfigError(f"hoploom.open got {unknown[0]!r}; besides its own arguments it takes {known}")
        if self.options.get("topology") is not None:
            check_topology(self.options["topology"])
        if self.serve not in (True, False, "auto") and self.device is None:
            raise ConfigError(f"serve is {self.serve!r}; give True, False, 'auto' or a GPU such as 'cuda'")
        if self.servers and self.starts_servers:
            raise ConfigError(f"serve is {self.serve!r}, but there are servers already; leave serve or servers out")
        if self.options.get("memory") is not None and self.servers and (self.path is None or self.parts == ()):
            raise ConfigError(NO_PARTS)
        if self.options.get("scratch") is not None and (self.servers or self.starts_servers):
            raise ConfigError(NO_SCRATCH)


def _with_settings(opening: Opening, settings: LaunchSettings) -> Opening:
    """Return `opening` with the launcher's settings. Its servers and store count only if the script has no servers."""
    options = dict(settings.security) | {k: v for k, v in opening.options.items() if v is not None}
    opening = replace(opening, options=options)
    if opening.servers or not settings.servers:
        return opening
    if opening.starts_servers:
        raise ConfigError(
            f"serve is {opening.serve!r}, but hoploom launch has started servers; leave serve or its servers out"
        )
    path = None if settings.store is None else Path(settings.store)
    parts = settings.parts if opening.parts is None else opening.parts
    merged = replace(opening, path=path, parts=parts, servers=settings.servers)
    merged.check()
    return merged


def _open_deployed(context: Context, settings: LaunchSettings, opening: Opening) -> Store:
    """Open the store from servers that already run, from servers that the ranks start, or from files on this host."""
    if opening.servers:
        return _with_layout(context, _connected(context, opening))
    if opening.path is None:
        raise ConfigError("there is no store: path is None and no server is named; give one of them, or hoploom launch")
    memory, scratch = (opening.options.get(name) for name in ("memory", "scratch"))
    num_parts = len(read_manifest(opening.path).parts)
    on_several_hosts = not context.rank_info.on_one_host and num_parts > 1
    if opening.starts_servers or (opening.serve == "auto" and on_several_hosts):
        if scratch is not None:
            raise ConfigError(NO_SCRATCH)
        return _with_layout(context, _open_beside_servers(context, settings, opening, num_parts))
    store = open_store(opening.path, parts=opening.parts, memory=memory, scratch=scratch)
    return store if opening.parts is None else _with_layout(context, store)


def _connected(context: Context, opening: Opening, token: str | None = None) -> Store:
    """Return a store that uses the servers of `opening`. If this run has started them, `token` is their token."""
    from hoploom.serve.connect import connect  # takes time to import
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
    context.closing.callback(store.close)
    return store


def _with_layout(context: Context, store: Store) -> Store:
    """Return the store with a list of the parts that each rank has on its host. Loaders with locality=True use it."""
    own = [number for number, shard in enumerate(store.shards) if isinstance(shard, Part | OnDisk)]
    homes = tuple(tuple(parts) for parts in gather_json(context, own))
    return replace(store, deployment=replace(store.deployment, homes=homes if any(homes) else ()))


# --- a server beside the trainers of each host ---------------------------------------------------


def _open_beside_servers(context: Context, settings: LaunchSettings, opening: Opening, num_parts: int) -> Store:
    """On each host that has parts, let the first rank start a server; then connect to all servers."""
    info, path = context.rank_info, opening.path
    assert path is not None
    told = settings.node if info.node is None else info.node
    node = info.rank // info.local_world_size if told is None else told
    nodes = gather_json(context, info.rank if info.on_one_host else node)  # on one host, each rank is its own host
    leaders = [nodes.index(one) for one in sorted(set(nodes))]  # the first rank of each host
    parts = list(held_parts(path) if opening.parts is None else opening.parts)
    if opening.parts is None and len(parts) == num_parts:  # all are here: each host takes a round-robin share
        host = leaders.index(nodes.index(nodes[context.rank]))
        parts = [part for part in range(num_parts) if part % len(leaders) == host] or [host % num_parts]
    shared = gather_json(context, {"parts": parts, "token": secrets.token_urlsafe(32) if context.is_main else ""})
    held = [shared[rank]["parts"] for rank in leaders]
    missing = set(range(num_parts)) - {part for one in held for part in one}
    if missing:
        raise ConfigError(f"no host holds part {min(missing)} of {path}, they hold {held}; give parts= on each")
    token = None if "token_file" in opening.options else shared[0]["token"]
    address = context.host_address
    if context.is_main and not (is_loopback(address) or "cert" in opening.options or environment.is_quiet()):
        print(NO_TLS, file=sys.stderr, flush=True)
    opening = replace(opening, parts=tuple(parts))
    server, options = None, opening.options
    if context.rank in leaders and parts:  # a host may hold no part
        files = {name: str(options[name]) for name in ("token_file", "ca", "cert", "key") if name in options}
        security = Security(files.get("token_file"))
        if "cert" in files:
            ca, key = files.get("ca"), files.get("key")
            security = replace(security, ca=ca, cert=files["cert"], private_key=key, mutual=ca is not None)
        limits = ServerOptions(
            store_memory=str(options["memory"]) if "memory" in options else None,
            device=str(context.device) if opening.device == context.device.type else opening.device,
        )
        command = ServerCommand(str(path), parts, join_address(address, 0), (), security, limits)
        others = context.after_the_others()
        server = context.closing.enter_context(LocalServer(command, context.timeout, token=token, before_close=others))
    servers = gather_json(context, "" if server is None else server.address)
    return _connected(context, replace(opening, servers=[one for one in servers if one]), token)


class LocalServer(Closing):
    """A `hoploom serve` process beside this host's trainers, with a token of this run; Ctrl-C does not reach it.

    `before_close` is called first if the block ends without an error.
    """

    def __init__(
        self,
        command: ServerCommand,
        seconds: float,
        python: str = sys.executable,
        *,
        token: str | None = None,
        before_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._before_close = before_close
        host = Host("here", python=sys.executable, folder=os.getcwd())
        process = Process("here/server", host, command.words(python), environment.own_server(token), host.folder)
        self._supervisor = Supervisor()
        try:
            server = self._supervisor.add(GuardedProcess(process, Executor(), _show, self._supervisor.events.put))
            if not self._supervisor.until(lambda: server.ready is not None or server.ended, seconds):
                raise PeerError("the graph server of this host was not ready in time; give hoploom.init more timeout")
            if server.ready is None:
                message = f"the graph server of this host ended with exit code {server.code}; its own words are above"
                raise PeerError(message)
        except BaseException:
            self._supervisor.close()
            raise
        self.address = server.ready.address

    def close(self) -> None:
        """Stop the server; kill it if it does not end in time."""
        try:
            self._supervisor.stop("TERM", AFTER_TERMINATE)
        finally:
            self._supervisor.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._before_close()
        self.close()


def _show(label: str, line: str, *, is_error: bool) -> None:
    """Write a server's line to descriptor 2: threads may call this while the interpreter closes sys.stderr."""
    if not is_error or line.startswith(SERVING):
        return
    rest = f"{line}\n".encode()
    with suppress(OSError):  # nobody reads stderr any more, or not in time: the server's later lines are still taken
        while rest:
            rest = rest[os.write(2, rest) :]
