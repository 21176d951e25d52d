"""Context.open: the store that the deployment means, with real servers, in real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support import TESTS, cluster_workers
from support.cluster_workers import loader, told_of
from support.graphs import random_graph, save_in_parts
from support.servers import serving

import hoploom
from hoploom import ConfigError, PeerError
from hoploom.deploy.local_server import LocalServer
from hoploom.deploy.programs import ServerCommand
from hoploom.dist.environment import Deployment, read_deployment
from hoploom.dist.spawn import spawn
from hoploom.train import init

# --- what the environment says -------------------------------------------------------------------


def test_the_variables_of_launch_say_where_the_graph_is() -> None:
    variables = {"HOPLOOM_SERVERS": "a:1, b:2", "HOPLOOM_STORE": "/s", "HOPLOOM_PARTS": "1,0", "HOPLOOM_CA": "/ca"}
    variables |= {"HOPLOOM_TOKEN_FILE": "/t", "GROUP_RANK": "3"}
    security = {"token_file": "/t", "ca": "/ca"}
    assert read_deployment(variables) == Deployment(("a:1", "b:2"), "/s", (0, 1), security, 3)
    assert read_deployment({"SLURM_NODEID": "2"}) == Deployment(node=2)
    assert read_deployment({"HOPLOOM_SERVERS": ""}) == Deployment()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"HOPLOOM_STORE": "/s"}, "HOPLOOM_STORE is '/s', but HOPLOOM_SERVERS is not set; start with hoploom launch"),
        ({"HOPLOOM_PARTS": "0"}, "HOPLOOM_PARTS is '0', but HOPLOOM_SERVERS is not set"),
        ({"HOPLOOM_SERVERS": "a:1", "HOPLOOM_PARTS": "0,x"}, "HOPLOOM_PARTS is '0,x'; give the numbers of parts"),
    ],
)
def test_half_of_a_deployment_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_deployment(variables)


# --- one process ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 nodes in two parts."""
    folder = tmp_path_factory.mktemp("cluster") / "graph"
    save_in_parts(hoploom.from_pyg(random_graph(60, 400, 1)), folder, 2)
    return folder


def _expected(graph: Path, rank: int = 0, world_size: int = 1, **options: Any) -> list[dict[str, Any]]:
    return told_of(loader(hoploom.open(graph), rank, world_size, **options))


def test_without_servers_on_one_host_it_is_open(graph: Path) -> None:
    with init() as context:
        store = context.open(graph)
        assert (len(store.parts), store.deployment.homes, store.deployment.makes_batches) == (2, (), False)
        assert told_of(loader(store, 0, 1)) == _expected(graph)
        assert context.open(graph, parts=[1]).homes == ((1,),)


def test_servers_given_make_the_batches_or_the_rest_of_the_rows(graph: Path) -> None:
    with serving(graph, [[]]) as (server,), init() as context:
        address = server.address
        store = context.open(servers=[address])
        assert store.deployment.makes_batches
        assert told_of(loader(store, 0, 1)) == _expected(graph)
        beside = context.open(graph, parts=[0], servers=address, topology="parted", timeout=30)
        assert (beside.deployment.makes_batches, len(beside.parts), beside.deployment.homes) == (False, 1, ((0,),))
        assert told_of(loader(beside, 0, 1)) == _expected(graph)
        without = context.open(graph, parts=[], servers=address)  # batches are made here, out of nothing here
        assert (without.deployment.makes_batches, len(without.parts), without.deployment.homes) == (False, 0, ())
        assert told_of(loader(without, 0, 1)) == _expected(graph)


def test_what_launch_says_wins_over_the_scripts_path(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(graph, [[]]) as (server,), init() as context:
        monkeypatch.setenv("HOPLOOM_SERVERS", server.address)
        store = context.open("nowhere.store")  # server-client mode: no path means anything here
        assert store.deployment.makes_batches
        monkeypatch.setenv("HOPLOOM_STORE", str(graph))
        monkeypatch.setenv("HOPLOOM_PARTS", "1")
        store = context.open("nowhere.store")
        assert (store.deployment.makes_batches, store.deployment.homes) == (False, ((1,),))
        assert told_of(loader(store, 0, 1)) == _expected(graph)


def test_servers_of_launch_and_servers_beside_trainers_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPLOOM_SERVERS", "127.0.0.1:1")
    message = "serve is True, but hoploom launch has started servers; leave serve or its servers out"
    with init() as context, pytest.raises(ConfigError, match=message):
        context.open("graph.store", serve=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "there is no store: path is None and no server is named; give one of them, or hoploom launch"),
        ({"serve": "yes"}, "serve is 'yes'; give True, False or 'auto'"),
        ({"serve": True, "servers": "127.0.0.1:1"}, "there are servers already; leave serve or servers out"),
        ({"path": "s", "chache": 3}, "Context.open got 'chache'; besides its own arguments it takes"),
        ({"path": "s", "parts": ["a"]}, "a part is 'a'; give the numbers of parts"),
    ],
)
def test_what_can_never_be_opened_is_refused(arguments: dict[str, Any], message: str) -> None:
    with init() as context, pytest.raises(ConfigError, match=message):
        context.open(**arguments)


