"""What must hold between the keys of a cluster file, checked before anything starts."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from hoploom.config.document import Document, full_name
from hoploom.deploy.cluster_file import HOSTS, Cluster, Host
from hoploom.errors import ConfigError, StoreError
from hoploom.serve.security import is_loopback


def check(document: Document, cluster: Cluster) -> None:
    """Raise the first thing that cannot be."""
    _check_addresses(document, cluster)
    _check_roles(document, cluster)
    _check_restarts(document, cluster)
    _check_security(document, cluster)
    if cluster.mode != "none":
        _check_store(document, cluster)
        _check_parts(document, cluster)
        _check_listening(document, cluster)
    if cluster.executor == "local":
        for host in cluster.hosts:
            _check_here(document, host)


def number_of_parts(cluster: Cluster) -> int | None:
    """Of the store, where this host sees it."""
    if cluster.store is None or not os.path.exists(cluster.store):
        return None
    from hoploom.store import format as layout

    return len(layout.read_manifest(Path(cluster.store)).parts)


def _name(host: Host, key: str) -> str:
    return full_name((HOSTS, host.name, key))


def _check_addresses(document: Document, cluster: Cluster) -> None:
    unnamed = [host for host in cluster.hosts if not host.address]
    if unnamed and cluster.executor in ("local", "ssh"):
        way_out = 'give their names, e.g. hosts = ["gpu1", "gpu2"]'
        message = (
            f"hosts is {len(cluster.hosts)}, but executor {cluster.executor} has to know which they are; {way_out}"
        )
        raise document.problem(HOSTS, message)


def _check_roles(document: Document, cluster: Cluster) -> None:
    serving = [host.name for host in cluster.servers]
    if not cluster.trainers:
        raise document.problem(HOSTS, "no host trains: processes is 0 on all of them; give at least one host some")
    if cluster.mode == "none":
        return _check_nothing_is_served(document, cluster)
    if cluster.mode == "worker" and cluster.executor == "kubernetes":
        _check_pods_serve(document, cluster)
    for host in cluster.hosts:
        if host.parts and not host.serves:
            raise document.problem(
                _name(host, "parts"), f"{host.name} has parts, but serves is false; leave one of them out"
            )
        if cluster.mode == "worker" and host.processes and not host.serves:
            message = (
                f'{host.name} trains and does not serve, which mode "worker" has no room for; take "server-client"'
            )
            raise document.problem(_name(host, "serves"), message)
    if not serving:
        is_named = any(host.address for host in cluster.hosts)
        way_out = "write serves = true below those with the store's parts" if is_named else "say how many: servers = 1"
        raise document.problem("mode", f'mode is "server-client", but no host serves; {way_out}')


def _check_nothing_is_served(document: Document, cluster: Cluster) -> None:
    names = ["store"] if cluster.store is not None else []
    for name in [*names, *_of_servers(document, cluster, ("serves", "parts", "port"))]:
        way_out = "leave it out, or give a store and another mode"
        raise document.problem(name, f'{name} has no say in mode "none", where no server is started; {way_out}')


def _check_pods_serve(document: Document, cluster: Cluster) -> None:
    """The first trainer of each pod starts a server, which no key of this file reaches."""
    for name in _of_servers(document, cluster, ("parts", "port")):
        message = f'{name} has no say on Kubernetes in mode "worker", where trainers start the servers beside them'
        raise document.problem(name, f'{message}; leave it out, or take mode = "server-client"')


def _of_servers(document: Document, cluster: Cluster, keys: Sequence[str]) -> Iterator[str]:
    """The keys that are set and about servers: these of hosts, and all of their section."""
    names = ((_name(host, key), getattr(host, key)) for host in cluster.hosts for key in keys)
    yield from (name for name, value in names if value and name in document.where)
    yield from (name for name in document.where if name.startswith("server."))


def _check_restarts(document: Document, cluster: Cluster) -> None:
    """With several hosts torch's agents count restarts each for itself, and their trainers may then never meet."""
    if cluster.max_restarts and len(cluster.trainers) > 1:
        message = (
            f"max_restarts is {cluster.max_restarts}, but {len(cluster.trainers)} hosts train, which torchrun does not"
        )
        way_out = "bring together again reliably; leave it out, and launch once more with train run.toml --resume"
        raise document.problem("max_restarts", f"{message} {way_out}")


