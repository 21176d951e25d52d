"""What a cluster file leaves out is worked out from the rest, and what cannot be is refused: Written -> Cluster.

Parts are dealt to servers in order, ports counted up on hosts that share an address. What is on other hosts' disks is
left for them to check; on this host it is checked here, before anything starts.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hoploom.config.document import Document, full_name
from hoploom.deploy.checks import check, number_of_parts
from hoploom.deploy.cluster_file import HOSTS, Cluster, Host, HostKeys, Security, SshOptions, TopKeys
from hoploom.serve.address import join_address, split_address
from hoploom.serve.security import is_loopback

RENDEZVOUS_PORT = 29500  # torchrun's own
FINDS_PORTS = ("local", "slurm")  # of those that are not given
PICKS_HOSTS = {
    "slurm": "Slurm picks the hosts, and trainers meet on the first",
    "kubernetes": "Kubeflow says where trainers meet",
}
MasterAddress = tuple[str | None, int | None]


@dataclass(frozen=True)
class Written:
    """The keys of a cluster file, each checked by itself."""

    document: Document
    top: TopKeys
    hosts: Mapping[str, HostKeys] | int
    sections: Mapping[str, Any]


def resolve(written: Written, executor: str | None = None, master: MasterAddress = (None, None)) -> Cluster:
    """The cluster that is meant; `executor` and `master` are the command line's, which win."""
    top, document = written.top, written.document
    given = _named(written)
    executor = executor or top.executor or _executor(written.hosts, given)
    mode = top.mode or ("none" if top.store is None else "worker")
    security = _absolute_paths(written.sections["security"], document.folder)
    hosts = tuple(_host(written, name, keys, (executor, mode)) for name, keys in given.items())
    cluster = Cluster(
        hosts=_with_ports(written, hosts, given, executor),
        store=None if top.store is None else _absolute(top.store, document.folder),
        executor=executor,  # type: ignore[arg-type]  # rules.choice has checked it
        mode=mode,  # type: ignore[arg-type]
        rendezvous="",
        max_restarts=top.max_restarts,
        security=security,
        server=written.sections["server"],
        ssh=_absolute_config(written),
        slurm=written.sections["slurm"],
        kubernetes=written.sections["kubernetes"],
        file=document.where[""],
    )
    check(document, cluster)
    _check_rendezvous(written, cluster, master)
    return replace(cluster, hosts=_with_parts(cluster, given), rendezvous=_rendezvous(cluster, top, master))


def _named(written: Written) -> Mapping[str, HostKeys]:
    """Hosts without names get some: the first ones serve."""
    servers = written.top.servers
    if not isinstance(written.hosts, int):
        if servers is not None:
            message = f"servers is {servers}, but hosts have names; write serves = true below those that serve"
            raise written.document.problem("servers", message)
        return written.hosts
    if servers is not None and written.top.mode != "server-client":
        message = f'servers is {servers}, which is for mode = "server-client"; leave it out'
        raise written.document.problem("servers", message)
    if servers is not None and servers >= written.hosts:
        raise written.document.problem("servers", f"servers is {servers} of {written.hosts} hosts; leave some to train")
    serves = None if servers is None else range(servers)
    return {
        f"host{i}": HostKeys(address="", serves=None if serves is None else i in serves) for i in range(written.hosts)
    }


def _executor(hosts: Mapping[str, HostKeys] | int, given: Mapping[str, HostKeys]) -> str:
    if isinstance(hosts, int):
        return "slurm"
    return "local" if all(is_loopback(keys.address or name) for name, keys in given.items()) else "ssh"


def _host(written: Written, name: str, keys: HostKeys, kind: tuple[str, str]) -> Host:
    executor, mode = kind
    top, folder = written.top, written.document.folder
    serves = _serves(keys, mode)
    address = name if keys.address is None else keys.address
    default = 0 if mode == "server-client" and serves else top.processes
    processes = default if keys.processes is None else keys.processes
    python = keys.python or top.python or _python(written, executor)
    here = "/" if executor == "kubernetes" else str(Path.cwd())
    return Host(
        name=name,
        address=address,
        ssh=keys.ssh or address,
        ssh_port=keys.ssh_port,
        processes=max(1, len(keys.devices or ())) if processes is None else processes,
        serves=serves,
        port=keys.port or 0,
        parts=keys.parts or (),
        devices=keys.devices,
        python=_absolute(python, folder) if "/" in python else python,
        folder=_absolute(keys.folder or top.folder or here, folder),
        environment=top.environment | keys.environment,
    )


