"""Read a cluster file, fill in the keys that it leaves out, and raise ConfigError for a cluster that cannot work.

Servers get parts in order, and hosts that share an address get consecutive ports. Files of this host are checked before
anything starts; other hosts check their own.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from hoploom.config.rules import YAML_SUFFIXES, Document, absolute, full_name, read_document
from hoploom.config.values import is_loopback, join_address, split_address
from hoploom.deploy.cluster_file import HEADINGS, HOSTS, Cluster, Host, ParsedClusterFile, keys_of
from hoploom.errors import ConfigError, StoreError

RENDEZVOUS_PORT = 29500  # torchrun's own
FINDS_PORTS = ("local", "slurm")  # executors that choose the ports that are not given
PICKS_HOSTS = {
    "slurm": "Slurm picks the hosts, and trainers meet on the first; leave it out, --master-port gives the port",
    "kubernetes": "Kubeflow says where trainers meet; leave it out",
}


@dataclass(frozen=True)
class Overrides:
    """Options of the command line, which override the file."""

    executor: str | None = None
    master_addr: str | None = None
    master_port: int | None = None


def read_cluster(path: str | Path, overrides: Overrides | None = None) -> Cluster:
    """Read a cluster file, or a file for the launcher of GraphLearn-for-PyTorch; return its cluster."""
    if Path(path).suffix not in (".toml", *YAML_SUFFIXES):
        raise ConfigError(f"{path} is no cluster file by its name; name it .toml, .yaml or .yml")
    document = read_document(path, HEADINGS, absent="write one; docs/launch.md shows how")
    return _resolve(keys_of(document), overrides or Overrides())


def _resolve(parsed: ParsedClusterFile, overrides: Overrides) -> Cluster:
    """Return the cluster that the keys describe. Parts and rendezvous come last, because they depend on all hosts."""
    top, document = parsed.top, parsed.document
    executor = overrides.executor or top.executor
    if executor is None:
        is_local = all(is_loopback(host.address or host.name) for host in parsed.hosts)
        executor = "slurm" if parsed.hosts[0].address == "" else "local" if is_local else "ssh"
    mode = top.mode or ("none" if top.store is None else "worker")
    folder, sections = document.folder, parsed.sections
    if top.store is not None and "://" in top.store:
        what = f"store is {top.store}, which servers cannot open as it is"
        way_out = "bring each host its parts with `hoploom fetch`, and give the path there"
        raise document.problem("store", f"{what}; {way_out}")
    hosts = tuple(_host(parsed, host, executor, mode) for host in _counted(parsed))
    cluster = Cluster(
        hosts=_with_ports(parsed, hosts, executor),
        store=None if top.store is None else str(absolute(folder, top.store)),
        executor=executor,  # type: ignore[arg-type]  # rules.choice has checked it
        mode=mode,  # type: ignore[arg-type]
        rendezvous="",
        max_restarts=top.max_restarts,
        security=_with_absolute(sections["security"], ("token_file", "ca", "cert", "private_key"), folder),
        server=sections["server"],
        ssh=_with_absolute(sections["ssh"], ("config", "identity"), folder),
        slurm=sections["slurm"],
        kubernetes=sections["kubernetes"],
        file=document.where[""],
    )
    for name, message in _mistakes(document, cluster):
        raise document.problem(name, message)
    if cluster.servers:
        num_parts = _number_of_parts(document, cluster)
        for name, message in _about_parts(cluster, num_parts):
            raise document.problem(name, message)
        cluster = _with_parts(cluster, num_parts)
    return replace(cluster, rendezvous=_rendezvous(parsed, cluster, overrides))


def _counted(parsed: ParsedClusterFile) -> tuple[Host, ...]:
    """Return the hosts. If the file has only their number, the first `servers` of them get a graph server."""
    hosts, servers = parsed.hosts, parsed.top.servers
    if servers is None:
        return hosts
    if hosts[0].address != "":
        message = f"servers is {servers}, but hosts have names; write serves = true below those that serve"
        raise parsed.document.problem("servers", message)
    if parsed.top.mode != "server-client":
        message = f'servers is {servers}, which is for mode = "server-client"; leave it out'
        raise parsed.document.problem("servers", message)
    if servers >= len(hosts):
        raise parsed.document.problem("servers", f"servers is {servers} of {len(hosts)} hosts; leave some to train")
    return tuple(replace(host, serves=i < servers) for i, host in enumerate(hosts))


def _host(parsed: ParsedClusterFile, host: Host, executor: str, mode: str) -> Host:
    """Return a host with values for the keys that the file leaves out."""
    top, folder = parsed.top, parsed.document.folder
    address = host.name if host.address is None else host.address
    serves = host.serves
    if serves is None:
        serves = mode == "worker" or (mode == "server-client" and bool(host.parts))
    default = 0 if mode == "server-client" and serves else top.processes
    processes = default if host.processes is None else host.processes
    in_container = executor == "kubernetes" or (executor == "slurm" and parsed.sections["slurm"].in_container)
    python = (
        host.python or top.python or ("python3" if in_container else sys.executable)
    )  # by default, the same path as on this host
    here = "/" if executor == "kubernetes" else str(Path.cwd())
    return replace(
        host,
        address=address,
        ssh=host.ssh or address,
        processes=max(1, len(host.devices or ())) if processes is None else processes,
        serves=serves,
        port=host.port or 0,
        store=None if host.store is None else str(absolute(folder, host.store)),
        parts=host.parts or (),
        python=str(absolute(folder, python)) if "/" in python else python,
        folder=str(absolute(folder, host.folder or top.folder or here)),
        environment=top.environment | host.environment,
    )


def _with_ports(parsed: ParsedClusterFile, hosts: tuple[Host, ...], executor: str) -> tuple[Host, ...]:
    """Return the hosts with a port for each server.

    It is the file's, else the next free number; 0 if the executor chooses later.
    """
    is_given = "server.port" in parsed.document.where
    base = 0 if executor in FINDS_PORTS and not is_given else parsed.sections["server"].port
    taken: dict[tuple[str, int], str] = {}  # (address, port) -> host name
    for host in hosts:
        if host.serves and host.port:
            other = taken.setdefault((host.address or host.name, host.port), host.name)
            if other != host.name:
                message = f"port {host.port} of {host.address} is {other}'s already; give each its own"
                raise parsed.document.problem(full_name((HOSTS, host.name, "port")), message)
    found = []
    for host in hosts:
        if host.serves and not host.port and base:
            address = host.address or host.name
            port = next(port for port in count(base) if (address, port) not in taken)
            taken[address, port] = host.name
            host = replace(host, port=port)
        found.append(host)
    return tuple(found)


def _with_parts(cluster: Cluster, num_parts: int | None) -> Cluster:
    """Return the cluster with parts for each server: the file's, else equal shares.

    If there are more servers than parts, some hold replicas.
    """
    names = [host.name for host in cluster.servers]
    if any(host.parts for host in cluster.servers):
        return cluster
    num_parts = num_parts or len(names)
    shares = {
        name: tuple(part for part in range(num_parts) if part * len(names) // num_parts == i) or (i % num_parts,)
        for i, name in enumerate(names)
    }
    return replace(cluster, hosts=tuple(replace(host, parts=shares.get(host.name, ())) for host in cluster.hosts))


def _rendezvous(parsed: ParsedClusterFile, cluster: Cluster, overrides: Overrides) -> str:
    """Return the address where torchrun's processes meet. On Slurm and Kubernetes, the user cannot choose it."""
    given = {"rendezvous": parsed.top.rendezvous, "--master-addr": overrides.master_addr}
    if cluster.executor == "kubernetes":
        given["--master-port"] = None if overrides.master_port is None else str(overrides.master_port)
    for name, value in given.items():
        if value is not None and cluster.executor in PICKS_HOSTS:
            raise parsed.document.problem(name, f"{name} is {value}, but {PICKS_HOSTS[cluster.executor]}")
    first = cluster.trainers[0]
    address, port = first.address or first.name, 0 if cluster.executor in FINDS_PORTS else RENDEZVOUS_PORT
    if parsed.top.rendezvous:
        address, port = split_address(parsed.top.rendezvous)
    return join_address(overrides.master_addr or address, overrides.master_port or port)


