"""cluster.toml or cluster.yaml becomes a Cluster; a mistake is named with its file and line, and the nearest word."""

from dataclasses import dataclass
from pathlib import Path

from hoploom.config.declare import keys_in
from hoploom.config.document import YAML_SUFFIXES, Document, full_name, read_document
from hoploom.config.rules import HOST
from hoploom.config.toml import quoted
from hoploom.deploy import glt_yaml
from hoploom.deploy.cluster_file import HEADINGS, HOSTS, SECTIONS, Cluster, HostKeys, TopKeys
from hoploom.deploy.resolve import Written, resolve
from hoploom.errors import ConfigError


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
    if Path(path).suffix not in (".toml", *YAML_SUFFIXES):
        raise ConfigError(f"{path} is no cluster file by its name; name it .toml, .yaml or .yml")
    document = read_document(path, HEADINGS, absent="write one; docs/cluster.md shows how")
    overrides = overrides or Overrides()
    is_glts = "nodes" in document.parsed and HOSTS not in document.parsed
    written = glt_yaml.written(document) if is_glts else _written(document)
    return resolve(written, overrides.executor, (overrides.master_addr, overrides.master_port))


def _written(document: Document) -> Written:
    top = TopKeys(**document.top())
    sections = {name: owner(**document.section((name,), owner=owner)) for name, owner in SECTIONS.items()}
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
        return {name: _host(document, name) for name in given}
    for name in given:
        if given.count(name) > 1:
            raise document.problem(HOSTS, f"hosts has {quoted(name)} {given.count(name)} times; name each once")
    return {name: HostKeys() for name in given}


def _host(document: Document, name: str) -> HostKeys:
    path = (HOSTS, name)
    for key, value in document.table(path).items():
        if key not in keys_in(HostKeys) and isinstance(value, dict):
            whole = quoted(f"{name}.{key}")
            message = (
                f"[{full_name((*path, key))}] is a table in a table; put a name with dots in quotes: [hosts.{whole}]"
            )
            raise document.problem(full_name((*path, key)), message)
    return HostKeys(**document.section(path, owner=HostKeys))
