"""No module of ours that a server loads can unpickle: whatever bytes a peer sends, none of them is code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.graphs import ring
from support.servers import OneProcess

import hoploom

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
