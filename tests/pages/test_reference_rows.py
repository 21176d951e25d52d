"""The tables of the ports are true: the pages and the READMEs have the same rows, and each names what is there."""

import ast
import re
from pathlib import Path

import pytest
from support import ROOT

PORTS = ROOT / "examples" / "references"
SECTIONS = {  # port -> the page with what to write, and its heading
    "pyg_multi_gpu": ("coming-from-pyg.md", "Port PyG's multi-GPU tutorial"),
    "pyg_multi_node": ("coming-from-pyg.md", "Port PyG's multi-node tutorial"),
    "dgl_multi_gpu_custom_sampler": ("coming-from-dgl.md", "Port DGL's multi-GPU tutorial"),
    "glt_worker_mode": ("coming-from-glt.md", "Port GLT's worker mode"),
    "glt_examples": ("coming-from-glt.md", "Port GLT's launcher and server-client mode"),
}
HEADS = {"With Hoploom", "Where it is done"}  # over the right columns of a page and of a README
ROW = re.compile(r"^\| (.+) \| (.+) \|$", re.MULTILINE)
PLACE = re.compile(r"`([\w./-]+?)(?:::(\w+))?`(?:: `([^`]+)`)?")
OPEN = "Not here"  # how a row begins, or a sentence of it, of which nothing or not all works
TABLE = "\n## Every row\n"  # where the table of a README begins

each_port = pytest.mark.parametrize("port", SECTIONS)


def rows(text: str) -> list[tuple[str, str]]:
    return [row for row in ROW.findall(text) if row[1] not in HEADS]


def readme(port: str) -> list[tuple[str, str]]:
    return rows((PORTS / port / "README.md").read_text())


def page(port: str) -> list[tuple[str, str]]:
    name, heading = SECTIONS[port]
    return rows((ROOT / "docs" / name).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0])


def is_there(port: str, file: str, test: str, fragment: str) -> bool:
    """Whether the file exists, and defines this test, or holds these words."""
    path = ROOT / file if file.startswith(("tests/", "benchmarks")) else PORTS / port / file
    if not path.exists():
        return False
    if test:
        return test in {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    if path.name == "README.md":  # its table would hold every fragment that it names
        return fragment != "" and fragment in path.read_text().split(TABLE)[0]
    return fragment in path.read_text() if fragment else path.is_dir()


def test_every_folder_has_a_page() -> None:
    assert sorted(SECTIONS) == sorted(path.parent.name for path in PORTS.glob("*/README.md"))


@each_port
def test_the_page_says_what_to_write_for_every_row_of_the_readme(port: str) -> None:
    assert [key for key, _ in page(port)] == [key for key, _ in readme(port)]
    assert len(readme(port)) >= 30


@each_port
def test_every_row_names_what_is_there(port: str) -> None:
    wrong = []
    for key, where in readme(port):
        places = PLACE.findall(where)
        if not places and not where.startswith(OPEN):
            wrong.append((key, where))
        wrong += [(key, place) for place in places if not is_there(port, *place)]
    assert not wrong


@each_port
def test_what_is_missing_is_said_by_the_page_and_by_the_readme(port: str) -> None:
    said = dict(page(port))
    assert not [key for key, where in readme(port) if (OPEN in where) != (OPEN in said[key])]


@each_port
def test_every_script_of_a_port_is_named_by_its_readme(port: str) -> None:
    text = (PORTS / port / "README.md").read_text()
    names = {path.name for path in PORTS.joinpath(port).iterdir() if path.is_file()} - {"README.md"}
    assert names
    assert not [name for name in names if name not in text.split(TABLE)[0]]


def test_a_missing_file_test_or_line_is_found() -> None:
    port = "pyg_multi_gpu"
    assert is_there(port, "multi_gpu.py", "", "context.wrap(")
    assert not is_there(port, "multi_gpu.py", "", "context.unwrap(")
    assert not is_there(port, "other.py", "", "context.wrap(")
    assert is_there(port, "README.md", "", "torchrun --standalone")
    assert not is_there(port, "README.md", "", "`multi_gpu.py`: `context.wrap(`")  # a row of the table itself
    here = str(Path(__file__).relative_to(ROOT))
    assert is_there(port, here, "test_a_missing_file_test_or_line_is_found", "")
    assert not is_there(port, here, "test_that_is_not_there", "")
