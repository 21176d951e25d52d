"""Mistakes in cluster files: each in one line, with its place, what is wrong, and the way out."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import ROOT

from hoploom import ConfigError, StoreError
from hoploom.deploy.resolve import read_cluster

Write = Callable[..., Path]
GLT = (ROOT / "examples/references/glt_examples/dist_train_sage_sup_config.yml").read_text()


MISTAKES = [
    ("", "cluster.toml: there are no hosts; give their names"),
    ("hosts = 0", "cluster.toml:1: hosts is 0; give their names"),
    ('hosts = ["a", 3]', "cluster.toml:1: hosts has 3, which is no name of a host"),
    ('hosts = ["a", "a"]', 'cluster.toml:1: hosts has "a" 2 times; name each once'),
    ("[hosts.a]\nproceses = 2", "cluster.toml:2: unknown key proceses in [hosts.a]; did you mean processes?"),
    ('token_file = "x"\nhosts = ["a"]', "unknown key token_file; did you mean token_file in [security]?"),
    ('hosts = ["a"]\n[slurm]\nport = 3', "cluster.toml:3: unknown key port in [slurm]; did you mean port in [server]?"),
    ("[hosts.10.0.0.1]\nprocesses = 2", 'put a name with dots in quotes: [hosts."10.0'),
    ("[hosts.a]\nprocesses = -1", "cluster.toml:2: hosts.a.processes is -1; give a whole number from 0 to 4096"),
    ("[hosts.a]\nprocesses = 0", "cluster.toml:1: no host trains: processes is 0 on all of them"),
    ("[hosts.a]\ndevices = [0, 0]", "hosts.a.devices is [0, 0]; give a list of GPUs, each once"),
    ("[hosts.a]\nport = 70000", "cluster.toml:2: hosts.a.port is 70000; give a whole number from 1 to 65535"),
    ('[hosts.a]\nssh = "-oX=y"', 'hosts.a.ssh is \'-oX=y\'; give "host" or "user@host"'),
    ("hosts.a = 3", "cluster.toml:1: hosts.a is 3; it is a section, write [hosts.a] and its keys"),
    ('hosts = ["a"]\nsecurity = "x"', "cluster.toml:2: security is 'x'; it is a section, write [security]"),
    (
        'hosts = ["a"]\nmode = "workers"',
        'mode is \'workers\'; give one of "worker", "server-client", "none"; did you mean',
    ),
    ('hosts = ["a"]\nfolder = "~/work"', "folder is '~/work'; give a path in quotes, written out without ~"),
    ('hosts = ["a"]\nenvironment = { "A B" = "x" }', "environment is {'A B': 'x'}; give a table of variables"),
    ('hosts = ["a"]\nmode = "worker"', 'cluster.toml:2: mode is "worker", but there is no store to serve'),
    ('hosts = ["a"]\nservers = 1', "cluster.toml:2: servers is 1, but hosts have names; write serves = true"),
    ("hosts = 2\nservers = 1", 'servers is 1, which is for mode = "server-client"; leave it out'),
    ('hosts = 2\nservers = 2\nmode = "server-client"', "servers is 2 of 2 hosts; leave some to train"),
    ('hosts = 2\nexecutor = "ssh"', "hosts is 2, but executor ssh has to know which they are"),
    ("[hosts.a]\nparts = [0]", 'cluster.toml:2: hosts.a.parts has no effect in mode "none", where no server'),
    ('hosts = ["a"]\nstore = "/s"', "servers listen on a, which others reach, without a token or a certificate"),
    ('hosts = ["a"]\nstore = "/s"\nsecurity.cert = "c"', "security.cert is given without security.private_key"),
    (
        'hosts = ["a"]\nstore = "/s"\n[security]\nmutual = true\ntoken_file = "t"',
        "cluster.toml:4: security.mutual needs",
    ),
    (
        'hosts = ["a"]\nstore = "/s"\nmode = "server-client"',
        'cluster.toml:3: mode is "server-client", but no host serves',
    ),
    ('hosts = ["localhost"]\nstore = "gone.store"', "gone.store, which does not exist; `hoploom partition` writes one"),
    ("hosts = [", "cluster.toml:1: not TOML"),
    ('hosts = 2\nmode = "server-client"\nstore = "/s"', "but no host serves; say how many: servers = 1"),
    (
        'hosts = ["a"]\nmode = "none"\nstore = "/s"',
        'cluster.toml:3: store has no effect in mode "none", where no server',
    ),
    ('hosts = ["a"]\n[server]\ncache = "20%"', 'cluster.toml:3: server.cache has no effect in mode "none"'),
    ('[hosts.a]\nstore = "/n"', 'cluster.toml:2: hosts.a.store has no effect in mode "none"'),
    (
        'store = "s3://bucket/x"\nhosts = ["a"]',
        "toml:1: store is s3://bucket/x, which servers cannot open as it is; bring each host its parts with `hoploom",
    ),
    (
        'store = "/s"\nmode = "server-client"\nsecurity.insecure = true\nhosts.a.parts = [0]\nhosts.b.store = "/m"',
        "cluster.toml:5: hosts.b.store has no effect where no server runs; leave it out",
    ),
    (
        'mode = "worker"\n[hosts.a]\nstore = "/n"\n[hosts.b]\nport = 7',
        'cluster.toml:1: mode is "worker", but there is no store to serve on b; add a line',
    ),
    (
        'mode = "worker"\n[hosts.localhost]\nstore = "/gone"',
        "cluster.toml:3: hosts.localhost.store is /gone, which does not exist; `hoploom partition` writes one",
    ),
    (
        'store = "/s"\nexecutor = "kubernetes"\nsecurity.token_file = "/t"\nhosts = 2\n[server]\nthreads = 2',
        'cluster.toml:6: server.threads has no effect on Kubernetes in mode "worker", where trainers start the servers',
    ),
    (
        'store = "/s"\nexecutor = "kubernetes"\nsecurity.token_file = "/t"\n[hosts.a]\nparts = [0]',
        'cluster.toml:5: hosts.a.parts has no effect on Kubernetes in mode "worker"',
    ),
    (
        'hosts = ["gpu1"]\nexecutor = "local"',
        "executor is local, but gpu1 has the address gpu1, which others reach, too",
    ),
    ('hosts = ["a"]\nserver.cache = "120%"', "server.cache is '120%'; give a share or a size in quotes"),
    ('hosts = ["a", "b"]\nmax_restarts = 1', "cluster.toml:2: max_restarts is 1, but 2 hosts train"),
    (
        'store = "/s"\nsecurity.insecure = true\n[hosts.a]\nparts = [0]\n[hosts.b]\nparts = [2]',
        "no host has part 1 of the store; add it to the parts of one of them",
    ),
    (
        'store = "/s"\nsecurity.insecure = true\n[hosts.a]\nparts = [0]\n[hosts.b]',
        "a has parts and b has none; give all of them some, or none",
    ),
    (
        'store = "/s"\nmode = "server-client"\n[hosts.a]\nparts = [0]\nserves = false\n[hosts.b]\nserves = true',
        "cluster.toml:4: a has parts, but serves is false; leave one of them out",
    ),
    (
        'store = "/s"\n[hosts.a]\nserves = false',
        'cluster.toml:3: a trains and does not serve, which mode "worker" has no room for',
    ),
    (
        'store = "/s"\n[hosts.a]\naddress = "h"\nport = 7\n[hosts.b]\naddress = "h"\nport = 7',
        "cluster.toml:7: port 7 of h is a's already; give each its own",
    ),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_a_mistake_is_named_with_its_line(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(text)
    with pytest.raises(ConfigError) as raised:
        read_cluster("cluster.toml")
    if text:
        assert message in str(raised.value)
    assert "\n" not in str(raised.value)


YAML_MISTAKES = [
    ("hosts: [a\nstore: b", "not YAML"),
    ("just text", "cluster.yaml is 'just text'; give keys and values"),
    ("hosts: [a]\nhosts: [b]", "cluster.yaml:2: hosts is set in line 1, too; keep one of them"),
    ("hosts:\n  10: {}", "cluster.yaml:2: the key 10 is no text; put it in quotes"),
    ("hosts:\n  a:\n    proceses: 3", "cluster.yaml:3: unknown key proceses in [hosts.a]; did you mean processes?"),
    ("hosts: !!python/object/apply:os.system ['true']", "not YAML: could not determine a constructor"),
    ("hosts: [a]\nslurm: {time: 12:00:00}", "slurm.time is 43200; give text in quotes"),
]


@pytest.mark.parametrize(("text", "message"), YAML_MISTAKES, ids=[str(i) for i in range(len(YAML_MISTAKES))])
def test_a_mistake_in_yaml_is_named_with_its_line(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(text, "cluster.yaml")
    with pytest.raises(ConfigError) as raised:
        read_cluster("cluster.yaml")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("ports: [22, 22]", "ports: [22]", "ports has 1 entries for 2 nodes; give one per node"),
        ("ports: [22, 22]", "ports: 22", "ports is 22; give a list with one entry per node"),
        ("ports: [22, 22]", "ports: [22, ssh]", "glt.yml:8: ports has 'ssh'; give a whole number from 1 to 65535"),
        ("node_ranks: [0, 1]", "node_ranks: [0, 0]", "node_ranks is [0, 0]; give each of 0 to 1 once"),
        (
            "dst_paths:",
            "dst_path:",
            "unknown key dst_path beside nodes, which GLT's files have; did you mean dst_paths?",
        ),
        (
            "in_channel: 100",
            "executor: ssh",
            "glt.yml:23: unknown key executor beside nodes, which GLT's files have; "
            "leave it out, or give hosts instead of nodes",
        ),
        (
            "  - 4,5,6,7",
            "  - all",
            "glt.yml:34: visible_devices has 'all'; give a list of GPUs, each once, e.g. [0, 1]",
        ),
        ("usernames:\n  - root\n  - root", "", 'glt.yml: usernames is missing; add a line such as usernames: ["root"]'),
    ],
)
def test_a_mistake_in_glts_file_is_named(write: Write, before: str, after: str, message: str) -> None:
    assert before in GLT
    with pytest.raises(ConfigError) as raised:
        read_cluster(write(GLT.replace(before, after), "glt.yml"))
    assert message in str(raised.value)


def test_a_part_that_the_store_does_not_have_is_refused(write: Write, ring_folder: Path) -> None:
    text = f'store = "{ring_folder}"\n[hosts.localhost]\nparts = [0, 1, 2]'
    with pytest.raises(ConfigError, match=r"cluster.toml:3: hosts.localhost.parts has 2, but .* has parts 0 to 1 only"):
        read_cluster(write(text))


def test_a_damaged_store_is_refused(write: Write, ring_folder: Path) -> None:
    shutil.rmtree(ring_folder)
    ring_folder.mkdir()
    with pytest.raises(ConfigError, match=r"cluster.toml:2: store is .*store.json") as raised:
        read_cluster(write(f'hosts = ["localhost"]\nstore = "{ring_folder}"'))
    assert isinstance(raised.value.__cause__, StoreError)


def test_a_damaged_store_of_a_host_is_refused(write: Write, ring_folder: Path) -> None:
    (ring_folder / "store.json").unlink()
    with pytest.raises(ConfigError, match=r"^[^:]*cluster.toml:2: \S+ is no store: it has no store.json"):
        read_cluster(write(f'mode = "worker"\n[hosts.localhost]\nstore = "{ring_folder}"'))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone.toml does not exist; write one"):
        read_cluster(tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match=r"name it .toml, .yaml or .yml"):
        read_cluster(tmp_path / "cluster.json")
