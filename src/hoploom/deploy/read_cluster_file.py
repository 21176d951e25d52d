"""cluster.toml or cluster.yaml becomes a Cluster; what is wrong is named with its file and line, and the nearest word.

The first mistake ends the reading: one message is read, ten are not.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hoploom.config.keys import default_of, key_of, keys_in, nearest
from hoploom.config.lines import KeyPath
from hoploom.config.text import as_key, quoted
from hoploom.deploy import glt
from hoploom.deploy.cluster_file import Cluster
from hoploom.deploy.documents import Document, full_name, read_document
from hoploom.deploy.resolve import Written, resolve
from hoploom.deploy.rules import HOST
from hoploom.deploy.sections import HOSTS, SECTIONS, HostKeys, TopKeys


@dataclass(frozen=True)
class Overrides:
    """What the command line says instead of the file."""

    executor: str | None = None
    master_addr: str | None = None
    master_port: int | None = None


def read_cluster(path: str | Path, overrides: Overrides | None = None) -> Cluster:
    """The cluster in a file, also in one that GraphLearn-for-PyTorch's launcher takes.

    >>> read_cluster("cluster.toml").hosts[0].name
    'gpu1'
    """
    document = read_document(path)
    overrides = overrides or Overrides()
    written = glt.written(document) if glt.is_like(document) else _written(document)
    return resolve(written, overrides.executor, (overrides.master_addr, overrides.master_port))


def _written(document: Document) -> Written:
    known = (HOSTS, *SECTIONS, *keys_in(TopKeys))
    _check_known(document, document.parsed, known, ())
    above = {name: value for name, value in document.parsed.items() if name in keys_in(TopKeys)}
    sections = {
        name: owner(**_values(document, owner, (name,), _table(document, document.parsed.get(name, {}), (name,))))
        for name, owner in SECTIONS.items()
    }
    top = TopKeys(**_values(document, TopKeys, (), above))
    return Written(document, top, _hosts(document), sections)


# --- hosts ---------------------------------------------------------------------------------------


def _hosts(document: Document) -> dict[str, HostKeys] | int:
    """By name; a number where they have no names yet."""
    given = document.parsed.get(HOSTS)
    way_out = 'give their names, e.g. hosts = ["gpu1", "gpu2"], or a section [hosts.NAME] for each'
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    if given is None:
        raise document.problem(HOSTS, f"there are no hosts; {way_out}")
    if not isinstance(given, list | dict) or not given:
        raise document.problem(HOSTS, f"hosts is {given!r:.80}; {way_out}")
    for name in given:
        if not isinstance(name, str) or not HOST.fullmatch(name):
            raise document.problem(HOSTS, f"hosts has {name!r:.80}, which is no name of a host; {way_out}")
    if isinstance(given, dict):
        return {name: _host(document, name, entry) for name, entry in given.items()}
    for name in given:
        if given.count(name) > 1:
            raise document.problem(HOSTS, f"hosts has {quoted(name)} {given.count(name)} times; name each once")
    return {name: HostKeys() for name in given}


def _host(document: Document, name: str, given: Any) -> HostKeys:
    path = (HOSTS, name)
    table = _table(document, given, path)
    for key, value in table.items():
        if key not in keys_in(HostKeys) and isinstance(value, dict):
            whole = quoted(f"{name}.{key}")
            message = (
                f"[{full_name((*path, key))}] is a table in a table; put a name with dots in quotes: [hosts.{whole}]"
            )
            raise document.problem(full_name((*path, key)), message)
    return HostKeys(**_values(document, HostKeys, path, table))


# --- keys ----------------------------------------------------------------------------------------


def _table(document: Document, given: Any, path: KeyPath) -> Mapping[str, Any]:
    if given is None:  # a section of YAML without keys
        return {}
    if not isinstance(given, dict):
        name = full_name(path)
        raise document.problem(name, f"{name} is {given!r:.60}; it is a section, write [{name}] and its keys")
    return given


def _values(document: Document, owner: type[Any], path: KeyPath, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every key of a section, read or by default."""
    known = keys_in(owner)
    _check_known(document, given, tuple(known), path)
    values = {}
    for name, described in known.items():
        inside = full_name((*path, name))
        rule = key_of(described).rule
        value = default_of(described) if given.get(name) is None else rule.read(given[name])
        if value is None and given.get(name) is not None:
            alike = nearest(given[name], rule.words) if isinstance(given[name], str) else None
            hint = f"; did you mean {quoted(alike)}?" if alike else ""
            raise document.problem(inside, f"{inside} is {given[name]!r:.80}; give {rule.expects}{hint}")
        values[name] = value
    return values


def _check_known(document: Document, given: Iterable[str], known: Sequence[str], path: KeyPath) -> None:
    for name in given:
        if name not in known:
            inside = f" in [{full_name(path)}]" if path else ""
            message = f"unknown key {as_key(name)}{inside}; did you mean {_nearest(name, known, path)}?"
            raise document.problem(full_name((*path, name)), message)


def _nearest(name: str, known: Sequence[str], path: KeyPath) -> str:
    """One alike in this section, else the same one or one alike in another, else what there is."""
    sections: dict[str, type[Any]] = {"": TopKeys, **SECTIONS, "hosts.NAME": HostKeys}
    homes = {key: section for section, owner in reversed(sections.items()) for key in keys_in(owner)}
    found = nearest(name, known)
    if found is None or name in homes:
        found = nearest(name, tuple(homes)) or nearest(name, known, cutoff=0.0) or known[0]
        if found not in known:
            return f"{found} in [{homes[found]}]" if homes[found] else f"{found}, above the sections"
    return found if path or found not in (HOSTS, *SECTIONS) else f"[{found}]"
