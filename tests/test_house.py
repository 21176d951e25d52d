"""The house rules that a machine can hold: who imports whom, and how long things grow."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "hoploom"
LAYERS = [
    {"errors", "fields", "schema", "keys", "_core"},
    {"batch", "config", "system"},
    {"ops"},
    {"store"},
    {"sample", "ranks"},
    {"load"},
    {"nn", "serve", "ranking"},
    {"train"},
    {"gpu"},
    {"inference", "ingest", "partition"},
    {"scale"},
    {"deploy"},
    {"train.runs", "report"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
SOURCES = sorted(PACKAGE.rglob("*.py"))
RIDDLE = re.compile(r"(What|Where|Who|Whose|Whom|How|Of|By|As|Until|The same|Those|It|Its)\b")
BUDGETS = {  # lines of each package; "" are the modules beside the packages
    "": 797,
    "config": 819,
    "ops": 4837,
    "store": 4262,
    "sample": 1533,
    "ranks": 1995,
    "load": 3333,
    "nn": 3249,
    "serve": 4276,
    "train": 5489,
    "gpu": 2698,
    "inference": 1304,
    "ranking": 1029,
    "ingest": 6512,
    "partition": 1456,
    "scale": 964,
    "deploy": 2730,
    "report": 1147,
    "cli": 1794,
}
BUDGET, MOST_FILES = 50_224, 230


def _tracked(*patterns: str) -> list[Path]:
    out = subprocess.run(["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in out.stdout.splitlines() if (ROOT / line).exists()]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _name(path: Path) -> str:
    """store.check for store/check.py, store for store/__init__.py."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


MODULES = {_name(path): path for path in SOURCES}


@cache
def _imports(path: Path) -> set[str]:
    """The modules of ours that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hoploom":
            base = node.module.removeprefix("hoploom").removeprefix(".")
            named = {f"{base}.{alias.name}".removeprefix(".") for alias in node.names}
            found |= {name if name in MODULES or name == "_core" else base for name in named}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".", 1)[1] for alias in node.names if alias.name.startswith("hoploom.")}
    return found - {""}


def _room(module: str) -> str:
    """Whose level counts: a package's, or that of a package in it where it has one of its own."""
    parts = module.split(".")
    return next(name for end in (2, 1) if (name := ".".join(parts[:end])) in LEVEL or end == 1)


@pytest.mark.parametrize("name", sorted(set(MODULES) - {""}))
def test_a_module_imports_only_what_stands_above_it(name: str) -> None:
    below = {other for other in _imports(MODULES[name]) if LEVEL[_room(other)] > LEVEL[_room(name)]}
    assert not below, f"{name} imports {below}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Neither at once nor later, nor for their types alone."""
    left = {name: {i for i in _imports(path) if i in MODULES} for name, path in MODULES.items() if name}
    while True:  # neither what imports nothing that is left, nor what nothing left imports
        imported = {other for needed in left.values() for other in needed}
        kept = {name: needed & set(left) for name, needed in left.items() if needed & set(left) and name in imported}
        if kept == left:
            break
        left = kept
    assert not left


def test_a_public_class_name_exists_once() -> None:
    homes: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_a_file_name_and_a_public_function_name_exist_once() -> None:
    """Exceptions: ops.kernels has the names of ops, __main__ the usual one, and two documented functions are report."""
    files: dict[str, list[str]] = {}
    functions: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        if name.startswith("ops.kernels") or name == "__main__":
            continue
        if path.name != "__init__.py":
            files.setdefault(path.name, []).append(name)
        for node in _tree(path).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                functions.setdefault(node.name, []).append(name)
    assert not {name: homes for name, homes in (files | functions).items() if len(homes) > 1 and name != "report"}


def test_docstrings_open_with_a_verb_or_a_noun_phrase() -> None:
    """A docstring says what the thing is or does, and stands without the line above it."""
    riddles = []
    for path in SOURCES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                opening = RIDDLE.match(ast.get_docstring(node) or "")
                if opening:
                    riddles.append(f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)} {opening[0]} ...")
    assert not riddles


def test_packages_keep_to_their_budgets_of_lines() -> None:
    """Raising a budget needs a deletion of as much elsewhere in the same commit."""
    lines: dict[str, int] = {}
    for path in SOURCES:
        package = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else ""
        lines[package] = lines.get(package, 0) + len(path.read_text().splitlines())
    over = {package: (count, BUDGETS[package]) for package, count in lines.items() if count > BUDGETS[package]}
    assert not over
    assert sum(lines.values()) <= BUDGET
    assert len(SOURCES) <= MOST_FILES


def test_every_kind_of_error_is_in_one_file() -> None:
    """An error elsewhere is of one of these kinds, so that users can catch it as that."""
    for path in SOURCES:
        classes = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef)]
        new = [cls.name for cls in classes if any(ast.unparse(base) == "HoploomError" for base in cls.bases)]
        assert not new or path.name == "errors.py", path


def test_no_test_imports_a_test() -> None:
    for path in _tracked("tests/*.py"):
        modules = [node.module or "" for node in ast.walk(_tree(path)) if isinstance(node, ast.ImportFrom)]
        modules += [
            alias.name for node in ast.walk(_tree(path)) if isinstance(node, ast.Import) for alias in node.names
        ]
        assert not [name for name in modules if name.split(".")[-1].startswith("test_")], path


def test_only_ops_touches_the_core() -> None:
    users = {_room(name) for name, path in MODULES.items() if "_core" in _imports(path)}
    assert users <= {"ops"}


def test_no_folder_bears_a_name_that_tools_pass_over() -> None:
    """pytest collects nothing below `dist` or `build`, and ruff reads nothing there."""
    folders = {part for path in _tracked("*.py") for part in path.relative_to(ROOT).parts[:-1]}
    assert not folders & {"build", "dist", "site-packages", "venv", "node_modules"}


def test_files_stay_under_600_lines() -> None:
    files = _tracked("*.py", "*.pyi", "*.cpp", "*.h", "*.sh")
    assert len(files) > 50
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert not {name: lines for name, lines in long.items() if lines > 600}


def test_functions_stay_under_80_lines() -> None:
    long = {}
    for path in _tracked("*.py"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                lines = (node.end_lineno or 0) - first.lineno + 1
                if lines >= 80:
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


def test_one_module_reads_the_environment() -> None:
    for path in set(SOURCES) - {PACKAGE / "ranks" / "environment.py"}:
        assert not re.search(r"\b(environ|getenv)\b", path.read_text()), path