def _with_absolute(options: Any, names: Sequence[str], folder: Path) -> Any:
    """Return `options` with the paths `names` made absolute; in the file, they are relative to `folder`."""
    paths = {name: getattr(options, name) for name in names}
    return replace(options, **{name: str(absolute(folder, path)) for name, path in paths.items() if path is not None})


# --- mistakes: each check yields (key, message), where the message has a hint --------------------


def _number_of_parts(document: Document, cluster: Cluster) -> int | None:
    """Return the number of parts of the store; None if the store is not on this host."""
    stores = (cluster.store, *(host.store for host in cluster.hosts))
    here = next((store for store in stores if store is not None and os.path.exists(store)), None)
    if here is None:
        return None
    from hoploom.store.format import read_manifest  # brings torch, which most launches do without

    try:
        return len(read_manifest(Path(here)).parts)
    except StoreError as error:
        name, what = ("store", f"store is {cluster.store}: ") if cluster.store else (HOSTS, "")
        raise document.problem(name, f"{what}{error}") from error


def _mistakes(document: Document, cluster: Cluster) -> Iterator[tuple[str, str]]:
    for host in cluster.hosts:
        if not host.address and cluster.executor in ("local", "ssh"):
            what = f"hosts is {len(cluster.hosts)}, but executor {cluster.executor} has to know which they are"
            yield HOSTS, f'{what}; give their names, e.g. hosts = ["gpu1", "gpu2"]'
        if cluster.executor == "local" and not is_loopback(host.address):
            what = f"executor is local, but {host.name} has the address {host.address}, which others reach, too"
            yield HOSTS, f'{what}; give address = "127.0.0.1", or take executor ssh'
    if not cluster.trainers:
        yield HOSTS, "no host trains: processes is 0 on all of them; give at least one host some"
    if cluster.mode == "none" or (cluster.mode == "worker" and cluster.executor == "kubernetes"):
        yield from _about_server_keys(document, cluster)
    if cluster.mode != "none":
        yield from _about_roles(cluster)
    if cluster.max_restarts and len(cluster.trainers) > 1:  # torch's agents count restarts each for itself
        what = f"max_restarts is {cluster.max_restarts}, but {len(cluster.trainers)} hosts train"
        way_out = "leave it out, and launch once more with train run.toml --resume"
        yield "max_restarts", f"{what}, which torchrun does not bring together again reliably; {way_out}"
    security = cluster.security
    files = {"cert": security.cert, "private_key": security.private_key, "ca": security.ca}
    present = [name for name, path in files.items() if path is not None]
    missing = [name for name in files if name not in present]
    if present and missing:
        what = f"security.{present[0]} is given without security.{missing[0]}"
        yield f"security.{present[0]}", f"{what}; docs/security.md has the commands"
    if security.mutual and missing:
        yield "security.mutual", "security.mutual needs security.ca, cert and private_key; give all three"
    if cluster.mode != "none":
        yield from _about_store(cluster)


