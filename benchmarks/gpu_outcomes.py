"""A plugin of pytest for benchmarks/gpu_tests.py: writes down what every test came to as soon as it has ended.

A kernel that reads astray leaves its process without a device, and every later test in it fails. So the session ends
with the first test that does. Tests that the file names already are left out: a next session goes on from there.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

KEPT = 2000  # characters of a failure
THROUGH = {"through": True}  # the last line, once no test is left


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", required=True, help="the file to add lines of JSON to")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(Path(config.getoption("outcomes"))))


class Outcomes:
    """Two lines for each test: that it has begun, and what it came to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._worst, self._said = "passed", ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"test": report.nodeid, "outcome": "failed", "seconds": 0.0, "said": _end_of(report)})

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        begun = {json.loads(line).get("test") for line in lines}
        items[:] = [item for item in items if item.nodeid not in begun]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._worst, self._said = "passed", ""
        self._write({"test": item.nodeid})
        began = time.perf_counter()
        done: Any = yield
        seconds = round(time.perf_counter() - began, 2)
        self._write({"test": item.nodeid, "outcome": self._worst, "seconds": seconds, "said": self._said})
        if self._worst == "failed" and _is_lost():
            item.session.shouldstop = "the device is lost to this process"
        return done  # type: ignore[no-any-return]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.skipped and self._worst == "passed"):
            self._worst = "failed" if report.failed else "skipped"
            self._said += _end_of(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not session.shouldstop:
            self._write(THROUGH)

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _end_of(report: Any) -> str:
    return str(report.longrepr)[-KEPT:]


def _is_lost() -> bool:
    """Whether the device answers this process no more; one that has imported no torch has asked for none."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.ones(1, device="cuda").sum().item()
    except RuntimeError:
        return True
    return False
