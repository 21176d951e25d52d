"""hoploom.open with a context: the store that the deployment means, with real servers, in real processes."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import assert_same, assert_same_batches
from support.graphs import random_graph, save_in_parts
from support.networks import Host, hosts
from support.ports import free_ports
from support.process_tree import command_of, runs
from support.servers import OneProcess
from support.until import until

import hoploom
from hoploom import ConfigError, PeerError
from hoploom.deploy.guard import descendants
from hoploom.deploy.guarded import SignalName, Supervisor
from hoploom.deploy.open import LocalServer, _show
from hoploom.deploy.programs import ServerCommand
from hoploom.ranks.environment import LaunchSettings, read_launch_settings
from hoploom.ranks.spawn import spawn
from hoploom.store import Wanted
from hoploom.train import Context, init

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_variables_of_launch_say_where_the_graph_is() -> None:
    variables = {"HOPLOOM_SERVERS": "a:1, b:2", "HOPLOOM_STORE": "/s", "HOPLOOM_PARTS": "1,0", "HOPLOOM_CA": "/ca"}
    variables |= {"HOPLOOM_TOKEN_FILE": "/t", "GROUP_RANK": "3"}
    security = {"token_file": "/t", "ca": "/ca"}
    assert read_launch_settings(variables) == LaunchSettings(("a:1", "b:2"), "/s", (0, 1), security, 3)
    assert read_launch_settings({"SLURM_NODEID": "2"}) == LaunchSettings(node=2)
    assert read_launch_settings({"HOPLOOM_SERVERS": ""}) == LaunchSettings()


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
        read_launch_settings(variables)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster") / "graph"
    save_in_parts(hoploom.from_pyg(random_graph(60, 400, 1)), folder, 2)
    return folder


def _loader(store: Any, rank: int = 0, world_size: int = 1, **options: Any) -> hoploom.NeighborLoader:
    given = {"batch_size": 8, "shuffle": True, "rank": rank, "world_size": world_size} | options
    return hoploom.NeighborLoader(store, [3, 2], **given)


def _assert_batches_of(graph: Path | str, store: Any) -> None:
    assert_same_batches(_loader(hoploom.open(graph)), _loader(store))


def test_without_servers_on_one_host_it_is_open(graph: Path) -> None:
    with init() as context:
        store = hoploom.open(graph, context=context)
        assert (len(store.parts), store.deployment.homes, store.deployment.makes_batches) == (2, (), False)
        _assert_batches_of(graph, store)
        assert hoploom.open(graph, context=context, parts=[1]).deployment.homes == ((1,),)


@pytest.fixture(scope="module")
def address(graph: Path, server_process: OneProcess) -> str:
    return server_process.serve(graph, [[]])[0]


def test_servers_given_make_the_batches_or_the_rest_of_the_rows(graph: Path, address: str) -> None:
    with init() as context:
        store = hoploom.open(context=context, servers=[address])
        assert store.deployment.makes_batches
        _assert_batches_of(graph, store)
        beside = hoploom.open(graph, context=context, parts=[0], servers=address, topology="parted", timeout=30)
        assert (beside.deployment.makes_batches, len(beside.parts), beside.deployment.homes) == (False, 1, ((0,),))
        _assert_batches_of(graph, beside)
        without = hoploom.open(graph, context=context, parts=[], servers=address)  # batches are made here
        assert (without.deployment.makes_batches, len(without.parts), without.deployment.homes) == (False, 0, ())
        _assert_batches_of(graph, without)


def test_two_trainers_with_different_options_do_not_meet(graph: Path, address: str) -> None:
    options: list[dict[str, Any]] = [{"disjoint": True}, {"mode": "blocks", "seed": 9}]
    with hoploom.connect(address) as first, hoploom.connect(address) as second:
        pairs = zip(_loader(first, **options[0]), _loader(second, **options[1]), strict=True)
        for found, *expected in zip(pairs, *(_loader(hoploom.open(graph), **each) for each in options), strict=True):
            assert_same(expected[0], found[0])
            assert_same(expected[1], found[1])


def test_rank_0_alone_says_that_locality_changes_nothing_where_servers_make_the_batches(address: str) -> None:
    with hoploom.connect(address) as store:
        with pytest.warns(UserWarning, match="locality=True changes nothing: servers make the batches") as notes:
            assert [len(_loader(store, rank, 2, locality=True)) for rank in (0, 1)] == [4, 4]
        assert len(notes) == 1


def test_what_launch_says_wins_over_a_scripts_path(graph: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with init() as context:
        monkeypatch.setenv("HOPLOOM_SERVERS", address)
        store = hoploom.open("nowhere.store", context=context)  # server-client mode: no path means anything here
        assert store.deployment.makes_batches
        monkeypatch.setenv("HOPLOOM_STORE", str(graph))
        monkeypatch.setenv("HOPLOOM_PARTS", "1")
        store = hoploom.open("nowhere.store", context=context)
        assert (store.deployment.makes_batches, store.deployment.homes) == (False, ((1,),))
        _assert_batches_of(graph, store)


def test_servers_of_launch_and_servers_beside_trainers_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPLOOM_SERVERS", "127.0.0.1:1")
    message = "serve is True, but hoploom launch has started servers; leave serve or its servers out"
    with init() as context, pytest.raises(ConfigError, match=message):
        hoploom.open("graph.store", context=context, serve=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "there is no store: path is None and no server is named; give one of them, or hoploom launch"),
        ({"serve": "yes"}, "serve is 'yes'; give True, False, 'auto' or a GPU such as 'cuda'"),
        ({"serve": True, "servers": "127.0.0.1:1"}, "there are servers already; leave serve or servers out"),
        ({"serve": "cuda", "servers": "127.0.0.1:1"}, "serve is 'cuda', but there are servers already; leave serve"),
        ({"path": "s", "chache": 3}, "hoploom.open got 'chache'; besides its own arguments it takes"),
        ({"path": "s", "parts": ["a"]}, "a part is 'a'; give the numbers of parts"),
    ],
)
def test_what_can_never_be_opened_is_refused(arguments: dict[str, Any], message: str) -> None:
    with init() as context, pytest.raises(ConfigError, match=message):
        hoploom.open(context=context, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "s", "servers": "127.0.0.1:1"}, "got 'servers' without a context; give context="),
        ({"path": "s", "timeout": 3}, "got 'timeout' without a context; give context="),
        ({}, "path is None, and there is no context; give the path of a store"),
    ],
)
def test_without_a_context_only_files_are_opened(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hoploom.open(**arguments)


def _check_rank(context: Context, graph: str, parts: list[list[int]], opening: dict[str, Any], pids: str) -> None:
    """Compare the batches of this rank with those of the whole store; leave the process ids of its servers."""
    own, ranks, near = parts[context.rank], (context.rank, context.world_size), hoploom.open(graph)
    store = hoploom.open(graph, context=context, serve=True, parts=own, **opening)
    assert (store.deployment.homes, len(store.parts)) == (tuple(map(tuple, parts)), len(own))
    assert_same_batches(_loader(near, *ranks), _loader(store, *ranks))
    local = list(_loader(store, *ranks, locality=True))
    assert_same_batches(_loader(near, *ranks, locality=parts), local)
    assert {seed // 30 for batch in local for seed in batch.n_id[: batch.batch_size].tolist()} <= set(own or [0, 1])
    assert not list(Path(os.environ["TMPDIR"]).glob("hoploom-*"))  # the token's file is gone
    servers = [pid for pid in descendants(os.getpid()) if " serve " in command_of(pid)]
    assert len(servers) == bool(own)
    for pid in servers:
        Path(pids, str(pid)).touch()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "opening"), [([[1], [0]], {"topology": "parted"}), ([[0, 1], []], {})], ids=["one each", "none on one"]
)
def test_two_hosts_train_on_each_others_parts(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: list[list[int]], opening: dict[str, Any]
) -> None:
    pids, temporary = tmp_path / "pids", tmp_path / "temporary"
    pids.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    spawn(_check_rank, 2, [str(graph), parts, opening, str(pids)], timeout=60)
    assert len(list(pids.iterdir())) == sum(map(bool, parts))
    assert not any(runs(int(path.name)) for path in pids.iterdir())


def test_a_part_that_no_host_holds_is_named(graph: Path) -> None:
    with init() as context, pytest.raises(ConfigError, match=r"no host holds part 1 of .*, they hold \[\[0\]\]; give"):
        hoploom.open(graph, context=context, parts=[0], serve=True)


def test_a_server_beside_a_trainer_is_on_its_device(graph: Path, device: torch.device) -> None:
    with init(device=device) as context:
        store = hoploom.open(graph, context=context, serve=device.type)
        (command,) = [line for pid in descendants(os.getpid()) if " serve " in (line := command_of(pid))]
        assert f"--device {context.device}" in command
        _assert_batches_of(graph, store)


def _linger_in_rank_one(context: Context, graph: str) -> None:
    """Rank 0 is done at once; rank 1 asks rank 0's server long after that."""
    store = hoploom.open(graph, context=context, serve=True)
    if context.rank == 1:
        until(lambda: context._peers._has("ended", 0), "the goodbye of rank 0")  # type: ignore[union-attr]
        _assert_batches_of(graph, store)


