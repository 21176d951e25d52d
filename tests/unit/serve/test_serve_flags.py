"""`hoploom serve`: its flags mean what they say, its ready line is read back, and none of its modules can unpickle."""

import argparse
import ast
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.graphs import random_graph, ring, save_in_parts
from support.servers import OneProcess

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
    more = ServerOptions(threads=3, memory="2GB", store_memory="6GB", cache="20%", fanouts=(4, 2), seeds="train")
    more = replace(more, device="cuda:1")
    command = ServerCommand(str(path), [0], "host1:7700", ["host2:7700", "host3:7700"], security, more, "host1:9400", 7)
    python, *module, serve = command.words("python3")[:4]
    assert (python, module, serve) == ("python3", ["-m", "hoploom"], "serve")
    read = _parsed(*command.words("python3")[4:])
    assert vars(read) == {
        **{"store": path, "part": [0], "listen": "host1:7700", "peers": "host2:7700,host3:7700"},
        **{"token_file": "token", "cert": "cert", "key": "key", "ca": "ca", "client_ca": "ca", "insecure": True},
        **{"threads": 3, "memory": "2GB", "store_memory": "6GB", "cache": "20%", "fanouts": "4,2", "seeds": "train"},
        **{"device": "cuda:1", "metrics": "host1:9400", "timeout": 15.0, "stall": 60.0, "grace": 7.0},
    }
    default = _parsed(str(path))
    assert (default.stall, default.grace) == (server.ServerLimits.stall, server.GRACE)
    read.ca = None  # there are no such files
    made = batch_options(read, ServerSecurity())
    assert (made.threads, made.memory, made.cache, made.seeds) == (3, 2_000_000_000, "20%", "train")
    assert (made.store_memory, list(made.peers)) == (6_000_000_000, ["host2:7700", "host3:7700"])
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


SRC = ROOT / "src"
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "multiprocessing"}
ARCHIVES = ("torch.load", "torch.jit.load", "torch.package.PackageImporter")
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {"pickle_deserialize", "deserialize", "deserialize_pandas", "unsafe_load", "full_load", "read_pickle"}


@pytest.fixture(scope="module")
def loaded(server_process: OneProcess, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The modules of ours in a server's process, once it has made a batch."""
    path = tmp_path_factory.mktemp("loaded") / "store"
    hoploom.from_pyg(ring(12)).save(path)
    with hoploom.connect(server_process.serve(path, [[]])) as store:
        next(iter(hoploom.NeighborLoader(store, [2], torch.arange(4), batch_size=4)))
    server_process.serve(path, [[]])
    return server_process.loaded


def _path(module: str) -> Path:
    path = SRC.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imports(tree: ast.AST) -> Iterator[str]:
    """The packages that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").split(".")[0]


def unpickling(tree: ast.AST) -> Iterator[str]:
    """What in a module could make code of bytes."""
    yield from (name for name in _imports(tree) if name in MODULES)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg is not None}
        called = ast.unparse(node.func)
        last = called.rpartition(".")[2]
        if called in BUILTINS or last in CALLS:
            yield called
        if called in ARCHIVES and given.get("weights_only") != "True":
            yield called
        if given.get("allow_pickle", "False") != "False":
            yield f"{called}(allow_pickle=...)"
        if called == "yaml.load" and not given.get("Loader", ast.unparse(node.args[-1])).endswith("SafeLoader"):
            yield called


def test_no_module_of_a_server_can_unpickle(loaded: list[str]) -> None:
    assert {"hoploom.serve.service", "hoploom.serve.wire", "hoploom.serve.batch_messages", "hoploom.sample"} <= set(
        loaded
    )
    sources = [name for name in loaded if name != "hoploom._core"]  # compiled: of Python it knows tensors alone
    found = {name: list(unpickling(ast.parse(_path(name).read_text()))) for name in sources}
    assert not {name: what for name, what in found.items() if what}


def test_a_server_loads_no_trainer_and_no_launcher(loaded: list[str]) -> None:
    assert not [name for name in loaded if name.startswith(("hoploom.train", "hoploom.deploy"))]


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "from multiprocessing import connection",
        "import torch\ntorch.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "pyarrow.deserialize(buffer)",
        "yaml.load(text, yaml.Loader)",
        "eval(text)",
    ],
)
def test_each_way_to_unpickle_is_found(text: str) -> None:
    assert list(unpickling(ast.parse(text)))
