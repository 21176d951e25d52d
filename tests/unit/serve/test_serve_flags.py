"""The flags of `hoploom serve`: what is written for a server is what it reads, and what means nothing is refused."""

import argparse
import json
import os
import signal
from pathlib import Path

import pytest
from support.graphs import random_graph, save_in_parts

import hoploom
from hoploom.cli import Arguments, main
from hoploom.cli.clusters import COMMANDS
from hoploom.cli.serving import _asked_to_stop, batch_options
from hoploom.deploy.cluster_file import Security, ServerOptions
from hoploom.deploy.programs import ServerCommand
from hoploom.serve import Ready, server
from hoploom.serve.security import ServerSecurity


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flags") / "store"
    save_in_parts(hoploom.from_pyg(random_graph(60, 500, seed=1)), path, 2)
    return path


def _parsed(*words: str) -> Arguments:
    parser = argparse.ArgumentParser()
    COMMANDS["serve"].add_arguments(parser)
    return parser.parse_args(words)


def test_what_a_cluster_file_says_of_a_server_is_what_the_server_reads(path: Path) -> None:
    security = Security(token_file="token", cert="cert", private_key="key", ca="ca", mutual=True, insecure=True)
    options = ServerOptions(threads=3, memory="2GB", store_memory="6GB", cache="20%", fanouts=(4, 2), seeds="train")
    command = ServerCommand(
        str(path), [0], "host1:7700", ["host2:7700", "host3:7700"], security, options, "host1:9400", 7
    )
    python, *module, serve = command.words("python3")[:4]
    assert (python, module, serve) == ("python3", ["-m", "hoploom"], "serve")
    read = _parsed(*command.words("python3")[4:])
    assert vars(read) == {
        **{"store": path, "part": [0], "listen": "host1:7700", "peers": "host2:7700,host3:7700"},
        **{"token_file": "token", "cert": "cert", "key": "key", "ca": "ca", "client_ca": "ca", "insecure": True},
        **{"threads": 3, "memory": "2GB", "store_memory": "6GB", "cache": "20%", "fanouts": "4,2", "seeds": "train"},
        **{"metrics": "host1:9400", "timeout": 15.0, "stall": 60.0, "grace": 7.0},
    }
    default = _parsed(str(path))
    assert (default.stall, default.grace) == (server.ServerLimits.stall, server.GRACE)
    read.ca = None  # there are no such files
    made = batch_options(read, ServerSecurity())
    assert (made.threads, made.memory, made.cache, made.seeds) == (3, 2_000_000_000, "20%", "train")
    assert made.store_memory == 6_000_000_000
    assert list(made.peers) == ["host2:7700", "host3:7700"]
    assert list(made.fanouts) == [4, 2]


def test_an_ignored_ctrl_c_stays_ignored_and_sigterm_asks_to_stop() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _asked_to_stop() as asked:
            os.kill(os.getpid(), signal.SIGINT)
            assert not asked.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked.is_set()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


PEERS = ("--peers", "127.0.0.1:9")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cache", "nonsense", *PEERS), "the cache's size is 'nonsense'"),
        (("--cache", "120%", *PEERS), "the cache's size is '120%'"),
        (("--cache", "20%"), "there are no --peers to ask"),
        (("--cache", "20%", "--part", "0"), "there are no --peers to ask"),
    ],
)
def test_a_cache_that_means_nothing_is_refused_at_the_start(
    words: tuple[str, ...], said: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(path), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_cache_beside_all_parts_is_said_to_have_no_effect(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, warned in (((), True), (("--part", "0"), False)):
        batch_options(_parsed(str(path), "--cache", "20%", *PEERS, *words), ServerSecurity())
        said = "warning: --cache has no effect: all parts are here" in capsys.readouterr().err
        assert said == warned


@pytest.mark.parametrize("ready", [Ready("10.0.0.1:7700", (0, 3)), Ready("[::1]:7700", (), "[::1]:9400")])
def test_what_a_server_writes_is_read(ready: Ready) -> None:
    assert "\n" not in ready.line()
    assert ready.line().startswith('{"ready": "')  # what a shell script looks for
    assert Ready.read(ready.line() + "\n") == ready


def test_the_line_is_json_that_other_programs_read() -> None:
    line = Ready("gpu1:7700", (1,), "gpu1:9400").line()
    assert json.loads(line) == {"ready": "gpu1:7700", "parts": [1], "metrics": "gpu1:9400"}


@pytest.mark.parametrize(
    "line",
    [
        "",
        '{"ready": "127.0.0.1:7700", "parts": [0]',
        '{"ready": 7700, "parts": [0]}',
        '{"ready": "127.0.0.1:7700", "parts": ["0"]}',
        '{"ready": "127.0.0.1:7700", "parts": [0], "metrics": 9400}',
        '["ready", "parts"]',
        "[" * 100_000,
    ],
)
def test_another_line_says_nothing(line: str) -> None:
    assert Ready.read(line) is None