@pytest.mark.slow
def test_a_server_stays_until_the_last_rank_has_left(graph: Path) -> None:
    spawn(_linger_in_rank_one, 2, [str(graph)], timeout=60)


# Stands in for the Python of `hoploom serve`: what is tested is who starts and ends it.
STAND_IN = """#!/bin/sh
case "$*" in *broken.store*) echo the store is broken >&2; exit 2;; esac
echo serving parts 0 of graph.store on 127.0.0.1:7700 >&2
echo '{"ready": "127.0.0.1:7700", "parts": [0]}'
exec sleep 100
"""
KILLED = """
import os, signal, sys
from hoploom.deploy.guard import descendants
from hoploom.deploy.open import LocalServer
from hoploom.deploy.programs import ServerCommand
server = LocalServer(ServerCommand("graph.store", [0], "127.0.0.1:0"), 60, sys.argv[1])
print(*descendants(os.getpid()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return str(path)


def test_a_killed_trainer_takes_its_server_with_it(stand_in: str) -> None:
    line = [sys.executable, "-c", KILLED, stand_in]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2  # the server and its guard
    until(lambda: not any(map(runs, pids)), "the end of the server")


def test_a_server_outlives_the_thread_that_opened_it(stand_in: str) -> None:
    opened: list[LocalServer] = []
    tasks: list[Path] = []

    def open_server() -> None:
        tasks.append(Path(f"/proc/self/task/{threading.get_native_id()}"))
        opened.append(LocalServer(ServerCommand("graph.store", (), "127.0.0.1:0"), 60, stand_in))

    before, thread = set(descendants(os.getpid())), threading.Thread(target=open_server)
    thread.start()
    thread.join(60)
    with opened[0]:
        until(lambda: not tasks[0].exists(), "the end of the thread")
        started = set(descendants(os.getpid())) - before
        assert len(started) == 2
        assert all(map(runs, started))
    until(lambda: not any(map(runs, started)), "the end of the server")


def test_a_server_that_cannot_start_says_so(stand_in: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PeerError, match="of this host ended with exit code 2; its own words are"):
        LocalServer(ServerCommand("broken.store", (), "127.0.0.1:0"), 60, stand_in)
    assert capfd.readouterr().err == "the store is broken\n"


def test_a_server_that_works_says_nothing(stand_in: str, capfd: pytest.CaptureFixture[str]) -> None:
    LocalServer(ServerCommand("graph.store", (), "127.0.0.1:0"), 60, stand_in).close()
    assert capfd.readouterr().err == ""


def test_a_server_is_killed_where_its_end_is_interrupted(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Supervisor.stop

    def interrupt(supervisor: Supervisor, name: SignalName, seconds: float) -> None:
        if name == "TERM":
            raise KeyboardInterrupt
        stop(supervisor, name, seconds)

    before = set(descendants(os.getpid()))
    server = LocalServer(ServerCommand("graph.store", (), "127.0.0.1:0"), 60, stand_in)
    started = set(descendants(os.getpid())) - before
    monkeypatch.setattr(Supervisor, "stop", interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.close()
    until(lambda: not any(map(runs, started)), "the end of the server")


def test_a_line_is_written_whole_or_left(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda number, content: write(number, content[:3]))
        _show("here/server", "a warning", is_error=True)
    assert capfd.readouterr().err == "a warning\n"

    def refuse(number: int, content: bytes) -> int:
        raise BlockingIOError

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse)
        _show("here/server", "a warning", is_error=True)


RANK = """
import gc, json, os, sys
gc.disable()
from concurrent.futures import ThreadPoolExecutor
import torch
import hoploom
from hoploom.deploy.guard import descendants
from hoploom.ranks.context import init
from hoploom.store import Wanted
with init(device="cpu", timeout=60) as context:
    store = hoploom.open(sys.argv[1], context=context)
    wanted = [Wanted(store.schema.node_types[0].name, "x", torch.arange(60))]
    with ThreadPoolExecutor(8) as pool:  # more connections than there are
        (rows,) = list(pool.map(lambda _: store.features.gather(wanted), range(40)))[0]
    print(json.dumps([store.deployment.homes, len(descendants(os.getpid())), rows.tolist()]), flush=True)
