"""Completion in real shells: what stands there after the tabulator key."""

import shutil
import subprocess
from pathlib import Path

import pytest

from hoploom.cli import COMMANDS, main

ASKED = [
    ("hoploom tr", ["train"]),
    ("hoploom evaluate run --split t", ["test", "train"]),
    ("hoploom train run.toml --proc", ["--processes"]),
    ("hoploom import ", ["glt", "npz", "ogb"]),
    ("hoploom import glt graph --lab", ["--labels"]),
]
EMPTY = ' ""'  # the word that begins behind a space


def script_of(shell: str, capsys: pytest.CaptureFixture[str], folder: Path) -> Path:
    assert main(["completion", shell]) == 0
    path = folder / f"hoploom.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def in_shell(*words: str) -> list[str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_bash_completes_commands_options_and_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of("bash", capsys, tmp_path)
    ask = ";".join(
        f"COMP_WORDS=({line}{EMPTY * line.endswith(' ')}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _hoploom; "
        'echo "${COMPREPLY[*]}"'
        for line, _ in [*ASKED, ("hoploom ", []), ("hoploom train ru", [])]
    )
    *found, commands, files = in_shell("bash", "-c", f"source {script}; {ask}")
    assert [sorted(words.split()) for words in found] == [expected for _, expected in ASKED]
    assert set(COMMANDS) == set(commands.split()) - {"--help", "--version"}
    assert files == ""  # then bash itself completes names of files


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands_options_and_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of("fish", capsys, tmp_path)
    for line, expected in ASKED:
        found = [word.split("\t")[0] for word in in_shell("fish", "-c", f"source {script}; complete -C '{line}'")]
        assert set(expected) <= set(found), line


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_commands_options_and_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a terminal of zsh's own: the line, and a tabulator behind it."""
    script = script_of("zsh", capsys, tmp_path)
    for line, expected in [("hoploom tra", "train"), ("hoploom train run.toml --proc", "--processes")]:
        ask = f"""
            zmodload zsh/zpty
            zpty shell zsh -f -i
            zpty -w shell 'autoload -Uz compinit; compinit -u -d {tmp_path}/dump; source {script}; echo re""ady'
            zpty -r shell answer '*ready*'
            zpty -w -n shell '{line}'$'\\t'
            zpty -r shell answer '*{expected}*'
            print -r -- "$answer"
            zpty -d shell"""
        assert expected in "\n".join(in_shell("zsh", "-f", "-c", ask))  # else the time is up
