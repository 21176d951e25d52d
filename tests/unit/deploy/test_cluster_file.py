"""Cluster files: what they mean, what they leave out, and each mistake in one line with its place and the way out."""

import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support import ROOT

from hoploom import ConfigError, StoreError
from hoploom.deploy.cluster_file import Host
from hoploom.deploy.programs import processes, script_words
from hoploom.deploy.resolve import Overrides, read_cluster
from hoploom.deploy.ssh import Ssh

Write = Callable[..., Path]
GLT = (ROOT / "examples/references/glt_examples/dist_train_sage_sup_config.yml").read_text()
TWO_HOSTS = """
store = "/stores/papers.store"
processes = 4
python = "/opt/venv/bin/python"
folder = "/srv/papers"

[hosts.gpu1]
devices = [0, 1, 2, 3]

[hosts.gpu2]
ssh = "root@10.0.0.2"
ssh_port = 2222
environment = { NCCL_DEBUG = "INFO" }

[environment]
TEAM = "graphs"
NCCL_DEBUG = "WARN"

[security]
token_file = "/etc/hoploom/token"
"""
APART = """
mode = "server-client"
store = "/stores/papers.store"
hosts.data1 = { parts = [0, 1] }
hosts.data2 = { parts = [1, 0] }
hosts.gpu1 = { processes = 2 }
security = { token_file = "/etc/hoploom/token" }
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def at(text: str, name: str = "cluster.toml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return at


@pytest.mark.parametrize(
    ("device", "given"), [("cuda", ["cuda:0", "cuda:0", "cuda:1"]), ("cuda:1", ["cuda:1"] * 3), (None, [])]
)
def test_servers_of_one_address_take_one_gpu_after_the_other(
    device: str | None, given: list[str], write: Write
) -> None:
    servers = ['hosts.a = { address = "10.0.0.1", parts = [0] }', 'hosts.b = { address = "10.0.0.2", parts = [0] }']
    servers += ['hosts.c = { address = "10.0.0.1", parts = [0], port = 7800 }', "hosts.d = { processes = 1 }"]
    section = "[server]" if device is None else f'[server]\ndevice = "{device}"'
    top = ['mode = "server-client"', 'store = "/s"', 'security = { token_file = "/t" }']
    cluster = read_cluster(write("\n".join([*top, *servers, section])))
    lines = [" ".join(process.words) for process in processes(cluster, ["train", "run.toml"])]
    assert re.findall(r"--device (\S+)", " ".join(lines)) == given


def test_a_device_that_is_no_gpu_is_refused_in_the_file(write: Write) -> None:
    with pytest.raises(ConfigError, match=r'server\.device is .gpu.; give a GPU, "cuda" or "cuda:1"'):
        read_cluster(write(APART + '[server]\ndevice = "gpu"'))


def test_a_host_has_what_all_have_and_its_own(write: Write) -> None:
    cluster = read_cluster(write(TWO_HOSTS))
    assert (cluster.executor, cluster.mode, cluster.rendezvous) == ("ssh", "worker", "gpu1:29500")
    one, two = cluster.hosts
    assert one == Host(
        name="gpu1",
        address="gpu1",
        ssh="gpu1",
        processes=4,
        serves=True,
        port=7700,
        parts=(0,),
        devices=(0, 1, 2, 3),
        python="/opt/venv/bin/python",
        folder="/srv/papers",
        environment={"TEAM": "graphs", "NCCL_DEBUG": "WARN"},
    )
    assert (two.ssh, two.ssh_port, two.parts, two.devices) == ("root@10.0.0.2", 2222, (1,), None)
    assert two.environment == {"TEAM": "graphs", "NCCL_DEBUG": "INFO"}


def test_yaml_says_the_same_with_the_same_keys(write: Write) -> None:
    as_yaml = yaml.safe_dump(tomllib.loads(TWO_HOSTS), sort_keys=False)
    from_toml, from_yaml = read_cluster(write(TWO_HOSTS)), read_cluster(write(as_yaml, "cluster.yaml"))
    assert (from_yaml.hosts, from_yaml.security) == (from_toml.hosts, from_toml.security)


def test_a_list_of_hosts_is_enough(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = read_cluster(write('hosts = ["gpu1", "gpu2"]'))
    assert (cluster.mode, cluster.executor) == ("none", "ssh")
    assert [(host.processes, host.python, host.folder) for host in cluster.hosts] == [
        (1, sys.executable, str(tmp_path))
    ] * 2


def test_loopback_alone_is_this_host_and_its_ports_are_any(write: Write, ring_folder: Path) -> None:
    cluster = read_cluster(write(f'hosts = ["127.0.0.1", "localhost"]\nstore = "{ring_folder}"'))
    assert (cluster.executor, [host.port for host in cluster.hosts]) == ("local", [0, 0])
    assert (cluster.rendezvous, [host.parts for host in cluster.hosts]) == ("127.0.0.1:0", [(0,), (1,)])


def test_one_server_takes_all_parts_and_three_share_two(write: Write, ring_folder: Path) -> None:
    one = read_cluster(write(f'hosts = ["127.0.0.1"]\nstore = "{ring_folder}"'))
    assert one.hosts[0].parts == (0, 1)
    three = read_cluster(write(f'hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]\nstore = "{ring_folder}"'))
    assert [host.parts for host in three.hosts] == [(0,), (1,), (0,)]


def test_servers_of_one_address_count_their_ports_up(write: Write) -> None:
    text = """
        store = "/stores/papers.store"
        mode = "server-client"
        executor = "ssh"
        hosts.a = { address = "10.0.0.1", serves = true }
        hosts.b = { address = "10.0.0.1", serves = true, port = 7700 }
        hosts.c = { address = "10.0.0.1", serves = true }
        hosts.d = {}
        security.insecure = true
    """
    assert [host.port for host in read_cluster(write(text)).servers] == [7701, 7700, 7702]


def test_hosts_that_have_no_names_yet_are_counted(write: Write) -> None:
    text = 'hosts = 3\nservers = 1\nmode = "server-client"\nstore = "/stores/a"\nsecurity.token_file = "/t"'
    cluster = read_cluster(write(text))
    assert cluster.executor == "slurm"
    assert [(host.address, host.serves, host.processes) for host in cluster.hosts] == [
        ("", True, 0),
        ("", False, 1),
        ("", False, 1),
    ]


def test_glts_file_is_accepted(write: Write) -> None:
    cluster = read_cluster(write(GLT, "dist_train_sage_sup_config.yml"), Overrides(None, "0.0.0.0", 11234))
    other_order = read_cluster(write(GLT.replace("[0, 1]", "[1, 0]"), "glt.yml"))
    assert other_order.hosts == cluster.hosts[::-1]
    assert (cluster.executor, cluster.mode, cluster.rendezvous) == ("ssh", "none", "0.0.0.0:11234")
    two = cluster.hosts[1]
    assert (two.name, two.ssh, two.ssh_port, two.processes) == ("1.1.1.1", "root@1.1.1.1", 22, 4)
    assert (two.devices, two.python, two.folder) == ((4, 5, 6, 7), "/path/to/python", "/path/to/work")


def test_glts_file_may_name_a_key_of_ssh(write: Write) -> None:
    cluster = read_cluster(write(f"{GLT}\nssh:\n  identity: keys/id\n", "glt.yml"))
    first, _ = processes(cluster, ["train.py"])
    shown = Ssh(cluster.ssh).arguments(first)
    at = shown.index("-i")
    assert shown[at : at + 4] == ["-i", str(Path(cluster.ssh.identity or "")), "-o", "IdentitiesOnly=yes"]
    assert Path(shown[at + 1]).is_absolute()


def test_the_store_may_be_elsewhere_on_a_host(write: Write) -> None:
    text = TWO_HOSTS.replace("[hosts.gpu2]", '[hosts.gpu2]\nstore = "/nvme/papers"')
    planned = processes(read_cluster(write(text)), ["train", "run.toml"])
    assert [process.words[4] for process in planned[:2]] == ["/stores/papers.store", "/nvme/papers"]
    assert [process.environment["HOPLOOM_STORE"] for process in planned[2:]] == ["/stores/papers.store", "/nvme/papers"]
    text = text.replace('store = "/stores/papers.store"', 'mode = "worker"')
    text = text.replace("[hosts.gpu1]", '[hosts.gpu1]\nstore = "/scratch/papers"')
    planned = processes(read_cluster(write(text)), ["train", "run.toml"])
    assert [process.words[4] for process in planned[:2]] == ["/scratch/papers", "/nvme/papers"]


def test_the_command_line_wins(write: Write) -> None:
    cluster = read_cluster(write(f'executor = "slurm"\n{TWO_HOSTS}'), Overrides("ssh", "10.0.0.9", None))
    assert (cluster.executor, cluster.rendezvous) == ("ssh", "10.0.0.9:29500")


def test_slurm_finds_ports_that_are_not_given(write: Write) -> None:
    cluster = read_cluster(write(TWO_HOSTS), Overrides("slurm"))
    assert (cluster.rendezvous, [host.port for host in cluster.servers]) == ("gpu1:0", [0, 0])
    asked = read_cluster(write(f"{TWO_HOSTS}\n[server]\nport = 7700"), Overrides("slurm", None, 29500))
    assert (asked.rendezvous, [host.port for host in asked.servers]) == ("gpu1:29500", [7700, 7700])


@pytest.mark.parametrize(
    ("executor", "overrides", "message"),
    [
        (
            "slurm",
            (None, None),
            "cluster.toml:1: rendezvous is gpu1:4000, but Slurm picks the hosts, and trainers meet",
        ),
        ("slurm", ("gpu1", None), "leave it out, --master-port gives the port"),
        ("kubernetes", (None, None), "rendezvous is gpu1:4000, but Kubeflow says where trainers meet; leave it out"),
        ("kubernetes", (None, 4000), "--master-port is 4000, but Kubeflow says where trainers meet; leave it out"),
    ],
)
def test_where_trainers_meet_is_refused_where_somebody_else_says(
    write: Write, executor: str, overrides: tuple[str | None, int | None], message: str
) -> None:
    given = "" if any(overrides) else 'rendezvous = "gpu1:4000"\n'
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_cluster(write(given + 'hosts = ["gpu1", "gpu2"]\n'), Overrides(executor, *overrides))


def test_without_servers_trainers_are_told_what_secures_those_they_start(write: Write) -> None:
    files = 'ca = "/ca"\ncert = "/cert"\nprivate_key = "/key"\ntoken_file = "/token"'
    (process,) = processes(read_cluster(write(f'hosts = ["gpu1"]\n[security]\n{files}')), ["train", "run.toml"])
    told = {name: value for name, value in process.environment.items() if name.startswith("HOPLOOM_")}
    assert told == {"HOPLOOM_TOKEN_FILE": "/token", "HOPLOOM_CA": "/ca", "HOPLOOM_CERT": "/cert", "HOPLOOM_KEY": "/key"}


def test_worker_mode_has_a_server_beside_the_trainers_of_each_host(write: Write) -> None:
    planned = processes(read_cluster(write(TWO_HOSTS)), ["train", "run.toml"])
    assert [process.label for process in planned] == ["gpu1/server", "gpu2/server", "gpu1/trainers", "gpu2/trainers"]
    serve = " ".join(planned[1].words)
    assert serve == (
        "/opt/venv/bin/python -m hoploom serve /stores/papers.store --part 1 --listen gpu2:7700 --peers gpu1:7700 "
        "--token-file /etc/hoploom/token"
    )
    line = " ".join(planned[3].words)
    assert line.startswith("/opt/venv/bin/python -m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 4 ")
    assert "--master-addr gpu1 --master-port 29500 --max-restarts 0 " in line
    assert line.endswith(" -m hoploom train run.toml")
    told = planned[2].environment
    assert told["HOPLOOM_SERVERS"] == "gpu1:7700,gpu2:7700"
    assert (told["HOPLOOM_STORE"], told["HOPLOOM_PARTS"]) == ("/stores/papers.store", "0")
    assert (told["HOPLOOM_TOKEN_FILE"], told["CUDA_VISIBLE_DEVICES"]) == ("/etc/hoploom/token", "0,1,2,3")
    assert "CUDA_VISIBLE_DEVICES" not in planned[3].environment


def test_server_client_mode_leaves_the_graph_to_the_servers(write: Write) -> None:
    cluster = read_cluster(write(APART))
    assert [host.parts for host in cluster.servers] == [(0, 1), (1, 0)]
    planned = processes(cluster, ["script.py", "--epochs", "3"])
    assert [process.label for process in planned] == ["data1/server", "data2/server", "gpu1/trainers"]
    told = planned[2].environment
    assert told["HOPLOOM_SERVERS"] == "data1:7700,data2:7700"
    assert "HOPLOOM_STORE" not in told
    assert "HOPLOOM_PARTS" not in told
    assert planned[2].words[-3:] == ("script.py", "--epochs", "3")


def test_mutual_tls_gives_trainers_a_certificate_too(write: Write) -> None:
    files = 'ca = "/c/ca"\ncert = "/c/cert"\nprivate_key = "/c/key"'
    text = TWO_HOSTS.replace('token_file = "/etc/hoploom/token"', files)
    plain = processes(read_cluster(write(text)), ["train", "run.toml"])
    assert " --cert /c/cert --key /c/key --ca /c/ca" in " ".join(plain[0].words)
    assert plain[2].environment["HOPLOOM_CA"] == "/c/ca"
    assert "HOPLOOM_KEY" not in plain[2].environment
    mutual = processes(read_cluster(write(f"{text}\nmutual = true")), ["train", "run.toml"])
    assert "--client-ca /c/ca" in " ".join(mutual[0].words)
    assert (mutual[2].environment["HOPLOOM_CERT"], mutual[2].environment["HOPLOOM_KEY"]) == ("/c/cert", "/c/key")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train run.toml", "-m hoploom train run.toml"),
        ("hoploom train run.toml --resume", "-m hoploom train run.toml --resume"),
        ("python -m hoploom train run.toml", "-m hoploom train run.toml"),
        ("script.py --epochs 3", "script.py --epochs 3"),
        ("/usr/bin/python -u script.py", "script.py"),
        ("torchrun script.py", "script.py"),
        ("-m package.training --x", "-m package.training --x"),
    ],
)
def test_a_command_is_a_recipe_a_script_or_a_module(command: str, words: str) -> None:
    assert " ".join(script_words(command.split())) == words


@pytest.mark.parametrize(
    "command", ["", "trian run.toml", "-m", "torchrun --nproc-per-node 2 t.py", "python -O t.py", "--epochs=t.py"]
)
def test_a_command_that_trains_nothing_is_refused(command: str) -> None:
    with pytest.raises(ConfigError, match=r"such as train run\.toml, or your own script\.py"):
        script_words(command.split())


HOST = 'hosts = ["a"]\n'
MISTAKES = [
    ("", "cluster.toml: there are no hosts; give their names"),
    ("hosts = 0", "cluster.toml:1: hosts is 0; give their names"),
    ('hosts = ["a", 3]', "cluster.toml:1: hosts has 3, which is no name of a host"),
    ('hosts = ["a", "a"]', 'cluster.toml:1: hosts has "a" 2 times; name each once'),
    ("[hosts.a]\nproceses = 2", "cluster.toml:2: unknown key proceses in [hosts.a]; did you mean processes?"),
    ('token_file = "x"\nhosts = ["a"]', "unknown key token_file; did you mean token_file in [security]?"),
    (f"{HOST}[slurm]\nport = 3", "cluster.toml:3: unknown key port in [slurm]; did you mean port in [server]?"),
    ("[hosts.10.0.0.1]\nprocesses = 2", 'put a name with dots in quotes: [hosts."10.0'),
    ("[hosts.a]\nprocesses = -1", "cluster.toml:2: hosts.a.processes is -1; give a whole number from 0 to 4096"),
    ("[hosts.a]\nprocesses = 0", "cluster.toml:1: no host trains: processes is 0 on all of them"),
    ("[hosts.a]\ndevices = [0, 0]", "hosts.a.devices is [0, 0]; give a list of GPUs, each once"),
    ("[hosts.a]\nport = 70000", "cluster.toml:2: hosts.a.port is 70000; give a whole number from 1 to 65535"),
    ('[hosts.a]\nssh = "-oX=y"', 'hosts.a.ssh is \'-oX=y\'; give "host" or "user@host"'),
    ("hosts.a = 3", "cluster.toml:1: hosts.a is 3; it is a section, write [hosts.a] and its keys"),
    (f'{HOST}security = "x"', "cluster.toml:2: security is 'x'; it is a section, write [security]"),
    (f'{HOST}mode = "workers"', 'mode is \'workers\'; give one of "worker", "server-client", "none"; did you mean'),
    (f'{HOST}folder = "~/work"', "folder is '~/work'; give a path in quotes, written out without ~"),
    ('hosts = ["a"]\nenvironment = { "A B" = "x" }', "environment is {'A B': 'x'}; give a table of variables"),
    (f'{HOST}mode = "worker"', 'cluster.toml:2: mode is "worker", but there is no store to serve'),
    (f"{HOST}servers = 1", "cluster.toml:2: servers is 1, but hosts have names; write serves = true"),
    ("hosts = 2\nservers = 1", 'servers is 1, which is for mode = "server-client"; leave it out'),
    ('hosts = 2\nservers = 2\nmode = "server-client"', "servers is 2 of 2 hosts; leave some to train"),
    ('hosts = 2\nexecutor = "ssh"', "hosts is 2, but executor ssh has to know which they are"),
    ("[hosts.a]\nparts = [0]", 'cluster.toml:2: hosts.a.parts has no effect in mode "none", where no server'),
    (f'{HOST}store = "/s"', "servers listen on a, which others reach, without a token or a certificate"),
    (f'{HOST}store = "/s"\nsecurity.cert = "c"', "security.cert is given without security.private_key"),
    (f'{HOST}store = "/s"\n[security]\nmutual = true\ntoken_file = "t"', "cluster.toml:4: security.mutual needs"),
    (f'{HOST}store = "/s"\nmode = "server-client"', 'cluster.toml:3: mode is "server-client", but no host serves'),
    ('hosts = ["localhost"]\nstore = "gone.store"', "gone.store, which does not exist; `hoploom partition` writes one"),
    ("hosts = [", "cluster.toml:1: not TOML"),
    ('hosts = 2\nmode = "server-client"\nstore = "/s"', "but no host serves; say how many: servers = 1"),
    (f'{HOST}mode = "none"\nstore = "/s"', 'cluster.toml:3: store has no effect in mode "none", where no server'),
    (f'{HOST}[server]\ncache = "20%"', 'cluster.toml:3: server.cache has no effect in mode "none"'),
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
    (f'{HOST}executor = "local"', "executor is local, but a has the address a, which others reach, too"),
    (f'{HOST}server.cache = "120%"', "server.cache is '120%'; give a share or a size in quotes"),
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


YAML_MISTAKES = [
    ("hosts: [a\nstore: b", "not YAML"),
    ("just text", "cluster.yaml is 'just text'; give keys and values"),
    ("hosts: [a]\nhosts: [b]", "cluster.yaml:2: hosts is set in line 1, too; keep one of them"),
    ("hosts:\n  10: {}", "cluster.yaml:2: the key 10 is no text; put it in quotes"),
    ("hosts:\n  a:\n    proceses: 3", "cluster.yaml:3: unknown key proceses in [hosts.a]; did you mean processes?"),
    ("hosts: !!python/object/apply:os.system ['true']", "not YAML: could not determine a constructor"),
    ("hosts: [a]\nslurm: {time: 12:00:00}", "slurm.time is 43200; give text in quotes"),
]


FILES = [("toml", *row) for row in MISTAKES] + [("yaml", *row) for row in YAML_MISTAKES]


@pytest.mark.parametrize(("kind", "text", "message"), FILES, ids=[f"{row[0]} {at}" for at, row in enumerate(FILES)])
def test_a_mistake_is_named_with_its_line(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(text, f"cluster.{kind}")
    with pytest.raises(ConfigError) as raised:
        read_cluster(f"cluster.{kind}")
    if text:
        assert message in str(raised.value)
    assert kind == "yaml" or "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("ports: [22, 22]", "ports: [22]", "ports has 1 entries for 2 nodes; give one per node"),
        ("ports: [22, 22]", "ports: 22", "ports is 22; give a list with one entry per node"),
        ("ports: [22, 22]", "ports: [22, ssh]", "glt.yml:8: ports has 'ssh'; give a whole number from 1 to 65535"),
        ("node_ranks: [0, 1]", "node_ranks: [0, 0]", "node_ranks is [0, 0]; give each of 0 to 1 once"),
        ("dst_paths", "dst_path", "unknown key dst_path beside nodes, which GLT's files have; did you mean dst_paths?"),
        (
            "in_channel: 100",
            "executor: ssh",
            "glt.yml:23: unknown key executor beside nodes, which GLT's files have; "
            "leave it out, or give hosts instead of nodes",
        ),
        ("4,5,6,7", "all", "glt.yml:34: visible_devices has 'all'; give a list of GPUs, each once, e.g. [0, 1]"),
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