def _check_store(document: Document, cluster: Cluster) -> None:
    if cluster.store is None:
        message = f'mode is "{cluster.mode}", but there is no store to serve; add a line such as store = "graph.store"'
        raise document.problem("mode", message)
    try:
        if cluster.executor == "local" and number_of_parts(cluster) is None:
            message = f"store is {cluster.store}, which does not exist; `hoploom partition` writes one"
            raise document.problem("store", message)
    except StoreError as error:
        raise document.problem("store", f"store is {cluster.store}: {error}") from error


def _check_parts(document: Document, cluster: Cluster) -> None:
    with_parts = [host for host in cluster.servers if host.parts]
    without = [host.name for host in cluster.servers if not host.parts]
    if not with_parts:
        return
    if without:
        raise document.problem(
            HOSTS, f"{with_parts[0].name} has parts and {without[0]} has none; give all of them some, or none"
        )
    num_parts = number_of_parts(cluster)
    for host in with_parts:
        for part in host.parts:
            if num_parts is not None and part >= num_parts:
                message = f"{_name(host, 'parts')} has {part}, but {cluster.store} has parts 0 to {num_parts - 1} only"
                raise document.problem(_name(host, "parts"), f"{message}; give some of those")
    served = {part for host in with_parts for part in host.parts}
    missing = sorted(set(range(num_parts or max(served) + 1)) - served)
    if missing:
        raise document.problem(HOSTS, f"no host has part {missing[0]} of the store; add it to the parts of one of them")


def _check_security(document: Document, cluster: Cluster) -> None:
    security = cluster.security
    pair = {"cert": security.cert, "private_key": security.private_key, "ca": security.ca}
    missing = [name for name, path in pair.items() if path is None]
    if 0 < len(missing) < len(pair):
        present = next(name for name, path in pair.items() if path is not None)
        message = f"security.{present} is given without security.{missing[0]}; `hoploom certs` writes all three"
        raise document.problem(f"security.{present}", message)
    if security.mutual and missing:
        message = "security.mutual needs security.ca, cert and private_key; `hoploom certs` writes them"
        raise document.problem("security.mutual", message)


def _check_listening(document: Document, cluster: Cluster) -> None:
    security = cluster.security
    if security.token_file or security.ca or security.insecure:
        return
    for host in cluster.servers:
        if not is_loopback(host.address):
            where = host.address or "their addresses"
            message = f"servers listen on {where}, which others reach, without a token or a certificate"
            raise document.problem(
                "security", f"{message}; give token_file in [security], or let `hoploom certs` make some"
            )


# --- on this host --------------------------------------------------------------------------------


def _check_here(document: Document, host: Host) -> None:
    if not is_loopback(host.address):
        message = f"executor is local, but {host.name} has the address {host.address}, which others reach, too"
        raise document.problem(HOSTS, f'{message}; give address = "127.0.0.1", or take executor ssh')
    if not os.path.isdir(host.folder):
        way_out = "make it first, or give another"
        raise _about(document, host, "folder", f"folder is {host.folder}, which is no directory; {way_out}")
    if shutil.which(host.python) is None:
        way_out = "give the path of one with hoploom installed"
        raise _about(document, host, "python", f"python is {host.python}, which is no program; {way_out}")


def _about(document: Document, host: Host, key: str, message: str) -> ConfigError:
    """Where the host's own key is, else the one of all hosts."""
    own = _name(host, key)
    return document.problem(own if own in document.where else key, message)
