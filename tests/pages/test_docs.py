"""The documentation is true: its examples run and print what they say, its links lead somewhere."""

import ast
import contextlib
import io
import pkgutil
import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT

import hoploom
from hoploom import HoploomError, cli, errors
from hoploom.config.rules import default_of, key_of, keys_in
from hoploom.config.values import as_toml
from hoploom.deploy.cluster_file import SECTIONS, Host, TopKeys
from hoploom.sample.hops import Sampling
from hoploom.serve.batch_messages import Description, Negatives
from hoploom.store.base import Draw
from hoploom.train.runs.run_file import KEYS

pytestmark = pytest.mark.usefixtures("one_thread")  # small tensors gain nothing from more


DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "hoploom"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
WITH_LINKS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTS = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)
RAISES = re.compile(r"# (\w+Error: .*(?:\n# .*)*)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
LANGUAGES = {"python", "bash", "text", "toml", "yaml"}
FILE = re.compile(r"# ([\w-]+\.(?:toml|yml))\n")


# Each starts servers, of which the quick tests of security, metrics, lost servers and of the wire start as many.
SLOW = {"security.md", "operations.md", "protocol.md", "worker-mode.md"}


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.name, marks=pytest.mark.slow if page.name in SLOW else ()) for page in PAGES]
)
def test_every_example_runs_and_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = page.read_text()
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        language, code = block.groups()
        assert language in LANGUAGES, f"a block of {page.name} is {language!r}"
        if language == "python":
            _run(code, text.count("\n", 0, block.start()) + 1, page, names)
        elif language == "bash":
            _run_commands(code.replace("--processes 2", "--processes 1"))
        elif named := FILE.match(code):  # a file that commands below it are about
            Path(named[1]).write_text(code)


def _run(code: str, lines_before: int, page: Path, names: dict[str, Any]) -> None:
    """Statement by statement: a comment behind `print(...)` is what it prints, one below a statement what it raises."""
    lines = code.splitlines()
    for statement in ast.parse(code).body:
        end = statement.end_lineno or 0
        promised = RAISES.match("\n".join(lines[end:]))
        prints = PRINTS.findall("\n".join(lines[statement.lineno - 1 : end]))
        ast.increment_lineno(statement, lines_before)  # so that tracebacks name the page's own lines
        compiled = compile(ast.Module([statement], []), str(page), "exec")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            if promised is None:
                exec(compiled, names)
            else:
                with pytest.raises(HoploomError) as raised:
                    exec(compiled, names)
                assert f"{raised.type.__name__}: {raised.value}" == " ".join(promised[1].split("\n# "))
        assert out.getvalue().splitlines() == prints


