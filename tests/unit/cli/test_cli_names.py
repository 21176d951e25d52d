"""Names in files are anybody's: no terminal, page or drafted file gets a character of theirs that it would act on."""

import io
from pathlib import Path

import pytest
import torch
from support.damage import edit

import hoploom
from hoploom import ConfigError, Store, StoreError
from hoploom.cli import main

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
    part = ["partition", "graph.store", "-o", "parts.store", "--parts", "2", "--report", "report.html"]
    for words in (["info", "graph.store"], part, ["init", "--store", "graph.store"], ["check", "parts.store"]):
        assert main(words) == 0
        shown = capsys.readouterr()
        check_shown(shown.out + shown.err)
        assert words[0] in ("check", "partition") or AS_SHOWN in shown.out + shown.err
    page = (folder / "report.html").read_text()
    assert "red" not in page or "<b>&" not in page
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