def _name(host: Host, key: str) -> str:
    return full_name((HOSTS, host.name, key))


def _about_server_keys(document: Document, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield (key, error text) for each server key without effect, in mode "none" or, on Kubernetes, in "worker"."""
    where, keys = 'in mode "none", where no server is started', ["serves", "parts", "port"]
    if cluster.mode == "worker":
        where, keys = 'on Kubernetes in mode "worker", where trainers start the servers', ["parts", "port"]
    names = [_name(host, key) for host in cluster.hosts for key in keys if getattr(host, key)]
    names += ["store"] if cluster.mode == "none" else []
    names += [_name(host, "store") for host in cluster.hosts]
    for name in document.where:
        if name in names or name.startswith("server."):
            yield name, f"{name} has no effect {where}; leave it out, or take another mode"


def _about_roles(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield (key, error text) for hosts that lack a server they need: hosts with parts, and trainers in mode "worker".

    Also yield one if no host has a server.
    """
    for host in cluster.hosts:
        if host.parts and not host.serves:
            yield _name(host, "parts"), f"{host.name} has parts, but serves is false; leave one of them out"
        if cluster.mode == "worker" and host.processes and not host.serves:
            what = f'{host.name} trains and does not serve, which mode "worker" has no room for'
            yield _name(host, "serves"), f'{what}; take "server-client"'
    if not cluster.servers:
        is_named = any(host.address for host in cluster.hosts)
        way_out = "write serves = true below those with the store's parts" if is_named else "say how many: servers = 1"
        yield "mode", f'mode is "server-client", but no host serves; {way_out}'


def _about_store(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield (key, error text) for servers without a store, and store paths that have no effect or do not exist."""
    for host in (host for host in cluster.servers if not (host.store or cluster.store)):
        what = f'mode is "{cluster.mode}", but there is no store to serve on {host.name}'
        yield "mode", f'{what}; add a line such as store = "graph.store"'
    fixed = "on Kubernetes" * (cluster.executor == "kubernetes")
    for host in (host for host in cluster.hosts if host.store is not None):
        if why := fixed or "where no server runs" * (not host.serves):
            yield _name(host, "store"), f"{_name(host, 'store')} has no effect {why}; leave it out"
    for host in cluster.servers if cluster.executor == "local" else ():
        store, name = host.store or str(cluster.store), _name(host, "store") if host.store else "store"
        if not os.path.exists(store):
            yield name, f"{name} is {store}, which does not exist; `hoploom partition` writes one"


def _about_parts(cluster: Cluster, num_parts: int | None) -> Iterator[tuple[str, str]]:
    """Yield (key, error text) for parts that do not exist or that no host has, and for unprotected servers."""
    with_parts = [host for host in cluster.servers if host.parts]
    without = [host.name for host in cluster.servers if not host.parts]
    if with_parts and without:
        yield HOSTS, f"{with_parts[0].name} has parts and {without[0]} has none; give all of them some, or none"
    for host in with_parts:
        for part in host.parts:
            if num_parts is not None and part >= num_parts:
                store, name = host.store or cluster.store, _name(host, "parts")
                what = f"{name} has {part}, but {store} has parts 0 to {num_parts - 1} only"
                yield name, f"{what}; give some of those"
    served = {part for host in with_parts for part in host.parts}
    missing = set(range(num_parts or max(served) + 1)) - served if served else set()
    if missing:
        yield HOSTS, f"no host has part {min(missing)} of the store; add it to the parts of one of them"
    security = cluster.security
    if not (security.token_file or security.ca or security.insecure):
        for host in cluster.servers:
            if not is_loopback(host.address):
                what = f"servers listen on {host.address or 'their addresses'}, which others reach"
                way_out = "give token_file in [security], or certificates"
                yield "security", f"{what}, without a token or a certificate; {way_out}"