def _serves(keys: HostKeys, mode: str) -> bool:
    if keys.serves is not None:
        return keys.serves
    return mode == "worker" or (mode == "server-client" and bool(keys.parts))


def _python(written: Written, executor: str) -> str:
    """This one's path is taken to be the others', too, but for containers."""
    in_container = executor == "kubernetes" or (executor == "slurm" and written.sections["slurm"].container_image)
    return "python3" if in_container else sys.executable


def _with_ports(
    written: Written, hosts: tuple[Host, ...], given: Mapping[str, HostKeys], executor: str
) -> tuple[Host, ...]:
    """A port for each server: its own, else the next one of its address; 0 where that is found out at the start."""
    is_asked = "server.port" in written.document.where
    base: int = 0 if executor in FINDS_PORTS and not is_asked else written.sections["server"].port
    taken: dict[str, dict[int, str]] = {}
    for host in hosts:
        if not host.serves or not host.port:
            continue
        ports = taken.setdefault(host.address or host.name, {})
        if host.port in ports:
            message = f"port {host.port} of {host.address} is {ports[host.port]}'s already; give each its own"
            raise written.document.problem(full_name((HOSTS, host.name, "port")), message)
        ports[host.port] = host.name
    return tuple(_with_port(host, base, taken) for host in hosts)


def _with_port(host: Host, base: int, taken: dict[str, dict[int, str]]) -> Host:
    if not host.serves or host.port or not base:
        return host
    ports = taken.setdefault(host.address or host.name, {})
    port = next(port for port in range(base, base + len(ports) + 1) if port not in ports)
    ports[port] = host.name
    return replace(host, port=port)


def _with_parts(cluster: Cluster, given: Mapping[str, HostKeys]) -> tuple[Host, ...]:
    """In order, each server an equal share; with more servers than parts, several have the same."""
    names = [host.name for host in cluster.servers]
    if any(given[name].parts for name in names):
        return cluster.hosts
    num_parts = number_of_parts(cluster) or len(names)
    dealt = {
        name: tuple(part for part in range(num_parts) if part * len(names) // num_parts == i) or (i % num_parts,)
        for i, name in enumerate(names)
    }
    return tuple(replace(host, parts=dealt.get(host.name, ())) for host in cluster.hosts)


def _rendezvous(cluster: Cluster, top: TopKeys, master: MasterAddress) -> str:
    first = cluster.trainers[0]
    address, port = first.address or first.name, 0 if cluster.executor in FINDS_PORTS else RENDEZVOUS_PORT
    if top.rendezvous:
        address, port = split_address(top.rendezvous)
    return join_address(master[0] or address, master[1] or port)


def _check_rendezvous(written: Written, cluster: Cluster, master: MasterAddress) -> None:
    """What is given, and who is started by somebody that chooses it."""
    given = {"rendezvous": written.top.rendezvous, "--master-addr": master[0]}
    if cluster.executor == "kubernetes":
        given["--master-port"] = None if master[1] is None else str(master[1])
    for name, value in given.items():
        if value is not None and cluster.executor in PICKS_HOSTS:
            message = f"{name} is {value}, but {PICKS_HOSTS[cluster.executor]}; leave it out"
            way_out = ", --master-port gives the port" if cluster.executor == "slurm" else ""
            raise written.document.problem(name, message + way_out)


# --- paths ---------------------------------------------------------------------------------------


def _absolute(path: str, folder: Path) -> str:
    return os.path.abspath(folder / path)


def _absolute_paths(security: Security, folder: Path) -> Security:
    def written_out(path: str | None) -> str | None:
        return None if path is None else _absolute(path, folder)

    return replace(
        security,
        token_file=written_out(security.token_file),
        ca=written_out(security.ca),
        cert=written_out(security.cert),
        private_key=written_out(security.private_key),
    )


def _absolute_config(written: Written) -> SshOptions:
    options: SshOptions = written.sections["ssh"]
    if options.config is None:
        return options
    return replace(options, config=_absolute(options.config, written.document.folder))
