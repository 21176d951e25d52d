"""Read the YAML file of GraphLearn-for-PyTorch's run_dist_train_sage_sup.py as a cluster file.

Such a file names no store: trainers start without servers and open the store that their command names. The keys
dataset, in_channel and out_channel have no effect.
"""

# ruff: noqa: RUF009  (key() is dataclasses.field)

from dataclasses import dataclass, fields
from typing import Any

from hoploom.config import rules
from hoploom.config.rules import REQUIRED, Document, KeyRule, key, keys_in
from hoploom.config.values import as_key, nearest
from hoploom.deploy.cluster_file import SECTIONS, Host, ParsedClusterFile, SshOptions, TopKeys


def _each(entry: KeyRule) -> KeyRule:
    def read(value: Any) -> list[Any] | None:
        entries = [entry.read(one) for one in value] if isinstance(value, list) else [None]
        return None if None in entries or not entries else entries

    return KeyRule("a list with one entry per node", read, entry=entry)


@dataclass(frozen=True)
class GltKeys:
    """The keys of the file of GLT (GraphLearn-for-PyTorch). Lists have one entry per node."""

    nodes: list[str] = key(REQUIRED, "addresses", _each(rules.HOST), example=["10.0.0.1"])
    python_bins: list[str] = key(REQUIRED, "Pythons", _each(rules.HOST_PATH), example=["/usr/bin/python3"])
    usernames: list[str] = key(REQUIRED, "who logs in", _each(rules.LOGIN), example=["root"])
    dst_paths: list[str] = key(REQUIRED, "working directories", _each(rules.HOST_PATH), example=["/srv/papers"])
    visible_devices: list[tuple[int, ...]] = key(REQUIRED, "GPUs", _each(rules.ids("GPUs")), example=[[0, 1]])
    ports: list[int] | None = key(None, "ports of ssh", _each(rules.PORT))
    node_ranks: list[int] | None = key(None, "the order of the nodes", _each(rules.whole(0)))
    dataset: str | None = key(None, "the data set", rules.TEXT)
    in_channel: int | None = key(None, "features", rules.whole(1))
    out_channel: int | None = key(None, "classes", rules.whole(1))


def keys_of_glt(document: Document) -> ParsedClusterFile:
    """Convert the keys of GLT's file to those of a cluster file; raise ConfigError if they do not fit together."""
    known = [*keys_in(GltKeys), "ssh"]
    unknown = next((name for name in document.parsed if name not in known), None)
    if unknown is not None:
        alike = nearest(unknown, known)
        hint = f"did you mean {alike}?" if alike else "leave it out, or give hosts instead of nodes"
        what = f"unknown key {as_key(unknown)} beside nodes, which GLT's files have"
        raise document.problem(as_key(unknown), f"{what}; {hint}")
    given = GltKeys(**document.section((), owner=GltKeys, tables=["ssh"]))
    count = len(given.nodes)
    for field in fields(given):
        column = getattr(given, field.name)
        if isinstance(column, list) and len(column) != count:
            message = f"{field.name} has {len(column)} entries for {count} nodes; give one per node"
            raise document.problem(field.name, message)
    ranks = given.node_ranks or list(range(count))
    if sorted(ranks) != list(range(count)):
        raise document.problem("node_ranks", f"node_ranks is {ranks}; give each of 0 to {count - 1} once")
    hosts = tuple(_host(given, node) for node in sorted(range(count), key=ranks.__getitem__))
    sections = {name: make() for name, make in SECTIONS.items()}
    sections["ssh"] = SshOptions(**document.section(("ssh",), owner=SshOptions))
    return ParsedClusterFile(document, TopKeys(executor="ssh", mode="none"), hosts, sections)


def _host(given: GltKeys, node: int) -> Host:
    """Return node number `node` as a host. The host is named ADDRESS, or ADDRESS-INDEX if nodes share the address."""
    address, devices = given.nodes[node], given.visible_devices[node]
    return Host(
        address if given.nodes.count(address) == 1 else f"{address}-{node}",
        address=address,
        ssh=f"{given.usernames[node]}@{address}",
        ssh_port=None if given.ports is None else given.ports[node],
        processes=max(1, len(devices)),
        devices=devices,
        python=given.python_bins[node],
        folder=given.dst_paths[node],
    )
