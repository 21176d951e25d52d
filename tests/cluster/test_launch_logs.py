"""--logs: what every process prints is in a file of its own, beside the terminal."""

from pathlib import Path

import pytest
from support.launched import launched

from hoploom.cli import main

PROGRAMS = {
    "a/server": ["print:loading", "serve:127.0.0.1:7700", "sleep:100"],
    "a/trainers": ["print:[default0]:epoch 1", "complain:[default1]:no such column", "print:[default0]:epoch 2"],
}


def test_every_process_has_a_file_named_by_host_role_and_rank(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    code, out, err = launched(tmp_path, PROGRAMS, logs=str(logs))
    assert code == 0
    assert err.splitlines()[0] == f"hoploom: every process logs to a file of its own in {logs}"
    assert "a/trainer-0 | epoch 1" in [" ".join(line.split()) for line in out.splitlines()]
    found = {path.name: path.read_text().splitlines() for path in logs.iterdir()}
    assert {name: lines[1:] for name, lines in found.items()} == {
        "a-server.log": ["loading", '{"ready": "127.0.0.1:7700", "parts": [0]}'],
        "a-trainer-0.log": ["epoch 1", "epoch 2"],
        "a-trainer-1.log": ["no such column"],
    }
    assert found["a-trainer-1.log"][0].startswith("--- a/trainer-1, launched 2")


def test_a_second_launch_adds_to_the_files_of_the_first(tmp_path: Path) -> None:
    for word in ("first", "second"):
        assert launched(tmp_path, {"a/trainers": [f"print:{word}"]}, logs=str(tmp_path / "logs"))[0] == 0
    lines = (tmp_path / "logs" / "a-trainers.log").read_text().splitlines()
    assert [line for line in lines if not line.startswith("---")] == ["first", "second"]


def test_logs_that_cannot_be_written_hold_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "logs" / "a-trainers.log").mkdir(parents=True)
    code, out, err = launched(tmp_path, {"a/trainers": ["print:one", "print:two"]}, logs=str(tmp_path / "logs"))
    assert (code, out) == (0, "a/trainers | one\na/trainers | two\n")
    assert err.count(f"hoploom: warning: cannot write logs in {tmp_path / 'logs'} any more: ") == 1


def test_a_folder_that_cannot_be_made_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.toml").write_text('hosts = ["127.0.0.1"]\nmode = "none"')
    (tmp_path / "file").touch()
    words = ["launch", "--logs", str(tmp_path / "file"), str(tmp_path / "cluster.toml")]
    assert main([*words, "--", "train", "run.toml"]) == 2
    assert f"--logs is {tmp_path / 'file'}, which cannot be made" in capsys.readouterr().err
    assert main([*words[:2], str(tmp_path / "new"), words[3], "--executor", "slurm", "--", "train", "run.toml"]) == 2
    assert "--logs is for the executors local and ssh, this one is slurm" in capsys.readouterr().err
