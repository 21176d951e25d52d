"""The house rules that a machine can hold: who imports whom, and how long things grow."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "hoploom"
LAYERS = [
    {"errors", "schema", "keys", "_core"},
    {"amounts", "batch", "config", "toml"},
    {"ops"},
    {"store", "build"},
    {"sample", "load"},
    {"serve", "nn", "partition", "scale"},
    {"train"},
    {"launch"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def _tracked(*patterns: str) -> list[Path]:
    out = subprocess.run(["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in out.stdout.splitlines() if (ROOT / line).exists()]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hoploom":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("hoploom.")}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_stands_above_it(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    below = {name for name in _imports(path) if LEVEL.get(name, -1) > LEVEL[room]}
    assert not below, f"{room} imports {below}"


def test_only_ops_touches_the_core() -> None:
    users = {path.relative_to(PACKAGE).parts[0] for path in SOURCES if "_core" in _imports(path)}
    assert users <= {"ops"}


def test_files_stay_under_400_lines() -> None:
    files = _tracked("*.py", "*.pyi", "*.cpp", "*.h", "*.sh")
    assert len(files) > 50
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert not {name: lines for name, lines in long.items() if lines > 400}


def test_functions_stay_under_60_lines() -> None:
    long = {}
    for path in _tracked("*.py"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                lines = (node.end_lineno or 0) - first.lineno + 1
                if lines >= 60:
                    long[f"{path.name}:{node.name}"] = lines
    assert not long


def test_every_file_opens_with_what_it_does() -> None:
    silent = [str(path) for path in _tracked("src/*.py") if not ast.get_docstring(_tree(path))]
    assert not silent


def test_nothing_unpickles_and_nothing_forks() -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    for path in SOURCES:
        text = path.read_text()
        names = {alias.name for n in ast.walk(_tree(path)) if isinstance(n, ast.Import) for alias in n.names}
        names |= {n.module or "" for n in ast.walk(_tree(path)) if isinstance(n, ast.ImportFrom)}
        assert not names & forbidden, path
        for call in re.findall(r"torch\.load\(.*", text):  # an archive of tensors, read without unpickling objects
            assert "weights_only=True" in call, path
        assert "allow_pickle=True" not in text, path
        assert "os.fork" not in text, path


def test_no_line_of_the_core_but_the_bindings_knows_python_or_torch() -> None:
    for path in _tracked("csrc/*.cpp", "csrc/*.h"):
        if not path.name.startswith("bindings"):
            text = path.read_text()
            assert "Python.h" not in text, path
            assert "nanobind" not in text, path
            assert "torch/" not in text, path


def test_importing_hoploom_starts_no_thread_and_gives_collections_back() -> None:
    script = (
        "import torch_geometric, gc, threading as t; n = t.active_count(); import hoploom; hoploom.NeighborLoader; "
    )
    script += "print(t.active_count() - n, gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "0 True"


def test_one_module_reads_the_environment() -> None:
    for path in set(SOURCES) - {PACKAGE / "train" / "environment.py"}:
        assert not re.search(r"\b(environ|getenv)\b", path.read_text()), path