# --- a server beside the trainers of each host ---------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the ranks put what is temporary."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def _spawn(fn: Callable[..., None], *args: Any) -> None:
    spawn(fn, 2, args, timeout=60)


@pytest.mark.slow
def test_two_hosts_train_on_each_others_parts(graph: Path, tmp_path: Path, temporary: Path) -> None:
    """Rank 0 holds part 1, and rank 1 part 0. With locality each gets the seeds of its own part."""
    opening = {"serve": True, "topology": "parted", "parts_by_rank": [[1], [0]]}
    _spawn(cluster_workers.tell_batches, str(tmp_path), str(graph), opening)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, found in enumerate(told):
        assert found["batches"] == _expected(graph, rank, 2)
        assert found["local"] == _expected(graph, rank, 2, locality=[[1], [0]])
        assert {seed // 30 for batch in found["local"] for seed in batch["seeds"]} == {1 - rank}
        assert (found["homes"], found["parts"], len(found["servers"])) == ([[1], [0]], 1, 1)
        assert not any(name.startswith("hoploom-") for name in found["temporary"])  # the token's file is gone
    assert not any(_is_running(pid) for found in told for pid in found["servers"])


@pytest.mark.slow
def test_a_host_without_parts_trains_on_the_others(graph: Path, tmp_path: Path, temporary: Path) -> None:
    opening = {"serve": True, "parts_by_rank": [[0, 1], []]}
    _spawn(cluster_workers.tell_batches, str(tmp_path), str(graph), opening)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, found in enumerate(told):
        assert found["batches"] == _expected(graph, rank, 2)
        assert found["homes"] == [[0, 1], []]
    assert [(found["parts"], len(found["servers"])) for found in told] == [(2, 1), (0, 0)]


def test_a_part_that_no_host_holds_is_named(graph: Path) -> None:
    with init() as context, pytest.raises(ConfigError, match=r"no host holds part 1 of .*, they hold \[\[0\]\]; give"):
        context.open(graph, parts=[0], serve=True)


@pytest.mark.slow
def test_a_server_stays_until_the_last_rank_has_left(graph: Path, tmp_path: Path) -> None:
    _spawn(cluster_workers.linger_in_rank_one, str(tmp_path), str(graph))
    assert json.loads((tmp_path / "late.json").read_text()) == _expected(graph)


KILLED = """
import gc, os, signal, sys
gc.disable()
from hoploom.deploy.keeper import descendants
from hoploom.dist.context import init
context = init()
context.open(sys.argv[1], serve=True)
print(*descendants(os.getpid()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_trainer_takes_its_server_with_it(graph: Path, temporary: Path) -> None:
    line, env = [sys.executable, "-c", KILLED, str(graph)], os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(line, env=env, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2  # the server and its keeper
    _until(lambda: not any(map(_is_running, pids)))
    assert not list(temporary.glob("hoploom-*"))


def test_a_server_outlives_the_thread_that_opened_it(graph: Path) -> None:
    opened: list[LocalServer] = []

    def open_server() -> None:
        tasks.append(Path(f"/proc/self/task/{threading.get_native_id()}"))
        opened.append(LocalServer(ServerCommand(str(graph), (), "127.0.0.1:0"), 60))

    tasks: list[Path] = []
    thread = threading.Thread(target=open_server)
    thread.start()
    thread.join(60)
    with opened[0] as server:
        _until(lambda: not tasks[0].exists())
        with hoploom.connect(server.address, timeout=10) as store:
            assert told_of(loader(store, 0, 1)) == _expected(graph)


def test_a_server_that_cannot_start_says_so(graph: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("short")
    with init() as context, pytest.raises(PeerError, match="of this host ended with exit code 2; its own words are"):
        context.open(graph, serve=True, token_file=tmp_path / "token")
    assert "token" in capfd.readouterr().err


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _until(what: Callable[[], bool], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


SCRIPT = """
import gc
gc.disable()
import hoploom.train
from support import cluster_workers
with hoploom.train.init(timeout=60) as context:
    cluster_workers.tell_batches(context, "{folder}", "{graph}", {{}})
gc.freeze()
"""


def test_under_torchrun_on_several_hosts_servers_start_by_themselves(graph: Path, tmp_path: Path) -> None:
    """Two nodes of torchrun, on this machine."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(folder=tmp_path, graph=graph))
    with socket.socket() as free, ExitStack() as stack:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        nodes = []
        for node in range(2):
            line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
            line += [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}", str(script)]
            started = subprocess.Popen(line, env=os.environ | {"PYTHONPATH": str(TESTS)}, start_new_session=True)
            stack.callback(_end, started)
            nodes.append(started)
        assert [node.wait(timeout=90) for node in nodes] == [0, 0]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (found["homes"], len(found["servers"])) == ([[0], [1]], 1)
        assert found["local"] == _expected(graph, rank, 2, locality=[[0], [1]])


def _end(started: subprocess.Popen[bytes]) -> None:
    if started.poll() is None:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