def _run_commands(code: str) -> None:
    """The lines that call hoploom; what make does, other tests and the reader do."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["hoploom"]:
            with contextlib.redirect_stdout(io.StringIO()):
                assert cli.main(words[1:]) == 0, line


def test_the_examples_are_found() -> None:
    without = {"tour.md", "install.md", "releasing.md"}
    assert all("```python" in page.read_text() for page in PAGES if page.name not in without)
    assert BLOCK.findall("```python\nx = 1\n```\n\n```text\ny\n```\n") == [("python", "x = 1\n"), ("text", "y\n")]
    assert FILE.match("# two-hosts.toml\nhosts = 2\n")
    assert PRINTS.findall("print(f(1))  # 2, 3\nx = 1  # no\n") == ["2, 3"]
    assert len(re.findall(f"^{RAISES.pattern}", (DOCS / "errors.md").read_text(), re.MULTILINE)) > 10


def test_the_readme_is_short_and_its_two_commands_come_early() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 200
    screen = "\n".join(text.splitlines()[:20])
    assert all(shown in screen for shown in ("images/speed.svg", "badge-licence", "badge-python", "badge-torch"))
    early = [line.split("#")[0].strip() for line in text.splitlines()[:40]]
    assert early.index("make demo") + 1 == early.index("make test")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test", *re.findall(r"`make ([\w-]+)`", text)} <= set(targets)


@pytest.mark.parametrize("page", WITH_LINKS, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    prose = BLOCK.sub("", page.read_text())
    links = [link.split("#")[0] for link in LINK.findall(prose) if "://" not in link and not link.startswith("#")]
    assert not [link for link in links if not (page.parent / link).exists()]
    if page.parent == DOCS:  # the site has no other files
        assert all((page.parent / link).resolve().is_relative_to(DOCS) for link in links)


@pytest.mark.parametrize("page", WITH_LINKS, ids=lambda page: page.name)
def test_pages_use_the_usual_words_of_the_field(page: Path) -> None:
    private = r"\b(whoever|elsewhere|under way|lies|deals|hears|told|contenders|a word from you)\b"
    assert not re.findall(private, BLOCK.sub("", page.read_text()), re.IGNORECASE)


def test_the_tests_that_pages_name_are_there() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(tests/[\w/]+\.py)", page.read_text())}
    assert len(named) > 15
    assert not [name for name in named if not (ROOT / name).exists()]


def test_every_page_is_on_the_site() -> None:
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


def test_the_first_page_leads_to_every_other_one() -> None:
    links = {link.split("#")[0] for link in LINK.findall((DOCS / "index.md").read_text())}
    missing = {page.name for page in DOCS.glob("*.md")} - links - {"index.md"}
    assert not missing, "give each a row in docs/index.md, under the section it has in mkdocs.yml"


def test_every_public_name_is_in_the_api_and_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    described = re.findall(r"^::: (hoploom\.[\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    public = {name for package in (hoploom, hoploom.load, hoploom.nn, hoploom.train) for name in package.__all__}
    assert not public - {path.rpartition(".")[2] for path in described}
    assert all(getattr(pkgutil.resolve_name(path), "__doc__", None) for path in described)
    assert not [name for name in hoploom.__all__ if not re.search(rf"`{name}\b", changelog)]


def test_values_of_run_toml_that_pages_name_in_a_sentence_are_possible() -> None:
    named = [pair for page in PAGES for pair in re.findall(r"`(\w+\.\w+) = ([^`]+)`", page.read_text())]
    checked = [(name, tomllib.loads(f"x = {value}")["x"]) for name, value in named if name in KEYS]
    assert len(checked) > 7
    assert not [(name, value) for name, value in checked if KEYS[name].rule.read(value) is None]


def test_the_page_of_cluster_files_has_every_key() -> None:
    page = (DOCS / "launch.md").read_text()
    assert not [row for row in _rows_of_keys() if row not in page.splitlines()]


def _rows_of_keys() -> list[str]:
    """The rows of the page's table: key, default, an example where there is no default, help."""
    rows = []
    for section, owner in {"": TopKeys, "hosts.NAME": Host, **SECTIONS}.items():
        for name, described in keys_in(owner).items():
            key, default = key_of(described), default_of(described)
            shown = f" | `{as_toml(key.example)}`" if default in (None, {}) else f"`{as_toml(default)}` | "
            rows.append(f"| `{f'{section}.{name}'.lstrip('.')}` | {shown} | {key.help} |")
    return rows


def test_the_page_of_the_protocol_has_every_entry_of_a_request() -> None:
    page = (DOCS / "protocol.md").read_text()
    tables = [set(re.findall(r"`(\w+)`", _first_column(table))) for table in page.split("\n\n")]
    assert {"part", "frontiers", *Draw._fields} in tables
    for described in (Description, Sampling, Negatives):
        assert {field.name for field in fields(described)} in tables


def _first_column(table: str) -> str:
    return "\n".join(row.split(" | ")[0] for row in table.splitlines() if row.startswith("| `"))


def test_the_tree_of_errors_is_the_one_in_the_code() -> None:
    drawn = re.findall(r"── (\w+)", (DOCS / "errors.md").read_text())
    assert drawn == [
        cls.__name__ for cls in vars(errors).values() if errors.HoploomError in getattr(cls, "__bases__", ())
    ]


def test_the_tour_names_files_where_they_are() -> None:
    """A file stands in one of the folders that its section names, or is named with its folder."""
    wrong, num_named = [], 0
    for section in (DOCS / "tour.md").read_text().split("\n## ")[1:]:
        folders = [home / folder for folder in re.findall(r"`([\w/]+)/`", section) for home in (PACKAGE, ROOT)]
        for named in re.findall(r"`([\w/]+\.(?:py|cpp|h))`", section):
            num_named += 1
            there = (PACKAGE / named).is_file() or (ROOT / named).is_file()
            if not there and not any(True for folder in folders for _ in folder.rglob(named)):
                wrong.append((section.splitlines()[0], named))
    assert num_named > 60
    assert not wrong


def test_no_two_types_of_one_argument_have_the_same_name_on_the_api_page() -> None:
    griffe = pytest.importorskip("griffe")
    path = ROOT / "src" / "hoploom" / "load" / "arguments.py"
    module = griffe.visit("arguments", path, path.read_text())
    for arguments in ("NodeArguments", "LinkArguments"):
        parts = module[arguments]["num_neighbors"].annotation.iterate()
        shown = [part.canonical_path.split(".")[-1] for part in parts if isinstance(part, griffe.ExprName)]
        assert sorted(shown) == ["Fanouts", "NumNeighbors"]
