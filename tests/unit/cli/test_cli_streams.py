"""Ctrl-C before a command runs, and streams that are closed or full: an exit code and a line, never a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from hoploom.ingest.synthetic import generate

INTERRUPTED = """
import os, signal, sys
from contextlib import suppress

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            with suppress(KeyboardInterrupt):  # as callbacks of an import do
                os.kill(os.getpid(), signal.SIGINT)

MODULE = sys.argv[1]
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
from hoploom.__main__ import main

sys.argv[:] = ["hoploom", *sys.argv[2:]]
sys.exit(main())
"""

IMPORTS_INTERRUPTED = """
import os, signal

if __name__ == "__mp_main__":
    os.kill(os.getpid(), signal.SIGINT)

import hoploom

def work(context):
    print("the rank began")

if __name__ == "__main__":
    hoploom.spawn(work, 1)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streams") / "graph.store"
    generate(path, num_nodes=40, avg_degree=3, num_features=4, num_classes=2)
    return path


def shell(command: str, *words: object) -> subprocess.CompletedProcess[str]:
    """`hoploom` stands for the command, $1 and so on for the words."""
    command = command.replace("hoploom", f"{sys.executable} -m hoploom")
    run = ["bash", "-o", "pipefail", "-c", command, "bash", *map(str, words)]
    return subprocess.run(run, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("hoploom.cli", "info STORE"),
        ("torch", "info STORE"),
        pytest.param("hoploom.store.check", "check STORE", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_during_imports_ends_the_command_at_once(module: str, words: str, store: Path, tmp_path: Path) -> None:
    run = [sys.executable, "-c", INTERRUPTED, module, *words.replace("STORE", str(store)).split()]
    found = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "hoploom: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # a rank imports PyG
def test_a_rank_that_is_interrupted_during_its_imports_says_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IMPORTS_INTERRUPTED)
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert "the rank began" not in found.stdout
    assert "KeyboardInterrupt" not in found.stderr
    assert "rank 0 ended with exit code 130" in found.stderr


# `plan` prints like any command, and needs no store.


def test_a_reader_that_leaves_is_no_success() -> None:
    assert shell("hoploom plan --nodes 1e9 --edges 1e10 | true").returncode == 141


def test_closed_streams_are_no_error(store: Path) -> None:
    assert shell("hoploom plan --nodes 1e9 --edges 1e10 >&- 2>&-").returncode == 0
    assert shell('hoploom check "$1" <&- >&-', store).stderr == ""


def test_a_full_disk_behind_standard_output_is_one_line() -> None:
    found = shell("unset PYTHONUNBUFFERED; hoploom plan --nodes 1e9 --edges 1e10 > /dev/full")
    assert found.returncode == 1
    assert found.stderr == "hoploom: cannot write to standard output: No space left on device\n"