os._exit(0)
"""


def told_by_two(graph: Path, address: str, on: Sequence[Host] = ()) -> list[str]:
    """Two ranks, with the variables by which torchrun says that each is alone on its host: what each has on stderr."""
    (port,) = free_ports(1)
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    common |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            variables = os.environ | common | {"RANK": str(rank), "GROUP_RANK": str(rank)}
            command = [sys.executable, "-c", RANK, str(graph)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            words = on[rank].command(command) if on else command
            started = subprocess.Popen(words, env=variables, start_new_session=True, **pipes)
            stack.callback(_end, started)
            ranks.append(started)
        said, errors = zip(*(rank.communicate(timeout=90) for rank in ranks), strict=True)
    near = hoploom.open(graph)
    (expected,) = near.features.gather([Wanted(near.schema.node_types[0].name, "x", torch.arange(60))])
    for out in said:
        assert json.loads(out) == [[[0], [1]], 2, expected.tolist()], errors
    return [text.decode() for text in errors]


@pytest.mark.slow  # four processes import torch
def test_on_several_hosts_servers_start_by_themselves(graph: Path) -> None:
    assert "warning" not in "".join(told_by_two(graph, "127.0.0.1")).lower()


@pytest.mark.slow
def test_rank_0_alone_says_that_servers_on_a_network_are_without_tls_and_what_the_script_can_do(graph: Path) -> None:
    with hosts(2) as found:
        first, second = told_by_two(graph, found[0].name, found)
    [warning] = [line for line in first.splitlines() if "warning" in line.lower()]
    assert "send without TLS" in warning
    assert "give hoploom.open cert=, key= and ca=" in warning
    assert "--" not in warning
    assert "warning" not in second.lower()


def _end(started: subprocess.Popen[bytes]) -> None:
    if started.poll() is None:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
