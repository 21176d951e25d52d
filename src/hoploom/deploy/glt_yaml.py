"""Read the YAML file of GraphLearn-for-PyTorch's run_dist_train_sage_sup.py as a cluster file.

It names no store: trainers start without servers and open the store of their run. in_channel and out_channel are passed
to them, and compared with the store when it is opened. dataset has no effect.
"""

# ruff: noqa: RUF009  (key() is dataclasses.field)

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from hoploom.config import rules
from hoploom.config.document import Document
from hoploom.config.rules import REQUIRED, KeyRule, key, keys_in
from hoploom.config.values import as_key, nearest
from hoploom.deploy.cluster_file import SECTIONS, Host, ParsedClusterFile, SshOptions, TopKeys
from hoploom.errors import ConfigError
from hoploom.ranks.context import Context, gather_json
from hoploom.ranks.environment import WIDTHS
from hoploom.store import Store

BLOCK = 1 << 20  # labels that are read together
WAY_OUT = "correct the YAML, or open the store that it describes"


def _each(entry: KeyRule) -> KeyRule:
    def read(value: Any) -> list[Any] | None:
        entries = [entry.read(one) for one in value] if isinstance(value, list) else [None]
        return None if None in entries or not entries else entries

    return KeyRule("a list with one entry per node", read, entry=entry)


@dataclass(frozen=True)
class GltKeys:
    """The keys of GLT's file; lists have one entry per node."""

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
    """Convert GLT's keys to those of a cluster file."""
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
    """Return a node as a host. Its name is its address, with its index if the address is listed twice."""
    address, devices = given.nodes[node], given.visible_devices[node]
    return Host(
        address if given.nodes.count(address) == 1 else f"{address}-{node}",
        address=address,
        ssh=f"{given.usernames[node]}@{address}",
        ssh_port=None if given.ports is None else given.ports[node],
        processes=max(1, len(devices)),
        devices=devices,
        python=given.python_bins[node],
        environment={WIDTHS[name]: str(width) for name in WIDTHS if (width := getattr(given, name)) is not None},
        folder=given.dst_paths[node],
    )


# --- the widths, once a store is opened ------------------------------------------------------------


def check_widths(context: Context, store: Store, widths: Mapping[str, int]) -> None:
    """Raise ConfigError if the store's features or labels have other widths than the file. All ranks call."""
    features = {t.name: t.fields["x"].shape for t in store.schema.node_types if "x" in t.fields}
    wanted = widths.get("in_channel")
    if wanted is not None and (wanted,) not in features.values():
        found = ", ".join(f"x of {name!r} has shape {list(shape)}" for name, shape in features.items()) or "it has no x"
        raise ConfigError(f"in_channel is {wanted} in the cluster's YAML, but in the store {found}; {WAY_OUT}")
    most = max(gather_json(context, _num_classes(context, store)))
    wanted = widths.get("out_channel")
    if wanted is not None and most > wanted:
        message = f"out_channel is {wanted} in the cluster's YAML, but the store's labels y need {most}"
        raise ConfigError(f"{message}; {WAY_OUT}")


def _num_classes(context: Context, store: Store) -> int:
    """Return the number of outputs that the labels need in this rank's share of the nodes; 0 without labels."""
    most = 0
    for node_type in (one for one in store.schema.node_types if "y" in one.fields):
        begin, end = (node_type.num_nodes * rank // context.world_size for rank in (context.rank, context.rank + 1))
        for first in range(begin, end, BLOCK):
            ids = torch.arange(first, min(first + BLOCK, end))
            (rows,) = store.features.gather([(node_type.name, "y", ids)])
            is_multi_label = rows.dim() > 1 and rows.shape[1] > 1
            width = rows.shape[1] if is_multi_label else 1 if rows.dtype.is_floating_point else int(rows.max()) + 1
            most = max(most, width)
    return most
