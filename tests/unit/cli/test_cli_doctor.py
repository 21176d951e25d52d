"""`hoploom doctor`: a sound installation passes, and each fault is named with what to type."""

import json
import sys
from typing import Any, NoReturn

import pytest

from hoploom.cli import main, reporting


def test_the_checks_are_the_same_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    out, err = capsys.readouterr()
    told = json.loads(out)
    found = {check["name"]: check for check in told["checks"]}
    assert set(found) >= {"python", "hoploom", "torch", "core", "/dev/shm"}
    assert len(found) == len(told["checks"])
    assert told["ok"] == (code == 0) == all(check["status"] != "wrong" for check in told["checks"])
    assert found["core"]["status"] == "ok"
    assert all(check["found"] in err for check in told["checks"])


def refuse(*_: Any) -> NoReturn:
    raise OSError(99, "not here")


@pytest.mark.parametrize(
    ("name", "value", "look", "fix"),
    [
        ("MIN_SHARED_MEMORY", 1e18, lambda: list(reporting._checks()), "--shm-size=1g"),
        ("find_spec", lambda name: None, reporting._core, "--force-reinstall"),
        ("import_module", refuse, reporting._core, "--force-reinstall"),
    ],
)
def test_what_is_wrong_is_told_with_what_to_type(
    name: str, value: Any, look: Any, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, name, value)
    found = look()
    wrong = [check for check in (found if isinstance(found, list) else [found]) if check.status == "wrong"]
    assert [fix in check.fix for check in wrong] == [True]


def test_what_cannot_be_imported_is_one_line_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, look in (("torch", reporting._gpus), ("packaging.requirements", reporting._packages)):
        monkeypatch.setitem(sys.modules, name, None)
        (check,) = look()
        assert check.status == "wrong"
        assert check.fix.endswith(name.partition(".")[0])


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_are_hidden_are_named_so(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    (check,) = reporting._gpus()
    assert (check.status, check.fix) == ("note", "unset CUDA_VISIBLE_DEVICES")
    assert f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}" in check.found


def test_a_package_that_is_missing_is_wrong_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = reporting._version
    monkeypatch.setattr(reporting, "_version", lambda name: None if name in ("tqdm", "pyspark") else known(name))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "wrong  tqdm" in out
    assert "type: pip install 'tqdm>=" in out
    assert "to change it: pip install 'hoploom[spark]', if you need it" in out
    assert out.endswith("1 wrong: tqdm\n")
