"""`hoploom doctor`: a sound machine passes, and each fault is named with what to type."""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hoploom.cli import doctor, main

NAMES = {"python", "hoploom", "torch", "core", "cores", "memory", "/dev/shm", "io_uring", "ports", "host name", "clock"}


def test_it_looks_at_everything_once_and_says_so_twice(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    out, err = capsys.readouterr()
    told = json.loads(out)
    found = {check["name"]: check for check in told["checks"]}
    assert set(found) >= NAMES
    assert len(found) == len(told["checks"])
    assert told["ok"] == (code == 0) == all(check["status"] != "wrong" for check in told["checks"])
    assert all(check["fix"] for check in told["checks"] if check["status"] == "wrong")
    assert found["core"]["status"] == "ok"
    assert all(check["found"] in err for check in told["checks"])


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise OSError(99, "not here")


@pytest.mark.parametrize(
    ("patched", "look", "fix"),
    [
        ((os, "statvfs", refuse), doctor._shared_memory, "mount -t tmpfs"),
        ((socket, "create_server", refuse), doctor._loopback, "ip link set lo up"),
        ((socket, "gethostbyname", refuse), doctor._host_name, ">> /etc/hosts"),
        ((time, "time", lambda: 0.0), doctor._clock, "timedatectl set-ntp true"),
        ((doctor, "LEAST_MEMORY", 1e18), doctor._memory, "--memory 500MB"),
        ((doctor, "LEAST_SHARED", 1e18), doctor._shared_memory, "--shm-size=1g"),
        ((doctor, "find_spec", lambda name: None), doctor._core, "--force-reinstall"),
        ((doctor, "import_module", lambda name: __import__("no_such_module")), doctor._core, "--force-reinstall"),
        ((doctor, "import_module", refuse), doctor._core, "--force-reinstall"),
    ],
)
def test_what_is_wrong_is_told_with_what_to_type(
    patched: tuple[Any, str, Any], look: Any, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*patched)
    check = look()
    assert check.status == "wrong"
    assert fix in check.fix


def test_what_cannot_be_imported_is_one_line_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, look in (("torch", doctor._gpus), ("packaging.requirements", doctor._packages)):
        monkeypatch.setitem(sys.modules, name, None)
        (check,) = look()
        assert check.status == "wrong"
        assert check.fix.endswith(name.partition(".")[0])


@pytest.mark.parametrize(
    ("limit", "usage"), [("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")]
)
def test_free_memory_is_what_the_limit_of_the_container_leaves(
    limit: str, usage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that the kernel keeps in memory do not count: it drops them where a program wants the room."""
    contents = {"meminfo": "MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\n", limit: "8000000000\n"}
    contents |= {usage: "7000000000\n", "memory.stat": "active_file 5\ninactive_file 2000000000\n"}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(doctor, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(doctor, "group_files", lambda *_: [tmp_path / limit, tmp_path / "absent"])
    assert doctor._memory() == doctor.Check("memory", "ok", "3.00 GB free of 8.00 GB")
    monkeypatch.setattr(doctor, "MEMORY", tmp_path / "absent")
    assert doctor._memory().status == "note"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_are_hidden_are_named_so(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    (check,) = doctor._gpus()
    assert (check.status, check.fix) == ("note", "unset CUDA_VISIBLE_DEVICES")
    assert f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}" in check.found


def test_a_package_that_is_missing_is_wrong_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("tqdm", "pymetis") else known(name))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "wrong  tqdm" in out
    assert "type: pip install 'tqdm>=" in out
    assert "to change it: pip install 'hoploom[metis]', if you need it" in out
    assert out.endswith("1 wrong: tqdm\n")
