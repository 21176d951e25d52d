"""What commands print: names escaped, one line for Ctrl-C and for streams that are closed or full."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.damage import edit

import hoploom
from hoploom import ConfigError, Store, StoreError
from hoploom.cli import main
from hoploom.ingest.synthetic import generate

NASTY = 'p\x1b[31mred\x07\r\n[task]\nkind="\u202e<b>&"'
AS_SHOWN = r"p\x1b[31mred\x07\r\n[task]\nkind="


def nasty_store() -> Store:
    """All names are nasty, but for those of fields that are looked for."""
    fields = {"x": torch.rand(6, 4), "y": torch.arange(6) % 3, NASTY: torch.rand(6, 2)}
    edges = {"edge_index": torch.randint(6, (2, 20)), NASTY: torch.rand(20)}
    splits = {"train": torch.arange(4), NASTY: torch.arange(2)}
    key = (NASTY, "to", NASTY)
    return hoploom.from_tensors({NASTY: fields}, {key: edges}, splits={NASTY: splits}, weight_attr=NASTY)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    nasty_store().save(tmp_path / "graph.store")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_shown(text: str) -> None:
    assert all(char.isprintable() or char == "\n" for char in text), ascii(text)


def test_commands_show_names_escaped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = ["partition", "graph.store", "-o", "parts.store", "--parts", "2", "--report", "report.json"]
    for words in (["info", "graph.store"], part, ["init", "--store", "graph.store"], ["check", "parts.store"]):
        assert main(words) == 0
        shown = capsys.readouterr()
        check_shown(shown.out + shown.err)
        assert words[0] in ("check", "partition") or AS_SHOWN in shown.out + shown.err
    check_shown((folder / "report.json").read_text())
    edit(folder / "graph.store", lambda contents: contents["files"].popitem())
    edit(folder / "graph.store", lambda contents: contents["files"].update({NASTY: {"bytes": 1, "crc32": 1}}))
    assert main(["check", "graph.store"]) == 1
    assert main(["info", NASTY]) == 2
    shown = capsys.readouterr()
    check_shown(shown.out + shown.err)
    assert AS_SHOWN in shown.out
    assert r"p\x1b[31mred" in shown.err


def test_a_store_shows_its_names_escaped() -> None:
    store = nasty_store()
    for shown in (repr(store), repr(store[NASTY]), repr(store[NASTY][NASTY])):
        check_shown(shown)
        assert AS_SHOWN in shown


def test_half_of_a_pair_of_surrogates_is_no_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """UTF-8 has no way to write it, and neither have terminals, paths and the core."""
    with pytest.raises(ConfigError, match=r"the name 'a\\ud800' cannot be written in UTF-8; rename it"):
        hoploom.from_tensors({"a\ud800": {"x": torch.rand(3, 2)}}, {})
    edit(folder / "graph.store", lambda contents: contents["node_types"][0]["fields"].update({"\udfff": {}}))
    with pytest.raises(StoreError):
        hoploom.open("graph.store")
    edit(folder / "graph.store", lambda contents: contents["node_types"][0].update(name="\udfff"))
    assert main(["info", "graph.store"]) == 2
    check_shown(capsys.readouterr().err)


def test_output_that_cannot_be_encoded_is_escaped(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """In a terminal of another encoding, and of paths that are not UTF-8."""
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, "ascii"))
    (folder / "graph.store").rename(folder / "grä.store")
    assert main(["info", "grä.store"]) == 0
    assert rb"gr\xe4.store: 6 nodes" in raw.getvalue()


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
    assert "rank 0 was interrupted by SIGINT" in found.stderr


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
