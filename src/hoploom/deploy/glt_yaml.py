"""The YAML of GraphLearn-for-PyTorch's run_dist_train_sage_sup.py, read as a cluster file of ours.

It knows no store: trainers start without servers beside them, and the run's own store is the one they open. dataset,
in_channel and out_channel are read and checked, but the store says what they say.
"""

from collections.abc import Sequence
from typing import Any

from hoploom.config import rules
from hoploom.config.document import Document
from hoploom.config.values import nearest
from hoploom.deploy.cluster_file import SECTIONS, HostKeys, TopKeys, Written

LISTS = {  # one entry per node
    "nodes": rules.HOST,
    "ports": rules.PORT,
    "python_bins": rules.HOST_PATH,
    "usernames": rules.LOGIN,
    "node_ranks": rules.whole(0),
    "dst_paths": rules.HOST_PATH,
    "visible_devices": rules.ids("GPUs"),
}
SINGLE = {"dataset": rules.TEXT, "in_channel": rules.whole(1), "out_channel": rules.whole(1)}
OPTIONAL = ("dataset", "in_channel", "out_channel", "node_ranks", "ports")


def keys_of_glt(document: Document) -> Written:
    """The same cluster in our keys."""
    _check_keys(document)
    columns = {name: _column(document, name, rule) for name, rule in LISTS.items() if name in document.parsed}
    for name, rule in SINGLE.items():
        if name in document.parsed:
            _read(document, name, rule, document.parsed[name])
    _check_lengths(document, columns)
    nodes = range(len(columns["nodes"]))
    ranks = columns.get("node_ranks", list(nodes))
    if sorted(ranks) != list(nodes):
        raise document.problem("node_ranks", f"node_ranks is {ranks}; give each of 0 to {len(nodes) - 1} once")
    in_order = sorted(nodes, key=lambda i: ranks[i])
    names = _names(columns["nodes"])
    hosts = {names[i]: _host({name: column[i] for name, column in columns.items()}) for i in in_order}
    return Written(
        document, TopKeys(executor="ssh", mode="none"), hosts, {name: make() for name, make in SECTIONS.items()}
    )


def _host(row: dict[str, Any]) -> HostKeys:
    devices = row["visible_devices"]
    return HostKeys(
        address=row["nodes"],
        ssh=f"{row['usernames']}@{row['nodes']}",
        ssh_port=row.get("ports"),
        processes=max(1, len(devices)),
        devices=devices,
        python=row["python_bins"],
        folder=row["dst_paths"],
    )


def _names(nodes: Sequence[str]) -> list[str]:
    """The address, with its place in the list where it stands there twice."""
    return [node if nodes.count(node) == 1 else f"{node}-{i}" for i, node in enumerate(nodes)]


def _check_keys(document: Document) -> None:
    known = (*LISTS, *SINGLE)
    for name in document.parsed:
        if name not in known:
            hint = nearest(name, known, cutoff=0.0)
            raise document.problem(
                name, f"unknown key {name} beside nodes, which GLT's files have; did you mean {hint}?"
            )
    for name in known:
        if name not in document.parsed and name not in OPTIONAL:
            raise document.problem("nodes", f"{name} is missing; give it one entry per node, as nodes has")


def _column(document: Document, name: str, rule: rules.KeyRule) -> list[Any]:
    given = document.parsed[name]
    if not isinstance(given, list) or not given:
        raise document.problem(name, f"{name} is {given!r:.80}; give a list with one entry per node")
    return [_read(document, name, rule, entry) for entry in given]


def _read(document: Document, name: str, rule: rules.KeyRule, given: Any) -> Any:
    value = rule.read(given)
    if value is None:
        raise document.problem(name, f"{name} has {given!r:.80}; give {rule.expects}")
    return value


def _check_lengths(document: Document, columns: dict[str, list[Any]]) -> None:
    expected = len(columns["nodes"])
    for name, column in columns.items():
        if len(column) != expected:
            message = f"{name} has {len(column)} entries for {expected} nodes; give one per node"
            raise document.problem(name, message)
